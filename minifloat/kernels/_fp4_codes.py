"""E2M1 codes on the device: rounding, the random bits of stochastic rounding, packing.

A *code* is an int32 magnitude, 0 to 7 or, not yet saturated, more: `pack8` saturates. On sm_90,
which has no conversion to E2M1, these lines are most of an NVFP4 cast, so they are counted: from an
element in fp32 to its place in a word, 6 instructions (8 before `pack8` and `code_halved`).

The bits are those of `reference`, which has no fused operations: without `enable_fp_fusion=False`,
`|x| * multiplier` would melt into the add after it.
"""

# mypy: disable-error-code="assignment, misc, var-annotated"
# (In the compiled bodies, tuples grow.)

from __future__ import annotations

import triton
import triton.language as tl

from ..formats import E2M1
from ._device import IS_PTX, abs_bits

__all__ = [
    "HALVED_FROM",
    "anchor",
    "biased",
    "code_biased",
    "code_halved",
    "code_stochastic",
    "code_value",
    "pack8",
    "philox",
    "seed_words",
    "unbiased",
    "with_sign",
]

# From this global encode factor on, half of any multiplier is exact: the multiplier is not below
# HALVED_FROM / 448, and that (with room for its rounding) is twice the smallest normal number.
HALVED_FROM = tl.constexpr(2.0**-116)

_E2M1_MAX = tl.constexpr(E2M1.max)
_SIGN = tl.constexpr(-(2**31))
_ROUND = tl.constexpr(1.5 * 2**23)  # adding it rounds to an integer, ties to even
_BIAS = tl.constexpr(0x4B400000)  # its bits
_BIAS64 = tl.constexpr(0x42800000 >> 17)  # bits of 64, less those of a fraction
_CARRY = tl.constexpr(0x42800000 + 2**17 - 2)  # bits of 65 - 2**-16, one ulp below where u is 0
_STOCHASTIC = tl.constexpr("""{ .reg .f32 x, y, z; .reg .b32 p, q, r;
fma.rp.f32 x, $1, 0f40000000, $2;
add.rn.f32 y, $2, 0f40000000; add.rp.f32 y, $1, y;
add.rn.f32 z, $2, 0f40800000; fma.rp.f32 z, $1, 0f3F000000, z;
mov.b32 p, x; mov.b32 q, y; mov.b32 r, z;
min.s32 p, p, q; min.s32 p, p, r; shr.s32 p, p, 17; sub.s32 $0, p, 0x2140; }""")
# Subnormal constants: 0f00000001 is 2**-149, the unit.
_HALVED = tl.constexpr("""{ .reg .f32 a, x, y, z; .reg .b32 p, q, r;
abs.f32 a, $1; mul.rn.f32 a, a, $2;
mul.rn.f32 x, a, 0f00000004;
fma.rn.f32 y, a, 0f00000002, 0f00000002;
fma.rn.f32 z, a, 0f00000001, 0f00000004;
mov.b32 p, x; mov.b32 q, y; mov.b32 r, z;
min.s32 p, p, q; min.s32 $0, p, r; }""")
# $1 to $8 the codes, $9 to $16 the elements: the first is the lowest, so it is the last one in. An
# element saturates to 7 or -8, and bit 3 of either is its sign.
_PACK = """cvt.pack.sat.s4.s32.b32 {0}, ${8}, ${7}, 0;
cvt.pack.sat.s4.s32.b32 {0}, ${6}, ${5}, {0};
cvt.pack.sat.s4.s32.b32 {0}, ${4}, ${3}, {0};
cvt.pack.sat.s4.s32.b32 {0}, ${2}, ${1}, {0};"""
_PACK8 = tl.constexpr(
    "{ .reg .b32 c, s; "
    + _PACK.format("c", *range(1, 9))
    + _PACK.format("s", *range(9, 17))
    + "lop3.b32 $0, s, 0x88888888, c, 0xEA; }"  # (s & signs) | c
)
_PACK8_OPERANDS = tl.constexpr("=r" + 16 * ",r")


@triton.jit
def code_biased(a):
    """`_BIAS` + the E2M1 code of a >= 0, ties to even, not saturated.

    Magnitude codes are the rounding of the concave function `min(2a, a + 2, a/2 + 4)`; rounding is
    monotone, so it may come before the minimum; each line is rounded once, in its add. The bits of
    the float `1.5 * 2**23 + code`, whose ulp is 1, are `_BIAS + code`, and the minimum is that of
    the bits, since integers have one of three operands.
    """
    r1 = tl.fma(a, 2.0, _ROUND).to(tl.int32, bitcast=True)
    r2 = (a + (_ROUND + 2)).to(tl.int32, bitcast=True)
    r3 = tl.fma(a, 0.5, _ROUND + 4).to(tl.int32, bitcast=True)
    return tl.minimum(tl.minimum(r1, r2), r3)


@triton.jit
def unbiased(b_code):
    """The code of `code_biased`."""
    return b_code - _BIAS


@triton.jit
def biased(code):
    """What `code_biased` would be of a code."""
    return code + _BIAS


