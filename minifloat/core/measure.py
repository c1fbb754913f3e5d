"""What a cast did to a matrix, added to a row of numbers that stays on the device.

An operand is compared with the matrix that it was cast from, contraction last both, and in the
transformed domain where the cast transforms: the values compared are those that the product
multiplies. Nothing here waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from .. import emulated, library, reference
from ..alpha import alpha as alpha_of
from ..formats import E4M3, FORMATS, Cast, Operand, Scale, cdiv
from ..operands import operands

__all__ = [
    "COLUMN_SLOTS",
    "Number",
    "add",
    "count",
    "largest_codes",
    "measured",
    "numbers",
    "scales",
]


class Number(IntEnum):
    """The numbers of one operand: sums over its casts, unless they say otherwise."""

    CASTS = 0
    FORMAT = 1  # the last one, counted from 1 in the order of FORMATS
    ELEMENTS = 2
    SOURCED = 3  # elements whose source was there to be compared with
    SIGNAL = 4  # squares of the source
    NOISE = 5  # squares of (operand - source)
    NONZERO = 6  # elements of the source that are not zero
    UNDERFLOW = 7  # of these, those that became zero
    SATURATED = 8  # clipped: beyond the largest code by more than half of its step
    NONFINITE = 9  # infinite or NaN in the source; they are in no other sum
    SCALE_MIN = 10  # smallest and largest decode scale of an element that is not zero
    SCALE_MAX = 11
    AMAX = 12  # the largest magnitude of the source (without one: of the operand)


_FORMATS = {name: i for i, name in enumerate(FORMATS, 1)}
COLUMN_SLOTS = 3  # the first of the column copies: see probe.py
_FEATURES = {1: 0, 2: 1, 3: 1, 4: 0}  # the dim of output features, in slots that have one


def numbers(slots: int, device: torch.device) -> Tensor:
    """`[slots, Number]` of operands that nobody has seen; fp64, which counts elements exactly."""
    made = torch.zeros(slots, len(Number), dtype=torch.float64, device=device)
    made[:, Number.SCALE_MIN] = torch.inf
    return made


def measured(  # noqa: PLR0913  (the operator's arguments)
    o: Operand,
    source: Tensor | None,
    seed: Tensor | None,
    into: Tensor,
    slot: int,
    rest: Sequence[Tensor] = (),
    sizes: Sequence[int] = (),
) -> Tensor:
    """`o.data`, once `into[slot]` knows of it; in a graph too, each time that it runs.

    Layers that share a product have `sizes` features each, and `rest` is for those after the first:
    each is told of its own part of a weight and of a gradient, and of the whole input.
    """
    arguments = (source, seed, into, slot, list(rest), list(sizes))
    if library.traced():
        return library.op("measured")(*o, *arguments)  # type: ignore[no-any-return]
    with torch.no_grad():
        add(o, *arguments)
    return o.data


# ----------------------------------------------------------------------------------- the arithmetic
def add(  # noqa: PLR0913  (the operator's arguments)
    o: Operand,
    source: Tensor | None,
    seed: Tensor | None,
    into: Tensor,
    slot: int,
    rest: Sequence[Tensor] = (),
    sizes: Sequence[int] = (),
) -> None:
    """Add what the cast of `source` to `o` did to the numbers of a slot."""
    alpha = alpha_of(o)
    v = emulated.values(o, torch.float32)
    s = None if source is None else _oriented(source, o.cast, slot)
    coded = _coded(o, source, seed, slot)
    v = v if alpha is None else v * alpha
    largest = scale = None
    if coded is not None:
        largest, scale = largest_codes(coded), scales(coded, v.shape, alpha_of(coded))
    views = (v, s, largest, scale)
    if not rest:
        count(into, slot, o.cast, *views)
        return
    at = 0
    for held, size in zip((into, *rest), sizes, strict=True):
        count(held, slot, o.cast, *(_part(t, v, slot, at, size) for t in views))
        at += size


def _part(t: Any, whole: Tensor, slot: int, at: int, size: int) -> Any:
    """What one of several layers has of a view of `whole`, which a scale may be broadcast to."""
    dim = _FEATURES.get(slot)
    if dim is None or t is None or t.dim() < 2 or t.shape[dim] != whole.shape[dim]:
        return t
    return t.narrow(dim, at, size)


def count(  # noqa: PLR0913  (the views of one matrix)
    into: Tensor,
    slot: int,
    cast: Cast,
    v: Tensor,
    s: Tensor | None,
    largest: Tensor | None = None,
    scale: Tensor | None = None,
    where: Tensor | None = None,
) -> None:
    """Of values `v[R, C]`, their source, whether a code is the largest, and decode scales.

    `where[1, C]` are the columns that there are; s is zero elsewhere.
    """
    row = into.data[slot]  # unseen by version counters: a backward may be waiting
    row[Number.CASTS].add_(1)
    row[Number.FORMAT].fill_(_FORMATS[cast.format_name])
    elements: Any = v.numel() if where is None else where.sum() * v.shape[0]
    row[Number.ELEMENTS].add_(elements)
    if v.numel() == 0:
        return
    v = v if where is None else torch.where(where, v, 0.0)
    known = v if s is None else s
    finite = known.isfinite()
    if s is not None:
        row[Number.SOURCED].add_(elements)
        row[Number.NONFINITE].add_(s.numel() - finite.sum())
        s, v = torch.where(finite, s, 0.0), torch.where(finite, v, 0.0)
        _compare(row, s, v)
        if largest is not None:
            # A block scale that underflows leaves the largest code, times zero.
            clipped = largest & (v != 0) & (s.abs() > v.abs() * (1 + _slack(cast)))
            row[Number.SATURATED].add_(clipped.sum())
    some = finite & (known != 0)
    top = torch.where(finite, known.abs(), 0.0).amax()
    row[Number.AMAX].copy_(torch.maximum(row[Number.AMAX], top))
    if scale is not None:
        low = torch.where(some, scale, torch.inf).amin()
        high = torch.where(some, scale, 0.0).amax()
        row[Number.SCALE_MIN].copy_(torch.minimum(row[Number.SCALE_MIN], low))
        row[Number.SCALE_MAX].copy_(torch.maximum(row[Number.SCALE_MAX], high))


def _compare(row: Tensor, s: Tensor, v: Tensor) -> None:
    # In fp64: squares of gradients leave fp32.
    row[Number.SIGNAL].add_(torch.linalg.vector_norm(s, dtype=torch.float64).square())
    row[Number.NOISE].add_(torch.linalg.vector_norm(v - s, dtype=torch.float64).square())
    some = s != 0
    row[Number.NONZERO].add_(some.sum())
    row[Number.UNDERFLOW].add_((some & (v == 0)).sum())


def _oriented(source: Tensor, cast: Cast, slot: int) -> Tensor:
    """The source as the operand holds it: contraction last, transformed if the cast does that."""
    s = (source.t() if slot >= COLUMN_SLOTS else source).to(torch.float32)
    return reference.hadamard(s, cast.hadamard) if cast.transforms else s


def _coded(o: Operand, source: Tensor | None, seed: Tensor | None, slot: int) -> Operand | None:
    """The operand as codes and scales; None in high precision.

    Where the product multiplies an emulated format's values, the codes are not there: they are cast
    again, to the same bits.
    """
    if o.cast.format.element is None:
        return None
    if o.data.dtype is torch.uint8:
        return o
    if source is None:
        return None
    if slot >= COLUMN_SLOTS:
        return operands(source, None, o.cast, seed=seed, keep_col=True)[1]
    return operands(source, o.cast, None, seed=seed, keep_row=True)[0]


def largest_codes(o: Operand) -> Tensor:
    """Where the code is the largest of the format, of either sign."""
    element = o.cast.format.element
    assert element is not None
    codes = o.codes if element.per_byte == 1 else reference.unpack(o.codes, o.columns)
    return reference.decode(codes.contiguous(), element).abs() == element.max


def _slack(cast: Cast) -> float:
    """How far beyond the largest code a value still rounds to it, relative to it."""
    element = cast.format.element
    assert element is not None
    step = 2.0 ** (math.floor(math.log2(element.max)) - element.mantissa)
    return step / 2 / element.max


def scales(o: Operand, shape: Sequence[int], alpha: Tensor | None) -> Tensor:
    """fp32: what decodes each element of the operand's `[R, C]`, or all of them."""
    fmt = o.cast.format
    if fmt.scale_tile is None:
        assert alpha is not None
        return alpha
    assert o.scale is not None
    (r, c), (rows, cols) = fmt.scale_tile, shape
    stored = o.scale.t() if fmt.scale_transposed else o.scale
    stored = stored[: cdiv(rows, r), : cdiv(cols, c)].contiguous()
    if fmt.scale is Scale.E8M0:
        stored = reference.e8m0_decode(stored)
    elif fmt.two_level:
        stored = reference.decode(stored, E4M3)
    made = stored.repeat_interleave(r, 0)[:rows].repeat_interleave(c, 1)[:, :cols]
    return made if alpha is None else made * alpha


# ------------------------------------------------------------------------------------------ the ops
# As with `scalars.tallied`, no schema tells that numbers change: a checkpoint would refuse to
# repeat it. What is returned is used, so nothing is optimized away.
def _measured(*args: Any) -> Tensor:
    add(Operand(*args[:7]), *args[7:])
    return args[0].clone()  # type: ignore[no-any-return]


def _measured_fake(data: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(data)


_CAST = f"{Cast.__module__}.{Cast.__qualname__}"
_PARTS = f"Tensor data, Tensor? scale, Tensor? amax, {_CAST} cast"
library.define(
    (
        (
            f"measured({_PARTS}, SymInt columns, bool viewed, SymInt? rows, Tensor? source, "
            "Tensor? seed, Tensor into, int slot, Tensor[] rest, int[] sizes) -> Tensor",
            _measured,
            _measured_fake,
        ),
    )
)
