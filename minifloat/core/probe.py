"""`Probe`: who looks at the operands of a layer's products, or has them in high precision.

    slot        0      1      2      3      4      5
    operand     x.row  w.row  g.row  w.col  g.col  x.col
    product     fprop         dgrad         wgrad

Whoever makes an operand hands it over together with what it was cast from. Where no probe is, that
costs one comparison with None.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..formats import HIGH, Operand
from ..producers import Lazy
from ..tensors import GroupedTensorStorage, QuantizedTensorStorage

__all__ = [
    "G_COL",
    "G_ROW",
    "SLOTS",
    "W_COL",
    "W_ROW",
    "X_COL",
    "X_ROW",
    "Probe",
    "dense",
    "precise",
    "probed",
    "source_of",
    "together",
    "value",
]

X_ROW, W_ROW, G_ROW, W_COL, G_COL, X_COL = range(6)
SLOTS = 6
_QUANTIZED = (QuantizedTensorStorage, GroupedTensorStorage)


class Probe(NamedTuple):
    """`numbers[SLOTS, Number]` receives what casts do. `precise` says which of (fprop, dgrad,
    wgrad) multiply what their operands were cast from. `weight` is what a quantized parameter was
    cast from, if somebody has it. `sizes` are the features of layers whose outputs are made by one
    product, and `rest` the numbers of those after the first."""

    numbers: Tensor | None
    precise: tuple[bool, bool, bool] = (False, False, False)
    weight: Tensor | None = None
    sizes: tuple[int, ...] = ()
    rest: tuple[Tensor, ...] = ()


def together(probes: list[Any], sizes: tuple[int, ...]) -> Probe | None:
    """The probe of one product that is several layers': each gets the numbers of its own part.

    The probes agree on what is precise. Their layers are watched all, or none of them is.
    """
    first = probes[0]
    if first is None or first.numbers is None:
        return first  # type: ignore[no-any-return]
    return Probe(first.numbers, first.precise, None, sizes, tuple([p.numbers for p in probes[1:]]))


def precise(product: int, call: Any) -> bool:
    """Whether a product of this call multiplies high precision because somebody asked for it."""
    return call.probe is not None and call.probe.precise[product]


def value(x: Any) -> Any:
    """A lazy matrix as a tensor, so that it is made once for several slots."""
    return x.value() if isinstance(x, Lazy) else x


def dense(x: Any) -> Any:
    """The values of what may be lazy, or quantized, or several quantized matrices."""
    if isinstance(x, list):
        return torch.cat([dense(one) for one in x])
    return x.dequantize() if isinstance(x, _QUANTIZED) else value(x)


def probed(slot: int, o: Operand, source: Any, call: Any) -> Operand:
    """The operand that the product reads: `o`, once it is measured, or its source.

    A source of None is not there any more; `o` is in high precision then.
    """
    probe = call.probe
    source = value(source)
    if probe.precise[slot // 2] and source is not None:
        exact = dense(source).to(call.dtype)
        exact = exact.t() if slot >= W_COL else exact
        o = Operand(exact, None, None, HIGH, exact.shape[1])
    if probe.numbers is None:
        return o
    from .measure import measured  # whoever made the numbers has loaded it

    seen = source_of(slot, source, probe)
    into = (probe.numbers, slot, probe.rest, probe.sizes)
    return o._replace(data=measured(o, seen, call.seed, *into))


def source_of(slot: int, source: Any, probe: Probe) -> Any:
    """What to compare with: of a quantized tensor nobody knows, unless the weight is given."""
    if slot in (W_ROW, W_COL) and probe.weight is not None:
        return probe.weight
    return None if isinstance(source, (*_QUANTIZED, list)) else source
