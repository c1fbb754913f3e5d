"""The random Hadamard transform of 16-element chunks, as an fp32 butterfly."""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import HADAMARD, cdiv

__all__ = ["hadamard", "hadamard_matrix"]


def signs(mask: int, device: torch.device | str | None = None) -> Tensor:
    """+1 or -1 for each of the 16 inputs: bit i of `mask` flips input i."""
    bits = torch.arange(HADAMARD, device=device)  # there, so that nothing is copied from the host
    return 1.0 - 2.0 * (torch.full_like(bits, mask) >> bits & 1)


def hadamard(x: Tensor, mask: int) -> Tensor:
    """`x[R, C]` -> `[R, 16*ceil(C/16)]`: each chunk times `diag(signs) H16 / 4`, in fp32.

    The order is part of the specification: flip signs; butterflies at distance 1, 2, 4, 8, each
    `(a, b) -> (a + b, a - b)`; multiply by 1/4. A tail chunk is zero-padded first and keeps all 16
    outputs: zeros do not survive the transform, so dropping any would lose information.
    """
    rows, columns = x.shape
    chunks = cdiv(columns, HADAMARD)
    x = torch.nn.functional.pad(x.to(torch.float32), (0, chunks * HADAMARD - columns))
    v = x.reshape(rows, chunks, HADAMARD) * signs(mask, x.device)
    for distance in (1, 2, 4, 8):
        pairs = v.reshape(rows, chunks, HADAMARD // (2 * distance), 2, distance)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        v = torch.stack((a + b, a - b), dim=-2).reshape(rows, chunks, HADAMARD)
    return (v * 0.25).reshape(rows, chunks * HADAMARD)


def hadamard_matrix(mask: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """`diag(signs) H16 / 4`: orthogonal, and exact in every dtype we have."""
    return hadamard(torch.eye(HADAMARD), mask).to(dtype)
