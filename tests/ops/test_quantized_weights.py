"""`BasicLinear` made inside `quantized_model_init`: its weight is what `minifloat.Linear` holds."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import minifloat
from minifloat import ops

from .cases import RECIPES, assert_same, compiled_like_eager, mlp, results, step

BF16 = torch.bfloat16
CLASSES = {
    "delayed": minifloat.Float8Tensor,
    "current": minifloat.Float8Tensor,
    "block": minifloat.Float8BlockwiseQTensor,
    "mxfp8": minifloat.MXFP8Tensor,
    "nvfp4": minifloat.NVFP4Tensor,
    "custom": minifloat.Float8Tensor,
}


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def quantized(name: str, make: Any) -> Any:
    torch.manual_seed(2)
    with minifloat.quantized_model_init(recipe=RECIPES[name]):
        return make()


def linear() -> Any:
    return ops.BasicLinear(64, 32, dtype=BF16)


@pytest.mark.parametrize("name", RECIPES)
def test_it_computes_as_the_module_does(name: str) -> None:
    layer = quantized(name, linear)
    assert type(layer.weight.data) is CLASSES[name] and layer.primary_weights_in_fp8
    other = quantized(name, lambda: minifloat.Linear(64, 32, bias=False, params_dtype=BF16))
    other.weight = copy.deepcopy(layer.weight)
    for seed in range(2):
        x, found = values(3, 5, 64, seed=seed), []
        for model in (layer, other):
            given = x.clone().requires_grad_()
            with minifloat.autocast(recipe=RECIPES[name]):
                y = model(given)
            found.append(results(y, [given], model.parameters()))
        assert len(found[0]) == 3 and type(found[0][2]) is Tensor  # y, dx, and a plain dw
        assert_same(*found)


@pytest.mark.parametrize("name", RECIPES)
def test_the_weight_is_the_initial_value_quantized(name: str) -> None:
    torch.manual_seed(2)
    with minifloat.quantized_model_init(
        recipe=RECIPES[name], preserve_high_precision_init_val=True
    ):
        layer = linear()
    torch.manual_seed(2)
    plain = linear()
    assert torch.equal(layer.weight.get_high_precision_init_val(), plain.weight.detach())
    twin = copy.deepcopy(layer.weight._quantizer).quantize(plain.weight.detach())
    assert torch.equal(twin.dequantize(), layer.weight.dequantize())
    assert 0 < (layer.weight.dequantize() - plain.weight).norm() < 0.2 * plain.weight.norm()


@pytest.mark.parametrize("name", RECIPES)
def test_a_pipeline_fuses_and_trains(name: str) -> None:
    """The bits of a plain weight that holds the same values, where those quantize to themselves."""
    model = quantized(name, lambda: mlp(BF16, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = [p.detach().clone() for p in model.parameters()]
    x = values(5, 7, 32)
    step(model, model, x, RECIPES[name])
    fuser = model._module_groups[0]
    assert [type(op).__name__ for op, _ in fuser._forward_ops] == [
        "ForwardNormQuantize",
        "FusedMLP",
    ]
    optimizer.step()
    for old, p in zip(before, model.parameters(), strict=True):
        assert isinstance(p, minifloat.QuantizedTensor) == (p.dim() == 2)
        now = p.dequantize() if p.dim() == 2 else p
        assert not torch.equal(now, old.dequantize() if p.dim() == 2 else old)
    step(model, model, x, RECIPES[name])


GRAPHS = ["mxfp8", *[pytest.param(n, marks=pytest.mark.deep) for n in RECIPES if n != "mxfp8"]]


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("kind", ["linear", pytest.param("mlp", marks=pytest.mark.deep)])
def test_graphs_have_the_bits_of_eager(name: str, kind: str) -> None:
    make = linear if kind == "linear" else lambda: mlp(BF16)
    model = quantized(name, make)
    width = 64 if kind == "linear" else 32
    data = [[values(4, 8, width, seed=i)] for i in range(2)]
    compiled_like_eager(model, lambda m: m, data, RECIPES[name])


def test_outside_autocast_it_is_dequantized() -> None:
    layer, x = quantized("current", linear), values(4, 64)
    with pytest.warns(UserWarning, match="BasicLinear: a quantized weight outside autocast"):
        y = layer(x)
    assert torch.equal(y, torch.nn.functional.linear(x, layer.weight.dequantize()))


def test_another_recipe_is_refused() -> None:
    layer = quantized("mxfp8", lambda: ops.Sequential(ops.Identity(), linear()))
    with (
        pytest.raises(RuntimeError, match=r"op 1 of 2.*Recipe mismatch for 'BasicLinear'"),
        minifloat.autocast(recipe=RECIPES["current"]),
    ):
        layer(values(4, 64))


def test_a_refused_recipe_records_nothing() -> None:
    model = quantized("mxfp8", lambda: ops.Sequential(ops.GELU(), linear()))
    with pytest.raises(RuntimeError, match="Recipe mismatch"):  # noqa: SIM117
        with minifloat.autocast(recipe=RECIPES["delayed"]):
            model(values(4, 64))
    assert not any(b.any() for n, b in model.named_buffers() if "scale" not in n)


@pytest.mark.parametrize("name", ["delayed", "nvfp4"])
def test_state_dicts_and_meta(name: str) -> None:
    layer = quantized(name, linear)
    meta = quantized(name, lambda: ops.BasicLinear(64, 32, dtype=BF16, device="meta"))
    assert meta.weight.is_meta and not isinstance(meta.weight, minifloat.QuantizedTensor)
    torch.manual_seed(2)
    meta.reset_parameters()
    assert torch.equal(meta.weight.dequantize(), layer.weight.dequantize())
    other = quantized(name, linear)
    other.reset_parameters()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.weight.dequantize(), layer.weight.dequantize())
    plain = ops.BasicLinear(64, 32, dtype=BF16)
    assert not plain.primary_weights_in_fp8
