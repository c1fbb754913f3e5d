"""Gradients of gated activations into 1x128 blocks whose scales are powers of two.

    (h, dy)  ->  codes and scales of the row and column copies of dh = [dg | dl], and of the column
                 copy of y

A program's three 128x128 tiles fill the registers of a multiprocessor: nothing else runs there that
would hide its loads. So a program has one tile after the other, and the next two are copied to
shared memory meanwhile. All scales of a tile are found at once, two in a word.

H200, 16384x14336, beside a copy of the same bytes: 847 us with y (72%) and 644 us without (86%).
`activation_grad.words_kernel`, with one tile to a program and a division to a scale: 1114 us with
y, with 16 warps. One tile ahead in place of two: 1030 us. Two programs, one for dh and one for y,
on a multiprocessor: 867 us. Without y, tiles of their own for programs of 64 registers: 635 us, but
not every ptxas has that many to spare.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from .. import env
from ..formats import E4M3, E5M2
from ..producer import ACTIVATIONS, activation
from ._blocks_device import (
    inverse2,
    max4,
    own_rows,
    pow2_bounds,
    pow2_scales,
    row_words,
    store_words,
)
from ._device import FP8, IS_PTX, high, low, max2, reduce2
from ._produce_device import differentiated_words, load_four, numbers
from .variant import Config, Launch, Variant

__all__ = ["fits", "launch", "variants"]

CONFIG = Config(128, 128, 8, 3)
SHARED = 3 * 2 * 128 * 128 * 2 + 128 * 128  # two tiles of three inputs, and one of codes


@triton.jit
def max_each2(a0, a1, b0, b1):
    return max2(a0, b0), max2(a1, b1)


@triton.jit
def max_each3(a0, a1, a2, b0, b1, b2):
    return max2(a0, b0), max2(a1, b1), max2(a2, b2)


@triton.jit
def reduce_two(b_0, b_1, AXIS: tl.constexpr):
    """`reduce2` of each: threads wait for one another once."""
    if IS_PTX:
        b_0, b_1 = tl.reduce((b_0, b_1), AXIS, max_each2)
    else:
        b_0, b_1 = reduce2(b_0, AXIS), reduce2(b_1, AXIS)
    return b_0, b_1


@triton.jit
def reduce_three(b_0, b_1, b_2, AXIS: tl.constexpr):
    if IS_PTX:
        b_0, b_1, b_2 = tl.reduce((b_0, b_1, b_2), AXIS, max_each3)
    else:
        b_0, b_1, b_2 = reduce2(b_0, AXIS), reduce2(b_1, AXIS), reduce2(b_2, AXIS)
    return b_0, b_1, b_2


@triton.jit
def max_each4(a0, a1, a2, a3, b0, b1, b2, b3):
    return max2(a0, b0), max2(a1, b1), max2(a2, b2), max2(a3, b3)


@triton.jit
def reduce_four(b_0, b_1, b_2, b_3, AXIS: tl.constexpr):
    if IS_PTX:
        b_0, b_1, b_2, b_3 = tl.reduce((b_0, b_1, b_2, b_3), AXIS, max_each4)
    else:
        b_0, b_1 = reduce2(b_0, AXIS), reduce2(b_1, AXIS)
        b_2, b_3 = reduce2(b_2, AXIS), reduce2(b_3, AXIS)
    return b_0, b_1, b_2, b_3


@triton.jit
def gate_columns(b_g, b_l, scale, eps, i_m, i_k, F, LIMIT: tl.constexpr):
    """Scales of the columns of dg and dl, from the words of their rows' maxima."""
    b_g, b_l = reduce_two(b_g, b_l, 0)  # [64]
    least, step, top = pow2_bounds(eps, LIMIT)
    # One thread to a word, those of dg first: see `_device.spread`.
    o_w = tl.arange(0, 128)
    b_s = tl.gather(tl.reshape(tl.join(b_g, b_l), (128,)), (o_w % 64) * 2 + o_w // 64, 0)
    b_s = pow2_scales(b_s, least, step, top, LIMIT)
    b_d = inverse2(b_s)
    o_n = tl.arange(0, 256)
    p_s = scale + i_m * 2 * F + (o_n // 128) * F + i_k * 128 + o_n % 128
    tl.store(p_s, tl.reshape(tl.join(low(b_d), high(b_d)), (256,)))
    b_s = tl.gather(b_s, o_w // 2 + (o_w % 2) * 64, 0)
    return tl.split(tl.reshape(b_s, (64, 2)))


@triton.jit
def all_columns(
    b_g, b_l, b_y, scale, act_scale, eps, act_eps, i_m, i_k, F, LIMIT: tl.constexpr
):  # fmt: skip
    """`gate_columns`, and those of y."""
    b_g, b_l, b_y = reduce_three(b_g, b_l, b_y, 0)  # [64]
    least, step, top = pow2_bounds(eps, LIMIT)
    least_y, step_y, top_y = pow2_bounds(act_eps, LIMIT)
    o_w = tl.arange(0, 256)  # the last 64 are y's again
    b_s = tl.reshape(tl.join(tl.join(b_g, b_l), tl.join(b_y, b_y)), (256,))
    b_s = tl.gather(b_s, (o_w % 64) * 4 + ((o_w // 64) % 2) * 2 + o_w // 128, 0)
    m_y = o_w >= 128
    b_s = pow2_scales(
        b_s, tl.where(m_y, least_y, least), tl.where(m_y, step_y, step), tl.where(m_y, top_y, top),
        LIMIT,
    )  # fmt: skip
    b_d = inverse2(b_s)
    o_n = tl.arange(0, 512)
    p_s = scale + i_m * 2 * F + (o_n // 128) * F + i_k * 128 + o_n % 128
    p_s = tl.where(o_n < 256, p_s, act_scale + i_m * F + i_k * 128 + o_n % 128)
    tl.store(p_s, tl.reshape(tl.join(low(b_d), high(b_d)), (512,)), mask=o_n < 384)
    b_s = tl.gather(b_s, o_w // 4 + ((o_w // 2) % 2) * 64 + (o_w % 2) * 128, 0)
    b_s, s_y = tl.split(tl.reshape(b_s, (64, 2, 2)))
    s_g, s_l = tl.split(b_s)
    s_y, _ = tl.split(s_y)
    return s_g, s_l, s_y


@triton.jit
def gate_rows(a_0, a_1, b_0, b_1, scale, eps, i_m, i_k, M, F, LIMIT: tl.constexpr):
    """Scales of the rows of dg and of dl, two words of two rows each, from their maxima."""
    least, step, top = pow2_bounds(eps, LIMIT)
    a_0 = pow2_scales(a_0, least, step, top, LIMIT)
    a_1 = pow2_scales(a_1, least, step, top, LIMIT)
    b_0 = pow2_scales(b_0, least, step, top, LIMIT)
    b_1 = pow2_scales(b_1, least, step, top, LIMIT)
    o_w = tl.arange(0, 128)
    b_s = tl.reshape(tl.join(tl.join(a_0, a_1), tl.join(b_0, b_1)), (128,))
    b_s = tl.gather(b_s, ((o_w % 64) // 2) * 4 + (o_w % 2) * 2 + o_w // 64, 0)
    b_d = inverse2(b_s)
    o_n = tl.arange(0, 256)
    p_s = scale + (i_k + (o_n // 128) * (F // 128)) * M + i_m * 128 + o_n % 128
    tl.store(p_s, tl.reshape(tl.join(low(b_d), high(b_d)), (256,)))
    return a_0, a_1, b_0, b_1


@triton.jit
def gate_tile(
    i_t, h, dy, row, row_scale, col, col_scale, act, act_scale, eps, act_eps, M, F, stride,
    dy_stride, FN: tl.constexpr, ALPHA: tl.constexpr, CLIP: tl.constexpr, OFFSET: tl.constexpr,
    ACT: tl.constexpr, LIMIT: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    n_k = F // 128
    i_m = (i_t // n_k).to(tl.int64)
    i_k = (i_t % n_k).to(tl.int64)
    o_m = i_m * 128 + 4 * tl.arange(0, 32)
    o_w = i_k * 64 + tl.arange(0, 64)
    p_h = h.to(tl.pointer_type(tl.int32), bitcast=True) + o_m[:, None] * (stride // 2)
    p_h += o_w[None, :]
    p_d = dy.to(tl.pointer_type(tl.int32), bitcast=True) + o_m[:, None] * (dy_stride // 2)
    p_d += o_w[None, :]
    g0, g1, g2, g3 = load_four(p_h, stride // 2, None, True)  # [32, 64], rows 0, 4, ...
    d0, d1, d2, d3 = load_four(p_d, dy_stride // 2, None, True)
    l0, l1, l2, l3 = load_four(p_h + F // 2, stride // 2, None, True)
    g0, l0, y0 = differentiated_words(g0, l0, d0, FN, True, ALPHA, CLIP, OFFSET)
    g1, l1, y1 = differentiated_words(g1, l1, d1, FN, True, ALPHA, CLIP, OFFSET)
    g2, l2, y2 = differentiated_words(g2, l2, d2, FN, True, ALPHA, CLIP, OFFSET)
    g3, l3, y3 = differentiated_words(g3, l3, d3, FN, True, ALPHA, CLIP, OFFSET)
    s_0, s_1 = own_rows(g0, g1, g2, g3)
    t_0, t_1 = own_rows(l0, l1, l2, l3)
    s_0, s_1, t_0, t_1 = reduce_four(s_0, s_1, t_0, t_1, 1)  # [32]
    b_g, b_l = max4(g0, g1, g2, g3), max4(l0, l1, l2, l3)
    if ACT:
        c_g, c_l, c_y = all_columns(
            b_g, b_l, max4(y0, y1, y2, y3), col_scale, act_scale, eps, act_eps, i_m, i_k, F, LIMIT
        )
    else:
        c_g, c_l = gate_columns(b_g, b_l, col_scale, eps, i_m, i_k, F, LIMIT)
        c_y = c_g
    s_0, s_1, t_0, t_1 = gate_rows(s_0, s_1, t_0, t_1, row_scale, eps, i_m, i_k, M, F, LIMIT)
    r0, r1, r2, r3 = row_words(s_0, s_1)
    c_g, c_l, c_y = c_g[None, :], c_l[None, :], c_y[None, :]
    store_words(
        g0, g1, g2, g3, r0, r1, r2, r3, c_g, c_g, row, col, i_m, i_k, M, 2 * F, True, True, LIMIT,
        TYPE, True, True, 128,
    )  # fmt: skip
    r0, r1, r2, r3 = row_words(t_0, t_1)
    store_words(
        l0, l1, l2, l3, r0, r1, r2, r3, c_l, c_l, row, col, i_m, i_k + n_k, M, 2 * F, True, True,
        LIMIT, TYPE, True, True, 128,
    )  # fmt: skip
    if ACT:
        store_words(
            y0, y1, y2, y3, r0, r1, r2, r3, c_y, c_y, None, act, i_m, i_k, M, F, False, True,
            LIMIT, TYPE, True, True, 128,
        )  # fmt: skip


@triton.jit
def gate_kernel(
    h, dy, row, row_scale, col, col_scale, act, act_scale, eps, act_eps, tiles, M, F, stride,
    dy_stride, FN: tl.constexpr, ALPHA: tl.constexpr, CLIP: tl.constexpr, OFFSET: tl.constexpr,
    ACT: tl.constexpr, LIMIT: tl.constexpr, TYPE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Tiles p, p + programs, ... of whole 128x128 tiles, from the last to the first."""
    for i in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        gate_tile(
            tiles - 1 - i, h, dy, row, row_scale, col, col_scale, act, act_scale, eps, act_eps, M,
            F, stride, dy_stride, FN, ALPHA, CLIP, OFFSET, ACT, LIMIT, TYPE,
        )  # fmt: skip


def fits(args: Mapping[str, Any], device: torch.device) -> bool:
    """Whether `activation_grad`'s arguments are for this kernel, and `device` has room for it."""
    whole = args["GATED"] and args["ROW"] and args["COL"] and not args["SUMS"]
    blocks = args["TILED"] and args["POW2"] and args["ACT_POW2"] and not args["SQUARE"]
    same = args["LIMIT"] == args["ACT_LIMIT"]
    room = device.type != "cuda" or env.shared_memory(device) >= SHARED
    return bool(whole and blocks and same and room and CONFIG.even(args["M"], args["F"]))


def launch(args: Mapping[str, Any], device: torch.device) -> Launch:
    """One program to a multiprocessor."""
    tiles = CONFIG.tiles(args["M"], args["F"])
    programs = min(tiles, env.multiprocessors(device))
    args = {**args, "tiles": tiles, "STAGES": CONFIG.stages}
    return Launch.of(gate_kernel, programs, args, CONFIG)


def variants() -> Iterator[Variant]:
    """Every gated activation, with y and without."""
    code = torch.empty(1, dtype=torch.uint8, device="meta")
    scale = torch.empty(1, dtype=torch.float32, device="meta")
    x = torch.empty(1, dtype=torch.bfloat16, device="meta")
    m, f = 4096, 4096
    for name, a in ACTIVATIONS.items():
        for element in (E4M3, E5M2) if name == "swiglu" else (E4M3,):
            for y in (True, False) if a.gated else ():
                args = {
                    "h": x, "dy": x, "row": code, "row_scale": scale, "col": code,
                    "col_scale": scale, "act": code if y else None,
                    "act_scale": scale if y else None, "eps": 0.0, "act_eps": 0.0, "M": m, "F": f,
                    "stride": 2 * f, "dy_stride": f, "ACT": y, "LIMIT": element.max,
                    "TYPE": FP8[element], **numbers(activation(name)),
                }  # fmt: skip
                end = f"{name}_{element.name}{'_y' * y}_bf16_{m}x{f}"
                yield Variant.of(f"gate_{end}", launch(args, x.device))
