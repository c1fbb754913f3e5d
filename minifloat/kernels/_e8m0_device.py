"""What the kernels of FP8 blocks with E8M0 scales do with a tile of words, wherever it came from.

A tile is 32 rows of BW words of two bf16 numbers: one block high, so that it holds whole blocks of
both directions, 16 words of a row and all the rows of a column. Copies are *codes* with a scale
byte for each block, or the bf16 *values* of those codes; both lie as the source does.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._blocks_device import ABS2, row_pairs
from ._device import (
    IS_PTX,
    decode,
    e8m0_byte,
    e8m0_decode,
    e8m0_multiplier,
    encode,
    high,
    low,
    max2,
    reduce2,
    spread,
)
from ._produce_device import pack2

__all__ = ["store_e8m0"]

_LOWER = tl.constexpr(0xFFFF)
_UPPER = tl.constexpr(-0x10000)

# A word ($1) -> the word of what remains of its numbers as codes, in bf16 throughout: each times
# its multiplier ($2), rounded to the n bits of a code's mantissa, times its scale ($3). Adding
# 1.5 * 2**(e - n + 7) and taking it away rounds to multiples of 2**(e - n), where e is the number's
# exponent or, below the normal codes, the least one ({0}; {1} adds 7 - n to it, and the half). All
# other steps are exact, but for results below bf16's normal numbers, which are rounded once. Zeros
# get their sign back. Nothing is above the largest code but Inf, which is Inf in the end.
_VALUES = """{{ .reg .b32 y, c, r; mul.rn.bf16x2 y, $1, $2;
and.b32 c, y, 0x7F807F80; mov.b32 r, {0}; max.u16x2 c, c, r; add.s32 c, c, {1};
add.rn.bf16x2 r, y, c; sub.rn.bf16x2 r, r, c;
and.b32 y, y, 0x80008000; or.b32 r, r, y; mul.rn.bf16x2 $0, r, $3; }}"""
_VALUES_E4M3 = tl.constexpr(_VALUES.format("0x3C803C80", "0x02400240"))
_VALUES_E5M2 = tl.constexpr(_VALUES.format("0x38803880", "0x02C002C0"))


@triton.jit
def word_values(b_w, b_m, b_s, LIMIT: tl.constexpr, TYPE: tl.constexpr):
    """Words of the bf16 values of the codes of words, under the multipliers and scales of words."""
    if IS_PTX:
        ASM: tl.constexpr = _VALUES_E4M3 if tl.float8e4nv == TYPE else _VALUES_E5M2
        out = tl.inline_asm_elementwise(
            ASM, "=r,r,r,r", [b_w, b_m, b_s], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        v_0 = decode(encode(low(b_w) * low(b_m), LIMIT, TYPE, False), TYPE) * low(b_s)
        v_1 = decode(encode(high(b_w) * high(b_m), LIMIT, TYPE, False), TYPE) * high(b_s)
        out = pack2(v_0, v_1)
    return out


@triton.jit
def zip_words(b_0, b_1):
    """(lower halves, upper halves) of two words, b_0's first."""
    return (b_0 & _LOWER) | (b_1 << 16), ((b_0 >> 16) & _LOWER) | (b_1 & _UPPER)


@triton.jit
def both_ways(b_e):
    """Words of a multiplier, in the lower half, and a scale, both of exponent byte b_e.

    Powers of two are exact in bf16, and one word crosses shared memory where two would.
    """
    return pack2(e8m0_multiplier(b_e), e8m0_decode(b_e))


