"""Linear layers side by side with `nn.Linear`: time, host time, memory, CUDA graphs.

    python -m benchmarks.linear                    # every shape, every recipe (needs a GPU)
    python -m benchmarks.linear --filter delayed --json out.json
    python -m benchmarks.linear --shapes small --one-thread    # autograd without threads of its own
    python -m benchmarks.linear --device cpu       # the laptop's table

A step is forward and backward of one layer without bias, bf16 (fp32 on a CPU), weights cast at
every call. Every number is a ratio to `nn.Linear` in the same run, the median of three rounds in
which providers alternate. Each runs long enough to come to the clocks that its power lets it keep.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import minifloat
from minifloat import recipe as recipes
from minifloat.bench.measure import CAPTURED, capture, device_time, host_time, memory
from minifloat.bench.providers import RECIPES as NAMED

__all__ = [
    "LARGE",
    "RECIPES",
    "SMALL",
    "Layer",
    "device_time",
    "graph_time",
    "host_time",
    "main",
    "measure",
    "memory",
    "rounds",
]

Shape = tuple[int, int, int]  # tokens, in, out
LARGE: tuple[Shape, ...] = (
    (16384, 4096, 4096),
    (16384, 4096, 14336),
    (16384, 14336, 4096),
    (8192, 8192, 8192),
)
SMALL: tuple[Shape, ...] = ((2048, 768, 3072), (4096, 1024, 4096))
CPU: tuple[Shape, ...] = ((512, 1024, 1024),)
RECIPES: dict[str, Callable[[], recipes.Recipe]] = {n: type(r) for n, r in NAMED.items()}
ROUNDS = 3


@dataclass
class Layer:
    """One provider: a layer, its input, and a step."""

    module: nn.Module
    x: torch.Tensor
    grad: torch.Tensor
    recipe: recipes.Recipe | None

    def forward(self) -> torch.Tensor:
        if self.recipe is None:
            return self.module(self.x)  # type: ignore[no-any-return]
        with minifloat.autocast(recipe=self.recipe):
            return self.module(self.x)  # type: ignore[no-any-return]

    def step(self) -> None:
        self.forward().backward(self.grad)
        self.clear()

    def clear(self) -> None:
        self.x.grad = None
        self.module.weight.grad = None  # type: ignore[assignment]


def layer(shape: Shape, name: str, device: torch.device) -> Layer:
    tokens, k, n = shape
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    x = torch.randn(tokens, k, device=device, dtype=dtype, requires_grad=True)
    grad = torch.randn(tokens, n, device=device, dtype=dtype) * 1e-3
    if name == "nn.Linear":
        module: nn.Module = nn.Linear(k, n, bias=False, device=device, dtype=dtype)
        return Layer(module, x, grad, None)
    module = minifloat.Linear(k, n, bias=False, device=device, params_dtype=dtype)
    return Layer(module, x, grad, RECIPES[name]())


def graph_time(one: Layer, iterations: int) -> float:
    """Microseconds of a step inside a CUDA graph."""
    graph = capture(one.step)
    graph.replay()
    return device_time(graph.replay, iterations) / CAPTURED


def rounds(layers: dict[str, Layer], timed: Callable[[Layer], float]) -> dict[str, float]:
    """The median of `ROUNDS` interleaved measurements of each."""
    for one in layers.values():
        for _ in range(3):
            one.step()
    samples: dict[str, list[float]] = {name: [] for name in layers}
    for _ in range(ROUNDS):
        for name, one in layers.items():
            samples[name].append(timed(one))
    return {name: statistics.median(s) for name, s in samples.items()}


def cpu_time(one: Layer) -> float:
    samples = []
    for _ in range(5):
        begin = time.perf_counter()
        one.step()
        samples.append(1e6 * (time.perf_counter() - begin))
    return statistics.median(samples)


def measure(shape: Shape, names: list[str], device: torch.device) -> dict[str, dict[str, float]]:
    """{recipe: {quantity: value}}; times in microseconds, and ratios to `nn.Linear`."""
    layers = {name: layer(shape, name, device) for name in ("nn.Linear", *names)}
    out: dict[str, dict[str, float]] = {name: {} for name in layers}
    if device.type != "cuda":
        times = {"step": rounds(layers, cpu_time)}
    else:
        small = shape in SMALL
        iterations = 20 if small else 12
        times = {"step": rounds(layers, lambda one: device_time(one.step, iterations))}
        if small:
            times["host"] = rounds(layers, lambda one: host_time(one.step, 30))
            times["graph"] = rounds(layers, lambda one: graph_time(one, 5))
        for name, one in layers.items():
            peak, kept = memory(one)
            out[name] |= {"peak": peak, "kept": kept}
    for quantity, found in times.items():
        for name, value in found.items():
            out[name][quantity] = value
    base = out["nn.Linear"]
    input_bytes = 2 * shape[0] * shape[1]
    for row in out.values():
        row |= {f"{q}_ratio": row[q] / base[q] for q in (*times, "peak") if base.get(q)}
        if "kept" in row:
            row["kept_ratio"] = row["kept"] / input_bytes
    return out


def line(shape: Shape, name: str, row: dict[str, float]) -> str:
    cells = [f"{'x'.join(map(str, shape)):>18}  {name:>9}  {row['step']:9.1f} us"]
    for quantity in ("step", "peak", "kept", "host", "graph"):
        ratio = row.get(f"{quantity}_ratio")
        if ratio is not None:
            cells.append(f"{quantity} {ratio:5.2f}")
    if "host" in row:
        cells.append(f"(host {row['host']:.0f} us, graph {row['graph']:.1f} us)")
    return "  ".join(cells)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--filter", default="", help="recipes whose name contains this")
    parser.add_argument("--shapes", choices=("all", "large", "small"), default="all")
    parser.add_argument("--one-thread", action="store_true", help="backward in the caller's thread")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    if args.one_thread:
        torch.autograd.set_multithreading_enabled(False)
    device = torch.device(args.device)
    names = [name for name in RECIPES if args.filter in name]
    shapes = (
        CPU
        if device.type == "cpu"
        else {"large": LARGE, "small": SMALL}.get(args.shapes, (*LARGE, *SMALL))
    )
    results = []
    for shape in shapes:
        for name, row in measure(shape, names, device).items():
            print(line(shape, name, row), flush=True)
            results.append({"shape": shape, "recipe": name, **row})
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
