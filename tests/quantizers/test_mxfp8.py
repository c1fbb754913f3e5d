"""MXFP8: a power-of-two scale per 32 elements, or per 32x32 tile."""

from __future__ import annotations

import inspect

import pytest
import torch

from minifloat import DType, MXFP8Quantizer, reference
from minifloat.formats import Cast

from .cases import E4M3, E5M2, sample


def test_signature() -> None:
    parameters = inspect.signature(MXFP8Quantizer).parameters
    assert list(parameters) == ["fp8_dtype", "rowwise", "columnwise", "with_2d_quantization"]
    keyword = {n: p.default for n, p in parameters.items() if n != "fp8_dtype"}
    assert keyword == {"rowwise": True, "columnwise": True, "with_2d_quantization": False}
    with pytest.raises(TypeError):
        MXFP8Quantizer(E4M3, True)  # type: ignore[misc]


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("dtype, tag", [(E4M3, "e4m3"), (E5M2, "e5m2")])
@pytest.mark.parametrize("shape", [(64, 96), (33, 65)])
def test_quantize(shape: tuple[int, int], dtype: DType, tag: str, square: bool) -> None:
    x = sample(*shape)
    made = MXFP8Quantizer(dtype, with_2d_quantization=square).quantize(x)
    cast = Cast(f"mxfp8_{tag}{'_32x32' if square else ''}")
    for col, data, scale in (
        (False, made._rowwise_data, made._rowwise_scale_inv),
        (True, made._columnwise_data, made._columnwise_scale_inv),
    ):
        codes, scales, _ = reference.quantize(x, cast, col=col)
        assert torch.equal(data, codes)
        assert torch.equal(scale, scales)
        assert data.shape == shape, "the column copy is not transposed"
    assert made._fp8_dtype is dtype
    assert not made._with_gemm_swizzled_scales
    if square:
        assert torch.equal(made._rowwise_data, made._columnwise_data)


@pytest.mark.parametrize("shape", [(256, 512), (33, 65), (2, 3, 40), (7,)])
def test_scale_shape(shape: tuple[int, ...]) -> None:
    q = MXFP8Quantizer(E4M3)
    made = q.quantize(sample(*shape))
    assert tuple(q.get_scale_shape(shape, False)) == tuple(made._rowwise_scale_inv.shape)
    assert tuple(q.get_scale_shape(shape, True)) == tuple(made._columnwise_scale_inv.shape)


def test_scale_shape_is_the_contracts() -> None:
    q = MXFP8Quantizer(E4M3)
    assert tuple(q.get_scale_shape((256, 512), False)) == (256, 16)
    assert tuple(q.get_scale_shape((256, 512), True)) == (8, 512)
    assert tuple(q.get_scale_shape((33, 65), False)) == (128, 4)


def test_from_data() -> None:
    q = MXFP8Quantizer(E4M3)
    codes = MXFP8Quantizer(E5M2).quantize(sample(32, 64))
    for data in (codes._rowwise_data, codes._rowwise_data.view(torch.float8_e5m2)):
        made = q.create_tensor_from_data(data, codes._rowwise_scale_inv, torch.bfloat16, E5M2)
        assert made.dtype == torch.bfloat16
        assert made.get_usages() == {"rowwise": True, "columnwise": False}
        assert made._fp8_dtype is E5M2
        assert torch.equal(made.float(), codes.float())
    assert q == MXFP8Quantizer(E4M3), "the quantizer itself is left alone"
    q.__fx_repr__()
    default = q.create_tensor_from_data(
        codes._rowwise_data, codes._rowwise_scale_inv, torch.float32
    )
    assert default._fp8_dtype is E4M3
    with pytest.raises(TypeError, match="fp8_dtype: got"):
        q.create_tensor_from_data(
            codes._rowwise_data, codes._rowwise_scale_inv, torch.float32, DType.kByte
        )
    with pytest.raises(TypeError, match="data: got dtype torch.float32"):
        q.create_tensor_from_data(codes.float(), codes._rowwise_scale_inv, torch.float32)
    with pytest.raises(ValueError, match=r"scale_inv: got .*\(128, 4\) is needed"):
        q.create_tensor_from_data(codes._rowwise_data, codes._rowwise_scale_inv[:32], torch.float32)
