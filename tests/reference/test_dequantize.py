"""Dequantization against codes times scales in NumPy, from the stored layout alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minifloat.formats import E4M3, FORMATS, Cast, Scale
from minifloat.reference import dequantize, quantize, unscaled

from . import oracle
from .cases import NEAREST, QUANTIZED, RHT, RHT_STOCHASTIC, TILED, matrix, name

BOTH = pytest.mark.parametrize("col", [False, True], ids=["row", "col"])
SHAPES = [(0, 0), (0, 5), (5, 0), (1, 1), (35, 50)]


def casts(table: list[Cast]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("cast", table, ids=name)


def values(t: np.ndarray, cast: Cast) -> tuple[np.ndarray, np.ndarray]:
    """What the oracle's codes and scales of `t[R, C]` mean: (with, without) the global amax."""
    fmt = cast.format
    codes, scales, amax = oracle.quantize(t, cast)
    out, block_only = np.zeros_like(t), np.zeros_like(t)
    for place, part in oracle.tiles(t.shape, fmt.tile):
        v, scale = oracle.decode(codes[part], fmt.element), scales[place]
        if fmt.two_level:
            sf = oracle.decode(np.array(scale), E4M3)
            a = amax[part[0].start if cast.row_scaled else 0]
            out[part] = v * (sf * a * np.float32(1 / (6 * cast.scale_max)))
            block_only[part] = v * sf
        else:
            s = np.float32(2.0 ** (scale - 127)) if fmt.scale is Scale.E8M0 else scale
            out[part] = block_only[part] = v * s
    return out, block_only


