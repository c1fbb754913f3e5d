"""What the kernels of FP8 blocks with fp32 scales do with a tile, wherever it came from.

A tile is one block along every contraction it serves. In *words* of two bf16 numbers it comes as
rows 4 g, 4 g + 1, 4 g + 2 and 4 g + 3, so that four codes of a column are in one thread.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from ..formats import E4M3, E5M2
from ._device import (
    IS_PTX,
    amax,
    codes2,
    codes4,
    encode,
    fp8_scale,
    high,
    low,
    max2,
    padded,
    reduce2,
    spread,
    store_tile,
    top2,
)

__all__ = [
    "ABS2",
    "WIDEST",
    "fold_rows",
    "inverse2",
    "max4",
    "own_rows",
    "pow2_bounds",
    "pow2_scales",
    "row_pairs",
    "row_words",
    "store_blocks",
    "store_words",
    "word_scales",
]

ABS2 = tl.constexpr(0x7FFF7FFF)  # |x| of both numbers of a word
# Elements from a row to the next, at most: 32 bits hold the distance of two rows of a tile, which
# is up to 124 of them in words.
WIDEST = 1 << 25
_UPPER = tl.constexpr(-0x10000)  # the second number of a word
# Scales that are powers of two, of two blocks at a time, as the bits of two bf16 numbers in a word:
# the exponent of LIMIT = 1.75 * 2**e over an amax is e less the amax's, and one less where the
# amax's mantissa is above 1.75. $2 is the least such exponent, $3 and $4 single out what has no
# scale: Inf and NaN, and zero unless an eps stands in for it.
_POW2 = """{{ .reg .b32 t, m, o; mov.b32 o, 0x00010001;
add.u32 t, $1, 0x001F001F; and.b32 t, t, 0xFF80FF80; max.u16x2 t, t, $2; sub.u32 t, {0}, t;
add.u16x2 m, $1, $3; max.u16x2 m, m, $4; sub.u32 m, m, $4; min.u16x2 m, m, o;
mul.lo.u32 m, m, 0xFFFF; lop3.b32 $0, t, m, 0x3F803F80, 0xB8; }}"""
_E4M3, _E5M2 = ((254 + int(math.log2(e.max / 1.75))) << 7 for e in (E4M3, E5M2))
_POW2_E4M3 = tl.constexpr(_POW2.format(_E4M3 * 0x10001))
_POW2_E5M2 = tl.constexpr(_POW2.format(_E5M2 * 0x10001))
_TOP_E4M3, _TOP_E5M2 = tl.constexpr(_E4M3), tl.constexpr(_E5M2)
_MAX_E4M3, _MAX_E5M2 = tl.constexpr(E4M3.max), tl.constexpr(E5M2.max)
_TIMES2 = tl.constexpr("{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z; }")
_INVERSE2 = tl.constexpr(
    "{ .reg .b32 t, o; mov.b32 o, 0x00400040; sub.u32 t, 0x7F007F00, $1; max.u16x2 $0, t, o; }"
)
_LOWER = tl.constexpr(0xFFFF)
_ONE = tl.constexpr(0x3F80)  # 1.0
_TOP = tl.constexpr(0x7F00)  # 2**127
_LEAST = tl.constexpr(0x0040)  # 2**-127


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
    b_t, b_a, data, scale, i_c, o_r, o_c, R, C, eps,
    LIMIT: tl.constexpr, TYPE: tl.constexpr, INF: tl.constexpr, POW2: tl.constexpr,
    EVEN: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Codes and decode scales of contraction block i_c of `[R, C]`: 1-D blocks, contraction last.

    The scale matrix is `[contraction blocks, R rounded up to 4, or to PAD]`. A scale is finite,
    so that zeros outside [R, C) are zeros in what codes have room for.
    """
    b_s = fp8_scale(b_a, eps, LIMIT, INF, POW2)  # [BR]
    b_q = encode(b_t.to(tl.float32) * b_s[:, None], LIMIT, TYPE, False)  # [BR, BC]
    store_tile(data, b_q, o_r, o_c, padded(R, PAD), padded(C, PAD), EVEN)
    rows = padded(R, 4 if PAD == 1 else PAD)
    b_d = tl.where(o_r < R, tl.div_rn(1.0, b_s), 0.0)  # [BR]
    tl.store(scale + i_c * rows + o_r, b_d, mask=o_r < rows)


