"""`inspect`: a step, watched.

Each layer gets a tensor of numbers on its device, to which every cast of the step adds; nobody
reads it before the report is asked for. A compiled model is traced once more, with the operators
that measure in it: the layers' `_probe` is guarded by its graphs. Leaving takes the probe away, and
the graphs of before fit again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch._dynamo import mark_static_address

from ..core.measure import numbers
from ..core.probe import SLOTS, Probe
from .layers import find, release, uncompiled
from .report import Entry, Report

__all__ = ["inspect"]


@contextmanager
def inspect(model: nn.Module, *, masters: Mapping[str, Tensor] | None = None) -> Iterator[Report]:
    """Measure what the casts inside do, in every layer of `model`; yields the `Report`.

    Put it around a training step, eager or compiled. It changes no bit of the step, and waits for
    no device. `masters` are what quantized parameters were cast from, by the parameter's name:
    without it there is nothing to compare them with.
    """
    layers = find(model, "inspect")
    weights = _weights(model, layers, masters or {})
    entries = []
    try:
        for name, layer in layers.items():
            seen = numbers(SLOTS, layer.delayed.scale_input.device)  # where its weight is
            mark_static_address(seen)  # or a CUDA graph would add to a copy of its own
            layer._probe = Probe(seen, weight=weights.get(name))
            kind = type(layer).__name__.lstrip("_")
            sizes = (layer.in_features, layer.out_features)
            entries.append(Entry(name, kind, *sizes, seen))
        report = Report(entries)
        yield report
    finally:
        release(layers)


def _weights(
    model: nn.Module, layers: dict[str, Any], masters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """{layer: what its weight was cast from}."""
    parameters = {uncompiled(name): p for name, p in model.named_parameters(remove_duplicate=False)}
    found = {}
    for name, master in masters.items():
        parameter = parameters.get(name)
        layer = _owner(name)
        if parameter is None or layer not in layers:
            known = ", ".join(n for n in parameters if _owner(n) in layers and _is_weight(n))
            raise ValueError(
                f"inspect: masters: {name!r} is not the weight of a layer of the model; its "
                f"weights: {known or 'none'}"
            )
        if not isinstance(master, Tensor) or master.shape != parameter.shape:
            got = tuple(master.shape) if isinstance(master, Tensor) else type(master).__name__
            raise ValueError(
                f"inspect: masters[{name!r}]: got {got}; a tensor of shape "
                f"{tuple(parameter.shape)} is needed"
            )
        found[layer] = master.detach().to(parameter.device)
    return found


def _owner(parameter: str) -> str:
    """The layer that a weight belongs to: a LayerNormMLP has those of its `fc1` and `fc2`."""
    prefix, _, last = parameter.rpartition(".")
    part = last.removesuffix("_weight") if last in ("fc1_weight", "fc2_weight") else ""
    return ".".join(p for p in (prefix, part) if p)


def _is_weight(parameter: str) -> bool:
    return parameter.rpartition(".")[2] in ("weight", "fc1_weight", "fc2_weight")