@triton.jit
def code_halved(x, half):
    """The code of |x| * 2 * half, for `half` half a multiplier, exactly: see HALVED_FROM.

    The lines of `code_biased` without the bias. A subnormal number's bits are its multiple of
    2**-149, so a product that small is rounded to an integer, ties to even, as it is. The third
    line, a/2, is why it is half a multiplier: 2**-150 is no number. Halves of products are exact
    but where the product rounds to code 0 or saturates, either way.
    """
    if IS_PTX:
        code = tl.inline_asm_elementwise(
            _HALVED, "=r,f,f", [x, half], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        a = tl.abs(x) * half
        code = unbiased(code_biased(a + a))
    return code


@triton.jit
def code_stochastic(a, r):
    """The code of a >= 0, not saturated, up with probability frac(a / step): up iff u < frac.

    `r` (int32) holds 16 random bits: u = (r + 0.5) / 2**16. Codes are again the rounding of
    `min(2a, a + 2, a/2 + 4)`, each line rounded once, in its add: up to a multiple of 2**-17, the
    ulp of 64, after c = 65 - u - 2**-17 was added. As u is such a multiple itself, that carries
    into the integer above iff the fraction exceeds u. 6 operations of the FMA pipe and 3 of the
    integer pipe, half as fast, where comparisons took 11 of that one: 212 us became 178.
    """
    if IS_PTX:
        c = (_CARRY - 2 * r).to(tl.float32, bitcast=True)
        code = tl.inline_asm_elementwise(
            _STOCHASTIC, "=r,f,f", [a, c], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        code = code_compared(a, r)
    return code


@triton.jit
def code_compared(a, r):
    """`code_stochastic`, saturated, for the interpreter, which rounds to nearest alone.

    From 1 on, the bits of a float below those of its code are frac * 2**22, so adding `2**22 - 1 -
    u * 2**22` carries into the code iff frac > u. Below 1 the code is linear, and not below what
    the bits say; from 1 on `linear` is 2, and the bits say no less: the larger of the two is right.
    """
    v = (r << 7) | 0x3F800040  # bits of 1 + u
    one_u = v.to(tl.float32, bitcast=True)
    a = tl.minimum(a, _E2M1_MAX)
    bits = a.to(tl.int32, bitcast=True)
    curved = ((bits + (0x3FFFFF + 0x1FC00000) - (v >> 1)) >> 22) - 252
    t = a + a
    linear = tl.where(t > one_u, 2, tl.where(t > one_u - 1.0, 1, 0))
    return tl.maximum(curved, linear)


@triton.jit
def code_value(b_code):
    """fp32 magnitude of a code, saturated here: the convex `max(c/2, c - 2, 2c - 8)`."""
    c = tl.minimum(b_code, _BIAS + 7).to(tl.float32, bitcast=True) - _ROUND
    return tl.maximum(tl.maximum(c * 0.5, c - 2.0), tl.fma(c, 2.0, -8.0))


@triton.jit
def with_sign(v, x):
    """v >= 0 (or NaN) with the sign of x."""
    sign = x.to(tl.int32, bitcast=True) & _SIGN
    return (v.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def pack8(codes, block, FIRST: tl.constexpr):
    """Words of eight codes, saturated, and the signs of elements FIRST on; the first is lowest.

    A conversion that packs two saturates them as well and takes signs: 9 instructions. Shifted sums
    of codes, funnel shifts of signs and a minimum for each element were 26.
    """
    xs = ()
    for j in tl.static_range(8):
        xs = xs + (block[FIRST + j].to(tl.int32, bitcast=True),)
    if IS_PTX:
        word = tl.inline_asm_elementwise(
            _PACK8, _PACK8_OPERANDS, codes + xs, dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        word = tl.zeros_like(codes[0])
        for j in tl.static_range(8):
            sign = (xs[j] >> 28) & 8
            word |= (tl.minimum(codes[j], 7) | sign) << (4 * j)
    return word


@triton.jit
def anchor(x):
    """Zeros in the layout of x, which spreads to what they are added to.

    Without them a chain of arithmetic that begins with `tl.arange` has a layout of its own, and
    each of its results takes a trip through shared memory. LLVM folds the zeros away.
    """
    return abs_bits(x) >> 31


@triton.jit
def philox(n, seed):
    """Four uint32 tensors: Philox4x32-10 of call n (int64), as `reference.uniform16` counts them.

    `seed`: (key, key, offset, stream) words.
    """
    k0, k1, c2, c3 = seed
    c0 = n.to(tl.uint32)
    c1 = (n >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        p0 = c0.to(tl.uint64) * 0xD2511F53  # a 64-bit product is one instruction
        p1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = p1.to(tl.uint32)
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = p0.to(tl.uint32)
        k0 = k0 + tl.full((), 0x9E3779B9, tl.uint32)
        k1 = k1 + tl.full((), 0xBB67AE85, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def seed_words(seed, STREAM: tl.constexpr):
    """The words of `philox` from an int64 tensor [seed, offset] and a direction."""
    key = tl.load(seed).to(tl.uint64)
    offset = tl.load(seed + 1).to(tl.uint32)
    stream = tl.full((), STREAM, tl.uint32)
    return key.to(tl.uint32), (key >> 32).to(tl.uint32), offset, stream
