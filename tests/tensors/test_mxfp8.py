"""MXFP8: padded scale bytes, and columns in the source's orientation."""

from __future__ import annotations

import pytest
import torch

from minifloat import MXFP8Quantizer, MXFP8Tensor, MXFP8TensorStorage, UsageError
from minifloat.tensors.views import ValuesView

from .cases import E4M3, KINDS, assert_same, quantized, values


@pytest.mark.parametrize("kind", ["mxfp8", "mxfp8_2d"])
@pytest.mark.parametrize(
    ("shape", "row_scale", "col_scale"),
    [
        ((64, 48), (128, 4), (4, 128)),
        ((2, 130, 200), (384, 8), (12, 256)),
        ((7,), (128, 4), (4, 128)),
    ],
)
def test_buffers(
    kind: str, shape: tuple[int, ...], row_scale: tuple[int, int], col_scale: tuple[int, int]
) -> None:
    t = quantized(kind, *shape)
    assert isinstance(t, MXFP8Tensor)
    assert tuple(t._rowwise_data.shape) == tuple(t._columnwise_data.shape) == shape
    assert tuple(t._rowwise_scale_inv.shape) == row_scale
    assert tuple(t._columnwise_scale_inv.shape) == col_scale
    assert {b.dtype for b in t._buffers().values()} == {torch.uint8}
    rows = t._rowwise_scale_inv
    assert not rows[values(*shape).reshape(-1, shape[-1]).shape[0] :].any()


def test_one_square_tile_has_one_set_of_codes() -> None:
    t = quantized("mxfp8_2d", 64, 96)
    assert torch.equal(t._rowwise_data, t._columnwise_data)


def test_positional_constructor() -> None:
    t = quantized("mxfp8", internal=True)
    made = MXFP8TensorStorage(
        t._rowwise_data, t._rowwise_scale_inv, t._columnwise_data, t._columnwise_scale_inv,
        t._fp8_dtype, t._quantizer, False,
    )  # fmt: skip
    assert_same(made, t)


def test_from_data_that_exists() -> None:
    t = quantized("mxfp8_2d", columnwise=False)
    quantizer = MXFP8Quantizer(E4M3)
    made = quantizer.create_tensor_from_data(t._rowwise_data, t._rowwise_scale_inv, torch.bfloat16)
    assert made.dtype == torch.bfloat16 and made.get_usages() == {
        "rowwise": True,
        "columnwise": False,
    }
    assert torch.equal(made.dequantize(dtype=torch.float32), t.dequantize())


@pytest.mark.parametrize("kind", ["mxfp8", "mxfp8_2d"])
def test_chunks_have_padding_of_their_own(kind: str) -> None:
    t = quantized(kind, 96, 40)
    for i, piece in enumerate(t.split(32)):
        assert_same(piece, KINDS[kind]().quantize(values(96, 40)[32 * i : 32 * i + 32]))
    assert [type(p) for p in t.split(48)] == [ValuesView, ValuesView]
    assert type(t.split(8, dim=1)[0]) is ValuesView


def test_rows_alone_can_be_cut_anywhere() -> None:
    t = quantized("mxfp8", 96, 40, columnwise=False)
    assert_same(t[5:17], KINDS["mxfp8"](columnwise=False).quantize(values(96, 40)[5:17]))


def test_another_last_dim_is_an_error() -> None:
    with pytest.raises(UsageError, match="between blocks"):
        quantized("mxfp8", 32, 64).reshape(64, 32)


def test_swizzled_rows_cannot_be_cut() -> None:
    quantizer = KINDS["mxfp8"]()
    quantizer.optimize_for_gemm = True
    t = quantizer.quantize(values(64, 32))
    assert t._with_gemm_swizzled_scales
    assert t._cut(0, 32) is None
    with pytest.raises(RuntimeError, match="_with_gemm_swizzled_scales"):
        t.copy_from_storage(quantized("mxfp8", 64, 32))
