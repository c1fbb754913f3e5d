"""What the gradient of experts' weights should multiply: `minifloat.rates`, measured.

    python -m benchmarks.wgrad                     # needs a GPU

`dw_e = g[r_e]^T x[r_e]` of bf16 matrices that were cast before, on equal splits: by the codes, and
by the bf16 values of them, made of the codes in the same call. Codes and values of a format
alternate sample by sample. `chosen` is what `rates.choose` says; a line in which the other one is
faster by more than `rates.MARGIN` ends in `WRONG`. `TFLOP/s` of codes and `bf16`, PyTorch's product
of values that are there already, are the numbers that `rates.RATES` has one line of.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minifloat import env, rates, spread
from minifloat.bench.environment import describe
from minifloat.bench.timing import Timer
from minifloat.formats import HIGH, Cast
from minifloat.grouped_gemm import Grouped, contraction

__all__ = ["CASTS", "SHAPES", "compare", "main"]

SEED = 0
# (experts, rows of each, in, out)
SHAPES = (
    (8, 2048, 4096, 4096),
    (8, 2048, 4096, 8192),
    (8, 2048, 8192, 8192),
    (32, 1024, 7168, 2048),
    (64, 512, 2048, 2048),
)
# name -> (cast of both, fast)
CASTS = {
    "fast": (Cast("fp8_e4m3"), True),
    "split": (Cast("fp8_e4m3"), False),
    "block": (Cast("fp8_e4m3_1x128", pow2=True), False),
}


@contextmanager
def told(values: bool, device: torch.device) -> Iterator[None]:
    """The device has other rates: values are faster everywhere, or nowhere."""
    key, held = env.capability(device) or 0, dict(rates.RATES)
    rates.RATES[key] = rates.Rates(1.0, 1.0, 1.0, 1e9 if values else 1e-9, 1e18)
    try:
        yield
    finally:
        rates.RATES.clear()
        rates.RATES.update(held)


def operand(x: Tensor, group: spread.Members, cast: Cast) -> Grouped:
    shape = (x.shape[0], x.shape[1])
    if cast is HIGH:
        return Grouped(x, None, None, HIGH, shape, True)
    made = spread.quantize(x, group, None, cast)
    scale = made.get("col_scale", made.get("scale"))
    return Grouped(made["col_data"], scale, None, cast, shape, True, True)


def compare(
    shape: tuple[int, int, int, int], name: str, device: torch.device, timer: Timer
) -> dict[str, Any]:
    """One line of the table."""
    experts, rows, k, n = shape
    cast, fast = CASTS[name]
    generator = torch.Generator(device).manual_seed(SEED)
    g, x = (
        torch.randn(experts * rows, d, device=device, generator=generator).bfloat16()
        for d in (n, k)
    )
    group = spread.members(torch.full((experts,), rows, device=device), experts * rows)
    pair = operand(g, group, cast), operand(x, group, cast)
    plain = operand(g, group, HIGH), operand(x, group, HIGH)

    def run(values: bool) -> Tensor:
        with told(values, device):
            return contraction(*pair, group, torch.bfloat16, fast=fast)

    calls = [
        lambda: run(False),
        lambda: run(True),
        lambda: contraction(*plain, group, torch.bfloat16),
    ]
    codes, values, bf16 = (s.median for s in timer.time(calls))
    operations = 2.0 * experts * rows * n * k / 1e6
    return {
        "shape": f"{experts} x ({rows}, {k} -> {n})",
        "format": name,
        "codes_us": codes,
        "values_us": values,
        "bf16_us": bf16,
        "codes_tflops": operations / codes,
        "bf16_tflops": operations / bf16,
        "chosen": rates.choose(cast, cast, n, k, device, fast=fast).name,
    }


def line(row: dict[str, Any]) -> str:
    chosen = row[f"{row['chosen']}_us"]
    wrong = chosen > (1 + rates.MARGIN) * min(row["codes_us"], row["values_us"])
    return (
        f"{row['shape']:<26} {row['format']:>6} {row['codes_us']:9.1f} {row['values_us']:9.1f} "
        f"{row['bf16_us']:9.1f} {row['codes_tflops']:8.0f} {row['bf16_tflops']:8.0f} "
        f"{row['chosen']:>7}{'  WRONG' if wrong else ''}"
    )


HEADER = (
    f"{'shape':<26} {'format':>6} {'codes us':>9} {'values us':>9} {'bf16 us':>9} {'TFLOP/s':>8} "
    f"{'bf16':>8} {'chosen':>7}"
)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=24, help="samples of each call")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    device = torch.device("cuda")
    timer = Timer(device, iterations=args.iterations, seconds=2.0, warmup=3, heat=0.1, batch=3)
    found: dict[str, Any] = {"environment": describe(device, SEED), "rows": []}
    print(HEADER, flush=True)
    for shape in SHAPES:
        for name in CASTS:
            row = compare(shape, name, device, timer)
            found["rows"].append(row)
            print(line(row), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
