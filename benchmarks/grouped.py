"""Grouped linear layers side by side with bf16 `torch._grouped_mm` under `torch.compile`.

    python -m benchmarks.grouped                              # every shape, every recipe
    python -m benchmarks.grouped --shapes 64 --recipes best,current --json out.json

A step is forward and backward of `minifloat.GroupedLinear(single_grouped_weight=True, bias=False)`
in bf16, with its splits on the device. Each row is one run, in which four steps alternate, sample
by sample on a cold cache: bf16 and ours, on equal splits and on Zipf's, some of them empty. Every
number is a ratio inside that run:

    equal, zipf   time over bf16's on the same splits
    ragged        our time on Zipf's splits over our time on equal ones
    memory        peak bytes of a step beyond what was there, over bf16's
    launches      kernels of a step with 8 and with 64 experts
    wgrad         what the gradient of the weights multiplies, codes or bf16 values of them

`cast`: weights are cast at every call; `kept`: they were cast before (`is_first_microbatch=False`).
A step that waits for the device is marked `waits`: its time includes the host.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import minifloat
from minifloat import recipe as recipes
from minifloat.bench.environment import describe
from minifloat.bench.measure import memory
from minifloat.bench.timing import Timer

__all__ = ["RECIPES", "SHAPES", "Shape", "main", "measure", "zipf"]

SEED = 0


@dataclass(frozen=True)
class Shape:
    """`experts` of `rows` rows on average, from `k` to `n` features; what a step may take over
    bf16's, with weights cast at every call and before."""

    experts: int
    rows: int
    k: int
    n: int
    limits: tuple[float, float] | None = None

    def __str__(self) -> str:
        return f"{self.experts} x ({self.rows}, {self.k} -> {self.n})"


SHAPES = (
    Shape(8, 2048, 4096, 4096, (0.72, 0.66)),
    Shape(32, 1024, 7168, 2048, (0.80, 0.68)),
    Shape(64, 512, 2048, 2048, (1.00, 0.80)),
)
COUNTED = (Shape(8, 256, 1024, 1024), Shape(64, 256, 1024, 1024))  # for launches
MEMORY = 1.27  # of bf16's, at most
RAGGED = 1.05  # of the time on equal splits, at most


_FAST = recipes.MMParams(use_split_accumulator=False)
_BEST: dict[str, Any] = {
    "fp8_format": recipes.Format.E4M3,
    "fp8_gemm_fprop": _FAST,
    "fp8_gemm_dgrad": _FAST,
    "fp8_gemm_wgrad": _FAST,
}


RECIPES: dict[str, Callable[[], recipes.Recipe]] = {
    # Tensorwise E4M3 everywhere, accumulated fast.
    "best": lambda: recipes.DelayedScaling(**_BEST),
    "best_current": lambda: recipes.Float8CurrentScaling(**_BEST),
    "current": recipes.Float8CurrentScaling,
    "delayed": recipes.DelayedScaling,
    "block": recipes.Float8BlockScaling,
    "mxfp8": recipes.MXFP8BlockScaling,
    "nvfp4": recipes.NVFP4BlockScaling,
}


