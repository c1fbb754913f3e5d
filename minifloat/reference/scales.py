"""Scales from amaxes: fp32 (plain or power of two), E8M0 bytes, and two-level E4M3."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..formats import E2M1, E4M3, FP32_MAX, Cast, Element
from .elements import decode, encode

__all__ = [
    "divide",
    "e8m0_decode",
    "e8m0_from_amax",
    "e8m0_multiplier",
    "fp8_scale",
    "reciprocal",
]

_MANTISSA = 0x7FFFFF
_SUBNORMAL_HALF = 0x400000  # 2**-127, the power of two below the smallest normal number


def reciprocal(x: Tensor) -> Tensor:
    """1/x, rounded to nearest: the division, never an approximate reciprocal."""
    return torch.ones_like(x) / x


def divide(x: Tensor, value: float) -> Tensor:
    """x/value, rounded to nearest. By a tensor: CUDA multiplies by the reciprocal of a scalar."""
    return x / torch.full_like(x, value)


def f32(value: float) -> float:
    """`value` rounded to fp32: a constant of the contract is an fp32 constant."""
    return _f32(value)


f32._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _f32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32, device="cpu"))


def fp8_scale(
    amax: Tensor, element: Element, *, eps: float = 0.0, pow2: bool = False, inf: float = FP32_MAX
) -> Tensor:
    """Encode scale `max / amax` of an fp32 amax; 1 where amax is 0, infinite or NaN.

    amax is at least `eps` (NaN stays); an infinite quotient becomes `inf`; `pow2` rounds down.
    """
    amax = torch.where(amax < eps, eps, amax)
    scale = torch.full_like(amax, element.max) / amax
    scale = torch.where(scale.isinf(), inf, scale)
    if pow2:
        scale = (scale.view(torch.int32) & ~_MANTISSA).view(torch.float32)
    return torch.where((amax == 0) | ~amax.isfinite(), 1.0, scale)


def e8m0_from_amax(amax: Tensor, element: Element) -> Tensor:
    """Exponent byte of `amax / max`, rounded up: NaN 255, Inf 254, 0 0."""
    v = amax * f32(1.0 / element.max)
    bits = v.view(torch.int32)
    exponent, mantissa = bits >> 23, bits & _MANTISSA
    up = (mantissa != 0) & (exponent != 0xFE)
    up &= ~((exponent == 0) & (mantissa <= _SUBNORMAL_HALF))
    byte = exponent + up.to(torch.int32)
    byte = torch.where(v.isnan(), 0xFF, torch.where(v.isinf(), 0xFE, byte))
    return byte.to(torch.uint8)


def e8m0_multiplier(byte: Tensor) -> Tensor:
    """The encode multiplier 2**(127 - byte), from bits; byte 254 gives 2**-127, 255 NaN."""
    b = byte.to(torch.int32)
    bits = torch.where(b == 0xFE, _SUBNORMAL_HALF, (254 - b) << 23)
    return torch.where(b == 0xFF, torch.nan, bits.view(torch.float32))


def e8m0_decode(byte: Tensor) -> Tensor:
    """2**(byte - 127), from bits; byte 0 gives 2**-127, 255 NaN."""
    b = byte.to(torch.int32)
    bits = torch.where(b == 0, _SUBNORMAL_HALF, b << 23)
    return torch.where(b == 0xFF, torch.nan, bits.view(torch.float32))


class TwoLevel(NamedTuple):
    """Encode and decode factors of a global amax: `encode = scale_max * 6 / amax`."""

    encode: Tensor
    decode: Tensor


def global_scale(amax: Tensor, scale_max: int) -> TwoLevel:
    """Global factors of a two-level format; 1 where amax is 0, infinite or NaN."""
    encode_ = (torch.full_like(amax, scale_max * E2M1.max) / amax).clamp(max=FP32_MAX)
    encode_ = torch.where((encode_ == 0) | (amax == 0) | encode_.isnan(), 1.0, encode_)
    return TwoLevel(encode_, reciprocal(encode_))


def block_scale(amax: Tensor, g: TwoLevel) -> Tensor:
    """E4M3 byte of a block's amax under the global factors: `e4m3(amax * (encode / 6))`."""
    return e4m3_scale(amax * (g.encode * f32(1.0 / E2M1.max)))


def e4m3_scale(value: Tensor) -> Tensor:
    """E4M3 byte of a candidate block scale."""
    return encode(value, E4M3)


def block_multiplier(byte: Tensor, g: TwoLevel) -> Tensor:
    """Encode multiplier `1 / (e4m3 * decode)` of a block, at most the largest fp32."""
    return reciprocal(decode(byte, E4M3) * g.decode).clamp(max=FP32_MAX)


def dequantize_factor(cast: Cast) -> float:
    """`fp32(1 / (6 * scale_max))`: what turns `e4m3 * amax` into a block's decode scale."""
    return f32(1.0 / (E2M1.max * cast.scale_max))
