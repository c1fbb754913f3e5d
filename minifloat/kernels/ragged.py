"""FP8 casts of matrices whose rows come in groups: all members in one launch, sizes on the device.

A program has a tile of one member, and does with it what the kernel for a single matrix does: the
codes and scales are those of the member by itself, bit for bit. Where they go is one of

    EQUAL   members of as many rows each; a member's parts lie behind those of the one before it
    FLAT    the same, of any sizes; `at[part, e]` is where the part of member e begins
    SPREAD  (neither) the row copy is that of the whole matrix; members lie side by side in the
            column copy `[K, pitch]`, which begins for each at a multiple of a PAD that every block
            divides, with zeros up to the next one: a column copy of the rows so spread out

Nothing is written outside [0, rows) and the members' places, whatever the sizes are.
"""

# mypy: disable-error-code="assignment, misc, unreachable"
# (In the compiled bodies, tuples grow.)

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import env
from ..formats import E4M3, FORMATS, FP32_MAX, Cast, Scale, cdiv, rup
from ._blocks_device import line_amax, max4, store_square_scale
from ._device import FP8, abs_bits, amax, encode, fp8_scale, fp32, top2
from ._ragged_device import (
    find_scale,
    load_rows,
    load_words,
    offset,
    store_columns,
    store_rows,
    store_words,
)
from .blocks import E8M0_PAD, e8m0_blocks
from .members import ENTRY, TILE, locate, tile_count
from .variant import Config, Launch, Variant, samples

__all__ = ["Group", "cast_blocks", "cast_current", "cast_scaled", "variants"]

PARTS = ("row_data", "row_scale", "col_data", "col_scale")
CONFIGS = {
    "amax": Config(32, 256, 4),
    "row": Config(32, 256, 4),
    "col": Config(64, 64, 4),
    # H200, bf16, us: 16384x4096 spread 81 for 87, 8x4096x4096 equal 155 for 149 (copy_: 65, 130).
    "both": Config(64, 64, 4),
    "equal_both": Config(64, 128, 4),
    # Beside those, both with amaxes: 16384x4096 spread 73 for 76, by Zipf's sizes 75 for 89 (one
    # address takes most of the amaxes); 32x2048x7168 equal 462 for 503 (copy_: 66, 441).
    "words": Config(128, 128, 4),
    "transpose": Config(64, 64, 4),
    "f32": Config(128, 128, 16),
    "e8m0": Config(64, 128, 4),
}
# Tiles of a tensorwise cast, where a program has to look up its member before it reads anything.
PARTS_OF_A_PROGRAM = 2


