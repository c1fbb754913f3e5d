"""The column copy of a square-tiled format from its row copy, without the source."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from ..formats import Cast, cdiv
from .elements import pack, unpack

__all__ = ["flip"]


def flip(data: Tensor, scale: Tensor, cast: Cast, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Row copy (data, scale) of `[M, K]` -> column copy: codes and tile scales transposed.

    Exact: a square tile has one scale in both directions. The same call on the transposed shape
    turns a column copy into a row copy, where both are stored contraction-last.
    """
    fmt = cast.format
    if not fmt.square or fmt.tile is None or fmt.element is None or fmt.scale_tile is None:
        raise ValueError(f"{fmt.name}: only square tiles can be flipped without the source")
    m, k = shape
    codes = unpack(data, k) if fmt.element.per_byte == 2 else data
    flipped = codes.t().contiguous()
    flipped = pack(flipped) if fmt.element.per_byte == 2 else flipped
    # One row of stored scales per tile row, transposed, once for each row of its new tile.
    step = fmt.tile[0] // fmt.scale_tile[0]
    tiles = scale[: cdiv(m, fmt.scale_tile[0]) : step, : cdiv(k, fmt.tile[1])].t()
    tiles = tiles.repeat_interleave(step, dim=0)[: cdiv(k, fmt.scale_tile[0])]
    rows, cols = fmt.scale_shape(k, m)
    out = pad(tiles, (0, cols - tiles.shape[1], 0, rows - tiles.shape[0])).contiguous()
    if not fmt.col_transposed:
        return data.clone(), out.t().contiguous()
    return flipped, out
