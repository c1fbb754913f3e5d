"""Every operation against PyTorch's autograd, in fp32; and pipelines against plain modules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import minifloat
from minifloat import ops

from .cases import CASES, Case, inputs, made, mlp, results, rms_norm

# Sums of at most 96 products of numbers around 1, in another order: 96 half ulps, and some for the
# functions in between.
CLOSE: dict[str, float] = {"rtol": 1e-5, "atol": 2e-5}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_autograd(case: Case) -> None:
    op = made(case)
    a, b = inputs(case), inputs(case)
    expected = results(case.reference(op, *a), a, op.parameters())
    got = results(op(*b), b, op.parameters())
    assert len(expected) == len(got)
    for x, y in zip(expected, got, strict=True):
        torch.testing.assert_close(y, x, **CLOSE)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_without_gradients(case: Case) -> None:
    op = made(case)
    given = inputs(case)
    expected = op(*given)
    with torch.no_grad():
        got = op(*given)
    for x, y in zip(_tuple(expected), _tuple(got), strict=True):
        assert x.requires_grad and not y.requires_grad
        assert torch.equal(x, y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_short_dtypes_round_once_or_so(case: Case, dtype: torch.dtype) -> None:
    """Against fp32: what a few roundings of values up to 16 make of it."""
    op = made(case)
    short = copy.deepcopy(op).to(dtype)
    a = [t.detach().to(dtype).float().requires_grad_() for t in inputs(case)]
    b = [t.detach().to(dtype).requires_grad_() for t in a]
    with torch.no_grad():
        for p, q in zip(op.parameters(), short.parameters(), strict=True):
            p.copy_(q.float())
    expected = results(case.reference(op, *a), a, op.parameters())
    got = results(short(*b), b, short.parameters())
    unit = torch.finfo(dtype).eps
    for x, y in zip(expected, got, strict=True):
        assert y.dtype is dtype
        torch.testing.assert_close(y.float(), x, rtol=8 * unit, atol=16 * unit)


def test_a_pipeline_is_its_modules_in_a_row() -> None:
    model = mlp()
    norm, first, act, second = model
    x = torch.randn(4, 6, 32)

    def plain(x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.linear(rms_norm(norm, x), first.weight, first.bias)
        g, linear = h.chunk(2, -1)
        return nn.functional.linear(nn.functional.silu(g) * linear, second.weight, second.bias)

    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = results(plain(a), [a], model.parameters())
    for x_, y in zip(expected, results(model(b), [b], model.parameters()), strict=True):
        torch.testing.assert_close(y, x_, **CLOSE)


def test_other_modules_run_in_between() -> None:
    torch.manual_seed(0)
    inner = nn.Linear(16, 16)
    model = ops.Sequential(ops.GELU(), ops.Bias(16), inner, ops.ReLU())
    assert len(model._module_groups) == 3
    x = torch.randn(3, 16)
    expected = torch.relu(inner(nn.functional.gelu(x, approximate="tanh") + model[1].bias))
    torch.testing.assert_close(model(x), expected, **CLOSE)


def test_cached_input_is_quantized() -> None:
    x = torch.randn(4, 32, requires_grad=True)
    op = ops.GELU(cache_quantized_input=True)
    y, saved = _saved(op, x)
    assert [t.dtype for t in saved] == [torch.uint8, torch.float32]
    y.sum().backward()
    exact = torch.autograd.grad(nn.functional.gelu(x, approximate="tanh").sum(), x)[0]
    # An E4M3 code is off by up to 2**-4 of the value; the slope changes by at most 1.13 per unit.
    assert x.grad is not None
    assert ((x.grad - exact).abs() <= x.abs() * 2**-4 * 1.2 + 1e-2).all()


def _saved(op: Any, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The output, and what is saved for backward."""
    found: list[torch.Tensor] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        found.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        return op(x), found


@pytest.mark.parametrize(("dtype", "n"), [(torch.bfloat16, 32), (torch.float32, 30)])
def test_dropout(dtype: torch.dtype, n: int) -> None:
    x = torch.rand(64, n).add(1).to(dtype).requires_grad_()
    op = ops.Dropout(0.25)
    y, (mask,) = _saved(op, x)
    assert mask.numel() == (64 * n // 8 if dtype is torch.bfloat16 else 64 * n)
    kept = y != 0
    assert 0.65 < kept.float().mean() < 0.85  # 64 * 30 draws of p = 0.75: 10 sigma
    torch.testing.assert_close(y[kept], (x[kept] / 0.75).to(dtype))
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    assert torch.equal(x.grad != 0, kept)
    assert torch.equal(ops.Dropout(1.0)(x), torch.zeros_like(x))


def test_quantize_gives_quantized_tensors() -> None:
    x = torch.randn(32, 32, requires_grad=True)
    op = ops.Quantize(forward=True, backward=True)
    with minifloat.autocast(recipe=minifloat.recipe.Float8CurrentScaling()):
        y = op(x)
    assert isinstance(y, minifloat.QuantizedTensor)
    y.dequantize().sum().backward()
    assert ops.Quantize()(x).equal(x)  # nothing is quantized outside autocast


@pytest.mark.parametrize("in_place", [False, True])
def test_extra_tensors_in_place(in_place: bool) -> None:
    x, extra = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
    expected = x + extra
    y = ops.AddExtraInput(in_place=in_place)(x, extra)
    torch.testing.assert_close(y, expected)
    assert torch.equal(extra, expected) is in_place
    out, other = ops.MakeExtraOutput(in_place=in_place)(x)
    torch.autograd.backward((out, other), (torch.ones(3, 4), torch.full((3, 4), 2.0)))
    assert torch.equal(x.grad, torch.full((3, 4), 3.0))


def test_torch_autocast_decides_the_dtype() -> None:
    model = mlp()
    x = torch.randn(4, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    assert y.dtype is torch.bfloat16
    y.float().sum().backward()
    assert x.grad is not None and x.grad.dtype is torch.float32
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters())


def test_frozen_parameters_and_inputs() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    model[1].weight.requires_grad_(False)
    x = torch.randn(4, 32)
    model(x).sum().backward()
    assert model[0].weight.grad is None and model[1].weight.grad is None
    assert model[1].bias.grad is not None and model[3].weight.grad is not None
    model.requires_grad_(False)
    assert not model(x).requires_grad


def _tuple(y: Any) -> tuple[Any, ...]:
    return y if isinstance(y, tuple) else (y,)