class Group(NamedTuple):
    """How the rows of a matrix are grouped, and where copies of the members go.

    Without `tiles`, in `num` equal members. `at[4, num]` are the offsets of PARTS in FLAT buffers;
    `pitch` is the width of a SPREAD column copy.
    """

    num: int
    tiles: Tensor | None = None
    at: Tensor | None = None
    pitch: int = 0

    def mode(self, rows: int, columns: int, config: Config) -> dict[str, Any]:
        """What kernels are told of it."""
        equal = self.tiles is None
        return {
            "tiles": self.tiles,
            "at": self.at,
            "rows": rows // self.num if equal else 0,
            "num": self.num,
            "pitch": self.pitch,
            "EQUAL": equal,
            "FLAT": equal or self.at is not None,
            "EVEN_M": equal and rows > 0 and (rows // self.num) % TILE == 0,
            "EVEN_K": columns > 0 and columns % config.k == 0,
            "TILE": TILE,
            "ENTRY": ENTRY,
            "BM": config.m,
            "BK": config.k,
        }

    def count(self, rows: int) -> int:
        """Tiles of TILE rows."""
        if self.tiles is None:
            return self.num * max(1, cdiv(rows // self.num, TILE))
        return tile_count(rows, self.num)


@triton.jit
def amax_kernel(
    x, out, tiles, rows, K, stride, EQUAL: tl.constexpr, EVEN_M: tl.constexpr,
    EVEN_K: tl.constexpr, TILE: tl.constexpr, ENTRY: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """`out[e]`: a running maximum of the bits of |x| over member e."""
    n_k = tl.cdiv(K, BK)
    i_t = tl.program_id(0) // n_k
    o_k = (tl.program_id(0) % n_k) * BK + tl.arange(0, BK)
    e, at_row, start, end, _, _ = locate(tiles, i_t, rows, EQUAL, TILE, ENTRY)
    if e >= 0:
        b_max = tl.zeros((BM, BK), tl.int32)
        for m in tl.static_range(0, TILE, BM):
            o_l = at_row + m + tl.arange(0, BM)
            b_x = load_rows(x, o_l, o_k, start, end - start, K, stride, EVEN_M, EVEN_K)
            b_max = tl.maximum(b_max, abs_bits(b_x))
        tl.atomic_max(out + e, tl.max(b_max), sem="relaxed")


@triton.jit
def cast_kernel(
    x, row, col, source, seen, scale_inv, kept, tiles, rows, eps, K, stride, pitch,
    EQUAL: tl.constexpr, FLAT: tl.constexpr, EVEN_M: tl.constexpr, EVEN_K: tl.constexpr,
    SCALED: tl.constexpr, SEEN: tl.constexpr, KEEP: tl.constexpr, ROW: tl.constexpr,
    COL: tl.constexpr, LIMIT: tl.constexpr, TYPE: tl.constexpr, INF: tl.constexpr,
    POW2: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr, ENTRY: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Codes of `x * scale[e]`; `scale_inv[e]` = 1 / scale.

    SCALED: `source[e]` is the scale, and the bits of |x| go into `seen[e]`, a running maximum.
    Otherwise `source[e]` are the bits of the member's amax. KEEP: `kept[e]` receives the scale.
    """
    n_k = tl.maximum(tl.cdiv(K, BK), 1)
    SUB: tl.constexpr = TILE // (BM * PARTS)
    i_p = tl.num_programs(0) - 1 - tl.program_id(0)
    i_k = i_p % n_k
    e, at_row, start, end, place, place_end = locate(
        tiles, i_p // (n_k * SUB), rows, EQUAL, TILE, ENTRY
    )
    size = end - start
    local = at_row + ((i_p // n_k) % SUB) * (BM * PARTS)
    if (e >= 0) & ((local < size) | (not FLAT) | (local == 0)):
        o_k = i_k * BK + tl.arange(0, BK)
        # All is asked for before anything is stored: one latency for the parts of a program.
        parts = ()
        for i in tl.static_range(PARTS):
            o_l = local + i * BM + tl.arange(0, BM)
            parts = parts + (load_rows(x, o_l, o_k, start, size, K, stride, EVEN_M, EVEN_K),)
        first = (local == 0) & (i_k == 0)
        scale = find_scale(source, scale_inv, kept, eps, e, first, SCALED, KEEP, LIMIT, INF, POW2)
        if SCALED and SEEN:
            b_top = abs_bits(parts[0])  # [BM, BK]
            for i in tl.static_range(1, PARTS):
                b_top = tl.maximum(b_top, abs_bits(parts[i]))
            tl.atomic_max(seen + e, tl.max(b_top), sem="relaxed")
        for i in tl.static_range(PARTS):
            o_l = local + i * BM + tl.arange(0, BM)
            if ROW:
                b_q = encode(parts[i].to(tl.float32) * scale, LIMIT, TYPE, True)  # [BM, BK]
                store_rows(row, b_q, o_l, o_k, start, size, K, EVEN_M, EVEN_K)
            if COL:
                b_q = encode(tl.trans(parts[i]).to(tl.float32) * scale, LIMIT, TYPE, True)
                store_columns(
                    col, b_q, o_l, o_k, start, size, place, K, pitch, FLAT, EVEN_M, EVEN_K
                )


@triton.jit
def words_kernel(
    x, row, col, source, seen, scale_inv, kept, tiles, rows, eps, K, stride, pitch,
    EQUAL: tl.constexpr, EVEN_M: tl.constexpr, SCALED: tl.constexpr, SEEN: tl.constexpr,
    KEEP: tl.constexpr, LIMIT: tl.constexpr, TYPE: tl.constexpr, INF: tl.constexpr,
    POW2: tl.constexpr, TILE: tl.constexpr, ENTRY: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """`cast_kernel` for both copies of bf16, in words: SPREAD, or EQUAL members of whole tiles; K
    in whole ones. 8 instructions per element in place of 22."""
    n_k = K // BK
    SUB: tl.constexpr = TILE // BM
    i_p = tl.num_programs(0) - 1 - tl.program_id(0)
    i_k = i_p % n_k
    e, at_row, start, end, place, place_end = locate(
        tiles, i_p // (n_k * SUB), rows, EQUAL, TILE, ENTRY
    )
    size = end - start
    local = at_row + ((i_p // n_k) % SUB) * BM
    if e >= 0:
        o_l = local + 4 * tl.arange(0, BM // 4)
        o_w = i_k * (BK // 2) + tl.arange(0, BK // 2)
        o_k = i_k * BK + tl.arange(0, BK)
        w0, w1, w2, w3 = load_words(x, o_l, o_w, start, size, stride, EVEN_M)  # [BM/4, BK/2]
        first = (local == 0) & (i_k == 0)
        scale = find_scale(source, scale_inv, kept, eps, e, first, SCALED, KEEP, LIMIT, INF, POW2)
        if SCALED and SEEN:
            tl.atomic_max(seen + e, top2(max4(w0, w1, w2, w3)), sem="relaxed")
        at = start * K + local if EQUAL else place + local
        store_words(
            w0, w1, w2, w3, row, col, scale, o_l, o_w, o_k, start, size, at, K,
            rows if EQUAL else pitch, LIMIT, TYPE, EVEN_M,
        )  # fmt: skip


@triton.jit
def transpose_kernel(
    codes, col, tiles, rows, K, pitch, EQUAL: tl.constexpr, FLAT: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_K: tl.constexpr, TILE: tl.constexpr, ENTRY: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The column copy of a row copy `[M, K]`, of codes that serve both."""
    n_k = tl.cdiv(K, BK)
    SUB: tl.constexpr = TILE // BM
    i_p = tl.program_id(0)
    e, at_row, start, end, place, place_end = locate(
        tiles, i_p // (n_k * SUB), rows, EQUAL, TILE, ENTRY
    )
    local = at_row + ((i_p // n_k) % SUB) * BM
    size = end - start
    if (e >= 0) & ((local < size) | (not FLAT)):
        o_l = local + tl.arange(0, BM)
        o_k = (i_p % n_k) * BK + tl.arange(0, BK)
        b_q = load_rows(codes, o_l, o_k, start, size, K, K, EVEN_M, EVEN_K)
        store_columns(
            col, tl.trans(b_q), o_l, o_k, start, size, place, K, pitch, FLAT, EVEN_M, EVEN_K
        )


@triton.jit
def f32_kernel(
    x, row, row_scale, col, col_scale, tiles, at, rows, num, eps, M, K, stride, pitch,
    row_step, col_step,
    EQUAL: tl.constexpr, FLAT: tl.constexpr, EVEN_M: tl.constexpr, EVEN_K: tl.constexpr,
    SQUARE: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr, LIMIT: tl.constexpr,
    TYPE: tl.constexpr, INF: tl.constexpr, POW2: tl.constexpr, TILE: tl.constexpr,
    ENTRY: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Blocks with fp32 scales, a tile the length of one. SPREAD scales are those of 1-D blocks:
    `row_scale[K/128, M rounded up to 4]`, `col_scale[pitch/128, K rounded up to 4]`."""
    n_k = tl.cdiv(K, BK)
    i_k = tl.program_id(0) % n_k
    e, at_row, start, end, place, place_end = locate(
        tiles, tl.program_id(0) // n_k, rows, EQUAL, TILE, ENTRY
    )
    size = end - start
    if (e >= 0) & ((at_row < end - start) | (not FLAT)):
        i_m = (at_row) // BM
        o_l = at_row + tl.arange(0, BM)
        o_k = i_k * BK + tl.arange(0, BK)
        b_x = load_rows(x, o_l, o_k, start, size, K, stride, EVEN_M, EVEN_K)  # [BM, BK]
        if SQUARE:
            s = fp8_scale(amax(b_x, None), eps, LIMIT, INF, POW2)
            b_r = s + tl.zeros((BM,), tl.float32)
            b_c = s + tl.zeros((BK,), tl.float32)
        else:
            if ROW:
                b_r = fp8_scale(line_amax(b_x, 1, BM), eps, LIMIT, INF, POW2)
            if COL:
                b_c = fp8_scale(line_amax(b_x, 0, BK), eps, LIMIT, INF, POW2)
        if ROW:
            b_q = encode(b_x.to(tl.float32) * b_r[:, None], LIMIT, TYPE, False)
            store_rows(row, b_q, o_l, o_k, start, size, K, EVEN_M, EVEN_K)
            if FLAT:
                row_scale += offset(at, e, row_step, num, 1, EQUAL)
            if FLAT and SQUARE:
                store_square_scale(row_scale, tl.div_rn(1.0, s), i_m, i_k, n_k)
            else:
                width = tl.cdiv(size, 4) * 4 if FLAT else size
                p_s = row_scale + i_k * (width if FLAT else tl.cdiv(M, 4) * 4)
                b_d = tl.where(o_l < size, tl.div_rn(1.0, b_r), 0.0)
                tl.store(p_s + o_l + (0 if FLAT else start), b_d, mask=o_l < width)
        if COL:
            b_q = encode(tl.trans(b_x).to(tl.float32) * b_c[:, None], LIMIT, TYPE, False)
            store_columns(col, b_q, o_l, o_k, start, size, place, K, pitch, FLAT, EVEN_M, EVEN_K)
            if FLAT:
                col_scale += offset(at, e, col_step, num, 3, EQUAL)
            if FLAT and SQUARE:
                store_square_scale(col_scale, tl.div_rn(1.0, s), i_k, i_m, tl.cdiv(size, BM))
            else:
                padded = tl.cdiv(K, 4) * 4
                p_s = col_scale + (i_m if FLAT else place // BM + i_m) * padded
                b_d = tl.where(o_k < K, tl.div_rn(1.0, b_c), 0.0)
                tl.store(p_s + o_k, b_d, mask=o_k < padded)


@triton.jit
def e8m0_kernel(
    x, row, row_scale, col, col_scale, tiles, at, rows, num, K, stride, row_step, col_step,
    EQUAL: tl.constexpr, FLAT: tl.constexpr, EVEN_M: tl.constexpr, EVEN_K: tl.constexpr,
    SQUARE: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr, LIMIT: tl.constexpr,
    RECIPROCAL: tl.constexpr, TYPE: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, ENTRY: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Codes with E8M0 scales, both copies in the orientation of x; a SPREAD column copy has its
    members' rows at their places."""
    wide = tl.cdiv(K, 128) * 128
    n_k = wide // BK
    SUB: tl.constexpr = TILE // BM
    SK: tl.constexpr = BK // BLOCK
    i_k = tl.program_id(0) % n_k
    e, at_row, start, end, place, place_end = locate(
        tiles, tl.program_id(0) // (n_k * SUB), rows, EQUAL, TILE, ENTRY
    )
    size = end - start
    if (e >= 0) & ((at_row < end - start) | (not FLAT)):
        local = at_row + ((tl.program_id(0) // n_k) % SUB) * BM
        o_l = local + tl.arange(0, BM)
        o_k = i_k * BK + tl.arange(0, BK)
        b_x = load_rows(x, o_l, o_k, start, size, K, stride, EVEN_M, EVEN_K)  # [BM, BK]
        ok_k = (o_k < K)[None, :]
        if ROW:
            TM: tl.constexpr = BLOCK if SQUARE else 1
            b_q, _, b_e = e8m0_blocks(b_x, TM, BLOCK, LIMIT, RECIPROCAL, TYPE, BM, BK)
            store_rows(row, b_q, o_l, o_k, start, size, K, EVEN_M, EVEN_K)
            b_e = tl.reshape(tl.broadcast_to(b_e[:, None, :], (BM // TM, TM, SK)), (BM, SK))
            b_e = tl.where(o_l[:, None] < size, b_e, 0).to(tl.uint8)
            o_s = i_k * SK + tl.arange(0, SK)
            if FLAT:
                row_scale += offset(at, e, row_step, num, 1, EQUAL)
                high = tl.cdiv(size, 128) * 128
            else:
                row_scale += start * (wide // BLOCK)
                high = size
            p_s = row_scale + o_l[:, None] * (wide // BLOCK) + o_s[None, :]
            tl.store(p_s, b_e, mask=o_l[:, None] < high)
        if COL:
            TK: tl.constexpr = BLOCK if SQUARE else 1
            b_q, _, b_e = e8m0_blocks(b_x, BLOCK, TK, LIMIT, RECIPROCAL, TYPE, BM, BK)
            high = size if FLAT else place_end - place
            p_q = col + ((start if FLAT else place) + o_l)[:, None] * K + o_k[None, :]
            tl.store(p_q, b_q, mask=(o_l[:, None] < high) & ok_k)
            b_e = tl.reshape(
                tl.broadcast_to(b_e[:, :, None], (BM // BLOCK, BK // TK, TK)), (BM // BLOCK, BK)
            )
            b_e = tl.where(ok_k, b_e, 0).to(tl.uint8)
            o_s = local // BLOCK + tl.arange(0, BM // BLOCK)
            if FLAT:
                col_scale += offset(at, e, col_step, num, 3, EQUAL)
                blocks = tl.cdiv(size, 4 * BLOCK) * 4
            else:
                col_scale += (place // BLOCK) * wide
                blocks = (place_end - place) // BLOCK
            p_s = col_scale + o_s[:, None] * wide + o_k[None, :]
            tl.store(p_s, b_e, mask=o_s[:, None] < blocks)


# -------------------------------------------------------------------------------------- launches
def cast_current(
    x: Tensor,
    group: Group,
    cast: Cast,
    *,
    row: Tensor | None,
    col: Tensor | None,
    scale_inv: Tensor,
    amax: Tensor,
    scale: Tensor | None = None,
) -> None:
    """Codes of each member under the scale of its amax; `amax`, `scale` and its reciprocal `[num]`
    are results as well."""
    bits = amax.view(torch.int32)
    bits.zero_()
    if x.numel() > 0:
        _amax(x, group, bits).run()
    _run(x, group, cast, row, col, source=bits, scale_inv=scale_inv, kept=scale)


def cast_scaled(
    x: Tensor,
    group: Group,
    cast: Cast,
    *,
    scale: Tensor,
    amax: Tensor | None,
    row: Tensor | None,
    col: Tensor | None,
    scale_inv: Tensor,
) -> None:
    """Codes of `x * scale[e]`; `amax[e]` (fp32) = max(amax[e], |x|)."""
    bits = None if amax is None else amax.view(torch.int32)
    _run(x, group, cast, row, col, source=scale, scale_inv=scale_inv, seen=bits, scaled=True)


def cast_blocks(
    x: Tensor,
    group: Group,
    cast: Cast,
    *,
    row_data: Tensor | None,
    row_scale: Tensor | None,
    col_data: Tensor | None,
    col_scale: Tensor | None,
    steps: tuple[int, int],
) -> None:
    """Codes and scales of each direction present; `steps`: scales of an EQUAL member's parts."""
    out = (row_data, row_scale, col_data, col_scale)
    fmt = cast.format
    if x.shape[1] == 0 or (x.shape[0] == 0 and group.tiles is None):
        return
    if fmt.scale is not Scale.F32:
        _e8m0(x, group, cast, out, steps).run()
    elif x.dtype == torch.float32 and row_data is not None and col_data is not None:
        # As in `tensorwise`: one kernel for both directions of fp32 is miscompiled.
        _f32(x, group, cast, (row_data, row_scale, None, None), steps).run()
        _f32(x, group, cast, (None, None, col_data, col_scale), steps).run()
    else:
        _f32(x, group, cast, out, steps).run()


def _run(
    x: Tensor, group: Group, cast: Cast, row: Tensor | None, col: Tensor | None, **options: Any
) -> None:
    if x.dtype != torch.float32 or col is None:
        _cast(x, group, cast, row, col, **options).run()
        return
    # See `tensorwise`: the column copy of an fp32 tensor is its row copy, transposed.
    codes = row if row is not None else torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    _cast(x, group, cast, codes, None, **options).run()
    _transpose(codes, x.shape, group, col).run()


def _amax(x: Tensor, group: Group, out: Tensor) -> Launch:
    config = CONFIGS["amax"]
    m, k = x.shape
    args = {"x": x, "out": out, "K": k, "stride": x.stride(0), **group.mode(m, k, config)}
    return Launch.of(amax_kernel, group.count(m) * cdiv(k, config.k), args, config)


def _cast(
    x: Tensor,
    group: Group,
    cast: Cast,
    row: Tensor | None,
    col: Tensor | None,
    *,
    source: Tensor,
    scale_inv: Tensor,
    seen: Tensor | None = None,
    kept: Tensor | None = None,
    scaled: bool = False,
) -> Launch:
    element = cast.format.element
    assert element is not None
    kind = "both" if row is not None and col is not None else "row" if col is None else "col"
    config = CONFIGS["equal_both" if kind == "both" and group.tiles is None else kind]
    parts = 1 if group.tiles is None else PARTS_OF_A_PROGRAM
    fn: Any = cast_kernel
    if _in_words(x, group, row, col):
        fn, config, parts = words_kernel, CONFIGS["words"], 1
    m, k = x.shape
    args = {
        "x": x,
        "row": row,
        "col": col,
        "source": source,
        "seen": seen,
        "scale_inv": scale_inv,
        "kept": kept,
        "eps": cast.eps,
        "K": k,
        "stride": x.stride(0),
        "SCALED": scaled,
        "SEEN": seen is not None,
        "KEEP": kept is not None,
        "ROW": row is not None,
        "COL": col is not None,
        "LIMIT": element.max,
        "TYPE": FP8[element],
        "INF": FP32_MAX,
        "POW2": cast.pow2,
        "PARTS": parts,
        **group.mode(m, k, config),
    }
    # A matrix without columns still has scales.
    tiles = group.count(m) * (TILE // (config.m * parts))
    programs = tiles * max(1, cdiv(k, config.k))
    return Launch.of(fn, programs, args, config)


def _in_words(x: Tensor, group: Group, row: Tensor | None, col: Tensor | None) -> bool:
    """Whether both copies can be made in words of two bf16 numbers, and of four codes: members of
    the column copy then begin and end with whole words."""
    if row is None or col is None or x.dtype is not torch.bfloat16:
        return False
    if not env.takes_words(x.device):
        return False
    m, k = x.shape
    aligned = x.data_ptr() % 4 == 0 and row.data_ptr() % 2 == 0 and col.data_ptr() % 4 == 0
    if not aligned or x.stride(0) % 2 != 0 or k == 0 or k % CONFIGS["words"].k != 0:
        return False
    return group.at is None if group.tiles is not None else m > 0 and (m // group.num) % TILE == 0


def _transpose(codes: Tensor, shape: torch.Size, group: Group, col: Tensor) -> Launch:
    config = CONFIGS["transpose"]
    m, k = shape
    args = {"codes": codes, "col": col, "K": k, **group.mode(m, k, config)}
    programs = group.count(m) * (TILE // config.m) * cdiv(k, config.k)
    return Launch.of(transpose_kernel, programs, args, config)


Out = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def _block_args(
    x: Tensor, group: Group, cast: Cast, out: Out, steps: tuple[int, int], config: Config
) -> dict[str, Any]:
    element = cast.format.element
    assert element is not None
    m, k = x.shape
    return {
        "x": x,
        "row": out[0],
        "row_scale": out[1],
        "col": out[2],
        "col_scale": out[3],
        "M": m,
        "K": k,
        "stride": x.stride(0),
        "row_step": steps[0],
        "col_step": steps[1],
        "SQUARE": cast.format.square,
        "ROW": out[0] is not None,
        "COL": out[2] is not None,
        "LIMIT": element.max,
        "TYPE": FP8[element],
        **group.mode(m, k, config),
    }


def _f32(x: Tensor, group: Group, cast: Cast, out: Out, steps: tuple[int, int]) -> Launch:
    config = CONFIGS["f32"]
    args = _block_args(x, group, cast, out, steps, config)
    args |= {"eps": cast.eps, "INF": torch.finfo(x.dtype).max, "POW2": cast.pow2}
    programs = group.count(x.shape[0]) * cdiv(x.shape[1], config.k)
    return Launch.of(f32_kernel, programs, args, config)


def _e8m0(x: Tensor, group: Group, cast: Cast, out: Out, steps: tuple[int, int]) -> Launch:
    config = CONFIGS["e8m0"]
    fmt = cast.format
    assert fmt.element is not None and fmt.tile is not None
    args = _block_args(x, group, cast, out, steps, config)
    args |= {"RECIPROCAL": fp32(1.0 / fmt.element.max), "BLOCK": fmt.tile[1]}
    columns = rup(x.shape[1], E8M0_PAD) // config.k
    programs = group.count(x.shape[0]) * (TILE // config.m) * columns
    return Launch.of(e8m0_kernel, programs, args, config)


def variants() -> Iterator[Variant]:
    """Each cast, by where its copies go."""
    code = torch.empty(1, dtype=torch.uint8, device="meta")
    one = torch.empty(1, dtype=torch.float32, device="meta")
    bits = torch.empty(1, dtype=torch.int32, device="meta")
    places = torch.empty(4, 64, dtype=torch.int64, device="meta")
    table = torch.empty(tile_count(4097, 64), ENTRY, dtype=torch.int32, device="meta")
    groups = {
        "equal": Group(1),
        "flat": Group(64, table, places),
        "spread": Group(64, table, None, 4096),
    }
    for sample in samples():
        for mode, group in groups.items():
            tag = f"{mode}_{sample.tag}"
            yield Variant.of(f"ragged_amax_{tag}", _amax(sample.x, group, bits))
            launch = _transpose(code, sample.x.shape, group, code)
            yield Variant.of(f"ragged_transpose_{tag}", launch)
            if mode != "spread" and not sample.every:
                continue
            both = sample.x.dtype is not torch.float32
            for fmt in FORMATS.values():
                if fmt.tile is not None or fmt.element is None:
                    continue
                cast, out = Cast(fmt.name), (code, code if both else None)
                launch = _cast(sample.x, group, cast, *out, source=bits, scale_inv=one, kept=one)
                yield Variant.of(f"ragged_current_{fmt.name}_{tag}", launch)
                launch = _cast(
                    sample.x, group, cast, *out, source=one, scale_inv=one, seen=bits, scaled=True
                )
                yield Variant.of(f"ragged_scaled_{fmt.name}_{tag}", launch)
            for fmt in FORMATS.values():
                if fmt.tile is None or fmt.element is not E4M3:
                    continue
                scale = one if fmt.scale is Scale.F32 else code
                parts = (code, scale, code, scale) if both else (code, scale, None, None)
                make = _f32 if fmt.scale is Scale.F32 else _e8m0
                launch = make(sample.x, group, Cast(fmt.name), parts, (1, 1))
                yield Variant.of(f"ragged_{fmt.name}_{tag}", launch)
