"""The inverse of every cast: stored operand -> `[M, K]`.

The kernel walks the operand as it is stored, `[R, C]` in the orientation of its data, with one
scale per TR x TC block, and transposes on the way out where the data is a transposed column copy.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import E2M1, E4M3, E5M2, FORMATS, Cast, Format, Scale, cdiv
from ._device import FP8, decode, e8m0_decode, fp32, load_tile, store_tile
from .variant import Config, Launch, Variant, samples

__all__ = ["dequantize", "variants"]

# To be measured (scripts/tune_kernels).
CONFIGS = {"straight": Config(64, 128, 4), "transposed": Config(128, 64, 4)}

# A power of two whose product with the bits `code << 22`, a tiny fp32, is the E2M1 value.
_E2M1 = tl.constexpr(2.0**126)


@triton.jit
def load_codes(
    data, o_r, i_c, R, B, pitch, PACKED: tl.constexpr, EVEN: tl.constexpr, BC: tl.constexpr
):
    """Codes `[BR, BC]` of an operand of B bytes a row; PACKED: two per byte, the first one low."""
    PER: tl.constexpr = 2 if PACKED else 1
    o_b = i_c * (BC // PER) + tl.arange(0, BC // PER)
    b_q = load_tile(data, o_r, o_b, R, B, pitch, EVEN)  # [BR, BC/PER]
    if PACKED:
        b_q = tl.reshape(tl.join(b_q & 15, b_q >> 4), (o_r.shape[0], BC))
    return b_q


@triton.jit
def decode4(b_q):
    """E2M1 codes (uint8, unpacked) -> fp32: the code's bits, placed below fp32's exponent bias."""
    bits = b_q.to(tl.int32)
    return (((bits & 7) << 22) | ((bits & 8) << 28)).to(tl.float32, bitcast=True) * _E2M1


@triton.jit
def dequantize_kernel(
    data,
    scale,
    amax,
    out,
    R,
    C,
    B,
    pitch,
    stride_r,
    stride_c,
    KIND: tl.constexpr,
    TYPE: tl.constexpr,
    SCALE_TYPE: tl.constexpr,
    FACTOR: tl.constexpr,
    GLOBAL: tl.constexpr,
    ROW_SCALED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    TR: tl.constexpr,
    TC: tl.constexpr,
    EVEN: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """`out = element * scale` in fp32, then one cast; `out` is `[R, C]`, or `[C, R]` if TRANSPOSED.

    The data has B bytes a row, rows start `pitch` apart; element (r, c) has its scale at
    `r/TR * stride_r + c/TC * stride_c`. KIND: "tensor" (`scale[0]`), "f32", "e8m0", or "e4m3",
    whose scale is `(byte * amax) * FACTOR` with one amax for the tensor or (ROW_SCALED) each row;
    the byte's value, if not GLOBAL.
    """
    i_t = tl.program_id(0)
    n_c = tl.cdiv(C, BC)
    i_r = (i_t // n_c).to(tl.int64)
    i_c = (i_t % n_c).to(tl.int64)
    o_r = i_r * BR + tl.arange(0, BR)
    o_c = i_c * BC + tl.arange(0, BC)
    b_q = load_codes(data, o_r, i_c, R, B, pitch, KIND == "e4m3", EVEN, BC)  # [BR, BC]
    b_v = decode4(b_q) if KIND == "e4m3" else decode(b_q, TYPE)
    if KIND == "tensor":
        b_v = b_v * tl.load(scale)
    else:
        # The scales of this tile, [SR, SC]: each covers BR/SR x BC/SC elements of it.
        SR: tl.constexpr = BR // TR if TR < BR else 1
        SC: tl.constexpr = BC // TC if TC < BC else 1
        o_sr = (i_r * BR + tl.arange(0, SR) * (BR // SR)) // TR
        o_sc = (i_c * BC + tl.arange(0, SC) * (BC // SC)) // TC
        p_s = scale + o_sr[:, None] * stride_r + o_sc[None, :] * stride_c
        m_s = (o_sr[:, None] < tl.cdiv(R, TR)) & (o_sc[None, :] < tl.cdiv(C, TC))
        b_s = tl.load(p_s, mask=m_s, other=0)
        if KIND == "e8m0":
            b_s = e8m0_decode(b_s.to(tl.int32))
        elif KIND == "e4m3":
            b_s = decode(b_s, SCALE_TYPE)
            if GLOBAL:
                if ROW_SCALED:
                    b_a = tl.load(amax + o_sr, mask=o_sr < R, other=0.0)[:, None]  # [SR, 1]
                else:
                    b_a = tl.load(amax)
                b_s = (b_s * b_a) * FACTOR
        b_4 = tl.reshape(b_v, (SR, BR // SR, SC, BC // SC))
        b_v = tl.reshape(b_4 * b_s[:, None, :, None], (BR, BC))
    b_o = b_v.to(out.dtype.element_ty)
    if TRANSPOSED:
        store_tile(out, tl.trans(b_o), o_c, o_r, C, R, EVEN)
    else:
        store_tile(out, b_o, o_r, o_c, R, C, EVEN)


def dequantize(
    data: Tensor, scale: Tensor, amax: Tensor | None, cast: Cast, out: Tensor, *, col: bool
) -> None:
    """Stored buffers of one direction -> `out[M, K]`, contiguous: `reference.dequantize`.

    Rows of codes, and of scales that have a number for each row of codes, may have room at their
    end.
    """
    if out.numel() > 0:
        _dequantize(data, scale, amax, cast, out, col).run()


def _dequantize(
    data: Tensor,
    scale: Tensor,
    amax: Tensor | None,
    cast: Cast,
    out: Tensor,
    col: bool,
    *,
    config: Config | None = None,
) -> Launch:
    fmt = cast.format
    assert fmt.element is not None
    transposed = col and fmt.col_transposed
    config = config or CONFIGS["transposed" if transposed else "straight"]
    r, c = (out.shape[1], out.shape[0]) if transposed else (out.shape[0], out.shape[1])
    (tr, tc), (stride_r, stride_c) = _scale_layout(fmt, col, r, c)
    if fmt.scale_transposed and scale.dim() == 2:
        stride_c = scale.shape[1]
    width = cdiv(c, fmt.element.per_byte)
    args = {
        "data": data,
        "scale": scale,
        "amax": amax if fmt.two_level else None,
        "out": out,
        "R": r,
        "C": c,
        "B": width,
        "pitch": data.stride(0) if data.dim() == 2 and data.shape[0] > 1 else width,
        "stride_r": stride_r,
        "stride_c": stride_c,
        "KIND": _kind(fmt),
        "TYPE": FP8.get(fmt.element),
        "SCALE_TYPE": FP8[E4M3],
        "FACTOR": fp32(1.0 / (E2M1.max * cast.scale_max)),
        "GLOBAL": amax is not None,
        "ROW_SCALED": cast.row_scaled,
        "TRANSPOSED": transposed,
        "TR": tr,
        "TC": tc,
        "EVEN": config.even(r, c),
        "BR": config.m,
        "BC": config.k,
    }
    return Launch(dequantize_kernel, config.tiles(r, c), args, config)


def _kind(fmt: Format) -> str:
    if fmt.tile is None:
        return "tensor"
    return {Scale.F32: "f32", Scale.E8M0: "e8m0", Scale.E4M3_F32: "e4m3"}[fmt.scale]


def _scale_layout(
    fmt: Format, col: bool, r: int, c: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Elements per scale, and strides of the scale matrix, along rows and columns of the data."""
    if fmt.scale_tile is None:
        return (1, 1), (0, 0)
    if col and not fmt.col_transposed:  # data and scale are in the orientation of the source
        columns = fmt.scale_shape(c, r)[0]
        return (fmt.scale_tile[1], fmt.scale_tile[0]), (columns, 1)
    columns = fmt.scale_shape(r, c)[1]
    return fmt.scale_tile, ((1, columns) if fmt.scale_transposed else (columns, 1))


def variants() -> Iterator[Variant]:
    """Every format, by direction, into every dtype."""
    byte = torch.empty(1, dtype=torch.uint8, device="meta")
    number = torch.empty(1, dtype=torch.float32, device="meta")
    for sample in samples():
        for fmt in FORMATS.values():
            if fmt.element is None or (fmt.element is E5M2 and not sample.every):
                continue
            scale = number if fmt.scale is Scale.F32 else byte
            for col in (False, True) if sample.every else (True,):
                name = f"{fmt.name}_{'col' if col else 'row'}_{sample.tag}"
                launch = _dequantize(byte, scale, number, Cast(fmt.name), sample.x, col)
                yield Variant.of(name, launch)
                if fmt.two_level:
                    launch = _dequantize(byte, scale, None, Cast(fmt.name), sample.x, col)
                    yield Variant.of(f"unscaled_{name}", launch)
