"""What the kernels of grouped products share."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["finished", "put", "put_quarters", "swizzled"]


@triton.jit
def swizzled(pid, n_r, n_c, GROUP: tl.constexpr):
    """(row, column) of tile `pid` of n_r x n_c, GROUP rows at a time."""
    width = GROUP * n_c
    first = (pid // width) * GROUP
    height = min(n_r - first, GROUP)
    return first + (pid % width) % height, (pid % width) // height


@triton.jit
def finished(acc, scale_a, scale_b, e, ALPHA_A: tl.constexpr, ALPHA_B: tl.constexpr):
    """The product under the scales of its member's operands."""
    if ALPHA_A and ALPHA_B:
        acc = acc * (tl.load(scale_a + e) * tl.load(scale_b + e))
    elif ALPHA_A:
        acc = acc * tl.load(scale_a + e)
    elif ALPHA_B:
        acc = acc * tl.load(scale_b + e)
    return acc


@triton.jit
def halves(b_y, BM: tl.constexpr, BN: tl.constexpr):
    """The left and the right half of `[BM, BN]`: a thread has its share of both."""
    return tl.split(tl.permute(tl.reshape(b_y, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def put(
    p_o, b_y, K, rows, columns, ADD: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Store `b_y[BM, BN]` at p_o in lines of K numbers, or add it to what is there; as much of it
    as there are rows and columns, if not EVEN."""
    o_m, o_n = tl.arange(0, BM), tl.arange(0, BN)
    p_o = p_o + (o_m[:, None] * K + o_n[None, :])
    mask = None if EVEN else (o_m[:, None] < rows) & (o_n[None, :] < columns)
    if ADD:
        b_y += (tl.load(p_o) if EVEN else tl.load(p_o, mask=mask, other=0.0)).to(tl.float32)
    tl.store(p_o, b_y, mask=mask)


@triton.jit
def put_quarters(
    p_o, b_y, K, rows, columns, ADD: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """`put`, a quarter of the columns at a time: that much less shared memory is needed."""
    HALF: tl.constexpr = BN // 2
    PART: tl.constexpr = BN // 4
    left, right = halves(b_y, BM, BN)
    b_0, b_1 = halves(left, BM, HALF)
    b_2, b_3 = halves(right, BM, HALF)
    put(p_o, b_0, K, rows, columns, ADD, EVEN, BM, PART)
    put(p_o + PART, b_1, K, rows, columns - PART, ADD, EVEN, BM, PART)
    put(p_o + 2 * PART, b_2, K, rows, columns - 2 * PART, ADD, EVEN, BM, PART)
    put(p_o + 3 * PART, b_3, K, rows, columns - 3 * PART, ADD, EVEN, BM, PART)
