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

from .. import env
from ..formats import E5M2, FORMATS, Cast, Scale, rup
from ..layout import pad
from ._blocks_device import WIDEST, store_blocks, store_words, word_scales
from ._device import (
    FP8,
    amax,
    decode,
    e8m0_byte,
    e8m0_decode,
    e8m0_multiplier,
    encode,
    fp32,
    load_tile,
    store_tile,
)
from ._e8m0_device import store_e8m0
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
    "f32_both": Config(128, 128, 8),
    "f32_square": Config(128, 128, 8),
    "f32_words_both": Config(128, 128, 4),
    "f32_words_square": Config(128, 128, 8),
    "e8m0_row": Config(32, 512, 8),
    "e8m0_col": Config(32, 64, 1),
    "e8m0_both": Config(32, 128, 2),
    "e8m0_words_both": Config(32, 256, 2),
    "e8m0_words_both_128": Config(32, 128, 2),  # where K is no multiple of 256
    "e8m0_square": Config(32, 256, 4),
    "e8m0_fake": Config(32, 128, 4),
    "e8m0_words_fake": Config(32, 128, 4),  # 16384x14336: 352 us, copy_ of the bytes 334
    "e8m0_words_fake_128": Config(32, 128, 4),
}
# A tile of a padded E8M0 scale matrix holds 128 rows and the scales of 128 elements.
E8M0_PAD = 128


@triton.jit
def f32_kernel(
    x, row, row_scale, col, col_scale, eps, M, K, stride,
    SQUARE: tl.constexpr, ROW: tl.constexpr, ROW_SCALE: tl.constexpr, COL: tl.constexpr,
    COL_SCALE: tl.constexpr, LIMIT: tl.constexpr, TYPE: tl.constexpr, INF: tl.constexpr,
    POW2: tl.constexpr, EVEN: tl.constexpr, PAD: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """`row[M, K]`, `col[K, M]` and their decode scales; a tile is one block along the contraction.

    Both have zeros up to multiples of PAD.

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
    store_blocks(
        b_x, row, row_scale, col, col_scale, eps, i_m, i_k, o_m, o_k, M, K, SQUARE, ROW, ROW_SCALE,
        COL, COL_SCALE, LIMIT, TYPE, INF, POW2, EVEN, PAD, BM, BK,
    )  # fmt: skip


@triton.jit
def words_kernel(
    x, row, row_scale, col, col_scale, eps, M, K, stride,
    SQUARE: tl.constexpr, ROW: tl.constexpr, ROW_SCALE: tl.constexpr, COL: tl.constexpr,
    COL_SCALE: tl.constexpr, LIMIT: tl.constexpr, TYPE: tl.constexpr, INF: tl.constexpr,
    POW2: tl.constexpr,
):  # fmt: skip
    """`f32_kernel` for whole 128x128 tiles of bf16, in words: both directions, or one of squares.

    A thread has four rows of its columns: four codes of the column copy make a word without a
    move, and words are transposed. 10 instructions per element in place of 20, 111 us became 76.
    """
    i_t = tl.num_programs(0) - 1 - tl.program_id(0)
    n_k = K // 128
    i_m = (i_t // n_k).to(tl.int64)
    i_k = (i_t % n_k).to(tl.int64)
    o_g = tl.arange(0, 32)
    p_x = x.to(tl.pointer_type(tl.int32), bitcast=True) + i_m * 128 * (stride // 2) + i_k * 64
    p_x = p_x + 4 * o_g[:, None] * (stride // 2) + tl.arange(0, 64)[None, :]  # rows 0, 4, ...
    w0 = tl.load(p_x)  # [32, 64]
    w1 = tl.load(p_x + stride // 2)
    w2 = tl.load(p_x + 2 * (stride // 2))
    w3 = tl.load(p_x + 3 * (stride // 2))
    r0, r1, r2, r3, c0, c1 = word_scales(
        w0, w1, w2, w3, row_scale, col_scale, eps, i_m, i_k, M, K,
        SQUARE, ROW, COL, ROW_SCALE, COL_SCALE, LIMIT, INF, POW2, POW2 and not SQUARE, True,
    )  # fmt: skip
    store_words(
        w0, w1, w2, w3, r0, r1, r2, r3, c0, c1, row, col, i_m, i_k, M, K, ROW, COL, LIMIT, TYPE,
        POW2 and not SQUARE, True, 128,
    )  # fmt: skip


@triton.jit
def e8m0_blocks(
    b_x, TM: tl.constexpr, TK: tl.constexpr, LIMIT: tl.constexpr, RECIPROCAL: tl.constexpr,
    TYPE: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
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
    x, row, row_scale, row_out, col, col_scale, col_out, M, K, stride,
    SQUARE: tl.constexpr, ROW: tl.constexpr, ROW_OUT: tl.constexpr, COL: tl.constexpr,
    COL_OUT: tl.constexpr, LIMIT: tl.constexpr, RECIPROCAL: tl.constexpr, TYPE: tl.constexpr,
    TILE: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
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


@triton.jit
def e8m0_words_kernel(
    x, row, row_scale, row_out, col, col_scale, col_out, M, K, stride, ROW: tl.constexpr,
    COL: tl.constexpr, LIMIT: tl.constexpr, RECIPROCAL: tl.constexpr, TYPE: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """`e8m0_kernel` for both directions of whole 32 x BK tiles of bf16, in words; each is codes
    (ROW, COL) or values.

    Codes are 11 instructions per element in place of 19: 79 us became 75.
    """
    i_t = tl.num_programs(0) - 1 - tl.program_id(0)
    n_k = K // BK
    i_m = (i_t // n_k).to(tl.int64)
    i_k = (i_t % n_k).to(tl.int64)
    o_m = i_m * 32 + tl.arange(0, 32)
    o_w = i_k * (BK // 2) + tl.arange(0, BK // 2)
    p_x = x.to(tl.pointer_type(tl.int32), bitcast=True)
    b_w = tl.load(p_x + o_m[:, None] * (stride // 2) + o_w[None, :])  # [32, BK/2]
    if not ROW:
        row = row_out
    if not COL:
        col = col_out
    store_e8m0(
        b_w, row, row_scale, col, col_scale, i_m, i_k, M, K, True, ROW, True, COL, LIMIT,
        RECIPROCAL, TYPE, True,
    )  # fmt: skip


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

    Codes and scales have the room that the casts ask for; programs for tiles cover it.

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
        codes = codes.view(x.shape if codes.numel() == x.numel() else col_data.shape[::-1])
        _f32(x, cast, codes, row_scale, None, col_scale).run()
        transpose(codes, col_data)
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

    A column copy to keep is codes: `col_data` and `col_scale` in place of `col_out`.
    """
    if row is not None and col is not None and row != col:
        fake_blocks(x, row=row, col=None, row_out=row_out)
        fake_blocks(x, row=None, col=col, col_out=col_out, col_data=col_data, col_scale=col_scale)
        return
    cast = row or col
    if cast is None or x.numel() == 0:
        return
    _check(cast)
    mixed = row_out is not None and col_data is not None
    if mixed and (cast.format.square or not _words(x, row_out, col_data)):
        # A second read: see `encode` on storing codes beside their values.
        _e8m0(x, cast, None, None, None, None, row_out=row_out).run()
        row_out = None
    _e8m0(x, cast, None, None, col_data, col_scale, row_out=row_out, col_out=col_out).run()


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
    words = (fmt.square or (row is not None and col is not None)) and _words(x, row, col)
    config = config or CONFIGS[f"f32_{'words_' * words}{kind}"]
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
        "PAD": pad(cast, m, k),
        "BM": config.m,
        "BK": config.k,
    }
    fn = words_kernel if words else f32_kernel
    return Launch.of(fn, config.tiles(m, k), args, config)


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
    words = kind == "both" and _words(x, rows, cols)
    if kind == "both" and row_out is not None:
        kind = "fake"
    m, k = x.shape
    kind = f"{'words_' * words}{kind}{'_128' * (words and k % 256 != 0)}"
    config = config or CONFIGS[f"e8m0_{kind}"]
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
    fn = e8m0_words_kernel if words else e8m0_kernel
    return Launch.of(fn, config.tiles(rup(m, E8M0_PAD), rup(k, E8M0_PAD)), args, config)


