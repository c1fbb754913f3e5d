"""The roofline of a run as a PNG, with matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .limits import COPY

__all__ = ["draw", "points"]

MARKS = {
    "linear": "o",
    "norm_linear": "v",
    "mlp": "s",
    "grouped": "^",
    "decoder": "D",
    "model": "P",
}
COLORS = (
    "#888888", "#222222", "#1f77b4", "#2ca02c", "#d62728", "#9467bd", "#ff7f0e", "#17becf",
    "#bcbd22", "#e377c2", "#8c564b",
)  # fmt: skip


def points(cases: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[str, float, float]]]:
    """{provider: (kind, operations per byte, TFLOP/s) of each case it was right in}."""
    out: dict[str, list[tuple[str, float, float]]] = {}
    for record in cases:
        for row in record["rows"]:
            if row["status"] == "ok" and row.get("intensity") is not None:
                point = (row["kind"], row["intensity"], row["tflops"])
                out.setdefault(row["provider"], []).append(point)
    return out


def draw(path: Path, session: Mapping[str, Any], cases: Sequence[Mapping[str, Any]]) -> None:
    """Ceilings of the run as lines, cases as points: how far below its roof each one is."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    found = points(cases)
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    ceilings = session["ceilings"]
    rates = {name: rate for name, rate in ceilings.items() if name != COPY}
    seen = [x for of in found.values() for _, x, _ in of]
    low, high = (0.5 * min(seen), 2.0 * max(seen)) if seen else (1.0, 1e4)
    for name, rate in rates.items():
        corner = rate / ceilings[COPY]
        xs = [low, min(max(corner, low), high), high]
        axes.plot(xs, [1e-12 * min(rate, x * ceilings[COPY]) for x in xs], color="#bbbbbb", lw=1)
        axes.annotate(
            name, (high, 1e-12 * rate), fontsize=6, color="#777777", ha="right", va="bottom"
        )
    for (provider, of), color in zip(found.items(), COLORS * 4, strict=False):
        for kind, x, y in of:
            axes.plot([x], [y], MARKS.get(kind, "x"), color=color, ms=5, alpha=0.85)
        axes.plot([], [], "o", color=color, label=provider)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations per byte that must move")
    axes.set_ylabel("TFLOP/s")
    axes.set_title(session["environment"]["device"], fontsize=9)
    axes.grid(alpha=0.3, which="both")
    kinds = {kind for of in found.values() for kind, _, _ in of}
    shapes = [
        Line2D([], [], marker=MARKS[k], ls="", color="k", label=k) for k in MARKS if k in kinds
    ]
    handles, _ = axes.get_legend_handles_labels()
    if handles:
        axes.legend(handles=[*handles, *shapes], fontsize=7, loc="lower right")
    figure.savefig(path, dpi=130, format="png")
