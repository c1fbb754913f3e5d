"""NVFP4: two codes per byte, block scales, amaxes."""

from __future__ import annotations

import pytest
import torch

from minifloat import NVFP4Tensor, NVFP4TensorStorage, UsageError

from .cases import KINDS, assert_same, quantized, values


@pytest.mark.parametrize("kind", ["nvfp4", "nvfp4_2d", "nvfp4_4over6"])
@pytest.mark.parametrize(
    ("shape", "row", "col", "row_scale", "col_scale"),
    [
        ((64, 48), (64, 24), (48, 32), (128, 4), (128, 4)),
        ((33, 17), (33, 9), (17, 17), (128, 4), (128, 4)),
        ((2, 6, 32), (2, 6, 16), (32, 2, 3), (128, 4), (128, 4)),
        ((2, 5, 32), (2, 5, 16), (32, 5), (128, 4), (128, 4)),
    ],
)
def test_buffers(
    kind: str,
    shape: tuple[int, ...],
    row: object,
    col: object,
    row_scale: object,
    col_scale: object,
) -> None:
    t = quantized(kind, *shape)
    assert isinstance(t, NVFP4Tensor)
    assert tuple(t._rowwise_data.shape) == row
    assert tuple(t._columnwise_data.shape) == col
    assert tuple(t._rowwise_scale_inv.shape) == row_scale
    assert tuple(t._columnwise_scale_inv.shape) == col_scale
    assert t._amax_rowwise.item() == t._amax_columnwise.item() == values(*shape).abs().max()
    assert t._nvfp4_use_4over6 is (kind == "nvfp4_4over6")
    assert t._nvfp4_e4m3_max == (256 if kind == "nvfp4_4over6" else 448)


def test_row_scaled_amaxes() -> None:
    t = quantized("nvfp4_rows", 6, 32)
    assert t._row_scaled_nvfp4
    assert torch.equal(t._amax_rowwise, values(6, 32).abs().amax(1))
    assert torch.equal(t._amax_columnwise, values(6, 32).abs().amax(0))
    piece = quantized("nvfp4_rows", 6, 32, columnwise=False)[2:5]
    assert torch.equal(piece._amax_rowwise, values(6, 32)[2:5].abs().amax(1))
    assert torch.equal(piece.dequantize(), t.dequantize()[2:5])


def test_a_copy_goes_with_its_amax() -> None:
    t = quantized("nvfp4")
    t.update_usage(columnwise_usage=False)
    assert t._columnwise_data is t._columnwise_scale_inv is t._amax_columnwise is None
    assert t._amax_rowwise is not None


@pytest.mark.parametrize("shape", [(64, 48), (33, 17), (2, 5, 33)])
def test_the_column_copy_of_square_tiles(shape: tuple[int, ...]) -> None:
    t = quantized("nvfp4_2d", *shape, columnwise=False)
    t.update_usage(rowwise_usage=True, columnwise_usage=True)
    assert_same(t, quantized("nvfp4_2d", *shape))
    other = quantized("nvfp4_4over6", *shape, columnwise=False)
    with pytest.raises(UsageError):
        other.update_usage(columnwise_usage=True)


def test_positional_constructor() -> None:
    t = quantized("nvfp4", internal=True)
    made = NVFP4TensorStorage(
        t._rowwise_data, t._rowwise_scale_inv, t._columnwise_data, t._columnwise_scale_inv,
        t._amax_rowwise, t._amax_columnwise, t._fp4_dtype, t._quantizer, False,
    )  # fmt: skip
    assert_same(made, t)


def test_rows_share_the_amax_of_the_tensor() -> None:
    t = quantized("nvfp4_2d", 64, 48)
    first, second = t.chunk(2)
    assert first._amax_rowwise is t._amax_rowwise is second._amax_rowwise
    assert torch.equal(torch.cat([first.dequantize(), second.dequantize()]), t.dequantize())
    assert torch.equal(
        torch.cat([first._columnwise_data, second._columnwise_data], 1), t._columnwise_data
    )


def test_stochastic_rounding_requantizes_within_a_step() -> None:
    from minifloat import NVFP4Quantizer

    quantizer = NVFP4Quantizer(stochastic_rounding=True)
    t = quantizer.quantize(values(32, 32))
    step = t.dequantize()
    t.copy_(values(32, 32))
    coarse = KINDS["nvfp4"]().quantize(values(32, 32)).dequantize()
    assert (t.dequantize() - coarse).abs().max() <= 2 * coarse.abs().max() / 6
    assert step.shape == t.shape


def test_a_transformed_copy_alone_is_not_read_back() -> None:
    t = quantized("nvfp4_rht", rowwise=False)
    for error in (UsageError, ValueError, NotImplementedError):
        with pytest.raises(error, match="Hadamard-transformed and cannot be read back"):
            t.dequantize()
