"""A report in one HTML file that asks for nothing from anywhere: curves are SVG of our own."""

from __future__ import annotations

import html
import math
from typing import Any

from ..inspect import OPERANDS
from ..inspect.html import color

__all__ = ["COLORS", "Curve", "cells", "report", "smooth"]

Curve = list[tuple[int, float]]
COLORS = ("#c2410c", "#1d4ed8", "#15803d")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 760, 360, 56, 36
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:820px;margin:2em auto;padding:0 1em;color:#1c1917}
h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2em}table{border-collapse:collapse}
td,th{padding:.3em .9em;border-bottom:1px solid #d6d3d1;text-align:right}
td:first-child,th:first-child{text-align:left}svg{max-width:100%;height:auto}
.note{color:#57534e}.map td+td{border:2px solid #fff;text-align:center}
"""


def smooth(values: list[float], weight: float = 0.9) -> list[float]:
    """A moving average without bias towards its start."""
    out, mean, mass = [], 0.0, 0.0
    for value in values:
        mean = weight * mean + (1 - weight) * value
        mass = weight * mass + (1 - weight)
        out.append(mean / mass)
    return out


def cells(name: str, entry: dict[str, Any]) -> list[str]:
    """A run's row of the table, as text."""
    loss, speed, peak = entry["validation"], entry["tokens_per_second"], entry["peak_memory"]
    return [
        name,
        entry["recipe"],
        "-" if loss is None else f"{loss:.4f}",
        "-" if speed is None else f"{speed:,.0f}",
        "-" if peak is None else f"{peak / 2**30:.2f} GiB",
        f"{entry['quantized_share_of_gemm_flops']:.1%}",
    ]


def _ticks(low: float, high: float, count: int = 5) -> list[float]:
    span = max(high - low, 1e-9)
    unit = 10.0 ** math.floor(math.log10(span / count))
    size = next(unit * k for k in (1, 2, 5, 10) if span / (unit * k) <= count)
    first = math.ceil(low / size)
    return [size * k for k in range(first, math.floor(high / size) + 1)]


def svg(curves: dict[str, Curve]) -> str:
    """Loss over steps: as it was, faint, and smoothed."""
    points = [point for curve in curves.values() for point in curve]
    if not points:
        return "<p>No steps were made.</p>"
    steps = max(step for step, _ in points)
    low, high = min(loss for _, loss in points), max(loss for _, loss in points)
    high = high if high > low else low + 1

    def x(step: float) -> float:
        return _LEFT + (step - 1) / max(1, steps - 1) * (_WIDTH - _LEFT - 12)

    def y(loss: float) -> float:
        return 12 + (high - loss) / (high - low) * (_HEIGHT - _BOTTOM - 12)

    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img"'
        ' aria-label="Training loss over steps" font-size="12" fill="#57534e">'
    ]
    for tick in _ticks(low, high):
        at = y(tick)
        parts.append(f'<path d="M{_LEFT} {at:.1f}H{_WIDTH - 12}" stroke="#e7e5e4"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{tick:.3g}</text>')
    for tick in _ticks(1, max(steps, 2)):
        if tick <= steps:
            at = _HEIGHT - _BOTTOM + 18
            parts.append(f'<text x="{x(tick):.1f}" y="{at}" text-anchor="middle">{tick:.0f}</text>')
    for index, (name, curve) in enumerate(curves.items()):
        color = COLORS[index % len(COLORS)]
        smoothed = smooth([loss for _, loss in curve])
        for values, style in (
            ([loss for _, loss in curve], 'stroke-opacity=".3" stroke-width="1"'),
            (smoothed, f'stroke-width="2" class="curve" data-run="{html.escape(name)}"'),
        ):
            line = " ".join(
                f"{x(step):.1f},{y(value):.1f}"
                for (step, _), value in zip(curve, values, strict=True)
            )
            parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" {style}/>')
        parts.append(
            f'<text x="{_WIDTH - 20}" y="{30 + 18 * index}" text-anchor="end" fill="{color}">'
            f"{html.escape(name)}</text>"
        )
    parts.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 2}" text-anchor="middle">step</text></svg>')
    return "\n".join(parts)


