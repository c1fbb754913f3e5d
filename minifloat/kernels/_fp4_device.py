"""Device functions of the NVFP4 kernels.

A *block* is 16 consecutive elements of the contraction. Blocks lie across a `Block`, a tuple of 16
register tensors of one shape, so that transform, amax, codes and packing are elementwise: no thread
needs another one's elements.

Codes are made in `_fp4_codes`. Offsets of rows and columns come in a dtype in which a tile's
addresses fit: int32 for most tensors (0.6 instructions per element fewer in rows).
"""

# mypy: disable-error-code="assignment, misc, var-annotated"
# (In the compiled bodies, tuples grow.)

from __future__ import annotations

import triton
import triton.language as tl

from ..formats import E2M1, E4M3, FP32_MAX
from ._device import IS_PTX, abs_bits, abs_times, high, low, max2
from ._fp4_codes import (
    anchor,
    biased,
    code_biased,
    code_halved,
    code_stochastic,
    code_value,
    pack8,
    philox,
    seed_words,
    unbiased,
    with_sign,
)

__all__ = [
    "amax_block",
    "amax_words",
    "global_scale",
    "hadamard_block",
    "hadamard_sums",
    "load_col_block",
    "load_col_words",
    "load_row_block",
    "load_row_words",
    "multipliers",
    "quantize_block",
    "scale_block",
    "scattered",
    "stack",
    "store_words",
    "tops_amax",
    "tops_words",
    "words_of_columns",
    "words_of_rows",
]

_FP32_MAX = tl.constexpr(FP32_MAX)
_E2M1_MAX = tl.constexpr(E2M1.max)
_E4M3_MAX = tl.constexpr(E4M3.max)
_NAN8 = tl.constexpr(0x7F)  # E4M3 of NaN
_INF = tl.constexpr(0x7F800000)
# 20 exponents, and 152 ulps (an even number), which make the byte of 0 end with eight zero bits.
_STEP = tl.constexpr((20 << 23) + 152)
_LEAST_STEP = tl.constexpr(((127 - 6 + 20) << 23) + 152)
_NAN4 = tl.constexpr(0x77777777)  # eight E2M1 codes of NaN
_ABS2 = tl.constexpr(0x7FFF7FFF)  # two bf16 numbers without their signs


@triton.jit
def load_col_block(x, o_b, o_k, left_m, left_k, stride, EVEN: tl.constexpr):
    """Column blocks of the tile at x: row i of block row `o_b`, columns `o_k`; zeros outside."""
    o_m = 16 * o_b
    p_x = x + o_m[:, None] * stride + o_k[None, :]  # [MB, BK]
    block = ()
    for i in tl.static_range(16):
        if EVEN:
            b_x = tl.load(p_x)
        else:
            mask = (o_m + i < left_m)[:, None] & (o_k < left_k)[None, :]
            b_x = tl.load(p_x, mask=mask, other=0.0)
        block = block + (b_x.to(tl.float32),)
        p_x += stride
    return block


