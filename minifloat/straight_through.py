"""Quantize and dequantize as identities to autograd: the gradient passes unchanged, or does not
come at all (of a weight whose gradient `main_grad` takes, say)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["dequantize", "quantize", "run"]


def run(quantizer: Any, x: Tensor, dtype: torch.dtype | None, seed: Any) -> Any:
    """`quantizer.quantize_impl(x)` with the options given: a user's need not know the others."""
    options = {k: v for k, v in (("dtype", dtype), ("seed", seed)) if v is not None}
    return quantizer.quantize_impl(x, **options)


class _Quantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, quantizer: Any, dtype: torch.dtype | None, seed: Any) -> Any:
        _no_zeros(ctx)
        return run(quantizer, x, dtype, seed)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, None, None, None]:
        return grads[0], None, None, None


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Any, dtype: torch.dtype) -> Tensor:
        _no_zeros(ctx)
        ctx.dtype = t.dtype
        return t._dequantize(dtype)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, None]:
        return None if grads[0] is None else grads[0].to(ctx.dtype), None


def _no_zeros(ctx: Any) -> None:
    """Have PyTorch make no zeros of a gradient that does not come. Dynamo knows no such call."""
    if not torch.compiler.is_compiling():
        ctx.set_materialize_grads(False)


def quantize(x: Tensor, quantizer: Any, dtype: torch.dtype | None, seed: Tensor | None) -> Any:
    """`quantizer.quantize_impl(x)`, differentiable."""
    return _Quantize.apply(x, quantizer, dtype, seed)  # type: ignore[no-untyped-call]


def dequantize(t: Any, dtype: torch.dtype) -> Tensor:
    """`t._dequantize(dtype)`, differentiable."""
    return _Dequantize.apply(t, dtype)  # type: ignore[no-any-return,no-untyped-call]
