"""Norms: statistics of rows, with the amax of what they make of them, and gradients.

    rstd = 1 / sqrt(mean((x - mean)^2) + eps)
    dx   = rstd * (w - mean(w) - xhat * mean(w * xhat)),   w = dy * gamma, xhat = (x - mean) * rstd

A program has whole rows. One that fits is read once; a longer one is read again for every step.
Sums over rows (dgamma, dbeta) are kept per program and added up by `sums`, in one order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._device import abs_bits
from ._produce_device import TYPES, load_row, normalize, scaled
from .sums import column_sums
from .tensorwise import PARTIALS, finish
from .variant import Config, Launch, Variant

__all__ = ["backward", "stats", "variants"]

WIDEST = 16384  # columns that one program holds
ROWS = 16  # elements per thread that a row should be, and
PROGRAMS = 264  # programs of a backward, each with partial sums: two per multiprocessor of an H200
_INF = tl.constexpr(0x7F800000)


@triton.jit
def load_x(x, i_m, o_k, K, stride):
    return tl.load(x + i_m * stride + o_k, mask=o_k < K, other=0).to(tl.float32)


@triton.jit
def load_scaled(x, number, i_m, o_k, K, stride):
    """`load_x`, times `number[0]` if there is one, rounded to x's dtype."""
    return scaled(load_x(x, i_m, o_k, K, stride), number, x)


