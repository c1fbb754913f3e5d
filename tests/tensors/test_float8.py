"""FP8 with one scale: codes, transpose, scale."""

from __future__ import annotations

import pytest
import torch

from minifloat import Float8CurrentScalingQuantizer, Float8Tensor, Float8TensorStorage, UsageError

from .cases import E4M3, E5M2, KINDS, assert_same, quantized, values


@pytest.mark.parametrize("kind", ["current", "delayed"])
@pytest.mark.parametrize("shape", [(6, 4), (2, 3, 4), (4,), (0, 4)])
def test_buffers(kind: str, shape: tuple[int, ...]) -> None:
    t = quantized(kind, *shape)
    assert isinstance(t, Float8Tensor)
    assert tuple(t._data.shape) == shape
    assert tuple(t._transpose.shape) == (*shape[-1:], *shape[:-1])
    assert t._data.dtype == t._transpose.dtype == torch.uint8
    assert tuple(t._scale_inv.shape) == (1,) and t._scale_inv.dtype == torch.float32
    assert t._fp8_dtype == E4M3
    k = shape[-1]
    assert torch.equal(t._transpose.reshape(k, -1), t._data.reshape(-1, k).t())


def test_values_are_codes_times_the_inverse_scale() -> None:
    t = quantized("current")
    codes = t._data.view(torch.float8_e4m3fn).float()
    assert torch.equal(t.dequantize(), codes * t._scale_inv)
    scale = torch.tensor([448.0]) / values(64, 48).abs().max()
    assert torch.equal(t._scale_inv, 1 / scale)


def test_positional_and_keyword_constructors() -> None:
    t = quantized("current", internal=True)
    made = Float8TensorStorage(
        t._data, t._scale_inv, E4M3, torch.bfloat16, t._transpose, t._quantizer
    )
    assert made._dtype == torch.bfloat16 and made._transpose is t._transpose
    bare = Float8TensorStorage(data=t._data, fp8_scale_inv=t._scale_inv, fp8_dtype=E4M3)
    assert bare._quantizer is None and bare._dtype == torch.float32 and bare._transpose_invalid
    assert torch.equal(bare.dequantize(), t.dequantize())
    bare.update_usage(columnwise_usage=True)
    assert torch.equal(bare._transpose, t._transpose)


def test_the_transpose_comes_and_goes() -> None:
    t = quantized("current", columnwise=False)
    assert t._transpose_invalid
    t._create_transpose()
    assert not t._transpose_invalid
    assert_same(t, quantized("current"))
    before = t._transpose
    t._create_transpose()
    assert t._transpose is before
    t._reset_caches()
    assert t._transpose_invalid and t._transpose is None
    t._create_transpose()
    t.remove_caches()
    assert t._transpose is None


def test_a_transpose_that_is_the_only_payload_stays() -> None:
    t = quantized("current", rowwise=False)
    t._reset_caches()
    assert t._transpose is not None
    assert t.get_usages() == {"rowwise": False, "columnwise": True}
    assert torch.equal(t.dequantize(), quantized("current").dequantize())
    with pytest.raises(UsageError):
        t.update_usage(rowwise_usage=True)


def test_elements_do_not_mix() -> None:
    t = quantized("current")
    other = Float8CurrentScalingQuantizer(E5M2).quantize(values(64, 48))
    with pytest.raises(RuntimeError, match="_fp8_dtype"):
        t.copy_from_storage(other)
    t.copy_(other)
    assert_same(t, KINDS["current"]().quantize(other.dequantize()))


def test_delayed_scaling_keeps_its_live_tensors() -> None:
    quantizer = KINDS["delayed"]()
    t = quantizer.quantize(values(8, 8))
    assert t._quantizer.scale is quantizer.scale and t._quantizer.amax is quantizer.amax
    quantizer.amax.zero_()
    t.copy_(torch.full((8, 8), 3.0))
    assert quantizer.amax.item() == 3.0
    assert t._scale_inv.item() == 1 / 16
    names, ctx = t.__tensor_flatten__()
    assert names == ["_data", "_transpose", "_scale_inv", "_live_scale", "_live_amax"]
    assert t._live_scale is quantizer.scale
    made = type(t).__tensor_unflatten__({n: getattr(t, n) for n in names}, ctx, (8, 8), (8, 1))
    assert made._quantizer.amax is quantizer.amax
    other = KINDS["delayed"]().quantize(values(8, 8)).__tensor_flatten__()[1]
    assert ctx == other and hash(ctx["nontensor_kwargs"]["quantizer"]) == hash(
        other["nontensor_kwargs"]["quantizer"]
    )


def test_a_copy_brings_the_recorded_amax() -> None:
    a, b = KINDS["delayed"](), KINDS["delayed"]()
    t, src = a.quantize(torch.full((4, 4), 2.0)), b.quantize(torch.full((4, 4), 3.0))
    t.copy_(src)
    assert_same(t, src)
    assert (a.amax.item(), b.amax.item()) == (3.0, 3.0)
    src.copy_(a.quantize(torch.ones(4, 4)))
    assert b.amax.item() == 3.0


def test_a_hidden_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="colour"):
        _ = quantized("current", internal=True).colour
