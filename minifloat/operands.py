"""From a matrix to what GEMMs read: both directions of it, in the form this device multiplies.

A matrix may be `Lazy`: then it is cast as it is produced, where a kernel does that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import dispatch, gradients, library, native, producers
from .formats import Cast, Operand, cdiv
from .gradients import Given
from .layout import part_names, value_parts
from .producer import Producer
from .producers import Lazy
from .scaled import Scaled
from .sums import column_sums

__all__ = ["Live", "activation_backward", "column", "one_call", "operands"]

Live = tuple[Tensor, Tensor | None]  # delayed scaling's scale, and the amax it records into


def operands(  # noqa: PLR0913  (one call, many recipes)
    x: Tensor | Lazy,
    row: Cast | None,
    col: Cast | None,
    *,
    live: Live | None = None,
    seed: Tensor | None = None,
    keep_col: bool = False,
    keep_row: bool = False,
    keep_amax: bool = False,
    amax: Tensor | None = None,
    after: Tensor | None = None,
) -> tuple[Operand | None, Operand | None]:
    """(row, column) operands of `x[M, K]`; None stays None.

    `live` casts with a given scale. `keep_col` asks for a column copy to be saved: codes, where a
    GEMM to come could do with values; `keep_row` for such a row copy, to be decoded.
    `keep_amax` keeps the amax of a tensor-wide scale in the operands (with `live`, the scale),
    `amax` is one that was kept. `after` is what a graph must have before it runs this.
    """
    if live is not None:
        return _scaled(x, row, col, live, keep_amax, after)
    rest = (keep_row, keep_amax, amax, after)
    if row is None or col is None or one_call(row, col):
        return _cast(x, row, col, seed, keep_col, *rest)
    if isinstance(x, Lazy):
        x = x.value()  # once, for the two
    return (
        _cast(x, row, None, seed, False, *rest)[0],
        _cast(x, None, col, seed, keep_col, *rest)[1],
    )


def activation_backward(  # noqa: PLR0913  (one call, many recipes)
    h: Tensor | Scaled,
    dy: Tensor | Scaled,
    activation: Producer,
    row: Cast | None,
    col: Cast | None,
    act_col: Cast | None,
    *,
    live: Live | None = None,
    seed: Tensor | None = None,
    act_live: Live | None = None,
    act_amax: Tensor | None = None,
    dtype: torch.dtype | None = None,
    dbias: bool = False,
) -> tuple[Operand | None, Operand | None, Operand | None, Tensor | None]:
    """(dh's row, dh's column, y's column, dbias) of y = activation(h) and its gradient dy.

    One read of h and dy where a kernel makes all of them. `live` and `act_live` are the given
    scales of dh and of y, `act_amax` is y's amax, kept by forward. dbias is dh summed over rows, in
    fp32, rounded to `dtype`, which is h's unless given.
    """
    d = producers.activation_gradient(h, dy, activation, dtype)
    m, k = d.shape
    as_values = _all_as_values(h.device, row, col, act_col)
    if as_values is None:
        a = b = c = db = None
        known: Tensor | Lazy = d
        if dbias:
            known = d.value()
            db = column_sums(known, d.dtype)
        if row is not None or col is not None:
            a, b = operands(known, row, col, live=live, seed=seed)
        if act_col is not None:
            y = producers.activated(h, activation, dtype)
            c = operands(y, None, act_col, live=act_live, seed=seed, amax=act_amax)[1]
        return a, b, c, db
    scale, amax = live or (None, None)
    act_scale = None if act_live is None else act_live[0]
    given = Given(scale, amax, act_scale, act_amax, seed)
    casts = (*_roomy(row, col, m, h.device), _roomy(None, act_col, m, h.device)[1])
    made = gradients.activation_backward(d, *casts, given, dbias=dbias, as_values=as_values)
    db = made[-1] if dbias else None
    if as_values:
        n = len(_names(row, col, False))
        rest = made[n:-1] if dbias else made[n:]
        c = _of_values(rest, None, act_col, m, dy.shape[1])[1]
        return *_of_values(made[:n], row, col, m, k), c, db
    n = len(_names(row, col))
    make = _named if live is None else _shared
    a, b = make(made[:n], row, col, m, k)
    c = None
    if act_col is not None:
        make = _named if act_live is None else _shared
        c = make(made[n : n + len(_names(None, act_col))], None, act_col, m, dy.shape[1])[1]
    return a, b, c, db


def _all_as_values(
    device: torch.device, row: Cast | None, col: Cast | None, act: Cast | None
) -> bool | None:
    """Whether all copies are values, or else codes; None: one call cannot make them all."""
    there = [c for c in (row, col, act) if c is not None]
    if row is None and col is None or any(c.layout[0] is not torch.uint8 for c in there):
        return None
    if row is not None and col is not None and not one_call(row, col):
        return None
    values = [_as_values(c, device) for c in there]
    return None if True in values and False in values else values[0]


def column(
    data: Tensor,
    scale: Tensor | None,
    amax: Tensor | None,
    cast: Cast,
    m: int,
    k: int | None = None,
) -> Operand:
    """The column operand of an `[M, K]` matrix from its parts as stored; k where they have room."""
    dtype, per_byte, _, _, _, col_transposed, *_ = cast.layout
    if dtype is not torch.uint8 or data.dtype is not torch.uint8:
        return Operand(data.t(), None, amax, cast, data.shape[0])
    c = cdiv(m, 16) * 16 if cast.transforms else m
    if not col_transposed:
        return Operand(data.t(), None if scale is None else scale.t(), amax, cast, c, True)
    return Operand(data, scale, amax, cast, c, False, k)


def one_call(row: Cast, col: Cast) -> bool:
    """Whether one call makes both copies: the formats agree up to what a direction may add."""
    return row.format_name == col.format_name and row.layout[0] is not None


def _scaled(
    x: Tensor | Lazy,
    row: Cast | None,
    col: Cast | None,
    live: Live,
    keep: bool,
    after: Tensor | None,
) -> tuple[Operand | None, Operand | None]:
    m, k = x.shape
    wide = _roomy(row, col, m, x.device)
    cast = wide[0] if wide[0] is not None else wide[1]
    assert cast is not None
    front: Any = producers if isinstance(x, Lazy) else dispatch
    made = front.quantize_scaled(
        x,
        live[0],
        live[1],
        cast,
        row=row is not None,
        col=col is not None,
        keep_scale=keep,
        after=after,
    )
    kept = made[-1] if keep else None
    return _shared(made[:-1] if keep else made, row, col, m, k, kept)


def _shared(
    made: list[Tensor],
    row: Cast | None,
    col: Cast | None,
    m: int,
    k: int,
    kept: Tensor | None = None,
) -> tuple[Operand | None, Operand | None]:
    """Operands of the copies with one scale that a cast by a given scale makes."""
    a = None if row is None else Operand(made[0], made[-1], kept, row, k, False, m)
    b = None if col is None else Operand(made[-2], made[-1], kept, col, m, False, k)
    return a, b


def _cast(  # noqa: PLR0913
    x: Tensor | Lazy,
    row: Cast | None,
    col: Cast | None,
    seed: Tensor | None,
    keep_col: bool,
    keep_row: bool,
    keep_amax: bool,
    amax: Tensor | None,
    after: Tensor | None,
) -> tuple[Operand | None, Operand | None]:
    m, k = x.shape
    cast = row if row is not None else col
    assert cast is not None
    as_values = _as_values(cast, x.device) and not (keep_col if row is None else keep_row)
    codes = cast.layout[0] is torch.uint8
    if isinstance(x, Lazy):
        amax = x.amax if amax is None and not cast.tiled else amax
        x = x if codes else x.value()
    if not codes:
        assert isinstance(x, Tensor)
        x = x if cast.dtype is None else x.to(cast.dtype)
        return (
            None if row is None else Operand(x, None, None, row, k),
            None if col is None else Operand(x.t(), None, None, col, m),
        )
    keep_amax = keep_amax and not cast.tiled
    front: Any = producers if isinstance(x, Lazy) else dispatch
    if as_values:
        made = front.fake_quantize(x, row, col, keep_col=keep_col, seed=seed, after=after)
        return _of_values(made, row, col, m, k, keep_col)
    made = front.quantize(
        x,
        *_roomy(row, col, m, x.device),
        row_amax=amax,
        col_amax=amax,
        seed=seed,
        after=after,
        keep_amax=keep_amax,
    )
    kept = made[-1] if keep_amax else None
    return _named(made[:-1] if keep_amax else made, row, col, m, k, kept)


def _named(
    made: list[Tensor],
    row: Cast | None,
    col: Cast | None,
    m: int,
    k: int,
    kept: Tensor | None = None,
) -> tuple[Operand | None, Operand | None]:
    """Operands of the buffers that a cast of `[M, K]` makes."""
    parts = dict(zip(_names(row, col), made, strict=True))
    shared = parts.get("scale")
    a = b = None
    if row is not None:
        scale = parts.get("row_scale", shared)
        a = Operand(parts["row_data"], scale, parts.get("row_amax", kept), row, k, False, m)
    if col is not None:
        scale = parts.get("col_scale", shared)
        b = column(parts["col_data"], scale, parts.get("col_amax"), col, m, k)
    return a, b


def _roomy(
    row: Cast | None, col: Cast | None, m: int, device: torch.device
) -> tuple[Cast | None, Cast | None]:
    """Casts whose products find room in what they make; the same for both, which one kernel makes.

    Tensor cores read codes in whole multiples, so a cast ends them with zeros there. A graph that
    does not know whether m rows are one block of scales has a spare one.
    """
    cast = row if row is not None else col
    if cast is None:
        return None, None
    pad = cast.pad if native.is_native(cast, device) else 1
    room = (pad, int(_is_open(row, m, False) or _is_open(col, m, True)))
    return (
        None if row is None else _with_room(row, room),
        None if col is None else _with_room(col, room),
    )


_ROOMS: dict[tuple[int, tuple[int, int]], Cast] = {}


def _with_room(cast: Cast, room: tuple[int, int]) -> Cast:
    """`cast.replace(room=room)`, remembered: casts are interned, so their ids stand for them."""
    if cast.room == room or torch.compiler.is_compiling():
        return cast if cast.room == room else cast.replace(room=room)
    key = (id(cast), room)
    found = _ROOMS.get(key)
    if found is None:
        found = _ROOMS[key] = cast.replace(room=room)
    return found


def _is_open(cast: Cast | None, m: int, col: bool) -> bool:
    """Whether a graph does not know if the scales of m rows are one row, or more.

    To PyTorch a size of one is special: a graph would hold for the one case alone.
    """
    if cast is None or not cast.tiled or not library.traced():
        return False
    _, _, (rows, columns), (padded, _), transposed, *_ = cast.layout
    if col and transposed:
        block = columns
    elif not (col or transposed) and padded == 1:
        block = rows
    else:
        return False  # no size of its scales is a number of blocks of rows
    from torch.fx.experimental.symbolic_shapes import statically_known_true as known

    return not (known(m <= block) or known(m > block))


_NAMES: dict[tuple[int, int, bool | None], tuple[str, ...]] = {}


def _names(row: Cast | None, col: Cast | None, keep_col: bool | None = None) -> tuple[str, ...]:
    """Names of `layout.parts`, or of `value_parts` if it is said which column copy these have.

    Remembered: casts are interned, so their ids stand for them.
    """
    if torch.compiler.is_compiling():
        return _find_names(row, col, keep_col)
    key = (id(row), id(col), keep_col)
    found = _NAMES.get(key)
    if found is None:
        found = _NAMES[key] = _find_names(row, col, keep_col)
    return found


def _find_names(row: Cast | None, col: Cast | None, keep_col: bool | None) -> tuple[str, ...]:
    if keep_col is None:
        return part_names(row, col)
    return tuple(p.name for p in value_parts((1, 1), row, col, keep_col))


def _of_values(
    made: list[Tensor], row: Cast | None, col: Cast | None, m: int, k: int, keep_col: bool = False
) -> tuple[Operand | None, Operand | None]:
    """Operands of the buffers that an emulated cast of `[M, K]` makes."""
    parts = dict(zip(_names(row, col, keep_col), made, strict=True))
    a = b = None
    if row is not None:
        a = Operand(parts["row"], None, parts.get("row_amax"), row, k)
    if col is not None:
        data, amax = parts["col_data" if keep_col else "col"], parts.get("col_amax")
        b = column(data, parts.get("col_scale"), amax, col, m)
    return a, b


def _as_values(cast: Cast, device: torch.device) -> bool:
    """Whether GEMMs here multiply bf16 values of the format, which a cast can make at once."""
    if device.type != "cuda" or cast.layout[6] is torch.float32:
        return False
    return not native.is_native(cast, device)
