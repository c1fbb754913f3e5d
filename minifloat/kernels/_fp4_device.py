"""Device functions of the NVFP4 kernels.

A *block* is 16 consecutive elements of the contraction. Blocks lie across a `Block`, a tuple of 16
register tensors of one shape, so that transform, amax, codes and packing are elementwise: no thread
needs another one's elements.

A *code* travels as int32 `_BIAS | magnitude`: the bits of the float `1.5 * 2**23 + magnitude`,
whose ulp is 1 (a stochastic one, of 64 + magnitude, less a fraction). Eight are packed by shifted
sums; their biases add up to a constant.

The bits are those of `reference`, which has no fused operations: without `enable_fp_fusion=False`,
`|x| * multiplier` would melt into the add after it.
"""

# mypy: disable-error-code="assignment, misc, var-annotated"
# (In the compiled bodies, tuples grow.)

from __future__ import annotations

import triton
import triton.language as tl

from ..formats import E2M1, E4M3, FP32_MAX
from ._device import IS_PTX, abs_bits, abs_times, high, low, max2

__all__ = [
    "amax_block",
    "amax_words",
    "global_scale",
    "hadamard_block",
    "load_col_block",
    "load_col_words",
    "load_row_block",
    "load_row_words",
    "multipliers",
    "quantize_block",
    "scale_block",
    "stack",
    "store_words",
    "words_of_columns",
    "words_of_rows",
]

_FP32_MAX = tl.constexpr(FP32_MAX)
_E2M1_MAX = tl.constexpr(E2M1.max)
_E4M3_MAX = tl.constexpr(E4M3.max)
_NAN8 = tl.constexpr(0x7F)  # E4M3 of NaN
_NAN4 = tl.constexpr(0x77777777)  # eight E2M1 codes of NaN
_SIGNS = tl.constexpr(0x88888888 - 2**32)  # the sign bits of eight codes
_SIGN = tl.constexpr(-(2**31))
_ABS2 = tl.constexpr(0x7FFF7FFF)  # two bf16 numbers without their signs
_ROUND = tl.constexpr(1.5 * 2**23)  # adding it rounds to an integer, ties to even
_BIAS = tl.constexpr(0x4B400000)  # its bits
_BIASES = tl.constexpr(0x4B400000 * (1 + 16 + 256) % 2**32)  # packed; the others shift out
_BIAS64 = tl.constexpr(0x42800000 >> 17)  # bits of 64, less those of a fraction
_BIASES64 = tl.constexpr((0x42800000 >> 17) * 0x11111111 % 2**32)
_CARRY = tl.constexpr(0x42800000 + 2**17 - 2)  # bits of 65 - 2**-16, one ulp below where u is 0
_STOCHASTIC = tl.constexpr("""{ .reg .f32 x, y, z; .reg .b32 p, q, r;
fma.rp.f32 x, $1, 0f40000000, $2;
add.rn.f32 y, $2, 0f40000000; add.rp.f32 y, $1, y;
add.rn.f32 z, $2, 0f40800000; fma.rp.f32 z, $1, 0f3F000000, z;
mov.b32 p, x; mov.b32 q, y; mov.b32 r, z;
min.s32 p, p, q; min.s32 p, p, r; min.s32 p, p, 0x428E0000;
shr.u32 $0, p, 17; }""")  # the last minimum is with 64 + 7


