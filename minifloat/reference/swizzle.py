"""The 128x4-tiled scale layout that block-scaled tensor cores read."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from ..formats import cdiv, rup

__all__ = ["swizzle", "unswizzle"]


def swizzle(scale: Tensor) -> Tensor:
    """`[R, C]` bytes, contraction last -> the same bytes, tile by tile.

    Element (i, j) moves to `((i//128)*T + j//4)*512 + (i%32)*16 + (i%128//32)*4 + j%4`, T = C/4
    after zero padding to multiples of (128, 4).
    """
    rows, cols = scale.shape
    scale = pad(scale, (0, rup(cols, 4) - cols, 0, rup(rows, 128) - rows))
    tiles = scale.reshape(cdiv(rows, 128), 4, 32, cdiv(cols, 4), 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(scale.shape)


def unswizzle(scale: Tensor) -> Tensor:
    """The inverse of `swizzle` on a padded matrix."""
    rows, cols = scale.shape
    tiles = scale.reshape(rows // 128, cols // 4, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(scale.shape)
