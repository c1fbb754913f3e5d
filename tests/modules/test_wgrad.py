"""Gradients of weights that are computed after backward: where they go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import minifloat
from minifloat.recipe import Float8CurrentScaling

CURRENT = Float8CurrentScaling()
KINDS: dict[str, Any] = {
    "linear": lambda **kw: minifloat.Linear(32, 32, device="cpu", **kw),
    "norm": lambda **kw: minifloat.LayerNormLinear(32, 32, device="cpu", **kw),
    "mlp": lambda **kw: minifloat.LayerNormMLP(32, 32, device="cpu", **kw),
    "experts": lambda **kw: minifloat.GroupedLinear(2, 32, 32, device="cpu", **kw),
    "whole": lambda **kw: minifloat.GroupedLinear(
        2, 32, 32, device="cpu", single_grouped_weight=True, **kw
    ),
}


def weights(layer: nn.Module) -> list[Any]:
    return [p for n, p in layer.named_parameters() if "weight" in n and "norm" not in n]


def forward(layer: Any) -> Any:
    grouped = isinstance(layer, minifloat.GroupedLinear)
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    with minifloat.autocast(recipe=CURRENT):
        return layer(x, [3, 5]) if grouped else layer(x)


def step(layer: Any) -> None:
    forward(layer).square().sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_what_main_grad_takes_later_leaves_no_gradient(kind: str) -> None:
    """The stand-in is for autograd, which is done by then: it is memory that nobody wrote."""
    layer = KINDS[kind](delay_wgrad_compute=True, fuse_wgrad_accumulation=True)
    for w in weights(layer):
        w.main_grad, w.grad_added_to_main_grad = torch.zeros(w.shape), False
    step(layer)
    layer.backward_dw()
    assert all(w.grad is None and w.grad_added_to_main_grad for w in weights(layer))
    assert all(w.main_grad.any() for w in weights(layer))


@pytest.mark.parametrize("kind", KINDS)
def test_later_gradients_are_added_in_the_memory_of_those_that_are_there(kind: str) -> None:
    torch.manual_seed(0)
    layer = KINDS[kind](delay_wgrad_compute=True)
    torch.manual_seed(0)
    other = KINDS[kind]()
    flat = [torch.ones(w.shape) for w in weights(layer)]
    for w, v, held in zip(weights(layer), weights(other), flat, strict=True):
        w.grad, v.grad = held, held.clone()
    step(layer)
    layer.backward_dw()
    step(other)
    for w, v, held in zip(weights(layer), weights(other), flat, strict=True):
        assert w.grad is held and torch.equal(held, v.grad)


@pytest.mark.parametrize("kind", KINDS)
def test_a_computed_weight_has_no_later_gradient(kind: str) -> None:
    """It would be left with a tensor that is gone."""

    class Twice(nn.Module):
        def forward(self, w: Any) -> Any:
            return w * 2

    layer = KINDS[kind](delay_wgrad_compute=True)
    (name, *_) = [n for n, _ in layer.named_parameters() if "weight" in n and "norm" not in n]
    nn.utils.parametrize.register_parametrization(layer, name, Twice())
    with pytest.raises(RuntimeError, match=r"delay_wgrad_compute: .* computed .*; leave"):
        step(layer)
    with torch.no_grad():
        assert forward(layer).shape == (8, 32)
