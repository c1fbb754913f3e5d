"""The contract's arithmetic a second time, in NumPy fp32 and loops: slow, obvious, independent.

Nothing here calls `minifloat.reference`, casts to an 8-bit dtype or pads: a partial tile is a
smaller slice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from functools import cache

import numpy as np

from minifloat.formats import E2M1, E4M3, FP32_MAX, Cast, Element, Scale

F32 = np.float32


@cache
def magnitudes(element: Element) -> np.ndarray:
    """|value| of the codes 0, 1, 2, ... up to the largest, from the definition of the fields."""
    bias, steps = 2 ** (element.exponent - 1) - 1, 2**element.mantissa
    table = []
    for code in range(2 ** (element.bits - 1)):
        exponent, mantissa = divmod(code, steps)
        significand = mantissa if exponent == 0 else steps + mantissa
        table.append(significand * 2.0 ** (max(exponent, 1) - bias - element.mantissa))
    return np.array([v for v in table if v <= element.max])


@cache
def middles_of(element: Element) -> np.ndarray:
    table = magnitudes(element)
    return (table[1:] + table[:-1]) / 2  # exact


def encode(x: np.ndarray, element: Element) -> np.ndarray:
    """The nearest value's code, ties to the even code, saturating."""
    middles = middles_of(element)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        a = np.abs(x.astype(np.float64))
    code = np.searchsorted(middles, a, side="left")  # a tie stays below
    tie = a == middles[np.minimum(code, len(middles) - 1)]
    code = code + (tie & (code % 2 == 1))
    code = code | (np.signbit(x).astype(int) << (element.bits - 1))
    return np.where(np.isnan(x), 2 ** (element.bits - 1) - 1, code).astype(np.uint8)


def around(x: np.ndarray) -> np.ndarray:
    """The fp32 numbers `x` and two neighbours of each on either side."""
    below, above = np.nextafter(x, F32(-np.inf)), np.nextafter(x, F32(np.inf))
    far = np.nextafter(below, F32(-np.inf)), np.nextafter(above, F32(np.inf))
    return np.concatenate((x, below, above, *far))


def decode(codes: np.ndarray, element: Element) -> np.ndarray:
    """fp32 values of finite codes."""
    sign = 1 << (element.bits - 1)
    value = magnitudes(element)[codes & (sign - 1)]
    return np.where(codes & sign, -value, value).astype(F32)


def fp8_scale(amax: F32, fmax: float, eps: float, pow2: bool, inf: float) -> F32:
    """CONTRACT 1.3, step by step."""
    if amax < eps:
        amax = F32(eps)
    if amax == 0 or not np.isfinite(amax):
        return F32(1)
    with np.errstate(over="ignore"):
        scale = F32(fmax) / amax
    if np.isinf(scale):
        scale = F32(inf)
    return F32(2.0 ** (math.frexp(scale)[1] - 1)) if pow2 else scale


def e8m0_byte(amax: F32, fmax: float) -> int:
    """CONTRACT 1.5: the smallest byte whose 2**(byte - 127) is not below amax/fmax, at most 254."""
    v = amax * F32(1 / fmax)
    if np.isnan(v):
        return 255
    if np.isinf(v):
        return 254
    if v == 0:
        return 0
    m, e = math.frexp(v)  # v = m * 2**e, 1/2 <= m < 1
    return min(max((e - 1 if m == 0.5 else e) + 127, 0), 254)


def nvfp4_global(amax: F32, scale_max: int) -> tuple[F32, F32]:
    """CONTRACT 1.6 step 1: (S_enc, S_dec)."""
    with np.errstate(over="ignore", divide="ignore"):
        enc = min(F32(scale_max * 6) / amax, F32(FP32_MAX))
    enc = F32(1) if enc == 0 or amax == 0 else enc
    return enc, F32(1) / enc


def e4m3_byte(v: F32) -> int:
    return int(encode(np.array([min(v, F32(FP32_MAX))]), E4M3)[0])


def nvfp4_codes(block: np.ndarray, byte: int, dec: F32) -> np.ndarray:
    """CONTRACT 1.6 steps 3 and 4."""
    with np.errstate(over="ignore", divide="ignore"):
        multiplier = min(F32(1) / (decode(np.array(byte), E4M3) * dec), F32(FP32_MAX))
        return encode(np.clip(block * multiplier, -6, 6), E2M1)


