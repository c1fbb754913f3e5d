"""Gradients of activations: their values, and FP8 casts of them with fp32 scales.

    (h, dy)  ->  codes of the row and column copies of dh = [dg | dl], of the column copy of
                 y = activation(h), and sums of dh's columns: one read of h and dy

Both halves of a tile of h, and all that comes of them, belong to one program. Everything is rounded
to its dtype first, as in `produce`. y is computed again because forward does not keep it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import FP32_MAX, Cast, Scale, cdiv
from ..layout import pad
from ..producer import ACTIVATIONS, Producer, activation
from . import gradient_blocks
from ._blocks_device import max4, store_words, word_scales
from ._device import FP8, abs_bits, encode, high, low, max2, padded, reduce2
from ._produce_device import (
    differentiate,
    differentiated_words,
    in_words,
    load_four,
    numbers,
    scaled,
)
from .produce import amax_launch, partial_amax, tile
from .sums import column_sums
from .tensorwise import PARTIALS, find_scale, store_scaled
from .variant import Config, Launch, Variant

__all__ = ["arguments", "backward", "fuses_backward", "value", "variants"]

# H200, gradient of SwiGLU into 1x128 blocks with its column copy, 16384x14336: 16 warps 1120 us, 8
# warps 1240, and 847 by `gradient_blocks`, which takes most of these. With sums 16 warps spill. The
# others are not tuned.
CONFIGS = {
    "value": Config(1, 2048, 4),
    "amax": Config(1, 2048, 4),
    "scaled": Config(64, 64, 8),
    "words_scaled": Config(64, 128, 8),
    "words_scaled_sums": Config(64, 128, 8),
    "words_blocks": Config(128, 128, 16),
    "words_blocks_sums": Config(128, 128, 8),
}
_UPPER = tl.constexpr(-0x10000)  # the second number of a word


@triton.jit
def load_gradient(
    h, dy, of_h, of_dy, o_m, o_k, M, F, stride, dy_stride, TYPE: tl.constexpr, FN: tl.constexpr,
    GATED: tl.constexpr, ALPHA: tl.constexpr, CLIP: tl.constexpr, OFFSET: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Tiles `[o_m, o_k]` of dg, dl and y in TYPE; zero outside [M, F).

    The numbers `of_h[0]` and `of_dy[0]`, where there are any, multiply h and dy.
    """
    m_h = (o_m[:, None] < M) & (o_k[None, :] < F)
    p_h = h + o_m[:, None] * stride + o_k[None, :]
    p_d = dy + o_m[:, None] * dy_stride + o_k[None, :]
    b_g = (tl.load(p_h) if EVEN else tl.load(p_h, mask=m_h, other=0)).to(tl.float32)
    b_l = b_g
    if GATED:
        b_l = (tl.load(p_h + F) if EVEN else tl.load(p_h + F, mask=m_h, other=0)).to(tl.float32)
    b_d = (tl.load(p_d) if EVEN else tl.load(p_d, mask=m_h, other=0)).to(tl.float32)
    b_g, b_l, b_d = scaled(b_g, of_h, h), scaled(b_l, of_h, h), scaled(b_d, of_dy, dy)
    dg, dl, y = differentiate(b_g, b_l, b_d, FN, GATED, ALPHA, CLIP, OFFSET)
    return dg.to(TYPE), dl.to(TYPE), y.to(TYPE)


