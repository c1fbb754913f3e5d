"""Delayed scaling's step for the slots of a layer, and the global scale of an emulated product.

Both are small: what they save is launches, of which PyTorch's own operators would need dozens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import FP32_MAX, cdiv
from .variant import Config, Launch, Variant

__all__ = ["rescale", "step", "variants"]

SLOTS = 3  # pointers of one launch
STEP = Config(1, 1024, 4)
RESCALE = Config(1, 4096, 8)


@triton.jit
def larger(a, b):
    """The larger of two, NaN if one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def slot(history, scale, amax, limit, LEN, i, N, RECENT: tl.constexpr, MAX: tl.constexpr,
         BLOCK: tl.constexpr):  # fmt: skip
    """Record `amax[0]` in column i of `history[LEN, N]`, roll it, and set the next scale.

    An amax of zero recorded nothing, and changes nothing.
    """
    # All is asked for before anything is waited for: one latency.
    now = tl.load(amax)
    old = tl.load(scale)
    o_r = tl.arange(0, BLOCK)
    b_h = tl.load(history + o_r * N + i, mask=(o_r > 0) & (o_r < LEN), other=0.0)  # [BLOCK]
    # Row r of the rolled history is row r + 1 of the old one; the last is what was recorded.
    b_n = tl.load(history + (o_r + 1) * N + i, mask=(o_r > 0) & (o_r + 1 < LEN), other=0.0)
    largest = now
    if not RECENT:
        largest = larger(now, tl.reduce(b_h, 0, larger))
    new = tl.minimum(tl.div_rn(limit, largest), MAX)
    new = tl.where((largest > 0) & (largest <= MAX), new, old)
    b_n = tl.where((o_r == LEN - 1) & (o_r > 0), now, b_n)
    tl.debug_barrier()  # every row is read before any is written
    recorded = now != 0
    tl.store(history + o_r * N + i, b_n, mask=(o_r < LEN) & recorded)
    tl.store(scale, new, mask=recorded)
    tl.store(amax, 0.0, mask=recorded)


@triton.jit
def step_kernel(history, s0, s1, s2, a0, a1, a2, l0, l1, l2, LEN, N, members,
                SLOTS: tl.constexpr, RECENT: tl.constexpr, MAX: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    """One program per slot and member; column `slot * members + e` of the history is its own."""
    i = tl.program_id(0)
    e = i % members
    if i // members == 0:
        slot(history, s0 + e, a0 + e, l0, LEN, i, N, RECENT, MAX, BLOCK)
    if SLOTS > 1:  # noqa: SIM102  (SLOTS is known to the compiler, i is not)
        if i // members == 1:
            slot(history, s1 + e, a1 + e, l1, LEN, i, N, RECENT, MAX, BLOCK)
    if SLOTS > 2:  # noqa: SIM102
        if i // members == 2:
            slot(history, s2 + e, a2 + e, l2, LEN, i, N, RECENT, MAX, BLOCK)


def step(
    history: Tensor,
    scales: Sequence[Tensor],
    amaxes: Sequence[Tensor],
    limits: Sequence[float],
    recent: bool,
) -> None:
    """The end of a step, in place; `limits` are the largest codes times 2**-margin."""
    _step(history, scales, amaxes, limits, recent).run()


def _step(
    history: Tensor,
    scales: Sequence[Tensor],
    amaxes: Sequence[Tensor],
    limits: Sequence[float],
    recent: bool,
) -> Launch:
    length, columns = history.shape
    n, members = len(scales), scales[0].shape[0]
    args = {"history": history, "LEN": length, "N": columns, "members": members, "SLOTS": n,
            "RECENT": recent, "MAX": FP32_MAX}  # fmt: skip
    for i in range(SLOTS):
        at = min(i, n - 1)  # a pointer that no program uses
        args |= {f"s{i}": scales[at], f"a{i}": amaxes[at], f"l{i}": float(limits[at])}
    args["BLOCK"] = triton.next_power_of_2(length)
    return Launch(step_kernel, columns, args, STEP, aside=True)


@triton.jit
def rescale_kernel(y, out, a, b, factor, size, BLOCK: tl.constexpr):
    """`out = y * (a[0] * b[0] * factor)`, in fp32 between."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    scale = tl.load(a) * tl.load(b) * factor
    b_y = tl.load(y + o, mask=o < size, other=0.0).to(tl.float32)
    tl.store(out + o, b_y * scale, mask=o < size)


def rescale(y: Tensor, out: Tensor, a: Tensor, b: Tensor, factor: float) -> None:
    """`out = y * (a * b * factor)` of contiguous matrices; `out` may be `y`."""
    _rescale(y, out, a, b, factor).run()


def _rescale(y: Tensor, out: Tensor, a: Tensor, b: Tensor, factor: float) -> Launch:
    args = {"y": y, "out": out, "a": a, "b": b, "factor": factor, "size": y.numel()}
    return Launch(
        rescale_kernel, max(1, cdiv(y.numel(), RESCALE.k)), args | {"BLOCK": RESCALE.k}, RESCALE
    )


def variants() -> Iterator[Variant]:
    one = torch.empty(1, dtype=torch.float32, device="meta")
    for n in (2, 3):
        history = torch.empty(1024, n, dtype=torch.float32, device="meta")
        for recent in (False, True):
            name = f"step_{n}{'_recent' if recent else ''}"
            yield Variant.of(name, _step(history, (one,) * n, (one,) * n, (1.0,) * n, recent))
            many = torch.empty(64, dtype=torch.float32, device="meta")
            of_many = torch.empty(1024, 64 * n, dtype=torch.float32, device="meta")
            launch = _step(of_many, (many,) * n, (many,) * n, (1.0,) * n, recent)
            yield Variant.of(f"{name}_members", launch)
    for dtype in (torch.bfloat16, torch.float32):
        y = torch.empty(4096, 4096, dtype=dtype, device="meta")
        yield Variant.of(f"rescale_{dtype}", _rescale(y, y, one, one, 1.0))
