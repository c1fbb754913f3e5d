"""Parameters of gated layers in the order of `glu_interleave_size`, and back.

A gated activation reads `[g | l]`, or, interleaved by n, blocks of n of g and of l that take turns.
What makes them, the rows of a weight and of its bias, is ordered likewise.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["deinterleave_glu_tensor", "interleave_glu_tensor"]


def interleave_glu_tensor(tensor: Tensor, interleave_size: int, dim: int = 0) -> Tensor:
    """`[g | l]` along `dim` as blocks of `interleave_size` of g and of l that take turns."""
    return _exchanged(tensor, interleave_size, dim, halves_first=True)


def deinterleave_glu_tensor(tensor: Tensor, interleave_size: int, dim: int = 0) -> Tensor:
    """The inverse of `interleave_glu_tensor`."""
    return _exchanged(tensor, interleave_size, dim, halves_first=False)


def _exchanged(tensor: Tensor, size: int, dim: int, *, halves_first: bool) -> Tensor:
    if tensor.dim() == 0 or not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(
            f"dim: got {dim}; a dim of a tensor of shape {tuple(tensor.shape)} is needed"
        )
    length = tensor.shape[dim]
    if not hasattr(size, "__index__") or size < 1 or length % (2 * size):
        raise ValueError(
            f"interleave_size: got {size!r}; a positive number of which {length}, the length of "
            f"dim {dim}, holds an even number is needed"
        )
    blocks = length // (2 * size)
    apart = (2, blocks, size) if halves_first else (blocks, 2, size)
    dim = dim % tensor.dim()
    shape = tensor.shape
    turned = tensor.reshape(*shape[:dim], *apart, *shape[dim + 1 :]).transpose(dim, dim + 1)
    return turned.reshape(shape)
