"""NVFP4 casts: row and column copies, or their bf16 values, from one pass over the source.

A program reads its tile twice, once with a row block in each thread and once with column blocks, so
that no element crosses threads; the second read comes from the cache. Tiles cover the padded scale
matrices: past the source every amax, and so every scale byte, is 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import env
from ..formats import HADAMARD, HADAMARD_SIGN_MASK, Cast, cdiv, rup
from ._device import max2
from ._fp4_codes import HALVED_FROM
from ._fp4_device import (
    amax_block,
    amax_words,
    global_scale,
    hadamard_block,
    load_col_block,
    load_col_words,
    load_row_block,
    load_row_words,
    multipliers,
    quantize_block,
    scale_block,
    scattered,
    stack,
    store_words,
    words_of_columns,
    words_of_rows,
)
from .fp4_amax import amax_fp4
from .variant import Config, Launch, Variant, samples

__all__ = ["amax_fp4", "cast_fp4", "fake_fp4", "supports", "variants"]

# Row and column blocks of a thread at a time (BLOCKS) matter as much as the tile. "light" and
# "stochastic" are the fastest of scripts/tune_kernels on an H200 at 8192x8192 bf16, or within 1% of
# it, before codes were packed by conversions. Not measured: "words", whole bf16 tiles to nearest,
# whose large tiles spread addresses and tables over twice the elements (22 instructions per element
# for both directions, 25 with those of "light"); and "heavy", for what has the most live values
# (4-over-6, and stochastic codes with values). All sizes divide PAD, that of the scales, so no tile
# lies outside them.
CONFIGS = {
    "words": Config(128, 128, 4),
    "light": Config(64, 128, 4),
    "values": Config(64, 128, 4),
    "stochastic": Config(128, 128, 4),
    "heavy": Config(128, 64, 8),
}
BLOCKS = {
    "words": (4, 8),
    "light": (2, 4),
    "values": (2, 2),  # of partial tiles: (2, 4) spills 16 bytes on sm_90
    "stochastic": (2, 2),
    "heavy": (1, 1),
}
PAD = 128
POINTERS = (
    "row_data", "row_scale", "row_out", "row_amax",
    "col_data", "col_scale", "col_out", "col_amax", "seed",
)  # fmt: skip


@triton.jit
def global_factors(amax, MAX: tl.constexpr, SCALED: tl.constexpr):
    """(amax, encode, decode, multipliers) of a tensor; SCALED, rows or columns have their own."""
    if SCALED:
        out = (0, 0, 0, 0)
    else:
        a_x = tl.load(amax)
        encode, decode = global_scale(a_x, MAX)
        out = (a_x, encode, decode, multipliers(decode, SCALED))
    return out


@triton.jit
def cast_rows(
    x, data, scale, out, amax, factors, seed, o_n, left_m, left_k, left_g, left_s,
    K, stride, pitch, scale_pitch,
    MAX: tl.constexpr, SQUARE: tl.constexpr, STOCHASTIC: tl.constexpr, SCALED: tl.constexpr,
    ERROR: tl.constexpr, WORDS: tl.constexpr, WIDE: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, R: tl.constexpr, OFFSET: tl.constexpr,
    HALVED: tl.constexpr,
):  # fmt: skip
    """The row copy of the tile that the pointers are at, R rows at a time.

    `left_*`: rows, columns, scale columns and scale rows from there on; `o_n`: the tile's first
    Philox call; `factors`: of `global_factors`, unless SCALED.
    """
    G: tl.constexpr = BK // 16
    o_i = tl.arange(0, R * G)
    o_g = o_i % G  # [R G]
    if not SCALED:
        a_x, encode, decode, table = factors
    for c in range(BM // R):
        o_m = (c * R + o_i // G).to(OFFSET)  # [R G]
        if WORDS:
            words = load_row_words(x, o_m, o_g, stride)  # 8 x [R G]
            b_a = amax_words(words, 8)
            b_a = max2(b_a, b_a >> 16) << 16
            block = words_of_rows(words)
        else:
            block = load_row_block(x, o_m, o_g, left_m, left_k, stride, EVEN)  # 16 x [R G]
            b_a = amax_block(block)
        if SCALED:
            a_x = tl.load(amax + o_m, mask=o_m < left_m, other=0.0)
            encode, decode = global_scale(a_x, MAX)
            table = multipliers(decode, SCALED)
        b_byte = scale_block(block, b_a, encode, decode, a_x, MAX, ERROR, SQUARE, G)  # [R G]
        b_n = o_n + o_m.to(tl.int64) * (2 * tl.cdiv(K, 16)) + 2 * o_g
        w0, w1, values = quantize_block(
            block, b_byte, table, b_n, seed, STOCHASTIC, 0, SCALED, out is not None, HALVED
        )
        if out is not None:
            o_k = 16 * o_g[:, None] + tl.arange(0, 16)[None, :]
            mask = (o_m < left_m)[:, None] & (o_k < left_k)
            tl.store(out + o_m[:, None] * K + o_k, stack(values), mask=mask)
        if data is not None:
            o_w = 2 * o_g[:, None] + tl.arange(0, 2)[None, :]
            b_w = tl.join(w0, w1)
            store_words(data, b_w, o_m[:, None], o_w, left_m, left_k, pitch, WIDE, EVEN)
            if SQUARE and not EVEN:  # a tile's rows below the source have its scale, and no place
                b_byte = tl.where(o_m < left_m, b_byte, 0)
            p_scale = scale + o_m * scale_pitch + scattered(o_g)
            if EVEN:
                tl.store(p_scale, b_byte.to(tl.uint8))
            else:
                tl.store(p_scale, b_byte.to(tl.uint8), mask=(o_g < left_g) & (o_m < left_s))


@triton.jit
def cast_columns(
    x, data, scale, out, amax, factors, seed, o_n, left_m, left_k, left_c, left_b,
    M, K, stride, pitch, scale_pitch,
    MAX: tl.constexpr, SQUARE: tl.constexpr, STOCHASTIC: tl.constexpr, SCALED: tl.constexpr,
    ERROR: tl.constexpr, SIGNS: tl.constexpr, WORDS: tl.constexpr, WIDE: tl.constexpr,
    EVEN: tl.constexpr, MB: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, OFFSET: tl.constexpr,
    HALVED: tl.constexpr,
):  # fmt: skip
    """The column copy of the tile that the pointers are at, MB blocks of 16 rows, C columns a time.

    `left_*`: rows, columns, rows kept and block rows from there on; `o_n`: the first Philox call.
    """
    o_b = tl.arange(0, MB).to(OFFSET)
    if not SCALED:
        a_x, encode, decode, table = factors
    for c in range(BK // C):
        o_k = (c * C + tl.arange(0, C)).to(OFFSET)
        if SCALED:
            a_x = tl.load(amax + o_k, mask=o_k < left_k, other=0.0)[None, :]
            encode, decode = global_scale(a_x, MAX)
            table = multipliers(decode, SCALED)
        if WORDS:
            o_w = c * (C // 2) + tl.arange(0, C // 2)
            words = load_col_words(x, o_b, o_w, stride)  # 16 x [MB, C/2]
            b_a = amax_words(words, 16)
            b_a = tl.reshape(tl.join(b_a << 16, b_a & -0x10000), (MB, C))
            block = words_of_columns(words)
        else:
            block = load_col_block(x, o_b, o_k, left_m, left_k, stride, EVEN)  # 16 x [MB, C]
        if SIGNS >= 0:
            block = hadamard_block(block, SIGNS)
        if SIGNS >= 0 or not WORDS:
            b_a = amax_block(block)
        b_byte = scale_block(block, b_a, encode, decode, a_x, MAX, ERROR, SQUARE, 0)  # [MB, C]
        b_n = o_n + o_k[None, :].to(tl.int64) * (2 * tl.cdiv(M, 16)) + 2 * o_b[:, None]
        w0, w1, values = quantize_block(
            block, b_byte, table, b_n, seed, STOCHASTIC, 1, SCALED, out is not None, HALVED
        )
        if out is not None:
            p_out = out + 16 * o_b[:, None] * K + o_k[None, :]
            for i in tl.static_range(16):
                mask = (16 * o_b + i < left_c)[:, None] & (o_k < left_k)[None, :]
                tl.store(p_out, values[i], mask=mask)
                p_out += K
        if data is not None:
            b_w = tl.reshape(tl.permute(tl.join(w0, w1), (1, 0, 2)), (C, 2 * MB))
            o_w = tl.arange(0, 2 * MB)[None, :]
            store_words(data, b_w, o_k[:, None], o_w, left_k, left_c, pitch, WIDE, EVEN)
            if SQUARE and not EVEN:
                b_byte = tl.where((o_k < left_k)[None, :], b_byte, 0)
            p_scale = scale + o_k[:, None] * scale_pitch + o_b[None, :]
            b_byte = tl.trans(b_byte).to(tl.uint8)
            if EVEN:
                tl.store(p_scale, b_byte)
            else:
                tl.store(p_scale, b_byte, mask=(o_b < left_b)[None, :])


@triton.jit
def cast_kernel(
    x, row_data, row_scale, row_out, row_amax, col_data, col_scale, col_out, col_amax, seed,
    M, K, C, stride, row_pitch, row_scale_pitch, col_pitch, col_scale_pitch,
    ROW: tl.constexpr, ROW_MAX: tl.constexpr, ROW_SQUARE: tl.constexpr,
    ROW_STOCHASTIC: tl.constexpr, ROW_SCALED: tl.constexpr, ROW_ERROR: tl.constexpr,
    COL: tl.constexpr, COL_MAX: tl.constexpr, COL_SQUARE: tl.constexpr,
    COL_STOCHASTIC: tl.constexpr, COL_SCALED: tl.constexpr, COL_ERROR: tl.constexpr,
    COL_SIGNS: tl.constexpr, ROW_WIDE: tl.constexpr, COL_WIDE: tl.constexpr,
    WORDS: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    R: tl.constexpr, CC: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Both directions of a tile of `x[M, K]`. C: elements in a row of the column copy.

    A data pitch counts words where WIDE (a multiple of 8 elements), else bytes. FAR: offsets in a
    tile may not fit int32. Tiles run from the last to the first: what the amax pass touched last is
    still in L2.
    """
    OFFSET: tl.constexpr = tl.int64 if FAR else tl.int32
    i_t = tl.num_programs(0) - 1 - tl.program_id(0)
    n_k = tl.cdiv(tl.cdiv(K, 128) * 128, BK)
    m0 = (i_t // n_k).to(tl.int64) * BM
    k0 = (i_t % n_k).to(tl.int64) * BK
    left_m = tl.minimum(M - m0, BM).to(tl.int32)
    left_k = tl.minimum(K - k0, BK).to(tl.int32)
    x += m0 * stride + k0
    # Codes to nearest alone have a shorter way, open to all amaxes but the largest. (4-over-6 has
    # most of its work elsewhere, and two ways of it spilled.)
    ROW_SHORT: tl.constexpr = not (
        ROW_STOCHASTIC or ROW_SCALED or ROW_ERROR != "" or row_out is not None
    )
    COL_SHORT: tl.constexpr = not (
        COL_STOCHASTIC or COL_SCALED or COL_ERROR != "" or col_out is not None
    )
    SHORT: tl.constexpr = (ROW_SHORT or not ROW) and (COL_SHORT or not COL)
    halved = 1 if SHORT else 0
    if ROW:
        if row_data is not None:
            row_data += m0 * row_pitch * (4 if ROW_WIDE else 1) + k0 // 2
            row_scale += m0 * row_scale_pitch + k0 // 16
        if row_out is not None:
            row_out += m0 * K + k0
        if ROW_SCALED:
            row_amax += m0
        row_factors = global_factors(row_amax, ROW_MAX, ROW_SCALED)
        if SHORT:
            halved &= (row_factors[1] >= HALVED_FROM).to(tl.int32)
    if COL:
        if col_data is not None:
            col_data += k0 * col_pitch * (4 if COL_WIDE else 1) + m0 // 2
            col_scale += k0 * col_scale_pitch + m0 // 16
        if col_out is not None:
            col_out += m0 * K + k0
        if COL_SCALED:
            col_amax += k0
        col_factors = global_factors(col_amax, COL_MAX, COL_SCALED)
        if SHORT:
            halved &= (col_factors[1] >= HALVED_FROM).to(tl.int32)
    for HALVED in tl.static_range(2 if SHORT else 1):
        if halved == HALVED:
            if ROW:
                cast_rows(
                    x, row_data, row_scale, row_out, row_amax, row_factors, seed,
                    m0 * (2 * tl.cdiv(K, 16)) + k0 // 8, left_m, left_k,
                    tl.minimum(row_scale_pitch - k0 // 16, BK // 16).to(tl.int32), BM,
                    K, stride, row_pitch, row_scale_pitch,
                    ROW_MAX, ROW_SQUARE, ROW_STOCHASTIC, ROW_SCALED, ROW_ERROR,
                    WORDS, ROW_WIDE, EVEN, BM, BK, R, OFFSET, HALVED,
                )  # fmt: skip
            if COL:
                cast_columns(
                    x, col_data, col_scale, col_out, col_amax, col_factors, seed,
                    k0 * (2 * tl.cdiv(M, 16)) + m0 // 8, left_m, left_k,
                    tl.minimum(C - m0, BM).to(tl.int32),
                    tl.minimum(col_scale_pitch - m0 // 16, BM // 16).to(tl.int32),
                    M, K, stride, col_pitch, col_scale_pitch,
                    COL_MAX, COL_SQUARE, COL_STOCHASTIC, COL_SCALED, COL_ERROR, COL_SIGNS,
                    WORDS, COL_WIDE, EVEN, BM // 16, BK, CC, OFFSET, HALVED,
                )  # fmt: skip


def supports(cast: Cast) -> bool:
    """Whether these kernels serve the cast: every NVFP4 option (a transform, in column copies)."""
    return cast.format.two_level


def cast_fp4(
    x: Tensor,
    *,
    row: Cast | None,
    col: Cast | None,
    row_data: Tensor | None = None,
    row_scale: Tensor | None = None,
    row_amax: Tensor | None = None,
    col_data: Tensor | None = None,
    col_scale: Tensor | None = None,
    col_amax: Tensor | None = None,
    seed: Tensor | None = None,
) -> None:
    """`x[M, K]` -> codes and scales of each direction present: `reference.quantize`.

    The global amaxes are given. `seed`: int64 [seed, offset] on the device of x, for a stochastic
    cast.
    """
    tensors = {
        "row_data": row_data, "row_scale": row_scale, "row_amax": row_amax,
        "col_data": col_data, "col_scale": col_scale, "col_amax": col_amax, "seed": seed,
    }  # fmt: skip
    _run(x, row, col, tensors)


def fake_fp4(
    x: Tensor,
    *,
    row: Cast | None,
    col: Cast | None,
    row_amax: Tensor | None = None,
    col_amax: Tensor | None = None,
    row_out: Tensor | None = None,
    col_out: Tensor | None = None,
    col_data: Tensor | None = None,
    col_scale: Tensor | None = None,
    seed: Tensor | None = None,
) -> None:
    """`x[M, K]` -> bf16 values of its copies, in the orientation of x: `reference.fake_quantize`.

    A column copy to keep is codes: `col_data` and `col_scale` in place of `col_out`.
    """
    tensors = {
        "row_out": row_out, "row_amax": row_amax, "col_out": col_out,
        "col_data": col_data, "col_scale": col_scale, "col_amax": col_amax, "seed": seed,
    }  # fmt: skip
    if row is not None and col_data is not None:  # two launches: together, 4-over-6 spills
        _run(x, row, None, {n: t for n, t in tensors.items() if not n.startswith("col")})
        _run(x, None, col, {n: t for n, t in tensors.items() if not n.startswith("row")})
    else:
        _run(x, row, col, tensors)


Tensors = Mapping[str, Tensor | None]


def _run(x: Tensor, row: Cast | None, col: Cast | None, tensors: Tensors) -> None:
    if row is not None and row.transforms:
        raise ValueError("row: the Hadamard transform belongs to column copies")
    if x.numel() > 0 and (row is not None or col is not None):
        _launch(x, row, col, tensors).run()


def _launch(
    x: Tensor,
    row: Cast | None,
    col: Cast | None,
    tensors: Tensors,
    config: Config | None = None,
    blocks: tuple[int, int] | None = None,
) -> Launch:
    m, k = x.shape
    even = m > 0 and k > 0 and m % PAD == k % PAD == 0
    words = even and x.dtype == torch.bfloat16  # two numbers to a word, as in `blocks`
    words = words and x.data_ptr() % 4 == 0 and x.stride(0) % 2 == 0
    words = words and env.takes_words(x.device)
    kind = _kind(row, col, tensors, words)
    config = config or CONFIGS[kind]
    rows, cols = blocks or BLOCKS[kind]
    c = rup(m, HADAMARD) if col is not None and col.transforms else m
    args = dict(
        x=x,
        M=m,
        K=k,
        C=c,
        stride=x.stride(0),
        row_pitch=cdiv(k, 2) if k % 8 else k // 8,
        row_scale_pitch=rup(cdiv(k, 16), 4),
        col_pitch=cdiv(c, 2) if c % 8 else c // 8,
        col_scale_pitch=rup(cdiv(c, 16), 4),
        COL_SIGNS=-1 if col is None else col.hadamard,
        ROW_WIDE=k % 8 == 0,
        COL_WIDE=c % 8 == 0,
        WORDS=words,
        EVEN=even,
        BM=config.m,
        BK=config.k,
        R=min(config.m, rows * 512 * config.warps // config.k),
        CC=min(config.k, cols * 512 * config.warps // config.m),
        FAR=max(config.m, config.k) * max(x.stride(0), k, c) >= 2**31,
        **{name: tensors.get(name) for name in POINTERS},
        **options("ROW", row),
        **options("COL", col),
    )
    return Launch(cast_kernel, config.tiles(rup(m, PAD), rup(k, PAD)), args, config)


def _kind(row: Cast | None, col: Cast | None, tensors: Tensors, words: bool) -> str:
    """The key of CONFIGS and BLOCKS."""
    kind = "words" if words else "light"
    for cast, out in ((row, "row_out"), (col, "col_out")):
        if cast is None:
            continue
        values = tensors.get(out) is not None
        if cast.error or (cast.stochastic and values):
            return "heavy"
        if values and not words:
            kind = "values"
        if cast.stochastic:
            kind = "stochastic"
        elif values and kind == "words":
            kind = "light"
    return kind


def options(name: str, cast: Cast | None) -> dict[str, Any]:
    """A direction's constants. Where it is not asked for they are fixed, so as not to recompile."""
    return {
        name: cast is not None,
        f"{name}_MAX": 0 if cast is None else cast.scale_max,
        f"{name}_SQUARE": cast is not None and cast.format.square,
        f"{name}_STOCHASTIC": cast is not None and cast.stochastic,
        f"{name}_SCALED": cast is not None and cast.row_scaled,
        f"{name}_ERROR": "" if cast is None else cast.error,
    }


def variants() -> Iterator[Variant]:
    """Every option by direction, real and fake."""
    plain, tiles = Cast("nvfp4"), Cast("nvfp4_16x16")
    stochastic = plain.replace(stochastic=True)
    options = {
        "plain": (plain, plain),
        "hadamard": (plain, plain.replace(hadamard=HADAMARD_SIGN_MASK)),
        "stochastic": (stochastic, stochastic.replace(hadamard=HADAMARD_SIGN_MASK)),
        "tiles": (tiles, tiles),
        "scaled": (plain.replace(row_scaled=True),) * 2,
        "mae": (plain.replace(error="MAE", scale_max=256),) * 2,
        "tiles_mse": (tiles.replace(error="MSE"),) * 2,
    }
    for sample in samples():
        for option, casts in options.items():
            for direction, is_row, is_col in sample.directions:
                row, col = casts[0] if is_row else None, casts[1] if is_col else None
                name = f"fp4_{option}_{direction}_{sample.tag}"
                launch = _launch(sample.x, row, col, _meta(row, col, fake=False))
                yield Variant.of(name, launch)
                launch = _launch(sample.x, row, col, _meta(row, col, fake=True))
                yield Variant.of(f"{name}_fake", launch)


def _meta(row: Cast | None, col: Cast | None, *, fake: bool) -> dict[str, Tensor | None]:
    """Stand-ins for the tensors of a launch."""

    def one(dtype: torch.dtype, present: bool) -> Tensor | None:
        return torch.empty(1, dtype=dtype, device="meta") if present else None

    cast = row or col
    out: dict[str, Tensor | None] = {"seed": one(torch.int64, cast is not None and cast.stochastic)}
    for name, present in (("row", row is not None), ("col", col is not None)):
        out[f"{name}_data"] = out[f"{name}_scale"] = one(torch.uint8, present and not fake)
        out[f"{name}_out"] = one(torch.bfloat16, present and fake)
        out[f"{name}_amax"] = one(torch.float32, present)
    return out