# ------------------------------------------------------------------------------------------- splits
def zipf(experts: int, total: int, seed: int = SEED) -> list[int]:
    """Rows of each expert, `total` together: one over the rank, an eighth of them without any."""
    busy = max(1, experts - max(1, experts // 8))
    shares = torch.tensor([1 / (rank + 1) for rank in range(busy)], dtype=torch.float64)
    sizes = (shares / shares.sum() * total).long()
    sizes[0] += total - sizes.sum()
    out = torch.zeros(experts, dtype=torch.int64)
    order = torch.randperm(experts, generator=torch.Generator().manual_seed(seed))
    out[order[:busy]] = sizes
    return [int(s) for s in out]


def splits(shape: Shape, name: str) -> list[int]:
    total = shape.experts * shape.rows
    return [shape.rows] * shape.experts if name == "equal" else zipf(shape.experts, total)


# ---------------------------------------------------------------------------------------- providers
class Plain(nn.Module):
    """The same in PyTorch."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        super().__init__()
        made = torch.randn(shape.experts, shape.n, shape.k, device=device, dtype=torch.bfloat16)
        self.weight = nn.Parameter(made * 0.02)

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        ends = torch.cumsum(sizes, 0, dtype=torch.int32)
        return torch._grouped_mm(x, self.weight.transpose(1, 2), offs=ends)


@dataclass
class Step:
    """One provider on one input."""

    run: Any
    weight: nn.Parameter
    x: Tensor
    grad: Tensor
    sizes: Tensor
    recipe: recipes.Recipe | None = None
    first: bool | None = None  # is_first_microbatch

    def forward(self) -> Tensor:
        if self.recipe is None:
            return self.run(self.x, self.sizes)
        with minifloat.autocast(recipe=self.recipe):
            return self.run(self.x, self.sizes, self.first)

    def step(self) -> None:
        self.forward().backward(self.grad)  # type: ignore[no-untyped-call]
        self.clear()

    def clear(self) -> None:
        self.x.grad = self.weight.grad = None


class Bench:
    """A shape's tensors and its bf16 layer, which all recipes are measured against."""

    def __init__(self, shape: Shape, device: torch.device, compiled: bool = True) -> None:
        self.shape, self.device = shape, device
        generator = torch.Generator(device).manual_seed(SEED)
        rows = shape.experts * shape.rows
        options: dict[str, Any] = {"device": device, "generator": generator}
        self.x = torch.randn(rows, shape.k, **options).bfloat16().requires_grad_()
        self.grad = (torch.randn(rows, shape.n, **options) * 1e-3).bfloat16()
        self.sizes = {
            name: torch.tensor(splits(shape, name), device=device) for name in ("equal", "zipf")
        }
        plain = Plain(shape, device)
        run = torch.compile(plain) if compiled else plain
        self.plain = {name: self._step(run, plain.weight, name) for name in self.sizes}

    def _step(self, run: Any, weight: Any, name: str, *rest: Any) -> Step:
        return Step(run, weight, self.x, self.grad, self.sizes[name], *rest)

    def ours(self, recipe: recipes.Recipe, kept: bool) -> dict[str, Step]:
        shape = self.shape
        layer = minifloat.GroupedLinear(
            shape.experts, shape.k, shape.n, bias=False, single_grouped_weight=True,
            params_dtype=torch.bfloat16, device=self.device,
        )  # fmt: skip
        first = False if kept else None
        made = {name: self._step(layer, layer.weight, name, recipe, first) for name in self.sizes}
        if kept:
            casts = self._step(layer, layer.weight, "equal", recipe, True)
            casts.step()
        return made


# ---------------------------------------------------------------------------------------- measuring
def measure(bench: Bench, name: str, kept: bool, timer: Timer) -> dict[str, Any]:
    """One row of the table."""
    ours = bench.ours(RECIPES[name](), kept)
    order = [("bf16", "equal"), ("ours", "equal"), ("bf16", "zipf"), ("ours", "zipf")]
    steps = {"bf16": bench.plain, "ours": ours}
    stats = timer.time([steps[who][of].step for who, of in order])
    found = {f"{who}_{of}": s for (who, of), s in zip(order, stats, strict=True)}
    row: dict[str, Any] = {
        "shape": str(bench.shape),
        "recipe": name,
        "weights": "kept" if kept else "cast",
        **{f"{who}_us": s.median for who, s in found.items()},
        "host_us": found["ours_equal"].host,
        "equal": found["ours_equal"].median / found["bf16_equal"].median,
        "zipf": found["ours_zipf"].median / found["bf16_zipf"].median,
        "ragged": found["ours_zipf"].median / found["ours_equal"].median,
        "waits": found["ours_equal"].waits or found["ours_zipf"].waits,
        "limit": None,
        "wgrad": ours["equal"].run.wgrad_choice(ours["equal"].recipe).name,
    }
    if bench.shape.limits is not None:
        row["limit"] = bench.shape.limits[kept]
    if bench.device.type == "cuda":
        row["memory"] = memory(ours["equal"])[0] / memory(bench.plain["equal"])[0]
    return row


def launches(name: str, device: torch.device) -> dict[str, int]:
    """Kernels of a step, by number of experts; weights cast at every call."""
    found = {}
    for shape in COUNTED:
        step = Bench(shape, device, compiled=False).ours(RECIPES[name](), False)["zipf"].step
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
            torch.cuda.synchronize()
        events = [e for e in profile.events() if e.device_type.name == "CUDA"]
        found[str(shape.experts)] = len([e for e in events if not e.name.startswith("Mem")])
    return found


HEADER = (
    f"{'shape':<24} {'recipe':>12} {'weights':>7} {'us':>9} {'equal':>6} {'limit':>6} {'zipf':>6} "
    f"{'ragged':>6} {'memory':>6} {'host us':>8} {'wgrad':>6}"
)


def line(row: dict[str, Any]) -> str:
    """One row of the printed table."""
    if "error" in row:
        return f"{row['shape']:<24} {row['recipe']:>12} {row['weights']:>7} FAILED: {row['error']}"
    limit = "" if row["limit"] is None else f"{row['limit']:.2f}"
    used = "" if "memory" not in row else f"{row['memory']:.2f}"
    return (
        f"{row['shape']:<24} {row['recipe']:>12} {row['weights']:>7} {row['ours_equal_us']:9.1f} "
        f"{row['equal']:6.2f} {limit:>6} {row['zipf']:6.2f} {row['ragged']:6.2f} {used:>6} "
        f"{row['host_us']:8.1f} {row['wgrad']:>6}{'  waits' if row['waits'] else ''}"
    )


def run(shapes: list[Shape], names: list[str], device: torch.device, timer: Timer) -> Any:
    """Measure, print as it comes, and return what goes into the JSON file."""
    result: dict[str, Any] = {"environment": describe(device, SEED), "rows": [], "launches": {}}
    print(f"{HEADER}", flush=True)
    for shape in shapes:
        bench = Bench(shape, device)
        for name in names:
            for kept in (False, True):
                about = {"shape": str(shape), "recipe": name, "weights": "kept" if kept else "cast"}
                try:
                    row = measure(bench, name, kept, timer)
                except Exception as error:  # one broken recipe must not hide the others
                    row = {**about, "error": repr(error)}
                result["rows"].append(row)
                print(line(row), flush=True)
        del bench
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if device.type == "cuda":
        print("\nlaunches of a step")
        for name in names:
            found = launches(name, device)
            result["launches"][name] = found
            print(f"{name:>12} " + "  ".join(f"{e} experts: {n}" for e, n in found.items()))
    return result


def _chosen(text: str, known: dict[str, Any], argument: str, parser: Any) -> list[str]:
    names = [n for n in text.split(",") if n] or list(known)
    wrong = [n for n in names if n not in known]
    if wrong:
        parser.error(f"{argument}: got {', '.join(wrong)}; allowed: {', '.join(known)}")
    return names


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    by_experts = {str(s.experts): s for s in SHAPES}
    parser.add_argument("--shapes", default="", help=f"of {', '.join(by_experts)} experts")
    parser.add_argument("--recipes", default="", help=f"some of {', '.join(RECIPES)}")
    parser.add_argument("--iterations", type=int, default=24, help="samples of each step")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    device = torch.device("cuda")
    shapes = [by_experts[n] for n in _chosen(args.shapes, by_experts, "--shapes", parser)]
    names = _chosen(args.recipes, RECIPES, "--recipes", parser)
    # Four steps of some 40 kernels, three times: below the launch queue's limit.
    timer = Timer(
        device, iterations=args.iterations, seconds=2.0, warmup=3, heat=0.1, batch=3, strict=False
    )
    result = run(shapes, names, device, timer)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
