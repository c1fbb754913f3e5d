"""FP8 with one scale for the tensor: amax, current scaling, delayed scaling.

The column copy is the transposed row copy. It is made from a transposed tile of the *source*:
16-bit elements cross shared memory eight at a time (ldmatrix.trans), where codes would cross it
byte by byte, and casting twice costs less than that. In *words* of two bf16 numbers four codes of a
column are made in one thread, and words of them are transposed. Tiles run from the last to the
first: what the producer, or the amax pass, touched last is still in L2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import env
from ..formats import E4M3, E5M2, FP32_MAX, Element, cdiv, rup
from ._blocks_device import ABS2, max4, store_words
from ._device import (
    FP8,
    abs_bits,
    encode,
    fp8_scale,
    inside,
    load_tile,
    max2,
    padded,
    store_tile,
    top2,
)
from ._produce_device import in_words, load_four
from .transpose import transpose
from .variant import Config, Launch, Sample, Variant, samples

__all__ = [
    "PARTIALS",
    "amax",
    "cast_current",
    "cast_scaled",
    "find_scale",
    "finish",
    "store_scaled",
    "variants",
]

# Programs of an amax pass, each with a partial maximum that every program of the cast reads again:
# about eight per multiprocessor of an H200. 512 are 2% slower, 4096 as fast.
PARTIALS = 1024
# The fastest of scripts/tune_kernels on an H200 at 8192x8192 bf16, or within 1% of it. A column
# store needs m = 128 to fill 128-byte lines.
CONFIGS = {
    "amax": Config(1, 8192, 8),
    "finish": Config(1, PARTIALS, 4),
    "row": Config(64, 256, 4),
    "col": Config(128, 64, 4),
    "both": Config(64, 128, 4),
}
# Below LARGE elements the device is not full: smaller tiles end sooner. H200, us, bf16 row+col:
# 2048x768 3.5 for 3.8, 3072x768 4.2 for 4.8, 4096x4096 19.9 for 20.3. In CUDA graphs, sources not
# in L2, for those of before: amax of 2048x3072 5.4 for 6.2, row of 3072x768 3.9 for 4.2, of
# 4096x1024 5.2 for 5.6, column 4.0 for 4.4, 5.1 for 5.4.
LARGE = 1 << 25
SMALL_CONFIGS = {
    "amax": Config(1, 2048, 4),
    "row": Config(16, 128, 4),
    "col": Config(32, 64, 4),
    "both": Config(64, 64, 4),
}
# In words, of any size. H200, us, for those of the tiles above: 8192x8192 both 73 for 75, row 53
# for 55, column 55 for 60, amax 43 for 44; in CUDA graphs 2048x3072 both 8.5 for 10.5, row 6.8 for
# 8.1, column 7.1 for 9.0. Others were as fast, or 2% faster at one of these.
WORDS = {
    "amax": Config(1, 2048, 4),
    "row": Config(32, 128, 4),
    "col": Config(64, 128, 4),
    "both": Config(64, 128, 4),
}


@triton.jit
def amax_kernel(x, partial, tiles, columns, K, stride, BK: tl.constexpr):
    """`partial[p]`: bits of the largest |x| in tiles p, p + programs, ...; a tile is 1 x BK."""
    i_p = tl.program_id(0).to(tl.int64)
    b_max = tl.zeros((BK,), tl.int32)  # [BK]
    for i_t in range(i_p, tiles, tl.num_programs(0)):
        o_k = (i_t % columns) * BK + tl.arange(0, BK)
        b_x = tl.load(x + (i_t // columns) * stride + o_k, mask=o_k < K, other=0.0)  # [BK]
        b_max = tl.maximum(b_max, abs_bits(b_x))
    tl.store(partial + i_p, tl.max(b_max, 0))


@triton.jit
def words_amax_kernel(x, partial, tiles, columns, K, stride, FLAT: tl.constexpr, BK: tl.constexpr):
    """`amax_kernel` of K words of two bf16 numbers, rows `stride` words apart; FLAT: of one row."""
    i_p = tl.program_id(0).to(tl.int64)
    p_x = x.to(tl.pointer_type(tl.int32), bitcast=True)
    b_max = tl.zeros((BK,), tl.int32)  # [BK]
    for i_t in range(i_p, tiles, tl.num_programs(0)):
        i_m, i_k = 0, i_t
        if not FLAT:
            i_m, i_k = i_t // columns, i_t % columns
        o_k = i_k * BK + tl.arange(0, BK)
        b_w = tl.load(p_x + i_m * stride + o_k, mask=o_k < K, other=0)  # [BK]
        b_max = max2(b_max, b_w & ABS2)
    tl.store(partial + i_p, top2(b_max))


@triton.jit
def load_max(partial, n, PARTIALS: tl.constexpr):
    """fp32 maximum of n <= PARTIALS bit patterns."""
    o_p = tl.arange(0, PARTIALS)
    b_p = tl.load(partial + o_p, mask=o_p < n, other=0)  # [PARTIALS]
    return tl.max(b_p, 0).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["n"])
def finish_kernel(partial, n, out, PARTIALS: tl.constexpr):
    """`out[0]`: the maximum of the partial ones."""
    tl.store(out, load_max(partial, n, PARTIALS))


@triton.jit
def find_scale(
    source, n, top, amax, scale_inv, kept, eps, i_p, SCALED: tl.constexpr, AMAX: tl.constexpr,
    KEEP: tl.constexpr, LIMIT: tl.constexpr, INF: tl.constexpr, POW2: tl.constexpr,
    PARTIALS: tl.constexpr,
):  # fmt: skip
    """The scale of a tensor, as `cast_kernel` has it; `top` are the bits of this tile's amax."""
    if SCALED:
        scale = tl.load(source)
        largest = scale
        if AMAX:  # of many tiles few are larger than what is known, and atomics wait in line
            tl.atomic_max(amax, top, mask=top > tl.load(amax), sem="relaxed")
    else:
        largest = load_max(source, n, PARTIALS)
        scale = fp8_scale(largest, eps, LIMIT, INF, POW2)
    if i_p == 0:
        tl.store(scale_inv, tl.div_rn(1.0, scale))
        if KEEP:
            tl.store(kept, largest)
    return scale


