"""The curves as a PNG, with matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import files
from .html import COLORS, Curve, smooth

__all__ = ["draw"]


def draw(path: Path, curves: dict[str, Curve], summary: dict[str, Any]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for (name, curve), color in zip(curves.items(), COLORS, strict=False):
        steps, losses = [step for step, _ in curve], [loss for _, loss in curve]
        entry = summary["runs"][name]
        label = name if entry["recipe"] == name else f"{name}: {entry['recipe']}"
        if entry["validation"] is not None:
            label += f" (validation {entry['validation']:.4f})"
        axes.plot(steps, losses, color=color, alpha=0.3, linewidth=1)
        axes.plot(steps, smooth(losses), color=color, linewidth=2, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel(f"training loss (nats per {summary['data']['unit']})")
    axes.grid(alpha=0.3)
    if curves:
        axes.legend()

    def fill(name: str) -> None:
        figure.savefig(name, dpi=120, format="png")

    files.write(path, fill)
