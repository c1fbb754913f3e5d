"""Results as text: a table for each case, for a terminal and for a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .cases import Case
from .limits import COPY

__all__ = ["ceilings", "closing", "markdown", "of_case", "scaled"]

Row = Mapping[str, Any]
Cells = list[list[str]]
MIB = 2**20


def _number(name: str, digits: int, factor: float = 1.0) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        value = row.get(name)
        return "" if value is None else f"{factor * value:.{digits}f}"

    return cell


def _time(row: Row) -> str:
    if row.get("us") is None:
        return str(row["status"])
    ms = 1e-3 * row["us"]
    return (f"{ms:.2f}" if ms >= 1 else f"{ms:.4f}") + ("*" if row.get("waits") else "")


def _spread(row: Row) -> str:
    """Half of what lies between the percentiles, of the median."""
    if row.get("us") is None:
        return ""
    return f"{50 * (row['p80'] - row['p20']) / row['us']:.1f}"


def _rate(row: Row) -> str:
    value = row.get("tflops")
    return "" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _error(row: Row) -> str:
    if row["status"] == "wrong":
        return "WRONG"
    if "unchecked" in row:
        return "unchecked"
    value = row.get("error_ratio")
    return "" if value is None else f"{value:.2f}"


# A column is left out where it is empty.
COLUMNS: dict[str, Callable[[Row], str]] = {
    "provider": lambda row: str(row["provider"]),
    "ms": _time,
    "+-%": _spread,
    "TFLOP/s": _rate,
    "/eager": _number("us_vs_eager", 2),
    "/compile": _number("us_vs_compile", 2),
    "% limit": _number("percent_of_limit", 0),
    "% peak": _number("percent_of_peak", 0),
    "host us": _number("host_us", 0),
    "host/eager": _number("host_vs_eager", 2),
    "wall us": _number("wall_us", 0),
    "graph us": _number("graph_us", 1),
    "graph/eager": _number("graph_vs_eager", 2),
    "peak MiB": _number("peak_bytes", 0, 1 / MIB),
    "peak/eager": _number("peak_vs_eager", 2),
    "peak/compile": _number("peak_vs_compile", 2),
    "kept MiB": _number("kept_bytes", 0, 1 / MIB),
    "first s": _number("first_s", 1),
    "error": _error,
}
LEGEND = (
    "/eager, /compile: time over plain PyTorch's; smaller is better",
    "% limit: the roofline at this run's ceilings over the time; % peak: at the data sheet's",
    "error: the largest of output and gradients, over that of the recipe's reference",
    "*: the step waits for the device inside, so its time includes the host",
)


def _cells(rows: Sequence[Row]) -> Cells:
    """Head and body, without the rows that were not measured and the columns that are empty."""
    shown = [row for row in rows if row["status"] != "not measured"]
    body = [[cell(row) for cell in COLUMNS.values()] for row in shown]
    used = [i for i in range(len(COLUMNS)) if any(line[i] for line in body)]
    head = list(COLUMNS)
    return [[line[i] for i in used] for line in (head, *body)] if body else []


def notes(rows: Sequence[Row]) -> list[str]:
    """What the numbers do not say: why a provider has none, or what is wrong with it."""
    out = []
    for row in rows:
        if row["status"] != "ok":
            out.append(f"{row['provider']}: {row['status']}: {row['reason']}")
        if row.get("graph_note"):
            out.append(f"{row['provider']}: no CUDA graph: {row['graph_note']}")
    return out


def of_case(title: str, rows: Sequence[Row], case: Case | None = None) -> str:
    """A case's table for a terminal."""
    tail = "" if case is None else f"  ({1e-12 * case.flops:.3g} TFLOP)"
    cells = _cells(rows)
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))] if cells else []
    lines = [title + tail]
    for line in cells:
        first = line[0].ljust(widths[0])
        rest = [cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True)]
        lines.append("  " + "  ".join((first, *rest)).rstrip())
    told = [row for row in rows if row["status"] != "not measured" or row["library"] == "compile"]
    return "\n".join(lines + [f"  {note}" for note in notes(told)])


def scaled(found: Mapping[str, float]) -> dict[str, float]:
    """Ceilings in GB/s and TFLOP/s."""
    return {n: v * (1e-9 if n == COPY else 1e-12) for n, v in found.items()}


def ceilings(found: Mapping[str, float]) -> list[str]:
    lines = ["ceilings of this run:"]
    for name, value in scaled(found).items():
        lines.append(f"  {name:<40} {value:8.4g} {'GB/s' if name == COPY else 'TFLOP/s'}")
    return lines


def closing(rows: Sequence[Row], drift: Sequence[str]) -> list[str]:
    """The last lines: what was not measured and why, what is wrong, whether clocks moved."""
    absent: dict[str, list[str]] = {}
    for row in rows:
        if row["status"] == "not measured":
            absent.setdefault(row["reason"], []).append(row["provider"])
    out = [
        f"not measured: {', '.join(dict.fromkeys(names))}: {reason}"
        for reason, names in absent.items()
    ]
    for status in ("wrong", "failed", "out of memory"):
        found = [f"{r['case']} {r['provider']}" for r in rows if r["status"] == status]
        if found:
            out.append(f"{status}: {', '.join(found)}")
    return ["", *LEGEND, *out, *drift]


def markdown(session: Row, end: Row | None, cases: Sequence[Row]) -> str:
    """The whole run as a page."""
    about = session["environment"]
    parts = [f"{name} {value}" for name, value in about.items() if value is not None]
    lines = ["# minifloat bench", "", ", ".join(parts) + ".", "", "| ceiling | before | after |"]
    lines.append("|---|---|---|")
    after = scaled(end["ceilings"]) if end else {}
    for name, value in scaled(session["ceilings"]).items():
        unit = "GB/s" if name == COPY else "TFLOP/s"
        late = f"{after[name]:.0f} {unit}" if name in after else ""
        lines.append(f"| {name} | {value:.0f} {unit} | {late} |")
    for record in cases:
        lines += ["", f"## {record['case']}", ""]
        cells = _cells(record["rows"])
        for i, line in enumerate(cells):
            lines.append("| " + " | ".join(line) + " |")
            if i == 0:
                lines.append("|---" * len(line) + "|")
        lines += ["", *(f"- {note}" for note in notes(record["rows"]))]
    lines += ["", *(f"- {line}" for line in LEGEND)]
    return "\n".join(lines) + "\n"
