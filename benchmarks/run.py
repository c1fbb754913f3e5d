"""`python -m benchmarks.run`: time the cases beside a `copy_` of the same bytes, in one run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from minifloat.bench.ceilings import DRIFT, SEED, Copies, drifted, heat
from minifloat.bench.environment import clocks, describe
from minifloat.bench.timing import Stats, Timer

from .cases import CASES, SHAPES, Case

__all__ = ["drifted", "main", "run"]

CEILINGS = {"copy 2 GiB": 2**31, "copy 128 MiB": 2**27}  # name -> bytes read (and as many written)
HEADER = (
    f"{'case':<52} {'shape':>11} {'us':>9} {'p20':>9} {'p80':>9} "
    f"{'GB/s':>7} {'% copy':>7} {'host us':>8}"
)


def ceilings(timer: Timer, copies: Copies) -> dict[str, float]:
    """GB/s of large copies, read and write counted."""
    most = copies.source.numel()
    found = {}
    for name, size in CEILINGS.items():
        size = min(size, most)
        (stats,) = timer.time([copies.call(size)])
        found[name] = 2e-3 * size / stats.median
    return found


def _row(case: Case, shape: tuple[int, int], mine: Stats, copy: Stats) -> dict[str, Any]:
    moved = case.bytes(shape)
    return {
        "case": case.id,
        "op": case.op,
        "name": case.name,
        "direction": case.direction,
        "shape": list(shape),
        "bytes": moved,
        "us": mine.median,
        "p20": mine.p20,
        "p80": mine.p80,
        "samples": mine.samples,
        "host_us": mine.host,
        "gb_s": 1e-3 * moved / mine.median,
        "copy_us": copy.median,
        "copy_gb_s": 1e-3 * moved / copy.median,
        "percent_of_copy": 100 * copy.median / mine.median,
    }


def line(row: dict[str, Any]) -> str:
    """One row of the printed table."""
    shape = "x".join(str(d) for d in row["shape"])
    if "error" in row:
        return f"{row['case']:<52} {shape:>11} FAILED: {row['error']}"
    return (
        f"{row['case']:<52} {shape:>11} {row['us']:9.2f} {row['p20']:9.2f} {row['p80']:9.2f} "
        f"{row['gb_s']:7.0f} {row['percent_of_copy']:6.1f}% {row['host_us']:8.1f}"
    )


def select(pattern: str, quick: bool) -> list[Case]:
    """Cases whose id has every word of `pattern`; quick: without E5M2 and single directions."""
    found = [c for c in CASES if all(word in c.id for word in pattern.split())]
    if quick:
        both = ("quantize", "quantize_scaled", "fake_quantize")
        found = [c for c in found if "e5m2" not in c.id]
        found = [c for c in found if c.op not in both or "+" in c.direction]
    return found


def timed(
    cases: list[Case], shapes: list[tuple[int, int]], timer: Timer, copies: Copies
) -> Iterator[dict[str, Any]]:
    """A row per case and shape. Sources are normal numbers: on zeros a device runs faster."""
    for shape in shapes:
        g = torch.Generator(timer.device).manual_seed(SEED)
        x = torch.randn(shape, device=timer.device, generator=g).bfloat16()
        for case in cases:
            try:
                calls = [case.call(x), copies.call(max(1, case.bytes(shape) // 2))]
                mine, copy = timer.time(calls)
            except Exception as error:  # one broken case must not hide the others
                yield {"case": case.id, "shape": list(shape), "error": repr(error)}
            else:
                yield _row(case, shape, mine, copy)


def run(
    cases: list[Case],
    shapes: list[tuple[int, int]],
    timer: Timer,
    *,
    large: int = max(CEILINGS.values()),
) -> dict[str, Any]:
    """Time everything, print as it comes, and return what goes into the JSON file."""
    largest = max(c.bytes(s) // 2 for c in cases for s in shapes)
    copies = Copies(max(large, largest, 1), timer.device)
    result: dict[str, Any] = {"environment": describe(timer.device, SEED)}
    heat(timer, [copies.call(copies.source.numel())], 1.0)
    result["clocks_before"] = clocks()
    before = ceilings(timer, copies)
    print(f"{result['environment']}\n\n{HEADER}")
    rows = []
    for row in timed(cases, shapes, timer, copies):
        rows.append(row)
        print(line(row), flush=True)
    after = ceilings(timer, copies)
    drift = drifted(before, after)
    print()
    for name in before:
        print(f"{name}: {before[name]:.0f} GB/s before, {after[name]:.0f} after")
    print("\n".join(drift) or f"no ceiling drifted by more than {100 * DRIFT:.0f}%")
    return result | {
        "clocks_after": clocks(),
        "ceilings_before": before,
        "ceilings_after": after,
        "drift": drift,
        "rows": rows,
    }


def _shape(text: str) -> tuple[int, int]:
    m, _, k = text.partition("x")
    return int(m), int(k)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    p.add_argument("--filter", default="", help="words of a case's id, e.g. 'nvfp4 row+col'")
    p.add_argument("--shapes", type=_shape, nargs="+", metavar="MxK", help="default: cases.SHAPES")
    p.add_argument("--json", type=Path, metavar="PATH", help="write every number here")
    p.add_argument("--quick", action="store_true", help="fewer cases, the first and last shape")
    p.add_argument("--device", default="cuda", help="cpu times the reference: a smoke test")
    p.add_argument("--iterations", type=int, default=100)
    p.add_argument("--seconds", type=float, default=0.5, help="at most, per row")
    p.add_argument("--warmup", type=int, default=10)
    return p


def main(argv: list[str] | None = None) -> int:
    """0 when every case ran."""
    args = parser().parse_args(argv)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here; --device cpu runs a smoke test")
        return 2
    cases = select(args.filter, args.quick)
    if not cases:
        print(f"no case contains {args.filter!r}")
        return 2
    shapes = args.shapes or ([SHAPES[0], SHAPES[-1]] if args.quick else list(SHAPES))
    timer = Timer(device, iterations=args.iterations, seconds=args.seconds, warmup=args.warmup)
    large = max(CEILINGS.values()) if device.type == "cuda" else 2**16
    result = run(cases, shapes, timer, large=large)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {args.json}")
    return 1 if any("error" in row for row in result["rows"]) else 0


if __name__ == "__main__":
    raise SystemExit(main())
