"""Device functions that the kernels share: the rules of `reference`, operation for operation.

An amax is taken over the bits of |x|. As integers those are ordered like the values, with NaN above
Inf above every number, so an integer maximum propagates NaN where a floating-point one drops it.
"""

from __future__ import annotations

import struct

import triton
import triton.language as tl

from ..formats import E4M3, E5M2, Element

__all__ = [
    "FP8",
    "IS_PTX",
    "abs_bits",
    "abs_times",
    "amax",
    "codes2",
    "codes4",
    "decode",
    "e8m0_byte",
    "e8m0_decode",
    "e8m0_multiplier",
    "encode",
    "fp8_scale",
    "fp32",
    "high",
    "inside",
    "load_tile",
    "low",
    "max2",
    "padded",
    "reduce2",
    "spread",
    "store_tile",
    "top2",
]

FP8: dict[Element, tl.dtype] = {E4M3: tl.float8e4nv, E5M2: tl.float8e5}

_ABS = tl.constexpr(0x7FFFFFFF)
_INF = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7FC00000)
_MANTISSA = tl.constexpr(0x7FFFFF)
_LOWER = tl.constexpr(0xFFFF)
_UPPER = tl.constexpr(-0x10000)
_SUBNORMAL_HALF = tl.constexpr(0x400000)  # 2**-127, the power of two below the smallest normal
# Four fp32 numbers (operands {1} to {4}) -> a word of their codes, the first in the lowest byte.
_WORD = """{{ .reg .b16 a, b;
cvt.rn.satfinite.{0}x2.f32 a, ${2}, ${1}; cvt.rn.satfinite.{0}x2.f32 b, ${4}, ${3};
mov.b32 $0, {{a, b}}; }}"""
_CODES4_E4M3 = tl.constexpr(_WORD.format("e4m3", 1, 2, 3, 4))
_CODES4_E5M2 = tl.constexpr(_WORD.format("e5m2", 1, 2, 3, 4))
_CODES2_E4M3 = tl.constexpr(_WORD.format("e4m3", 1, 3, 2, 4))  # two of one tensor, two of another
_CODES2_E5M2 = tl.constexpr(_WORD.format("e5m2", 1, 3, 2, 4))


