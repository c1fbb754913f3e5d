"""The tensors of a case: the same for every provider.

Normal numbers, never zeros or a ramp: products are limited by power, which depends on the data.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .cases import KINDS, Case

__all__ = ["EPS", "Work", "dtype_name", "make_work"]

WEIGHT_STD, GRAD_STD = 0.02, 1e-3
EPS = 1e-5  # of norms


@dataclass(frozen=True)
class Work:
    """Input, output's gradient and weights by name; of experts also their rows.

    Weights are `[out, in]`; of experts `[experts, out, in]`. A norm's weight is ones.
    """

    case: Case
    x: Tensor
    grad: Tensor
    weights: dict[str, Tensor]
    sizes: Tensor | None = None  # int64, on the device
    ends: Tensor | None = None  # int32, on the device: where each expert's rows end

    @property
    def device(self) -> torch.device:
        return self.x.device

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype


def dtype_name(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]


def make_work(case: Case, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Work:
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, std: float) -> Tensor:
        t = torch.empty(shape, dtype=dtype, device=device)
        return t.normal_(0.0, std, generator=generator)

    tokens, k = case.sizes[:2]
    x = normal(tokens, k, std=1.0).requires_grad_()
    layers = case.layers
    grad = normal(tokens, layers[-1].n, std=GRAD_STD)
    names = KINDS[case.kind].weights
    grouped = case.kind == "grouped"
    weights = {
        name: normal(*((case.experts,) if grouped else ()), layer.n, layer.k, std=WEIGHT_STD)
        for name, layer in zip(names, layers, strict=True)
    }
    if not grouped:
        return Work(case, x, grad, weights)
    sizes = torch.tensor(case.rows, dtype=torch.int64, device=device)
    return Work(case, x, grad, weights, sizes, torch.cumsum(sizes, 0, dtype=torch.int32))