@triton.jit
def store_square_scale(scale, value, i_r, i_c, n_c):
    """Entry (i_r, i_c) of a `[., n_c rounded up to 4]` scale matrix; the last one pads its row."""
    columns = padded(n_c, 4)
    end = tl.where(i_c == n_c - 1, columns, i_c + 1)
    o_4 = i_c + tl.arange(0, 4)
    tl.store(scale + i_r * columns + o_4, tl.where(o_4 == i_c, value, 0.0), mask=o_4 < end)


@triton.jit
def store_blocks(
    b_x, row, row_scale, col, col_scale, eps, i_m, i_k, o_m, o_k, M, K,
    SQUARE: tl.constexpr, ROW: tl.constexpr, ROW_SCALE: tl.constexpr, COL: tl.constexpr,
    COL_SCALE: tl.constexpr, LIMIT: tl.constexpr, TYPE: tl.constexpr, INF: tl.constexpr,
    POW2: tl.constexpr, EVEN: tl.constexpr, PAD: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Codes and decode scales of the tile `b_x` at (i_m, i_k)."""
    if SQUARE:
        s = fp8_scale(amax(b_x, None), eps, LIMIT, INF, POW2)
        if ROW:
            b_q = encode(b_x.to(tl.float32) * s, LIMIT, TYPE, False)
            store_tile(row, b_q, o_m, o_k, padded(M, PAD), padded(K, PAD), EVEN)
        if COL:
            b_q = encode(tl.trans(b_x).to(tl.float32) * s, LIMIT, TYPE, False)
            store_tile(col, b_q, o_k, o_m, padded(K, PAD), padded(M, PAD), EVEN)
        d = tl.div_rn(1.0, s)
        if ROW_SCALE:
            store_square_scale(row_scale, d, i_m, i_k, tl.cdiv(K, BK))
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
                b_x, b_r, row, row_scale, i_k, o_m, o_k, M, K, eps, LIMIT, TYPE, INF, POW2, EVEN,
                PAD,
            )  # fmt: skip
        if COL:
            b_t = tl.trans(b_x)  # [BK, BM]
            store_direction(
                b_t, b_c, col, col_scale, i_m, o_k, o_m, K, M, eps, LIMIT, TYPE, INF, POW2, EVEN,
                PAD,
            )  # fmt: skip


@triton.jit
def fold_rows(w0, w1):
    """Words of row maxima -> the maximum of a row in w0 below that of its neighbour in w1."""
    lower = (w0 & 0xFFFF) | (w1 << 16)
    return max2(lower, ((w0 >> 16) & 0xFFFF) | (w1 & -0x10000))


@triton.jit
def row_amaxes(a0, a1, a2, a3):
    """[128] fp32 amaxes of the rows of `words_kernel`'s tile, from the words of their |x|.

    The maximum over one thread's words comes first; then two rows share each word that is shuffled.
    """
    t0 = reduce2(tl.reshape(a0, (32, 16, 4)), 2)  # [32, 16]
    t1 = reduce2(tl.reshape(a1, (32, 16, 4)), 2)
    t2 = reduce2(tl.reshape(a2, (32, 16, 4)), 2)
    t3 = reduce2(tl.reshape(a3, (32, 16, 4)), 2)
    p0 = reduce2(fold_rows(t0, t1), 1)  # [32]
    p1 = reduce2(fold_rows(t2, t3), 1)
    return tl.reshape(tl.join(tl.join(low(p0), low(p1)), tl.join(high(p0), high(p1))), (128,))


@triton.jit
def own_rows(w0, w1, w2, w3):
    """|x| words of one thread's part of rows -> two words of two rows each, to be reduced."""
    t0 = reduce2(tl.reshape(w0 & ABS2, (32, 16, 4)), 2)  # [32, 16]
    t1 = reduce2(tl.reshape(w1 & ABS2, (32, 16, 4)), 2)
    t2 = reduce2(tl.reshape(w2 & ABS2, (32, 16, 4)), 2)
    t3 = reduce2(tl.reshape(w3 & ABS2, (32, 16, 4)), 2)
    return fold_rows(t0, t1), fold_rows(t2, t3)


@triton.jit
def max4(w0, w1, w2, w3):
    """Words of the largest |x| of four rows."""
    return max2(max2(w0 & ABS2, w1 & ABS2), max2(w2 & ABS2, w3 & ABS2))


@triton.jit
def pow2_bounds(eps, LIMIT: tl.constexpr):
    """What `pow2_scales` knows of eps: (least exponent, step, top), words."""
    bits = tl.cast(eps, tl.float32).to(tl.int32, bitcast=True)
    E: tl.constexpr = _TOP_E4M3 if LIMIT == _MAX_E4M3 else _TOP_E5M2
    least = tl.maximum(((bits + 0x1FFFFF) >> 23) << 7, E - _TOP)
    return (
        least | (least << 16),
        tl.where(bits > 0, 0, -1),
        tl.where(bits > 0, 0x7F7F7F7F, 0x7F7E7F7E),
    )


@triton.jit
def pow2_scale(a, least, step, top, LIMIT: tl.constexpr):
    """`pow2_scales` of one amax, in the lower half of an int32."""
    E: tl.constexpr = _TOP_E4M3 if LIMIT == _MAX_E4M3 else _TOP_E5M2
    s = E - tl.maximum((a + 0x1F) & 0xFF80, least & _LOWER)
    return tl.where(((a + step) & _LOWER) > (top & _LOWER), _ONE, s)


@triton.jit
def pow2_scales(b_a, least, step, top, LIMIT: tl.constexpr):
    """`fp8_scale` with POW2 of words of two bf16 amaxes: words of two bf16 scales, bit for bit."""
    if LIMIT != _MAX_E4M3:
        tl.static_assert(LIMIT == _MAX_E5M2)
    if IS_PTX:
        ASM: tl.constexpr = _POW2_E4M3 if LIMIT == _MAX_E4M3 else _POW2_E5M2
        out = tl.inline_asm_elementwise(
            ASM, "=r,r,r,r,r", [b_a, least, step, top], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        out = pow2_scale(b_a & _LOWER, least, step, top, LIMIT)
        out |= pow2_scale((b_a >> 16) & _LOWER, least, step, top, LIMIT) << 16
    return out


@triton.jit
def inverse2(b_s):
    """Words of the inverses of powers of two: decode scales."""
    if IS_PTX:
        out = tl.inline_asm_elementwise(
            _INVERSE2, "=r,r", [b_s], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        # The number last: the interpreter of Triton 3.7 takes no constant less a tensor.
        lower = tl.maximum(-(b_s & _LOWER) + _TOP, _LEAST)
        out = lower | (tl.maximum(-((b_s >> 16) & _LOWER) + _TOP, _LEAST) << 16)
    return out


@triton.jit
def times2(b_w, b_s):
    """Words of bf16 numbers times powers of two.

    Exact where it counts: what becomes subnormal has the code of a zero of its sign.
    """
    if IS_PTX:
        out = tl.inline_asm_elementwise(
            _TIMES2, "=r,r,r", [b_w, b_s], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        lower = (low(b_w) * low(b_s)).to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.int32)
        upper = (high(b_w) * high(b_s)).to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.int32)
        out = lower | (upper << 16)
    return out


@triton.jit
def row_words(s_0, s_1):
    """Words of the scales of rows 4 g, 4 g + 1 (s_0), 4 g + 2, 4 g + 3 (s_1): each row's twice."""
    r0, r1 = (s_0 & _LOWER) | (s_0 << 16), ((s_0 >> 16) & _LOWER) | (s_0 & _UPPER)
    r2, r3 = (s_1 & _LOWER) | (s_1 << 16), ((s_1 >> 16) & _LOWER) | (s_1 & _UPPER)
    return r0[:, None], r1[:, None], r2[:, None], r3[:, None]


@triton.jit
def row_pairs(b_w, s_0, s_1, LIMIT: tl.constexpr, TYPE: tl.constexpr):
    """Codes (int16 pairs) of words: their first elements under s_0, the others under s_1."""
    return codes2(low(b_w) * s_0, high(b_w) * s_1, LIMIT, TYPE)


@triton.jit
def scaled_pairs(b_w, s, LIMIT: tl.constexpr, TYPE: tl.constexpr, PACKED: tl.constexpr):
    """`row_pairs` of words under one scale a row; PACKED: under words of it."""
    if PACKED:
        b_w = times2(b_w, s)
        out = codes2(low(b_w), high(b_w), LIMIT, TYPE)
    else:
        out = row_pairs(b_w, s, s, LIMIT, TYPE)
    return out


@triton.jit
def packed_scales(
    w0, w1, w2, w3, row_scale, col_scale, eps, i_m, i_k, M, K, ROW: tl.constexpr,
    COL: tl.constexpr, LIMIT: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """`word_scales` of 1-D blocks as words of powers of two: r0 to r3, and c of both columns."""
    r0, r1, r2, r3, c = 0, 0, 0, 0, 0
    o_n = tl.arange(0, 128)
    least, step, top = pow2_bounds(eps, LIMIT)
    if ROW:  # before the columns: the other way round takes more registers
        p_0, p_1 = own_rows(w0, w1, w2, w3)
        p_0, p_1 = reduce2(p_0, 1), reduce2(p_1, 1)  # [32]
    if COL:
        b_c = reduce2(max4(w0, w1, w2, w3), 0)  # [64]
    if ROW:
        b_r = spread(tl.reshape(tl.join(p_0, p_1), (64,)))
        b_r = pow2_scales(b_r, least, step, top, LIMIT)
        b_d = inverse2(b_r)
        b_d = tl.reshape(tl.join(low(b_d), high(b_d)), (128,))
        m_r = None if EVEN else i_m * 128 + o_n < M
        tl.store(row_scale + i_k * M + i_m * 128 + o_n, b_d, mask=m_r)
        s_0, s_1 = tl.split(tl.reshape(spread(b_r), (32, 2)))
        r0, r1, r2, r3 = row_words(s_0, s_1)
    if COL:
        b_c = pow2_scales(spread(b_c), least, step, top, LIMIT)
        b_d = inverse2(b_c)
        b_d = tl.reshape(tl.join(low(b_d), high(b_d)), (128,))
        tl.store(col_scale + i_m * K + i_k * 128 + o_n, b_d)
        c = spread(b_c)[None, :]
    return r0, r1, r2, r3, c


@triton.jit
def word_scales(
    w0, w1, w2, w3, row_scale, col_scale, eps, i_m, i_k, M, K, SQUARE: tl.constexpr,
    ROW: tl.constexpr, COL: tl.constexpr, ROW_SCALE: tl.constexpr, COL_SCALE: tl.constexpr,
    LIMIT: tl.constexpr, INF: tl.constexpr, POW2: tl.constexpr, PACKED: tl.constexpr,
    EVEN: tl.constexpr, PAD: tl.constexpr = 1,
):  # fmt: skip
    """Encode scales of rows 4 g + j (r0 to r3) and columns 2 c + j (c0, c1) of a 128x128 tile.

    The decode scales are stored on the way. Words past M are zeros. PACKED, for powers of two and
    1-D blocks: scales are words of two bf16 numbers, each row's twice, and c0 those of two columns.
    """
    o_n = tl.arange(0, 128)
    n_k = K // 128
    n_m = M // 128 if EVEN else tl.cdiv(M, 128)
    a0, a1, a2, a3 = w0 & ABS2, w1 & ABS2, w2 & ABS2, w3 & ABS2
    if SQUARE:
        top = top2(max2(max2(a0, a1), max2(a2, a3)))
        s = fp8_scale(top.to(tl.float32, bitcast=True), eps, LIMIT, INF, POW2)
        r0, r1, r2, r3, c0, c1 = s, s, s, s, s, s
        if ROW_SCALE:
            store_square_scale(row_scale, tl.div_rn(1.0, s), i_m, i_k, n_k)
        if COL_SCALE:
            store_square_scale(col_scale, tl.div_rn(1.0, s), i_k, i_m, n_m)
    elif PACKED:
        tl.static_assert(POW2)
        r0, r1, r2, r3, c0 = packed_scales(
            w0, w1, w2, w3, row_scale, col_scale, eps, i_m, i_k, M, K, ROW, COL, LIMIT, EVEN
        )
        c1 = c0
    else:
        r0, r1, r2, r3, c0, c1 = 1.0, 1.0, 1.0, 1.0, 1.0, 1.0
        if COL:
            b_c = reduce2(max2(max2(a0, a1), max2(a2, a3)), 0)  # [64]
            b_c = tl.reshape(tl.join(low(b_c), high(b_c)), (128,))
        if ROW:
            s_r = fp8_scale(spread(row_amaxes(a0, a1, a2, a3)), eps, LIMIT, INF, POW2)  # [128]
            rows, b_d = padded(M, PAD), tl.div_rn(1.0, s_r)
            if PAD != 1:
                b_d = tl.where(i_m * 128 + o_n < M, b_d, 0.0)
            m_r = None if EVEN else i_m * 128 + o_n < rows
            tl.store(row_scale + i_k * rows + i_m * 128 + o_n, b_d, mask=m_r)
            even, odd = tl.split(tl.reshape(spread(s_r), (32, 2, 2)))
            r0, r2 = tl.split(even)
            r1, r3 = tl.split(odd)
            r0, r1, r2, r3 = r0[:, None], r1[:, None], r2[:, None], r3[:, None]
        if COL:
            s_c = fp8_scale(spread(b_c), eps, LIMIT, INF, POW2)  # [128]
            tl.store(col_scale + i_m * K + i_k * 128 + o_n, tl.div_rn(1.0, s_c))
            c0, c1 = tl.split(tl.reshape(spread(s_c), (64, 2)))
            c0, c1 = c0[None, :], c1[None, :]
    return r0, r1, r2, r3, c0, c1


@triton.jit
def room_for(b_q, m_x, PAD: tl.constexpr):
    """Words of codes where m_x says so, and zeros past it; PAD 1: nothing is past it."""
    return b_q if PAD == 1 else tl.where(m_x, b_q, 0)


@triton.jit
def store_words(
    w0, w1, w2, w3, r0, r1, r2, r3, c0, c1, row, col, i_m, i_k, M, K,
    ROW: tl.constexpr, COL: tl.constexpr, LIMIT: tl.constexpr, TYPE: tl.constexpr,
    PACKED: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, PAD: tl.constexpr = 1,
):  # fmt: skip
    """Codes of the BM x 128 tile at (i_m, i_k) whose rows 4 g + j are the words w0 to w3.

    M is a multiple of 4: where the tile is not whole (EVEN), a group of four rows is there or not.
    Zeros follow up to a multiple of PAD rows. PACKED: scales are words of powers of two, and two
    numbers are multiplied at once.
    """
    o_g = tl.arange(0, BM // 4)
    o_m = i_m * BM + 4 * o_g
    rows = padded(M, PAD)
    m_r = None if EVEN else (o_m < rows)[:, None]
    m_c = None if EVEN else (o_m < rows)[None, :]
    m_x = (o_m < M)[:, None]
    if ROW:
        p_r = row.to(tl.pointer_type(tl.int16), bitcast=True) + i_m * BM * (K // 2) + i_k * 64
        p_r = p_r + 4 * o_g[:, None] * (K // 2) + tl.arange(0, 64)[None, :]
        q0 = room_for(scaled_pairs(w0, r0, LIMIT, TYPE, PACKED), m_x, PAD)
        tl.store(p_r, q0, mask=m_r)
        q1 = room_for(scaled_pairs(w1, r1, LIMIT, TYPE, PACKED), m_x, PAD)
        tl.store(p_r + K // 2, q1, mask=m_r)
        q2 = room_for(scaled_pairs(w2, r2, LIMIT, TYPE, PACKED), m_x, PAD)
        tl.store(p_r + 2 * (K // 2), q2, mask=m_r)
        q3 = room_for(scaled_pairs(w3, r3, LIMIT, TYPE, PACKED), m_x, PAD)
        tl.store(p_r + 3 * (K // 2), q3, mask=m_r)
    if COL:
        if PACKED:
            w0, w1, w2, w3 = times2(w0, c0), times2(w1, c0), times2(w2, c0), times2(w3, c0)
            q0 = codes4(low(w0), low(w1), low(w2), low(w3), LIMIT, TYPE)
            q1 = codes4(high(w0), high(w1), high(w2), high(w3), LIMIT, TYPE)
        else:
            q0 = codes4(low(w0) * c0, low(w1) * c0, low(w2) * c0, low(w3) * c0, LIMIT, TYPE)
            q1 = codes4(high(w0) * c1, high(w1) * c1, high(w2) * c1, high(w3) * c1, LIMIT, TYPE)
        q0, q1 = room_for(q0, m_x, PAD), room_for(q1, m_x, PAD)
        b_q = tl.reshape(tl.permute(tl.join(q0, q1), (1, 2, 0)), (128, BM // 4))
        p_c = col.to(tl.pointer_type(tl.int32), bitcast=True) + i_k * 128 * (rows // 4)
        p_c = p_c + i_m * (BM // 4)
        o_n = tl.arange(0, 128)
        tl.store(p_c + o_n[:, None].to(tl.int64) * (rows // 4) + o_g[None, :], b_q, mask=m_c)
