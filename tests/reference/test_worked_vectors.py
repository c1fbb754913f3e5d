"""Appendix A of the contract: worked vectors, computed by hand from its formulas."""

from __future__ import annotations

import math

import pytest
import torch

from minifloat.formats import E4M3, E5M2, Cast, Element
from minifloat.reference import dequantize, e8m0_from_amax, fp8_scale, quantize, scales, swizzle

X = torch.tensor([[0.1, -1.0, 3.0, -0.007]])
BLOCK = torch.tensor(
    [[0.5, -1, 0.25, 2, -3, 0.1, 0.05, -0.6, 1.5, 0.75, -0.125, 0.3, -2.2, 1.1, 0, 2.9]]
)
NVFP4 = Cast("nvfp4")
GLOBAL = torch.tensor([10.0])


def bits(x: torch.Tensor) -> list[int]:
    return [b & 0xFFFFFFFF for b in x.to(torch.float32).reshape(-1).view(torch.int32).tolist()]


@pytest.mark.parametrize(
    "cast, scale, scale_inv, data",
    [
        (Cast("fp8_e4m3"), 0x43155555, 0x3BDB6DB7, "57 f1 7e b8"),
        (Cast("fp8_e4m3", pow2=True), 0x43000000, 0x3C000000, "55 f0 7c b6"),
        (Cast("fp8_e5m2"), 0x46955555, None, "67 f5 7b d8"),
    ],
)
def test_current_scaling(cast: Cast, scale: int, scale_inv: int | None, data: str) -> None:
    encode_scale = fp8_scale(torch.tensor([3.0]), cast.format.element, pow2=cast.pow2)
    assert bits(encode_scale) == [scale]
    codes, stored, _ = quantize(X, cast)
    assert bytes(codes.flatten().tolist()).hex(" ") == data
    assert scale_inv is None or bits(stored) == [scale_inv]


@pytest.mark.parametrize(
    "amax, plain, pow2",
    [
        (0.0, 0x3F800000, 0x3F800000),
        (1e-40, 0x7F7FFFFF, 0x7F000000),
        (1.0, 0x43E00000, 0x43800000),
        (448.0, 0x3F800000, 0x3F800000),
        (449.0, 0x3F7F6E0A, 0x3F000000),
        (math.inf, 0x3F800000, 0x3F800000),
        (math.nan, 0x3F800000, 0x3F800000),
    ],
)
def test_encode_scale(amax: float, plain: int, pow2: int) -> None:
    a = torch.tensor([amax])
    assert bits(fp8_scale(a, E4M3)) == [plain]
    assert bits(fp8_scale(a, E4M3, pow2=True)) == [pow2]


@pytest.mark.parametrize("element, constant", [(E4M3, 0x3B124925), (E5M2, 0x37924925)])
def test_reciprocal_constants(element: Element, constant: int) -> None:
    assert bits(torch.tensor(scales.f32(1 / element.max))) == [constant]


@pytest.mark.parametrize(
    "amax, e4m3, e5m2",
    [
        (448, 127, 120),
        (449, 128, 121),
        (1, 119, 112),
        (3, 120, 113),
        (224, 126, 119),
        (0, 0, 0),
        (1e-38, 0, 0),
        (3.4e38, 247, 240),
    ],
)
def test_mxfp8_scale_byte(amax: float, e4m3: int, e5m2: int) -> None:
    a = torch.tensor([float(amax)])
    assert e8m0_from_amax(a, E4M3).item() == e4m3
    assert e8m0_from_amax(a, E5M2).item() == e5m2
    for element, byte in (("e4m3", e4m3), ("e5m2", e5m2)):
        assert quantize(a[None], Cast(f"mxfp8_{element}"))[1][0, 0] == byte


def test_nvfp4_scales() -> None:
    g = scales.global_scale(GLOBAL, 448)
    assert bits(g.encode) == [0x43866666]
    byte = scales.block_scale(BLOCK.abs().amax(), g)
    assert byte.tolist() == [0x70]
    assert bits(scales.block_multiplier(byte, g)) == [0x40066666]


def test_nvfp4_bytes() -> None:
    data, scale, amax = quantize(BLOCK, NVFP4, amax=GLOBAL)
    assert bytes(data.flatten().tolist()).hex(" ") == "c2 61 0f b0 35 19 4e 70"
    nibbles = [n for b in data.flatten().tolist() for n in (b & 15, b >> 4)]
    assert nibbles == [2, 12, 1, 6, 15, 0, 0, 11, 5, 3, 9, 1, 14, 4, 0, 7]
    assert scale[0, 0] == 0x70
    assert amax is GLOBAL


def test_nvfp4_values() -> None:
    """Multiplier 128 * 10 / 2688; the printed digits are good to half of the last one."""
    data, scale, amax = quantize(BLOCK, NVFP4, amax=GLOBAL)
    out = dequantize(data, scale, amax, NVFP4, (1, 16), torch.float32)
    assert abs(out[0, 0].item() - 0.47619048) <= 0.5e-8 + 2.0**-26  # 1.0 * multiplier
    first = [0.476, -0.952, 0.238, 1.905, -2.857, 0]
    for got, printed in zip(out[0].tolist(), first, strict=False):
        assert abs(got - printed) <= 0.0005


@pytest.mark.parametrize(
    "place, index",
    [
        ((0, 0), 0),
        ((0, 1), 1),
        ((1, 0), 16),
        ((31, 3), 499),
        ((32, 0), 4),
        ((127, 3), 511),
        ((0, 4), 512),
        ((128, 0), 2048),
        ((200, 9), 3209),
    ],
)
def test_swizzle_index(place: tuple[int, int], index: int) -> None:
    scale = torch.zeros(256, 16, dtype=torch.uint8)
    scale[place] = 1
    assert swizzle(scale).flatten().nonzero().tolist() == [[index]]
