"""Options that are set on a layer that is there: Megatron sets `save_original_input` so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import minifloat
from minifloat.recipe import DelayedScaling, Float8CurrentScaling

CURRENT = Float8CurrentScaling()


def pair(**kwargs: Any) -> Any:
    torch.manual_seed(0)
    layers = [minifloat.Linear(32, 48, device="cpu", **kwargs) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    return layers


def trained(layer: Any, x: Any, recipe: Any = CURRENT) -> list[Any]:
    """The tensors that forward kept, and the results."""
    kept: list[Any] = []
    with (
        minifloat.autocast(recipe=recipe),
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
    ):
        y = layer(x)
    y.square().sum().backward()
    return [kept, y]


def test_save_original_input() -> None:
    plain, layer = pair()
    layer.save_original_input = True
    x = torch.randn(16, 32)
    (_, y), (kept, z) = trained(plain, x), trained(layer, x)
    assert [t.data_ptr() for t in kept if t.shape == x.shape] == [x.data_ptr()]
    assert torch.equal(y, z) and torch.equal(plain.weight.grad, layer.weight.grad)
    with pytest.raises(ValueError, match="save_original_input with delayed scaling"):
        trained(layer, x, DelayedScaling())


def test_main_grad() -> None:
    plain, layer = pair()
    layer.fuse_wgrad_accumulation = True
    layer.weight.main_grad = torch.zeros(48, 32)
    x = torch.randn(16, 32)
    trained(plain, x), trained(layer, x)
    assert layer.weight.grad is None
    assert torch.equal(layer.weight.main_grad, plain.weight.grad)
    layer.fuse_wgrad_accumulation = False
    trained(layer, x)
    assert torch.equal(layer.weight.main_grad, layer.weight.grad)


def test_main_grad_of_several() -> None:
    layer, _ = pair(parameters_split=["q", "k"])
    layer.fuse_wgrad_accumulation = True
    layer.q_weight.main_grad = torch.zeros(24, 32)
    with pytest.raises(ValueError, match="fuse_wgrad_accumulation with parameters_split"):
        trained(layer, torch.randn(16, 32))


def test_cache_weights() -> None:
    plain, layer = pair()
    layer.cache_weights = True
    x = torch.randn(16, 32)
    for _ in range(2):
        (_, y), (_, z) = trained(plain, x), trained(layer, x)
        kept = layer._cached
        assert kept is not None and torch.equal(y, z)
        with torch.no_grad():
            for one in (plain, layer):
                one.weight.mul_(2)
