"""From a cast to the grouped kernels that serve it, by the data of its format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..formats import Cast
from ..layout import parts
from . import ragged, ragged_fp4
from .members import ENTRY, WIDTH, tables, tile_count
from .ragged import PARTS, Group

__all__ = ["quantize", "quantize_scaled", "spread", "spread_scaled", "supports"]


def supports(row: Cast | None, col: Cast | None) -> bool:
    """Whether one launch makes both copies."""
    for cast in (row, col):
        if cast is None:
            continue
        if cast.format.two_level:
            if not ragged_fp4.supports(cast):
                return False
        elif cast.format.element is None:
            return False
    if row is not None and row.transforms:
        return False
    if row is None or col is None or row == col:
        return True
    return row.format_name == col.format_name and row.format.two_level


def spread(
    x: Tensor,
    tiles: Tensor,
    num: int,
    row: Cast | None,
    col: Cast | None,
    seed: Tensor | None,
    out: Mapping[str, Tensor],
) -> None:
    """Fill the buffers of `spread.quantize`."""
    _fill(x, Group(num, tiles, None, _pitch(out, col)), row, col, seed, out, (0, 0, 0))


def spread_scaled(
    x: Tensor, tiles: Tensor, num: int, scales: Tensor, cast: Cast, out: Mapping[str, Tensor]
) -> None:
    """Fill the buffers of `spread.quantize_scaled`; "amax" is a running maximum."""
    group = Group(num, tiles, None, _pitch(out, cast))
    _scaled(x, group, scales, cast, out, out["scale"], out["amax"])


def quantize(
    x: Tensor,
    sizes: Tensor | None,
    num: int,
    row: Cast | None,
    col: Cast | None,
    seed: Tensor | None,
    out: list[Tensor],
) -> None:
    """Fill the buffers of `ragged.quantize`, in its order."""
    found = dict(zip([p.name for p in parts((1, 1), row, col)], out, strict=False))
    if len(out) > len(found):
        found |= {"amax": out[-2], "encode": out[-1]}
    group, steps = _flat(x, sizes, num, row, col)
    _fill(x, group, row, col, seed, found, steps)


def quantize_scaled(
    x: Tensor,
    sizes: Tensor | None,
    num: int,
    scales: Tensor,
    cast: Cast,
    row: bool,
    col: bool,
    out: list[Tensor],
) -> None:
    """Fill the buffers of `ragged.quantize_scaled`, in its order; the last is a running maximum."""
    casts = cast if row else None, cast if col else None
    found = dict(zip([p.name for p in parts((1, 1), *casts)], out, strict=False))
    group, _ = _flat(x, sizes, num, *casts)
    _scaled(x, group, scales, cast, found, found["scale"], out[-1])


def _scaled(
    x: Tensor,
    group: Group,
    scales: Tensor,
    cast: Cast,
    out: Mapping[str, Tensor],
    scale_inv: Tensor,
    seen: Tensor,
) -> None:
    ragged.cast_scaled(
        x,
        group,
        cast,
        scale=scales,
        amax=seen,
        row=out.get("row_data"),
        col=out.get("col_data"),
        scale_inv=scale_inv,
    )


def _fill(
    x: Tensor,
    group: Group,
    row: Cast | None,
    col: Cast | None,
    seed: Tensor | None,
    out: Mapping[str, Tensor],
    steps: tuple[int, int, int],
) -> None:
    cast = row if row is not None else col
    assert cast is not None
    if cast.format.two_level:
        ragged_fp4.cast_fp4(x, group, row=row, col=col, out=out, steps=steps, seed=seed)
    elif cast.format.tile is None:
        ragged.cast_current(
            x,
            group,
            cast,
            row=out.get("row_data"),
            col=out.get("col_data"),
            scale_inv=out["scale"],
            amax=out["amax"],
            scale=out.get("encode"),
        )
    else:
        named = {name: out.get(name) for name in PARTS}
        ragged.cast_blocks(x, group, cast, **named, steps=(steps[0], steps[2]))


def _pitch(out: Mapping[str, Tensor], col: Cast | None) -> int:
    """Columns of a spread column copy, which a format in source orientation does not need."""
    data = out.get("col_data")
    if data is None or col is None:
        return 0
    element = col.format.element
    assert element is not None
    return data.shape[-1] * element.per_byte


def _flat(
    x: Tensor, sizes: Tensor | None, num: int, row: Cast | None, col: Cast | None
) -> tuple[Group, tuple[int, int, int]]:
    """Where the parts of members go that lie back to back."""
    m, k = x.shape
    if sizes is None:
        made = {p.name: _numel(p.shape) for p in parts((m // num, k), row, col)}
        names = ("row_scale", "col_data", "col_scale")
        first, second, third = (made.get(name, 0) for name in names)
        return Group(num), (first, second, third)
    table = torch.empty(num, WIDTH, dtype=torch.int32, device=x.device)
    tiles = torch.empty(tile_count(m, num), ENTRY, dtype=torch.int32, device=x.device)
    tables(sizes, table, tiles, m)
    # The shape rules are integer arithmetic, and a tensor of sizes goes through them like one.
    real = (table[:, 1] - table[:, 0]).long()
    at = torch.zeros(len(PARTS), num, dtype=torch.int64, device=x.device)
    for p in parts((real, k), row, col):  # type: ignore[arg-type]
        if p.name in PARTS:
            count: Any = _numel(p.shape)
            at[PARTS.index(p.name)] = torch.cumsum(count, 0) - count
    return Group(num, tiles, at), (0, 0, 0)


def _numel(shape: tuple[int, ...]) -> int:
    n = 1
    for d in shape:
        n = n * d
    return n