@triton.jit
def store_scaled(
    b_x, row, col, source, n, amax, scale_inv, kept, eps, i_p, o_m, o_k, M, K,
    SCALED: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr, AMAX: tl.constexpr,
    KEEP: tl.constexpr, LIMIT: tl.constexpr, TYPE: tl.constexpr, INF: tl.constexpr,
    POW2: tl.constexpr, PARTIALS: tl.constexpr, EVEN: tl.constexpr, PAD: tl.constexpr = 1,
):  # fmt: skip
    """Codes of the tile `b_x` at `[o_m, o_k]`, and zeros up to multiples of PAD."""
    top = tl.max(abs_bits(b_x)) if SCALED and AMAX else 0
    scale = find_scale(
        source, n, top, amax, scale_inv, kept, eps, i_p, SCALED, AMAX, KEEP, LIMIT, INF, POW2,
        PARTIALS,
    )  # fmt: skip
    if ROW:
        b_y = inside(b_x.to(tl.float32) * scale, o_m, o_k, M, K, PAD)  # [BM, BK]
        b_q = encode(b_y, LIMIT, TYPE, True)
        store_tile(row, b_q, o_m, o_k, padded(M, PAD), padded(K, PAD), EVEN)
    if COL:
        b_y = inside(tl.trans(b_x).to(tl.float32) * scale, o_k, o_m, K, M, PAD)  # [BK, BM]
        b_q = encode(b_y, LIMIT, TYPE, True)
        store_tile(col, b_q, o_k, o_m, padded(K, PAD), padded(M, PAD), EVEN)


