"""`python -m tests.exact`: run the sweep, print a line per format, exit 1 on any mismatch."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .plan import Result, units
from .pool import sweep

__all__ = ["main", "table"]

SHOWN = 60  # messages printed in all, two of a unit


def table(results: Sequence[Result]) -> list[dict[str, Any]]:
    """A row per format: cases, cases that failed, elements that differ, seconds of work."""
    rows: dict[str, dict[str, Any]] = {}
    for r in sorted(results, key=lambda r: (not r.unit.kind, r.unit.group)):
        row = rows.setdefault(
            r.unit.group,
            {"group": r.unit.group, "cases": 0, "failed": 0, "elements": 0, "seconds": 0.0},
        )
        row["cases"] += r.cases
        row["failed"] += r.failed
        row["elements"] += r.elements
        row["seconds"] += r.seconds
        row.setdefault("emulated", [])
        if r.backend == "emulated" and r.unit.kind not in row["emulated"]:
            row["emulated"].append(r.unit.kind)
    return list(rows.values())


def lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The table as text."""
    out = [f"{'sweep':<20} {'cases':>7} {'failed':>7} {'elements':>9} {'cpu s':>7}"]
    for row in rows:
        note = f"  no kernel: {', '.join(row['emulated'])}" if row["emulated"] else ""
        out.append(
            f"{row['group']:<20} {row['cases']:>7} {row['failed']:>7} {row['elements']:>9} "
            f"{row['seconds']:>7.1f}{note}"
        )
    return out


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m tests.exact", description=__doc__)
    p.add_argument("--device", default="cuda", help="cpu compares the reference with itself")
    p.add_argument(
        "--filter", default="", help="words of a unit's name, e.g. 'quantize nvfp4 bf16'"
    )
    p.add_argument("--quick", action="store_true", help="bf16 and E4M3 alone, nothing large")
    p.add_argument("--workers", type=int, default=min(16, os.cpu_count() or 1))
    p.add_argument("--json", type=Path, metavar="PATH")
    p.add_argument("--list", action="store_true", help="print the units and stop")
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    work = [u for u in units(args.quick) if all(w in u.name for w in args.filter.split())]
    if args.list:
        for unit in work:
            print(f"{unit.cost:6.1f}  {unit.name}")
        print(f"{sum(u.cost for u in work):6.1f}  in all: seconds of compiling, roughly")
        return 0
    if torch.device(args.device).type == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here; --device cpu compares the reference with itself")
        return 2
    if not work:
        print(f"no unit contains {args.filter!r}; --list names them")
        return 2
    start = time.perf_counter()
    shown = 0

    def report(result: Result) -> None:
        nonlocal shown
        for message in result.messages[: min(2, max(0, SHOWN - shown))]:
            print(f"MISMATCH {message[:400]}", flush=True)
            shown += 1

    results = sweep(work, args.device, args.workers, report)
    spent = time.perf_counter() - start
    rows = table(results)
    print("\n".join(lines(rows)))
    failed, cases = sum(r.failed for r in results), sum(r.cases for r in results)
    slowest = max(results, key=lambda r: r.seconds)
    print(
        f"{cases} cases, {failed} failed, {len(results)} of {len(work)} units in {spent:.0f} s; "
        f"the longest: {slowest.unit.name}, {slowest.seconds:.0f} s"
    )
    if args.json:
        messages = [m for r in results for m in r.messages[:5]]  # of each unit: the kinds differ
        timed = {r.unit.name: round(r.seconds, 2) for r in results}
        found = {"rows": rows, "cases": cases, "failed": failed, "seconds": spent}
        full = found | {"messages": messages[:500], "units": timed}
        args.json.write_text(json.dumps(full, indent=1) + "\n", encoding="utf-8")
    return 1 if failed or len(results) != len(work) else 0


if __name__ == "__main__":
    raise SystemExit(main())
