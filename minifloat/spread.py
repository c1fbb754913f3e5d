"""Casts of matrices whose rows come in groups, as grouped products read them: members spread out.

    row copy       that of `x[M, K]`, each row under its member's scale
    column copy    that of x with its rows spread out, so that each member begins at a multiple of
                   PAD, which every block of the format divides, and zeros follow up to the next

A member's codes and scales are those of the member by itself, bit for bit; what lies behind the
last place is unspecified. Sizes stay on the device: the column copy has room for `width` rows,
whatever they are. (`ragged` has the same casts with each member's parts in one piece.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import casting, dispatch, env, library, ragged
from .formats import HADAMARD, Cast, cdiv, rup
from .inputs import check_input, check_seed
from .layout import Part, part_names, parts, shares_scale
from .ragged import as_lines

__all__ = [
    "PAD",
    "Members",
    "as_lines",
    "dequantize",
    "members",
    "quantize",
    "quantize_scaled",
    "views",
    "width",
]

# Every block divides it, and so does every step of a product along the contraction: none of them
# is partial. It costs experts of odd sizes half of it in zeros, each.
PAD = 128


class Members(NamedTuple):
    """How rows are grouped: `sizes[E]`, and the tables that kernels made of them.

    `table[e] = (start, end, place, place end, the e-th by size)`; `tiles` is empty where no kernel
    reads it.
    """

    sizes: Tensor
    table: Tensor
    tiles: Tensor

    @property
    def num(self) -> int:
        return self.sizes.shape[0]


def width(rows: int, num: int) -> int:
    """Rows of a matrix of `num` members, spread out: enough for any sizes."""
    return rup(rows, PAD) + num * PAD


def members(sizes: Tensor, rows: int) -> Members:
    """The members of `[rows, K]`. Nothing waits for the device."""
    front = library.op("group_members") if library.traced() else _members
    return Members(sizes, *front(sizes, rows))


def _members(sizes: Tensor, rows: int) -> list[Tensor]:
    table, tiles = _members_fake(sizes, rows)
    if tiles.shape[0] > 0:
        from .kernels import members as kernel

        kernel.tables(sizes, table, tiles, rows)
        return [table, tiles]
    real = sizes.clamp(0, rows)  # of wrong ones, no sum leaves int64
    ends = real.cumsum(0)
    starts = (ends - real).clamp(max=rows)
    ends = ends.clamp(max=rows)
    room = ((ends - starts + PAD - 1) // PAD * PAD).clamp(min=PAD)
    after = room.cumsum(0)
    order = torch.argsort(ends - starts, descending=True, stable=True)
    table.copy_(torch.stack((starts, ends, after - room, after, order), 1))
    return [table, tiles]


def _members_fake(sizes: Tensor, rows: int) -> list[Tensor]:
    num = sizes.shape[0]
    tiles = (0, 1)
    if env.runs_kernels(sizes):
        from .kernels.members import ENTRY, tile_count

        tiles = (tile_count(rows, num), ENTRY)
    return [sizes.new_empty(shape, dtype=torch.int32) for shape in ((num, 5), tiles)]


# ------------------------------------------------------------------------------------------ layout
def _parts(m: int, k: int, num: int, row: Cast | None, col: Cast | None) -> list[Part]:
    """The buffers, in the order and with the names of `layout.parts`."""
    row, col = (None if c is None else as_lines(c) for c in (row, col))
    of_row = {p.name: p for p in parts((m, k), row, None)}
    of_col = {p.name: p for p in parts((width(m, num), k), None, col)}
    out = []
    for part in (*of_row.values(), *of_col.values()):
        per_member = part.name in ("scale", "row_amax", "col_amax")
        if part.name == "scale" and col is not None and part is of_row.get("scale"):
            continue
        out.append(part._replace(shape=(num,)) if per_member else part)
    return out


def views(
    found: dict[str, Tensor],
    e: int,
    at: tuple[int, int, int, int],
    row: Cast | None,
    col: Cast | None,
) -> dict[str, Tensor]:
    """The parts of member e, whose entry in the table is `at`, in the buffers by their names."""
    start, end, place, _ = at
    m = end - start
    out = {}
    for name, buffer in found.items():
        cast = row if name.startswith("row_") else col if name.startswith("col_") else None
        if cast is None or name.endswith("_amax"):
            out[name] = buffer.narrow(0, e, 1)
            continue
        _, per, tile, _, scale_transposed, col_transposed, *_ = as_lines(cast).layout
        if name.startswith("row_"):
            axis = 1 if name == "row_scale" and scale_transposed else 0
            out[name] = buffer.narrow(axis, start, m)
            continue
        kept = rup(m, HADAMARD) if cast.transforms else m
        first, count = place, kept
        if name == "col_scale":
            first, count = place // tile[1], cdiv(kept, tile[1])
        elif per > 1:
            first, count = place // per, cdiv(kept, per)
        lies = col_transposed != (name == "col_scale" and scale_transposed)
        out[name] = buffer.narrow(1 if lies else 0, first, count)
    return out


def _fake(x: Tensor, num: int, row: Cast | None, col: Cast | None) -> list[Tensor]:
    return [
        torch.empty(p.shape, dtype=p.dtype, device=x.device)
        for p in _parts(x.shape[0], x.shape[1], num, row, col)
    ]


# ---------------------------------------------------------------------------------------- quantize
def quantize(
    x: Tensor,
    members: Members,
    row: Cast | None,
    col: Cast | None,
    *,
    seed: Tensor | None = None,
) -> dict[str, Tensor]:
    """The buffers by the names of `layout.parts`, a scale or an amax `[E]` where a member has one;
    such scales also come as `amax[E]`, which they are from.

    Member e is rounded stochastically with `[seed, offset + e]`.
    """
    check_input(x, row, col)
    check_seed(seed)
    if any([c is not None and c.layout[9] for c in (row, col)]):  # noqa: C419  (traced)
        raise ValueError(
            "row_scaled: groups have one amax for each member; cast members apart, or use a recipe "
            "without row scaling"
        )
    arguments = (x, *members, row, col, seed)
    made = library.op("spread_quantize")(*arguments) if library.traced() else _quantize(*arguments)
    return dict(zip(_names(row, col), made, strict=True))


def _names(row: Cast | None, col: Cast | None) -> list[str]:
    names = list(part_names(row, col))
    return [*names, "amax"] if _has_scale(row, col) else names


def _has_scale(row: Cast | None, col: Cast | None) -> bool:
    return any(c is not None and shares_scale(c) for c in (row, col))


def _quantize(  # noqa: PLR0913  (the operator's)
    x: Tensor,
    sizes: Tensor,
    table: Tensor,
    tiles: Tensor,
    row: Cast | None,
    col: Cast | None,
    seed: Tensor | None,
) -> list[Tensor]:
    made = _quantize_fake(x, sizes, table, tiles, row, col, seed)
    found = dict(zip(_names(row, col), made, strict=True))
    fused = ragged.kernels(x, row, col)
    if fused is not None:
        fused.spread(casting.matrix(x), tiles, sizes.shape[0], row, col, seed, found)
        return made
    amax = found.pop("amax", None)
    for e, member, place in _each(x, table, found, row, col):
        of_member = None if seed is None else torch.stack((seed[0], seed[1] + e))
        parts_of = dispatch.quantize(member, row, col, seed=of_member, keep_amax=amax is not None)
        if amax is not None:
            amax[e : e + 1].copy_(parts_of[-1])
        _put(place, parts_of, (member.shape[0], x.shape[1]), row, col)
    return made


def _quantize_fake(x: Tensor, sizes: Tensor, *rest: Any) -> list[Tensor]:
    row, col = rest[2:4]
    num = sizes.shape[0]
    extra = [x.new_empty(num, dtype=torch.float32)] if _has_scale(row, col) else []
    return [*_fake(x, num, row, col), *extra]


def _each(
    x: Tensor, table: Tensor, found: dict[str, Tensor], row: Cast | None, col: Cast | None
) -> Any:
    """(index, rows, views of the parts) of each member, the column buffers cleared before: the
    rule, which waits for the device."""
    for name, buffer in found.items():
        if name.startswith("col_"):
            buffer.zero_()
    for e, at in enumerate(table.tolist()):
        yield e, x[at[0] : at[1]], views(found, e, at[:4], row, col)


def _put(
    place: dict[str, Tensor],
    made: list[Tensor],
    shape: tuple[int, int],
    row: Cast | None,
    col: Cast | None,
) -> None:
    """A member's parts into their places, without what pads them."""
    for part, one in zip(parts(shape, row, col), made, strict=False):
        view = place[part.name]
        cast = row if part.name.startswith("row_") else col
        if part.name.endswith("_scale") and cast is not None and as_lines(cast) is not cast:
            lines = shape[0] if part.name.startswith("row_") else shape[1]
            one = _lined(one, cast)[:, :lines]
            view = view[:, :lines]  # what pads them is zero
        view.copy_(one[tuple(slice(n) for n in view.shape)])


