"""`assert_quantized`: which products of which layer really ran in low precision, counted.

A layer that is counted hands a tensor of counters to its products, and each product that runs adds
one to it, inside a compiled graph as well: the graph is traced once more for that, with an operator
that counts in front of every product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .modules import LayerNormLinear, LayerNormMLP, Linear
from .modules.grouped_linear import GroupedLinear
from .ops.basic import grouped_linear as grouped_op
from .ops.basic.linear import BasicLinear

__all__ = ["LayerCounts", "QuantizedReport", "assert_quantized"]

PRODUCTS = ("fprop", "dgrad", "wgrad")
_COUNTED = (Linear, LayerNormLinear, GroupedLinear, BasicLinear, grouped_op.GroupedLinear)


@dataclass(frozen=True)
class LayerCounts:
    """How often each of (fprop, dgrad, wgrad) of a layer ran; of experts, for all of them at once.

    `quantized` with quantized operands, `by_recipe` in high precision where the recipe says so
    (`backward_override`, for one), `high` because no recipe was in force.
    """

    name: str
    quantized: tuple[int, int, int]
    by_recipe: tuple[int, int, int]
    high: tuple[int, int, int]

    @property
    def failure(self) -> str:
        """What is wrong with it, or ""."""
        if sum(self.high):
            ran = ", ".join(f"{n} {p}" for p, n in zip(PRODUCTS, self.high, strict=True) if n)
            more = f" (and {sum(self.quantized)} quantized)" if sum(self.quantized) else ""
            return f"ran in high precision: {ran}{more}"
        if not sum(self.quantized):
            return "its recipe quantizes nothing" if sum(self.by_recipe) else "did not run"
        return ""


@dataclass(frozen=True)
class QuantizedReport:
    """What ran in a step, layer by layer; `result` is what the step returned."""

    layers: dict[str, LayerCounts]
    result: Any = None

    @property
    def total(self) -> int:
        """Quantized products of all layers."""
        return sum(sum(layer.quantized) for layer in self.layers.values())

    @property
    def failures(self) -> dict[str, str]:
        """The layers that did not run quantized, and what they did."""
        return {name: layer.failure for name, layer in self.layers.items() if layer.failure}

    def __str__(self) -> str:
        good = len(self.layers) - len(self.failures)
        lines = [f"{self.total} quantized products ran, in {good} of {len(self.layers)} layers"]
        told = ((name or "(model)", failure) for name, failure in self.failures.items())
        lines += [f"  {name}: {failure}" for name, failure in told]
        return "\n".join(lines)


def assert_quantized(model: nn.Module, step: Callable[[], Any]) -> QuantizedReport:
    """Run `step()` once; AssertionError unless each of our layers in `model` ran quantized.

    The message names the layers that ran in high precision, or not at all. `step` may be compiled,
    and should run forward and backward: all three products are counted. Layers that are plain
    `nn.Linear` are not looked at: `convert` reports them.
    """
    if not callable(step):
        raise TypeError(f"step: got {type(step).__name__}; a function without arguments is needed")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}; an nn.Module is needed")
    found = dict(_layers(model))
    if not found:
        raise AssertionError(
            "model: it has no layer that could be quantized; call minifloat.convert(model), or "
            "build it of minifloat's modules"
        )
    with _counting(found):
        result = step()
        counts = {name: layer._counts.view(3, 3).t().tolist() for name, layer in found.items()}
    report = QuantizedReport(
        {name: LayerCounts(name, *(tuple(of) for of in kinds)) for name, kinds in counts.items()},
        result,
    )
    if report.failures:
        raise AssertionError(f"{report}\n{_advice(report)}")
    return report


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Every product of a module of ours, by name; names are those of the uncompiled model."""
    for name, module in model.named_modules():
        name = ".".join(part for part in name.split(".") if part != "_orig_mod")
        if isinstance(module, _COUNTED):
            yield name, module
        elif isinstance(module, LayerNormMLP):
            prefix = f"{name}." if name else ""
            yield f"{prefix}fc1", module.fc1
            yield f"{prefix}fc2", module.fc2


@contextmanager
def _counting(layers: dict[str, Any]) -> Iterator[None]:
    """Give each layer counters, and take them away."""
    for layer in layers.values():
        if layer._counts is not None:
            raise RuntimeError("assert_quantized: these layers are being counted already")
    try:
        for layer in layers.values():
            device = layer.delayed.scale_input.device  # where its weight is
            layer._counts = torch.zeros(9, dtype=torch.int64, device=device)
        yield
    finally:
        for layer in layers.values():
            layer._counts = None


def _advice(report: QuantizedReport) -> str:
    told = set(report.failures.values())
    lines = []
    if any(text.startswith("ran in high precision") for text in told):
        lines.append(
            "run the step inside minifloat.autocast, or give the layers a recipe with "
            "minifloat.convert; an autocast(enabled=False) that is active comes before both"
        )
    if "did not run" in told:
        lines.append(
            "a layer that did not run was not called: its parent may read its weight directly, or "
            "the step uses another model"
        )
    return "\n".join(lines)
