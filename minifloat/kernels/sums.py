"""Sums over rows: of a matrix, or of partial sums that many programs left, in one order.

No atomics: the order, and so the result, is the same every time. H200, us, bf16, and aten's sum:
[2048, 768] 4.5 (8.4), [2048, 3072] 4.5 (9.6), [4096, 4096] 8.2 (17.0), [16384, 768] 7.4 (25.3),
[16384, 4096] 50.3 (47.0).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import cdiv
from .variant import Config, Launch, Variant

__all__ = ["column_sums", "variants"]

# Narrow, since there may be few columns to go round; 64 bytes of a row of 16-bit elements. A tall
# matrix is asked for 32 KiB at a time, which hides the way to memory.
CONFIGS = {"few": Config(64, 32, 4), "tall": Config(512, 32, 8)}
FULL = 264  # programs: two for each multiprocessor of an H200
PIECE = 2048  # rows that are worth a program of their own


@triton.jit(do_not_specialize=["n", "piece"])
def sums_kernel(x, out, n, piece, K, stride, BM: tl.constexpr, BK: tl.constexpr):
    """`out[i, K]` = the sum of rows i piece .. (i + 1) piece of `x[n, K]`, in out's dtype."""
    n_k = tl.cdiv(K, BK)
    i_s = tl.program_id(0) // n_k
    o_k = (tl.program_id(0) % n_k) * BK + tl.arange(0, BK)
    first = i_s * piece
    end = min(first + piece, n)
    b_s = tl.zeros((BM, BK), tl.float32)
    for i_n in range(first, end, BM):
        o_n = i_n + tl.arange(0, BM)
        m_x = (o_n[:, None] < end) & (o_k[None, :] < K)
        p_x = x + o_n[:, None].to(tl.int64) * stride + o_k[None, :]
        b_s += tl.load(p_x, mask=m_x, other=0.0).to(tl.float32)
    tl.store(out + i_s.to(tl.int64) * K + o_k, tl.sum(b_s, 0), mask=o_k < K)


def column_sums(x: Tensor, out: Tensor) -> None:
    """`out[K]` from `x[n, K]`, summed in fp32; a tall and narrow matrix in two steps."""
    n, k = x.shape
    pieces = min(cdiv(FULL, cdiv(k, CONFIGS["tall"].k)), n // PIECE)
    if pieces > 1:
        partial = torch.empty(pieces, k, dtype=torch.float32, device=x.device)
        _sums(x, partial, cdiv(n, pieces)).run()
        x = partial
    _sums(x, out, x.shape[0]).run()


def _sums(x: Tensor, out: Tensor, piece: int) -> Launch:
    n, k = x.shape
    config = CONFIGS["tall" if piece >= CONFIGS["tall"].m else "few"]
    args = {
        "x": x,
        "out": out,
        "n": n,
        "piece": piece,
        "K": k,
        "stride": x.stride(0),
        "BM": config.m,
        "BK": config.k,
    }
    return Launch(sums_kernel, max(1, cdiv(n, max(piece, 1))) * cdiv(k, config.k), args, config)


def variants() -> Iterator[Variant]:
    """Partial sums into bf16, and a tall matrix of each dtype."""
    partial = torch.empty(64, 4096, dtype=torch.float32, device="meta")
    out = torch.empty(4096, dtype=torch.bfloat16, device="meta")
    yield Variant.of("sums", _sums(partial, out, 64))
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.empty(4096, 4096, dtype=dtype, device="meta")
        yield Variant.of(f"sums_tall_{x.element_size()}", _sums(x, out, 4096))
