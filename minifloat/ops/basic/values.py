"""Tensors as operations read them: plain, and as matrices."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor

from ...scaled import Scaled
from ...tensors import QuantizedTensorStorage

__all__ = ["folded", "matrix", "plain", "summed"]

Matrix = TypeVar("Matrix", Tensor, Scaled)


def plain(x: Any) -> Tensor:
    """The values of a tensor that may be quantized."""
    if isinstance(x, QuantizedTensorStorage):
        return x.dequantize()
    return x  # type: ignore[no-any-return]


def folded(x: Matrix) -> Matrix:
    """`x[..., K]` as `[M, K]`."""
    return x if len(x.shape) == 2 else x.reshape(-1, x.shape[-1])


def summed(grad: Any, shape: tuple[int, ...] | None) -> Any:
    """`grad`, of a tensor of this shape that may have been broadcast, as autograd sums it.

    None says nothing; and what a shape cannot be broadcast to is its owner's business.
    """
    if shape is None or not isinstance(grad, Tensor | QuantizedTensorStorage):
        return grad
    made = tuple(grad.shape)
    if made == shape or len(made) < len(shape):
        return grad
    dims = zip(reversed(shape), reversed(made), strict=False)
    if any([n != m and n != 1 for n, m in dims]):  # noqa: C419  (2.11 traces lists)
        return grad
    return plain(grad).sum_to_size(shape)


def matrix(x: Any) -> Tensor:
    """The values of a tensor that may be quantized, as `[M, K]`."""
    return folded(plain(x))
