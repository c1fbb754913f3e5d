"""`minifloat doctor`: what runs where on this machine, and why."""

from __future__ import annotations

import platform
from typing import NamedTuple

import torch

from . import batch, casting, env, rates, recipe
from ._version import __version__
from .formats import FORMATS
from .module import HIGH_PLAN
from .modules.advice import served
from .recipe import Plan
from .recipe.plan import products

__all__ = ["DEVICES", "RECIPES", "Row", "expert_rows", "matrix", "report", "rows"]

# What each recipe makes of a linear layer.
RECIPES: dict[str, Plan] = {
    "DelayedScaling": recipe.DelayedScaling().plan(),
    "Float8CurrentScaling": recipe.Float8CurrentScaling().plan(),
    "Float8BlockScaling": recipe.Float8BlockScaling().plan(),
    "MXFP8BlockScaling": recipe.MXFP8BlockScaling().plan(),
    "NVFP4BlockScaling": recipe.NVFP4BlockScaling().plan(),
    "high precision": HIGH_PLAN,
}


# Columns of the support matrix: (GPUs, compute capability).
DEVICES: tuple[tuple[str, int], ...] = (
    ("sm_80", 80), ("sm_89", 89), ("sm_90", 90), ("sm_100", 100), ("sm_120", 120),
)  # fmt: skip


class Row(NamedTuple):
    """One line of the table."""

    recipe: str
    step: str
    backend: str
    why: str


def rows(device: torch.device) -> list[Row]:
    """recipe x {quantize, gemm} -> backend and the reason for it: that of the worst operand."""
    out = []
    for name, plan in RECIPES.items():
        casts = (plan.x_row, plan.w_row, plan.g_row, plan.x_col, plan.w_col, plan.g_col)
        chosen = [casting.choose(cast, device) for cast in casts]
        out.append(Row(name, "quantize", *max(chosen, key=lambda c: _WORST.index(c[0]))))
        out.append(Row(name, "gemm", *served(plan, device)))
    return out


EXPERTS = (1024, 4096, 16384)  # features of experts, in and out, that say where a choice changes


def expert_rows(device: torch.device) -> list[Row]:
    """recipe -> what the gradient of experts' weights multiplies in bf16, by their features."""
    out = []
    for name, plan in RECIPES.items():
        pair = products(plan)[2]
        found = [rates.choose(*pair, n, n, device, fast=plan.fast[2]) for n in EXPERTS]
        names = list(dict.fromkeys(choice.name for choice in found))
        why = found[0].why
        limit = rates.break_even(pair.b, device, plan.fast[2])
        if len(names) > 1 and limit is not None:
            why = f"{names[1]} where in out / (in + out) > {limit:.0f} features"
        out.append(Row(name, "experts' dw", " or ".join(names), why))
    return out


def matrix() -> str:
    """What multiplies each recipe's products on each kind of GPU, as a Markdown table."""
    head = ["recipe", "CPU", *(name for name, _ in DEVICES)]
    lines = [head, ["---"] * len(head)]
    for name, plan in RECIPES.items():
        quantized = any(pair.quantized for pair in products(plan))
        cells = ["exact" if quantized else "native"]
        for _, capability in DEVICES:
            native = all(
                cast.format.element is None or cast.native[0] <= capability < cast.native[1]
                for pair in products(plan)
                for cast in pair
            )
            cells.append("native" if native else "emulated")
        lines.append([f"`{name}`" if quantized else name, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


_WORST = ("native", "triton", "cpu", "emulated")


def report(device: torch.device | None = None) -> str:
    """The text that `python -m minifloat doctor` prints."""
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    capability = env.capability(device)
    lines = [
        f"minifloat {__version__}",
        f"  python   {platform.python_version()}",
        f"  torch    {torch.__version__}",
        f"  triton   {env.triton_version() or 'not installed (kernels need it; CPU does not)'}",
        f"  device   {env.device_name(device)}" + (f" (sm_{capability})" if capability else ""),
        f"  formats  {', '.join(FORMATS)}",
        *([f"  batches  {batch.state()}"] if device.type == "cuda" else []),
        "",
    ]
    table = [Row("recipe", "step", "backend", "why"), *rows(device), *expert_rows(device)]
    widths = [max(len(row[i]) for row in table) for i in range(3)]
    for row in table:
        cells = [cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)]
        lines.append("  ".join([*cells, row.why]))
    return "\n".join(lines)
