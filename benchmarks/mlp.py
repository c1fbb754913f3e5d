"""RMSNorm + SwiGLU MLPs side by side with the same MLP in bf16 under `torch.compile`.

    python -m benchmarks.mlp                       # every shape, every recipe (needs a GPU)
    python -m benchmarks.mlp --filter delayed --json out.json

A step is forward and backward of `LayerNormMLP(normalization="RMSNorm", activation="swiglu")`
without bias, bf16, weights cast at every call. Every number is a ratio to the compiled bf16 MLP in
the same run; host time is one to the same MLP in bf16 eager.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import nn

import minifloat
from minifloat.bench.layers import PlainMLP

from .linear import RECIPES, Layer, device_time, host_time, memory, rounds

__all__ = ["LARGE", "SMALL", "PlainMLP", "main", "measure"]

Shape = tuple[int, int, int]  # tokens, hidden, ffn
LARGE: tuple[Shape, ...] = ((16384, 4096, 14336), (8192, 8192, 28672))
SMALL: tuple[Shape, ...] = ((2048, 768, 2048),)


class MLP(Layer):
    """One provider."""

    def clear(self) -> None:
        self.x.grad = None
        self.module.zero_grad(set_to_none=True)


def provider(shape: Shape, name: str, device: torch.device) -> MLP:
    tokens, hidden, ffn = shape
    torch.manual_seed(0)
    x = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16) * 1e-3
    if name.startswith("bf16"):
        plain: nn.Module = PlainMLP(hidden, ffn, device)
        if name == "bf16 compile":
            plain = torch.compile(plain)  # type: ignore[assignment]
        return MLP(plain, x, grad, None)
    ours = minifloat.LayerNormMLP(
        hidden, ffn, bias=False, normalization="RMSNorm", activation="swiglu", device=device,
        params_dtype=torch.bfloat16,
    )  # fmt: skip
    return MLP(ours, x, grad, RECIPES[name]())


def measure(shape: Shape, names: list[str], device: torch.device) -> dict[str, dict[str, float]]:
    """{provider: {quantity: value}}; times in microseconds, bytes, and ratios to the baseline."""
    small = shape in SMALL
    base = "bf16" if small else "bf16 compile"
    out: dict[str, dict[str, float]] = {}
    if small:
        layers = {name: provider(shape, name, device) for name in (base, *names)}
        times = {"host": rounds(layers, lambda one: host_time(one.step, 30))}
        times["step"] = rounds(layers, lambda one: device_time(one.step, 20))
        out = {name: {} for name in layers}
    else:
        layers = {name: provider(shape, name, device) for name in (base, *names)}
        times = {"step": rounds(layers, lambda one: device_time(one.step, 5))}
        out = {name: {} for name in layers}
        for name, one in layers.items():
            peak, kept = memory(one)
            out[name] |= {"peak": peak, "kept": kept}
    for quantity, found in times.items():
        for name, value in found.items():
            out[name][quantity] = value
    reference = dict(out[base])
    for row in out.values():
        row |= {f"{q}_ratio": row[q] / v for q, v in reference.items() if v}
    return out


def line(shape: Shape, name: str, row: dict[str, float]) -> str:
    cells = [f"{'x'.join(map(str, shape)):>18}  {name:>12}  {row['step']:9.1f} us"]
    for quantity in ("step", "peak", "kept", "host"):
        ratio = row.get(f"{quantity}_ratio")
        if ratio is not None:
            cells.append(f"{quantity} {ratio:5.2f}")
    return "  ".join(cells)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--filter", default="", help="recipes whose name contains this")
    parser.add_argument("--shapes", choices=("all", "large", "small"), default="all")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    device = torch.device("cuda")
    names = [name for name in RECIPES if args.filter in name]
    results = []
    for shape in {"large": LARGE, "small": SMALL}.get(args.shapes, (*LARGE, *SMALL)):
        for name, row in measure(shape, names, device).items():
            print(line(shape, name, row), flush=True)
            results.append({"shape": shape, "recipe": name, **row})
        torch.cuda.empty_cache()
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
