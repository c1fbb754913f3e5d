"""NVFP4 casts of matrices whose rows come in groups: the amaxes of all members, then their codes.

See `ragged` for where copies go, and `fp4` for what is done with a tile: both kernels run the same
functions, with the addresses, sizes and amaxes of the tile's member.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import HADAMARD, HADAMARD_SIGN_MASK, Cast, cdiv, rup
from ._device import abs_bits
from ._fp4_device import amax_block, hadamard_sums, load_col_block
from ._ragged_device import offset
from .fp4 import BLOCKS, CONFIGS, PAD, POINTERS, cast_columns, cast_rows, global_factors, options
from .members import TILE, locate
from .ragged import Group
from .variant import Config, Launch, Variant, samples

__all__ = ["cast_fp4", "supports", "variants"]

AMAX = Config(128, 64, 4)

_INF = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7FC00000)


@triton.jit
def record(out, e, bits):
    """`out[e]`: a running maximum of bits, one NaN for all."""
    tl.atomic_max(out + e, tl.where(bits > _INF, _NAN, bits), sem="relaxed")


@triton.jit
def amax_kernel(
    x, row, col, tiles, rows, K, stride, PLAIN_ROW: tl.constexpr, PLAIN_COL: tl.constexpr,
    SIGNS: tl.constexpr, EQUAL: tl.constexpr, TILE: tl.constexpr, ENTRY: tl.constexpr,
    FAR: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """`row[e]`, `col[e]`: running maxima over member e, of its transform along M if SIGNS >= 0."""
    n_k = tl.cdiv(K, BK)
    e, at_row, start, end, _, _ = locate(tiles, tl.program_id(0) // n_k, rows, EQUAL, TILE, ENTRY)
    if (e >= 0) & (at_row < end - start):
        k0 = (tl.program_id(0) % n_k) * BK
        left_m = tl.minimum(end - start - at_row, BM).to(tl.int32)
        left_k = tl.minimum(K - k0, BK).to(tl.int32)
        o_b = tl.arange(0, BM // 16).to(tl.int64 if FAR else tl.int32)
        o_k = tl.arange(0, BK)
        block = load_col_block(
            x + (start + at_row) * stride + k0, o_b, o_k, left_m, left_k, stride, False
        )
        if PLAIN_ROW or PLAIN_COL:
            plain = tl.max(amax_block(block))
            if PLAIN_ROW:
                record(row, e, plain)
            if PLAIN_COL:
                record(col, e, plain)
        if SIGNS >= 0:
            top = tl.max(amax_block(hadamard_sums(block, SIGNS))).to(tl.float32, bitcast=True)
            record(col, e, abs_bits(top * 0.25))


@triton.jit
def cast_kernel(
    x, row_data, row_scale, row_amax, col_data, col_scale, col_amax, seeds, tiles, at, rows, num,
    K, stride, pitch, row_pitch, row_scale_pitch, row_step, col_step, col_scale_step,
    ROW: tl.constexpr, ROW_MAX: tl.constexpr, ROW_SQUARE: tl.constexpr,
    ROW_STOCHASTIC: tl.constexpr, ROW_ERROR: tl.constexpr,
    COL: tl.constexpr, COL_MAX: tl.constexpr, COL_SQUARE: tl.constexpr,
    COL_STOCHASTIC: tl.constexpr, COL_ERROR: tl.constexpr, COL_SIGNS: tl.constexpr,
    ROW_WIDE: tl.constexpr, COL_WIDE: tl.constexpr, EQUAL: tl.constexpr, FLAT: tl.constexpr,
    TILE: tl.constexpr, ENTRY: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    R: tl.constexpr, CC: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Both directions of a tile; `row_amax[e]`, `col_amax[e]` and `seeds[e]` are its member's."""
    OFFSET: tl.constexpr = tl.int64 if FAR else tl.int32
    n_k = tl.cdiv(tl.cdiv(K, 128) * 128, BK)
    SUB: tl.constexpr = TILE // BM
    k0 = (tl.program_id(0) % n_k).to(tl.int64) * BK
    e, at_row, start, end, place, place_end = locate(
        tiles, tl.program_id(0) // (n_k * SUB), rows, EQUAL, TILE, ENTRY
    )
    M = end - start
    m0 = at_row + ((tl.program_id(0) // n_k) % SUB) * BM
    if (e >= 0) & ((at_row < end - start) | (not FLAT)):
        left_m = tl.minimum(tl.maximum(M - m0, 0), BM).to(tl.int32)
        left_k = tl.minimum(tl.maximum(K - k0, 0), BK).to(tl.int32)
        x += (start + m0) * stride + k0
        if ROW_STOCHASTIC or COL_STOCHASTIC:
            seeds += 2 * e
        if ROW:
            row_data += (start + m0) * row_pitch * (4 if ROW_WIDE else 1) + k0 // 2
            if FLAT:
                row_scale += offset(at, e, row_step, num, 1, EQUAL) + m0 * row_scale_pitch
                left_s = BM
            else:
                row_scale += (start + m0) * row_scale_pitch
                left_s = left_m
            cast_rows(
                x, row_data, row_scale + k0 // 16, None, row_amax + e,
                global_factors(row_amax + e, ROW_MAX, False), seeds,
                m0 * (2 * tl.cdiv(K, 16)) + k0 // 8, left_m, left_k,
                tl.minimum(row_scale_pitch - k0 // 16, BK // 16).to(tl.int32), left_s,
                K, stride, row_pitch, row_scale_pitch,
                ROW_MAX, ROW_SQUARE, ROW_STOCHASTIC, False, ROW_ERROR,
                False, ROW_WIDE, False, BM, BK, R, OFFSET, 0,
            )  # fmt: skip
        if COL:
            if FLAT:
                C = tl.cdiv(M, 16) * 16 if COL_SIGNS >= 0 else M
                # Rows of a member are bytes: sizes may be odd.
                col_pitch = (C + 1) // 2
                col_scale_pitch = tl.cdiv(tl.cdiv(C, 16), 4) * 4
                col_data += offset(at, e, col_step, num, 2, EQUAL) + m0 // 2
                col_scale += offset(at, e, col_scale_step, num, 3, EQUAL) + m0 // 16
                left_b = tl.minimum(col_scale_pitch - m0 // 16, BM // 16).to(tl.int32)
            else:
                C = place_end - place
                col_pitch = pitch // 8
                col_scale_pitch = pitch // 16
                col_data += (place + m0) // 2
                col_scale += (place + m0) // 16
                left_b = tl.minimum((C - m0) // 16, BM // 16).to(tl.int32)
            cast_columns(
                x, col_data + k0 * col_pitch * (4 if COL_WIDE else 1),
                col_scale + k0 * col_scale_pitch, None, col_amax + e,
                global_factors(col_amax + e, COL_MAX, False), seeds,
                k0 * (2 * tl.cdiv(M, 16)) + m0 // 8, left_m, left_k,
                tl.minimum(tl.maximum(C - m0, 0), BM).to(tl.int32), left_b,
                M, K, stride, col_pitch, col_scale_pitch,
                COL_MAX, COL_SQUARE, COL_STOCHASTIC, False, COL_ERROR, COL_SIGNS,
                False, COL_WIDE, False, BM // 16, BK, CC, OFFSET, 0,
            )  # fmt: skip


def supports(cast: Cast) -> bool:
    """Whether these kernels serve the cast: all but an amax for each row."""
    return cast.format.two_level and not cast.row_scaled


def cast_fp4(
    x: Tensor,
    group: Group,
    *,
    row: Cast | None,
    col: Cast | None,
    out: Mapping[str, Tensor | None],
    steps: tuple[int, int, int],
    seed: Tensor | None = None,
) -> None:
    """Fill `out`, by the names of `layout.parts`, with amaxes `[num]`.

    `steps`: elements of an EQUAL member's row scale, column data and column scale. `seed`: int64
    [seed, offset]; member e is rounded with `[seed, offset + e]`.
    """
    for name in ("row_amax", "col_amax"):
        buffer = out.get(name)
        if buffer is not None:
            buffer.zero_()
    if x.shape[1] == 0 or (x.shape[0] == 0 and group.tiles is None):
        return
    if x.shape[0] > 0:
        _amax(x, group, row, col, out).run()
    seeds = None
    if seed is not None:
        numbers = torch.arange(group.num, dtype=torch.int64, device=x.device)
        seeds = torch.stack((seed[0].expand(group.num), seed[1] + numbers), 1)
    _cast(x, group, row, col, out, steps, seeds).run()


def _amax(
    x: Tensor, group: Group, row: Cast | None, col: Cast | None, out: Mapping[str, Tensor | None]
) -> Launch:
    m, k = x.shape
    signs = -1 if col is None else col.hadamard
    args = {
        "x": x,
        "row": _bits(out.get("row_amax")),
        "col": _bits(out.get("col_amax")),
        "K": k,
        "stride": x.stride(0),
        "PLAIN_ROW": row is not None,
        "PLAIN_COL": col is not None and signs < 0,
        "SIGNS": signs,
        "FAR": AMAX.m * x.stride(0) >= 2**31,
        **group.mode(m, k, AMAX),
    }
    return Launch.of(amax_kernel, group.count(m) * cdiv(k, AMAX.k), args, AMAX)


def _bits(amax: Tensor | None) -> Tensor | None:
    return None if amax is None else amax.view(torch.int32)


def _cast(
    x: Tensor,
    group: Group,
    row: Cast | None,
    col: Cast | None,
    out: Mapping[str, Tensor | None],
    steps: tuple[int, int, int],
    seeds: Tensor | None,
) -> Launch:
    m, k = x.shape
    casts = [c for c in (row, col) if c is not None]
    kind = "heavy" if any(c.error for c in casts) else "light"
    kind = "stochastic" if kind == "light" and any(c.stochastic for c in casts) else kind
    config = CONFIGS[kind]
    blocks = BLOCKS[kind]
    mode = group.mode(m, k, config)
    args: dict[str, Any] = {
        "x": x,
        **{name: out.get(name) for name in POINTERS if name.endswith(("data", "scale", "amax"))},
        "seeds": seeds,
        "K": k,
        "stride": x.stride(0),
        "row_pitch": cdiv(k, 2) if k % 8 else k // 8,
        "row_scale_pitch": rup(cdiv(k, 16), 4),
        "row_step": steps[0],
        "col_step": steps[1],
        "col_scale_step": steps[2],
        "COL_SIGNS": -1 if col is None else col.hadamard,
        "ROW_WIDE": k % 8 == 0,
        "COL_WIDE": not mode["FLAT"],
        "R": min(config.m, blocks[0] * 512 * config.warps // config.k),
        "CC": min(config.k, blocks[1] * 512 * config.warps // config.m),
        "FAR": max(config.m, config.k) * max(x.stride(0), k, m + HADAMARD, group.pitch) >= 2**31,
        **options("ROW", row),
        **options("COL", col),
        **mode,
    }  # fmt: skip
    programs = group.count(m) * (TILE // config.m) * (rup(k, PAD) // config.k)
    return Launch.of(cast_kernel, programs, args, config)


def variants() -> Iterator[Variant]:
    """The recipe's casts, by where their copies go."""
    code = torch.empty(1, dtype=torch.uint8, device="meta")
    one = torch.empty(1, dtype=torch.float32, device="meta")
    bits = torch.empty(1, dtype=torch.int32, device="meta")
    long = torch.empty(4, 64, dtype=torch.int64, device="meta")
    plain = Cast("nvfp4")
    rht = plain.replace(hadamard=HADAMARD_SIGN_MASK)
    tiles = Cast("nvfp4_16x16")
    out = {f"{d}_{p}": code for d in ("row", "col") for p in ("data", "scale")}
    out |= {"row_amax": one, "col_amax": one}
    groups = {
        "equal": Group(1),
        "flat": Group(64, bits, long),
        "spread": Group(64, bits, None, 4096),
    }
    for sample in samples():
        if sample.x.dtype is not torch.bfloat16:
            continue
        for mode, group in groups.items():
            for name, row, col, seeds in (
                ("hadamard", plain, rht, None),
                ("stochastic", plain.replace(stochastic=True), rht.replace(stochastic=True), long),
                ("tiles", tiles, tiles, None),
            ):
                tag = f"{name}_{mode}_{sample.tag}"
                yield Variant.of(f"ragged_amax_{tag}", _amax(sample.x, group, row, col, out))
                launch = _cast(sample.x, group, row, col, out, (1, 1, 1), seeds)
                yield Variant.of(f"ragged_fp4_{tag}", launch)