@triton.jit
def store_row_copy(
    b_w, data, scale, p_w, m_w, o_m, i_k, K, CODES: tl.constexpr, LIMIT: tl.constexpr,
    RECIPROCAL: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """The tile's row copy: blocks of 1x32 numbers."""
    BM: tl.constexpr = b_w.shape[0]
    BW: tl.constexpr = b_w.shape[1]
    G: tl.constexpr = BW // 16  # blocks of a row
    b_r = reduce2(tl.reshape(b_w & ABS2, (BM * G, 16)), 1)
    b_e = e8m0_byte(spread(low(max2(b_r, b_r >> 16))), RECIPROCAL)  # [BM G]
    b_s = e8m0_multiplier(b_e) if CODES else both_ways(b_e)
    b_s = tl.reshape(spread(b_s), (BM, G, 1))
    b_s = tl.reshape(tl.broadcast_to(b_s, (BM, G, 16)), (BM, BW))
    if CODES:
        p_s = scale + o_m[:, None] * (K // 32) + i_k * G + tl.arange(0, G)[None, :]
        tl.store(p_s, tl.reshape(b_e, (BM, G)).to(tl.uint8))
        p_q = data.to(tl.pointer_type(tl.int16), bitcast=True) + p_w
        tl.store(p_q, row_pairs(b_w, b_s, b_s, LIMIT, TYPE), mask=m_w)
    else:
        b_v = word_values(b_w, *zip_words(b_s, b_s), LIMIT, TYPE)
        tl.store(data.to(tl.pointer_type(tl.int32), bitcast=True) + p_w, b_v, mask=m_w)


@triton.jit
def store_col_copy(
    b_w, data, scale, p_w, m_w, i_m, i_k, K, CODES: tl.constexpr, LIMIT: tl.constexpr,
    RECIPROCAL: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """The tile's column copy: blocks of 32x1 numbers."""
    BW: tl.constexpr = b_w.shape[1]
    b_c = reduce2(b_w & ABS2, 0)  # [BW]
    b_e = e8m0_byte(spread(tl.reshape(tl.join(low(b_c), high(b_c)), (2 * BW,))), RECIPROCAL)
    b_s = e8m0_multiplier(b_e) if CODES else both_ways(b_e)
    s_0, s_1 = tl.split(tl.reshape(spread(b_s), (1, BW, 2)))
    if CODES:
        tl.store(scale + i_m * K + i_k * (2 * BW) + tl.arange(0, 2 * BW), b_e.to(tl.uint8))
        p_q = data.to(tl.pointer_type(tl.int16), bitcast=True) + p_w
        tl.store(p_q, row_pairs(b_w, s_0, s_1, LIMIT, TYPE), mask=m_w)
    else:
        b_v = word_values(b_w, *zip_words(s_0, s_1), LIMIT, TYPE)
        tl.store(data.to(tl.pointer_type(tl.int32), bitcast=True) + p_w, b_v, mask=m_w)


@triton.jit
def store_e8m0(
    b_w, row, row_scale, col, col_scale, i_m, i_k, M, K, ROW: tl.constexpr,
    ROW_CODES: tl.constexpr, COL: tl.constexpr, COL_CODES: tl.constexpr, LIMIT: tl.constexpr,
    RECIPROCAL: tl.constexpr, TYPE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Copies of the 32-row tile of words at (i_m, i_k) of `[M, K]`; words past M are zeros.

    K is a multiple of 128. Tiles that cover M rounded up to 128 write all of the scale matrices,
    `[M, K/32]` padded to 128 rows and `[M/32, K]` padded to 4: past M every byte is 0.
    """
    BM: tl.constexpr = b_w.shape[0]
    BW: tl.constexpr = b_w.shape[1]
    o_m = i_m * BM + tl.arange(0, BM)
    p_w = o_m[:, None] * (K // 2) + i_k * BW + tl.arange(0, BW)[None, :]
    m_w = None if EVEN else o_m[:, None] < M
    if ROW:
        store_row_copy(
            b_w, row, row_scale, p_w, m_w, o_m, i_k, K, ROW_CODES, LIMIT, RECIPROCAL, TYPE
        )
    if COL:
        store_col_copy(
            b_w, col, col_scale, p_w, m_w, i_m, i_k, K, COL_CODES, LIMIT, RECIPROCAL, TYPE
        )
