"""Quantized weights under delayed scaling: their scale is the layer's, wherever it came from."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import minifloat as mf
from minifloat import ops
from minifloat.recipe import DelayedScaling

RECIPE = DelayedScaling(amax_history_len=4)
LAYERS: dict[str, Callable[[], Any]] = {
    "linear": lambda: mf.Linear(32, 32),
    "norm": lambda: mf.LayerNormLinear(32, 32),
    "mlp": lambda: mf.LayerNormMLP(32, 32),
    "experts": lambda: mf.GroupedLinear(2, 32, 32),
    "op": lambda: ops.BasicLinear(32, 32),
}


def made(kind: str) -> Any:
    torch.manual_seed(0)
    with mf.quantized_model_init(recipe=RECIPE):
        return LAYERS[kind]()


def step(layer: Any, i: int) -> Tensor:
    """A step whose weights grow, so that a scale that stays behind shows."""
    torch.manual_seed(i)
    splits = ([3, 5],) if isinstance(layer, mf.GroupedLinear) else ()
    with mf.autocast(recipe=RECIPE):
        y = layer(torch.randn(8, 32), *splits)
    y.sum().backward()
    with torch.no_grad():
        for p in layer.parameters():
            p.sub_(p.grad, alpha=0.5)
            p.grad = None
    return y.detach()  # type: ignore[no-any-return]


def moved(layer: Any) -> Any:
    """As to another device: every tensor is another one."""
    return copy.deepcopy(layer)._apply(lambda t: t.clone())


def assigned(layer: Any, other: Any) -> Any:
    """From a file in which no tensors share memory."""
    tensors, metadata = mf.flatten_state_dict(layer.state_dict())
    state = mf.unflatten_state_dict({k: t.clone() for k, t in tensors.items()}, metadata)
    other.load_state_dict(state, assign=True)
    return other


def converted(layer: Any, other: Any) -> Any:
    """From a file that was written in another dtype."""
    state = {k: t.double() if "delayed." in k else t for k, t in layer.state_dict().items()}
    other.load_state_dict(copy.deepcopy(state), assign=True)
    return other


def from_meta(layer: Any, kind: str) -> Any:
    with torch.device("meta"):
        other = made(kind)
    return assigned(layer, other)


WAYS: dict[str, Callable[[Any, str], Any]] = {
    "moved": lambda layer, kind: moved(layer),
    "assigned": lambda layer, kind: assigned(layer, made(kind)),
    "converted": lambda layer, kind: converted(layer, made(kind)),
    "from_meta": from_meta,
    "pickle": lambda layer, kind: pickle.loads(pickle.dumps(layer)),
    "deepcopy": lambda layer, kind: copy.deepcopy(layer),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", LAYERS)
def test_the_next_steps_are_those_of_an_uninterrupted_run(kind: str, way: str) -> None:
    layer = made(kind)
    for i in range(3):
        step(layer, i)
    other = WAYS[way](layer, kind)
    for i in range(3, 6):
        assert torch.equal(step(layer, i), step(other, i)), i
    for (name, a), (_, b) in zip(layer.named_buffers(), other.named_buffers(), strict=True):
        assert torch.equal(a, b), name


def test_an_amax_that_comes_with_a_weight_counts() -> None:
    """A checkpoint without delayed scaling's state brings what its weight has recorded."""
    layer, other = made("linear"), made("linear")
    with torch.no_grad():
        layer.weight.mul_(100)
    tensors, metadata = mf.flatten_state_dict(layer.state_dict())
    other.load_state_dict(mf.unflatten_state_dict(tensors, metadata), assign=True)
    assert torch.equal(other.delayed.amax_weight, layer.delayed.amax_weight)
