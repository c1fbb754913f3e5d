"""`Quantize` by scales that live, and by random bits: over steps, in graphs, and recomputed."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import checkpoint as torch_checkpoint

import minifloat
from minifloat import ops
from minifloat import recipe as recipes
from minifloat.recipe.factories import current_scaling_factory

from .cases import assert_same, compiled_like_eager, step

DELAYED = recipes.DelayedScaling()
RECIPES = {"delayed": DELAYED, "stochastic": recipes.NVFP4BlockScaling()}
CHAINS: dict[str, Callable[[], list[Any]]] = {
    "first": lambda: [ops.Quantize(True, True), ops.GELU(), ops.Linear(32, 32)],
    "between": lambda: [ops.Linear(32, 32), ops.Quantize(True, True), ops.L2Normalization()],
    "last": lambda: [ops.GELU(), ops.Quantize(True, True)],
    "two": lambda: [ops.Quantize(True, True), ops.Identity(), ops.Quantize(True, True), ops.ReLU()],
}


def chain(name: str) -> ops.Sequential:
    torch.manual_seed(2)
    return ops.Sequential(*CHAINS[name]())


def batches(count: int = 3) -> list[Tensor]:
    """The amax grows: each scale is another."""
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(32, 32, generator=generator) * (i + 1) for i in range(count)]


def test_the_scale_of_the_gradient_follows_it() -> None:
    model = ops.Sequential(ops.Quantize(forward=False, backward=True))
    grad = torch.linspace(1e-7, 2e-6, 32).expand(32, 32).contiguous()  # below what scale 1 has
    found = []
    for _ in range(2):
        x = torch.randn(32, 32, requires_grad=True)
        with minifloat.autocast(recipe=DELAYED):
            model(x).backward(grad)
        assert isinstance(x.grad, minifloat.QuantizedTensor)
        found.append(x.grad.dequantize())
    assert not found[0].any()
    torch.testing.assert_close(found[1], grad, rtol=2.0**-3, atol=0.0)  # E5M2
    state = model[0].delayed
    assert state.scale_grad_input.item() == pytest.approx(57344 / 2e-6)
    assert state.amax_grad_input.item() == 0.0


def test_get_quantizer_is_what_quantizes() -> None:
    op = ops.Quantize(forward=True, backward=True)
    for recipe in (DELAYED, recipes.CustomRecipe(qfactory=current_scaling_factory)):
        x = torch.randn(32, 32, requires_grad=True)
        with minifloat.autocast(recipe=recipe):
            y = op(x)
        y.dequantize().sum().backward()
        for mode, made in (("forward", y), ("backward", x.grad)):
            assert made._quantizer.dtype == op.get_quantizer(mode, 0).dtype, mode
        assert x.grad._quantizer.dtype == minifloat.DType.kFloat8E5M2
        if recipe is DELAYED:
            assert op.get_quantizer("forward", 0).scale is op.delayed.scale_output
            assert op.get_quantizer("backward", 0).amax is op.delayed.amax_grad_input


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", CHAINS)
def test_compiled_like_eager(name: str, recipe: str) -> None:
    compiled_like_eager(chain(name), lambda m: m, [[x] for x in batches()], RECIPES[recipe])


def _save_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    policy = torch_checkpoint.CheckpointPolicy
    return policy.MUST_SAVE if op is torch.ops.aten.mm.default else policy.PREFER_RECOMPUTE


_SELECTIVE = functools.partial(
    torch_checkpoint.create_selective_checkpoint_contexts, _save_products
)
WAYS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "eager": lambda m: lambda x: minifloat.checkpoint(m, x),
    "reentrant": lambda m: lambda x: minifloat.checkpoint(m, x, use_reentrant=True),
    "selective": lambda m: lambda x: minifloat.checkpoint(m, x, context_fn=_SELECTIVE),
    "compiled": lambda m: torch.compile(
        lambda x: minifloat.checkpoint(m, x), backend="aot_eager", fullgraph=True
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["first", "between"])
def test_a_recompute_quantizes_as_forward_did(name: str, way: str) -> None:
    torch._dynamo.reset()
    model = chain(name)
    other = copy.deepcopy(model)
    again = WAYS[way](other)
    for x in batches():
        assert_same(step(model, model, x, DELAYED), step(other, again, x, DELAYED))
