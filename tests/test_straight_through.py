"""Quantizing and dequantizing are identities to autograd, in eager and compiled code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import minifloat as mf
from minifloat import straight_through

from .quantizers.cases import CLASSES, E4M3, SEED, VALUES, Make, assert_same, delayed, sample

classes = pytest.mark.parametrize("make", CLASSES.values(), ids=CLASSES.keys())


def compiled(fn: Any, backend: str = "aot_eager") -> Any:
    torch._dynamo.reset()
    return torch.compile(fn, fullgraph=True, backend=backend)


@classes
def test_values_are_those_without_autograd(make: Make) -> None:
    q, x = make(), sample(6, 32)
    made = straight_through.quantize(x.requires_grad_(), q, None, SEED)
    assert_same(made.detach(), q.quantize_impl(x.detach(), seed=SEED))
    back = straight_through.dequantize(made, torch.bfloat16)
    assert back.dtype == torch.bfloat16
    assert torch.equal(back, made.detach().dequantize(dtype=torch.bfloat16))


@classes
@pytest.mark.parametrize("compile_", [False, True], ids=["eager", "compiled"])
def test_gradient_is_unchanged(make: Make, compile_: bool) -> None:
    q = make()

    def through(x: Tensor) -> Tensor:
        return q.quantize(x, seed=SEED).dequantize() * 3

    x = sample(6, 32).requires_grad_()
    out = (compiled(through) if compile_ else through)(x)
    grad = sample(6, 32, seed=1)
    out.backward(grad)
    assert x.grad is not None
    assert torch.equal(x.grad, 3 * grad)
    with torch.no_grad():
        assert torch.equal(out, through(x))


def test_delayed_gradient_is_unchanged() -> None:
    x = sample(6, 32).requires_grad_()
    delayed()(x).dequantize().backward(sample(6, 32, seed=1))
    assert x.grad is not None
    assert torch.equal(x.grad, sample(6, 32, seed=1))


@pytest.mark.parametrize("compile_", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("nominal", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_have_the_inputs_dtype(nominal: torch.dtype, compile_: bool) -> None:
    q = mf.MXFP8Quantizer(E4M3)

    def through(x: Tensor) -> Tensor:
        return q.quantize(x, dtype=nominal).dequantize(dtype=torch.float16)

    for dtype in (torch.float32, torch.bfloat16):
        x = sample(6, 32).to(dtype).requires_grad_()
        out = (compiled(through) if compile_ else through)(x)
        assert out.dtype == torch.float16
        out.sum().backward()
        assert x.grad is not None
        assert x.grad.dtype == dtype
        assert (x.grad == 1).all()


def test_two_uses_add_up() -> None:
    q = mf.NVFP4Quantizer()
    x = sample(16, 32).requires_grad_()
    made = q(x)
    (made.dequantize() + made.dequantize() * 2).sum().backward()
    assert x.grad is not None
    assert (x.grad == 3).all()


def test_no_gradient_where_none_is_asked_for() -> None:
    q = mf.MXFP8Quantizer(E4M3)
    x = sample(6, 32)
    assert not q(x).requires_grad
    x.requires_grad_()
    with torch.no_grad():
        assert not q(x).requires_grad
    assert not q(x).detach().requires_grad
    with torch.inference_mode():
        assert not q(x).dequantize().requires_grad


def test_second_order_stops_at_the_identity() -> None:
    q = mf.MXFP8Quantizer(E4M3)
    x = sample(6, 32).requires_grad_()
    (grad,) = torch.autograd.grad((q(x).dequantize() * x).sum(), x, create_graph=True)
    # d/dx (Q(x) x) = x + Q(x), whose own derivative is 1 + 1.
    assert torch.equal(grad, x + q(x).dequantize())
    (second,) = torch.autograd.grad(grad.sum(), x)
    assert (second == 2).all()


def test_options_not_given_are_not_passed() -> None:
    class Recorder:
        def __init__(self) -> None:
            self.seen: list[dict[str, Any]] = []

        def quantize_impl(self, x: Tensor, **options: Any) -> Tensor:
            self.seen.append(options)
            return x.clone()

    q = Recorder()
    x = sample(2, 2)
    straight_through.run(q, x, None, None)
    straight_through.run(q, x, torch.bfloat16, None)
    straight_through.quantize(x.requires_grad_(), q, None, SEED)
    assert q.seen == [{}, {"dtype": torch.bfloat16}, {"seed": SEED}]


def test_stochastic_rounding_recomputes_the_same_bits_under_checkpoint() -> None:
    q = VALUES["nvfp4-sr"]()
    made: list[Tensor] = []

    def block(x: Tensor) -> Tensor:
        y = q.quantize(x).dequantize()
        made.append(y.detach())
        return y * x

    x = sample(16, 32).requires_grad_()
    torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).sum().backward()
    assert len(made) == 2
    assert torch.equal(*made)


def test_a_gradient_that_does_not_come_is_none() -> None:
    """As of a quantized weight outside autocast: `main_grad` has its gradient, or later will."""
    current = mf.recipe.Float8CurrentScaling()
    for options in ({"fuse_wgrad_accumulation": True}, {"delay_wgrad_compute": True}):
        with mf.quantized_model_init(recipe=current):
            layer = mf.Linear(16, 16, bias=False, device="cpu", **options)
        layer.weight.main_grad = torch.zeros(16, 16)
        with pytest.warns(UserWarning, match="outside autocast"):
            layer(sample(4, 16).requires_grad_()).sum().backward()
        assert layer.weight.grad is None
        layer.backward_dw()
        made = layer.weight.main_grad if layer.weight.grad is None else layer.weight.grad
        assert made.abs().sum() > 0
