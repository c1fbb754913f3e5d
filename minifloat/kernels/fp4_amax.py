"""Global amaxes of NVFP4 casts: of x, of its transformed columns, or of each row or column.

The amaxes of both directions come from one read of x. Programs leave partial maxima, as bits, in
memory that need not be cleared, and one more program reduces them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import env
from ..formats import HADAMARD_SIGN_MASK, Cast, cdiv
from ._device import abs_bits
from ._fp4_device import (
    amax_block,
    hadamard_sums,
    load_col_block,
    load_col_words,
    tops_amax,
    tops_words,
    words_of_columns,
)
from .variant import Config, Launch, Variant, samples

__all__ = ["amax_fp4", "variants"]

# To be measured. A thread has 16 rows by 8 columns (bf16) of a tile, or by 4 with the transform,
# whose 16-row blocks stay in registers. "plain" of whole bf16 tiles takes 42 registers (104 before
# it read words), so that an H200 has room for all PARTIALS programs at once (528 then).
CONFIGS = {
    "plain": Config(64, 256, 4),
    "hadamard": Config(128, 64, 4),
    "rows": Config(8, 1024, 4),
    "cols": Config(64, 64, 4),
}
# Programs, and so partial maxima, of a pass: a few per multiprocessor of an H200. To be measured.
PARTIALS = 1024

_INF = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7FC00000)


@triton.jit
def amax_kernel(
    x,
    partial,
    M,
    K,
    stride,
    tiles,
    PLAIN: tl.constexpr,
    SIGNS: tl.constexpr,
    WORDS: tl.constexpr,
    EVEN: tl.constexpr,
    FAR: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """Bits of the largest magnitudes in tiles p, p + programs, ...

    PLAIN: of x, in `partial[p]`. SIGNS >= 0: of the transform along M, in `partial[programs + p]`.
    WORDS: whole tiles of bf16, two to a word: 2.4 instructions per element for one tile, with all
    that comes before and after it, where 16-bit elements widened to fp32 took 4.2.
    """
    i_p = tl.program_id(0)
    programs = tl.num_programs(0)
    n_k = tl.cdiv(K, BK)
    o_b = tl.arange(0, BM // 16).to(tl.int64 if FAR else tl.int32)
    o_k = tl.arange(0, BK)
    b_signs = tl.zeros((BM // 16, BK), tl.int32)
    if WORDS:
        o_w = tl.arange(0, BK // 2)
        b_s = tl.zeros((BM // 16, BK // 2), tl.int32)
        b_u = tl.zeros((BM // 16, BK // 2), tl.int32)
    else:
        b_plain = tl.zeros((BM // 16, BK), tl.int32)
    for i_t in range(i_p, tiles, programs):
        m0 = (i_t // n_k).to(tl.int64) * BM
        k0 = (i_t % n_k) * BK
        p_x = x + m0 * stride + k0
        if WORDS:
            words = load_col_words(p_x, o_b, o_w, stride)  # 16 x [BM / 16, BK / 2]
            if PLAIN:
                b_s, b_u = tops_words(b_s, b_u, words, 16)
            if SIGNS >= 0:
                block = words_of_columns(words)
        else:
            left_m = tl.minimum(M - m0, BM).to(tl.int32)
            left_k = tl.minimum(K - k0, BK).to(tl.int32)
            block = load_col_block(p_x, o_b, o_k, left_m, left_k, stride, EVEN)
            if PLAIN:
                b_plain = tl.maximum(b_plain, amax_block(block))  # [BM / 16, BK]
        if SIGNS >= 0:
            b_signs = tl.maximum(b_signs, amax_block(hadamard_sums(block, SIGNS)))
    if PLAIN:
        if WORDS:
            b_a = tops_amax((b_s, b_u))
            b_plain = tl.maximum(b_a << 16, b_a & -0x10000)
        tl.store(partial + i_p, tl.max(b_plain))
    if SIGNS >= 0:
        top = tl.max(b_signs).to(tl.float32, bitcast=True) * 0.25
        tl.store(partial + programs + i_p, abs_bits(top))


@triton.jit
def amax_value(bits):
    """The fp32 amax of its bits: one NaN for all."""
    return tl.where(bits > _INF, _NAN, bits).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["n"])
def finish_kernel(partial, n, row, col, SIGNS: tl.constexpr, PARTIALS: tl.constexpr):
    """`row[0]`, `col[0]`: the maxima that `amax_kernel` left in n places; 0 if n is 0."""
    o_p = tl.arange(0, PARTIALS)
    if row is not None or SIGNS < 0:
        b_p = tl.load(partial + o_p, mask=o_p < n, other=0)  # [PARTIALS]
        plain = amax_value(tl.max(b_p, 0))
        if row is not None:
            tl.store(row, plain)
        if SIGNS < 0 and col is not None:
            tl.store(col, plain)
    if SIGNS >= 0:
        b_p = tl.load(partial + n + o_p, mask=o_p < n, other=0)
        tl.store(col, amax_value(tl.max(b_p, 0)))


@triton.jit
def line_kernel(x, out, M, K, stride, COL: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    """`out`: the amax of each row, or with COL of each column."""
    i_p = tl.program_id(0).to(tl.int64)
    if COL:
        o_k = i_p * BK + tl.arange(0, BK)
        b_max = tl.zeros((BM, BK), tl.int32)
        for m in range(0, M, BM):
            o_m = m + tl.arange(0, BM).to(tl.int64)
            mask = (o_m[:, None] < M) & (o_k[None, :] < K)
            b_x = tl.load(x + o_m[:, None] * stride + o_k[None, :], mask=mask, other=0.0)
            b_max = tl.maximum(b_max, abs_bits(b_x))
        tl.store(out + o_k, amax_value(tl.max(b_max, 0)), mask=o_k < K)
    else:
        o_m = i_p * BM + tl.arange(0, BM)
        b_max = tl.zeros((BM, BK), tl.int32)
        for k in range(0, K, BK):
            o_k = k + tl.arange(0, BK)
            mask = (o_m[:, None] < M) & (o_k[None, :] < K)
            b_x = tl.load(x + o_m[:, None] * stride + o_k[None, :], mask=mask, other=0.0)
            b_max = tl.maximum(b_max, abs_bits(b_x))
        tl.store(out + o_m, amax_value(tl.max(b_max, 1)), mask=o_m < M)


def amax_fp4(
    x: Tensor,
    *,
    row: Cast | None,
    col: Cast | None,
    row_amax: Tensor | None,
    col_amax: Tensor | None,
) -> None:
    """`row_amax`, `col_amax` = the global amaxes of `x[M, K]` under the casts: `reference.amax`.

    fp32 (1,), of the transformed columns if `col` transforms; or one per row of the operand, (M,)
    and (K,), if a cast is row-scaled.
    """
    if row is not None and row.transforms:
        raise ValueError("row: the Hadamard transform belongs to column copies")
    if row is not None and row.row_scaled:
        _run(_lines(x, row_amax, col=False))
        row = None
    if col is not None and col.row_scaled:
        _run(_lines(x, col_amax, col=True))
        col = None
    if row is None and col is None:
        return
    signs = -1 if col is None else col.hadamard
    launch = _partial(x, plain=row is not None or signs < 0, signs=signs)
    _run(launch)
    row_out = row_amax if row is not None else None
    col_out = col_amax if col is not None else None
    _finish(launch.args["partial"], launch.programs, row_out, col_out, signs).run()


def _run(launch: Launch) -> None:
    if launch.programs > 0:
        launch.run()


def _partial(x: Tensor, *, plain: bool, signs: int, config: Config | None = None) -> Launch:
    config = config or CONFIGS["plain" if signs < 0 else "hadamard"]
    m, k = x.shape
    tiles = config.tiles(m, k)
    programs = min(tiles, PARTIALS)
    even = config.even(m, k)
    aligned = x.data_ptr() % 4 == 0 and x.stride(0) % 2 == 0
    args = {
        "x": x,
        "partial": torch.empty(2 * programs, dtype=torch.int32, device=x.device),
        "M": m,
        "K": k,
        "stride": x.stride(0),
        "tiles": tiles,
        "PLAIN": plain,
        "SIGNS": signs,
        "WORDS": even and x.dtype == torch.bfloat16 and aligned and env.takes_words(x.device),
        "EVEN": even,
        "FAR": config.m * x.stride(0) >= 2**31,
        "BM": config.m,
        "BK": config.k,
    }
    return Launch(amax_kernel, programs, args, config)


def _finish(partial: Tensor, n: int, row: Tensor | None, col: Tensor | None, signs: int) -> Launch:
    args = {
        "partial": partial,
        "n": n,
        "row": row,
        "col": col,
        "SIGNS": signs,
        "PARTIALS": PARTIALS,
    }
    return Launch(finish_kernel, 1, args, Config(1, 1, 4))


def _lines(x: Tensor, out: Tensor | None, *, col: bool) -> Launch:
    config = CONFIGS["cols" if col else "rows"]
    m, k = x.shape
    programs = cdiv(k, config.k) if col else cdiv(m, config.m)
    args = {
        "x": x,
        "out": out,
        "M": m,
        "K": k,
        "stride": x.stride(0),
        "COL": col,
        "BM": config.m,
        "BK": config.k,
    }
    return Launch(line_kernel, programs, args, config)


def variants() -> Iterator[Variant]:
    """The pass with and without the transform, its end, and amaxes of rows and columns."""
    one = torch.empty(1, dtype=torch.float32, device="meta")
    bits = torch.empty(1, dtype=torch.int32, device="meta")
    for sample in samples():
        for name, plain, signs in (
            ("plain", True, -1),
            ("transformed", False, HADAMARD_SIGN_MASK),
            ("both", True, HADAMARD_SIGN_MASK),
        ):
            launch = _partial(sample.x, plain=plain, signs=signs)
            yield Variant.of(f"fp4_amax_{name}_{sample.tag}", launch)
        for name, is_col in (("rows", False), ("cols", True)):
            yield Variant.of(f"fp4_amax_{name}_{sample.tag}", _lines(sample.x, one, col=is_col))
    yield Variant.of("fp4_amax_finish", _finish(bits, 1, one, one, HADAMARD_SIGN_MASK))
