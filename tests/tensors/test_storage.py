"""Storages: what every class has from its declaration, from construction to views."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from minifloat import (
    Float8BlockwiseQTensorStorage,
    Float8TensorStorage,
    HybridQuantizedTensorStorage,
    IdentityTensorStorage,
    MXFP8TensorStorage,
    NVFP4TensorStorage,
    QuantizedTensorStorage,
    UsageError,
    dispatch,
)

from .cases import (
    CLASSES,
    KINDS,
    SHAPES,
    SQUARE,
    assert_same,
    bits,
    quantized,
    raw,
    shares_memory,
    values,
)

SAVED = {
    Float8TensorStorage: ("_data", "_transpose", "_scale_inv"),
    Float8BlockwiseQTensorStorage: (
        "_rowwise_data", "_columnwise_data", "_rowwise_scale_inv", "_columnwise_scale_inv",
    ),
    MXFP8TensorStorage: (
        "_rowwise_data", "_columnwise_data", "_rowwise_scale_inv", "_columnwise_scale_inv",
    ),
    NVFP4TensorStorage: (
        "_rowwise_data", "_columnwise_data", "_rowwise_scale_inv", "_columnwise_scale_inv",
        "_amax_rowwise", "_amax_columnwise",
    ),
    IdentityTensorStorage: ("_hp_data",),
}  # fmt: skip
POSITIONAL = {
    "current": ("data", "fp8_scale_inv", "fp8_dtype", "fake_dtype", "data_transpose", "quantizer"),
    "block_2d": (
        "rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv",
        "fp8_dtype", "quantizer", "is_2D_scaled",
    ),
    "mxfp8": (
        "rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv",
        "fp8_dtype", "quantizer", "with_gemm_swizzled_scales",
    ),
    "nvfp4_2d": (
        "rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv",
        "amax_rowwise", "amax_columnwise", "fp4_dtype", "quantizer", "with_gemm_swizzled_scales",
    ),
    "identity": ("hp_data", "quantizer", "fake_dtype"),
    "hybrid": ("rowwise_storage", "columnwise_storage", "quantizer"),
}  # fmt: skip


def storage(kind: str, *shape: int, **kwargs: Any) -> Any:
    return quantized(kind, *shape, internal=True, **kwargs)


# ------------------------------------------------------------------------------- construction
@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("by_position", [True, False])
def test_metadata_rebuilds_the_storage(kind: str, by_position: bool) -> None:
    t = storage(kind)
    kwargs = t.get_metadata()
    args = [kwargs.pop(name) for name in POSITIONAL[kind]] if by_position else []
    made = type(t)(*args, **kwargs)
    assert_same(made, t)
    assert shares_memory(made, t) == set(bits(t))


@pytest.mark.parametrize("kind", CLASSES)
def test_a_wrong_constructor_argument_is_named(kind: str) -> None:
    t = storage(kind)
    kwargs = t.get_metadata()
    with pytest.raises(TypeError, match="'colour'"):
        type(t)(**kwargs, colour=1)
    first = POSITIONAL[kind][0]
    with pytest.raises(TypeError, match=f"'{first}' was given twice"):
        type(t)(kwargs[first], **kwargs)
    with pytest.raises(TypeError, match="positional"):
        type(t)(*[None] * 20)


def test_a_missing_constructor_argument_is_named() -> None:
    with pytest.raises(TypeError, match="'fp8_dtype' is missing"):
        MXFP8TensorStorage()


def test_a_hybrid_needs_a_hybrid_quantizer() -> None:
    row = storage("mxfp8", columnwise=False)
    with pytest.raises(TypeError, match="HybridQuantizer is needed"):
        HybridQuantizedTensorStorage(rowwise_storage=row, quantizer=row._quantizer)


@pytest.mark.parametrize("kind", KINDS)
def test_the_storage_keeps_a_copy_of_the_quantizer(kind: str) -> None:
    quantizer = KINDS[kind]()
    quantizer.internal = True
    t = quantizer.quantize(values(32, 32))
    assert t._quantizer is not quantizer
    quantizer.set_usage(columnwise=False)
    assert t._quantizer.columnwise_usage


@pytest.mark.parametrize("kind", KINDS)
def test_a_storage_is_no_tensor_but_has_a_size(kind: str) -> None:
    t = storage(kind, 4, 8, 32)
    assert isinstance(t, QuantizedTensorStorage)
    assert not isinstance(t, torch.Tensor)
    assert t.shape == t.size() == torch.Size((4, 8, 32))
    assert t.size(-1) == 32
    assert (t.dim(), t.numel(), t.device) == (3, 1024, torch.device("cpu"))
    assert t._dtype == torch.float32


@pytest.mark.parametrize("kind", ["current", "block_1d", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("columnwise", [True, False])
def test_the_shape_follows_from_the_buffers(kind: str, columnwise: bool) -> None:
    t = storage(kind, 4, 8, 32, rowwise=not columnwise, columnwise=columnwise)
    kwargs = t.get_metadata()
    assert tuple(type(t)(**kwargs).shape) == (4, 8, 32)


def test_an_odd_packed_row_needs_the_shape() -> None:
    t = storage("nvfp4", 3, 5)
    assert tuple(type(t)(**t.get_metadata()).shape) == (3, 6)
    assert tuple(type(t)(**t.get_metadata(), shape=(3, 5)).shape) == (3, 5)


@pytest.mark.parametrize("kind", KINDS)
def test_printing_reads_no_data(kind: str) -> None:
    t = storage(kind)
    t.clear()
    assert "64, 48" in repr(t)
    assert "no data" in repr(t)


# ------------------------------------------------------------------------------------ reading
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_dequantize_reads_the_row_copy(kind: str, shape: tuple[int, ...]) -> None:
    both, row = storage(kind, *shape), storage(kind, *shape, columnwise=False)
    out = both.dequantize()
    assert tuple(out.shape) == shape and out.dtype == torch.float32 and out.is_contiguous()
    assert torch.equal(raw(out), raw(row.dequantize()))
    assert both.dequantize(dtype=torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", SQUARE)
@pytest.mark.parametrize("shape", SHAPES)
def test_both_copies_of_a_square_format_hold_the_same_values(
    kind: str, shape: tuple[int, ...]
) -> None:
    col = storage(kind, *shape, rowwise=False)
    assert torch.equal(raw(col.dequantize()), raw(storage(kind, *shape).dequantize()))


@pytest.mark.parametrize("kind", ["block_1d", "mxfp8", "nvfp4", "nvfp4_rows"])
@pytest.mark.parametrize("shape", [(64, 48), (33, 17), (5, 4, 33)])
def test_the_column_copy_is_the_row_copy_of_the_transpose(
    kind: str, shape: tuple[int, ...]
) -> None:
    x = values(*shape)
    col = KINDS[kind](rowwise=False).quantize(x).dequantize()
    k = shape[-1]
    row = KINDS[kind](columnwise=False).quantize(x.reshape(-1, k).t().contiguous())
    assert torch.equal(raw(col), raw(row.dequantize().t().reshape(shape).contiguous()))


def test_a_transformed_column_copy_cannot_be_read_back() -> None:
    t = storage("nvfp4_rht", rowwise=False)
    with pytest.raises(ValueError, match="Hadamard"):
        t.dequantize()


def test_a_packed_column_copy_cannot_be_read_without_its_quantizer() -> None:
    t = storage("nvfp4", rowwise=False)
    t._quantizer = None
    with pytest.raises(UsageError, match="quantizer"):
        t.dequantize()


@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4", "nvfp4_2d"])
def test_swizzled_scales_are_for_gemms_alone(kind: str) -> None:
    quantizer = KINDS[kind]()
    quantizer.optimize_for_gemm = True
    t = quantizer.quantize(values(64, 96))
    with pytest.raises(UsageError, match="optimize_for_gemm=False"):
        t.dequantize()
    plain = KINDS[kind]().quantize(values(64, 96))
    for col in (False, True):
        swizzled, stored = t.operand(col), plain.operand(col)
        assert torch.equal(swizzled.scale, dispatch.swizzle(stored.scale))
        assert torch.equal(swizzled.data, stored.data)
    t.update_usage(columnwise_usage=False)
    with pytest.raises(UsageError, match="columnwise"):
        t.update_usage(columnwise_usage=True)


@pytest.mark.parametrize("kind", KINDS)
def test_cleared_storages_say_so(kind: str) -> None:
    t = storage(kind)
    t.clear()
    assert t.get_usages() == {"rowwise": False, "columnwise": False}
    with pytest.raises(UsageError):
        t.dequantize()


def test_clear_keeps_the_scale_that_both_copies_share() -> None:
    t = storage("current")
    t.clear()
    assert t._scale_inv is not None
    assert t._data is None and t._transpose is None


@pytest.mark.parametrize("kind", ["current", "block_1d", "mxfp8", "nvfp4", "hybrid", "identity"])
def test_an_operand_is_contraction_last(kind: str) -> None:
    t = storage(kind, 4, 8, 64)
    row, col = t.operand(False), t.operand(True)
    assert row.columns == 64 and col.columns == 32
    assert row.data.shape[0] == 32 and col.data.shape[0] == 64
    t.clear()
    with pytest.raises(UsageError):
        t.operand(True)


def test_data_tensors() -> None:
    t = storage("mxfp8")
    row, col = t.get_data_tensors()
    assert row is t._rowwise_data and col is t._columnwise_data
    assert t.get_data_tensors(columnwise_data=False) is row
    assert t.get_data_tensors(rowwise_data=False) is col
    h = storage("hybrid")
    assert h.get_data_tensors() == (
        h._rowwise_storage._rowwise_data,
        h._columnwise_storage._transpose,
    )


# ------------------------------------------------------------------------------------- usages
@pytest.mark.parametrize("kind", SQUARE)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_column_copy_is_derived_exactly(kind: str, shape: tuple[int, ...]) -> None:
    t = storage(kind, *shape, columnwise=False)
    t.update_usage(columnwise_usage=True)
    assert_same(t, storage(kind, *shape))
    t.update_usage(rowwise_usage=False)
    assert_same(t, storage(kind, *shape, rowwise=False))


@pytest.mark.parametrize("kind", SQUARE)
def test_the_column_copy_alone_can_be_asked_for(kind: str) -> None:
    t = storage(kind, columnwise=False)
    t.update_usage(rowwise_usage=False, columnwise_usage=True)
    assert_same(t, storage(kind, rowwise=False))


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in SQUARE and "identity" not in k])
def test_a_column_copy_that_cannot_be_derived_is_an_error(kind: str) -> None:
    t = storage(kind, columnwise=False)
    before = bits(t)
    with pytest.raises(UsageError, match="columnwise=True"):
        t.update_usage(columnwise_usage=True)
    with pytest.raises(UsageError, match="columnwise=True"):
        t.update_usage(rowwise_usage=False, columnwise_usage=True)
    assert bits(t) == before


@pytest.mark.parametrize("kind", [k for k in KINDS if "identity" not in k])
def test_a_row_copy_is_never_derived(kind: str) -> None:
    t = storage(kind, rowwise=False)
    before = bits(t)
    with pytest.raises(UsageError, match="rowwise=True"):
        t.update_usage(rowwise_usage=True)
    assert bits(t) == before


@pytest.mark.parametrize("kind", KINDS)
def test_copies_are_dropped_but_not_all(kind: str) -> None:
    t = storage(kind)
    t.update_usage(columnwise_usage=False)
    assert_same(t, storage(kind, columnwise=False))
    before = bits(t)
    with pytest.raises(UsageError, match="clear"):
        t.update_usage(rowwise_usage=False, columnwise_usage=False)
    assert bits(t) == before
    assert t.get_usages()["rowwise"]


def test_one_buffer_of_high_precision_serves_both_directions() -> None:
    t = storage("identity", columnwise=False)
    assert t.get_usages() == {"rowwise": True, "columnwise": True}
    t.update_usage(rowwise_usage=False)
    assert t._hp_data is not None


# ------------------------------------------------------------------------------------ writing
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skipped", [False, True])
def test_quantize_in_place_unless_the_flag_is_set(kind: str, skipped: bool) -> None:
    t, new = storage(kind), values(64, 48, seed=1)
    before, buffers = storage(kind), dict(t._buffers())
    t.quantize_(new, noop_flag=torch.tensor([float(skipped)]))
    assert_same(t, before if skipped else storage(kind, seed=1))
    assert all(t._buffers()[n] is b for n, b in buffers.items())


@pytest.mark.parametrize("kind", CLASSES)
def test_quantize_in_place_writes_the_copies_that_are_there(kind: str) -> None:
    t = storage(kind, columnwise=False)
    t.quantize_(values(64, 48, seed=1))
    assert_same(t, storage(kind, seed=1, columnwise=False))


@pytest.mark.parametrize("kind", CLASSES)
def test_bad_values_change_nothing(kind: str) -> None:
    t = storage(kind)
    before = bits(t)
    with pytest.raises(ValueError, match="shape"):
        t.quantize_(values(48, 64))
    with pytest.raises(TypeError, match="int64"):
        t.quantize_(torch.zeros(64, 48, dtype=torch.int64))
    assert bits(t) == before


def test_quantize_in_place_needs_a_quantizer() -> None:
    t = storage("mxfp8")
    t._quantizer = None
    with pytest.raises(RuntimeError, match="quantizer"):
        t.quantize_(values(64, 48))


@pytest.mark.parametrize("kind", KINDS)
def test_copy_from_storage_copies_buffers(kind: str) -> None:
    t, src = storage(kind), storage(kind, seed=1)
    buffers = dict(t._buffers())
    t.copy_from_storage(src)
    assert_same(t, src)
    assert all(t._buffers()[n] is b for n, b in buffers.items())
    assert not shares_memory(t, src)


def test_copy_from_storage_takes_what_both_have() -> None:
    t, src = storage("mxfp8"), storage("mxfp8", seed=1, columnwise=False)
    t.copy_from_storage(src)
    assert torch.equal(t._rowwise_data, src._rowwise_data)
    assert torch.equal(raw(t._columnwise_data), raw(storage("mxfp8")._columnwise_data))


@pytest.mark.parametrize(
    ("src", "error", "complaint"),
    [
        (lambda: storage("current"), TypeError, "MXFP8TensorStorage is needed"),
        (lambda: values(64, 48), TypeError, "got Tensor"),
        (lambda: storage("mxfp8_2d"), RuntimeError, "_fp8_dtype"),
        (lambda: storage("mxfp8", 48, 64), ValueError, "shape"),
    ],
)
def test_copy_from_another_kind_is_an_error(src: Any, error: type, complaint: str) -> None:
    t = storage("mxfp8")
    before = bits(t)
    with pytest.raises(error, match=complaint):
        t.copy_from_storage(src())
    assert bits(t) == before


def test_copy_between_transformed_and_plain_columns_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="cast with"):
        storage("nvfp4").copy_from_storage(storage("nvfp4_rht"))


def test_the_quantizer_can_be_replaced() -> None:
    t = storage("current")
    with pytest.warns(UserWarning, match="replaced"):
        t.update_quantizer(KINDS["current"](columnwise=False))
    assert not t._quantizer.columnwise_usage
    t._quantizer = None
    with pytest.raises(RuntimeError, match="no quantizer"):
        t.update_quantizer(KINDS["current"]())


# -------------------------------------------------------------------------------------- views
@pytest.mark.parametrize("kind", KINDS)
def test_a_view_that_keeps_the_last_dim_shares_the_buffers(kind: str) -> None:
    t = storage(kind, 4, 8, 32)
    v = t.view(-1, 32)
    assert_same(v, storage(kind, 32, 32))
    assert shares_memory(v, t) == set(bits(t))
    assert_same(v.view((4, 8, 32)), t)


@pytest.mark.parametrize("kind", ["block_2d", "mxfp8", "nvfp4", "hybrid"])
def test_a_view_across_blocks_is_an_error(kind: str) -> None:
    with pytest.raises(UsageError, match="keep the last dim"):
        storage(kind, 32, 32).view(16, 64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(3, 5), (5,), (3, 32)])
def test_a_view_of_another_size_is_an_error(kind: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(RuntimeError, match="is invalid for"):
        storage(kind, 32, 32).view(shape)


@pytest.mark.parametrize("kind", KINDS)
def test_a_flat_view_is_the_same_tensor_in_one_dim(kind: str) -> None:
    t = storage(kind, 4, 8, 32)
    flat = t.view(-1)
    assert tuple(flat.shape) == (1024,)
    assert torch.equal(flat.dequantize(), t.dequantize().reshape(-1))
    assert shares_memory(flat, t)
    new = values(1024, seed=1)
    flat.quantize_(new)
    assert_same(t, storage(kind, 4, 8, 32, seed=1))
    assert_same(flat.view(32, 32), flat.view(4, 8, 32).view(32, 32))


@pytest.mark.parametrize("kind", ["current", "delayed"])
def test_a_view_of_another_last_dim_drops_the_transpose(kind: str) -> None:
    t = storage(kind, 32, 32)
    v = t.view(16, 64)
    assert v._transpose is None and v._transpose_invalid
    assert torch.equal(v.dequantize(), t.dequantize().reshape(16, 64))
    with pytest.raises(UsageError, match="a view without its column copy"):
        v.quantize_(values(16, 64))
    assert_same(t, storage(kind, 32, 32))
    t.update_usage(rowwise_usage=False)
    with pytest.raises(UsageError):
        t.view(16, 64)


@pytest.mark.parametrize("kind", KINDS)
def test_flatten_and_unflatten(kind: str) -> None:
    t = storage(kind, 4, 8, 32)
    names, ctx = t.__tensor_flatten__()
    assert set(ctx) >= {"cls", "is_tensor", "requires_grad", "nontensor_kwargs"}
    assert names[: len(bits(t))] == list(bits(t))
    inner = {name: getattr(t, name) for name in names}
    made = type(t).__tensor_unflatten__(inner, ctx, t.shape, None)
    assert_same(made, t)
    assert made._quantizer.get_usages() == t._quantizer.get_usages()
    assert math.prod(made.shape) == made.numel()


@pytest.mark.parametrize("cls", SAVED)
def test_saved_order(cls: Any) -> None:
    assert SAVED[cls] == cls._SAVED
