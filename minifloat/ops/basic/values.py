"""Tensors as operations read them: plain, and as matrices."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor

from ...scaled import Scaled
from ...tensors import QuantizedTensorStorage

__all__ = ["folded", "matrix", "plain"]

Matrix = TypeVar("Matrix", Tensor, Scaled)


def plain(x: Any) -> Tensor:
    """The values of a tensor that may be quantized."""
    if isinstance(x, QuantizedTensorStorage):
        return x.dequantize()
    return x  # type: ignore[no-any-return]


def folded(x: Matrix) -> Matrix:
    """`x[..., K]` as `[M, K]`."""
    return x if len(x.shape) == 2 else x.reshape(-1, x.shape[-1])


def matrix(x: Any) -> Tensor:
    """The values of a tensor that may be quantized, as `[M, K]`."""
    return folded(plain(x))
