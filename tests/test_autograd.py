"""What is differentiated is so by `torch.autograd`, backward."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import minifloat
from minifloat import ops
from minifloat.recipe import DelayedScaling, Float8BlockScaling, MXFP8BlockScaling

LAYERS: dict[str, Any] = {
    "linear": lambda: minifloat.Linear(32, 32),
    "mlp": lambda: minifloat.LayerNormMLP(32, 32),
    "norm": lambda: minifloat.LayerNorm(32),
    "ops": lambda: ops.Sequential(ops.Linear(32, 32)),
}
RECIPES = [None, DelayedScaling(), Float8BlockScaling(), MXFP8BlockScaling()]


@pytest.mark.parametrize("grads", [True, False])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("kind", LAYERS)
def test_no_forward_mode(kind: str, recipe: Any, grads: bool) -> None:
    """Without gradients on, the tangent was lost in silence."""
    with torch.device("cpu"):
        layer, x = LAYERS[kind](), torch.randn(4, 32)
    with (
        forward_ad.dual_level(),
        torch.set_grad_enabled(grads),
        minifloat.autocast(enabled=recipe is not None, recipe=recipe),
    ):
        assert layer(x).shape == x.shape
        with pytest.raises(RuntimeError, match=r"nor in forward-mode.*torch\.autograd"):
            layer(forward_ad.make_dual(x, x))


@pytest.mark.parametrize("recipe", RECIPES[1:], ids=lambda r: type(r).__name__)
def test_hooks_tell_a_quantized_weight_from_activations(recipe: Any) -> None:
    """Those that offload skip parameters."""
    with torch.device("cpu"), minifloat.quantized_model_init(recipe=recipe):
        layer = LAYERS["linear"]()
    seen: dict[int, bool] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        seen[t.untyped_storage().data_ptr()] = isinstance(t, torch.nn.Parameter)
        return t

    x = torch.randn(64, 32, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
    with minifloat.autocast(recipe=recipe), hooks:
        y = layer(x)
    y.sum().backward()
    parts = [getattr(layer.weight, name) for name in layer.weight.__tensor_flatten__()[0]]
    inner = {t.untyped_storage().data_ptr() for t in parts}
    assert {where for where, is_parameter in seen.items() if is_parameter} == inner
    assert not all(seen.values())


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("recipe", RECIPES[1:], ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_a_hook_that_keeps_values_of_what_is_saved(kind: str, recipe: Any, retain: bool) -> None:
    """As `save_on_cpu(pin_memory=True)`: of a quantized weight they were cast a second time."""

    def pack(t: torch.Tensor) -> torch.Tensor:
        return torch.empty(t.shape, dtype=t.dtype).copy_(t)

    found = []
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
    for packing in (contextlib.nullcontext(), hooks):
        torch.manual_seed(0)
        with torch.device("cpu"), minifloat.quantized_model_init(recipe=recipe):
            layer = LAYERS[kind]()
        x = (torch.randn(64, 32) * torch.randn(32).exp()).requires_grad_()
        with minifloat.autocast(recipe=recipe), packing:
            y = layer(x)
        dy = torch.randn(64, 32)
        if retain:
            y.backward(dy, retain_graph=True)
        y.backward(dy)
        found.append([x.grad, *(p.grad for p in layer.parameters())])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