def _bars(title: str, unit: str, values: dict[str, float]) -> str:
    top = max(values.values(), default=0) or 1
    parts = [
        f'<h2>{title}</h2><svg viewBox="0 0 {_WIDTH} {28 * len(values)}" width="{_WIDTH}"'
        f' role="img" aria-label="{title}" font-size="13">'
    ]
    for index, (name, value) in enumerate(values.items()):
        width = (_WIDTH - 260) * value / top
        parts.append(
            f'<text x="0" y="{28 * index + 18}">{html.escape(name)}</text>'
            f'<rect x="80" y="{28 * index + 4}" width="{width:.1f}" height="20"'
            f' fill="{COLORS[index % len(COLORS)]}"/>'
            f'<text x="{width + 88:.1f}" y="{28 * index + 18}">{value:,.4g} {unit}</text>'
        )
    return "".join(parts) + "</svg>"


def _table(rows: list[list[str]], head: bool) -> str:
    out = ["<table>"]
    for index, row in enumerate(rows):
        tag = "th" if head and not index else "td"
        out.append("<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in row) + "</tr>")
    return "\n".join([*out, "</table>"])


def _decibels(operand: dict[str, Any] | None) -> str:
    """A cell: how far the error is below the signal; grey is high precision, or not known."""
    if operand is None:
        return "<td></td>"
    level = operand["sqnr_db"]
    grade = 1.0 if operand["exact"] else None if level is None else min(1.0, max(0.0, level / 40))
    if operand["scale_min"] is None:
        grade, text = None, "high"
    else:
        text = "exact" if operand["exact"] else "?" if level is None else f"{level:.1f}"
    red, green, blue = color(grade)
    lost = "".join(
        f", {operand[name]:.2%} {said}"
        for name, said in (("underflow", "become zero"), ("saturation", "are clipped"))
        if operand[name] is not None
    )
    title = html.escape(f"{operand['gemm']}, {operand['format']}{lost}")
    return f'<td style="background:rgb({red},{green},{blue})" title="{title}">{text}</td>'


def _errors(layers: dict[str, Any]) -> str:
    """A heat map of the layers' operands."""
    out = [
        "<h2>Quantization error by layer</h2>",
        '<p class="note">Signal to quantization noise in dB, of each operand in one step after the'
        ' last; 40 is green, 0 is red.</p><table class="map">',
        "<tr><th>layer</th>" + "".join(f"<th>{name}</th>" for name in OPERANDS) + "</tr>",
    ]
    for name, layer in layers.items():
        cells = "".join(_decibels(layer["operands"].get(operand)) for operand in OPERANDS)
        out.append(f"<tr><td>{html.escape(name)}</td>{cells}</tr>")
    return "\n".join([*out, "</table>"])


def report(summary: dict[str, Any], curves: dict[str, Curve]) -> str:
    """The page."""
    options, runs = summary["options"], summary["runs"]
    head = ["run", "recipe", "validation loss", "tokens/s", "peak memory", "quantized GEMM FLOPs"]
    gap = summary["validation_gap"]
    said = "" if gap is None else f"<p>Validation loss {gap:+.2%} against bf16.</p>"
    if any("emulated" in entry["gemm_backends"] for entry in runs.values()):
        said += (
            '<p class="note">This device has no tensor cores for the recipe\'s format: its products'
            " are emulated, exactly, and the throughput is that of the emulation.</p>"
        )
    speed = {n: e["tokens_per_second"] for n, e in runs.items() if e["tokens_per_second"]}
    memory = {n: e["peak_memory"] / 2**30 for n, e in runs.items() if e["peak_memory"]}
    environment = {**summary["environment"], "data": summary["data"]["source"], **options}
    return "\n".join(
        [
            '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">',
            f"<title>minifloat train: {html.escape(options['preset'])}</title>",
            f"<style>{_STYLE}</style></head><body>",
            f"<h1>minifloat train: {html.escape(options['preset'])},"
            f" {html.escape(next(iter(runs.values()))['recipe'])}</h1>",
            _table([head, *(cells(name, entry) for name, entry in runs.items())], True),
            said,
            f"<h2>Training loss (nats per {summary['data']['unit']})</h2>",
            svg(curves),
            *(_errors(entry["errors"]) for entry in runs.values() if entry["errors"]),
            _bars("Throughput", "tokens/s", speed) if speed else "",
            _bars("Peak memory", "GiB", memory) if memory else "",
            "<h2>Environment</h2>",
            _table([[str(k), str(v)] for k, v in environment.items()], False),
            "</body></html>\n",
        ]
    )
