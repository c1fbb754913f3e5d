"""Activations and their gradients, with the global amaxes that NVFP4 casts of them will need.

    h       ->  y = activation(h), and its amaxes
    (h, dy) ->  dh, and its amaxes

What is written is what `produce` and `activation_grad` write, and amaxes are those that `fp4_amax`
finds in it, of the transformed columns too: a pass over what was just written is saved. Whole tiles
of bf16 alone, in words of two numbers. For the transform a thread has 16 rows of a word, so that it
stays in its registers.
"""

# mypy: disable-error-code="assignment, misc, var-annotated"
# (In the compiled bodies, tuples grow.)

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import HADAMARD_SIGN_MASK, Cast
from ..producer import Producer, activation
from ._device import abs_bits, high, low
from ._fp4_device import amax_block, hadamard_sums, tops_amax, tops_words
from ._produce_device import activate, differentiate, in_words, numbers, pack2, rounded
from .fp4_amax import finish
from .variant import Config, Launch, Variant

__all__ = ["fuses", "produce", "variants"]

CONFIG = Config(16, 256, 4)
# Rows that a thread has of a word: 16 for the transform along them, else 4 of four words.
PLAIN_ROWS = 4
# Programs, and so partial maxima: as many as an H200 has room for at once. The kernel with the most
# registers, 90, is five times on each of its 132 multiprocessors. To be measured, like the tiles.
PARTIALS = 660