@triton.jit(do_not_specialize=["n"])
def cast_kernel(
    x,
    row,
    col,
    source,
    n,
    amax,
    scale_inv,
    kept,
    eps,
    M,
    K,
    stride,
    SCALED: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    AMAX: tl.constexpr,
    KEEP: tl.constexpr,
    LIMIT: tl.constexpr,
    TYPE: tl.constexpr,
    INF: tl.constexpr,
    POW2: tl.constexpr,
    PARTIALS: tl.constexpr,
    EVEN: tl.constexpr,
    PAD: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """`row[M, K]`, `col[K, M]` = codes of `x * scale`; `scale_inv[0]` = 1/scale.

    Both have zeros up to multiples of PAD.

    SCALED: `source[0]` is the scale, and the bits of |x| go into `amax[0]`, a running maximum.
    Otherwise `source[:n]` holds the bits of partial amaxes, and every program derives the scale.
    KEEP: `kept[0]` is what the scale came from, itself or the amax, for another cast of x.
    """
    i_p = tl.program_id(0)
    i_t = tl.num_programs(0) - 1 - i_p
    n_k = tl.cdiv(K, BK)
    i_m = (i_t // n_k).to(tl.int64)
    i_k = (i_t % n_k).to(tl.int64)
    o_m = i_m * BM + tl.arange(0, BM)
    o_k = i_k * BK + tl.arange(0, BK)
    # The tile is asked for before the scale, so that the two latencies overlap.
    b_x = load_tile(x, o_m, o_k, M, K, stride, EVEN)  # [BM, BK]
    store_scaled(
        b_x, row, col, source, n, amax, scale_inv, kept, eps, i_p, o_m, o_k, M, K,
        SCALED, ROW, COL, AMAX, KEEP, LIMIT, TYPE, INF, POW2, PARTIALS, EVEN, PAD,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n"])
def words_kernel(
    x, row, col, source, n, amax, scale_inv, kept, eps, M, K, stride,
    SCALED: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr, AMAX: tl.constexpr,
    KEEP: tl.constexpr, LIMIT: tl.constexpr, TYPE: tl.constexpr, INF: tl.constexpr,
    POW2: tl.constexpr, PARTIALS: tl.constexpr, EVEN: tl.constexpr, PAD: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """`cast_kernel` in BM x 128 tiles of words. Saturation is left to the hardware's cast."""
    i_p = tl.program_id(0)
    i_t = tl.num_programs(0) - 1 - i_p
    n_k = K // 128
    i_m = (i_t // n_k).to(tl.int64)
    i_k = (i_t % n_k).to(tl.int64)
    o_m = i_m * BM + 4 * tl.arange(0, BM // 4)
    p_x = x.to(tl.pointer_type(tl.int32), bitcast=True) + i_k * 64 + tl.arange(0, 64)[None, :]
    p_x += o_m[:, None] * (stride // 2)
    w0, w1, w2, w3 = load_four(p_x, stride // 2, o_m[:, None] < M, EVEN)  # [BM/4, 64]
    top = top2(max4(w0, w1, w2, w3)) if SCALED and AMAX else 0
    s = find_scale(
        source, n, top, amax, scale_inv, kept, eps, i_p, SCALED, AMAX, KEEP, LIMIT, INF, POW2,
        PARTIALS,
    )  # fmt: skip
    store_words(
        w0, w1, w2, w3, s, s, s, s, s, s, row, col, i_m, i_k, M, K, ROW, COL, LIMIT, TYPE,
        False, EVEN, BM, PAD,
    )  # fmt: skip


def amax(x: Tensor, out: Tensor) -> None:
    """`out` (fp32, one element) = max |x|, 0 for an empty x, NaN if x holds one."""
    finish(*_partial_amax(x), out)


def finish(partial: Tensor, n: int, out: Tensor) -> None:
    """`out[0]` = the maximum of n <= PARTIALS bit patterns, in fp32."""
    _finish(partial, n, out).run()


def cast_current(
    x: Tensor,
    element: Element,
    *,
    pow2: bool,
    eps: float,
    row: Tensor | None,
    col: Tensor | None,
    scale_inv: Tensor,
    amax: Tensor | None = None,
    amax_out: Tensor | None = None,
    pad: int = 1,
) -> None:
    """Codes of `x[M, K]` under the scale of its amax: `row[M, K]`, `col[K, M]`, `scale_inv` (1,).

    Zeros follow them up to multiples of `pad`, 1 or 16: whole tiles cover these.
    `amax` (fp32, one element) is used where it is known already, and spares a read of x; `amax_out`
    receives it for another time.
    """
    source, n = _partial_amax(x) if amax is None else (amax.view(torch.int32), 1)
    options = {"source": source, "n": n, "kept": amax_out, "pow2": pow2, "eps": eps, "pad": pad}
    _run(x, element, row, col, scale_inv, **options)


def cast_scaled(
    x: Tensor,
    element: Element,
    *,
    scale: Tensor,
    amax: Tensor | None,
    row: Tensor | None,
    col: Tensor | None,
    scale_inv: Tensor,
    scale_out: Tensor | None = None,
    pad: int = 1,
) -> None:
    """Codes of `x * scale`; `amax` (fp32, one element; None: not recorded) = max(amax, |x|).

    `scale_out` receives a copy of the scale, which moves on.
    """
    bits = None if amax is None else amax.view(torch.int32)
    options = {"source": scale, "amax": bits, "kept": scale_out, "scaled": True, "pad": pad}
    _run(x, element, row, col, scale_inv, **options)


def _run(
    x: Tensor,
    element: Element,
    row: Tensor | None,
    col: Tensor | None,
    scale_inv: Tensor,
    **options: Any,
) -> None:
    """Cast; the column copy of an fp32 tensor is its row copy, transposed by another launch.

    One kernel for both was miscompiled in partial fp32 tiles by Triton 3.6: wrong codes, or a crash
    of ptxas. Two launches move 7 bytes an element in place of 6.
    """
    if x.dtype != torch.float32 or col is None:
        _cast(x, element, row, col, scale_inv, **options).run()
        return
    codes = row if row is not None else torch.empty_like(col)
    codes = codes.view([rup(n, options["pad"]) for n in x.shape])
    _cast(x, element, codes, None, scale_inv, **options).run()
    transpose(codes, col)


def _partial_amax(x: Tensor) -> tuple[Tensor, int]:
    return _amax_launch(x).partials()


def _amax_launch(x: Tensor, config: Config | None = None, partials: int = PARTIALS) -> Launch:
    m, k = x.shape
    stride = x.stride(0)
    if x.is_contiguous():
        m, k = 1, m * k
        stride = k
    words = x.dtype is torch.bfloat16 and x.data_ptr() % 4 == k % 2 == stride % 2 == 0
    words = words and env.takes_words(x.device)
    if words:
        k, stride = k // 2, stride // 2
    config = config or _config(x, "amax", words)
    columns = cdiv(k, config.k)
    tiles = m * columns
    programs = max(1, min(tiles, partials))
    partial = torch.empty(programs, dtype=torch.int32, device=x.device)
    args = {
        "x": x,
        "partial": partial,
        "tiles": tiles,
        "columns": columns,
        "K": k,
        "stride": stride,
        "FLAT": m == 1,
        "BK": config.k,
    }
    return Launch.of(words_amax_kernel if words else amax_kernel, programs, args, config)


def _finish(partial: Tensor, n: int, out: Tensor) -> Launch:
    args = {"partial": partial, "n": n, "out": out, "PARTIALS": PARTIALS}
    return Launch(finish_kernel, 1, args, CONFIGS["finish"])


def _cast(
    x: Tensor,
    element: Element,
    row: Tensor | None,
    col: Tensor | None,
    scale_inv: Tensor,
    *,
    source: Tensor,
    n: int = 1,
    amax: Tensor | None = None,
    kept: Tensor | None = None,
    scaled: bool = False,
    pow2: bool = False,
    eps: float = 0.0,
    config: Config | None = None,
    pad: int = 1,
) -> Launch:
    kind = "both" if row is not None and col is not None else "row" if col is None else "col"
    m, k = x.shape
    out = [t for t in (row, col) if t is not None]
    words = in_words(x.dtype, m, k, x) and not any(t.data_ptr() % 4 for t in out)
    config = config or _config(x, kind, words)
    args = {
        "x": x,
        "row": row,
        "col": col,
        "source": source,
        "n": n,
        "amax": amax,
        "scale_inv": scale_inv,
        "kept": kept,
        "eps": eps,
        "M": m,
        "K": k,
        "stride": x.stride(0),
        "SCALED": scaled,
        "ROW": row is not None,
        "COL": col is not None,
        "AMAX": amax is not None,
        "KEEP": kept is not None,
        "LIMIT": element.max,
        "TYPE": FP8[element],
        "INF": FP32_MAX,
        "POW2": pow2,
        "PARTIALS": PARTIALS,
        "EVEN": config.even(m, k),
        "PAD": pad,
        "BM": config.m,
        "BK": config.k,
    }
    # An empty x still has a scale, so there is always a program 0 to write it.
    fn = words_kernel if words else cast_kernel
    return Launch.of(fn, max(1, config.tiles(m, k)), args, config)


def _config(x: Tensor, kind: str, words: bool) -> Config:
    return (WORDS if words else SMALL_CONFIGS if x.numel() < LARGE else CONFIGS)[kind]


def variants() -> Iterator[Variant]:
    """The amax pass and both casts, by direction and element."""
    bits = torch.empty(1, dtype=torch.int32, device="meta")
    one = torch.empty(1, dtype=torch.float32, device="meta")
    code = torch.empty(1, dtype=torch.uint8, device="meta")
    yield Variant.of("finish", _finish(bits, 1, one))
    words = torch.empty(4100, 4096, dtype=torch.bfloat16, device="meta")  # in partial tiles
    for sample in (*samples(), Sample(words, True)):
        yield Variant.of(f"amax_{sample.tag}", _amax_launch(sample.x))
        for direction, row, col in sample.directions:
            for element in (E4M3, E5M2) if sample.every else (E4M3,):
                name = f"{direction}_{element.name}_{sample.tag}"
                of = (sample.x, element, code if row else None, code if col else None, one)
                launch = _cast(*of, source=bits, pow2=element is E5M2)
                yield Variant.of(f"current_{name}", launch)
                launch = _cast(*of, source=one, amax=bits, scaled=True)
                yield Variant.of(f"scaled_{name}", launch)
                config = None if launch.fn is words_kernel else CONFIGS[direction]
                launch = _cast(*of, source=bits, kept=one, config=config)
                yield Variant.of(f"large_{name}", launch)
                if sample.x.shape[0] % 16:
                    launch = _cast(*of, source=one, amax=bits, scaled=True, pad=16)
                    yield Variant.of(f"roomy_{name}", launch)
    strided = torch.empty(4096, 8192, dtype=torch.bfloat16, device="meta")[:, :4096]
    yield Variant.of("amax_strided_bf16", _amax_launch(strided))