@triton.jit
def load_col_block(x, o_b, o_k, left_m, left_k, stride, EVEN: tl.constexpr):
    """Column blocks of the tile at x: row i of block row `o_b`, columns `o_k`; zeros outside."""
    o_m = 16 * o_b
    p_x = x + o_m[:, None].to(tl.int64) * stride + o_k[None, :]  # [MB, BK]
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
        p_x = x + o_m[:, None].to(tl.int64) * stride + o_k  # [N, V]
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
    p_x = p_x + (o_m.to(tl.int64) * (stride // 2) + 8 * o_g)[:, None] + tl.arange(0, 4)[None, :]
    return split(tl.load(p_x), 4) + split(tl.load(p_x + 4), 4)


@triton.jit
def load_col_words(x, o_b, o_w, stride):
    """Like `load_col_block`, of whole tiles of bf16: 16 x [MB, BK / 2] words of two columns."""
    p_x = x.to(tl.pointer_type(tl.int32), bitcast=True)
    p_x = p_x + 16 * o_b[:, None].to(tl.int64) * (stride // 2) + o_w[None, :]
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
def amax_words(words, N: tl.constexpr):
    """Words of the largest magnitudes among N words, half by half."""
    top = words[0] & _ABS2
    for i in tl.static_range(1, N):
        top = max2(top, words[i] & _ABS2)
    return top


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
    out = ()
    for i in tl.static_range(16):
        out = out + (v[i] * 0.25,)
    return out


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

    In integers rather than by the hardware's cast: there is one for 16 elements, and this can be
    checked where there is no GPU.
    """
    c = tl.minimum(v, _E4M3_MAX)
    bits = c.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # The ulp of 2**14 is 2**-9, the smallest E4M3 number.
    subnormal = (c + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return tl.where(v != v, _NAN8, tl.where(c < 0.015625, subnormal, normal))


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
def code_nearest(a):
    """E2M1 code of a >= 0, ties to even, saturating.

    Magnitude codes are the rounding of the concave function `min(2a, a + 2, a/2 + 4)`; rounding is
    monotone, so it may come before the minimum; each line is rounded once, in its add. The minimum
    is that of the bits, since integers have one of three operands.
    """
    r1 = tl.fma(a, 2.0, _ROUND).to(tl.int32, bitcast=True)
    r2 = (a + (_ROUND + 2)).to(tl.int32, bitcast=True)
    r3 = tl.fma(a, 0.5, _ROUND + 4).to(tl.int32, bitcast=True)
    return tl.minimum(tl.minimum(tl.minimum(r1, r2), r3), _BIAS + 7)


@triton.jit
def code_stochastic(a, r):
    """`_BIAS64 | code`, up with probability frac(a / step): up iff u < frac.

    `r` (int32) holds 16 random bits: u = (r + 0.5) / 2**16. Codes are again the rounding of
    `min(2a, a + 2, a/2 + 4)`, each line rounded once, in its add: up to a multiple of 2**-17, the
    ulp of 64, after c = 65 - u - 2**-17 was added. As u is such a multiple itself, that carries
    into the integer above iff the fraction exceeds u. 6 operations of the FMA pipe and 5 of the
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
    """`code_stochastic` for the interpreter, which rounds to nearest alone.

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
    return _BIAS64 + tl.maximum(curved, linear)


@triton.jit
def code_value(code):
    """fp32 magnitude of a code: the convex `max(c/2, c - 2, 2c - 8)`."""
    c = code.to(tl.float32, bitcast=True) - _ROUND
    return tl.maximum(tl.maximum(c * 0.5, c - 2.0), tl.fma(c, 2.0, -8.0))


@triton.jit
def with_sign(v, x):
    """v >= 0 (or NaN) with the sign of x."""
    sign = x.to(tl.int32, bitcast=True) & _SIGN
    return (v.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


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


@triton.jit
def quantize_block(
    block, byte, table, o_n, seed, STOCHASTIC: tl.constexpr, STREAM: tl.constexpr,
    SCALED: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """(words, words, values) of a Block under its scale bytes.

    The words hold codes 0 to 7 and 8 to 15, first code lowest, NaN codes where the scale is NaN;
    `values` is the Block of bf16 `code * scale` (exact), or empty. `o_n`: a block's first Philox
    call.
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
        word = tl.zeros_like(byte)
        signs = tl.zeros_like(byte)
        for j in tl.static_range(8):
            a = abs_times(block[8 * h + j], mult)
            if STOCHASTIC:
                if j % 2 == 0:
                    code = code_stochastic(a, (r[j // 2] & 0xFFFF).to(tl.int32))
                else:
                    code = code_stochastic(a, (r[j // 2] >> 16).to(tl.int32))
            else:
                code = code_nearest(a)
            word += code << (4 * j)
            if VALUES:
                if STOCHASTIC:
                    code += _BIAS - _BIAS64
                v = with_sign(code_value(code) * scale, block[8 * h + j])
                values = values + (v.to(tl.bfloat16),)
        for j in tl.static_range(8):
            # A funnel shift: bit 31 of the last one in ends as bit 3.
            x = block[8 * h + 7 - j].to(tl.int32, bitcast=True).to(tl.uint32, bitcast=True)
            signs = (signs << 4) | (x >> 28).to(tl.int32)
        word = (word - (_BIASES64 if STOCHASTIC else _BIASES)) | (signs & _SIGNS)
        words = words + (tl.where(mult != mult, _NAN4, word),)
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
        v = tl.div_rn(code_value(code_nearest(a * mult)) * scale * amax, _E2M1_MAX * MAX)
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
def store_words(data, b_w, o_r, o_w, left_r, left_c, pitch, WIDE: tl.constexpr, EVEN: tl.constexpr):
    """Store int32 words, eight codes each, in rows `o_r` [R, 1] at words `o_w` [1 or R, W].

    `left_c`: codes of a row from the tile's edge on. WIDE: a row has a multiple of eight, and
    `pitch` counts words. Else bytes: codes past the end of a row are zero, and a byte is stored if
    its first code is not past it.
    """
    if WIDE:
        p_w = data.to(tl.pointer_type(tl.int32), bitcast=True)
        p_w = p_w + o_r.to(tl.int64) * pitch + o_w
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
        p_d = data + o_r[:, :, None].to(tl.int64) * pitch + o_d
        mask = (o_r < left_r)[:, :, None] & (2 * o_d < left_c)
        tl.store(p_d, (b_d & 0xFF).to(tl.uint8), mask=mask)
