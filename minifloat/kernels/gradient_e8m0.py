"""Gradients of activations as FP8 blocks with E8M0 scales, or as those blocks' values.

    (h, dy)  ->  row and column copies of dh = [dg | dl], the column copy of y = activation(h), and
                 sums of dh's columns: one read of h and dy

What `activation_grad` is to `produce`, this is to `produce_e8m0`. The copies are all codes or all
values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import Cast, rup
from ..producer import ACTIVATIONS, Producer, activation
from ._device import high, low
from ._e8m0_device import store_e8m0
from ._produce_device import differentiated_words, in_words
from .activation_grad import arguments
from .produce_e8m0 import PAD, element_arguments, has_blocks
from .sums import column_sums
from .variant import Config, Launch, Variant

__all__ = ["backward", "fuses_backward", "variants"]

# H200, bf16, us: values of SwiGLU's gradient, both directions, and of SwiGLU's columns at
# 16384x14336: 1026 at 64 columns and 4 warps (copy_ of the bytes: 891), 1159 with 2, 1162 at 128
# and 4; with sums 1220 at 64 and 2, 1292 with 4. Codes are not tuned: with 4 warps they spill.
CONFIGS = {
    "values": Config(32, 64, 4),
    "values_sums": Config(32, 64, 2),
    "codes": Config(32, 64, 2),
    "codes_sums": Config(32, 64, 2),
}


@triton.jit
def store_tile_sums(sums, b_w, i_m, i_k, K):
    """Sums of the columns of words into row i_m of `sums[., K]`."""
    BK: tl.constexpr = 2 * b_w.shape[1]
    b_s = tl.join(tl.sum(low(b_w), 0), tl.sum(high(b_w), 0))  # [BW, 2]
    tl.store(sums + i_m * K + i_k * BK + tl.arange(0, BK), tl.reshape(b_s, (BK,)))


@triton.jit
def cast_kernel(
    h, dy, row, row_scale, col, col_scale, act, act_scale, sums, M, F, stride, dy_stride,
    FN: tl.constexpr, GATED: tl.constexpr, ALPHA: tl.constexpr, CLIP: tl.constexpr,
    OFFSET: tl.constexpr, CODES: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr,
    ACT: tl.constexpr, SUMS: tl.constexpr, LIMIT: tl.constexpr, RECIPROCAL: tl.constexpr,
    TYPE: tl.constexpr, ACT_LIMIT: tl.constexpr, ACT_RECIPROCAL: tl.constexpr,
    ACT_TYPE: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Copies of dh and y, as `store_e8m0` has them; a program has both halves of its tile."""
    i_t = tl.num_programs(0) - 1 - tl.program_id(0)
    BW: tl.constexpr = BK // 2
    n_k = F // BK
    i_m = (i_t // n_k).to(tl.int64)
    i_k = (i_t % n_k).to(tl.int64)
    o_m = i_m * BM + tl.arange(0, BM)
    o_w = i_k * BW + tl.arange(0, BW)
    p_h = h.to(tl.pointer_type(tl.int32), bitcast=True) + o_m[:, None] * (stride // 2)
    p_h += o_w[None, :]
    p_d = dy.to(tl.pointer_type(tl.int32), bitcast=True) + o_m[:, None] * (dy_stride // 2)
    p_d += o_w[None, :]
    m_h = o_m[:, None] < M
    b_g = tl.load(p_h) if EVEN else tl.load(p_h, mask=m_h, other=0)  # [BM, BW]
    b_d = tl.load(p_d) if EVEN else tl.load(p_d, mask=m_h, other=0)
    b_l = b_g
    if GATED:
        p_h += F // 2
        b_l = tl.load(p_h) if EVEN else tl.load(p_h, mask=m_h, other=0)
    b_g, b_l, b_y = differentiated_words(b_g, b_l, b_d, FN, GATED, ALPHA, CLIP, OFFSET)
    K = 2 * F if GATED else F
    if ACT:
        store_e8m0(
            b_y, None, None, act, act_scale, i_m, i_k, M, F, False, CODES, True, CODES, ACT_LIMIT,
            ACT_RECIPROCAL, ACT_TYPE, EVEN,
        )  # fmt: skip
    store_e8m0(
        b_g, row, row_scale, col, col_scale, i_m, i_k, M, K, ROW, CODES, COL, CODES, LIMIT,
        RECIPROCAL, TYPE, EVEN,
    )  # fmt: skip
    if SUMS:
        store_tile_sums(sums, b_g, i_m, i_k, K)
    if GATED:
        store_e8m0(
            b_l, row, row_scale, col, col_scale, i_m, i_k + n_k, M, K, ROW, CODES, COL, CODES,
            LIMIT, RECIPROCAL, TYPE, EVEN,
        )  # fmt: skip
        if SUMS:
            store_tile_sums(sums, b_l, i_m, i_k + n_k, K)


# ------------------------------------------------------------------------------------------- fronts
def fuses_backward(
    p: Producer, inputs: Sequence[Tensor | None], dtype: torch.dtype, *casts: Cast | None
) -> bool:
    """Whether kernels here make these copies: of dh's row and column, and of y's column."""
    h, dy = inputs
    assert h is not None and dy is not None
    row, col, _ = casts
    if p.interleave or (row is not None and col is not None and row != col):
        return False
    if not all(has_blocks(c) for c in casts if c is not None):
        return False
    m, f = dy.shape
    return in_words(dtype, rup(m, 4), f, h, dy)


def backward(
    p: Producer,
    inputs: Sequence[Tensor | None],
    casts: tuple[Cast | None, Cast | None, Cast | None],
    out: dict[str, Tensor],
    act_out: dict[str, Tensor],
    db: Tensor | None,
) -> None:
    """Everything into `out` (dh), `act_out` (y) and `db`; the names are `produce_e8m0`'s."""
    launch = _backward(p, inputs, casts, out, act_out, db is not None)
    launch.run()
    if db is not None:
        column_sums(launch.args["sums"], db)


# ----------------------------------------------------------------------------------------- launches
def _backward(
    p: Producer,
    inputs: Sequence[Tensor | None],
    casts: tuple[Cast | None, Cast | None, Cast | None],
    out: dict[str, Tensor],
    act_out: dict[str, Tensor],
    sums: bool,
    config: Config | None = None,
) -> Launch:
    args = arguments(p, inputs)
    row, col, act = casts
    d = row or col
    assert d is not None
    codes = "row_data" in out or "col_data" in out
    config = config or CONFIGS[f"{'codes' if codes else 'values'}{'_sums' * sums}"]
    m, f, k = args["M"], args["F"], args["h"].shape[1]
    tiles = rup(m, PAD) // config.m
    device = args["h"].device
    partial = torch.empty((tiles, k), dtype=torch.float32, device=device) if sums else None
    args |= element_arguments(d) | element_arguments(act or d, "ACT_")
    args |= {
        "row": out.get("row_data", out.get("row")), "row_scale": out.get("row_scale"),
        "col": out.get("col_data", out.get("col")), "col_scale": out.get("col_scale"),
        "act": act_out.get("col_data", act_out.get("col")), "act_scale": act_out.get("col_scale"),
        "sums": partial, "CODES": codes, "ROW": row is not None,
        "COL": col is not None, "ACT": act is not None, "SUMS": sums, "EVEN": m % PAD == 0,
        "BM": config.m, "BK": config.k,
    }  # fmt: skip
    return Launch.of(cast_kernel, tiles * (f // config.k), args, config)


# ----------------------------------------------------------------------------------------- variants
def variants() -> Iterator[Variant]:
    """Codes and values of swiglu's gradient, and of every other activation's once."""
    code = torch.empty(1, dtype=torch.uint8, device="meta")
    number = torch.empty(1, dtype=torch.bfloat16, device="meta")
    mx = Cast("mxfp8_e4m3")
    outs = {
        "codes": {"row_data": code, "row_scale": code, "col_data": code, "col_scale": code},
        "values": {"row": number, "col": number},
    }
    for m, f in ((4096, 4096), (4097, 4096)):
        for name in ACTIVATIONS if m == 4096 else ("swiglu",):
            p = activation(name).gradient()
            h = torch.empty(m, 2 * f if p.gated else f, dtype=torch.bfloat16, device="meta")
            inputs = (h, torch.empty(m, f, dtype=torch.bfloat16, device="meta"))
            for form, out in outs.items():
                for sums in (False, True) if name == "swiglu" else (True,):
                    tag = f"{form}_{name}{'_sums' * sums}_bf16_{m}x{f}"
                    yield Variant.of(tag, _backward(p, inputs, (mx, mx, mx), out, out, sums))
                    if name == "swiglu":
                        launch = _backward(p, inputs, (mx, mx, None), out, {}, sums)
                        yield Variant.of(f"only_{tag}", launch)