def _lined(scale: Tensor, cast: Cast) -> Tensor:
    """Scales of square blocks `[R/T, C/T]` -> `[C/T, R]`, one for each row."""
    assert cast.format.tile is not None
    return scale.t().repeat_interleave(cast.format.tile[0], 1)


# --------------------------------------------------------------------------------- delayed scaling
def quantize_scaled(
    x: Tensor,
    members: Members,
    scales: Tensor,
    cast: Cast,
    *,
    row: bool,
    col: bool,
    seen: Tensor | None = None,
) -> dict[str, Tensor]:
    """As `quantize`, member e under `scales[e]`; "amax" is what was seen.

    `seen[E]`, if given, is a running maximum of that.
    """
    check_input(x, cast if row else None, cast if col else None)
    arguments = (x, *members, scales, cast, row, col)
    if library.traced():
        made = library.op("spread_quantize_scaled")(*arguments)
        if seen is not None:
            seen.copy_(torch.maximum(seen, made[-1]))
    else:
        made = _quantize_scaled(*arguments, seen)
    return dict(zip(_names(cast if row else None, cast if col else None), made, strict=True))


def _quantize_scaled(  # noqa: PLR0913
    x: Tensor,
    sizes: Tensor,
    table: Tensor,
    tiles: Tensor,
    scales: Tensor,
    cast: Cast,
    row: bool,
    col: bool,
    seen: Tensor | None = None,
) -> list[Tensor]:
    made = _quantize_scaled_fake(x, sizes, table, tiles, scales, cast, row, col)
    one, other = cast if row else None, cast if col else None
    made[-1] = made[-1].zero_() if seen is None else seen
    found = dict(zip(_names(one, other), made, strict=True))
    fused = ragged.kernels(x, one, other)
    if fused is not None:
        fused.spread_scaled(casting.matrix(x), tiles, sizes.shape[0], scales, cast, found)
        return made
    seen = found.pop("amax")
    for e, member, place in _each(x, table, found, one, other):
        of_member = dispatch.quantize_scaled(
            member, scales[e : e + 1], seen[e : e + 1], cast, row=row, col=col
        )
        _put(place, of_member, (member.shape[0], x.shape[1]), one, other)
    return made


