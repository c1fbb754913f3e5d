"""One format per direction."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from minifloat import (
    Float8TensorStorage,
    HybridQuantizedTensor,
    HybridQuantizedTensorStorage,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8TensorStorage,
    UsageError,
)

from .cases import KINDS, assert_same, bits, delayed, quantized, shares_memory, values


def mixed(row: str, col: str, **kwargs: Any) -> HybridQuantizer:
    return HybridQuantizer(
        rowwise_quantizer=KINDS[row](), columnwise_quantizer=KINDS[col](), **kwargs
    )


def test_parts() -> None:
    t = quantized("hybrid")
    assert isinstance(t, HybridQuantizedTensor)
    assert type(t._rowwise_storage) is MXFP8TensorStorage is type(t.rowwise_sub_storage)
    assert type(t._columnwise_storage) is Float8TensorStorage is type(t.columnwise_sub_storage)
    assert t._rowwise_storage.get_usages() == {"rowwise": True, "columnwise": False}
    assert t._columnwise_storage.get_usages() == {"rowwise": False, "columnwise": True}
    assert set(bits(t)) == {
        "_row__rowwise_data", "_row__rowwise_scale_inv", "_col__transpose", "_col__scale_inv",
    }  # fmt: skip
    assert t._col__transpose is t._columnwise_storage._transpose
    with pytest.raises(AttributeError, match="colour"):
        _ = t.colour


@pytest.mark.parametrize(
    ("row", "col"), [("mxfp8", "nvfp4_rht"), ("nvfp4_2d", "block_1d"), ("identity", "current")]
)
def test_each_direction_is_its_part(row: str, col: str) -> None:
    x = values(64, 48)
    t = mixed(row, col).quantize(x)
    assert torch.equal(t.dequantize(), KINDS[row]().quantize(x).dequantize())
    for column, kind in ((False, row), (True, col)):
        operand, expected = t.operand(column), KINDS[kind]().quantize(x).operand(column)
        assert torch.equal(operand.data, expected.data)
    t.update_usage(rowwise_usage=False)
    if col != "nvfp4_rht":
        one = KINDS[col](rowwise=False).quantize(x)
        assert torch.equal(t.dequantize(), one.dequantize())


def test_columns_of_dequantized_rows() -> None:
    x = values(64, 48)
    t = mixed("nvfp4", "current", columnwise_source="rowwise_dequantized").quantize(x)
    rows = KINDS["nvfp4"]().quantize(x).dequantize()
    t.update_usage(rowwise_usage=False)
    assert torch.equal(t.dequantize(), KINDS["current"]().quantize(rows).dequantize())


def test_a_dropped_part_cannot_come_back() -> None:
    t = quantized("hybrid")
    t.update_usage(columnwise_usage=False)
    assert t._columnwise_storage is None
    before = bits(t)
    for wanted in ({"columnwise_usage": True}, {"columnwise_usage": True, "rowwise_usage": False}):
        with pytest.raises(UsageError):
            t.update_usage(**wanted)
    with pytest.raises(UsageError):
        t.operand(True)
    assert bits(t) == before
    t.copy_(values(64, 48, seed=1))
    assert_same(t, quantized("hybrid", seed=1, columnwise=False))


def test_clear_keeps_the_parts() -> None:
    t = quantized("hybrid")
    t.clear()
    assert t._rowwise_storage is not None
    assert set(bits(t)) == {"_col__scale_inv"}


def test_a_copy_checks_the_parts_first() -> None:
    t = quantized("hybrid")
    before = bits(t)
    other = mixed("mxfp8_2d", "current").quantize(values(64, 48))
    with pytest.raises(RuntimeError, match="cast with"):
        t.copy_from_storage(other)
    swapped = mixed("current", "mxfp8").quantize(values(64, 48))
    with pytest.raises((RuntimeError, TypeError)):
        t.copy_from_storage(swapped)
    assert bits(t) == before
    t.copy_(swapped)
    assert_same(t, KINDS["hybrid"]().quantize(swapped.dequantize()))


def test_a_storage_of_storages() -> None:
    t = quantized("hybrid", internal=True)
    made = HybridQuantizedTensorStorage(t._rowwise_storage, t._columnwise_storage, t._quantizer)
    assert tuple(made.shape) == (64, 48)
    assert torch.equal(made.dequantize(), t.dequantize())
    with pytest.raises(TypeError, match="quantizer"):
        HybridQuantizedTensorStorage(_row__rowwise_data=t._row__rowwise_data, shape=(64, 48))


def test_a_part_with_live_state() -> None:
    scaled = delayed()
    quantizer = HybridQuantizer(rowwise_quantizer=scaled, columnwise_quantizer=IdentityQuantizer())
    t = quantizer.quantize(values(32, 32))
    names, ctx = t.__tensor_flatten__()
    assert names[-2:] == ["_live_rowwise_quantizer__scale", "_live_rowwise_quantizer__amax"]
    inner = {name: getattr(t, name) for name in names}
    made = type(t).__tensor_unflatten__(inner, ctx, (32, 32), (32, 1))
    assert made._quantizer.rowwise_quantizer.amax is scaled.amax
    assert_same(made, t)
    assert ctx == quantizer.quantize(values(32, 32)).__tensor_flatten__()[1]


def test_data_is_rebound_part_by_part() -> None:
    p, other = torch.nn.Parameter(quantized("hybrid")), quantized("hybrid", seed=1)
    p.data = other
    assert shares_memory(p, other) == set(bits(other))
    other.update_usage(columnwise_usage=False)
    assert p.get_usages() == {"rowwise": True, "columnwise": True}
    assert_same(copy.deepcopy(p).detach(), p.detach())
