"""What is differentiated is so by `torch.autograd`, backward."""

from __future__ import annotations

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
