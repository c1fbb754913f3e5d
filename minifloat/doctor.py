"""`minifloat doctor`: what runs where on this machine, and why."""

from __future__ import annotations

import platform
from typing import NamedTuple

import torch

from . import dispatch, env, recipe
from ._version import __version__
from .formats import FORMATS, HIGH_PRECISION, Cast, Format
from .recipe import Recipe

__all__ = ["Row", "report", "rows"]


def _casts(made: Recipe) -> tuple[Cast, ...]:
    plan = made.plan()
    return plan.x_row, plan.w_row, plan.g_row, plan.x_col, plan.w_col, plan.g_col


# What the operands of a linear layer are cast to, per recipe; the input's row copy first.
RECIPES: dict[str, tuple[Cast, ...]] = {
    "DelayedScaling": _casts(recipe.DelayedScaling()),
    "Float8CurrentScaling": _casts(recipe.Float8CurrentScaling()),
    "Float8BlockScaling": _casts(recipe.Float8BlockScaling()),
    "MXFP8BlockScaling": _casts(recipe.MXFP8BlockScaling()),
    "NVFP4BlockScaling": _casts(recipe.NVFP4BlockScaling()),
    "high precision": (Cast(HIGH_PRECISION.name),),
}


class Row(NamedTuple):
    """One line of the table."""

    recipe: str
    step: str
    backend: str
    why: str


def rows(device: torch.device) -> list[Row]:
    """recipe x {quantize, gemm} -> backend and the reason for it."""
    out = []
    for name, casts in RECIPES.items():
        chosen = {dispatch.choose(c, device) for c in casts}
        # A recipe is as good as the operand that is served worst.
        backend, why = max(chosen, key=lambda c: _WORST.index(c[0]))
        out.append(Row(name, "quantize", backend, why))
        out.append(Row(name, "gemm", *gemm_backend(casts[0].format, device)))
    return out


_WORST = ("native", "triton", "cpu", "emulated")


def gemm_backend(fmt: Format, device: torch.device) -> tuple[str, str]:
    """(backend, reason) that multiplies `fmt` on `device`."""
    if fmt.native is None:
        return "native", "PyTorch multiplies high precision on every device"
    capability = env.capability(device)
    if capability is None:
        return "cpu", "dequantized operands, fp32 products: the format's arithmetic"
    low, high = fmt.native
    sm = f"sm_{capability}"
    if low <= capability < high:
        return "native", f"{sm} tensor cores multiply {fmt.name}"
    need = f"sm_{low}" + (f" to below sm_{high}" if high in (100, 120) else " or later")
    return "emulated", f"{sm} has no {fmt.name} tensor cores ({need}); exact in high precision"


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
        "",
    ]
    table = [Row("recipe", "step", "backend", "why"), *rows(device)]
    widths = [max(len(row[i]) for row in table) for i in range(3)]
    for row in table:
        cells = [cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)]
        lines.append("  ".join([*cells, row.why]))
    return "\n".join(lines)
