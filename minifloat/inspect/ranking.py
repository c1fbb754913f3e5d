"""`Ranking`: what `bisect` found."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

__all__ = ["Effect", "Ranking"]


@dataclass(frozen=True)
class Effect:
    """A layer, or one product of it, in high precision, and everything else as it was.

    `value` is the metric of that run, `distance` how far it is from the run in high precision, and
    `effect` by how much that is less than before: what this layer's quantization costs.
    """

    layer: str
    gemm: str | None
    value: float
    distance: float
    effect: float

    @property
    def name(self) -> str:
        """How tables call it; the model itself may be a layer."""
        layer = self.layer or "(model)"
        return layer if self.gemm is None else f"{layer} {self.gemm}"


@dataclass(frozen=True)
class Ranking:
    """Effects, the largest first, and the runs they are measured against.

    `quantized` and `high_precision` are the metric as the model is, and with every layer in high
    precision; `distance` lies between them. `repeat` is how far two equal runs were apart: an
    effect below it means nothing. `skipped` names layers without a quantized product.
    """

    metric: str
    quantized: float
    high_precision: float
    distance: float
    repeat: float
    effects: tuple[Effect, ...]
    skipped: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """What `to_json` writes; a number that JSON does not have is null."""
        return {
            "version": 1,
            "metric": self.metric,
            "quantized": _number(self.quantized),
            "high_precision": _number(self.high_precision),
            "distance": _number(self.distance),
            "repeat": _number(self.repeat),
            "effects": [
                {
                    "layer": e.layer,
                    "gemm": e.gemm,
                    "value": _number(e.value),
                    "distance": _number(e.distance),
                    "effect": _number(e.effect),
                }
                for e in self.effects
            ],
            "skipped": list(self.skipped),
        }

    def to_json(self, path: str | PathLike[str]) -> None:
        text = json.dumps(self.as_dict(), indent=1, allow_nan=False)
        Path(path).write_text(text + "\n", encoding="utf-8")

    def __str__(self) -> str:
        lines = [
            f"{self.metric}: {self.quantized:.6g} quantized, {self.high_precision:.6g} in high "
            f"precision, {self.distance:.3g} apart; two equal runs differ by {self.repeat:.3g}"
        ]
        width = max((len(e.name) for e in self.effects), default=0)
        for e in self.effects:
            share = e.effect / self.distance if 0 < self.distance < math.inf else math.nan
            part = "" if math.isnan(share) else f"  {share:7.1%}"
            lines.append(f"  {e.name.ljust(width)}  {e.effect:+.3g}{part}")
        if self.skipped:
            lines.append(f"  without a quantized product: {', '.join(self.skipped)}")
        return "\n".join(lines)


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
