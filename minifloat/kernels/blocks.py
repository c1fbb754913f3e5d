"""FP8 with a scale for each block: fp32 scales of 128-blocks, E8M0 scales of 32-blocks.

Row and column copies come from one read of `x[M, K]`. A partial block's scale comes from its real
elements, and the kernels write the zeros that pad a scale matrix: the grid, or a wider store at its
edge, covers the padding. What is cast fits its element unless its block holds Inf or NaN, so
saturation is left to the hardware's cast: a clamp would be 6 of 29 instructions per element.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import E5M2, FORMATS, Cast, Scale, rup
from ._device import (
    FP8,
    amax,
    decode,
    e8m0_byte,
    e8m0_decode,
    e8m0_multiplier,
    encode,
    fp8_scale,
    fp32,
    load_tile,
    store_tile,
)
from .transpose import transpose
from .variant import Config, Launch, Variant, samples

__all__ = ["cast_blocks", "fake_blocks", "variants"]

# The fastest of scripts/tune_kernels on an H200 at 8192x8192 bf16, or within 1% of it. With fp32
# scales, a tile is as long as a block along every contraction it serves; a column store needs
# m = 128 to fill 128-byte lines in any case. E8M0 tiles are one block high: a taller one reduces
# across warps.
CONFIGS = {
    "f32_row": Config(32, 128, 4),
    "f32_col": Config(128, 64, 4),
    "f32_both": Config(128, 128, 4),
    "f32_both_partial": Config(128, 128, 8),  # masks do not fit the registers of 4 warps
    "f32_square": Config(128, 128, 8),
    "e8m0_row": Config(32, 512, 8),
    "e8m0_col": Config(32, 64, 1),
    "e8m0_both": Config(32, 128, 2),
    "e8m0_square": Config(32, 256, 4),
    "e8m0_fake": Config(32, 128, 4),
}
# A tile of a padded E8M0 scale matrix holds 128 rows and the scales of 128 elements.
E8M0_PAD = 128


@triton.jit
def line_amax(b_x, AXIS: tl.constexpr, N: tl.constexpr):
    """fp32 max |x| of each of N lines, in a layout of its own.

    The gather is an identity, for the compiler: it unties the amaxes from the layout of the tile
    they came from, so that a transposed tile is transposed as it was loaded, and then cast. Tied,
    it is cast first, its codes are transposed byte by byte, and every thread divides for each of
    the 16 columns it loaded: 36 instructions per element in place of 24.
    """
    return tl.gather(amax(b_x, AXIS), tl.arange(0, N), 0)


@triton.jit
def store_direction(
    b_t,
    b_a,
    data,
    scale,
    i_c,
    o_r,
    o_c,
    R,
    C,
    eps,
    LIMIT: tl.constexpr,
    TYPE: tl.constexpr,
    INF: tl.constexpr,
    POW2: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Codes and decode scales of contraction block i_c of `[R, C]`: 1-D blocks, contraction last.

    The scale matrix is `[contraction blocks, R rounded up to 4]`.
    """
    b_s = fp8_scale(b_a, eps, LIMIT, INF, POW2)  # [BR]
    b_q = encode(b_t.to(tl.float32) * b_s[:, None], LIMIT, TYPE, False)  # [BR, BC]
    store_tile(data, b_q, o_r, o_c, R, C, EVEN)
    padded = tl.cdiv(R, 4) * 4
    b_d = tl.where(o_r < R, tl.div_rn(1.0, b_s), 0.0)  # [BR]
    tl.store(scale + i_c * padded + o_r, b_d, mask=o_r < padded)


@triton.jit
def store_square_scale(scale, value, i_r, i_c, n_c):
    """Entry (i_r, i_c) of a `[., n_c rounded up to 4]` scale matrix; the last one pads its row."""
    padded = tl.cdiv(n_c, 4) * 4
    end = tl.where(i_c == n_c - 1, padded, i_c + 1)
    o_4 = i_c + tl.arange(0, 4)
    tl.store(scale + i_r * padded + o_4, tl.where(o_4 == i_c, value, 0.0), mask=o_4 < end)


