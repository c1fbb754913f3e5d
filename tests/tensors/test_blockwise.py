"""FP8 with a scale per 128 elements, or per 128x128."""

from __future__ import annotations

import pytest
import torch

from minifloat import Float8BlockwiseQTensor, UsageError

from .cases import KINDS, assert_same, bits, quantized, values


@pytest.mark.parametrize(
    ("kind", "shape", "row_scale", "col_scale"),
    [
        ("block_1d", (200, 300), (3, 200), (2, 300)),
        ("block_1d", (3, 5, 7), (1, 16), (1, 8)),
        ("block_2d", (200, 300), (2, 4), (3, 4)),
        ("block_2d", (2, 300, 100), (5, 4), (1, 8)),
    ],
)
def test_buffers(
    kind: str, shape: tuple[int, ...], row_scale: tuple[int, int], col_scale: tuple[int, int]
) -> None:
    t = quantized(kind, *shape)
    assert isinstance(t, Float8BlockwiseQTensor)
    assert t._is_2D_scaled is (kind == "block_2d")
    assert tuple(t._rowwise_data.shape) == shape
    assert tuple(t._columnwise_data.shape) == (shape[-1], *shape[:-1])
    assert tuple(t._rowwise_scale_inv.shape) == row_scale
    assert tuple(t._columnwise_scale_inv.shape) == col_scale
    assert t._rowwise_scale_inv.dtype == torch.float32


def test_values_are_codes_times_block_scales() -> None:
    t = quantized("block_1d", 8, 256)
    codes = t._rowwise_data.view(torch.float8_e4m3fn).float()
    scale = t._rowwise_scale_inv.t()[:8].repeat_interleave(128, 1)
    assert torch.equal(t.dequantize(), codes * scale)


def test_both_copies_of_square_blocks() -> None:
    t = quantized("block_2d", 200, 300, columnwise=False)
    t.update_usage(rowwise_usage=True, columnwise_usage=True)
    assert_same(t, quantized("block_2d", 200, 300))


def test_rows_of_blocks_only_lose_copies() -> None:
    t = quantized("block_1d", columnwise=False)
    with pytest.raises(UsageError):
        t.update_usage(rowwise_usage=True, columnwise_usage=True)
    with pytest.raises(UsageError, match="drop every copy"):
        t.update_usage(rowwise_usage=False)


def test_leading_dims_are_rows() -> None:
    t = quantized("block_2d", 2, 128, 64)
    v = t.view(256, 64)
    assert_same(v, KINDS["block_2d"]().quantize(values(2, 128, 64).view(256, 64)))
    assert bits(v.view(2, 128, 64)) == bits(t)
