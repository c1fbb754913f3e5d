"""Storages through autograd: taken apart, saved as tensors, put together again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import minifloat as mf

from .cases import KINDS, assert_same, bits, quantized, values


@pytest.mark.parametrize("kind", KINDS)
def test_save_and_restore(kind: str) -> None:
    t, expected = quantized(kind, internal=True), quantized(kind, internal=True)
    quantizer = t._quantizer
    tensors, obj = t.prepare_for_saving()
    assert obj is t
    assert not bits(t)
    assert all(b is None or isinstance(b, torch.Tensor) for b in tensors)
    rest = t.restore_from_saved([*tensors, values(2)])
    assert_same(t, expected)
    assert t._quantizer is quantizer
    assert len(rest) == 1


@pytest.mark.parametrize("columnwise", [True, False])
def test_the_transpose_is_valid_if_it_is_there(columnwise: bool) -> None:
    t = quantized("current", internal=True, columnwise=columnwise)
    tensors, _ = t.prepare_for_saving()
    assert t._transpose_invalid
    t.restore_from_saved(tensors)
    assert t._transpose_invalid is (t._transpose is None) is (not columnwise)
    # What was flattened with a transpose says nothing about what is put together without one.
    names, ctx = t.__tensor_flatten__()
    inner = {name: getattr(t, name) for name in names if name != "_transpose"}
    made = type(t).__tensor_unflatten__(inner, ctx, t.shape, None)
    assert made._transpose_invalid is (made._transpose is None) is True


@pytest.mark.parametrize("internal", [True, False])
def test_the_group_survives(internal: bool) -> None:
    t = quantized("current", internal=internal)
    t.amax_reduction_group = SimpleNamespace(group_name="shards")
    assert t._quantizer.amax_reduction_group is None  # it is never part of the value
    tensors, obj = t.prepare_for_saving()
    obj.restore_from_saved(tensors)
    names, ctx = obj.__tensor_flatten__()
    inner = {name: getattr(obj, name) for name in names}
    stride = (48, 1) if not internal else None
    made = type(t).__tensor_unflatten__(inner, ctx, t.shape, stride)
    for copy in (obj, made, made.view(-1, 48)):
        assert copy._group_name == "shards"
    made.amax_reduction_group = None
    assert made.amax_reduction_group is None


def test_too_few_tensors_is_an_error() -> None:
    t = quantized("mxfp8", internal=True)
    tensors, _ = t.prepare_for_saving()
    with pytest.raises(ValueError, match="saved 4"):
        t.restore_from_saved(tensors[:3])
    with pytest.raises(ValueError, match="saved: got 1 tensors; 2 objects"):
        mf.restore_from_saved([None, None], [values(2)])


def test_a_list_of_everything() -> None:
    plain, tensor = values(3), quantized("current")
    storages = [quantized("nvfp4", internal=True), quantized("hybrid", internal=True)]
    flat, objects = mf.prepare_for_saving(plain, None, storages[0], tensor, storages[1])
    assert objects[:2] == [None, None] and objects[3] is None
    assert flat[0] is plain and flat[1] is None
    assert any(t is tensor for t in flat)
    out, rest = mf.restore_from_saved(objects, [*flat, plain], return_saved_tensors=True)
    assert out[0] is plain and out[1] is None and out[3] is tensor
    assert_same(out[2], quantized("nvfp4", internal=True))
    assert_same(out[4], quantized("hybrid", internal=True))
    assert rest == [plain]


def test_other_objects_are_refused() -> None:
    with pytest.raises(TypeError, match="got str"):
        mf.prepare_for_saving("x")


class Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        quantizer = KINDS["mxfp8"]()
        quantizer.internal = True
        t = quantizer.quantize(x)
        flat, ctx.tensor_objects = mf.prepare_for_saving(t, x)  # type: ignore[attr-defined]
        ctx.save_for_backward(*flat)
        return x * 1

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: torch.Tensor) -> torch.Tensor:
        t, x = mf.restore_from_func_ctx(ctx)
        assert ctx.tensor_objects is None  # type: ignore[attr-defined]
        with pytest.raises(AttributeError, match="tensor_objects"):
            mf.restore_from_func_ctx(ctx)
        return grads[0] * t.dequantize() / x


def test_through_an_autograd_function() -> None:
    x = values(32, 32).requires_grad_()
    Through.apply(x).sum().backward()
    assert x.grad is not None
    expected = KINDS["mxfp8"]().quantize(x.detach()).dequantize() / x.detach()
    assert torch.equal(x.grad, expected)
