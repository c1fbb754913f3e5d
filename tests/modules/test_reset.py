"""`reset_parameters` starts a layer again, whatever its parameters were by then."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import minifloat as mf
from minifloat import ops
from minifloat import recipe as recipes

WHOLE: dict[str, Any] = {"single_grouped_weight": True, "single_grouped_bias": True}
LAYERS: dict[str, Callable[..., Any]] = {
    "linear": lambda **kw: mf.Linear(32, 64, **kw),
    "mlp": lambda **kw: mf.LayerNormMLP(32, 64, **kw),
    "apart": lambda **kw: mf.GroupedLinear(3, 32, 64, **kw),
    "whole": lambda **kw: mf.GroupedLinear(3, 32, 64, **WHOLE, **kw),
    "op": lambda **kw: ops.BasicLinear(32, 64, **kw),
    "op_apart": lambda **kw: ops.GroupedLinear(3, 32, 64, **kw),
    "op_whole": lambda **kw: ops.GroupedLinear(3, 32, 64, **WHOLE, **kw),
}
RECIPES = {"current": recipes.Float8CurrentScaling, "nvfp4": recipes.NVFP4BlockScaling}


def made(kind: str, name: str, quantized: bool = True, device: str = "cpu") -> Any:
    torch.manual_seed(2)
    context: Any = contextlib.nullcontext()
    if quantized:
        context = mf.quantized_model_init(
            recipe=RECIPES[name](), preserve_high_precision_init_val=True
        )
    with context:
        return LAYERS[kind](device=device)


def change(layer: Any) -> None:
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.1)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", LAYERS)
def test_one_seed_one_start_again(kind: str, name: str) -> None:
    """Quantized weights start from what the seed gives, not from that quantized a second time."""
    layer, fresh = made(kind, name), made(kind, name)
    change(layer)
    torch.manual_seed(2)
    layer.reset_parameters()
    for a, b in zip(layer.parameters(), fresh.parameters(), strict=True):
        assert type(a) is type(b)
        assert torch.equal(a + 0, b + 0)
        initial = getattr(b, "get_high_precision_init_val", None)
        if initial is not None:
            assert type(a.get_high_precision_init_val()) is Tensor
            assert torch.equal(a.get_high_precision_init_val(), initial())


@pytest.mark.parametrize("kind", ["whole", "op_whole"])
def test_one_quantized_weight_that_a_checkpoint_assigned(kind: str) -> None:
    """It was left as it was: what was written went into its values, not into it."""
    layer = made(kind, "current", quantized=False)
    layer.load_state_dict(made(kind, "current").state_dict(), assign=True)
    assert isinstance(layer.weight, mf.GroupedTensor)
    change(layer)
    torch.manual_seed(2)
    layer.reset_parameters()
    assert torch.equal(layer.weight.dequantize(), made(kind, "current").weight.dequantize())


@pytest.mark.parametrize("kind", LAYERS)
def test_what_is_frozen_stays_frozen(kind: str) -> None:
    """Frozen on the meta device, quantized when it leaves it."""
    layer = made(kind, "current", device="meta").requires_grad_(False)
    layer.reset_parameters()
    assert not any(p.requires_grad or p.is_meta for p in layer.parameters())
