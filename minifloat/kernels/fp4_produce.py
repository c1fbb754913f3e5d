"""Activations and their gradients, with the global amaxes that NVFP4 casts of them will need.

    h       ->  y = activation(h), and its amaxes
    (h, dy) ->  dh, y, and the amaxes of both

What is written is what `produce` and `activation_grad` write, and amaxes are those that `fp4_amax`
finds in it, of the transformed columns too: a pass over what was just written is saved, and with
y beside dh another read of h. Whole tiles of bf16 alone, in words of two numbers. A thread has 16
rows of a word, so that the transform along them stays in its registers.
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
from ._fp4_device import amax_block, hadamard_sums, load_col_words, tops_amax, tops_words
from ._produce_device import activate, differentiated_words, in_words, numbers, pack2
from .fp4_amax import finish
from .variant import Config, Launch, Variant

__all__ = ["fuses", "produce", "variants"]

CONFIG = Config(16, 256, 4)
# Programs, and so partial maxima: `fp4_amax.finish` reads no more.
PARTIALS = 1024


@triton.jit
def scaled_words(b_w, number):
    """Words of two bf16 numbers, times `number[0]` if there is one."""
    if number is not None:
        n = tl.load(number)
        b_w = pack2(low(b_w) * n, high(b_w) * n)
    return b_w


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
def store_rows(out, words, o_b, o_w, stride):
    """16 rows of words, as `load_col_words` has them."""
    p_o = out.to(tl.pointer_type(tl.int32), bitcast=True)
    p_o = p_o + 16 * o_b[:, None] * (stride // 2) + o_w[None, :]
    for i in tl.static_range(16):
        tl.store(p_o + i * (stride // 2), words[i])


@triton.jit
def store_tops(partial, i_p, programs, b_s, b_u, b_t, PLAIN: tl.constexpr, SIGNS: tl.constexpr):
    """The maxima of a program, where `fp4_amax.finish_kernel` looks for them."""
    if PLAIN:
        b_a = tops_amax((b_s, b_u))
        tl.store(partial + i_p, tl.max(tl.maximum(b_a << 16, b_a & -0x10000)))
    if SIGNS >= 0:
        top = tl.max(b_t).to(tl.float32, bitcast=True) * 0.25
        tl.store(partial + programs + i_p, abs_bits(top))


@triton.jit
def produce_kernel(  # noqa: PLR0915
    h, dy, of_h, of_dy, dh, y, partial, act_partial, tiles, F, stride, dy_stride,
    FN: tl.constexpr, GATED: tl.constexpr, ALPHA: tl.constexpr, CLIP: tl.constexpr,
    OFFSET: tl.constexpr, PLAIN: tl.constexpr, SIGNS: tl.constexpr, ACT_PLAIN: tl.constexpr,
    ACT_SIGNS: tl.constexpr, FAR: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Tiles p, p + programs, ... of y, and with dy of dh; y alone may be missing then."""
    i_p = tl.program_id(0)
    programs = tl.num_programs(0)
    n_k = F // BK
    WIDE = 2 * F if GATED else F
    o_b = tl.arange(0, BM // 16).to(tl.int64 if FAR else tl.int32)
    o_w = tl.arange(0, BK // 2)
    b_s = tl.zeros((BM // 16, BK // 2), tl.int32)
    b_u = tl.zeros((BM // 16, BK // 2), tl.int32)
    b_t = tl.zeros((BM // 16, BK // 2), tl.int32)
    a_s = tl.zeros((BM // 16, BK // 2), tl.int32)
    a_u = tl.zeros((BM // 16, BK // 2), tl.int32)
    a_t = tl.zeros((BM // 16, BK // 2), tl.int32)
    for i_t in range(i_p, tiles, programs):
        m0 = (i_t // n_k).to(tl.int64) * BM
        k0 = (i_t % n_k) * BK
        p_h = h + m0 * stride + k0
        gates = load_col_words(p_h, o_b, o_w, stride)  # 16 x [BM / 16, BK / 2]
        linear = gates
        if GATED:
            linear = load_col_words(p_h + F, o_b, o_w, stride)
        ys = ()
        if dy is None:
            for i in tl.static_range(16):
                g = scaled_words(gates[i], of_h)
                v = scaled_words(linear[i], of_h)
                y0 = activate(low(g), low(v), FN, GATED, ALPHA, CLIP, OFFSET)
                y1 = activate(high(g), high(v), FN, GATED, ALPHA, CLIP, OFFSET)
                ys = ys + (pack2(y0, y1),)
        else:
            given = load_col_words(dy + m0 * dy_stride + k0, o_b, o_w, dy_stride)
            dgs = ()
            dls = ()
            for i in tl.static_range(16):
                g = scaled_words(gates[i], of_h)
                v = scaled_words(linear[i], of_h)
                d = scaled_words(given[i], of_dy)
                dg, dl, b_y = differentiated_words(g, v, d, FN, GATED, ALPHA, CLIP, OFFSET)
                dgs = dgs + (dg,)
                dls = dls + (dl,)
                ys = ys + (b_y,)
            p_d = dh + m0 * WIDE + k0
            store_rows(p_d, dgs, o_b, o_w, WIDE)
            if PLAIN:
                b_s, b_u = tops_words(b_s, b_u, dgs, 16)
            if SIGNS >= 0:
                b_t = sums_amax(b_t, dgs, SIGNS)
            if GATED:
                store_rows(p_d + F, dls, o_b, o_w, WIDE)
                if PLAIN:
                    b_s, b_u = tops_words(b_s, b_u, dls, 16)
                if SIGNS >= 0:
                    b_t = sums_amax(b_t, dls, SIGNS)
        if y is not None:
            store_rows(y + m0 * F + k0, ys, o_b, o_w, F)
            if ACT_PLAIN:
                a_s, a_u = tops_words(a_s, a_u, ys, 16)
            if ACT_SIGNS >= 0:
                a_t = sums_amax(a_t, ys, ACT_SIGNS)
    if dy is not None:
        store_tops(partial, i_p, programs, b_s, b_u, b_t, PLAIN, SIGNS)
    if y is not None:
        store_tops(act_partial, i_p, programs, a_s, a_u, a_t, ACT_PLAIN, ACT_SIGNS)


# ------------------------------------------------------------------------------------------- fronts
Casts = tuple[Cast | None, Cast | None]  # of the row and of the column copy
Amaxes = tuple[Tensor | None, Tensor | None]


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
    dh: Tensor | None,
    y: Tensor | None,
    casts: Casts,
    amaxes: Amaxes,
    act_casts: Casts = (None, None),
    act_amaxes: Amaxes = (None, None),
) -> None:
    """`dh` of a gradient, and `y`, if there is one; into `amaxes`, those that casts of dh need.

    `act_casts` and `act_amaxes` are for y.
    """
    launch = _produce(p, inputs, dh, y, casts, act_casts)
    launch.run()
    n = launch.programs
    for name, of, into in (("partial", casts, amaxes), ("act_partial", act_casts, act_amaxes)):
        if of[0] is not None or of[1] is not None:
            finish(launch.args[name], n, *into, -1 if of[1] is None else of[1].hadamard)


def _produce(
    p: Producer,
    inputs: Sequence[Tensor | None],
    dh: Tensor | None,
    y: Tensor | None,
    casts: Casts,
    act_casts: Casts,
    config: Config = CONFIG,
) -> Launch:
    if p.differentiates:
        h, dy, of_h, of_dy = (*inputs, None, None)[:4]
    else:
        h, of_h = (*inputs, None)[:2]
        dy = of_dy = None
    assert h is not None
    m, f = h.shape[0], h.shape[1] // 2 if p.gated else h.shape[1]
    tiles = config.tiles(m, f)
    programs = min(tiles, PARTIALS)

    def bits(there: Tensor | None) -> Tensor | None:
        if there is None:
            return None
        return torch.empty(2 * programs, dtype=torch.int32, device=there.device)

    args: dict[str, Any] = {
        "h": h, "dy": dy, "of_h": of_h, "of_dy": of_dy, "dh": dh, "y": y, "partial": bits(dh),
        "act_partial": bits(y), "tiles": tiles, "F": f, "stride": h.stride(0),
        "dy_stride": 0 if dy is None else dy.stride(0), **numbers(p), **_wanted("", casts),
        **_wanted("ACT_", act_casts), "FAR": 16 * config.m * h.stride(0) >= 2**31,
        "BM": config.m, "BK": config.k,
    }  # fmt: skip
    return Launch.of(produce_kernel, programs, args, config)


def _wanted(prefix: str, casts: Casts) -> dict[str, Any]:
    """Which amaxes casts need: of what is made, and of its transformed columns."""
    row, col = casts
    signs = -1 if col is None else col.hadamard
    plain = row is not None or (col is not None and signs < 0)
    return {f"{prefix}PLAIN": plain, f"{prefix}SIGNS": signs}


def variants() -> Iterator[Variant]:
    """swiglu and gelu: values forward, gradients with and without y."""
    row, col = Cast("nvfp4"), Cast("nvfp4", hadamard=HADAMARD_SIGN_MASK)
    one = torch.empty(1, dtype=torch.float32, device="meta")
    for name in ("swiglu", "gelu"):
        p = activation(name)
        y = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
        h = torch.empty(4096, 8192 if p.gated else 4096, dtype=torch.bfloat16, device="meta")
        for tag, number in (("", None), ("_scaled", one)):
            end = f"{name}{tag}_bf16_4096x4096"
            of: Any = (h, number)
            yield Variant.of(f"row_{end}", _produce(p, of, None, y, (None, None), (row, None)))
            yield Variant.of(f"both_{end}", _produce(p, of, None, y, (None, None), (row, col)))
            of = (h, y, number, number)
            made = _produce(p.gradient(), of, h, y, (row, col), (None, col))
            yield Variant.of(f"gradient_y_{end}", made)
            made = _produce(p.gradient(), of, h, None, (row, col), (None, None))
            yield Variant.of(f"gradient_{end}", made)
