"""Sums over rows of partial sums: what many programs left, added up in one order.

No atomics: the order, and so the result, is the same every time.
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

CONFIG = Config(64, 32, 4)  # to be measured; narrow, since there are few columns to go round


@triton.jit(do_not_specialize=["n"])
def sums_kernel(partial, out, n, K, BM: tl.constexpr, BK: tl.constexpr):
    """`out[K]` = the sum of the n rows of `partial[n, K]`, rounded to out's dtype."""
    o_k = tl.program_id(0) * BK + tl.arange(0, BK)
    b_s = tl.zeros((BM, BK), tl.float32)
    for i_n in range(0, n, BM):
        o_n = i_n + tl.arange(0, BM)
        m_p = (o_n[:, None] < n) & (o_k[None, :] < K)
        b_s += tl.load(partial + o_n[:, None].to(tl.int64) * K + o_k[None, :], mask=m_p, other=0.0)
    tl.store(out + o_k, tl.sum(b_s, 0), mask=o_k < K)


def column_sums(partial: Tensor, out: Tensor) -> None:
    """`out[K]` from fp32 `partial[n, K]`."""
    _sums(partial, out).run()


def _sums(partial: Tensor, out: Tensor) -> Launch:
    n, k = partial.shape
    args = {"partial": partial, "out": out, "n": n, "K": k, "BM": CONFIG.m, "BK": CONFIG.k}
    return Launch(sums_kernel, cdiv(k, CONFIG.k), args, CONFIG)


def variants() -> Iterator[Variant]:
    """Into bf16."""
    partial = torch.empty(64, 4096, dtype=torch.float32, device="meta")
    yield Variant.of("sums", _sums(partial, torch.empty(4096, dtype=torch.bfloat16, device="meta")))
