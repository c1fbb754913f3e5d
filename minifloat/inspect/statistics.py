"""Statistics of operands, of the products that multiply two of them, and of layers: plain data."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from ..core.measure import Number
from ..formats import FORMATS

__all__ = ["GEMMS", "OPERANDS", "GemmStatistics", "LayerStatistics", "OperandStatistics"]

GEMMS = ("fprop", "dgrad", "wgrad")
# In the order of core.probe's slots: two for each product.
OPERANDS = (
    "input.row",
    "weight.row",
    "grad_output.row",
    "weight.col",
    "grad_output.col",
    "input.col",
)
_NAMES = tuple(FORMATS)


@dataclass(frozen=True)
class OperandStatistics:
    """What the casts of one copy of an operand did, all casts of the step together.

    `sqnr` is 10 log10(sum source^2 / sum (operand - source)^2), in dB, infinite where nothing was
    lost. `underflow` is the share of non-zero elements that became zero, `saturation` the share of
    all elements that were clipped: beyond the largest code by more than half of its step.
    `scale_min` and `scale_max` are the decode scales of elements that are not zero, `amax` the
    largest magnitude of the source. `nonfinite` elements of the source are in none of these.

    None: it cannot be known. A quantized parameter or input has no source to compare with, nor has
    one without finite elements; high precision has no scales.
    """

    operand: str
    copy: str
    gemm: str
    format: str
    casts: int
    elements: int
    sqnr: float | None
    underflow: float | None
    saturation: float | None
    scale_min: float | None
    scale_max: float | None
    amax: float
    nonfinite: int

    @property
    def name(self) -> str:
        return f"{self.operand}.{self.copy}"

    @property
    def quantized(self) -> bool:
        return FORMATS[self.format].element is not None

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity: `exact` tells an infinite SQNR from an unknown one."""
        made = asdict(self)
        sqnr = made.pop("sqnr")
        made = {key: None if _odd(value) else value for key, value in made.items()}
        return {**made, "sqnr_db": None if _odd(sqnr) else sqnr, "exact": sqnr == math.inf}


@dataclass(frozen=True)
class GemmStatistics:
    """A product: its two operands.

    `sqnr` is what to expect of the result: the operands' relative noise powers add, as they do when
    errors are independent of each other and of the values.
    """

    gemm: str
    operands: tuple[OperandStatistics, ...]

    @property
    def quantized(self) -> bool:
        """Whether any operand was."""
        return any(o.quantized for o in self.operands)

    @property
    def sqnr(self) -> float | None:
        known = [o.sqnr for o in self.operands]
        if not known or None in known:
            return None
        noise = sum(math.inf if s == -math.inf else 10 ** (-s / 10) for s in known if s is not None)
        return _decibels(1.0, noise)

    def as_dict(self) -> dict[str, Any]:
        sqnr = self.sqnr
        return {
            "operands": [o.name for o in self.operands],
            "expected_sqnr_db": None if _odd(sqnr) else sqnr,
            "quantized": self.quantized,
        }


@dataclass(frozen=True)
class LayerStatistics:
    """A layer: its operands by name, those that there were."""

    name: str
    kind: str
    in_features: int
    out_features: int
    operands: dict[str, OperandStatistics]

    @property
    def gemms(self) -> dict[str, GemmStatistics]:
        """The products that ran."""
        made = {}
        for gemm in GEMMS:
            of = tuple(o for o in self.operands.values() if o.gemm == gemm)
            if of:
                made[gemm] = GemmStatistics(gemm, of)
        return made

    @property
    def sqnr(self) -> float | None:
        """Of the operand that lost most."""
        known = [o.sqnr for o in self.operands.values() if o.sqnr is not None]
        return min(known, default=None)

    def as_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "in_features": self.in_features,
            "out_features": self.out_features,
            "operands": {name: o.as_dict() for name, o in self.operands.items()},
            "gemms": {name: g.as_dict() for name, g in self.gemms.items()},
        }


def operand_statistics(slot: int, row: list[float]) -> OperandStatistics | None:
    """From the numbers of a slot; None if nothing was cast."""
    if not row[Number.CASTS]:
        return None
    operand, copy = OPERANDS[slot].split(".")
    name = _NAMES[int(row[Number.FORMAT]) - 1]
    finite = row[Number.SOURCED] - row[Number.NONFINITE]
    sourced = finite > 0
    scaled = FORMATS[name].element is not None and row[Number.SCALE_MIN] != math.inf
    return OperandStatistics(
        operand,
        copy,
        GEMMS[slot // 2],
        name,
        int(row[Number.CASTS]),
        int(row[Number.ELEMENTS]),
        _decibels(row[Number.SIGNAL], row[Number.NOISE]) if sourced else None,
        row[Number.UNDERFLOW] / max(1.0, row[Number.NONZERO]) if sourced else None,
        row[Number.SATURATED] / max(1.0, finite) if sourced else None,
        row[Number.SCALE_MIN] if scaled else None,
        row[Number.SCALE_MAX] if scaled else None,
        row[Number.AMAX],
        int(row[Number.NONFINITE]),
    )


def _decibels(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    if signal == 0 or not math.isfinite(noise):
        return -math.inf
    return 10 * math.log10(signal / noise)


def _odd(value: Any) -> bool:
    """Whether JSON has no such number."""
    return isinstance(value, float) and not math.isfinite(value)
