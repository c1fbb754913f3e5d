"""`bisect`: layers, or single products, in high precision one at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..core.measure import numbers
from ..core.probe import SLOTS, Probe
from .layers import find, release
from .ranking import Effect, Ranking
from .report import Entry, Report
from .snapshot import Snapshot
from .statistics import GEMMS

__all__ = ["bisect"]

METRICS = ("loss", "grad")
ALL = (True, True, True)
Choice = dict[str, tuple[bool, bool, bool]]


def bisect(
    model: nn.Module,
    step: Callable[[], Any],
    metric: str | Callable[[Any], Any] = "loss",
    *,
    gemms: bool = False,
) -> Ranking:
    """Which layer's quantization matters most: run `step()` with each in high precision in turn.

    `step` is a forward and a backward on one batch, the same at every call, and nothing else: no
    optimizer. `metric` is "loss" (what `step` returns), "grad" (the relative error of all gradients
    together), or a function of what `step` returns. With `gemms` the forward product and the two
    backward products of a layer are tried one by one.

    Each run starts from the same buffers, delayed scaling's histories among them, the same random
    numbers and no gradients; all of it is as before in the end. Compiled code runs eagerly: every
    choice would be a graph of its own.
    """
    if not callable(step):
        raise TypeError(
            f"bisect: step: got {type(step).__name__}; a function without arguments is needed"
        )
    if not callable(metric) and metric not in METRICS:
        raise ValueError(
            f"bisect: metric: got {metric!r}; allowed: {', '.join(map(repr, METRICS))}, or a "
            "function of what step returns"
        )
    layers = find(model, "bisect")
    state = Snapshot(model, layers)
    try:
        with _eager(), _no_optimizer():
            return _rank(layers, state, step, metric, gemms)
    finally:
        release(layers)
        state.end()


def _rank(layers: dict[str, Any], state: Snapshot, step: Any, metric: Any, gemms: bool) -> Ranking:
    exact, _ = _run(layers, state, step, metric, None, dict.fromkeys(layers, ALL))
    if not math.isfinite(exact):
        raise ValueError(
            f"bisect: metric: {exact} with every layer in high precision: quantization is not the "
            "cause; look at the data, the learning rate and the parameters"
        )
    kept = _copied(state.gradients()) if metric == "grad" else None
    if kept is not None and not kept:
        raise ValueError(
            'bisect: metric="grad": step left no gradients; it must call backward, and must not '
            "clear them afterwards"
        )

    def distance(value: float) -> float:
        away = value if kept is not None else abs(value - exact)
        return math.inf if math.isnan(away) else away

    base, ran = _run(layers, state, step, metric, kept, {}, watch=True)
    again, _ = _run(layers, state, step, metric, kept, {})
    whole = distance(base)
    effects = []
    tried, skipped = _choices(ran, gemms)
    for name, gemm, choice in tried:
        value, _ = _run(layers, state, step, metric, kept, {name: choice})
        away = distance(value)
        effects.append(Effect(name, gemm, value, away, 0.0 if away == whole else whole - away))
    effects.sort(key=lambda e: (e.distance, -e.effect))
    return Ranking(
        metric if isinstance(metric, str) else getattr(metric, "__name__", "metric"),
        base,
        0.0 if kept is not None else exact,
        whole,
        0.0 if again == base else abs(again - base),
        tuple(effects),
        tuple(skipped),
    )


def _choices(
    ran: Report, gemms: bool
) -> tuple[list[tuple[str, str | None, tuple[bool, bool, bool]]], list[str]]:
    """(what to try, what did not run quantized)."""
    tried: list[tuple[str, str | None, tuple[bool, bool, bool]]] = []
    skipped = []
    for name, layer in ran.layers.items():
        quantized = [gemm for gemm, of in layer.gemms.items() if of.quantized]
        if not quantized:
            skipped.append(name)
        elif not gemms:
            tried.append((name, None, ALL))
        else:
            for gemm in quantized:
                only = GEMMS.index(gemm)
                tried.append((name, gemm, (only == 0, only == 1, only == 2)))
    return tried, skipped


def _run(
    layers: dict[str, Any],
    state: Snapshot,
    step: Any,
    metric: Any,
    exact: dict[str, Tensor] | None,
    choice: Choice,
    watch: bool = False,
) -> tuple[float, Report]:
    """(metric, what was cast) of one step. Of "grad" it is the distance from `exact`."""
    state.begin()
    entries = []
    for name, layer in layers.items():
        precise = choice.get(name, (False, False, False))
        seen = numbers(SLOTS, layer.delayed.scale_input.device) if watch else None
        layer._probe = Probe(seen, precise) if watch or True in precise else None
        if seen is not None:
            entries.append(Entry(name, type(layer).__name__, 0, 0, seen))
    result = step()
    name = state.changed()
    if name:
        raise RuntimeError(
            f"bisect: step: it changed the parameter {name!r}; it may run forward and backward "
            "alone. The parameter stays changed: nobody kept a copy"
        )
    if metric == "grad":
        value = 0.0 if exact is None else _error(state.gradients(), exact)
    else:
        value = _number(result if metric == "loss" else metric(result), metric)
    return value, Report(entries)


def _number(value: Any, metric: Any) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value.detach())
    if isinstance(value, int | float):
        return float(value)
    got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    where = 'metric="loss": step returned' if metric == "loss" else "metric: it returned"
    raise TypeError(f"bisect: {where} {got}; one number is needed, or a tensor of one element")


def _error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """The norm of the difference of all gradients, relative to that of the exact ones."""
    if found.keys() != exact.keys():
        odd = ", ".join(sorted(found.keys() ^ exact.keys()))
        raise RuntimeError(f"bisect: step: some runs leave gradients of {odd}, and others do not")
    noise = sum(_square(found[name] - exact[name]) for name in exact)
    return math.sqrt(noise / max(1e-300, sum(map(_square, exact.values()))))


def _square(t: Tensor) -> float:
    return float(torch.linalg.vector_norm(t, dtype=torch.float64)) ** 2


def _copied(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in found.items()}


# ------------------------------------------------------------------------------------ surroundings
@contextmanager
def _eager() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def _no_optimizer() -> Iterator[None]:
    """A step of an optimizer is an error before it changes anything."""

    def refuse(optimizer: Any, args: Any, kwargs: Any) -> None:
        raise RuntimeError(
            f"bisect: step: it calls {type(optimizer).__name__}.step(); it may run forward and "
            "backward alone, so that every run starts from the same parameters"
        )

    handle = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()
