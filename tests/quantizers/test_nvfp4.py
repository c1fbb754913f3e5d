"""NVFP4: its many options, alone and together."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from minifloat import DType, NVFP4Quantizer, reference
from minifloat.formats import HADAMARD_SIGN_MASK, Cast

from .cases import SEED, sample

RHT = {"with_rht": True, "with_post_rht_amax": True}


def test_signature() -> None:
    parameters = inspect.signature(NVFP4Quantizer).parameters
    assert {n: p.default for n, p in parameters.items()} == {
        "fp4_dtype": DType.kFloat4E2M1,
        "rowwise": True,
        "columnwise": True,
        "with_amax_reduction": False,
        "amax_reduction_group": None,
        "with_rht": False,
        "with_post_rht_amax": False,
        "with_2d_quantization": False,
        "stochastic_rounding": False,
        "row_scaled_nvfp4": False,
        "nvfp4_use_4over6": False,
        "nvfp4_e4m3_max": 448,
        "nvfp4_4over6_err_mode": "MAE",
        "with_random_sign_mask": True,
    }
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters.values())
    assert NVFP4Quantizer().dtype is DType.kFloat4E2M1


@pytest.mark.parametrize(
    "options, row, col",
    [
        ({}, Cast("nvfp4"), Cast("nvfp4")),
        ({"with_2d_quantization": True}, Cast("nvfp4_16x16"), Cast("nvfp4_16x16")),
        (RHT, Cast("nvfp4"), Cast("nvfp4", hadamard=HADAMARD_SIGN_MASK)),
        (
            {**RHT, "with_random_sign_mask": False},
            Cast("nvfp4"),
            Cast("nvfp4", hadamard=0),
        ),
        (
            {"stochastic_rounding": True},
            Cast("nvfp4", stochastic=True),
            Cast("nvfp4", stochastic=True),
        ),
        (
            {**RHT, "stochastic_rounding": True},
            Cast("nvfp4", stochastic=True),
            Cast("nvfp4", stochastic=True, hadamard=HADAMARD_SIGN_MASK),
        ),
        (
            {"row_scaled_nvfp4": True},
            Cast("nvfp4", row_scaled=True),
            Cast("nvfp4", row_scaled=True),
        ),
        (
            {"nvfp4_use_4over6": True},
            Cast("nvfp4", error="MAE"),
            Cast("nvfp4", error="MAE"),
        ),
        (
            {
                "nvfp4_use_4over6": True,
                "nvfp4_e4m3_max": 256,
                "nvfp4_4over6_err_mode": "MSE",
                "with_2d_quantization": True,
            },
            Cast("nvfp4_16x16", error="MSE", scale_max=256),
            Cast("nvfp4_16x16", error="MSE", scale_max=256),
        ),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, dict) else "",
)
@pytest.mark.parametrize("shape", [(32, 48), (17, 35)])
def test_quantize(shape: tuple[int, int], options: dict[str, Any], row: Cast, col: Cast) -> None:
    x = sample(*shape)
    made = NVFP4Quantizer(**options).quantize(x, seed=SEED)
    for cast, is_col, data, scale, amax in (
        (row, False, made._rowwise_data, made._rowwise_scale_inv, made._amax_rowwise),
        (col, True, made._columnwise_data, made._columnwise_scale_inv, made._amax_columnwise),
    ):
        expected = reference.quantize(x, cast, col=is_col, seed=SEED)
        assert torch.equal(data, expected[0])
        assert torch.equal(scale, expected[1])
        assert torch.equal(amax, expected[2])
    assert made._fp4_dtype is DType.kFloat4E2M1
    assert made._row_scaled_nvfp4 is options.get("row_scaled_nvfp4", False)
    assert made._nvfp4_use_4over6 is options.get("nvfp4_use_4over6", False)
    assert made._nvfp4_e4m3_max == options.get("nvfp4_e4m3_max", 448)


def test_the_scale_limit_belongs_to_4_over_6() -> None:
    assert NVFP4Quantizer(nvfp4_e4m3_max=256).nvfp4_e4m3_max == 448
    assert NVFP4Quantizer(nvfp4_e4m3_max=256) == NVFP4Quantizer()
    assert NVFP4Quantizer(nvfp4_e4m3_max=256, nvfp4_use_4over6=True).nvfp4_e4m3_max == 256


def test_hadamard_matrix() -> None:
    matrix = NVFP4Quantizer().rht_matrix
    assert (matrix.shape, matrix.dtype) == ((16, 16), torch.bfloat16)
    signs = torch.tensor([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1])
    assert torch.equal(matrix[:, 0].float(), signs / 4)
    assert torch.equal(matrix.float() @ matrix.float().t(), torch.eye(16))
    unsigned = NVFP4Quantizer(with_random_sign_mask=False)
    assert torch.equal(unsigned.rht_matrix[:, 0].float(), torch.full((16,), 0.25))
    assert unsigned.rht_matrix_random_sign_mask_t == 0
    assert NVFP4Quantizer().rht_matrix_random_sign_mask_t == HADAMARD_SIGN_MASK
    text, names = NVFP4Quantizer(**RHT).__fx_repr__()
    assert torch.equal(eval(text, dict(names)).rht_matrix, matrix)


@pytest.mark.parametrize("shape", [(32, 48), (2, 16, 48), (17, 35), (7,)])
def test_shapes(shape: tuple[int, ...]) -> None:
    q = NVFP4Quantizer()
    made = q.quantize(sample(*shape))
    assert tuple(q.convert_shape_for_fp4(shape)) == tuple(made._rowwise_data.shape)
    assert tuple(q.get_scale_shape(shape, False)) == tuple(made._rowwise_scale_inv.shape)
    assert tuple(q.get_scale_shape(shape, True)) == tuple(made._columnwise_scale_inv.shape)


def test_static_shapes() -> None:
    assert tuple(NVFP4Quantizer.convert_shape_for_fp4((2, 3, 8))) == (2, 3, 4)
    assert tuple(NVFP4Quantizer.get_columnwise_shape((2, 3, 8))) == (8, 2, 3)
    q = NVFP4Quantizer()
    assert tuple(q.get_scale_shape((256, 512), False)) == (256, 32)
    assert tuple(q.get_scale_shape((256, 512), True)) == (512, 16)


def test_a_transformed_copy_cannot_be_read_back() -> None:
    q = NVFP4Quantizer(rowwise=False, **RHT)
    with pytest.raises(ValueError, match="Hadamard-transformed"):
        q.quantize(sample(32, 48)).dequantize()


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"nvfp4_e4m3_max": 300}, ValueError, "nvfp4_e4m3_max: got 300; allowed: 256, 448"),
        (
            {"nvfp4_4over6_err_mode": "max"},
            ValueError,
            "nvfp4_4over6_err_mode: got 'max'; allowed: 'MAE', 'MSE'",
        ),
        ({"fp4_dtype": DType.kFloat8E4M3}, TypeError, "fp4_dtype: got .*DType.kFloat4E2M1"),
        ({"fp4_dtype": "e2m1"}, TypeError, "fp4_dtype: got 'e2m1'"),
        ({"with_rht": True}, ValueError, "with_rht: .*with_post_rht_amax=True"),
        ({**RHT, "with_2d_quantization": True}, ValueError, "2-D tiles"),
        ({**RHT, "nvfp4_use_4over6": True}, ValueError, "4-over-6"),
        ({"stochastic_rounding": True, "nvfp4_use_4over6": True}, ValueError, "4-over-6"),
        ({"stochastic_rounding": True, "with_2d_quantization": True}, ValueError, "2-D tiles"),
        ({"row_scaled_nvfp4": True, "with_2d_quantization": True}, ValueError, "row scaling"),
        ({"row_scaled_nvfp4": True, "with_amax_reduction": True}, ValueError, "row_scaled_nvfp4"),
        ({"row_scaled_nvfp4": True, **RHT}, ValueError, "row scaling"),
    ],
)
def test_refusals(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        NVFP4Quantizer(**options)
