"""What the kernels of grouped FP8 casts do with a tile of a member.

In *words* of two bf16 numbers a tile comes as rows 4 g, 4 g + 1, 4 g + 2 and 4 g + 3, so that four
codes of a column are in one thread: they make a word of the column copy without a move.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._blocks_device import row_pairs
from ._device import codes4, fp8_scale, high, low

__all__ = [
    "find_scale",
    "load_rows",
    "load_words",
    "offset",
    "store_columns",
    "store_rows",
    "store_words",
]


@triton.jit
def offset(at, e, step, num, PART: tl.constexpr, EQUAL: tl.constexpr):
    """Where a part of member e begins in its FLAT buffer."""
    return e * step if EQUAL else tl.load(at + PART * num + e)


@triton.jit
def load_rows(x, o_l, o_k, start, size, K, stride, EVEN_M: tl.constexpr, EVEN_K: tl.constexpr):
    """Rows o_l of the member at `start`, zero past it: zeros never raise an amax."""
    p_x = x + (start + o_l)[:, None] * stride + o_k[None, :]
    if EVEN_M and EVEN_K:
        b_x = tl.load(p_x)
    elif EVEN_K:
        b_x = tl.load(p_x, mask=o_l[:, None] < size, other=0.0)
    else:
        b_x = tl.load(p_x, mask=(o_l[:, None] < size) & (o_k[None, :] < K), other=0.0)
    return b_x


@triton.jit
def store_rows(row, b_q, o_l, o_k, start, size, K, EVEN_M: tl.constexpr, EVEN_K: tl.constexpr):
    """Codes `[BM, BK]` of rows o_l of a member."""
    p_r = row + (start + o_l)[:, None] * K + o_k[None, :]
    if EVEN_M and EVEN_K:
        tl.store(p_r, b_q)
    elif EVEN_K:
        tl.store(p_r, b_q, mask=o_l[:, None] < size)
    else:
        tl.store(p_r, b_q, mask=(o_l[:, None] < size) & (o_k[None, :] < K))


@triton.jit
def store_columns(
    col, b_q, o_l, o_k, start, size, place, K, pitch, FLAT: tl.constexpr, EVEN_M: tl.constexpr,
    EVEN_K: tl.constexpr,
):  # fmt: skip
    """Codes `[BK, BM]` of columns o_k, rows o_l of a member, with the zeros behind it if SPREAD."""
    if FLAT:
        p_c = col + start * K + o_k.to(tl.int64)[:, None] * size + o_l[None, :]
        if EVEN_M and EVEN_K:
            tl.store(p_c, b_q)
        else:
            tl.store(p_c, b_q, mask=(o_k[:, None] < K) & (o_l[None, :] < size))
    else:
        p_c = col + o_k.to(tl.int64)[:, None] * pitch + (place + o_l)[None, :]
        if EVEN_K:
            tl.store(p_c, b_q)
        else:
            tl.store(p_c, b_q, mask=o_k[:, None] < K)


@triton.jit
def find_scale(
    source, scale_inv, kept, eps, e, first, SCALED: tl.constexpr, KEEP: tl.constexpr,
    LIMIT: tl.constexpr, INF: tl.constexpr, POW2: tl.constexpr,
):  # fmt: skip
    """The scale of member e, as `cast_kernel` has it; `first`: this program stores it."""
    if SCALED:
        scale = tl.load(source + e)
    else:
        largest = tl.load(source + e).to(tl.float32, bitcast=True)
        scale = fp8_scale(largest, eps, LIMIT, INF, POW2)
    if first:
        tl.store(scale_inv + e, tl.div_rn(1.0, scale))
        if KEEP:
            tl.store(kept + e, scale)
    return scale


@triton.jit
def load_line(p_x, ok, EVEN: tl.constexpr):
    """Words of a row in four; zeros past the member."""
    return tl.load(p_x) if EVEN else tl.load(p_x, mask=ok[:, None], other=0)


@triton.jit
def load_words(x, o_l, o_w, start, size, stride, EVEN: tl.constexpr):
    """Rows o_l, o_l + 1, o_l + 2 and o_l + 3 of the member at `start`, in words o_w."""
    step = stride // 2
    p_x = x.to(tl.pointer_type(tl.int32), bitcast=True)
    p_x = p_x + (start + o_l)[:, None] * step + o_w[None, :]
    w0 = load_line(p_x, o_l < size, EVEN)
    w1 = load_line(p_x + step, o_l + 1 < size, EVEN)
    w2 = load_line(p_x + 2 * step, o_l + 2 < size, EVEN)
    w3 = load_line(p_x + 3 * step, o_l + 3 < size, EVEN)
    return w0, w1, w2, w3


@triton.jit
def store_line(p_r, b_w, scale, ok, LIMIT: tl.constexpr, TYPE: tl.constexpr, EVEN: tl.constexpr):
    """Codes of the words of a row in four."""
    b_q = row_pairs(b_w, scale, scale, LIMIT, TYPE)
    if EVEN:
        tl.store(p_r, b_q)
    else:
        tl.store(p_r, b_q, mask=ok[:, None])


@triton.jit
def store_words(
    w0, w1, w2, w3, row, col, scale, o_l, o_w, o_k, start, size, at, K, pitch,
    LIMIT: tl.constexpr, TYPE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Codes of rows o_l to o_l + 3 of the member at `start`: in the row copy `[M, K]`, and in a
    column copy whose lines are `pitch` apart, from `at` on."""
    step = K // 2
    p_r = row.to(tl.pointer_type(tl.int16), bitcast=True)
    p_r = p_r + (start + o_l)[:, None] * step + o_w[None, :]
    store_line(p_r, w0, scale, o_l < size, LIMIT, TYPE, EVEN)
    store_line(p_r + step, w1, scale, o_l + 1 < size, LIMIT, TYPE, EVEN)
    store_line(p_r + 2 * step, w2, scale, o_l + 2 < size, LIMIT, TYPE, EVEN)
    store_line(p_r + 3 * step, w3, scale, o_l + 3 < size, LIMIT, TYPE, EVEN)
    s = scale
    q0 = codes4(low(w0) * s, low(w1) * s, low(w2) * s, low(w3) * s, LIMIT, TYPE)
    q1 = codes4(high(w0) * s, high(w1) * s, high(w2) * s, high(w3) * s, LIMIT, TYPE)
    b_q = tl.permute(tl.join(q0, q1), (1, 2, 0))
    b_q = tl.reshape(b_q, (2 * w0.shape[1], w0.shape[0]))  # [BK, BM / 4]
    p_c = col.to(tl.pointer_type(tl.int32), bitcast=True) + at // 4
    o_c = tl.arange(0, w0.shape[0])
    tl.store(p_c + o_k.to(tl.int64)[:, None] * (pitch // 4) + o_c[None, :], b_q)
