"""What `convert` did, and what it is worth."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .. import env
from ..modules import LayerNormMLP
from ..modules.advice import HOPPER, served, speed
from ..modules.grouped_linear import GroupedLinear
from ..recipe import Recipe
from .fusion import Fusion
from .policy import Choice

__all__ = ["ConversionReport", "ConvertedLayer", "make_report"]


@dataclass(frozen=True)
class ConvertedLayer:
    """One layer that trains by `recipe`.

    `backend` multiplies ("native", "cpu" or "emulated") and `why` says the reason for that. `speed`
    is how many times as fast as bf16 it is at best, or None where no roofline is known: of experts,
    and on the CPU and every GPU but Hopper. `kept` are the bytes per token that backward needs,
    (in high precision, by the recipe).
    """

    name: str
    in_features: int
    out_features: int
    recipe: Recipe
    backend: str
    why: str
    speed: float | None
    kept: tuple[float, float]


@dataclass(frozen=True)
class ConversionReport:
    """What was converted, what was not, and why; `str` makes a summary.

    `fused` are groups of layers that run as one, by the name of the MLP or of the norm, and
    `unfused` those that look like one and do not, and why. `unused` are patterns of `recipes` that
    decided nothing, `left` are modules that hold matrices and are no linear layers, with their
    class, `warnings` what to look at. Speed and bytes are those of the layers by themselves, before
    anything is fused.
    """

    converted: dict[str, ConvertedLayer]
    skipped: dict[str, str]
    unused: dict[str, str]
    warnings: tuple[str, ...]
    tokens: int
    device: str
    fused: dict[str, Fusion] = field(default_factory=dict)
    unfused: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    _work: dict[str, int] = field(repr=False, default_factory=dict)  # multiplications per token

    @property
    def recipes(self) -> dict[str, Recipe]:
        """The recipe of each converted layer."""
        return {name: layer.recipe for name, layer in self.converted.items()}

    @property
    def slow(self) -> dict[str, float]:
        """Converted layers that are slower than in bf16, and by how much."""
        return {
            n: c.speed for n, c in self.converted.items() if c.speed is not None and c.speed < 1
        }

    @property
    def speed(self) -> float | None:
        """How many times as fast as in bf16 all linear layers together are, at best."""
        total = sum(self._work.values())
        time = 0.0
        for name, work in self._work.items():
            found = self.converted.get(name)
            if found is not None and found.speed is None:
                return None
            time += work if found is None or found.speed is None else work / found.speed
        return total / time if time else None

    @property
    def kept(self) -> tuple[float, float]:
        """Bytes per token that the converted layers keep for backward, (before, after)."""
        found = [c.kept for c in self.converted.values()]
        return sum(before for before, _ in found), sum(after for _, after in found)

    def _speed(self) -> str:
        if self.speed is None:
            return f"no roofline of {self.device} is known, so nothing is promised"
        return (
            f"{self.speed:.2f} times bf16's at {self.tokens} tokens, at best (an H200's roofline)"
        )

    def __str__(self) -> str:
        total = len(self.converted) + len(self.skipped)
        lines = [f"converted {len(self.converted)} of {total} linear layers, on {self.device}"]
        counts = Counter((repr(c.recipe), c.backend) for c in self.converted.values())
        for (recipe, backend), n in counts.items():
            lines.append(f"  {n} by {recipe}: {backend}")
        for reason, names in _by_reason(self.skipped).items():
            lines.append(f"  skipped {_listed(names)}: {reason}")
        for pattern, n in Counter(fusion.pattern for fusion in self.fused.values()).items():
            lines.append(f"  fused {n} {pattern}")
        for reason, names in _by_reason(self.unfused).items():
            lines.append(f"  not fused {_listed(names)}: {reason}")
        if self.converted and self._work:
            lines.append(f"  speed of the linear layers: {self._speed()}")
        if self.converted:
            before, after = self.kept
            lines.append(f"  kept for backward: {before:,.0f} -> {after:,.0f} bytes per token")
        lines += [f"  warning: {text}" for text in self.warnings]
        return "\n".join(lines)


def make_report(
    chosen: list[Choice],
    unused: dict[str, str],
    tokens: int,
    fused: dict[str, Fusion],
    unfused: dict[str, str],
    left: dict[str, str],
) -> ConversionReport:
    converted, skipped, work = {}, {}, {}
    kept: dict[Any, tuple[float, float]] = {}
    devices = []
    for choice in chosen:
        sizes = _sizes(choice.module)
        if not isinstance(choice.module, GroupedLinear):
            work[choice.name] = sum(k * n for k, n in sizes)
        device = next(choice.module.parameters()).device
        devices.append(device)
        if choice.recipe is None:
            skipped[choice.name] = choice.reason
            continue
        converted[choice.name] = _layer(choice, sizes, device, tokens, kept)
    device = devices[0] if devices else torch.device("cpu")
    made = ConversionReport(
        converted, skipped, unused, (), tokens, str(device), fused, unfused, left, work
    )
    return replace(made, warnings=tuple(_warnings(made)))


def _layer(
    choice: Choice,
    sizes: list[tuple[int, int]],
    device: torch.device,
    tokens: int,
    kept: dict[Any, tuple[float, float]],
) -> ConvertedLayer:
    from ..memory import kept_per_token  # fake tensors take a while to import

    module, recipe = choice.module, choice.recipe
    assert recipe is not None
    of = module.fc1 if isinstance(module, LayerNormMLP) else module
    plan = recipe.plan(*of._roles(recipe))
    found = served(plan, device)
    # A model on the meta device runs nowhere yet: its speed is that of the GPU whose roofline is
    # known. The CPU runs the arithmetic of a recipe, and not its speed.
    known = device.type == "meta" or env.capability(device) == HOPPER
    known = known and not isinstance(module, GroupedLinear)
    time = sum(k * n / speed(plan, tokens, k, n) for k, n in sizes)
    parameters = tuple((n, p.shape, p.dtype, p.requires_grad) for n, p in module.named_parameters())
    key = (type(module), parameters, plan, device, getattr(module, "checkpoint", None))
    if key not in kept:
        kept[key] = tuple(kept_per_token(module, r, tokens) for r in (None, recipe))  # type: ignore[assignment]
    return ConvertedLayer(
        choice.name,
        sizes[0][0],
        sizes[-1][1],
        recipe,
        found.name,
        found.why,
        sum(k * n for k, n in sizes) / time if known else None,
        kept[key],
    )


def _sizes(module: Any) -> list[tuple[int, int]]:
    """(in, out) of each product."""
    parts = (module.fc1, module.fc2) if isinstance(module, LayerNormMLP) else (module,)
    return [(part.in_features, part.out_features) for part in parts]


def _warnings(report: ConversionReport) -> list[str]:
    made = []
    if not report.converted:
        made.append("nothing was converted")
    for kind, names in _by_reason(report.left).items():
        made.append(f"no linear layers, left as they are: {_listed(names)}: {kind}")
    for pattern, why in report.unused.items():
        made.append(f"recipes[{pattern!r}] is not used: {why}")
    if report.slow:
        least = min(report.slow.values())
        made.append(
            f"slower than bf16 at {report.tokens} tokens (down to {least:.2f} times its speed): "
            f"{_listed(list(report.slow))}; leave them out with recipes={{name: None}} or filter"
        )
    emulated = [c for c in report.converted.values() if c.backend == "emulated"]
    for why, names in _by_reason({c.name: c.why for c in emulated}).items():
        made.append(f"emulated: {_listed(names)}: {why}")
    return made


def _by_reason(reasons: dict[str, str]) -> dict[str, list[str]]:
    out: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        out.setdefault(reason, []).append(name)
    return out


def _listed(names: list[str], most: int = 4) -> str:
    shown = ", ".join(name or "(model)" for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
