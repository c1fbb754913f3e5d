"""Tensors as operations read them: plain, and as matrices."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...tensors import QuantizedTensorStorage

__all__ = ["folded", "matrix", "plain"]


def plain(x: Any) -> Tensor:
    """The values of a tensor that may be quantized."""
    if isinstance(x, QuantizedTensorStorage):
        return x.dequantize()
    return x  # type: ignore[no-any-return]


def folded(x: Tensor) -> Tensor:
    """`x[..., K]` as `[M, K]`."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def matrix(x: Any) -> Tensor:
    """The values of a tensor that may be quantized, as `[M, K]`."""
    return folded(plain(x))