@triton.jit
def load_row_block(x, o_m, o_g, left_m, left_k, stride, EVEN: tl.constexpr):
    """Row blocks of the tile at x: column i of blocks `o_g` of rows `o_m`, both [N]; zeros outside.

    In loads of 16 bytes a thread: one thread then owns the whole block. A list of blocks, not a
    matrix [R, G] of them: of two axes with nothing contiguous Triton lays a warp along the first,
    32 rows, and stores of 8 bytes in each of those took 106 us in place of 50.
    """
    V: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    block = ()
    for h in tl.static_range(16 // V):
        o_k = 16 * o_g[:, None] + (V * h + tl.arange(0, V))[None, :]
        p_x = x + o_m[:, None] * stride + o_k  # [N, V]
        if EVEN:
            b_x = tl.load(p_x)
        else:
            b_x = tl.load(p_x, mask=(o_m < left_m)[:, None] & (o_k < left_k), other=0.0)
        block = block + split(b_x, V)
    out = ()
    for i in tl.static_range(16):
        out = out + (block[i].to(tl.float32),)
    return out


@triton.jit
def load_row_words(x, o_m, o_g, stride):
    """Like `load_row_block`, of whole tiles of bf16: 8 x [N] words of two elements."""
    p_x = x.to(tl.pointer_type(tl.int32), bitcast=True)
    p_x = p_x + (o_m * (stride // 2) + 8 * o_g)[:, None] + tl.arange(0, 4)[None, :]
    return split(tl.load(p_x), 4) + split(tl.load(p_x + 4), 4)


@triton.jit
def load_col_words(x, o_b, o_w, stride):
    """Like `load_col_block`, of whole tiles of bf16: 16 x [MB, BK / 2] words of two columns."""
    p_x = x.to(tl.pointer_type(tl.int32), bitcast=True)
    p_x = p_x + 16 * o_b[:, None] * (stride // 2) + o_w[None, :]
    words = ()
    for i in tl.static_range(16):
        words = words + (tl.load(p_x + i * (stride // 2)),)
    return words


@triton.jit
def words_of_rows(words):
    """The Block of `load_row_words`."""
    block = ()
    for i in tl.static_range(8):
        block = block + (low(words[i]), high(words[i]))
    return block


@triton.jit
def words_of_columns(words):
    """The Block of `load_col_words`."""
    MB: tl.constexpr = words[0].shape[0]
    BK: tl.constexpr = 2 * words[0].shape[1]
    block = ()
    for i in tl.static_range(16):
        block = block + (tl.reshape(tl.join(low(words[i]), high(words[i])), (MB, BK)),)
    return block


@triton.jit
def max2_signed(a, b):
    """Maxima of the lower and the upper halves of int32 words, as signed numbers."""
    return tl.inline_asm_elementwise(
        "max.s16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def amax_words(words, N: tl.constexpr):
    """Words of the largest magnitudes among N words of two bf16 numbers, half by half."""
    return tops_amax(tops_words(words[0], words[0], words, N))


@triton.jit
def tops_words(s, u, words, N: tl.constexpr):
    """The signed and the unsigned maxima of (s, u) and of N words of two bf16 numbers.

    As integers with their signs, the signed maximum is the largest positive number, and the
    unsigned one the largest negative one (each of them the other, where there is none). Both take
    three operands: 19 instructions for 16 words, where taking the signs off made it 24.
    """
    for i in tl.static_range(N):
        if IS_PTX:
            s = max2_signed(s, words[i])
            u = max2(u, words[i])
        else:
            u = max2(u & _ABS2, words[i] & _ABS2)
    return s, u


@triton.jit
def tops_amax(tops):
    """Words of the magnitudes that `tops_words` found."""
    out = tops[1] & _ABS2
    if IS_PTX:
        out = max2(tops[0] & _ABS2, out)
    return out


@triton.jit
def split(b_x, N: tl.constexpr):
    """[B, N] -> N tensors [B], for N = 4, 8 or 16."""
    B: tl.constexpr = b_x.shape[0]
    if N == 16:
        parts = (tl.reshape(b_x, (B, 2, 2, 2, 2)),)
    elif N == 8:
        parts = (tl.reshape(b_x, (B, 2, 2, 2)),)
    else:
        parts = (tl.reshape(b_x, (B, 2, 2)),)
    for stage in tl.static_range(4):
        if (2 << stage) <= N:  # by bit `stage` of the index
            zeros = ()
            ones = ()
            for i in tl.static_range(1 << stage):
                a, b = tl.split(parts[i])
                zeros = zeros + (a,)
                ones = ones + (b,)
            parts = zeros + ones
    return parts


@triton.jit
def stack(block):
    """The inverse of `split`: a Block of [B] -> [B, 16]."""
    B: tl.constexpr = block[0].shape[0]
    for stage in tl.static_range(4):
        joined = ()
        for i in tl.static_range(8 >> stage):
            joined = joined + (tl.join(block[i], block[i + (8 >> stage)]),)
        block = joined
    return tl.reshape(block[0], (B, 16))


@triton.jit
def hadamard_block(block, SIGNS: tl.constexpr):
    """The 16-point transform in the reference's order: signs, distances 1, 2, 4, 8, times 1/4."""
    v = hadamard_sums(block, SIGNS)
    out = ()
    for i in tl.static_range(16):
        out = out + (v[i] * 0.25,)
    return out


@triton.jit
def hadamard_sums(block, SIGNS: tl.constexpr):
    """`hadamard_block` without its factor: rounding is monotone, an amax may take it at the end."""
    v = ()
    for i in tl.static_range(16):
        # Not `-x`, which is `0 - x` here: zeros change their sign too.
        v = v + (block[i] * -1.0 if (SIGNS >> i) & 1 else block[i],)
    for stage in tl.static_range(4):
        w = ()
        for i in tl.static_range(16):
            b = v[i ^ (1 << stage)]
            w = w + (b - v[i] if i & (1 << stage) else v[i] + b,)
        v = w
    return v


@triton.jit
def amax_block(block):
    """Bits of the largest magnitude of each block; NaN is above every number.

    A float maximum takes |x| for free, an integer one takes three operands: use both.
    """
    a = tl.zeros_like(block[0]).to(tl.int32)
    for i in tl.static_range(8):
        m = tl.maximum(tl.abs(block[i]), tl.abs(block[i + 8]), propagate_nan=tl.PropagateNan.ALL)
        a = tl.maximum(a, abs_bits(m))
    return a


@triton.jit
def global_scale(amax, SCALE_MAX: tl.constexpr):
    """(encode, decode) factors of a global amax; 1 where amax is 0, infinite or NaN."""
    encode = tl.div_rn(SCALE_MAX * _E2M1_MAX, amax)
    encode = tl.where(encode > _FP32_MAX, _FP32_MAX, encode)
    encode = tl.where((encode == 0) | (amax == 0) | (encode != encode), 1.0, encode)
    return encode, tl.div_rn(1.0, encode)


@triton.jit
def e4m3(v):
    """E4M3 byte (int32) of v >= 0, saturating, ties to even; NaN gives 0x7F.

    By adding 2**(e + 20), whose ulp is the step of E4M3 at exponent e, -6 at the least. What was
    added to it leaves the byte in the lower bits, once the exponent, eight bytes for each, is added
    as well. Not by the hardware's cast: there is one for 16 elements, this can be checked where
    there is no GPU, and see `_device.encode` for what becomes of codes that are computed with.
    """
    c = tl.minimum(v, _E4M3_MAX)
    exponent = c.to(tl.int32, bitcast=True) & _INF
    step = tl.maximum(exponent + _STEP, _LEAST_STEP).to(tl.float32, bitcast=True)
    r = (c + step).to(tl.int32, bitcast=True)
    return tl.where(v != v, _NAN8, (r + (r >> 20)) & 0xFF)


@triton.jit
def e4m3_value(byte):
    """fp32 value of an E4M3 byte (int32) without sign: a shift, and a move of the exponent bias."""
    v = (byte << 20).to(tl.float32, bitcast=True) * 2.0**120
    return tl.where(byte == _NAN8, float("nan"), v)


@triton.jit
def block_byte(amax, encode):
    """E4M3 byte of a block's amax (bits)."""
    return e4m3(amax.to(tl.float32, bitcast=True) * (encode * (1.0 / _E2M1_MAX)))


@triton.jit
def block_multiplier(byte, decode):
    """`1 / (e4m3 * decode)`, at most the largest fp32; NaN stays."""
    m = tl.div_rn(1.0, e4m3_value(byte) * decode)
    return tl.where(m > _FP32_MAX, _FP32_MAX, m)


@triton.jit
def multipliers(decode, SCALED: tl.constexpr):
    """What `look_up` wants: the multipliers of all bytes under one factor, or the factors."""
    return decode if SCALED else block_multiplier(tl.arange(0, 128), decode)


@triton.jit
def look_up(table, byte, SCALED: tl.constexpr):
    """`block_multiplier` of bytes. From a table where it can: a division costs 1 per element."""
    if SCALED:
        out = block_multiplier(byte, table)
    else:
        out = tl.reshape(tl.gather(table, tl.reshape(byte, (byte.numel,)), 0), byte.shape)
    return out


@triton.jit
def quantize_block(
    block, byte, table, o_n, seed, STOCHASTIC: tl.constexpr, STREAM: tl.constexpr,
    SCALED: tl.constexpr, VALUES: tl.constexpr, HALVED: tl.constexpr,
):  # fmt: skip
    """(words, words, values) of a Block under its scale bytes.

    The words hold codes 0 to 7 and 8 to 15, first code lowest, NaN codes where the scale is NaN;
    `values` is the Block of bf16 `code * scale` (exact), or empty. `o_n`: a block's first Philox
    call. HALVED, for codes to nearest alone: half of each multiplier is exact.
    """
    mult = look_up(table, byte, SCALED)
    scale = e4m3_value(byte)
    words = ()
    values = ()
    if STOCHASTIC:
        key = seed_words(seed, STREAM)
        o_n += anchor(block[0])
    for h in tl.static_range(2):
        if STOCHASTIC:
            r = philox(o_n + h, key)
        codes = ()
        for j in tl.static_range(8):
            x = block[8 * h + j]
            if HALVED:
                code = code_halved(x, mult * 0.5)
            elif STOCHASTIC:
                if j % 2 == 0:
                    code = code_stochastic(abs_times(x, mult), (r[j // 2] & 0xFFFF).to(tl.int32))
                else:
                    code = code_stochastic(abs_times(x, mult), (r[j // 2] >> 16).to(tl.int32))
                b_code = biased(code)
            else:
                b_code = code_biased(abs_times(x, mult))
                code = unbiased(b_code)
            codes = codes + (code,)
            if VALUES:
                v = with_sign(code_value(b_code) * scale, x)
                values = values + (v.to(tl.bfloat16),)
        words = words + (tl.where(mult != mult, _NAN4, pack8(codes, block, 8 * h)),)
    return words[0], words[1], values


@triton.jit
def four_over_six_bytes(amax, encode):
    """Bytes of the scales that map a block's amax (bits) to 6 and to 4."""
    base = tl.div_rn(amax.to(tl.float32, bitcast=True), _E2M1_MAX) * encode
    return e4m3(base), e4m3(1.5 * base)


@triton.jit
def block_errors(block, byte, decode, amax, MAX: tl.constexpr, ERROR: tl.constexpr):
    """Quantization errors of a Block under candidate scales, summed in index order.

    Signs cancel: value and element have the same one.
    """
    mult = block_multiplier(byte, decode)
    scale = e4m3_value(byte)
    total = tl.zeros_like(block[0])
    for i in tl.static_range(16):
        a = tl.abs(block[i])
        v = tl.div_rn(code_value(code_biased(a * mult)) * scale * amax, _E2M1_MAX * MAX)
        # 0 + error is the error, bit for bit, since it is not negative.
        total = total + (tl.abs(v - a) if ERROR == "MAE" else (v - a) * (v - a))
    return total


@triton.jit
def tree_sum(sums):
    """Sum of 16 tensors by halves: i and i + 8, then i and i + 4, ..."""
    for stage in tl.static_range(4):
        half = ()
        for i in tl.static_range(8 >> stage):
            half = half + (sums[i] + sums[i + (8 >> stage)],)
        sums = half
    return sums[0]


@triton.jit
def over_tile(b, SUM: tl.constexpr, G: tl.constexpr):
    """The maximum (or `tree_sum`) of each 16x16 tile's 16 blocks, once for each block.

    `b` is [block rows, columns], or with G a list [N] of row blocks, G to a row.
    """
    N: tl.constexpr = b.shape[0] if G > 0 else b.shape[0] * b.shape[1]
    if G > 0:
        tiles = tl.permute(tl.reshape(b, (N // (16 * G), 16, G)), (0, 2, 1))
        tiles = tl.reshape(tiles, (N // 16, 16))
    else:
        tiles = tl.reshape(b, (N // 16, 16))
    one = tree_sum(split(tiles, 16)) if SUM else tl.max(tiles, axis=1)
    tiles = tl.broadcast_to(one[:, None], tiles.shape)
    if G > 0:
        tiles = tl.permute(tl.reshape(tiles, (N // (16 * G), G, 16)), (0, 2, 1))
    return tl.reshape(tiles, b.shape)


@triton.jit
def scale_block(
    block, b_amax, encode, decode, amax, MAX: tl.constexpr, ERROR: tl.constexpr,
    SQUARE: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """E4M3 bytes (int32) of a Block's scales, from the bits of its amaxes."""
    if SQUARE:
        b_amax = over_tile(b_amax, False, G)
    if ERROR == "":
        byte = block_byte(b_amax, encode)
    else:
        six, four = four_over_six_bytes(b_amax, encode)
        e6 = block_errors(block, six, decode, amax, MAX, ERROR)
        e4 = block_errors(block, four, decode, amax, MAX, ERROR)
        if SQUARE:
            e6 = over_tile(e6, True, G)
            e4 = over_tile(e4, True, G)
        byte = tl.where(e4 < e6, four, six)
    return byte


@triton.jit
def scattered(o):
    """Offsets (int32) as they are, for a store that the compiler shall not take for contiguous.

    One byte a thread, of 8 in a row, goes out as it is: for wider stores, bytes would change
    threads through shared memory, behind two barriers.
    """
    if IS_PTX:
        o = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [o], dtype=tl.int32, is_pure=True, pack=1
        )
    return o


@triton.jit
def store_words(data, b_w, o_r, o_w, left_r, left_c, pitch, WIDE: tl.constexpr, EVEN: tl.constexpr):
    """Store int32 words, eight codes each, in rows `o_r` [R, 1] at words `o_w` [1 or R, W].

    `left_c`: codes of a row from the tile's edge on. WIDE: a row has a multiple of eight, and
    `pitch` counts words. Else bytes: codes past the end of a row are zero, and a byte is stored if
    its first code is not past it.
    """
    if WIDE:
        p_w = data.to(tl.pointer_type(tl.int32), bitcast=True)
        p_w = p_w + o_r * pitch + o_w
        if EVEN:
            tl.store(p_w, b_w)
        else:
            tl.store(p_w, b_w, mask=(o_r < left_r) & (8 * o_w < left_c))
    else:
        real = tl.minimum(tl.maximum(left_c - 8 * o_w, 0), 8)
        kept = tl.where(real == 8, -1, (1 << (4 * (real & 7))) - 1)
        o_b = tl.arange(0, 4)[None, None, :]
        b_d = (b_w & kept)[:, :, None] >> (8 * o_b)  # [R, W, 4]
        o_d = 4 * o_w[:, :, None] + o_b  # [1 or R, W, 4]
        p_d = data + o_r[:, :, None] * pitch + o_d
        mask = (o_r < left_r)[:, :, None] & (2 * o_d < left_c)
        tl.store(p_d, (b_d & 0xFF).to(tl.uint8), mask=mask)
