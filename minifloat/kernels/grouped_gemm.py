"""Products of matrices whose rows come in groups: all members in one launch, sizes on the device.

    rows         y[r_e] = a[r_e] b_e^T (+ bias_e)
    contraction  d_e    = a[:, r_e] b[:, r_e]^T

What PyTorch's grouped product takes (bf16 in rows of 16 bytes) goes to it; this is for the rest:
codes, scales per block, any width, a bias, an fp32 result, one that is added to; `flat_gemm` is
asked first. Operands are codes of 8 bits or values, with the contraction last for codes. Rows past
a member's end are read from its neighbour and not stored.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import env
from ..formats import cdiv
from . import flat_gemm
from ._gemm_device import finished, swizzled
from .members import ENTRY, TILE, WIDTH
from .variant import Config, Launch, Variant

__all__ = ["contraction", "rows", "variants"]

# (m, k) is the tile of the result. H200, bf16 out, TFLOP/s at 8 x 2048 rows, 4096 -> 4096: rows of
# E4M3 by E4M3 with a short accumulator 1300 (PyTorch's 1190), of E5M2 by E4M3 without 870, with
# scales per block 760; contraction 1140, 830, 610. A second accumulator halves the tile that fits.
CONFIGS = {
    "fp8": Config(TILE, 256, 8, 4),
    "fp8_split": Config(TILE, 128, 8, 4),
    "fp8_lines": Config(TILE, 64, 8, 4),
    "fp8_contraction": Config(128, 128, 8, 3),
    "bf16": Config(TILE, 256, 8, 3),
    "bf16_contraction": Config(128, 128, 8, 3),
    "fp32": Config(TILE, 64, 8, 2),
}
STEP = 128  # bytes of a row of either operand at a time
GROUP = 8  # tiles of rows that walk along b together: they share what L2 holds of it
NO_BLOCKS, SQUARE, LINES = 0, 1, 2  # b's scales: none per block, 128x128, 1x128


@triton.jit
def rows_kernel(
    a, b, out, scale_a, scale_b, bias, tiles, n_t, N, K, a_m, b_e, b_n, b_k, s_m, s_e, s_n,
    ALPHA_A: tl.constexpr, ALPHA_B: tl.constexpr, BLOCKS: tl.constexpr, BIAS: tl.constexpr,
    FAST: tl.constexpr, LAST: tl.constexpr, EVEN: tl.constexpr, ENTRY: tl.constexpr,
    GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile of `out[M, N]`.

    BLOCKS: `scale_a[K/128, s_m]`, and of each member `scale_b[N/128, s_n]` (1) or `[K/128, s_n]`
    (2). LAST: the contraction is contiguous in b.
    """
    i_t, i_n = swizzled(tl.program_id(0), n_t, tl.cdiv(N, BN), GROUP)
    entry = tiles + i_t * ENTRY
    e = tl.load(entry).to(tl.int64)
    first, end = tl.load(entry + 1), tl.load(entry + 3)
    if (e >= 0) & (first < end):
        o_m = first.to(tl.int64) + tl.arange(0, BM)
        o_n = i_n * BN + tl.arange(0, BN)
        o_k = tl.arange(0, BK)
        o_a = tl.minimum(o_m, end - 1)
        # A clamp needs no mask, but hides from the compiler that columns are neighbours.
        o_b = (tl.minimum(o_n, N - 1) if LAST else o_n).to(tl.int64)
        p_a = a + o_a[:, None] * a_m + o_k[None, :]
        p_b = b + e * b_e + o_b[None, :] * b_n + o_k[:, None] * b_k
        acc = tl.zeros((BM, BN), tl.float32)
        for i_k in range(0, tl.cdiv(K, BK)):
            left = K - i_k * BK
            ok = o_k < left
            b_a = tl.load(p_a) if EVEN else tl.load(p_a, mask=ok[None, :], other=0.0)
            if LAST and EVEN:
                b_b = tl.load(p_b)
            elif LAST:
                b_b = tl.load(p_b, mask=ok[:, None], other=0.0)
            else:
                b_b = tl.load(p_b, mask=ok[:, None] & (o_n[None, :] < N), other=0.0)
            if BLOCKS > 0:
                i_b = i_k * BK // 128
                s_1 = tl.load(scale_a + i_b * s_m + o_a)  # [BM]
                partial = tl.dot(b_a, b_b) * s_1[:, None]
                if BLOCKS == 1:
                    acc += partial * tl.load(scale_b + e * s_e + (i_n * BN // 128) * s_n + i_b)
                else:
                    s_2 = tl.load(scale_b + e * s_e + i_b * s_n + o_b)  # [BN]
                    acc += partial * s_2[None, :]
            elif FAST:
                acc = tl.dot(b_a, b_b, acc)
            else:
                acc += tl.dot(b_a, b_b, input_precision="ieee")
            p_a += BK
            p_b += BK * b_k
        acc = finished(acc, scale_a, scale_b, e, ALPHA_A, ALPHA_B)
        if BIAS:
            acc += tl.load(bias + e * N + o_n, mask=o_n < N, other=0.0).to(tl.float32)[None, :]
        mask = (o_m[:, None] < end) & (o_n[None, :] < N)
        tl.store(out + o_m[:, None] * N + o_n[None, :], acc, mask=mask)


@triton.jit
def contraction_kernel(  # noqa: PLR0915  (a kernel is one function)
    a, b, out, scale_a, scale_b, members, N, K, a_n, a_t, b_k, b_t, s_n, s_k,
    ALPHA_A: tl.constexpr, ALPHA_B: tl.constexpr, BLOCKS: tl.constexpr, ADD: tl.constexpr,
    FAST: tl.constexpr, PADDED: tl.constexpr, LAST_A: tl.constexpr, LAST_B: tl.constexpr,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """One tile of `out[e, N, K]`, of `a[N, T]` and `b[K, T]`; tokens t are added up in steps of BK.

    Members go by size, the largest first. PADDED: they begin at multiples of 128, with zeros up to
    the next; so no step is partial. BLOCKS: `scale_a[T/128, s_n]`, `scale_b[T/128, s_k]`.
    """
    n_n, n_k = tl.cdiv(N, BM), tl.cdiv(K, BN)
    e = tl.load(members + (tl.program_id(0) // (n_n * n_k)) * WIDTH + 4).to(tl.int64)
    i_n, i_k = swizzled(tl.program_id(0) % (n_n * n_k), n_n, n_k, GROUP)
    start = tl.load(members + e * WIDTH)
    size = tl.load(members + e * WIDTH + 1) - start
    if PADDED:
        start = tl.multiple_of(tl.load(members + e * WIDTH + 2), 16)
    o_n = i_n * BM + tl.arange(0, BM)
    o_k = i_k * BN + tl.arange(0, BN)
    o_t = tl.arange(0, BK)
    first = start.to(tl.int64)
    o_a = (tl.minimum(o_n, N - 1) if LAST_A else o_n).to(tl.int64)
    o_b = (tl.minimum(o_k, K - 1) if LAST_B else o_k).to(tl.int64)
    p_a = a + o_a[:, None] * a_n + (first + o_t)[None, :] * a_t
    p_b = b + o_b[None, :] * b_k + (first + o_t)[:, None] * b_t
    if BLOCKS:
        p_s = scale_a + (first // 128) * s_n + o_n
        p_r = scale_b + (first // 128) * s_k + o_k
    acc = tl.zeros((BM, BN), tl.float32)
    for t in range(0, tl.cdiv(size, BK)):
        if PADDED and LAST_A:
            b_a = tl.load(p_a)
        elif PADDED:
            b_a = tl.load(p_a, mask=o_n[:, None] < N, other=0.0)
        else:
            ok = (o_t < size - t * BK)[None, :]
            b_a = tl.load(p_a, mask=ok & (o_n[:, None] < N), other=0.0)
        if PADDED and LAST_B:
            b_b = tl.load(p_b)
        elif PADDED:
            b_b = tl.load(p_b, mask=o_k[None, :] < K, other=0.0)
        else:
            ok = (o_t < size - t * BK)[:, None]
            b_b = tl.load(p_b, mask=ok & (o_k[None, :] < K), other=0.0)
        if BLOCKS:
            i_b = t * BK // 128
            s_1 = tl.load(p_s + i_b * s_n, mask=o_n < N, other=0.0)
            s_2 = tl.load(p_r + i_b * s_k, mask=o_k < K, other=0.0)
            acc += tl.dot(b_a, b_b) * s_1[:, None] * s_2[None, :]
        elif FAST:
            acc = tl.dot(b_a, b_b, acc)
        else:
            acc += tl.dot(b_a, b_b, input_precision="ieee")
        p_a += BK * a_t
        p_b += BK * b_t
    acc = finished(acc, scale_a, scale_b, e, ALPHA_A, ALPHA_B)
    p_o = out + e * N * K + o_n.to(tl.int64)[:, None] * K + o_k[None, :]
    mask = (o_n[:, None] < N) & (o_k[None, :] < K)
    if ADD:
        acc += tl.load(p_o, mask=mask, other=0.0).to(tl.float32)
    tl.store(p_o, acc, mask=mask)


# ---------------------------------------------------------------------------------------- launches
def rows(
    a: Tensor,
    b: Tensor,
    tiles: Tensor,
    out: Tensor,
    *,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    blocks: int = NO_BLOCKS,
    bias: Tensor | None = None,
    fast: bool = False,
) -> None:
    """`out[M, N]` of `a[M, K]` and `b[E, N, K]`, both of an 8-bit or a high-precision dtype.

    Scales are fp32 `[E]`; with `blocks`, `scale_a[K/128, M']` and `scale_b[E, N/128, K']` (SQUARE)
    or `[E, K/128, N']` (LINES).
    """
    if out.numel() > 0:
        _rows(a, b, tiles, out, scale_a, scale_b, blocks, bias, fast).run()


def contraction(
    a: Tensor,
    b: Tensor,
    table: Tensor,
    out: Tensor,
    *,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    blocks: bool = False,
    padded: bool = False,
    add: bool = False,
    fast: bool = False,
) -> None:
    """`out[E, N, K]` (added to with `add`) of `a[N, T]` and `b[K, T]`; T is where members are, at
    their places if `padded`. Scales are fp32 `[E]`, or with `blocks` `[T/128, N']`, `[T/128, K']`.
    """
    if out.numel() > 0:
        _contraction(a, b, table, out, scale_a, scale_b, blocks, padded, add, fast).run()


def _kind(a: Tensor, fast: bool, blocks: int) -> tuple[str, bool]:
    """(key of CONFIGS, whether partial sums are kept in one accumulator)."""
    if blocks:
        return "fp8_lines" if blocks == LINES else "fp8_split", False
    if a.element_size() > 1:
        return ("fp32" if a.element_size() == 4 else "bf16"), a.element_size() < 4
    return "fp8" if fast else "fp8_split", fast


def _fitting(config: Config, device: torch.device) -> Config:
    """With as many stages as the device's shared memory holds, and a narrower tile if that is none
    to speak of: sm_90 has 227 KiB, sm_89 and sm_120 have 99."""
    if device.type != "cuda":
        return config
    limit = env.shared_memory(device)
    while config.stages > 2 and config.stages * (config.m + config.k) * STEP > limit:
        config = config._replace(stages=config.stages - 1)
    if config.stages * (config.m + config.k) * STEP > limit:
        config = config._replace(k=64)
    return config


def _rows(
    a: Tensor,
    b: Tensor,
    tiles: Tensor,
    out: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    blocks: int,
    bias: Tensor | None,
    fast: bool,
) -> Launch:
    kind, one = _kind(a, fast, blocks)
    if kind == "fp8" and bias is None:
        flat = flat_gemm.rows(a, b, tiles, out, scale_a, scale_b)
        if flat is not None:
            return flat
    config = CONFIGS[kind]
    n, k = b.shape[1:]
    if n <= 128 and config.k > 128:
        config = config._replace(k=128)
    config = _fitting(config, a.device)
    step = STEP // a.element_size()
    args = {
        "a": a,
        "b": b,
        "out": out,
        "scale_a": scale_a,
        "scale_b": scale_b,
        "bias": bias,
        "tiles": tiles,
        "n_t": tiles.shape[0],
        "N": n,
        "K": k,
        "a_m": a.stride(0),
        "b_e": b.stride(0),
        "b_n": b.stride(1),
        "b_k": b.stride(2),
        "s_m": scale_a.shape[1] if scale_a is not None and blocks else 0,
        "s_e": scale_b.stride(0) if scale_b is not None and blocks else 0,
        "s_n": scale_b.stride(1) if scale_b is not None and blocks else 0,
        "ALPHA_A": scale_a is not None and not blocks,
        "ALPHA_B": scale_b is not None and not blocks,
        "BLOCKS": blocks,
        "BIAS": bias is not None,
        "FAST": one,
        "LAST": b.stride(2) == 1,
        "EVEN": k % step == 0,
        "ENTRY": ENTRY,
        "GROUP": GROUP,
        "BM": config.m,
        "BN": config.k,
        "BK": step,
    }
    return Launch(rows_kernel, tiles.shape[0] * cdiv(n, config.k), args, config)


def _contraction(
    a: Tensor,
    b: Tensor,
    table: Tensor,
    out: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    blocks: bool,
    padded: bool,
    add: bool,
    fast: bool,
) -> Launch:
    kind, one = _kind(a, fast, blocks)
    if padded and not blocks:
        flat = flat_gemm.contraction(a, b, table, out, scale_a, scale_b, add, fast)
        if flat is not None:
            return flat
    config = CONFIGS[{"fp32": "fp32", "bf16": "bf16_contraction"}.get(kind, "fp8_contraction")]
    num, n, k = out.shape
    config = _fitting(config, a.device)
    args = {
        "a": a,
        "b": b,
        "out": out,
        "scale_a": scale_a,
        "scale_b": scale_b,
        "members": table,
        "N": n,
        "K": k,
        "a_n": a.stride(0),
        "a_t": a.stride(1),
        "b_k": b.stride(0),
        "b_t": b.stride(1),
        "s_n": scale_a.shape[1] if scale_a is not None and blocks else 0,
        "s_k": scale_b.shape[1] if scale_b is not None and blocks else 0,
        "ALPHA_A": scale_a is not None and not blocks,
        "ALPHA_B": scale_b is not None and not blocks,
        "BLOCKS": blocks,
        "ADD": add,
        "FAST": one,
        "PADDED": padded,
        "LAST_A": a.stride(1) == 1,
        "LAST_B": b.stride(1) == 1,
        "WIDTH": WIDTH,
        "GROUP": GROUP,
        "BM": config.m,
        "BN": config.k,
        "BK": STEP // a.element_size(),
    }
    programs = num * cdiv(n, config.m) * cdiv(k, config.k)
    return Launch(contraction_kernel, programs, args, config)


def variants() -> Iterator[Variant]:
    """Codes, values and scales per block; of whole steps and of partial ones."""
    tiles = torch.empty(320, ENTRY, dtype=torch.int32, device="meta")
    table = torch.empty(64, WIDTH, dtype=torch.int32, device="meta")
    one = torch.empty(64, dtype=torch.float32, device="meta")

    def make(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    for tag, n, k in (("whole", 2048, 4096), ("partial", 2000, 4000)):
        y, dw = make(torch.bfloat16, 4096, n), make(torch.bfloat16, 64, n, k)
        for name, da, db, fast in (
            ("fast", e4m3, e4m3, True),
            ("split", e5m2, e4m3, False),
            ("bf16", torch.bfloat16, torch.bfloat16, True),
            ("fp32", torch.float32, torch.float32, False),
        ):
            a, b = make(da, 4096, k), make(db, 64, n, k)
            launch = _rows(a, b, tiles, y, one, one, NO_BLOCKS, None, fast)
            yield Variant.of(f"rows_{name}_{tag}", launch)
            a, b = make(da, n, 8192), make(db, k, 8192)
            launch = _contraction(a, b, table, dw, one, one, False, True, False, fast)
            yield Variant.of(f"contraction_{name}_{tag}", launch)
        scale = make(torch.float32, 32, 4096)
        a, b = make(e4m3, 4096, k), make(e4m3, 64, n, k)
        for blocks in (SQUARE, LINES):
            launch = _rows(a, b, tiles, y, scale, scale[None], blocks, None, False)
            yield Variant.of(f"rows_blocks{blocks}_{tag}", launch)
        a, b = make(e4m3, n, 8192), make(e4m3, k, 8192)
        launch = _contraction(a, b, table, dw, scale, scale, True, True, False, False)
        yield Variant.of(f"contraction_blocks_{tag}", launch)