@triton.jit
def row_amax(
    b_x, mean, rstd, gamma, beta, o_k, K, MEAN: tl.constexpr, GAMMA: tl.constexpr,
    BETA: tl.constexpr, ZERO: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Bits of |y| for a part of a row, as `value` has y."""
    b_g = load_row(gamma, o_k, K, False, GAMMA, ZERO)
    b_b = load_row(beta, o_k, K, False, BETA, False)
    b_y = normalize(b_x, mean, rstd, b_g, b_b, MEAN, GAMMA, BETA).to(DTYPE)
    return tl.where(o_k < K, abs_bits(b_y), 0)


@triton.jit
def stats_kernel(
    x, mean, rstd, gamma, beta, partial, eps, M, K, stride, MEAN: tl.constexpr,
    GAMMA: tl.constexpr, BETA: tl.constexpr, ZERO: tl.constexpr, AMAX: tl.constexpr,
    DTYPE: tl.constexpr, ONE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """`mean[M]`, `rstd[M]`; AMAX: `partial[p]`, bits of the largest |y| of program p's rows."""
    eps = tl.cast(eps, tl.float32)
    o_b = tl.arange(0, BK)
    top = 0
    for i_m in range(tl.program_id(0).to(tl.int64), M, tl.num_programs(0)):
        mu = 0.0
        if ONE:  # the row is one block
            b_x = load_x(x, i_m, o_b, K, stride)
            b_c = b_x
            if MEAN:
                mu = tl.sum(b_x, 0) / K
                b_c = tl.where(o_b < K, b_x - mu, 0.0)
            var = tl.sum(b_c * b_c, 0) / K
        else:
            if MEAN:
                b_s = tl.zeros((BK,), tl.float32)
                for i_k in range(0, K, BK):
                    b_s += load_x(x, i_m, i_k + o_b, K, stride)
                mu = tl.sum(b_s, 0) / K
            b_s = tl.zeros((BK,), tl.float32)
            for i_k in range(0, K, BK):
                b_c = load_x(x, i_m, i_k + o_b, K, stride)
                if MEAN:
                    b_c = tl.where(i_k + o_b < K, b_c - mu, 0.0)
                b_s += b_c * b_c
            var = tl.sum(b_s, 0) / K
        r = tl.div_rn(1.0, tl.sqrt_rn(var + eps))
        tl.store(rstd + i_m, r)
        if MEAN:
            tl.store(mean + i_m, mu)
        if AMAX:
            if ONE:
                b_a = row_amax(b_x, mu, r, gamma, beta, o_b, K, MEAN, GAMMA, BETA, ZERO, DTYPE)
                top = tl.maximum(top, tl.max(b_a, 0))
            else:
                b_m = tl.zeros((BK,), tl.int32)
                for i_k in range(0, K, BK):
                    b_x = load_x(x, i_m, i_k + o_b, K, stride)
                    b_a = row_amax(
                        b_x, mu, r, gamma, beta, i_k + o_b, K, MEAN, GAMMA, BETA, ZERO, DTYPE
                    )
                    b_m = tl.maximum(b_m, b_a)
                top = tl.maximum(top, tl.max(b_m, 0))
    if AMAX:
        tl.store(partial + tl.program_id(0), top)


@triton.jit
def backward_kernel(
    dy, number, x, mean, rstd, gamma, add, dx, dgamma, dbeta, M, K, dy_stride, stride, add_stride,
    MEAN: tl.constexpr, GAMMA: tl.constexpr, ZERO: tl.constexpr, ADD: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """`dx[M, K]`, and rows p of `dgamma`, `dbeta` `[programs, K]`: sums over program p's rows."""
    i_p = tl.program_id(0).to(tl.int64)
    o_k = tl.arange(0, BK)
    m_k = o_k < K
    b_g = load_row(gamma, o_k, K, False, GAMMA, ZERO)
    b_dg = tl.zeros((BK,), tl.float32)
    b_db = tl.zeros((BK,), tl.float32)
    for i_m in range(i_p, M, tl.num_programs(0)):
        b_x = load_x(x, i_m, o_k, K, stride)
        b_d = load_scaled(dy, number, i_m, o_k, K, dy_stride)
        r = tl.load(rstd + i_m)
        b_h = b_x
        if MEAN:
            b_h = tl.where(m_k, b_x - tl.load(mean + i_m), 0.0)
        b_h = b_h * r
        b_w = b_d * b_g if GAMMA else b_d
        c = tl.sum(b_w * b_h, 0) / K
        b_i = b_w - b_h * c
        if MEAN:
            b_i = b_i - tl.sum(b_w, 0) / K
        b_i = b_i * r
        if ADD:
            b_i += load_x(add, i_m, o_k, K, add_stride)
        tl.store(dx + i_m * K + o_k, b_i, mask=m_k)
        if GAMMA:
            b_dg += b_d * b_h
            if MEAN:
                b_db += b_d
    if GAMMA:
        tl.store(dgamma + i_p * K + o_k, b_dg, mask=m_k)
        if MEAN:
            tl.store(dbeta + i_p * K + o_k, b_db, mask=m_k)


@triton.jit
def wide_kernel(
    dy, number, x, mean, rstd, gamma, add, dx, dgamma, dbeta, M, K, dy_stride, stride, add_stride,
    MEAN: tl.constexpr, GAMMA: tl.constexpr, ZERO: tl.constexpr, ADD: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """`backward_kernel` for rows of several blocks; the partial sums stay in memory, in fp32."""
    i_p = tl.program_id(0).to(tl.int64)
    o_b = tl.arange(0, BK)
    for i_m in range(i_p, M, tl.num_programs(0)):
        r = tl.load(rstd + i_m)
        mu = tl.load(mean + i_m) if MEAN else 0.0
        b_1 = tl.zeros((BK,), tl.float32)
        b_2 = tl.zeros((BK,), tl.float32)
        for i_k in range(0, K, BK):
            o_k = i_k + o_b
            b_h = load_x(x, i_m, o_k, K, stride)
            b_h = tl.where(o_k < K, b_h - mu, 0.0) * r if MEAN else b_h * r
            b_w = load_scaled(dy, number, i_m, o_k, K, dy_stride)
            if GAMMA:
                b_w = b_w * load_row(gamma, o_k, K, False, GAMMA, ZERO)
            b_1 += b_w
            b_2 += b_w * b_h
        c_1 = tl.sum(b_1, 0) / K
        c_2 = tl.sum(b_2, 0) / K
        for i_k in range(0, K, BK):
            o_k = i_k + o_b
            m_k = o_k < K
            b_h = load_x(x, i_m, o_k, K, stride)
            b_h = tl.where(m_k, b_h - mu, 0.0) * r if MEAN else b_h * r
            b_d = load_scaled(dy, number, i_m, o_k, K, dy_stride)
            b_w = b_d
            if GAMMA:
                b_w = b_w * load_row(gamma, o_k, K, False, GAMMA, ZERO)
            b_i = b_w - b_h * c_2
            if MEAN:
                b_i = b_i - c_1
            b_i = b_i * r
            if ADD:
                b_i += load_x(add, i_m, o_k, K, add_stride)
            tl.store(dx + i_m * K + o_k, b_i, mask=m_k)
            if GAMMA:
                first = i_m == i_p
                p_g = dgamma + i_p * K + o_k
                b_s = tl.load(p_g, mask=m_k & (not first), other=0.0)
                tl.store(p_g, b_s + b_d * b_h, mask=m_k)
                if MEAN:
                    p_b = dbeta + i_p * K + o_k
                    b_s = tl.load(p_b, mask=m_k & (not first), other=0.0)
                    tl.store(p_b, b_s + b_d, mask=m_k)


# ------------------------------------------------------------------------------------------- fronts
def stats(
    x: Tensor,
    eps: float,
    mean: Tensor | None,
    rstd: Tensor,
    output: tuple[Tensor | None, Tensor | None, bool, torch.dtype] | None = None,
    amax: Tensor | None = None,
) -> None:
    """`mean` (LayerNorm alone) and `rstd` of the rows of `x[M, K]`.

    With `output`, (gamma, beta, zero_centered, dtype), also `amax[0]` of the norm's output.
    """
    launch = _stats(x, eps, mean, rstd, output, amax)
    launch.run()
    if amax is not None:
        finish(launch.args["partial"], launch.programs, amax)


def backward(
    dy: Tensor,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    gamma: Tensor | None,
    add: Tensor | None,
    zero_centered: bool,
    out: Sequence[Tensor],
    number: Tensor | None = None,
) -> None:
    """`out` = [dx, dgamma, dbeta]: those that there are; `number`, if any, multiplies dy."""
    launch = _backward(dy, x, mean, rstd, gamma, add, zero_centered, out[0], number)
    launch.run()
    for name, sums in zip(("dgamma", "dbeta"), out[1:], strict=False):
        column_sums(launch.args[name], sums)


# ----------------------------------------------------------------------------------------- launches
def _config(k: int) -> Config:
    """A block that holds a row, or the widest; sixteen elements to a thread."""
    block = max(128, min(triton.next_power_of_2(k), WIDEST))
    return Config(1, block, max(1, min(block // (32 * ROWS), 16)))


def _stats(
    x: Tensor,
    eps: float,
    mean: Tensor | None,
    rstd: Tensor,
    output: tuple[Tensor | None, Tensor | None, bool, torch.dtype] | None,
    amax: Tensor | None,
) -> Launch:
    m, k = x.shape
    config = _config(k)
    gamma, beta, zero_centered, dtype = output or (None, None, False, x.dtype)
    programs, partial = m, None
    if amax is not None:
        programs = min(m, PARTIALS)
        partial = torch.empty(programs, dtype=torch.int32, device=x.device)
    args = {
        "x": x, "mean": mean, "rstd": rstd, "gamma": gamma, "beta": beta, "partial": partial,
        "eps": eps, "M": m, "K": k, "stride": x.stride(0), "MEAN": mean is not None,
        "GAMMA": gamma is not None, "BETA": beta is not None, "ZERO": zero_centered,
        "AMAX": amax is not None, "DTYPE": TYPES[dtype], "ONE": k <= config.k, "BK": config.k,
    }  # fmt: skip
    return Launch(stats_kernel, programs, args, config)


def _backward(
    dy: Tensor,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    gamma: Tensor | None,
    add: Tensor | None,
    zero_centered: bool,
    dx: Tensor,
    number: Tensor | None = None,
) -> Launch:
    m, k = x.shape
    config = _config(k)
    fn = backward_kernel
    if k > WIDEST // 2:  # two rows of fp32 and two sums would not fit
        config, fn = _config(4096), wide_kernel
    programs = min(m, PROGRAMS * max(1, 4 // config.warps))
    sums: list[Tensor | None] = [None, None]
    if gamma is not None:
        n = 1 if mean is None else 2
        shape = (programs, k)
        sums[:n] = [torch.empty(shape, dtype=torch.float32, device=x.device) for _ in range(n)]
    args: dict[str, Any] = {
        "dy": dy, "number": number, "x": x, "mean": mean, "rstd": rstd, "gamma": gamma,
        "add": add, "dx": dx, "dgamma": sums[0], "dbeta": sums[1], "M": m, "K": k,
        "dy_stride": dy.stride(0), "stride": x.stride(0),
        "add_stride": 0 if add is None else add.stride(0), "MEAN": mean is not None,
        "GAMMA": gamma is not None, "ZERO": zero_centered, "ADD": add is not None, "BK": config.k,
    }  # fmt: skip
    return Launch(fn, programs, args, config)


def variants() -> Iterator[Variant]:
    """LayerNorm and RMSNorm, in rows of one block and of several."""
    for k in (4096, 4000, 8192, 20480):
        x = torch.empty(4096, k, dtype=torch.bfloat16, device="meta")
        stat = torch.empty(4096, dtype=torch.float32, device="meta")
        gamma, one = x[0], torch.empty(1, dtype=torch.float32, device="meta")
        for name, mean, beta in (("layer", stat, gamma), ("rms", None, None)):
            end = f"{name}_bf16_{k}"
            yield Variant.of(f"stats_{end}", _stats(x, 1e-5, mean, stat, None, None))
            output = (gamma, beta, True, x.dtype)
            yield Variant.of(f"amax_{end}", _stats(x, 1e-5, mean, stat, output, one))
            for add in (None, x):
                launch = _backward(x, x, mean, stat, gamma, add, True, x)
                yield Variant.of(f"backward{'_add' * (add is not None)}_{end}", launch)
            launch = _backward(x, x, mean, stat, gamma, None, True, x, one)
            yield Variant.of(f"backward_scaled_{end}", launch)
