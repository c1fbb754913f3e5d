"""The report in one HTML file that asks for nothing from anywhere: heat maps by layer."""

from __future__ import annotations

import html
import math
from collections.abc import Callable

from .statistics import GEMMS, OPERANDS, LayerStatistics, OperandStatistics

__all__ = ["MAPS", "color", "page"]

_STYLE = """
body{font:14px/1.45 system-ui,sans-serif;max-width:1080px;margin:2em auto;padding:0 1em;
color:#1c1917}
h1{font-size:1.5em}h2{font-size:1.15em;margin:2em 0 .4em}table{border-collapse:collapse}
td,th{padding:.25em .7em;text-align:right;white-space:nowrap}
th{font-weight:600}td:first-child,th:first-child{text-align:left}
.map td+td{border:2px solid #fff;min-width:5.5em;text-align:center}
.all td,.all th{border-bottom:1px solid #d6d3d1}.note{color:#57534e}
"""
_BAD, _MIDDLE, _GOOD, _NONE = (185, 28, 28), (253, 230, 138), (110, 190, 140), (231, 229, 228)

Grade = Callable[[OperandStatistics], float | None]


def _sqnr(o: OperandStatistics) -> float | None:
    """0 at 0 dB, 1 at 40 dB."""
    return None if o.sqnr is None else min(1.0, max(0.0, o.sqnr / 40))


def _underflow(o: OperandStatistics) -> float | None:
    """1 for nothing, 0.5 for an eighth, 0 from a half on: small elements add up to little."""
    return None if o.underflow is None else 1 - math.sqrt(min(1.0, 2 * o.underflow))


def _saturation(o: OperandStatistics) -> float | None:
    """1 up to one in a million, 0.5 for one in a thousand, 0 for all: large elements matter."""
    if o.saturation is None:
        return None
    return min(1.0, -math.log10(o.saturation) / 6) if o.saturation > 0 else 1.0


# title, what a cell says, how good it is from 0 to 1
MAPS: tuple[tuple[str, Callable[[OperandStatistics], str], Grade], ...] = (
    ("SQNR (dB)", lambda o: _decibels(o.sqnr), _sqnr),
    ("Underflow: non-zero to zero", lambda o: percent(o.underflow), _underflow),
    ("Saturation: clipped", lambda o: percent(o.saturation), _saturation),
)


def color(grade: float | None) -> tuple[int, int, int]:
    """Red, yellow, green; grey for what is not known."""
    if grade is None:
        return _NONE
    low, high, at = (_BAD, _MIDDLE, 2 * grade) if grade < 0.5 else (_MIDDLE, _GOOD, 2 * grade - 1)
    r, g, b = (round(x + (y - x) * at) for x, y in zip(low, high, strict=True))
    return r, g, b


def percent(value: float | None) -> str:
    if value is None:
        return "?"
    return "0" if value == 0 else f"{value:.2%}" if value >= 1e-4 else f"{value:.0e}"


def _decibels(value: float | None) -> str:
    if value is None:
        return "?"
    return "exact" if value == math.inf else f"{value:.1f}"


def _map(title: str, text: Callable[[OperandStatistics], str], grade: Grade, layers: Layers) -> str:
    out = [f'<h2>{html.escape(title)}</h2><table class="map"><tr><th></th>']
    out += [f'<th colspan="2" style="text-align:center">{gemm}</th>' for gemm in GEMMS]
    out.append("</tr><tr><th>layer</th>" + "".join(f"<th>{o}</th>" for o in OPERANDS) + "</tr>")
    for name, layer in layers.items():
        cells = []
        for operand in OPERANDS:
            o = layer.operands.get(operand)
            if o is None:
                cells.append("<td></td>")
                continue
            known = grade(o) if o.quantized else None
            shown = (text(o) if o.quantized else "high") + ("!" if o.nonfinite else "")
            r, g, b = color(known)
            dark = known is not None and known < 0.2
            cells.append(
                f'<td style="background:rgb({r},{g},{b}){";color:#fff" if dark else ""}"'
                f' title="{html.escape(_told(o))}">{shown}</td>'
            )
        out.append(f"<tr><td>{html.escape(name or '(model)')}</td>{''.join(cells)}</tr>")
    return "\n".join([*out, "</table>"])


def _told(o: OperandStatistics) -> str:
    odd = f", {o.nonfinite} not finite" if o.nonfinite else ""
    return (
        f"{o.name} for {o.gemm}, {o.format}: amax {o.amax:.3g}, {_range(o)}, {o.casts} casts{odd}"
    )


def _range(o: OperandStatistics) -> str:
    if o.scale_min is None or o.scale_max is None:
        return "no scales"
    return f"scales {o.scale_min:.3g} to {o.scale_max:.3g}"


def _numbers(layers: Layers) -> str:
    head = ["layer", "gemm", "operand", "format", "SQNR (dB)", "underflow", "saturation"]
    head += ["smallest scale", "largest scale", "amax", "not finite", "casts", "elements"]
    out = ['<h2>All numbers</h2><table class="all"><tr>']
    out += [f"<th>{title}</th>" for title in head] + ["</tr>"]
    for name, layer in layers.items():
        for o in layer.operands.values():
            cells = [
                name or "(model)",
                o.gemm,
                o.name,
                o.format,
                _decibels(o.sqnr),
                percent(o.underflow),
                percent(o.saturation),
                "" if o.scale_min is None else f"{o.scale_min:.4g}",
                "" if o.scale_max is None else f"{o.scale_max:.4g}",
                f"{o.amax:.4g}",
                str(o.nonfinite),
                str(o.casts),
                str(o.elements),
            ]
            out.append("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in cells) + "</tr>")
    return "\n".join([*out, "</table>"])


def page(layers: Layers) -> str:
    """The page."""
    return "\n".join(
        [
            '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">',
            f"<title>minifloat inspect</title><style>{_STYLE}</style></head><body>",
            "<h1>minifloat inspect</h1>",
            '<p class="note">Each product reads two operands. Green is good, red is bad, grey is '
            "not known (a quantized parameter has no source to compare with) or in high precision; "
            "an empty cell was not cast. A ! marks infinite or NaN elements, which are left "
            "out.</p>",
            *(_map(*of, layers) for of in MAPS),
            _numbers(layers),
            "</body></html>\n",
        ]
    )


Layers = dict[str, LayerStatistics]
