"""`Sequential` is a list of modules, and groups its operations."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import minifloat
from minifloat import ops

from .cases import mlp


def test_it_is_a_list() -> None:
    a, b, c, d = (ops.ConstantScale(float(i)) for i in range(1, 5))
    model = ops.Sequential(a, b)
    assert model.append(c) is model and list(model) == [a, b, c]
    model.insert(1, d)
    assert list(model) == [a, d, b, c] and len(model) == 4
    assert model.pop(1) is d and list(model) == [a, b, c]
    assert model[-1] is c and list(model[:2]) == [a, b]
    model[0] = d
    del model[1]
    assert list(model) == [d, c]
    model += [a, b]
    assert list(model) == [d, c, a, b] and list(model + [c]) == [d, c, a, b, c]
    del model[1:3]
    assert list(model) == [d, b] and list(model._modules) == ["0", "1"]
    x = torch.ones(2)
    assert torch.equal(model(x), x * 8)
    model.extend([c])
    assert torch.equal(model(x), x * 24)
    with pytest.raises(IndexError, match="index 7 is out of range; it has 3 modules"):
        model[7]


def test_names_come_from_a_dict() -> None:
    model = ops.Sequential({"norm": ops.RMSNorm(8), "proj": ops.Linear(8, 4)})
    assert list(model.state_dict()) == [
        "norm.weight",
        "proj.basic_ops.0.weight",
        "proj.basic_ops.1.bias",
    ]
    assert model(torch.ones(2, 8)).shape == (2, 4)


def test_groups() -> None:
    inner = nn.Linear(8, 8)
    model = ops.Sequential(ops.GELU(), ops.GELU(), inner, ops.GELU())
    first, second, third = model._module_groups
    assert len(first._basic_ops) == 2 and second is inner and len(third._basic_ops) == 1
    model[2] = ops.Identity()
    assert len(model._module_groups) == 1


def test_extra_tensors_across_groups() -> None:
    model = ops.Sequential(
        ops.AddExtraInput(), ops.MakeExtraOutput(), nn.Identity(), ops.AddExtraInput()
    )
    x, a, b = (torch.randn(2, 3) for _ in range(3))
    y, extra = model(x, a, b)
    assert torch.equal(extra, x + a) and torch.equal(y, (x + a) + b)
    with pytest.raises(ValueError, match="extra_inputs: got 1; its operations take 2"):
        model(x, a)


def test_op_kwargs_are_checked() -> None:
    model = ops.Sequential(nn.Identity(), ops.GELU())
    for key in (0, nn.Identity(), "gelu", 9, -9):
        with pytest.raises(ValueError, match="op_kwargs: got the key"):
            model(torch.ones(2), op_kwargs={key: {}})
    with pytest.raises(ValueError, match="GELU is no operation of this Sequential"):
        model(torch.ones(2), op_kwargs={ops.GELU(): {}})


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_are_independent(way: str) -> None:
    """Of a model that has run, and so holds what it fused."""
    model = mlp()
    x = torch.randn(4, 32)
    expected = model(x)
    other = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        model[1].weight.zero_()
    assert torch.equal(other(x), expected) and not torch.equal(model(x), expected)


def test_state_dicts_load() -> None:
    model, other = mlp(), mlp()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.5)
    other.load_state_dict(model.state_dict())
    x = torch.randn(4, 32)
    assert torch.equal(model(x), other(x))


def test_parameters_of_a_container_are_set_where_they_live() -> None:
    layer = ops.Linear(4, 6)
    weight = nn.Parameter(torch.ones(6, 4))
    layer.weight = weight
    assert layer.basic_ops[0].weight is weight and list(layer.state_dict()) == [
        "basic_ops.0.weight",
        "basic_ops.1.bias",
    ]
    with pytest.raises(AttributeError, match="pass bias=True"):
        ops.Linear(4, 6, bias=False).bias = nn.Parameter(torch.zeros(6))


def test_modules_set_by_name_run() -> None:
    """As tools do that wrap layers: `setattr(parent, name, wrapped)`."""
    x = torch.ones(2)
    model = ops.Sequential(ops.ConstantScale(2.0), ops.ConstantScale(3.0))
    setattr(model, "0", ops.ConstantScale(5.0))
    assert torch.equal(model(x), x * 15)
    setattr(model, "1", nn.Identity())
    assert torch.equal(model(x), x * 5)
    delattr(model, "1")
    assert torch.equal(model(x), x * 5) and len(model) == 1


def test_slices_are_replaced() -> None:
    a, b, c, d = (ops.ConstantScale(float(i)) for i in range(1, 5))
    model = ops.Sequential(a, b, c)
    model[1:] = [d]
    assert list(model) == [a, d] and model.pop() is d and list(model) == [a]


def test_only_modules_are_taken() -> None:
    model = ops.Sequential(ops.GELU())
    for change in (
        lambda: model.append(3),  # type: ignore[arg-type]
        lambda: model.insert(0, "a"),  # type: ignore[arg-type]
        lambda: model.__setitem__(0, 3),
        lambda: model.__setitem__(slice(0, 1), [3]),
    ):
        with pytest.raises(TypeError, match="Sequential: got .*; an operation or another nn.Mod"):
            change()
    assert len(model) == 1 and model(torch.ones(2, 2)).shape == (2, 2)
    with pytest.raises(TypeError, match="index: got 1.0; an int or a slice"):
        model[1.0]  # type: ignore[index]


def test_what_operations_are_made_with_is_checked() -> None:
    for made, argument in (
        (lambda: ops.Dropout("a"), "p"),  # type: ignore[arg-type]
        (lambda: ops.ConstantScale("a"), "scale"),  # type: ignore[arg-type]
        (lambda: ops.LayerNorm(8, eps=-1.0), "eps"),
        (lambda: ops.RMSNorm(8, eps=None), "eps"),  # type: ignore[arg-type]
        (lambda: ops.RMSNorm((8, -2)), "normalized_shape"),
        (lambda: ops.L2Normalization(eps=float("nan")), "eps"),
        (lambda: ops.BasicLinear(8, "a"), "out_features"),  # type: ignore[arg-type]
        (lambda: ops.SwiGLU(glu_interleave_size=0), "glu_interleave_size"),
        (lambda: ops.Sequential(None), "Sequential: got NoneType"),
        (lambda: ops.Sequential({"a": 5}), "Sequential: got int"),
        (lambda: ops.Sequential(ops.ReLU())(torch.ones(2), op_kwargs=[1]), "op_kwargs: got list"),
    ):
        with pytest.raises((TypeError, ValueError), match=argument):
            made()  # type: ignore[no-untyped-call]


def test_what_is_no_tensor_is_refused_by_position() -> None:
    x = torch.ones(2, 8)
    with pytest.raises(TypeError, match=r"GELU \(op 0 of 1\): input: got list"):
        ops.GELU()([1.0])
    inner = ops.Sequential(ops.MakeExtraOutput(), ops.Bias(8))
    with pytest.raises(TypeError, match=r"ReLU \(op 0 of 1\): input: got tuple"):
        ops.Sequential(inner, nn.Identity(), ops.ReLU())(x)
    match = r"AddExtraInput \(op 1 of 2\), extra input 0: got None"
    with pytest.raises(TypeError, match=match):
        ops.Sequential(ops.GELU(), ops.AddExtraInput())(x, None)
    with pytest.raises(TypeError, match="FusedOperation: basic_ops: got Linear at 0"):
        ops.FusedOperation([nn.Linear(2, 2)])  # type: ignore[list-item]


def test_meta_tensors_run() -> None:
    """torch.autocast knows no meta device."""
    x = torch.randn(4, 32, device="meta", requires_grad=True)
    y = ops.Sequential(ops.SwiGLU(), ops.L2Normalization())(x)
    y.sum().backward()
    assert y.is_meta and y.shape == (4, 16) and x.grad is not None and x.grad.is_meta
    assert ops.GELU().op_forward(ops.OperationContext(), x.detach()).is_meta


def test_a_scalar_is_not_normalized() -> None:
    with pytest.raises(ValueError, match=r"L2Normalization \(op 0 of 1\): input: got shape \(\)"):
        ops.Sequential(ops.L2Normalization())(torch.ones(()))


@pytest.mark.parametrize("make", [ops.LayerNorm, ops.RMSNorm])
def test_a_norm_that_changed_before_backward_says_which_tensor_did(make: Any) -> None:
    norm = make(16, device="cpu")
    y = ops.Sequential(norm)(torch.randn(4, 16))
    with torch.no_grad():
        norm.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match=r"\[torch.FloatTensor \[16\]\] is at version"):
        y.sum().backward()


@pytest.mark.parametrize("compiled", [False, True])
def test_hooks_of_operations_run(compiled: bool) -> None:
    """They see and change what passes, as those of any module; nothing else is different."""
    linear, add = ops.Linear(32, 32, device="cpu"), ops.AddExtraInput()
    model = ops.Sequential(ops.RMSNorm(32, device="cpu"), linear, ops.GELU(), add, ops.GELU())
    x, more = torch.randn(8, 32, requires_grad=True), torch.randn(8, 32)
    expected = _trained(model, x, more)
    seen: list[str] = []
    handles = [
        linear.register_forward_hook(lambda *_: seen.append("linear")),
        linear.basic_ops[1].register_forward_hook(lambda *_: seen.append("bias")),
        add.register_forward_pre_hook(lambda _, args: (args[0], args[1] * 2.0)),
    ]
    if not compiled:
        handles.append(add.register_full_backward_hook(lambda *_: seen.append("backward")))
    f = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    found = _trained(f, x, more / 2.0, model)
    assert seen == ["bias", "linear", *([] if compiled else ["backward"])]
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a, b)
    for handle in handles:
        handle.remove()
    model(x, more)
    assert len(seen) == (2 if compiled else 3)  # nobody is there any more


def _trained(f: Any, x: torch.Tensor, more: torch.Tensor, model: Any = None) -> list[torch.Tensor]:
    with minifloat.autocast(recipe=minifloat.recipe.MXFP8BlockScaling()):
        y = f(x, more)
    owners = [x, *(f if model is None else model).parameters()]
    return [y, *torch.autograd.grad(y.square().sum(), owners)]


def test_hooks_between_the_ends_of_a_channel_are_refused() -> None:
    model = ops.Sequential(
        ops.MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=False),
        ops.GELU(),
        ops.AddExtraInput().set_extra_input_channel(0, "residual"),
    )
    handle = model[1].register_forward_hook(lambda *_: None)
    with pytest.raises(NotImplementedError, match=r"Sequential: .*hooks.*'residual'.*remove"):
        model(torch.ones(4))
    handle.remove()
    assert model(torch.zeros(4)).eq(0.0).all()