@triton.jit
def f32_kernel(
    x,
    row,
    row_scale,
    col,
    col_scale,
    eps,
    M,
    K,
    stride,
    SQUARE: tl.constexpr,
    ROW: tl.constexpr,
    ROW_SCALE: tl.constexpr,
    COL: tl.constexpr,
    COL_SCALE: tl.constexpr,
    LIMIT: tl.constexpr,
    TYPE: tl.constexpr,
    INF: tl.constexpr,
    POW2: tl.constexpr,
    EVEN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """`row[M, K]`, `col[K, M]` and their decode scales; a tile is one block along the contraction.

    Tiles run from the last to the first, as in `tensorwise`. The column copy of 1-D blocks is cast
    from the transposed source tile: it has scales of its own.
    """
    i_t = tl.num_programs(0) - 1 - tl.program_id(0)
    n_k = tl.cdiv(K, BK)
    i_m = (i_t // n_k).to(tl.int64)
    i_k = (i_t % n_k).to(tl.int64)
    o_m = i_m * BM + tl.arange(0, BM)
    o_k = i_k * BK + tl.arange(0, BK)
    b_x = load_tile(x, o_m, o_k, M, K, stride, EVEN)  # [BM, BK]
    if SQUARE:
        s = fp8_scale(amax(b_x, None), eps, LIMIT, INF, POW2)
        if ROW:
            b_q = encode(b_x.to(tl.float32) * s, LIMIT, TYPE, False)
            store_tile(row, b_q, o_m, o_k, M, K, EVEN)
        if COL:
            b_q = encode(tl.trans(b_x).to(tl.float32) * s, LIMIT, TYPE, False)
            store_tile(col, b_q, o_k, o_m, K, M, EVEN)
        d = tl.div_rn(1.0, s)
        if ROW_SCALE:
            store_square_scale(row_scale, d, i_m, i_k, n_k)
        if COL_SCALE:
            store_square_scale(col_scale, d, i_k, i_m, tl.cdiv(M, BM))
    else:
        # Both amaxes before both casts: the widened tile need not live through them.
        if ROW:
            b_r = line_amax(b_x, 1, BM)  # [BM]
        if COL:
            b_c = line_amax(b_x, 0, BK)  # [BK]
        if ROW:
            store_direction(
                b_x, b_r, row, row_scale, i_k, o_m, o_k, M, K, eps, LIMIT, TYPE, INF, POW2, EVEN
            )
        if COL:
            b_t = tl.trans(b_x)  # [BK, BM]
            store_direction(
                b_t, b_c, col, col_scale, i_m, o_k, o_m, K, M, eps, LIMIT, TYPE, INF, POW2, EVEN
            )


@triton.jit
def e8m0_blocks(
    b_x,
    TM: tl.constexpr,
    TK: tl.constexpr,
    LIMIT: tl.constexpr,
    RECIPROCAL: tl.constexpr,
    TYPE: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """Codes `[BM, BK]`, their values, and the exponent bytes `[BM/TM, BK/TK]` of TM x TK blocks."""
    if TM == BM and TK == 1:  # blocks as high as the tile: nothing to reshape, 3% faster
        b_e = e8m0_byte(amax(b_x, 0), RECIPROCAL)  # [BK]
        b_q = encode(b_x.to(tl.float32) * e8m0_multiplier(b_e)[None, :], LIMIT, TYPE, False)
        b_v = decode(b_q, TYPE) * e8m0_decode(b_e)[None, :]  # dropped where nobody stores it
        return b_q, b_v, b_e[None, :]
    b_4 = tl.reshape(b_x, (BM // TM, TM, BK // TK, TK))
    b_a = amax(amax(b_4, 3), 1)  # [BM/TM, BK/TK]
    b_e = e8m0_byte(b_a, RECIPROCAL)
    b_q = encode(b_4.to(tl.float32) * e8m0_multiplier(b_e)[:, None, :, None], LIMIT, TYPE, False)
    b_v = decode(b_q, TYPE) * e8m0_decode(b_e)[:, None, :, None]  # dropped where nobody stores it
    return tl.reshape(b_q, (BM, BK)), tl.reshape(b_v, (BM, BK)), b_e


@triton.jit
def store_row_scale(
    scale, b_e, i_m, i_k, M, K, TM: tl.constexpr, BM: tl.constexpr, SK: tl.constexpr
):
    """`scale[m, k/32]`, padded to (128, 4): a block's byte for each of its rows, zero past M."""
    o_m = i_m * BM + tl.arange(0, BM)
    o_s = i_k * SK + tl.arange(0, SK)
    b_e = tl.reshape(tl.broadcast_to(b_e[:, None, :], (BM // TM, TM, SK)), (BM, SK))
    b_e = tl.where(o_m[:, None] < M, b_e, 0).to(tl.uint8)
    rows, columns = tl.cdiv(M, 128) * 128, tl.cdiv(K, 128) * 4
    m_s = (o_m[:, None] < rows) & (o_s[None, :] < columns)
    tl.store(scale + o_m[:, None] * columns + o_s[None, :], b_e, mask=m_s)


@triton.jit
def store_col_scale(
    scale, b_e, i_m, i_k, M, K, TK: tl.constexpr, SM: tl.constexpr, BK: tl.constexpr
):
    """`scale[m/32, k]`, padded to (4, 128): a block's byte for each of its columns, zero past K."""
    o_s = i_m * SM + tl.arange(0, SM)
    o_k = i_k * BK + tl.arange(0, BK)
    b_e = tl.reshape(tl.broadcast_to(b_e[:, :, None], (SM, BK // TK, TK)), (SM, BK))
    b_e = tl.where(o_k[None, :] < K, b_e, 0).to(tl.uint8)
    rows, columns = tl.cdiv(M, 128) * 4, tl.cdiv(K, 128) * 128
    m_s = (o_s[:, None] < rows) & (o_k[None, :] < columns)
    tl.store(scale + o_s[:, None] * columns + o_k[None, :], b_e, mask=m_s)


@triton.jit
def e8m0_kernel(
    x,
    row,
    row_scale,
    row_out,
    col,
    col_scale,
    col_out,
    M,
    K,
    stride,
    SQUARE: tl.constexpr,
    ROW: tl.constexpr,
    ROW_OUT: tl.constexpr,
    COL: tl.constexpr,
    COL_OUT: tl.constexpr,
    LIMIT: tl.constexpr,
    RECIPROCAL: tl.constexpr,
    TYPE: tl.constexpr,
    TILE: tl.constexpr,
    EVEN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """Codes with E8M0 scales (ROW, COL) and their values in bf16 (ROW_OUT, COL_OUT), all `[M, K]`.

    Blocks run along K for the row copy and along M for the column copy, or both ways if SQUARE. The
    grid covers whole tiles of the padded scale matrices: past [M, K) every amax and byte is 0.
    """
    i_t = tl.num_programs(0) - 1 - tl.program_id(0)
    n_k = tl.cdiv(tl.cdiv(K, 128) * 128, BK)
    i_m = (i_t // n_k).to(tl.int64)
    i_k = (i_t % n_k).to(tl.int64)
    o_m = i_m * BM + tl.arange(0, BM)
    o_k = i_k * BK + tl.arange(0, BK)
    b_x = load_tile(x, o_m, o_k, M, K, stride, EVEN)  # [BM, BK]
    if ROW or ROW_OUT or SQUARE:
        TM: tl.constexpr = TILE if SQUARE else 1
        b_q, b_v, b_e = e8m0_blocks(b_x, TM, TILE, LIMIT, RECIPROCAL, TYPE, BM, BK)
        if ROW:
            store_tile(row, b_q, o_m, o_k, M, K, EVEN)
            store_row_scale(row_scale, b_e, i_m, i_k, M, K, TM, BM, BK // TILE)
        if ROW_OUT:
            store_tile(row_out, b_v.to(tl.bfloat16), o_m, o_k, M, K, EVEN)
        if SQUARE:
            if COL:
                store_tile(col, b_q, o_m, o_k, M, K, EVEN)
                store_col_scale(col_scale, b_e, i_m, i_k, M, K, TILE, BM // TILE, BK)
            if COL_OUT:
                store_tile(col_out, b_v.to(tl.bfloat16), o_m, o_k, M, K, EVEN)
    if (COL or COL_OUT) and not SQUARE:
        b_q, b_v, b_e = e8m0_blocks(b_x, TILE, 1, LIMIT, RECIPROCAL, TYPE, BM, BK)
        if COL:
            store_tile(col, b_q, o_m, o_k, M, K, EVEN)
            store_col_scale(col_scale, b_e, i_m, i_k, M, K, 1, BM // TILE, BK)
        if COL_OUT:
            store_tile(col_out, b_v.to(tl.bfloat16), o_m, o_k, M, K, EVEN)


def cast_blocks(
    x: Tensor,
    *,
    row: Cast | None,
    col: Cast | None,
    row_data: Tensor | None = None,
    row_scale: Tensor | None = None,
    col_data: Tensor | None = None,
    col_scale: Tensor | None = None,
) -> None:
    """`x[M, K]` -> codes and scales of each direction present, in `reference.quantize`'s layouts.

    One read of x serves both directions when they are the same cast, and two launches otherwise.
    """
    if row is not None and col is not None and row != col:
        cast_blocks(x, row=row, col=None, row_data=row_data, row_scale=row_scale)
        cast_blocks(x, row=None, col=col, col_data=col_data, col_scale=col_scale)
        return
    cast = row or col
    if cast is None or x.numel() == 0:
        return
    _check(cast)
    if cast.format.scale is not Scale.F32:
        _e8m0(x, cast, row_data, row_scale, col_data, col_scale).run()
    elif cast.format.square and x.dtype == torch.float32 and col_data is not None:
        # As in `tensorwise`: the column codes of an fp32 tensor are its row codes, transposed.
        codes = row_data if row_data is not None else torch.empty_like(col_data)
        _f32(x, cast, codes, row_scale, None, col_scale).run()
        transpose(codes.view(x.shape), col_data)
    else:
        _f32(x, cast, row_data, row_scale, col_data, col_scale).run()


def fake_blocks(
    x: Tensor,
    *,
    row: Cast | None,
    col: Cast | None,
    row_out: Tensor | None = None,
    col_out: Tensor | None = None,
    col_data: Tensor | None = None,
    col_scale: Tensor | None = None,
) -> None:
    """`x[M, K]` -> the bf16 values of its E8M0 copies, both `[M, K]`: `reference.fake_quantize`.

    The packed column copy comes along when `col_data` and `col_scale` are given.
    """
    if row is not None and col is not None and row != col:
        fake_blocks(x, row=row, col=None, row_out=row_out)
        fake_blocks(x, row=None, col=col, col_out=col_out, col_data=col_data, col_scale=col_scale)
        return
    cast = row or col
    if cast is None or x.numel() == 0:
        return
    _check(cast)
    _e8m0(x, cast, None, None, None, None, row_out=row_out, col_out=col_out).run()
    if col_data is not None:  # a second read: see `encode` on storing codes beside their values
        _e8m0(x, cast, None, None, col_data, col_scale).run()


def _check(cast: Cast) -> None:
    fmt = cast.format
    if fmt.tile is None or fmt.two_level:
        raise ValueError(f"{fmt.name} is not made of FP8 blocks")


def _f32(
    x: Tensor,
    cast: Cast,
    row: Tensor | None,
    row_scale: Tensor | None,
    col: Tensor | None,
    col_scale: Tensor | None,
    *,
    config: Config | None = None,
) -> Launch:
    fmt = cast.format
    assert fmt.element is not None
    m, k = x.shape
    kind = _kind(fmt.square, row, col)
    if kind == "both" and not CONFIGS["f32_both"].even(m, k):
        kind = "both_partial"
    config = config or CONFIGS[f"f32_{kind}"]
    args = {
        "x": x,
        "row": row,
        "row_scale": row_scale,
        "col": col,
        "col_scale": col_scale,
        "eps": cast.eps,
        "M": m,
        "K": k,
        "stride": x.stride(0),
        "SQUARE": fmt.square,
        "ROW": row is not None,
        "ROW_SCALE": row_scale is not None,
        "COL": col is not None,
        "COL_SCALE": col_scale is not None,
        "LIMIT": fmt.element.max,
        "TYPE": FP8[fmt.element],
        "INF": torch.finfo(x.dtype).max,
        "POW2": cast.pow2,
        "EVEN": config.even(m, k),
        "BM": config.m,
        "BK": config.k,
    }
    return Launch(f32_kernel, config.tiles(m, k), args, config)


def _e8m0(
    x: Tensor,
    cast: Cast,
    row: Tensor | None,
    row_scale: Tensor | None,
    col: Tensor | None,
    col_scale: Tensor | None,
    *,
    row_out: Tensor | None = None,
    col_out: Tensor | None = None,
    config: Config | None = None,
) -> Launch:
    fmt = cast.format
    assert fmt.element is not None and fmt.tile is not None
    rows = row if row is not None else row_out
    cols = col if col is not None else col_out
    kind = _kind(fmt.square, rows, cols)
    if kind == "both" and row_out is not None:
        kind = "fake"
    config = config or CONFIGS[f"e8m0_{kind}"]
    m, k = x.shape
    args = {
        "x": x,
        "row": row,
        "row_scale": row_scale,
        "row_out": row_out,
        "col": col,
        "col_scale": col_scale,
        "col_out": col_out,
        "M": m,
        "K": k,
        "stride": x.stride(0),
        "SQUARE": fmt.square,
        "ROW": row is not None,
        "ROW_OUT": row_out is not None,
        "COL": col is not None,
        "COL_OUT": col_out is not None,
        "LIMIT": fmt.element.max,
        "RECIPROCAL": fp32(1.0 / fmt.element.max),
        "TYPE": FP8[fmt.element],
        "TILE": fmt.tile[1],
        "EVEN": config.even(m, k, E8M0_PAD),
        "BM": config.m,
        "BK": config.k,
    }
    programs = config.tiles(rup(m, E8M0_PAD), rup(k, E8M0_PAD))
    return Launch(e8m0_kernel, programs, args, config)


def _kind(square: bool, row: Tensor | None, col: Tensor | None) -> str:
    if square:
        return "square"
    return "both" if row is not None and col is not None else "row" if col is None else "col"


def variants() -> Iterator[Variant]:
    """Each format, by direction; with E8M0 scales, also the bf16 values."""
    code = torch.empty(1, dtype=torch.uint8, device="meta")
    number = torch.empty(1, dtype=torch.float32, device="meta")
    value = torch.empty(1, dtype=torch.bfloat16, device="meta")
    for sample in samples():
        for fmt in FORMATS.values():
            if fmt.tile is None or fmt.element not in FP8:
                continue
            cast = Cast(fmt.name)
            for direction, row, col in sample.directions:
                name = f"{fmt.name}_{direction}_{sample.tag}"
                if fmt.element is E5M2 and direction != "both":
                    continue
                out = (code, number if fmt.scale is Scale.F32 else code)
                r, c = out if row else (None, None), out if col else (None, None)
                if fmt.scale is Scale.F32:
                    yield Variant.of(name, _f32(sample.x, cast, *r, *c))
                    continue
                yield Variant.of(name, _e8m0(sample.x, cast, *r, *c))
                v, w = value if row else None, value if col else None
                launch = _e8m0(sample.x, cast, None, None, None, None, row_out=v, col_out=w)
                yield Variant.of(f"fake_{name}", launch)