@triton.jit
def load_rows(x, o_b, o_w, stride, ROWS: tl.constexpr):
    """Words of ROWS rows at x: row i of block row `o_b`, words `o_w`."""
    p_x = x.to(tl.pointer_type(tl.int32), bitcast=True)
    o_x = ROWS * o_b[:, None] * (stride // 2) + o_w[None, :]
    words = ()
    for _ in tl.static_range(ROWS):
        words = words + (tl.load(p_x + o_x),)
        p_x += stride // 2
    return words


@triton.jit
def store_rows(out, words, o_b, o_w, stride, ROWS: tl.constexpr):
    """The inverse of `load_rows`."""
    p_o = out.to(tl.pointer_type(tl.int32), bitcast=True)
    o_x = ROWS * o_b[:, None] * (stride // 2) + o_w[None, :]
    for i in tl.static_range(ROWS):
        tl.store(p_o + o_x, words[i])
        p_o += stride // 2


@triton.jit
def numbers_of(b_w, n, SCALED: tl.constexpr):
    """Both numbers of words, in fp32; SCALED: times n, rounded to bf16."""
    b_0 = low(b_w)
    b_1 = high(b_w)
    if SCALED:
        b_0 = rounded(b_0 * n)
        b_1 = rounded(b_1 * n)
    return b_0, b_1


@triton.jit
def sums_amax(top, words, SIGNS: tl.constexpr):
    """The larger of `top` and the bits of the transform's magnitudes, but for its factor."""
    first = ()
    second = ()
    for i in tl.static_range(16):
        first = first + (low(words[i]),)
        second = second + (high(words[i]),)
    top = tl.maximum(top, amax_block(hadamard_sums(first, SIGNS)))
    return tl.maximum(top, amax_block(hadamard_sums(second, SIGNS)))


@triton.jit
def produce_kernel(  # noqa: PLR0915
    h, dy, of_h, of_dy, out, partial, tiles, F, stride, dy_stride, FN: tl.constexpr,
    GATED: tl.constexpr, ALPHA: tl.constexpr, CLIP: tl.constexpr, OFFSET: tl.constexpr,
    PLAIN: tl.constexpr, SIGNS: tl.constexpr, FAR: tl.constexpr, ROWS: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Tiles p, p + programs, ... of `out`: y, or with dy dh; maxima as `finish` wants them."""
    i_p = tl.program_id(0)
    programs = tl.num_programs(0)
    n_k = F // BK
    WIDE = 2 * F if GATED and dy is not None else F
    o_b = tl.arange(0, BM // ROWS).to(tl.int64 if FAR else tl.int32)
    o_w = tl.arange(0, BK // 2)
    b_s = tl.zeros((BM // ROWS, BK // 2), tl.int32)
    b_u = tl.zeros((BM // ROWS, BK // 2), tl.int32)
    b_t = tl.zeros((BM // ROWS, BK // 2), tl.int32)
    n_h = 1.0
    if of_h is not None:
        n_h = tl.load(of_h)
    n_d = 1.0
    if of_dy is not None:
        n_d = tl.load(of_dy)
    for i_t in range(i_p, tiles, programs):
        m0 = (i_t // n_k).to(tl.int64) * BM
        k0 = (i_t % n_k) * BK
        p_h = h + m0 * stride + k0
        gates = load_rows(p_h, o_b, o_w, stride, ROWS)  # ROWS x [BM / ROWS, BK / 2]
        linear = gates
        if GATED:
            linear = load_rows(p_h + F, o_b, o_w, stride, ROWS)
        given = gates
        if dy is not None:
            given = load_rows(dy + m0 * dy_stride + k0, o_b, o_w, dy_stride, ROWS)
        first = ()
        second = ()
        for i in tl.static_range(ROWS):
            g0, g1 = numbers_of(gates[i], n_h, of_h is not None)
            l0, l1 = g0, g1
            if GATED:
                l0, l1 = numbers_of(linear[i], n_h, of_h is not None)
            if dy is None:
                y0 = activate(g0, l0, FN, GATED, ALPHA, CLIP, OFFSET)
                y1 = activate(g1, l1, FN, GATED, ALPHA, CLIP, OFFSET)
                first = first + (pack2(y0, y1),)
            else:
                d0, d1 = numbers_of(given[i], n_d, of_dy is not None)
                dg0, dl0, _ = differentiate(g0, l0, d0, FN, GATED, ALPHA, CLIP, OFFSET)
                dg1, dl1, _ = differentiate(g1, l1, d1, FN, GATED, ALPHA, CLIP, OFFSET)
                first = first + (pack2(dg0, dg1),)
                second = second + (pack2(dl0, dl1),)
        p_o = out + m0 * WIDE + k0
        store_rows(p_o, first, o_b, o_w, WIDE, ROWS)
        if PLAIN:
            b_s, b_u = tops_words(b_s, b_u, first, ROWS)
        if SIGNS >= 0:
            b_t = sums_amax(b_t, first, SIGNS)
        if GATED and dy is not None:
            store_rows(p_o + F, second, o_b, o_w, WIDE, ROWS)
            if PLAIN:
                b_s, b_u = tops_words(b_s, b_u, second, ROWS)
            if SIGNS >= 0:
                b_t = sums_amax(b_t, second, SIGNS)
    if PLAIN:
        b_a = tops_amax((b_s, b_u))
        tl.store(partial + i_p, tl.max(tl.maximum(b_a << 16, b_a & -0x10000)))
    if SIGNS >= 0:
        top = tl.max(b_t).to(tl.float32, bitcast=True) * 0.25
        tl.store(partial + programs + i_p, abs_bits(top))


# ------------------------------------------------------------------------------------------- fronts
def fuses(
    p: Producer, inputs: Sequence[Tensor | None], dtype: torch.dtype, *casts: Cast | None
) -> bool:
    """Whether `produce` makes what casts like these read, and their amaxes."""
    if p.normalizes or p.interleave:
        return False
    if any(c is not None and (not c.format.two_level or c.row_scaled) for c in casts):
        return False
    h, dy = inputs[0], inputs[1] if p.differentiates else None
    assert h is not None
    m, f = h.shape[0], h.shape[1] // 2 if p.gated else h.shape[1]
    read = (h,) if dy is None else (h, dy)
    return CONFIG.even(m, f) and in_words(dtype, m, f, *read)


def produce(
    p: Producer,
    inputs: Sequence[Tensor | None],
    out: Tensor,
    row: Cast | None,
    col: Cast | None,
    row_amax: Tensor | None,
    col_amax: Tensor | None,
) -> None:
    """`out`: what `p` produces; `row_amax[0]`, `col_amax[0]`: what `fp4_amax.amax_fp4` finds in it.

    An activation reads (h, number of h), its gradient (h, dy, number of h, number of dy): numbers
    may be missing.
    """
    launch = _produce(p, inputs, out, row, col)
    launch.run()
    signs = launch.args["SIGNS"]
    finish(launch.args["partial"], launch.programs, row_amax, col_amax, signs)


def _produce(
    p: Producer,
    inputs: Sequence[Tensor | None],
    out: Tensor,
    row: Cast | None,
    col: Cast | None,
) -> Launch:
    if p.differentiates:
        h, dy, of_h, of_dy = (*inputs, None, None)[:4]
    else:
        h, of_h = (*inputs, None)[:2]
        dy = of_dy = None
    assert h is not None
    m, f = h.shape[0], h.shape[1] // 2 if p.gated else h.shape[1]
    tiles = CONFIG.tiles(m, f)
    programs = min(tiles, PARTIALS)
    signs = -1 if col is None else col.hadamard
    args: dict[str, Any] = {
        "h": h, "dy": dy, "of_h": of_h, "of_dy": of_dy, "out": out, "tiles": tiles, "F": f,
        "partial": torch.empty(2 * programs, dtype=torch.int32, device=h.device),
        "stride": h.stride(0), "dy_stride": 0 if dy is None else dy.stride(0), **numbers(p),
        "PLAIN": row is not None or signs < 0, "SIGNS": signs,
        "ROWS": PLAIN_ROWS if signs < 0 else 16, "FAR": CONFIG.m * h.stride(0) >= 2**31,
        "BM": CONFIG.m, "BK": CONFIG.k,
    }  # fmt: skip
    return Launch.of(produce_kernel, programs, args, CONFIG)


def variants() -> Iterator[Variant]:
    """swiglu and gelu, values and gradients, with and without numbers and transforms."""
    row, col = Cast("nvfp4"), Cast("nvfp4", hadamard=HADAMARD_SIGN_MASK)
    one = torch.empty(1, dtype=torch.float32, device="meta")
    for name in ("swiglu", "gelu"):
        p = activation(name)
        y = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
        h = torch.empty(4096, 8192 if p.gated else 4096, dtype=torch.bfloat16, device="meta")
        for tag, number in (("", None), ("_scaled", one)):
            end = f"{name}{tag}_bf16_4096x4096"
            of: Any = (h, number)
            yield Variant.of(f"row_{end}", _produce(p, of, y, row, None))
            yield Variant.of(f"col_{end}", _produce(p, of, y, None, col))
            of = (h, y, number, number)
            yield Variant.of(f"gradient_{end}", _produce(p.gradient(), of, h, row, col))