def _words(x: Tensor, row: Tensor | None, col: Tensor | None) -> bool:
    """Whether copies of x can be made from words of two bf16 numbers, in whole tiles."""
    if x.dtype != torch.bfloat16 or not env.takes_words(x.device):
        return False
    given = (t for t in (x, row, col) if t is not None)
    starts = (t.data_ptr() % 4 for t in given)
    aligned = x.stride(0) % 2 == 0 and not any(starts)
    near = max(x.stride(0), x.shape[1]) <= WIDEST
    return aligned and near and x.shape[0] % 128 == 0 and x.shape[1] % 128 == 0


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
                    if sample.x.shape[0] % cast.pad:
                        wide = cast.replace(room=(cast.pad, 0))
                        yield Variant.of(f"roomy_{name}", _f32(sample.x, wide, *r, *c))
                    if _words(sample.x, r[0], c[0]):  # scales in words, too
                        launch = _f32(sample.x, cast.replace(pow2=True), *r, *c)
                        yield Variant.of(f"pow2_{name}", launch)
                    continue
                yield Variant.of(name, _e8m0(sample.x, cast, *r, *c))
                v, w = value if row else None, value if col else None
                launch = _e8m0(sample.x, cast, None, None, None, None, row_out=v, col_out=w)
                yield Variant.of(f"fake_{name}", launch)
                if v is not None and col and _words(sample.x, v, code) and not fmt.square:
                    launch = _e8m0(sample.x, cast, None, None, *out, row_out=v)
                    yield Variant.of(f"kept_{name}", launch)
