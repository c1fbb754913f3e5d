"""Scales from amaxes, against scalar oracles over all of fp32, and their order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minifloat.formats import E4M3, E5M2, FP32_MAX, Cast, Element
from minifloat.reference import e8m0_decode, e8m0_from_amax, e8m0_multiplier, fp8_scale, scales

from . import oracle

ELEMENTS = pytest.mark.parametrize("element", [E4M3, E5M2], ids=lambda e: e.name)
AMAX = st.floats(0, FP32_MAX, width=32)
BF16_MAX = torch.finfo(torch.bfloat16).max


def amaxes() -> np.ndarray:
    """Numbers of every exponent, powers of two and their neighbours, and the special ones."""
    g = np.random.default_rng(2)
    x = g.integers(0, 0x7F800000, 2000, dtype=np.uint32).view(np.float32)
    powers = (2.0 ** np.arange(-149, 128)).astype(np.float32)
    with np.errstate(over="ignore", under="ignore"):
        near = [np.nextafter(powers, np.float32(d)) for d in (0, np.inf)]
        limits = np.outer([448, 57344], powers).astype(np.float32).ravel()
        near += [limits, np.nextafter(limits, np.float32(np.inf))]
    return np.concatenate((x, powers, *near, np.array([0, FP32_MAX, np.inf, np.nan], np.float32)))


@ELEMENTS
@pytest.mark.parametrize("eps", [0.0, 1e-30, 2.0])
@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("inf", [FP32_MAX, BF16_MAX])
def test_fp8_scale(element: Element, eps: float, pow2: bool, inf: float) -> None:
    a = amaxes()
    got = fp8_scale(torch.from_numpy(a), element, eps=eps, pow2=pow2, inf=inf)
    want = [oracle.fp8_scale(v, element.max, np.float32(eps), pow2, inf) for v in a]
    np.testing.assert_array_equal(got.numpy(), np.array(want, np.float32))


@ELEMENTS
def test_e8m0_from_amax(element: Element) -> None:
    a = amaxes()
    got = e8m0_from_amax(torch.from_numpy(a), element)
    assert got.dtype is torch.uint8
    assert got.tolist() == [oracle.e8m0_byte(v, element.max) for v in a]


def test_e8m0_rounds_up_from_bits() -> None:
    """CONTRACT 1.5's bit rule at each of its corners; 2**15 / 57344 is no power, 448 / 448 is."""
    v = np.array([0, 1, 0x400000, 0x400001, 0x7FFFFF, 0x800000, 0x800001, 0x7F000000], np.uint32)
    one = Element("one", E4M3.dtype, E4M3.torch_dtype, 4, 3, 1.0)  # the factor 1/max is exact
    got = e8m0_from_amax(torch.from_numpy(v.view(np.float32)), one)
    assert got.tolist() == [0, 0, 0, 1, 1, 1, 2, 254]
    top = torch.tensor([FP32_MAX, float("inf"), float("nan")])
    assert e8m0_from_amax(top, one).tolist() == [254, 254, 255]


def test_e8m0_decode_and_multiplier_of_every_byte() -> None:
    byte = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    powers = [2.0 ** (b - 127) for b in range(255)]
    assert e8m0_decode(byte)[:255].tolist() == powers
    assert e8m0_multiplier(byte)[:255].tolist() == [1 / p for p in powers]
    assert e8m0_decode(byte)[255].isnan()
    assert e8m0_multiplier(byte)[255].isnan()


@ELEMENTS
@given(AMAX, AMAX, st.booleans())
def test_scales_are_monotonic(element: Element, a: float, b: float, pow2: bool) -> None:
    """A larger amax never gets a larger encode scale, nor a smaller exponent byte."""
    low, high = torch.tensor([a, b]).sort().values
    assert e8m0_from_amax(low, element) <= e8m0_from_amax(high, element)
    if low > 0:  # 0 means "nothing known": scale 1
        assert fp8_scale(low, element, pow2=pow2) >= fp8_scale(high, element, pow2=pow2)


@given(AMAX, AMAX, AMAX, st.sampled_from([256, 448]))
def test_block_scales_are_monotonic(a: float, b: float, whole: float, scale_max: int) -> None:
    low, high = torch.tensor([a, b]).sort().values
    g = scales.global_scale(torch.tensor([whole]), scale_max)
    assert scales.block_scale(low, g) <= scales.block_scale(high, g)
    assert scales.block_multiplier(scales.block_scale(low, g), g) >= scales.block_multiplier(
        scales.block_scale(high, g), g
    )


@pytest.mark.parametrize("scale_max", [256, 448])
def test_global_scale(scale_max: int) -> None:
    a = amaxes()[:-1]
    got = scales.global_scale(torch.from_numpy(a), scale_max)
    want = [oracle.nvfp4_global(v, scale_max) for v in a]
    np.testing.assert_array_equal(got.encode.numpy(), np.array([w[0] for w in want]))
    np.testing.assert_array_equal(got.decode.numpy(), np.array([w[1] for w in want]))
    nan = scales.global_scale(torch.tensor([float("nan")]), scale_max)
    assert (nan.encode.item(), nan.decode.item()) == (1.0, 1.0)


@pytest.mark.parametrize("whole", [0.0, 1e-38, 1e-30, 10.0, 1e30, FP32_MAX, float("inf")])
def test_block_scale_and_multiplier(whole: float) -> None:
    g = scales.global_scale(torch.tensor([whole]), 448)
    enc, dec = oracle.nvfp4_global(np.float32(whole), 448)
    fractions = np.geomspace(1e-6, 1, 50)
    block = (np.array([0, *fractions]) * min(whole, FP32_MAX)).astype(np.float32)
    byte = scales.block_scale(torch.from_numpy(block), g)
    with np.errstate(over="ignore", divide="ignore"):
        want = [oracle.e4m3_byte(v * (enc * np.float32(1 / 6))) for v in block]
        values = oracle.decode(np.array(want), E4M3)
        multiplier = np.minimum(np.float32(1) / (values * dec), np.float32(FP32_MAX))
    assert byte.tolist() == want
    np.testing.assert_array_equal(scales.block_multiplier(byte, g).numpy(), multiplier)


def test_block_scale_multiplies_by_the_factor_formed_first() -> None:
    """`amax * (encode * fp32(1/6))` at E4M3's ties, where another order rounds to another byte."""
    ties = oracle.middles_of(E4M3)
    for whole in np.random.default_rng(8).uniform(0.1, 100, 20).astype(np.float32):
        g = scales.global_scale(torch.tensor([whole]), 448)
        enc, _ = oracle.nvfp4_global(whole, 448)
        block = oracle.around((ties * 6 / float(enc)).astype(np.float32))
        want = oracle.encode(block * (enc * np.float32(1 / 6)), E4M3)
        np.testing.assert_array_equal(scales.block_scale(torch.from_numpy(block), g).numpy(), want)


@pytest.mark.parametrize("scale_max, denominator", [(256, 1536), (448, 2688)])
def test_dequantize_factor_is_an_fp32_constant(scale_max: int, denominator: int) -> None:
    got = scales.dequantize_factor(Cast("nvfp4", scale_max=scale_max))
    assert got == float(np.float32(1 / denominator))


def test_reciprocal_is_the_division() -> None:
    x = amaxes()[:-3]
    with np.errstate(divide="ignore", over="ignore"):
        want = np.float32(1) / x
    np.testing.assert_array_equal(scales.reciprocal(torch.from_numpy(x)).numpy(), want)
