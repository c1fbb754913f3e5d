"""Philox4x32-10, the counter-based generator behind stochastic rounding.

The random bits of an element depend on the seed, the direction and the element's place alone, so a
recompute repeats them, and CPU and GPU agree. uint32 words travel in int64 tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["philox", "uniform16"]

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF


def _mulhilo(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low words of the 64-bit product; int64 wraps, and the mask drops its sign."""
    p = b * a
    return (p >> 32) & _MASK, p & _MASK


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds of Philox4x32 on uint32 words held in int64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        hi0, lo0 = _mulhilo(_M0, c0)
        hi1, lo1 = _mulhilo(_M1, c2)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def uniform16(rows: int, columns: int, seed: Tensor, stream: int) -> Tensor:
    """One uniform `(r + 0.5) / 2**16`, r in [0, 2**16), per element of `[rows, columns]`.

    `columns` is a multiple of 8: one Philox call serves 8 consecutive elements, 16 bits each, low
    half-word first. Call n covers elements `[8n, 8n + 8)` of the row-major matrix and has the
    counter `(n mod 2**32, n div 2**32, offset mod 2**32, stream)` under the key (seed mod, div
    2**32), for `seed = tensor([seed, offset])`. The half keeps the mean: rounding is unbiased to
    2**-17 of a step.
    """
    n = torch.arange(rows * (columns // 8), device=seed.device)
    zero = torch.zeros_like(n)
    key, offset = seed[0], seed[1]
    words = philox(
        (n & _MASK, n >> 32, zero + (offset & _MASK), zero + stream),
        (zero + (key & _MASK), zero + ((key >> 32) & _MASK)),
    )
    halves = [h for w in words for h in (w & 0xFFFF, w >> 16)]
    r = torch.stack(halves, dim=-1).reshape(rows, columns)
    return (r.to(torch.float32) + 0.5) * 2.0**-16
