"""Units of work: what one process does before it reports, with a guess at what it costs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from minifloat import casting

from . import checks, large
from .compare import Case, Tally
from .inputs import DTYPES
from .kinds import DEQUANTIZED, DIRECTIONS, FAKE, KINDS, SCALED, Kind

__all__ = ["Result", "Unit", "run", "units"]


class Unit(NamedTuple):
    """A check of one kind, as far as it goes by dtype and direction, in these.

    `cost` is in seconds of compiling, roughly; `big`: takes tens of gigabytes.
    """

    check: str
    kind: str = ""
    dtype: str = ""
    direction: str = ""
    cost: float = 10.0
    big: bool = False

    @property
    def name(self) -> str:
        return " ".join(w for w in (self.check, self.kind, self.dtype, self.direction) if w)

    @property
    def group(self) -> str:
        """The line of the table it belongs to."""
        return self.kind.split(" ")[0] if self.kind else "amax, transpose, swizzle"


class Result(NamedTuple):
    """What a unit found. `messages` are for people; `failed` counts cases, or 1 for a crash."""

    unit: Unit
    cases: int
    failed: int
    elements: int
    messages: list[str]
    backend: str
    seconds: float


_BY_NAME: dict[str, Kind] = {k.name: k for k in KINDS}
_DTYPES: dict[str, torch.dtype] = {checks.name_of(d): d for d in DTYPES}
_LARGE = (
    "fp8_e4m3",
    "fp8_e4m3_1x128",
    "fp8_e4m3_128x128",
    "mxfp8_e4m3",
    "mxfp8_e4m3_32x32",
    "nvfp4",
    "nvfp4 rht+sr",
    "nvfp4 row_scaled",
    "nvfp4_16x16",
)


def units(quick: bool = False) -> list[Unit]:
    """All, the costly first. Quick leaves out E5M2, dtypes other than bf16, and large tensors."""
    found = [u for u in _all() if not quick or _is_quick(u)]
    return sorted(found, key=lambda u: -u.cost)


def _is_quick(unit: Unit) -> bool:
    return "e5m2" not in unit.kind and unit.dtype in ("", "bf16") and not unit.big


def _all() -> Iterator[Unit]:
    for kind in KINDS:
        for dtype, torch_dtype in _DTYPES.items():
            for direction in DIRECTIONS:
                # Three sizes take about two versions of a kernel; NVFP4's have more sizes in them.
                versions = len(checks.shapes(kind, direction, torch_dtype)) * 0.6
                versions += 6 if versions > 2 and kind.costly else 0
                cost = _seconds(kind) * versions * (1.0 if "+" in direction else 0.5)
                if versions:
                    yield Unit("quantize", kind.name, dtype, direction, cost)
                if kind in SCALED:
                    yield Unit("scaled", kind.name, dtype, direction, cost)
            bf16 = torch_dtype is torch.bfloat16
            if kind in FAKE and (bf16 or kind.full):
                versions = 8 if kind.full and bf16 else 1
                yield Unit("fake", kind.name, dtype, cost=2.0 * _seconds(kind) * versions)
        if kind in DEQUANTIZED:
            # A square tile's scales are stored once for each row: the kernel is that of 1-D tiles,
            # and comes from the cache if it is asked for later.
            shared = kind.row.format.scale_tile != kind.row.format.tile
            yield Unit("dequantize", kind.name, cost=2 if shared else 15 if kind.full else 8)
        yield Unit("devices", kind.name, cost=2)
    for dtype in _DTYPES:
        yield Unit("amax", dtype=dtype, cost=30)
    yield Unit("transpose")
    yield Unit("swizzle")
    for name in _LARGE:
        yield Unit("large", name, big=True)
    yield Unit("large delayed", SCALED[0].name, big=True)
    yield Unit("large moves", big=True)


def _seconds(kind: Kind) -> float:
    """What it takes to compile one of its kernels, roughly."""
    if kind.row.error:
        return 8.0
    if kind.stochastic:
        return 4.5
    return 2.0 if kind.costly else 0.6


def cases(unit: Unit, device: torch.device) -> Iterator[Case]:
    """The cases of a unit that is not big."""
    words: list[Any] = []
    if unit.kind:
        words.append(_BY_NAME[unit.kind])
    if unit.direction:
        words.append(unit.direction)
    if unit.dtype:
        words.append(_DTYPES[unit.dtype])
    yield from getattr(checks, unit.check)(*words, device)


def run(unit: Unit, device: torch.device) -> Result:
    """Do a unit. An error that leaves the device usable is a failed case; others are raised."""
    start = time.perf_counter()
    tally = Tally()
    kind = _BY_NAME.get(unit.kind)
    if unit.check == "large moves":
        large.moves(device, tally)
    elif unit.check == "large delayed":
        large.delayed(_BY_NAME[unit.kind], device, tally)
    elif unit.big:
        large.copies(_BY_NAME[unit.kind], device, tally, emulated=kind in FAKE)
    else:
        for case in cases(unit, device):
            tally.add(case)
    tally.finish()
    backend = casting.choose(kind.row if kind else None, device)[0]
    spent = time.perf_counter() - start
    return Result(unit, tally.cases, tally.failed, tally.elements, tally.messages, backend, spent)
