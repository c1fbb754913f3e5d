"""Bytes `[M, K]` -> `[K, M]`.

Bytes cross shared memory one at a time. So four neighbours along M are packed into a word first,
one from each of four loads, and words are transposed: 4 instructions per byte in place of 9.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._device import load_tile, store_tile
from .variant import Config, Launch, Variant

__all__ = ["transpose", "variants"]

CONFIGS = {"words": Config(128, 128, 4), "bytes": Config(64, 64, 4)}  # to be measured


@triton.jit
def words_kernel(data, out, M, K, stride, EVEN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    """`out[K, M/4]` (int32) = `data[M, K]` transposed, for an M that is a multiple of 4."""
    n_k = tl.cdiv(K, BK)
    i_m = (tl.program_id(0) // n_k).to(tl.int64)
    i_k = (tl.program_id(0) % n_k).to(tl.int64)
    o_w = i_m * (BM // 4) + tl.arange(0, BM // 4)
    o_k = i_k * BK + tl.arange(0, BK)
    b_w = tl.zeros((BM // 4, BK), tl.int32)  # [BM/4, BK]
    for j in tl.static_range(4):
        b_d = load_tile(data, 4 * o_w + j, o_k, M, K, stride, EVEN)  # [BM/4, BK]
        b_w |= b_d.to(tl.int32) << (8 * j)
    store_tile(out, tl.trans(b_w), o_k, o_w, K, M // 4, EVEN)


@triton.jit
def bytes_kernel(data, out, M, K, stride, EVEN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    """`out[K, M] = data[M, K]` transposed."""
    n_k = tl.cdiv(K, BK)
    i_m = (tl.program_id(0) // n_k).to(tl.int64)
    i_k = (tl.program_id(0) % n_k).to(tl.int64)
    o_m = i_m * BM + tl.arange(0, BM)
    o_k = i_k * BK + tl.arange(0, BK)
    b_d = load_tile(data, o_m, o_k, M, K, stride, EVEN)  # [BM, BK]
    store_tile(out, tl.trans(b_d), o_k, o_m, K, M, EVEN)


def transpose(data: Tensor, out: Tensor) -> None:
    """uint8 `data[M, K]` with unit stride along K -> contiguous `out[K, M]`."""
    if data.numel() > 0:
        _transpose(data, out).run()


def _transpose(data: Tensor, out: Tensor, config: Config | None = None) -> Launch:
    m, k = data.shape
    words = m % 4 == out.data_ptr() % 4 == out.storage_offset() % 4 == 0
    config = config or CONFIGS["words" if words else "bytes"]
    args = {
        "data": data, "out": out.view(-1).view(torch.int32) if words else out, "M": m, "K": k,
        "stride": data.stride(0), "EVEN": config.even(m, k), "BM": config.m, "BK": config.k,
    }  # fmt: skip
    return Launch(words_kernel if words else bytes_kernel, config.tiles(m, k), args, config)


def variants() -> Iterator[Variant]:
    """Words and bytes, with whole and partial tiles."""
    for m, k in ((4096, 4096), (4100, 4000), (4097, 4032), (4097, 4097)):
        data = torch.empty(m, k, dtype=torch.uint8, device="meta")
        yield Variant.of(f"transpose_{m}x{k}", _transpose(data, data))