def _quantize_scaled_fake(*args: Any) -> list[Tensor]:
    cast, row, col = args[5:]
    return _quantize_fake(*args[:4], cast if row else None, cast if col else None)


# -------------------------------------------------------------------------------------- dequantize
def dequantize(
    data: Tensor,
    scale: Tensor | None,
    amax: Tensor | None,
    members: Members,
    cast: Cast,
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> Tensor:
    """The values of a row copy, as those of each member by itself. Nothing waits for the device."""
    arguments = (data, scale, amax, members.table, cast, list(shape), dtype)
    if library.traced():
        return library.op("spread_dequantize")(*arguments)  # type: ignore[no-any-return]
    return _dequantize(*arguments)


def _dequantize(
    data: Tensor,
    scale: Tensor | None,
    amax: Tensor | None,
    table: Tensor,
    cast: Cast,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    number = torch.arange(shape[0], dtype=torch.int32, device=data.device)
    # Rows that no member has, where sizes are wrong, count as the last one's.
    of_row = torch.searchsorted(table[:, 1].contiguous(), number, right=True)
    of_row = of_row.clamp(max=table.shape[0] - 1)
    return ragged.dequantize_lines(data, scale, amax, of_row, cast, shape, dtype)


def _dequantize_fake(data: Tensor, *rest: Any) -> Tensor:
    shape, dtype = rest[4:]
    return data.new_empty(tuple(shape), dtype=dtype)


# --------------------------------------------------------------------------------------------- ops
_CAST = f"{Cast.__module__}.{Cast.__qualname__}"
_TABLES = "Tensor sizes, Tensor table, Tensor tiles"
library.define(
    (
        (
            "group_members(Tensor sizes, SymInt rows) -> Tensor[]",
            _members,
            _members_fake,
        ),
        (
            f"spread_quantize(Tensor x, {_TABLES}, {_CAST}? row, {_CAST}? col, Tensor? seed) "
            "-> Tensor[]",
            _quantize,
            _quantize_fake,
        ),
        (
            f"spread_quantize_scaled(Tensor x, {_TABLES}, Tensor scales, {_CAST} cast, bool row, "
            "bool col) -> Tensor[]",
            _quantize_scaled,
            _quantize_scaled_fake,
        ),
        (
            f"spread_dequantize(Tensor data, Tensor? scale, Tensor? amax, Tensor table, {_CAST} "
            "cast, SymInt[] shape, ScalarType dtype) -> Tensor",
            _dequantize,
            _dequantize_fake,
        ),
    ),
    replayed=True,
)