def fp32(value: float) -> float:
    """`value` rounded to fp32: a constant of the contract is an fp32 constant."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


@triton.jit
def load_tile(x, o_m, o_k, M, K, stride, EVEN: tl.constexpr):
    """`x[o_m, o_k]`, zero outside [M, K): zeros never raise an amax."""
    p_x = x + o_m[:, None] * stride + o_k[None, :]  # [BM, BK]
    if EVEN:
        b_x = tl.load(p_x)
    else:
        b_x = tl.load(p_x, mask=(o_m[:, None] < M) & (o_k[None, :] < K), other=0)
    return b_x


# Triton's interpreter runs functions of another class, and no assembly.
IS_PTX = tl.constexpr(isinstance(load_tile, triton.JITFunction))


@triton.jit
def padded(n, PAD: tl.constexpr):
    """n rounded up to a multiple of PAD."""
    return n if PAD == 1 else tl.cdiv(n, PAD) * PAD


@triton.jit
def inside(b, o_r, o_c, R, C, PAD: tl.constexpr):
    """`b` where it is inside [R, C), and zeros in what an output has room for; PAD 1: it has none.

    Zeros may not be so any more once they are scaled: a scale that is given may be infinite.
    """
    return b if PAD == 1 else tl.where((o_r[:, None] < R) & (o_c[None, :] < C), b, 0.0)


@triton.jit
def store_tile(out, b, o_r, o_c, R, C, EVEN: tl.constexpr):
    """`out[o_r, o_c] = b` for the part inside a contiguous [R, C)."""
    p_out = out + o_r[:, None] * C + o_c[None, :]  # [BR, BC]
    if EVEN:
        tl.store(p_out, b)
    else:
        tl.store(p_out, b, mask=(o_r[:, None] < R) & (o_c[None, :] < C))


@triton.jit
def low(b_w):
    """The first bf16 number of each int32 word, in fp32.

    Words of two numbers are loaded where a tile's halves need not be told apart until they are
    cast: taking 16-bit elements out of registers and widening them is two instructions, this one.
    """
    return (b_w << 16).to(tl.float32, bitcast=True)


@triton.jit
def high(b_w):
    """The second bf16 number of each int32 word, in fp32."""
    return (b_w & _UPPER).to(tl.float32, bitcast=True)


@triton.jit
def abs_times(b_x, b_y):
    """|x| * y in fp32. In assembly, |x| is free: LLVM makes it an `and`, one more instruction."""
    if IS_PTX:
        out = tl.inline_asm_elementwise(
            "{ .reg .f32 a; abs.f32 a, $1; mul.rn.f32 $0, a, $2; }", "=f,f,f", [b_x, b_y],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        out = tl.abs(b_x) * b_y
    return out


@triton.jit
def max2(a, b):
    """Maxima of the lower and the upper halves of int32 words, unsigned: of two |bf16| at once."""
    if IS_PTX:
        out = tl.inline_asm_elementwise(
            "max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        lower = tl.maximum(a & _LOWER, b & _LOWER)
        out = lower | (tl.maximum((a >> 16) & _LOWER, (b >> 16) & _LOWER) << 16)
    return out


@triton.jit
def reduce2(b_w, AXIS: tl.constexpr):
    """`max2` along AXIS."""
    if IS_PTX:
        out = tl.reduce(b_w, AXIS, max2)
    else:
        out = tl.max(b_w & _LOWER, AXIS) | (tl.max((b_w >> 16) & _LOWER, AXIS) << 16)
    return out


@triton.jit
def top2(b_w):
    """Bits of the largest of words of two |bf16|, as fp32."""
    top = reduce2(tl.reshape(b_w, (b_w.numel,)), 0)
    # As integers: the maximum of two floats would drop a NaN.
    return tl.maximum(top << 16, top & _UPPER)


@triton.jit
def codes2(a, b, LIMIT: tl.constexpr, TYPE: tl.constexpr):
    """Pairs (int16) of the codes of two fp32 tensors, as `encode` without CLAMP has them."""
    if IS_PTX:
        ASM: tl.constexpr = _CODES2_E4M3 if tl.float8e4nv == TYPE else _CODES2_E5M2
        out = tl.inline_asm_elementwise(
            ASM, "=r,f,f,f,f", [a, b], dtype=tl.int16, is_pure=True, pack=2
        )
    else:
        out = encode(a, LIMIT, TYPE, False).to(tl.int16)
        out |= encode(b, LIMIT, TYPE, False).to(tl.int16) << 8
    return out


@triton.jit
def codes4(a, b, c, d, LIMIT: tl.constexpr, TYPE: tl.constexpr):
    """Words (int32) of the codes of four fp32 tensors, likewise."""
    if IS_PTX:
        ASM: tl.constexpr = _CODES4_E4M3 if tl.float8e4nv == TYPE else _CODES4_E5M2
        out = tl.inline_asm_elementwise(
            ASM, "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        out = encode(a, LIMIT, TYPE, False).to(tl.int32)
        out |= encode(b, LIMIT, TYPE, False).to(tl.int32) << 8
        out |= encode(c, LIMIT, TYPE, False).to(tl.int32) << 16
        out |= encode(d, LIMIT, TYPE, False).to(tl.int32) << 24
    return out


@triton.jit
def spread(b_x):
    """b_x [N], its layout untied from that of what it came from, or of what it goes to.

    The gather is an identity, for the compiler. A reduction leaves its results in every thread
    that had a part in them, and what is broadcast to a tile is wanted in every thread again: left
    alone, each of them would divide for all of its rows and columns.
    """
    return tl.gather(b_x, tl.arange(0, b_x.shape[0]), 0)


@triton.jit
def abs_bits(b_x):
    """Bits of |x| in fp32 as int32, from a tensor of any input dtype.

    bf16 is widened by a shift. The cast would do, but a tile's fp32 copy then stays in registers
    from here to where it is multiplied: 170 of them, not 124, in the 1x128 cast of both directions.
    """
    if b_x.dtype == tl.bfloat16:
        bits = (b_x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.int32, bitcast=True)
    else:
        bits = b_x.to(tl.float32).to(tl.int32, bitcast=True)
    return bits & _ABS


@triton.jit
def amax(b_x, AXIS: tl.constexpr):
    """fp32 max |x| along AXIS (None: of the whole block); NaN if any element is.

    bf16 is compared as it is, 16 bits of an fp32 number: two elements fit a register. 116 us became
    105 in the 1x128 cast of both directions (H200, 8192x8192).
    """
    if b_x.dtype == tl.bfloat16:
        top = tl.max(b_x.to(tl.int16, bitcast=True) & 0x7FFF, AXIS)
        bits = top.to(tl.int32) << 16
    else:
        bits = tl.max(abs_bits(b_x), AXIS)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def fp8_scale(amax, eps, LIMIT: tl.constexpr, INF: tl.constexpr, POW2: tl.constexpr):
    """Encode scale `LIMIT / max(amax, eps)`; 1 where amax is 0, infinite or NaN.

    An infinite quotient becomes INF; POW2 rounds down to a power of two.
    """
    eps = tl.cast(eps, tl.float32)  # a launch from Inductor passes Python floats as fp64
    amax = tl.where(amax < eps, eps, amax)
    scale = tl.div_rn(LIMIT, amax)
    bits = abs_bits(scale)
    scale = tl.where(bits == _INF, INF, scale)
    if POW2:
        scale = (scale.to(tl.int32, bitcast=True) & ~_MANTISSA).to(tl.float32, bitcast=True)
    return tl.where((amax == 0) | (abs_bits(amax) >= _INF), 1.0, scale)


@triton.jit
def encode(b_x, LIMIT: tl.constexpr, TYPE: tl.constexpr, CLAMP: tl.constexpr):
    """fp32 -> codes (uint8), to nearest even, saturating; NaN gives the code 0x7F.

    CLAMP spells the saturation out. It must not be the NaN-propagating clamp: next to a transposed
    fp8 store that was miscompiled (triton#11111). Symmetric limits make it one instruction
    (FMNMX.XORSIGN), and NaN two more. Without CLAMP, for values that fit unless their block holds
    Inf or NaN, saturation is left to the cast (cvt.rn.satfinite).

    Store the codes or compute with them, but not both: kernels that did (words of four codes beside
    the bytes, decoded values beside the codes) gave wrong bytes in whole bf16 tiles under Triton
    3.6 and its ptxas 12.8. `python -m tests.exact` shows it within a minute.
    """
    if CLAMP:
        b_x = tl.where(b_x != b_x, b_x, tl.clamp(b_x, -LIMIT, LIMIT))
    return b_x.to(TYPE).to(tl.uint8, bitcast=True)


@triton.jit
def decode(b_q, TYPE: tl.constexpr):
    """Codes (uint8) -> fp32, exactly."""
    return b_q.to(TYPE, bitcast=True).to(tl.float32)


@triton.jit
def e8m0_byte(amax, RECIPROCAL: tl.constexpr):
    """Exponent byte (int32) of `amax * RECIPROCAL` rounded up: NaN 255, Inf 254, 0 0.

    The carry of an addition rounds up: any mantissa but 0, or below the normals one above a half.
    """
    bits = abs_bits(amax * RECIPROCAL)
    carry = tl.where(bits <= _MANTISSA, _SUBNORMAL_HALF - 1, _MANTISSA)
    byte = tl.minimum((bits + carry) >> 23, 0xFE)
    return tl.where(bits > _INF, 0xFF, byte)


@triton.jit
def e8m0_multiplier(byte):
    """2**(127 - byte) of an int32 byte, from bits; 254 gives 2**-127, 255 NaN."""
    bits = tl.maximum((0xFE - byte) << 23, _SUBNORMAL_HALF)
    return tl.where(byte == 0xFF, _NAN, bits).to(tl.float32, bitcast=True)


@triton.jit
def e8m0_decode(byte):
    """2**(byte - 127) of an int32 byte, from bits; 0 gives 2**-127, 255 NaN."""
    bits = tl.maximum(byte << 23, _SUBNORMAL_HALF)
    return tl.where(byte == 0xFF, _NAN, bits).to(tl.float32, bitcast=True)
