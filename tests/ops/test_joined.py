"""Sums and factors that a product takes along: their roundings, their memory, and in graphs.

The twin computes each product by itself. In high precision all is rounded once. A product whose
operands have scales of their own is scaled and added to in one pass where it is emulated; any other
is rounded before the sum is.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import minifloat
from minifloat import ops

from .cases import RECIPES, assert_same, compiled_like_eager, step

BF16 = torch.bfloat16
SCALE = 0.3
NAMES: dict[str, Any] = {"none": None, **{n: r for n, r in RECIPES.items() if n != "custom"}}
WHOLE = ("delayed", "current", "nvfp4")  # whose operands have a scale of their own


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def linear(bias: bool = False) -> ops.Linear:
    torch.manual_seed(1)
    return ops.Linear(64, 32, bias=bias, dtype=BF16)


def product(layer: ops.Linear, x: Tensor, recipe: Any, dtype: torch.dtype) -> Tensor:
    """`x w^T (+ bias)` rounded to `dtype`; fp32 is what the product is before it is rounded."""
    one = copy.deepcopy(layer)
    if dtype is torch.float32:
        for op in one.basic_ops:
            for p in op.parameters():
                p.data = p.data.float()
        x = x.float()
    with torch.no_grad(), minifloat.autocast(enabled=recipe is not None, recipe=recipe):
        return one(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_forward_adds(name: str, bias: bool) -> None:
    recipe, layer = NAMES[name], linear(bias)
    model = ops.Sequential(copy.deepcopy(layer), ops.AddExtraInput(in_place=True))
    x, extra = values(3, 5, 64), values(3, 5, 32, seed=1)
    with minifloat.autocast(enabled=recipe is not None, recipe=recipe):
        memory = extra.clone()
        y = model(x, memory)
    assert y.data_ptr() == memory.data_ptr() and torch.equal(y, memory)
    fused = model._module_groups[0]._forward_ops[0][0]
    assert isinstance(fused, ops.ForwardLinearBiasAdd)
    if name == "none" and not bias:
        weight = layer.weight.detach()
        expected = torch.addmm(extra.view(15, 32), x.view(15, 64), weight.t()).view(3, 5, 32)
    elif name in WHOLE and not bias:  # scaled and added in one pass
        expected = (product(layer, x, recipe, torch.float32) + extra.float()).to(BF16)
    else:
        expected = extra + product(layer, x, recipe, BF16)
    if name in WHOLE:
        assert (y.float() - expected.float()).norm() <= 2.0**-8 * expected.float().norm()
    else:
        assert torch.equal(y, expected)


@pytest.mark.parametrize("name", NAMES)
def test_forward_scales_and_adds(name: str) -> None:
    recipe, layer = NAMES[name], linear()
    model = ops.Sequential(
        copy.deepcopy(layer), ops.ConstantScale(SCALE), ops.AddExtraInput(in_place=True)
    )
    x, extra = values(3, 5, 64), values(3, 5, 32, seed=1)
    with minifloat.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x, extra.clone())
    assert isinstance(model._module_groups[0]._forward_ops[0][0], ops.ForwardLinearScaleAdd)
    exact = SCALE * product(layer, x, recipe, torch.float32).double() + extra.double()
    # Once, or twice: far less than the three roundings of separate operations, on the average.
    off = (y.double() - exact).abs().mean() / exact.abs().mean()
    separate = (product(layer, x, recipe, BF16) * SCALE + extra).double()
    assert off <= 2.0**-8
    if name == "none":
        assert off <= (separate - exact).abs().mean() / exact.abs().mean()
        flat = torch.addmm(
            extra.view(15, 32), x.view(15, 64), layer.weight.detach().t(), alpha=SCALE
        )
        assert torch.equal(y, flat.view(3, 5, 32))
    elif name not in WHOLE:
        assert torch.equal(y, torch.add(extra, product(layer, x, recipe, BF16), alpha=SCALE))


@pytest.mark.parametrize("name", NAMES)
def test_backward_adds(name: str) -> None:
    recipe, layer = NAMES[name], linear()
    model = ops.Sequential(ops.MakeExtraOutput(in_place=True), copy.deepcopy(layer))
    plain = ops.Sequential(copy.deepcopy(layer))
    x = values(3, 5, 64).requires_grad_()
    g, of_extra = values(3, 5, 32, seed=1), values(3, 5, 64, seed=2)
    with minifloat.autocast(enabled=recipe is not None, recipe=recipe):
        y, extra = model(x)
    memory = of_extra.clone()
    (dx,) = torch.autograd.grad((y, extra), (x,), (g, memory))
    fuser = model._module_groups[0]
    assert isinstance(fuser._backward_ops[0][0], ops.BackwardLinearAdd)
    assert dx.data_ptr() == memory.data_ptr()
    with minifloat.autocast(enabled=recipe is not None, recipe=recipe):
        y = plain(x)
    (alone,) = torch.autograd.grad(y, (x,), g)
    twice = of_extra + alone
    if name in ("none", *WHOLE):
        assert (dx.float() - twice.float()).norm() <= 2.0**-8 * twice.float().norm()
    else:
        assert torch.equal(dx, twice)
    if name == "none":
        weight = layer.weight.detach()
        once = torch.addmm(of_extra.view(15, 64), g.view(15, 32), weight)
        assert torch.equal(dx, once.view(3, 5, 64))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", [0.25, SCALE])
def test_backward_scales(name: str, scale: float) -> None:
    """What is cast is the gradient as it comes: a power of two changes no digit of anything."""
    recipe, layer = NAMES[name], linear()
    model = ops.Sequential(copy.deepcopy(layer), ops.ConstantScale(scale))
    plain = ops.Sequential(copy.deepcopy(layer))
    x, g = values(3, 5, 64).requires_grad_(), values(3, 5, 32, seed=1)
    found = []
    for net, given in ((model, g), (plain, (g * scale))):
        with minifloat.autocast(enabled=recipe is not None, recipe=recipe):
            y = net(x)
        found.append(torch.autograd.grad(y, (x, *net.parameters()), given))
    assert isinstance(model._module_groups[0]._backward_ops[0][0], ops.BackwardLinearScale)
    for got, expected in zip(*found, strict=True):
        off = (got.float() - expected.float()).norm() / expected.float().norm()
        if scale == 0.25 and name != "delayed":
            assert torch.equal(got, expected)
        else:  # casts of other numbers; delayed: by a scale that does not follow them
            assert off <= (2.0**-7 if name == "none" else 0.2 if name == "nvfp4" else 0.1)


def test_main_grad_takes_a_scaled_gradient() -> None:
    layer = ops.BasicLinear(16, 8, dtype=BF16, accumulate_into_main_grad=True)
    layer.weight.main_grad = torch.full((8, 16), 2.0)  # type: ignore[attr-defined]
    x = values(4, 16)
    model = ops.Sequential(layer, ops.ConstantScale(SCALE))
    model(x).backward(torch.ones(4, 8, dtype=BF16))
    expected = 2.0 + SCALE * x.float().sum(0).expand(8, 16)
    assert torch.allclose(layer.weight.main_grad, expected)  # type: ignore[attr-defined]


def fresh(model: Any) -> Any:
    """Extra inputs that may be written to."""
    return lambda x, *extra: model(x, *[t * 1.0 for t in extra])


@pytest.mark.parametrize("what", ["dtype", "broadcast", "strided", "channel"])
def test_what_a_product_cannot_take_is_added_afterwards(what: str) -> None:
    layer = linear()
    x = values(6, 64)
    extra = {
        "dtype": values(6, 32, seed=1).float(),
        "broadcast": values(6, 32, seed=1),
        "strided": values(32, 6, seed=1).t(),
        "channel": values(6, 32, seed=1),
    }[what]
    if what == "channel":
        first = ops.MakeExtraOutput().set_extra_output_channel(0, "skip", output_to_caller=False)
        square = ops.BasicLinear(64, 64, dtype=BF16)
        last = ops.AddExtraInput(in_place=True).set_extra_input_channel(0, "skip")
        model = ops.Sequential(first, square, last)
        y = model(x)
        assert torch.equal(y, torch.addmm(x, x, square.weight.detach().t()))
        assert torch.equal(x, values(6, 64))  # what came by a channel may be saved elsewhere
        return
    model = ops.Sequential(layer, ops.AddExtraInput(in_place=True))
    given = extra.clone(memory_format=torch.preserve_format)
    if what == "broadcast":
        big = torch.zeros(2, 6, 32, dtype=BF16) + extra
        y = model(x, big.clone())
        assert y.shape == (2, 6, 32)
        assert torch.equal(y, big + product(layer, x, None, BF16))
        return
    y = model(x, given)
    assert y.dtype == extra.dtype
    assert torch.equal(y, extra + product(layer, x, None, BF16))


GRAPHS = ["none", "current", *[pytest.param(n, marks=pytest.mark.deep)
          for n in ("delayed", "block", "mxfp8", "nvfp4")]]  # fmt: skip


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_have_the_bits_of_eager(name: str) -> None:
    torch.manual_seed(0)
    model = ops.Sequential(
        ops.MakeExtraOutput(in_place=True),
        ops.Linear(64, 64, bias=False, dtype=BF16),
        ops.ConstantScale(SCALE),
        ops.AddExtraInput(in_place=True),
        ops.Linear(64, 64, bias=True, dtype=BF16),
        ops.AddExtraInput(in_place=True),
    )
    data = [[values(4, 8, 64, seed=i + j) for j in range(3)] for i in range(2)]
    compiled_like_eager(model, fresh, data, NAMES[name])


def test_a_users_tensors_are_not_written_to_without_in_place() -> None:
    model = ops.Sequential(
        ops.MakeExtraOutput(), linear(), ops.ConstantScale(SCALE), ops.AddExtraInput()
    )
    x, extra = values(4, 64).requires_grad_(), values(4, 32, seed=1)
    of_y, of_x = values(4, 32, seed=2), values(4, 64, seed=3)
    kept = [t.detach().clone() for t in (x, extra, of_y, of_x)]
    y, again = model(x, extra)
    torch.autograd.backward((y, again), (of_y, of_x))
    assert_same(kept, [x.detach(), extra, of_y, of_x])


def test_step_runs_twice() -> None:
    """Nothing that a later step reads was written to."""
    model = ops.Sequential(ops.MakeExtraOutput(in_place=True), linear(), ops.ConstantScale(SCALE))
    x = values(4, 64)
    assert_same(step(model, model, x, None), step(model, model, x, None))