def four_over_six(block: np.ndarray, enc: F32, dec: F32, amax: F32, cast: Cast) -> int:
    """CONTRACT 1.6, 4over6: the byte of map6, or of map4 if its error is strictly smaller."""
    base = (np.abs(block).max() / F32(6)) * enc
    candidates = [e4m3_byte(base), e4m3_byte(F32(1.5) * base)]
    errors = []
    for byte in candidates:
        values = decode(nvfp4_codes(block, byte, dec), E2M1)
        sf = decode(np.array(byte), E4M3)
        e = values * sf * amax / F32(6 * cast.scale_max) - block
        e = np.abs(e) if cast.error == "MAE" else e * e
        rows = np.zeros(16, F32)
        for j in range(block.shape[1]):  # index order
            rows[: len(block)] += e[:, j]
        for half in (8, 4, 2, 1):
            rows = rows[:half] + rows[half:]
        errors.append(rows[0])
    return candidates[1] if errors[1] < errors[0] else candidates[0]


def tiles(
    shape: tuple[int, int], tile: tuple[int, int] | None
) -> Iterator[tuple[tuple[int, int], tuple[slice, slice]]]:
    """(place of the tile, the slices of its real elements)."""
    r, c = tile or (max(shape[0], 1), max(shape[1], 1))
    for i in range(0, shape[0], r):
        for j in range(0, shape[1], c):
            rows = slice(i, min(i + r, shape[0]))
            yield (i // r, j // c), (rows, slice(j, min(j + c, shape[1])))


def amax_per_element(x: np.ndarray, tile: tuple[int, int] | None) -> np.ndarray:
    out = np.zeros_like(x)
    for _, part in tiles(x.shape, tile):
        out[part] = np.abs(x[part]).max()
    return out


def quantize(
    x: np.ndarray, cast: Cast, inf: float = FP32_MAX
) -> tuple[np.ndarray, dict[tuple[int, int], F32 | int], np.ndarray]:
    """fp32 `x[R, C]`, contraction last -> (codes, {tile: stored scale}, global amax).

    Round to nearest, no Hadamard transform. `inf` replaces an infinite block scale.
    """
    fmt = cast.format
    codes = np.zeros(x.shape, np.uint8)
    scales: dict[tuple[int, int], F32 | int] = {}
    if cast.row_scaled:
        amax = np.array([np.abs(row).max(initial=0) for row in x], F32)
    else:
        amax = np.array([np.abs(x).max(initial=0)], F32)
    if fmt.tile is None and x.size == 0:
        scales[0, 0] = F32(1) / fp8_scale(F32(0), fmt.element.max, cast.eps, cast.pow2, inf)
    for place, part in tiles(x.shape, fmt.tile):
        block = x[part]
        top = np.abs(block).max()
        if fmt.scale is Scale.F32:
            scale = fp8_scale(top, fmt.element.max, cast.eps, cast.pow2, inf)
            scales[place] = F32(1) / scale
            codes[part] = encode(block * scale, fmt.element)
        elif fmt.scale is Scale.E8M0:
            byte = scales[place] = e8m0_byte(top, fmt.element.max)
            codes[part] = encode(block * F32(2.0 ** (127 - byte)), fmt.element)
        else:
            a = amax[part[0].start if cast.row_scaled else 0]
            enc, dec = nvfp4_global(a, cast.scale_max)
            if cast.error:
                byte = four_over_six(block, enc, dec, a, cast)
            else:
                byte = e4m3_byte(top * (enc * F32(1 / 6)))
            scales[place] = byte
            codes[part] = nvfp4_codes(block, byte, dec)
    return codes, scales, amax


def fma(a: float, b: float, c: float) -> F32:
    """a*b + c with one rounding to fp32, ties to even."""
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    near = F32(float(exact))
    around = [np.nextafter(near, F32(-np.inf)), near, np.nextafter(near, F32(np.inf))]
    return min(around, key=lambda v: (abs(Fraction(float(v)) - exact), int(v.view(np.int32)) & 1))
