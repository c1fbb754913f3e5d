"""`Report`: what `inspect` saw, read from the devices when somebody asks."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .statistics import OPERANDS, LayerStatistics, OperandStatistics, operand_statistics

__all__ = ["Entry", "Report"]

VERSION = 1  # of the JSON
BY = ("sqnr", "underflow", "saturation")


class Entry(NamedTuple):
    """A layer, and the numbers that its casts add to."""

    name: str
    kind: str
    in_features: int
    out_features: int
    numbers: Tensor


class Report:
    """Statistics by layer. Reading waits for the device, once for each device, and sees all casts
    up to then: read it after the step.

    `layers` maps names to `LayerStatistics`; `to_json`, `to_html` and `to_png` write files; as a
    string it is a table.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._entries = tuple(entries)

    @property
    def layers(self) -> dict[str, LayerStatistics]:
        """Every layer of the model, in its order; one that did not run has no operands."""
        made = {}
        for entry, rows in zip(self._entries, self._read(), strict=True):
            found = [operand_statistics(slot, row) for slot, row in enumerate(rows)]
            operands = {o.name: o for o in found if o is not None}
            made[entry.name] = LayerStatistics(*entry[:4], operands)
        return made

    def _read(self) -> list[list[list[float]]]:
        rows: list[Any] = [None] * len(self._entries)
        by_device: dict[torch.device, list[int]] = {}
        for i, entry in enumerate(self._entries):
            by_device.setdefault(entry.numbers.device, []).append(i)
        for indices in by_device.values():
            together = torch.stack([self._entries[i].numbers for i in indices]).tolist()
            for i, read in zip(indices, together, strict=True):
                rows[i] = read
        return rows

    def worst(self, count: int = 5, *, by: str = "sqnr") -> list[tuple[str, OperandStatistics]]:
        """(layer, operand) of the operands that lost most, the worst first.

        `by` is "sqnr", "underflow" or "saturation". A few large elements make the SQNR, whatever
        became of the others: "underflow" tells.
        """
        if by not in BY:
            raise ValueError(f"worst: by: got {by!r}; allowed: {', '.join(map(repr, BY))}")
        known = [
            (name, o)
            for name, layer in self.layers.items()
            for o in layer.operands.values()
            if o.sqnr is not None
        ]
        sign = 1 if by == "sqnr" else -1
        return sorted(known, key=lambda pair: sign * getattr(pair[1], by))[:count]

    def as_dict(self) -> dict[str, Any]:
        """What `to_json` writes."""
        return {
            "version": VERSION,
            "layers": {name: layer.as_dict() for name, layer in self.layers.items()},
        }

    # ------------------------------------------------------------------------------------- files
    def to_json(self, path: str | PathLike[str]) -> None:
        text = json.dumps(self.as_dict(), indent=1, allow_nan=False)
        Path(path).write_text(text + "\n", encoding="utf-8")

    def to_html(self, path: str | PathLike[str]) -> None:
        """One file that asks for nothing from anywhere: a heat map by layer, and all numbers."""
        from .html import page

        Path(path).write_text(page(self.layers), encoding="utf-8")

    def to_png(self, path: str | PathLike[str]) -> None:
        """The heat map, with matplotlib."""
        from .plot import draw

        draw(Path(path), self.layers)

    # -------------------------------------------------------------------------------------- text
    def __str__(self) -> str:
        rows = [["layer", *OPERANDS]]
        layers = self.layers
        for name, layer in layers.items():
            cells = [_cell(layer.operands.get(operand)) for operand in OPERANDS]
            rows.append([name or "(model)", *cells])
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["SQNR in dB; - was not cast, ? has no source, = is in high precision"]
        if any(o.nonfinite for layer in layers.values() for o in layer.operands.values()):
            lines[0] += ", ! has infinite or NaN elements, which are left out"
        for row in rows:
            cells = [c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)]
            lines.append("  ".join([row[0].ljust(widths[0]), *cells]))
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<inspect report of {len(self._entries)} layers>"


def _cell(o: OperandStatistics | None) -> str:
    if o is None:
        return "-"
    odd = "!" if o.nonfinite else ""
    if not o.quantized:
        return f"={odd}"
    if o.sqnr is None:
        return f"?{odd}"
    return f"exact{odd}" if o.sqnr == math.inf else f"{o.sqnr:.1f}{odd}"