def valid_scales(cast: Cast, r: int, c: int) -> tuple[slice, slice]:
    """The part of the stored scales of a contraction-last `[r, c]` that means something."""
    tile = cast.format.scale_tile
    i, j = slice(-(-r // tile[0])), slice(-(-c // tile[1]))
    return (j, i) if cast.format.scale_transposed else (i, j)


@casts(QUANTIZED)
@BOTH
def test_equals_the_oracle(cast: Cast, col: bool) -> None:
    for shape in SHAPES:
        x = matrix(shape, seed=3)
        t = x.t() if col else x
        data, scale, amax = quantize(x, cast, col=col)
        out = dequantize(data, scale, amax, cast, shape, torch.float32, col=col)
        want, block_only = values(t.numpy().copy(), cast)
        assert out.shape == shape
        np.testing.assert_array_equal((out.t() if col else out).numpy(), want)
        got = unscaled(data, scale, cast, t.shape[1], col=col)
        np.testing.assert_array_equal(got.numpy(), block_only)


@casts(NEAREST)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_result_is_cast_once(cast: Cast, dtype: torch.dtype) -> None:
    x = matrix((19, 37))
    q = quantize(x, cast)
    out = dequantize(*q, cast, (19, 37), dtype)
    assert out.dtype is dtype
    assert torch.equal(out, dequantize(*q, cast, (19, 37), torch.float32).to(dtype))


@BOTH
def test_high_precision_is_a_copy(col: bool) -> None:
    x, cast = matrix((4, 6)), Cast("high_precision")
    q = quantize(x, cast, col=col)
    out = dequantize(*q, cast, (4, 6), torch.float32, col=col)
    assert torch.equal(out, x)
    assert out.data_ptr() != q[0].data_ptr()


@casts([RHT, RHT_STOCHASTIC])
@BOTH
def test_transformed_values_cannot_be_returned(cast: Cast, col: bool) -> None:
    x = torch.ones(16, 16)
    q = quantize(x, cast, col=col, seed=torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="dequantize the row copy"):
        dequantize(*q, cast, (16, 16), torch.float32, col=col)


@casts(TILED)
@BOTH
def test_scale_padding_is_not_read(cast: Cast, col: bool) -> None:
    """CONTRACT 1.4 and 1.5: other producers leave the padding uninitialised."""
    shape = (35, 50)
    data, scale, amax = quantize(matrix(shape), cast, col=col)
    want = dequantize(data, scale, amax, cast, shape, torch.float32, col=col)
    part = valid_scales(cast, *(shape[::-1] if col else shape))
    part = part[::-1] if col and not cast.format.col_transposed else part
    garbage = torch.full_like(scale, float("nan") if scale.is_floating_point() else 0xFF)
    garbage[part] = scale[part]
    assert not torch.equal(garbage, scale)
    got = dequantize(data, garbage, amax, cast, shape, torch.float32, col=col)
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    "byte, value", [(0, 2.0**-127), (1, 2.0**-126), (127, 1.0), (254, 2.0**127)]
)
def test_e8m0_bytes(byte: int, value: float) -> None:
    scale = torch.full((128, 4), byte, dtype=torch.uint8)
    one = torch.full((1, 1), 0x38, dtype=torch.uint8)
    out = dequantize(one, scale, None, Cast("mxfp8_e4m3"), (1, 1), torch.float32)
    assert out.item() == value


@pytest.mark.parametrize("fmt, nan", [("mxfp8_e4m3", 0xFF), ("nvfp4", 0x7F), ("nvfp4_16x16", 0xFF)])
def test_a_nan_scale_is_a_nan_block(fmt: str, nan: int) -> None:
    cast, shape = Cast(fmt), (1, 64)
    data, scale, amax = quantize(torch.ones(shape), cast)
    scale[0, 0] = nan
    out = dequantize(data, scale, amax, cast, shape, torch.float32)
    block = cast.format.tile[1]
    assert out[:, :block].isnan().all()
    assert out[:, block:].isfinite().all()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf")])
def test_nonfinite_input(fmt: str, special: float) -> None:
    """NaN comes back as NaN; Inf as the block's largest value: Inf where the scale overflows.

    Per-tensor and 128-blocks have scale 1 then, E8M0 2**127 (448 * 2**127 is Inf) and NVFP4 an
    infinite amax.
    """
    cast = Cast(fmt)
    x = torch.tensor([[special, 1.0]])
    out = dequantize(*quantize(x, cast), cast, (1, 2), torch.float32)[0, 0].item()
    if np.isnan(special):
        assert np.isnan(out)
    elif cast.format.scale is Scale.F32:
        assert out == np.copysign(cast.format.element.max, special)
    else:
        assert out == special


def test_tiny_and_huge_global_amaxes_follow_the_formula() -> None:
    """`sf * amax * fp32(1/2688)`, left to right: below 2688/FP32_MAX S_enc is clamped and the
    decode factor is not its inverse; above FP32_MAX/448 the product overflows."""
    cast = Cast("nvfp4")
    for v, want in ((1e-37, None), (1e36, float("inf"))):
        data, scale, amax = quantize(torch.tensor([[v]]), cast)
        sf = oracle.decode(scale[0, 0].numpy(), E4M3)
        with np.errstate(over="ignore"):
            step = sf * np.float32(v) * np.float32(1 / 2688)
        code = oracle.decode(data[0].numpy() & 15, cast.format.element)[0]
        out = dequantize(data, scale, amax, cast, (1, 1), torch.float32).item()
        assert out == code * step
        assert want is None or out == want


TRACED = [
    (Cast("fp8_e4m3"), False),
    (Cast("mxfp8_e4m3"), True),
    # Symbolic sizes in both dimensions take seconds to trace.
    pytest.param(Cast("nvfp4"), False, marks=pytest.mark.deep),
    pytest.param(Cast("nvfp4_16x16"), True, marks=pytest.mark.deep),
    pytest.param(Cast("fp8_e4m3_1x128"), True, marks=pytest.mark.deep),
]


@pytest.mark.parametrize("cast, col", TRACED)
def test_compiled_equals_eager(cast: Cast, col: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(dequantize, fullgraph=True, backend="aot_eager", dynamic=True)
    for shape in ((37, 75), (69, 107)):
        args = (*quantize(matrix(shape), cast, col=col), cast, shape, torch.bfloat16)
        assert torch.equal(compiled(*args, col=col), dequantize(*args, col=col))


@pytest.mark.parametrize("col", [False, True])
def test_two_levels_without_an_amax_are_block_scales_alone(col: bool) -> None:
    cast, shape = Cast("nvfp4"), (35, 50)
    data, scale, amax = quantize(matrix(shape), cast, col=col)
    alone = dequantize(data, scale, None, cast, shape, torch.float32, col=col)
    whole = dequantize(data, scale, amax, cast, shape, torch.float32, col=col)
    factor = amax.double() / (cast.format.element.max * cast.scale_max)
    torch.testing.assert_close(whole.double(), alone.double() * factor, rtol=2**-22, atol=0)
