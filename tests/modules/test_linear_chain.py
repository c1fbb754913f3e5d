"""What eager calls of a layer share: made once, and anew where anything it was made of changes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import minifloat
from minifloat import programs
from minifloat.modules.projection import Chain
from minifloat.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    NVFP4BlockScaling,
)

CURRENT, DELAYED = Float8CurrentScaling(), DelayedScaling(amax_history_len=4)


def make(**options: Any) -> minifloat.Linear:
    torch.manual_seed(1)
    return minifloat.Linear(32, 48, bias=False, device="cpu", **options)


def step(layer: Any, recipe: Any, seed: int = 0) -> list[Tensor | None]:
    """Output and gradients of one step; in high precision where the recipe is None."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(16, layer.in_features, generator=generator).to(layer.weight.dtype)
    x.requires_grad_()
    grad = torch.randn(16, layer.out_features, generator=generator).to(layer.weight.dtype)
    layer.weight.grad = None
    with minifloat.autocast(enabled=recipe is not None, recipe=recipe):
        y = layer(x)
    y.backward(grad)
    return [y.detach(), x.grad, layer.weight.grad]


def same(a: list[Tensor | None], b: list[Tensor | None]) -> None:
    for one, other in zip(a, b, strict=True):
        assert (one is None) == (other is None)
        assert one is None or (other is not None and torch.equal(one, other))


def chains(layer: Any) -> list[Chain]:
    begun = layer._last_begun
    return [] if begun is None else list(begun.chains.values())


@pytest.mark.parametrize("recipe", [CURRENT, DELAYED, Float8BlockScaling()], ids=type)
def test_calls_of_one_kind_share_a_chain(recipe: Any) -> None:
    layer = make()
    step(layer, recipe)
    (first,) = chains(layer)
    step(layer, recipe, 1)
    (second,) = chains(layer)
    assert first is second and isinstance(first, Chain)
    index, key, found = layer.weight.get_device(), [], []  # type: ignore[var-annotated]
    assert programs.walk((first,), key, found, index) and len(key) == 1


def test_calls_that_draw_random_bits_share_none() -> None:
    layer = make()
    recipe = NVFP4BlockScaling()
    first, second = step(layer, recipe), step(layer, recipe)
    assert chains(layer) == []
    assert torch.equal(first[0], second[0])  # type: ignore[arg-type]
    assert not torch.equal(first[1], second[1])  # type: ignore[arg-type]


def narrow(layer: Any) -> None:
    layer.in_features //= 2
    layer.weight = torch.nn.Parameter(layer.weight.detach()[:, : layer.in_features].clone())


CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda layer: None,
    "frozen": lambda layer: layer.weight.requires_grad_(False),
    "dtype": lambda layer: layer.to(torch.bfloat16),
    "features": narrow,
    "save_original_input": lambda layer: setattr(layer, "save_original_input", True),
    "cache_weights": lambda layer: setattr(layer, "cache_weights", True),
    "weight": lambda layer: layer.weight.data.mul_(2.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_steps_is_that_of_a_layer_made_so(name: str) -> None:
    """Of a recipe without state: the layer that ran before, and one that did not, are one."""
    layer, new = make(), make()
    recipes = (CURRENT, Float8CurrentScaling(backward_override="dequantized"))
    for recipe in recipes:  # each goes on where the last one was
        for _ in range(3):
            step(layer, recipe)
        for one in (layer, new):
            CHANGES[name](one)
        for i in range(3):
            same(step(layer, recipe, i), step(new, recipe, i))


def test_recipes_take_turns() -> None:
    layer = make()
    recipes = (CURRENT, Float8BlockScaling(), None)
    expected = {recipe: step(make(), recipe) for recipe in recipes}
    for _ in range(3):
        for recipe in recipes:
            same(step(layer, recipe), expected[recipe])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_has_its_own_scales(copied: Callable[[Any], Any]) -> None:
    """Steps of the copy move the copy's scales on, and nobody else's."""
    layer, other = make(), make()
    for i in range(3):
        step(layer, DELAYED, i)
        step(other, DELAYED, i)
    twin = copied(layer)
    assert twin._last_begun is None and layer._last_begun is not None
    for i in range(3, 6):
        same(step(twin, DELAYED, i), step(other, DELAYED, i))
    untouched = make()
    for i in range(3):
        step(untouched, DELAYED, i)
    same(step(layer, DELAYED, 9), step(untouched, DELAYED, 9))


def evaluated(layer: Any, x: Tensor) -> Tensor:
    with torch.no_grad(), minifloat.autocast(recipe=DELAYED):
        return layer(x)  # type: ignore[no-any-return]


def test_buffers_that_are_put_in_place_of_others_are_the_scales() -> None:
    layer, other = make(), make()
    for i in range(3):
        step(layer, DELAYED, i)
        step(other, DELAYED, i)
    state = copy.deepcopy(other.state_dict())
    for i in range(3, 6):
        step(layer, DELAYED, i)  # goes on, and is then put back
    x = torch.randn(16, 32)
    before = evaluated(layer, x)
    layer.load_state_dict(state, assign=True)
    after = evaluated(layer, x)
    assert torch.equal(after, evaluated(other, x)) and not torch.equal(after, before)
    same(step(layer, DELAYED, 7), step(other, DELAYED, 7))
    same(list(layer.delayed.buffers()), list(other.delayed.buffers()))


def test_gradients_off_and_on_again() -> None:
    layer, other = make(), make()
    for i in range(4):
        assert not evaluated(layer, torch.ones(16, 32)).requires_grad
        same(step(layer, DELAYED, i), step(other, DELAYED, i))
