"""The heat maps as a PNG, with matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .html import MAPS, color
from .statistics import OPERANDS, LayerStatistics

__all__ = ["draw"]


def draw(path: Path, layers: dict[str, LayerStatistics]) -> None:
    """One map for each of SQNR, underflow and saturation, side by side."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(
            "to_png: it draws with matplotlib, which is not installed; pip install matplotlib, or "
            "use to_html, which needs nothing"
        ) from None

    figure = Figure(figsize=(17, 2 + 0.3 * len(layers)), layout="constrained")
    FigureCanvasAgg(figure)
    for index, (title, text, grade) in enumerate(MAPS):
        axes = figure.add_subplot(1, len(MAPS), index + 1)
        pixels: list[list[Any]] = []
        for row, layer in enumerate(layers.values()):
            pixels.append([])
            for column, operand in enumerate(OPERANDS):
                o = layer.operands.get(operand)
                if o is None:
                    pixels[-1].append((255, 255, 255))
                    continue
                pixels[-1].append(color(grade(o) if o.quantized else None))
                said = text(o) if o.quantized else "high"
                axes.text(column, row, said, ha="center", va="center", fontsize=7)
        axes.imshow(pixels, aspect="auto", interpolation="nearest")
        axes.set_title(title)
        axes.set_xticks(range(len(OPERANDS)), OPERANDS, rotation=40, ha="right", fontsize=8)
        names = [name or "(model)" for name in layers]
        axes.set_yticks(range(len(layers)), names if index == 0 else [""] * len(names), fontsize=8)
    figure.savefig(path, dpi=120, format="png")
