"""Graphs of layers whose products are plain matrix products: no recipe, and emulated formats.

On a GPU without tensor cores for a format its operands are values, and a graph multiplies them by
`aten.mm`; on the CPU that is made so here. A layer without bias ends with that product.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import minifloat
from minifloat import operands
from minifloat.formats import Cast
from minifloat.recipe import MXFP8BlockScaling, NVFP4BlockScaling

SAME: dict[str, Any] = {"bias": False, "params_dtype": torch.bfloat16, "device": "cpu"}
LAYERS = {
    "linear": lambda: minifloat.Linear(64, 96, **SAME),
    "norm": lambda: minifloat.LayerNormLinear(64, 96, **SAME),
    "mlp": lambda: minifloat.LayerNormMLP(64, 96, activation="swiglu", **SAME),
}
RECIPES = {"none": None, "mxfp8": MXFP8BlockScaling(), "nvfp4": NVFP4BlockScaling()}


def as_values(cast: Cast, device: torch.device) -> bool:
    return cast.layout[0] is torch.uint8 and cast.layout[6] is not torch.float32


def step(layer: Any, run: Any, recipe: Any, shape: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(1)
    layer.zero_grad(set_to_none=True)
    x = torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
    with minifloat.autocast(enabled=recipe is not None, recipe=recipe):
        y = run(x)
    y.backward(torch.randn_like(y))
    assert x.grad is not None
    return [y.detach(), x.grad, *[p.grad for p in layer.parameters()]]


@pytest.mark.parametrize("shape", [(32, 64), (2, 16, 64)], ids=["matrix", "batch"])
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_reach_a_layer_that_ends_with_a_plain_product(
    kind: str, name: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operands, "_as_values", as_values)
    torch.manual_seed(0)
    layer, recipe = LAYERS[kind](), RECIPES[name]
    expected = step(layer, layer, recipe, shape)
    torch._dynamo.reset()
    graph = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for i, (a, b) in enumerate(zip(step(layer, graph, recipe, shape), expected, strict=True)):
        assert torch.equal(a, b), i
        assert b.count_nonzero() > 0, i
