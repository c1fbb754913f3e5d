"""BasicLinear's functions of tensors and quantizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import minifloat
from minifloat import ops
from minifloat import recipe as recipes
from minifloat.ops.basic import functional
from minifloat.recipe import RecipeState

RECIPES: dict[str, Any] = {
    "current": recipes.Float8CurrentScaling,
    "block": recipes.Float8BlockScaling,
    "mxfp8": recipes.MXFP8BlockScaling,
    "nvfp4": lambda: recipes.NVFP4BlockScaling(disable_stochastic_rounding=True),
}
forward, backward = ops.BasicLinear._functional_forward, ops.BasicLinear._functional_backward


def quantizers(recipe: Any) -> tuple[Any, Any, Any]:
    """Of the input, the weight and the output's gradient."""
    roles = ops.BasicLinear(8, 8, device="cpu").get_quantizer_roles(fwd=True, num_quantizers=2)
    made = RecipeState.create(recipe, mode="forward", num_quantizers=2, roles=roles)
    grads = RecipeState.create(recipe, mode="backward", num_quantizers=1)
    return (*made.make_quantizers()[:2], grads.make_quantizers()[0])


def tensors(lead: tuple[int, ...] = (5, 6)) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return (
        torch.randn(*lead, 48, generator=g).bfloat16(),
        torch.randn(32, 48, generator=g).bfloat16(),
        torch.randn(*lead, 32, generator=g).bfloat16(),
    )


@pytest.mark.parametrize("name", RECIPES)
def test_they_are_what_the_operation_computes(name: str) -> None:
    recipe = RECIPES[name]()
    x, w, g = tensors()
    op = ops.Sequential(ops.BasicLinear(48, 32, device="cpu", dtype=torch.bfloat16))
    with torch.no_grad():
        op[0].weight.copy_(w)
    leaf = x.clone().requires_grad_()
    with minifloat.autocast(recipe=recipe):
        expected = op(leaf)
    expected.backward(g)
    of_x, of_w, of_g = quantizers(recipe)
    y, kept_x, kept_w = forward(
        x, w, with_quantized_compute=True, input_quantizer=of_x, weight_quantizer=of_w
    )
    dx, dw = backward(g, kept_x, kept_w, with_quantized_compute=True, grad_output_quantizer=of_g)
    assert torch.equal(y, expected) and y.shape == (5, 6, 32)
    assert torch.equal(dx, leaf.grad) and torch.equal(dw, op[0].weight.grad)


def test_in_high_precision_with_factors_and_outputs() -> None:
    x, w, g = (t.float() for t in tensors((7,)))
    bias = torch.randn(32)
    out = torch.ones(7, 32)
    y, kept_x, kept_w = forward(
        x, w, alpha=0.5, bias=bias, out=out, beta=2.0, accumulate_into_out=True
    )
    assert y is out and kept_x is not None and kept_w is not None
    torch.testing.assert_close(y, 0.5 * (x @ w.T) + bias + 2.0)
    dx, dw = torch.ones(7, 48), torch.zeros(32, 48)
    found = backward(
        g, kept_x, kept_w, grad_input=dx, accumulate_into_grad_input=True, grad_input_alpha=3.0,
        grad_weight=dw, grad_weight_alpha=2.0,
    )  # fmt: skip
    assert found[0] is dx and found[1] is dw
    torch.testing.assert_close(dx, 3.0 * (g @ w) + 1.0)
    torch.testing.assert_close(dw, 2.0 * (g.T @ x))


def test_what_is_not_needed_is_not_kept() -> None:
    x, w, g = tensors()
    _, kept_x, kept_w = forward(x, w, weight_requires_grad=False)
    assert kept_x is None and kept_w is not None
    dx, dw = backward(g, None, kept_w, weight_requires_grad=False)
    assert dw is None and dx.shape == x.shape
    of_x, of_w, _ = quantizers(recipes.MXFP8BlockScaling())
    options: Any = {"input_quantizer": of_x, "weight_quantizer": of_w}
    on = {"with_quantized_compute": True, **options}
    _, kept_x, kept_w = forward(x, w, backward_override="high_precision", **on)
    assert kept_x is x and kept_w is w
    _, kept_x, _ = forward(x, w, **on)
    assert kept_x._columnwise_data is not None
    assert of_x.columnwise_usage == quantizers(recipes.MXFP8BlockScaling())[0].columnwise_usage


def test_quantized_tensors_and_results() -> None:
    x, w, _ = tensors()
    of_x, of_w, of_g = quantizers(recipes.Float8CurrentScaling())
    made = of_w.quantize(w)
    plain, _, _ = forward(x, made)  # dequantized
    torch.testing.assert_close(plain, x @ made.dequantize().T)
    y, _, _ = forward(
        x, made, with_quantized_compute=True, input_quantizer=of_x, output_quantizer=of_g
    )
    assert isinstance(y, minifloat.QuantizedTensor)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"with_quantized_compute": True}, "input_quantizer: got None"),
        ({"dtype": torch.int32}, "dtype: got torch.int32"),
        ({"tensor_parallel_mode": "rows"}, "tensor_parallel_mode: got 'rows'"),
        ({"accumulate_into_out": True}, "out: got None"),
        ({"out": torch.empty(3, 3)}, r"out: got shape \(3, 3\)"),
    ],
)
def test_bad_arguments(change: dict[str, Any], match: str) -> None:
    x, w, _ = tensors()
    with pytest.raises(ValueError, match=match):
        forward(x, w, **change)


def test_shapes_that_do_not_fit_and_what_is_missing() -> None:
    x, w, g = tensors()
    with pytest.raises(ValueError, match="last dims must agree"):
        forward(x[..., :40], w)
    with pytest.raises(ValueError, match="weight: got None"):
        backward(g, x, None)
    assert ops.BasicLinear._functional_forward is functional.forward