@triton.jit
def value_kernel(
    h, dy, of_h, of_dy, out, M, F, stride, dy_stride, FN: tl.constexpr, GATED: tl.constexpr,
    ALPHA: tl.constexpr, CLIP: tl.constexpr, OFFSET: tl.constexpr, DTYPE: tl.constexpr,
    EVEN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """`out`, of h's shape, = dh."""
    n_k = tl.cdiv(F, BK)
    o_m = (tl.program_id(0) // n_k).to(tl.int64) * BM + tl.arange(0, BM)
    o_k = (tl.program_id(0) % n_k).to(tl.int64) * BK + tl.arange(0, BK)
    dg, dl, _ = load_gradient(
        h, dy, of_h, of_dy, o_m, o_k, M, F, stride, dy_stride, DTYPE, FN, GATED, ALPHA, CLIP,
        OFFSET, EVEN,
    )  # fmt: skip
    m_h = (o_m[:, None] < M) & (o_k[None, :] < F)
    p_o = out + o_m[:, None] * (2 * F if GATED else F) + o_k[None, :]
    tl.store(p_o, dg, mask=None if EVEN else m_h)
    if GATED:
        tl.store(p_o + F, dl, mask=None if EVEN else m_h)


@triton.jit
def amax_kernel(
    h, dy, partial, tiles, M, F, stride, dy_stride, FN: tl.constexpr, GATED: tl.constexpr,
    ALPHA: tl.constexpr, CLIP: tl.constexpr, OFFSET: tl.constexpr, DTYPE: tl.constexpr,
    EVEN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """`partial[p]`: bits of the largest |dh| in tiles p, p + programs, ..."""
    i_p = tl.program_id(0).to(tl.int64)
    n_k = tl.cdiv(F, BK)
    b_max = tl.zeros((BM, BK), tl.int32)
    for i_t in range(i_p, tiles, tl.num_programs(0)):
        o_m = (i_t // n_k) * BM + tl.arange(0, BM)
        o_k = (i_t % n_k) * BK + tl.arange(0, BK)
        dg, dl, _ = load_gradient(
            h, dy, None, None, o_m, o_k, M, F, stride, dy_stride, DTYPE, FN, GATED, ALPHA, CLIP,
            OFFSET, EVEN,
        )  # fmt: skip
        b_max = tl.maximum(b_max, abs_bits(dg))
        if GATED:
            b_max = tl.maximum(b_max, abs_bits(dl))
    tl.store(partial + i_p, tl.max(b_max))


@triton.jit
def store_sums(sums, b, i_m, o_k, N, K, EVEN: tl.constexpr):
    """Sums of a tile's columns into row i_m of `sums[., N]`; K bounds the columns."""
    b_s = tl.sum(b.to(tl.float32), 0)
    tl.store(sums + i_m * N + o_k, b_s, mask=None if EVEN else o_k < K)


@triton.jit(do_not_specialize=["n", "act_n"])
def scaled_kernel(
    h, dy, row, col, act, source, n, amax, scale_inv, act_source, act_n, act_scale_inv, sums,
    eps, act_eps, M, F, stride, dy_stride,
    FN: tl.constexpr, GATED: tl.constexpr, ALPHA: tl.constexpr, CLIP: tl.constexpr,
    OFFSET: tl.constexpr, DTYPE: tl.constexpr, SCALED: tl.constexpr, ACT_SCALED: tl.constexpr,
    ROW: tl.constexpr, COL: tl.constexpr, ACT: tl.constexpr, AMAX: tl.constexpr,
    SUMS: tl.constexpr, LIMIT: tl.constexpr, TYPE: tl.constexpr, POW2: tl.constexpr,
    ACT_LIMIT: tl.constexpr, ACT_TYPE: tl.constexpr, ACT_POW2: tl.constexpr, INF: tl.constexpr,
    PARTIALS: tl.constexpr, EVEN: tl.constexpr, PAD: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Casts under one scale for dh and one for y."""
    i_p = tl.program_id(0)
    i_t = tl.num_programs(0) - 1 - i_p
    n_k = tl.cdiv(F, BK)
    i_m = (i_t // n_k).to(tl.int64)
    o_m = i_m * BM + tl.arange(0, BM)
    o_k = (i_t % n_k).to(tl.int64) * BK + tl.arange(0, BK)
    dg, dl, y = load_gradient(
        h, dy, None, None, o_m, o_k, M, F, stride, dy_stride, DTYPE, FN, GATED, ALPHA, CLIP,
        OFFSET, EVEN,
    )  # fmt: skip
    # Rows of codes have K columns; those of this tile are masked by F, as the halves are.
    K = 2 * F if GATED else F
    top = 0
    if AMAX:
        b_max = abs_bits(dg)
        if GATED:
            b_max = tl.maximum(b_max, abs_bits(dl))
        top = tl.max(b_max)
    s = find_scale(
        source, n, top, amax, scale_inv, None, eps, i_p, SCALED, AMAX, False, LIMIT, INF, POW2,
        PARTIALS,
    )  # fmt: skip
    m_h = (o_m[:, None] < M) & (o_k[None, :] < F)
    # Past the first half is the second, which ends where no room is needed: see `fuses_backward`.
    m_p = (o_m[:, None] < padded(M, PAD)) & (o_k[None, :] < padded(F, 1 if GATED else PAD))
    store_half(dg, row, col, s, o_m, o_k, m_h, m_p, M, K, ROW, COL, LIMIT, TYPE, EVEN, PAD)
    if SUMS:
        store_sums(sums, dg, i_m, o_k, K, F, EVEN)
    if GATED:
        store_half(dl, row, col, s, o_m, o_k + F, m_h, m_p, M, K, ROW, COL, LIMIT, TYPE, EVEN, PAD)
        if SUMS:
            store_sums(sums + F, dl, i_m, o_k, K, F, EVEN)
    if ACT:
        store_scaled(
            y, None, act, act_source, act_n, None, act_scale_inv, None, act_eps, i_p, o_m, o_k, M,
            F, ACT_SCALED, False, True, False, False, ACT_LIMIT, ACT_TYPE, INF, ACT_POW2, PARTIALS,
            EVEN, PAD,
        )  # fmt: skip


@triton.jit
def store_half(
    b_x, row, col, scale, o_m, o_k, m_x, m_p, M, K, ROW: tl.constexpr, COL: tl.constexpr,
    LIMIT: tl.constexpr, TYPE: tl.constexpr, EVEN: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Codes of a tile of `[M, K]` where m_x says so, and zeros where m_p does besides."""
    if ROW:
        b_y = b_x.to(tl.float32) * scale
        b_q = encode(b_y if PAD == 1 else tl.where(m_x, b_y, 0.0), LIMIT, TYPE, True)
        p_q = row + o_m[:, None] * padded(K, PAD) + o_k[None, :]
        tl.store(p_q, b_q, mask=None if EVEN else m_p)
    if COL:
        b_y = tl.trans(b_x).to(tl.float32) * scale
        b_q = encode(b_y if PAD == 1 else tl.where(tl.trans(m_x), b_y, 0.0), LIMIT, TYPE, True)
        p_q = col + o_k[:, None] * padded(M, PAD) + o_m[None, :]
        tl.store(p_q, b_q, mask=None if EVEN else tl.trans(m_p))


@triton.jit
def store_word_sums(sums, w0, w1, w2, w3, i_m, i_k, N):
    """Sums of the columns of words into row i_m of `sums[., N]`."""
    b_0 = tl.sum((low(w0) + low(w1)) + (low(w2) + low(w3)), 0)  # [64]
    b_1 = tl.sum((high(w0) + high(w1)) + (high(w2) + high(w3)), 0)
    p_s = sums + i_m * N + i_k * 128 + tl.arange(0, 128)
    tl.store(p_s, tl.reshape(tl.join(b_0, b_1), (128,)))


@triton.jit
def store_word_tile(
    w0, w1, w2, w3, s, row, row_scale, col, col_scale, eps, i_m, i_k, M, K,
    TILED: tl.constexpr, SQUARE: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr,
    LIMIT: tl.constexpr, TYPE: tl.constexpr, INF: tl.constexpr, POW2: tl.constexpr,
    EVEN: tl.constexpr, BM: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Codes of a tile of words under the scale s, or under scales of its own if TILED."""
    r0, r1, r2, r3, c0, c1 = s, s, s, s, s, s
    if TILED:
        r0, r1, r2, r3, c0, c1 = word_scales(
            w0, w1, w2, w3, row_scale, col_scale, eps, i_m, i_k, M, K,
            SQUARE, ROW, COL, ROW, COL, LIMIT, INF, POW2, False, EVEN, PAD,
        )  # fmt: skip
    store_words(
        w0, w1, w2, w3, r0, r1, r2, r3, c0, c1, row, col, i_m, i_k, M, K, ROW, COL, LIMIT, TYPE,
        False, EVEN, BM, PAD,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n", "act_n"])
def words_kernel(  # noqa: PLR0915
    h, dy, row, row_scale, col, col_scale, act, act_scale, source, n, amax, scale_inv, act_source,
    act_n, act_scale_inv, sums, eps, act_eps, M, F, stride, dy_stride,
    FN: tl.constexpr, GATED: tl.constexpr, ALPHA: tl.constexpr, CLIP: tl.constexpr,
    OFFSET: tl.constexpr, TILED: tl.constexpr, SQUARE: tl.constexpr, SCALED: tl.constexpr,
    ACT_SCALED: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr, ACT: tl.constexpr,
    AMAX: tl.constexpr, SUMS: tl.constexpr, LIMIT: tl.constexpr, TYPE: tl.constexpr,
    POW2: tl.constexpr, ACT_LIMIT: tl.constexpr, ACT_TYPE: tl.constexpr, ACT_POW2: tl.constexpr,
    INF: tl.constexpr, PARTIALS: tl.constexpr, EVEN: tl.constexpr, PAD: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """`scaled_kernel` in BM x 128 tiles of words; TILED: every tile has scales of its own."""
    i_p = tl.program_id(0)
    i_t = tl.num_programs(0) - 1 - i_p
    n_k = F // 128
    i_m = (i_t // n_k).to(tl.int64)
    i_k = (i_t % n_k).to(tl.int64)
    o_m = i_m * BM + 4 * tl.arange(0, BM // 4)
    o_w = i_k * 64 + tl.arange(0, 64)
    p_h = h.to(tl.pointer_type(tl.int32), bitcast=True) + o_m[:, None] * (stride // 2)
    p_h += o_w[None, :]
    p_d = dy.to(tl.pointer_type(tl.int32), bitcast=True) + o_m[:, None] * (dy_stride // 2)
    p_d += o_w[None, :]
    m_h = o_m[:, None] < M
    g0, g1, g2, g3 = load_four(p_h, stride // 2, m_h, EVEN)  # [BM/4, 64], rows 0, 4, ...
    d0, d1, d2, d3 = load_four(p_d, dy_stride // 2, m_h, EVEN)
    l0, l1, l2, l3 = g0, g1, g2, g3
    if GATED:
        l0, l1, l2, l3 = load_four(p_h + F // 2, stride // 2, m_h, EVEN)
    g0, l0, y0 = differentiated_words(g0, l0, d0, FN, GATED, ALPHA, CLIP, OFFSET)
    g1, l1, y1 = differentiated_words(g1, l1, d1, FN, GATED, ALPHA, CLIP, OFFSET)
    g2, l2, y2 = differentiated_words(g2, l2, d2, FN, GATED, ALPHA, CLIP, OFFSET)
    g3, l3, y3 = differentiated_words(g3, l3, d3, FN, GATED, ALPHA, CLIP, OFFSET)
    K = 2 * F if GATED else F
    s, a = 1.0, 1.0
    if not TILED:
        top = 0
        if AMAX:
            b_a = max4(g0, g1, g2, g3)
            if GATED:
                b_a = max2(b_a, max4(l0, l1, l2, l3))
            top = reduce2(tl.reshape(b_a, (BM * 16,)), 0)
            top = tl.maximum(top << 16, top & _UPPER)
        s = find_scale(
            source, n, top, amax, scale_inv, None, eps, i_p, SCALED, AMAX, False, LIMIT, INF, POW2,
            PARTIALS,
        )  # fmt: skip
        if ACT:
            a = find_scale(
                act_source, act_n, 0, None, act_scale_inv, None, act_eps, i_p, ACT_SCALED, False,
                False, ACT_LIMIT, INF, ACT_POW2, PARTIALS,
            )  # fmt: skip
    store_word_tile(
        g0, g1, g2, g3, s, row, row_scale, col, col_scale, eps, i_m, i_k, M, K, TILED, SQUARE, ROW,
        COL, LIMIT, TYPE, INF, POW2, EVEN, BM, PAD,
    )  # fmt: skip
    if SUMS:
        store_word_sums(sums, g0, g1, g2, g3, i_m, i_k, K)
    if GATED:
        store_word_tile(
            l0, l1, l2, l3, s, row, row_scale, col, col_scale, eps, i_m, i_k + n_k, M, K, TILED,
            SQUARE, ROW, COL, LIMIT, TYPE, INF, POW2, EVEN, BM, PAD,
        )  # fmt: skip
        if SUMS:
            store_word_sums(sums, l0, l1, l2, l3, i_m, i_k + n_k, K)
    if ACT:
        store_word_tile(
            y0, y1, y2, y3, a, None, None, act, act_scale, act_eps, i_m, i_k, M, F, TILED, SQUARE,
            False, True, ACT_LIMIT, ACT_TYPE, INF, ACT_POW2, EVEN, BM, PAD,
        )  # fmt: skip


# ------------------------------------------------------------------------------------------- fronts
def fuses_backward(
    p: Producer, inputs: Sequence[Tensor | None], dtype: torch.dtype, *casts: Cast | None
) -> bool:
    """Whether kernels here make these casts: of dh's row and column, and of y's column."""
    h, dy = inputs
    assert h is not None and dy is not None
    there = [c for c in casts if c is not None]
    row, col, _ = casts
    if p.interleave or dtype is torch.float32:
        return False
    if row is not None and col is not None and row != col:
        return False
    formats = {(c.format.scale, c.format.tile, c.room[0]) for c in there}
    if p.gated and h.shape[1] % there[0].room[0]:
        return False  # tiles of the second half do not cover what comes after it
    if len(formats) != 1 or there[0].format.scale is not Scale.F32:
        return False
    return not there[0].tiled or in_words(dtype, *dy.shape, h, dy)


def value(p: Producer, inputs: Sequence[Tensor | None], out: Tensor) -> None:
    """`out`, of h's shape, = dh in its dtype."""
    _value(p, inputs, out).run()


def backward(
    p: Producer,
    inputs: Sequence[Tensor | None],
    dtype: torch.dtype,
    casts: tuple[Cast | None, Cast | None, Cast | None],
    out: dict[str, Tensor],
    act_out: dict[str, Tensor],
    db: Tensor | None,
    given: Any,
) -> None:
    """Everything into `out` (dh), `act_out` (y) and `db`; `given` is `gradients.Given`."""
    scales: dict[str, Any] = {}
    d, act = casts[0] or casts[1], casts[2]
    assert d is not None
    if not d.tiled:
        source, n = given.scale, 1
        if source is None:
            source, n = _amax(p, inputs, dtype).partials()
        amax = None if given.amax is None else given.amax.view(torch.int32)
        scales = {"source": source, "n": n, "amax": amax, "scaled": given.scale is not None}
        if act is not None:
            source, n = given.act_scale, 1
            if source is None and given.act_amax is not None:
                source = given.act_amax.view(torch.int32)
            elif source is None:
                source, n = partial_amax(p.activation(), inputs[:1], dtype)
            scales |= {"act_source": source, "act_n": n, "act_scaled": given.act_scale is not None}
    launch = _backward(p, inputs, dtype, casts, out, act_out, db is not None, **scales)
    launch.run()
    if db is not None:
        column_sums(launch.args["sums"], db)


# ----------------------------------------------------------------------------------------- launches
def arguments(p: Producer, inputs: Sequence[Tensor | None]) -> dict[str, Any]:
    """The arguments that every kernel here has; numbers of h and dy are for `value_kernel`."""
    h, dy, of_h, of_dy = (*inputs, None, None)[:4]
    assert h is not None and dy is not None
    m, f = dy.shape
    return {
        "h": h, "dy": dy, "of_h": of_h, "of_dy": of_dy, "M": m, "F": f, "stride": h.stride(0),
        "dy_stride": dy.stride(0), **numbers(p),
    }  # fmt: skip


def _value(p: Producer, inputs: Sequence[Tensor | None], out: Tensor) -> Launch:
    args, config = arguments(p, inputs), CONFIGS["value"]
    m, f = args["M"], args["F"]
    args |= {"out": out, **tile(config, m, f, out.dtype)}
    return Launch.of(value_kernel, config.tiles(m, f), args, config)


def _amax(p: Producer, inputs: Sequence[Tensor | None], dtype: torch.dtype) -> Launch:
    args = arguments(p, inputs)
    m, f = args["M"], args["F"]
    return amax_launch(amax_kernel, args, CONFIGS["amax"], m, f, dtype, args["h"])


def _backward(
    p: Producer,
    inputs: Sequence[Tensor | None],
    dtype: torch.dtype,
    casts: tuple[Cast | None, Cast | None, Cast | None],
    out: dict[str, Tensor],
    act_out: dict[str, Tensor],
    sums: bool,
    **scales: Any,
) -> Launch:
    args = arguments(p, inputs)
    d = casts[0] or casts[1]
    assert d is not None and d.format.element is not None
    a = casts[2] or d
    assert a.format.element is not None
    m, f, kind = args["M"], args["F"], "blocks" if d.tiled else "scaled"
    config = CONFIGS[f"words_{kind}{'_sums' * sums}"]
    fn: Any = words_kernel
    if not in_words(dtype, m, f, args["h"], args["dy"]):
        fn, config = scaled_kernel, CONFIGS[kind]
    shape = cdiv(m, config.m), args["h"].shape[1]
    partial = torch.empty(shape, dtype=torch.float32, device=args["h"].device) if sums else None
    args |= {
        "row": out.get("row_data"), "row_scale": out.get("row_scale"),
        "col": out.get("col_data"), "col_scale": out.get("col_scale"),
        "scale_inv": out.get("scale"), "act": act_out.get("col_data"),
        "act_scale": act_out.get("col_scale"), "act_scale_inv": act_out.get("scale"),
        "source": scales.get("source"), "n": scales.get("n", 1), "amax": scales.get("amax"),
        "act_source": scales.get("act_source"), "act_n": scales.get("act_n", 1),
        "sums": partial, "eps": d.eps, "act_eps": a.eps,
        "SCALED": scales.get("scaled", False), "ACT_SCALED": scales.get("act_scaled", False),
        "ROW": casts[0] is not None, "COL": casts[1] is not None, "ACT": casts[2] is not None,
        "AMAX": scales.get("amax") is not None, "SUMS": sums, "TILED": d.tiled,
        "SQUARE": d.tiled and d.format.square, "LIMIT": d.format.element.max,
        "TYPE": FP8[d.format.element], "POW2": d.pow2, "ACT_LIMIT": a.format.element.max,
        "ACT_TYPE": FP8[a.format.element], "ACT_POW2": a.pow2,
        "INF": torch.finfo(dtype).max if d.tiled else FP32_MAX, "PARTIALS": PARTIALS,
        "PAD": pad(d, m, f),
        **tile(config, m, f, dtype),
    }  # fmt: skip
    if gradient_blocks.fits(args, args["h"].device):
        return gradient_blocks.launch(args, args["h"].device)
    return Launch.of(fn, config.tiles(m, f), args, config)


# ----------------------------------------------------------------------------------------- variants
def variants() -> Iterator[Variant]:
    """Values, amaxes and casts: swiglu in whole and partial tiles, every other activation once."""
    bits = torch.empty(1, dtype=torch.int32, device="meta")
    one = torch.empty(1, dtype=torch.float32, device="meta")
    code = torch.empty(1, dtype=torch.uint8, device="meta")
    room = (16, 0)  # for products
    e4m3, e5m2 = Cast("fp8_e4m3", room=room), Cast("fp8_e5m2", room=room)
    shared = {"row_data": code, "col_data": code, "scale": one}
    tiled = {"row_data": code, "row_scale": one, "col_data": code, "col_scale": one}
    live: dict[str, Any] = {
        "source": one,
        "amax": bits,
        "scaled": True,
        "act_source": one,
        "act_scaled": True,
    }
    current: dict[str, Any] = {"source": bits, "act_source": bits}
    for m, f in ((4096, 4096), (4100, 4096), (4097, 4000)):
        dtype, tag = torch.bfloat16, f"bf16_{m}x{f}"
        for name in ("swiglu", "gelu") if m == 4096 else ("swiglu",):
            p = activation(name).gradient()
            h = torch.empty(m, 2 * f if p.gated else f, dtype=dtype, device="meta")
            inputs = (h, torch.empty(m, f, dtype=dtype, device="meta"))
            yield Variant.of(f"value_{name}_{tag}", _value(p, inputs, h))
            yield Variant.of(f"value_scaled_{name}_{tag}", _value(p, (*inputs, one, one), h))
            yield Variant.of(f"amax_{name}_{tag}", _amax(p, inputs, dtype))
            for sums in (False, True):
                end = f"{name}{'_sums' * sums}_{tag}"
                of: tuple[Any, ...] = (p, inputs, dtype, (e5m2, e5m2, e4m3), shared, shared, sums)
                yield Variant.of(f"scaled_{end}", _backward(*of, **live))
                yield Variant.of(f"current_{end}", _backward(*of, **current))
                if f % 128 != 0:
                    continue
                cast = Cast("fp8_e4m3_1x128", pow2=True, room=room)
                of = (p, inputs, dtype, (cast, cast, cast), tiled, tiled, sums)
                yield Variant.of(f"1x128_{end}", _backward(*of))
                of = (p, inputs, dtype, (cast, cast, None), tiled, {}, sums)
                yield Variant.of(f"1x128_only_{end}", _backward(*of))
    for name, a in ACTIVATIONS.items():
        p = activation(name).gradient()
        h = torch.empty(4096, 8192 if a.gated else 4096, dtype=torch.bfloat16, device="meta")
        inputs = (h, torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta"))
        of = (p, inputs, h.dtype, (e5m2, e5m2, e4m3), shared, shared, True)
        yield Variant.of(f"every_{name}_bf16_4096x4096", _backward(*of, **live))
