"""Layers and the ways to run them, as data."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager

import minifloat
from minifloat import recipe as recipes
from minifloat.recipe.factories import current_scaling_factory

RECIPES: dict[str, Callable[[], recipes.Recipe]] = {
    "delayed": recipes.DelayedScaling,
    "current": recipes.Float8CurrentScaling,
    "block": recipes.Float8BlockScaling,
    "mxfp8": recipes.MXFP8BlockScaling,
    "nvfp4": recipes.NVFP4BlockScaling,
    "custom": lambda: CUSTOM,
}
CUSTOM = recipes.CustomRecipe(qfactory=current_scaling_factory)


@dataclass(frozen=True)
class Case:
    """One way to run a layer: `module` and `forward` are keyword arguments, the rest is set-up.

    `frozen` names parameters, or is "input".
    """

    name: str
    module: dict[str, Any] = field(default_factory=dict)
    forward: dict[str, Any] = field(default_factory=dict)
    microbatches: tuple[bool | None, ...] = (None, None)
    train: bool = True
    grad: bool = True
    frozen: tuple[str, ...] = ()
    primary: bool = False
    main_grad: bool = False
    checkpoint: str = ""  # "", "reentrant", "non-reentrant", "selective", "ours"
    inside: bool = False  # autocast inside the compiled function
    calibrating: bool = False
    shape: tuple[int, ...] = (3, 7, 48)
    recipes: tuple[str, ...] = tuple(RECIPES)
    kind: str = "Linear"

    def __str__(self) -> str:
        return self.name


STATEFUL = ("delayed",)
STATELESS = ("current", "block", "mxfp8", "nvfp4", "custom")
CASES = (
    Case("plain"),
    Case("inside", inside=True),
    Case("no_bias", module={"bias": False}),
    Case("eval", train=False),
    Case("no_grad", grad=False),
    Case("no_grad_inside", grad=False, inside=True),
    Case("primary", primary=True),
    Case("microbatches", microbatches=(True, False, True, False)),
    Case("microbatches_inside", microbatches=(True, False, False), inside=True),
    Case("main_grad", main_grad=True, module={"fuse_wgrad_accumulation": True}),
    Case(
        "main_grad_microbatches",
        main_grad=True,
        module={"fuse_wgrad_accumulation": True},
        microbatches=(True, False, True),
    ),
    Case("save_original_input", module={"save_original_input": True}, recipes=STATELESS),
    Case("checkpoint_plain", checkpoint="non-reentrant", recipes=STATELESS),
    Case("checkpoint_plain_inside", checkpoint="non-reentrant", inside=True, recipes=STATELESS),
    Case("checkpoint", checkpoint="ours"),
    Case("checkpoint_inside", checkpoint="ours", inside=True),
    Case(
        "checkpoint_microbatches",
        checkpoint="ours",
        module={"cache_weights": True},
        microbatches=(True, False, True, False),
    ),
    Case("return_bias", module={"return_bias": True}),
    Case("frozen_input", frozen=("input",)),
    Case("frozen_weight", frozen=("weight",)),
    Case("frozen_both", frozen=("input", "weight")),
    Case("calibrating", calibrating=True),
    Case("primary_microbatches", primary=True, microbatches=(True, False)),
    Case("primary_inside", primary=True, inside=True),
    Case("frozen_input_microbatches", frozen=("input",), microbatches=(True, False)),
    Case("two_dim", shape=(17, 48)),
    # Without flags a compiled layer casts at every call: delayed scales then move on.
    Case("cache_weights", module={"cache_weights": True}, recipes=STATELESS),
    Case("fp8_grad", forward={"fp8_grad": True}, recipes=STATELESS),
)


def make(
    case: Case, recipe: recipes.Recipe, *, dtype: torch.dtype = torch.float32, **more: Any
) -> Any:
    """A layer for the case, 48 -> 64 (-> 48)."""
    torch.manual_seed(1)
    context: Any = contextlib.nullcontext()
    if case.primary:
        context = minifloat.quantized_model_init(recipe=recipe)
    with context, minifloat.autocast(recipe=recipe):
        layer = getattr(minifloat, case.kind)(48, 64, params_dtype=dtype, **case.module, **more)
    for name, p in layer.named_parameters():
        if p.dim() == 1:
            with torch.no_grad():
                p.add_(torch.linspace(-1, 1, p.numel()))
        if name in case.frozen:
            p.requires_grad_(False)
        if case.main_grad and p.dim() == 2:
            p.main_grad = torch.full(p.shape, 0.5)
    layer.train(case.train)
    return layer


def duplicate(layer: Any) -> Any:
    """A deep copy, with the attributes that parameters carry."""
    made = copy.deepcopy(layer)
    for p, other in zip(layer.parameters(), made.parameters(), strict=True):
        main_grad = getattr(p, "main_grad", None)
        if main_grad is not None:
            other.main_grad = main_grad.clone()
    return made


class Counter:
    """A backend that counts the graphs it compiles, and runs them as they are."""

    def __init__(self, backend: Any = aot_eager) -> None:
        self.backend = backend
        self.graphs = 0

    def __call__(self, module: Any, inputs: Any) -> Any:
        self.graphs += 1
        return self.backend(module, inputs)


def _run(case: Case, layer: Any, x: Tensor, first: bool | None) -> Any:
    kwargs = dict(case.forward)
    if first is not None:
        kwargs["is_first_microbatch"] = first
    if not case.checkpoint:
        return layer(x, **kwargs)
    if case.checkpoint == "ours":
        return minifloat.checkpoint(layer, x, **kwargs)
    from torch.utils.checkpoint import checkpoint

    return checkpoint(layer, x, use_reentrant=case.checkpoint == "reentrant", **kwargs)


def region(case: Case, recipe: recipes.Recipe) -> Any:
    if case.calibrating:
        return minifloat.autocast(enabled=False, calibrating=True, recipe=recipe)
    return minifloat.autocast(recipe=recipe)


def function(case: Case, layer: Any, recipe: recipes.Recipe) -> Callable[..., Any]:
    """What is compiled: the layer, with the autocast inside if the case says so."""
    if not case.inside:
        return lambda x, first: _run(case, layer, x, first)

    def inside(x: Tensor, first: bool | None) -> Any:
        with region(case, recipe):
            return _run(case, layer, x, first)

    return inside


def train(
    case: Case, layer: Any, recipe: recipes.Recipe, call: Callable[..., Any]
) -> Iterator[Any]:
    """Run the microbatches; yields every tensor that must agree."""
    for step, first in enumerate(case.microbatches):
        torch.manual_seed(100 + step)
        x = torch.randn(case.shape, generator=torch.Generator().manual_seed(step))
        dtype = next(layer.parameters()).dtype
        x = x.to(dtype).requires_grad_("input" not in case.frozen and case.grad)
        outer = contextlib.nullcontext() if case.inside else region(case, recipe)
        with torch.set_grad_enabled(case.grad):
            with outer:
                y = call(x, first)
            found = y if isinstance(y, tuple) else (y,)
            yield from found
            # The results that are computed, each with its own gradient.
            made = [t for t in found if t is not None and t.requires_grad and not t.is_leaf]
            if case.grad and made:
                weights = [torch.linspace(-1, i, t.numel()) for i, t in enumerate(made, 1)]
                pairs = zip(made, weights, strict=True)
                torch.autograd.backward(made, [w.reshape(t.shape).to(t.dtype) for t, w in pairs])
        yield x.grad
    for _, p in layer.named_parameters():
        yield p.grad
        yield p
        yield getattr(p, "main_grad", None)
    for _, b in layer.named_buffers():
        yield b


def compare(expected: list[Any], got: list[Any]) -> None:
    assert len(expected) == len(got)
    for i, (a, b) in enumerate(zip(expected, got, strict=True)):
        if a is None or b is None:
            assert a is b, (i, a, b)
            continue
        if isinstance(a, minifloat.QuantizedTensor):
            a, b = a.dequantize(), b.dequantize()  # noqa: PLW2901
        same = torch.equal(a.detach(), b.detach())
        assert same, f"tensor {i}: {(a - b).abs().max().item()} off"
