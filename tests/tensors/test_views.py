"""Views of the values of quantized tensors: read as plain tensors, never written."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import minifloat
from minifloat.quantizers import UsageError
from minifloat.tensors.views import ValuesView

from .cases import BLOCKED, KINDS, assert_same, quantized

VIEWS: dict[str, Callable[[Any], Any]] = {
    "t": lambda a: a.t(),
    "permute": lambda a: a.permute(1, 0),
    "unbind": lambda a: a.unbind(0)[3],
    "columns": lambda a: a[:, 5:9],
    "steps": lambda a: a[::2],
    "unsqueeze": lambda a: a.unsqueeze(0),
    "expand": lambda a: a.expand(2, 64, 48),
    "twice": lambda a: a.t()[3].view(4, 16)[1:3],
}
WRITES: dict[str, Callable[[Any], Any]] = {
    "zero_": lambda v: v.zero_(),
    "copy_": lambda v: v.copy_(torch.ones(())),
    "item": lambda v: v.__setitem__(0, 1.0),
    "out": lambda v: torch.mul(v, 2, out=v),
    "foreach": lambda v: torch._foreach_mul_([v], 2.0),
    "init": torch.nn.init.zeros_,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_view_of_the_values_is_not_written(kind: str) -> None:
    t, same = quantized(kind), quantized(kind)
    for name, view in VIEWS.items():
        for write in WRITES.values():
            with pytest.raises(UsageError, match=f"view of a {type(t).__name__}'s values, which"):
                write(view(t))
        view(t).clone().zero_()  # a copy is the caller's
        assert_same(t, same), name


@pytest.mark.filterwarnings("ignore:.*moves elements between blocks")
@pytest.mark.parametrize("kind", BLOCKED)
def test_nor_is_a_view_that_moves_elements_between_blocks(kind: str) -> None:
    """What was written to it was lost, without an error."""
    t, same = quantized(kind), quantized(kind)
    assert torch.equal(t.view(48, 64) + 0, t.dequantize().view(48, 64))
    for view in (t.view(48, 64), t.view(torch.int32)):
        with pytest.raises(UsageError, match=f"view of a {type(t).__name__}'s values, which"):
            view.zero_()
    assert_same(t, same)
    x = t.detach().requires_grad_()
    x.view(48, 64)[0].sum().backward()
    assert x.grad.sum() == 64


@pytest.mark.parametrize("write", [lambda a: a.t().zero_(), lambda a: a[3:5].zero_()])
def test_a_graph_writes_none_either(write: Callable[[Any], Any]) -> None:
    t = quantized("mxfp8")

    def written(a: Any) -> Any:
        write(a)
        return a + 1

    with pytest.raises(Exception, match="view of a MXFP8Tensor's values"):
        torch.compile(written, backend="aot_eager", fullgraph=True)(t)
    assert_same(t, quantized("mxfp8"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_view_is_read_as_a_plain_tensor(kind: str) -> None:
    t = quantized(kind)
    x = t.dequantize()
    v, plain = t.t(), x.t()
    assert type(v) is ValuesView and v.data_ptr() and v.stride() == plain.stride()
    for fn in (
        lambda a: a + 1, lambda a: a @ a.t(), lambda a: a.clone(), lambda a: a.contiguous(),
        lambda a: torch.cat([a, a]), lambda a: a.bfloat16(), torch.sum, copy.deepcopy,
    ):  # fmt: skip
        assert type(fn(v)) is Tensor and torch.equal(fn(v), fn(plain))
    assert v.tolist() == plain.tolist() and (v.numpy() == plain.numpy()).all()
    assert repr(v) == repr(plain) and f"{v[0, 0]:.3f}" == f"{plain[0, 0]:.3f}"
    assert float(v[1, 2]) == float(plain[1, 2])
    assert torch.equal(torch.empty(48, 64).copy_(v), plain)
    file = io.BytesIO()
    torch.save(v, file)
    file.seek(0)
    assert type(torch.load(file, weights_only=True)) is Tensor


def test_a_gradient_goes_through_a_view() -> None:
    t = quantized("mxfp8").requires_grad_()
    x = torch.randn(3, 48)
    (x @ t.t()).sum().backward()
    assert type(t.grad) is Tensor and torch.equal(t.grad, x.sum(0).expand(64, 48))
    with pytest.raises(RuntimeError):
        t.t().zero_()


def test_a_graph_takes_makes_and_returns_views() -> None:
    t = quantized("mxfp8")

    def used(v: Tensor, a: Tensor) -> Any:
        return v * 2, v[0], a.t() + v, a.t()

    found = torch.compile(used, backend="aot_eager", fullgraph=True)(t[3:5].t().t(), t[:2].t())
    for a, b in zip(found, used(t.dequantize()[3:5], t.dequantize()[:2].t()), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("recipe", ["DelayedScaling", "Float8CurrentScaling"])
def test_a_flat_write_reaches_both_copies_of_a_layer(recipe: str) -> None:
    made = getattr(minifloat.recipe, recipe)()
    with minifloat.quantized_model_init(recipe=made):
        layer = minifloat.Linear(64, 48, bias=False, device="cpu")
    with torch.no_grad():
        layer.weight.view(-1).zero_()
    x = torch.randn(8, 64, requires_grad=True)
    with minifloat.autocast(recipe=made):
        y = layer(x)
    y.sum().backward()
    assert not y.any() and x.grad is not None and not x.grad.any()
