"""`probed` and `measured` for matrices whose rows come in groups: sizes stay on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import emulated, library, reference, spread
from ..formats import HADAMARD, HIGH, Cast, Operand
from ..grouped_gemm import Grouped, members
from ..operands import column
from ..spread import Members
from .measure import Number, add, count, largest_codes, scales
from .probe import dense, source_of

__all__ = ["measured_group", "probed_group"]


def probed_group(
    slot: int, g: Grouped, source: Any, sizes: Tensor | None, num: int, call: Any
) -> Grouped:
    """`probed` of members with these sizes; without, of `num` equal ones."""
    probe = call.probe
    if probe.precise[slot // 2] and source is not None:
        exact = dense(source).to(call.dtype).reshape(g.shape)
        g = Grouped(exact, None, None, HIGH, g.shape, g.col)
    if probe.numbers is None:
        return g
    seen = source_of(slot, source, probe)
    seen = None if seen is None else seen.reshape(g.shape)
    data = measured_group(g, seen, sizes, num, call.seed, probe.numbers, slot)
    return g._replace(data=data)


def measured_group(
    g: Grouped,
    source: Tensor | None,
    sizes: Tensor | None,
    num: int,
    seed: Tensor | None,
    into: Tensor,
    slot: int,
) -> Tensor:
    """`measured` of a matrix whose rows come in groups; without sizes, in `num` equal ones."""
    arguments = (source, sizes, num, seed, into, slot)
    if library.traced():
        return library.op("measured_group")(*g, *arguments)  # type: ignore[no-any-return]
    with torch.no_grad():
        _add_group(g, *arguments)
    return g.data


# ------------------------------------------------------------------------------------------- groups
def _add_group(
    g: Grouped,
    source: Tensor | None,
    sizes: Tensor | None,
    num: int,
    seed: Tensor | None,
    into: Tensor,
    slot: int,
) -> None:
    if g.shape[0] == 0:
        count(into, slot, g.cast, g.data[:0], g.data[:0])
        return
    before = into.data[slot, Number.CASTS].clone()
    if g.spread:
        assert source is not None and sizes is not None
        _add_spread(g, source, spread.members(sizes, g.shape[0]), into, slot)
    elif g.data.dtype is not torch.uint8:
        o = Operand(g.data.t() if g.col else g.data, None, None, g.cast, g.shape[int(not g.col)])
        add(o, source, None, into, slot)
    else:
        rows = g.shape[0] // num
        parts: Any = [None] * num if source is None else torch.split(source, rows)
        for o, part in zip(members(g, [rows] * num), parts, strict=True):
            add(o, part, seed, into, slot)
    into.data[slot, Number.CASTS].copy_(before + 1)


def _add_spread(g: Grouped, source: Tensor, group: Members, into: Tensor, slot: int) -> None:
    """As one matrix, with a number for each row of it: that of the member it belongs to."""
    cast, (m, k) = spread.as_lines(g.cast), g.shape
    start, end, place, after = group.table[:, :4].long().t().contiguous()
    of_one = None if g.amax is None else g.amax[:1]  # values() applies no amax, and asks for one
    where = None
    if not g.col:
        o = Operand(g.data, g.scale, of_one, cast, k)
        at = torch.arange(m, device=source.device)
        member = torch.searchsorted(end, at, right=True).clamp(max=group.num - 1)
        s = source.to(torch.float32)
    else:
        width = spread.width(m, group.num)
        o = column(g.data, g.scale, of_one, cast, width)
        at = torch.arange(width, device=source.device)
        member = torch.searchsorted(after, at, right=True)
        placed = member < group.num
        member = member.clamp(max=group.num - 1)
        offset, size = at - place[member], (end - start)[member]
        kept = (size + HADAMARD - 1) // HADAMARD * HADAMARD if cast.transforms else size
        where = (placed & (offset < kept))[None]
        rows = source[(start[member] + offset).clamp(0, m - 1)]
        there = (placed & (offset < size))[:, None]
        s = torch.where(there, rows, 0.0).t().to(torch.float32)
        s = reference.hadamard(s, cast.hadamard) if cast.transforms else s
    alpha = None
    if cast.format.two_level:
        assert g.amax is not None
        alpha = g.amax * reference.dequantize_factor(cast)
    elif cast.format.tile is None:
        alpha = g.scale
    if alpha is not None:
        alpha = alpha[member][None] if g.col else alpha[member][:, None]
    v = emulated.values(o, torch.float32)
    v = v if alpha is None else v * alpha
    count(into, slot, g.cast, v, s, largest_codes(o), scales(o, v.shape, alpha), where)


# ------------------------------------------------------------------------------------------- the op
def _measured_group(*args: Any) -> Tensor:
    _add_group(Grouped(*args[:7]), *args[7:])
    return args[0].clone()  # type: ignore[no-any-return]


def _measured_group_fake(data: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(data)


_CAST = f"{Cast.__module__}.{Cast.__qualname__}"
library.define(
    (
        (
            f"measured_group(Tensor data, Tensor? scale, Tensor? amax, {_CAST} cast, "
            "SymInt[] shape, bool col, bool spread, Tensor? source, Tensor? sizes, int num, "
            "Tensor? seed, Tensor into, int slot) -> Tensor",
            _measured_group,
            _measured_group_fake,
        ),
    )
)
