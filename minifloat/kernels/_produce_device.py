"""Device functions of producers: activations, their gradients and norms, rounded to their dtype.

Everything that produces goes through these, so that a value and a cast of it agree bit for bit: the
operations are separate (no fused multiply-add) and in one order. A word holds two bf16 numbers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import env
from ..producer import CUBIC, GELU, Producer
from ._blocks_device import WIDEST
from ._device import IS_PTX, fp32, high, low

__all__ = [
    "TYPES",
    "activate",
    "differentiate",
    "differentiated_words",
    "in_words",
    "load_four",
    "load_pairs",
    "load_produced",
    "load_row",
    "normalize",
    "numbers",
    "pack2",
    "produced_words",
    "scaled",
    "sigmoid",
]

FARTHEST = 1 << 30  # elements from a row to the next: 32 bits hold three of it in words
_GELU = tl.constexpr(fp32(GELU))
_CUBIC = tl.constexpr(fp32(CUBIC))
_CUBIC3 = tl.constexpr(fp32(3 * CUBIC))
_MINUS_LOG2E = tl.constexpr(-1.4426950216293335)  # 0xBFB8AA3B
# Four instructions; div.full and an exp2 of full range would be twelve.
_SIGMOID = tl.constexpr(
    "{ .reg .f32 t; mul.rn.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t;"
    " add.rn.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t; }"
)

TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def numbers(p: Producer) -> dict[str, Any]:
    """What kernels know of an activation: `activate`'s constants."""
    clip = p.limit if math.isfinite(p.limit) else 0.0
    return {
        "FN": p.function, "GATED": p.gated, "ALPHA": fp32(p.alpha), "CLIP": fp32(clip),
        "OFFSET": fp32(p.offset),
    }  # fmt: skip


def in_words(dtype: torch.dtype, m: int, k: int, *read: Tensor) -> bool:
    """Whether `[M, K]` can be made in `dtype`, from what is read, in words of two bf16 numbers.

    Tiles are 128 columns wide, and four rows make a word of a column copy. Without a column there
    is no tile for the one program that every cast by the scale of a tensor has.
    """
    if dtype is not torch.bfloat16 or m % 4 != 0 or k % 128 != 0 or not 0 < k <= WIDEST:
        return False
    strides = [x.stride(0) for x in read]
    if any(s % 2 != 0 or s > FARTHEST for s in strides):
        return False
    if any(x.shape[1] > WIDEST for x in read):  # a gradient is as wide as h, twice K where gated
        return False
    return all(
        x.dtype is dtype and x.data_ptr() % 4 == 0 and env.takes_words(x.device) for x in read
    )


@triton.jit
def sigmoid(b_z):
    """1 / (1 + exp(-z)) in fp32, a few units off; below 2**-126 it is 0."""
    if IS_PTX:
        out = tl.inline_asm_elementwise(
            _SIGMOID, "=f,f", [b_z], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        out = 1.0 / (1.0 + tl.exp2(b_z * _MINUS_LOG2E))
    return out


@triton.jit
def pack2(b_0, b_1):
    """Words of two fp32 tensors, rounded to bf16: b_0 in the lower halves."""
    if IS_PTX:
        out = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [b_0, b_1],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        lower = b_0.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.int32)
        upper = b_1.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.int32)
        out = lower | (upper << 16)
    return out


@triton.jit
def function(b_x, FN: tl.constexpr, ALPHA: tl.constexpr):
    """(f(x), f'(x)) of `reference.FUNCTIONS[FN]`; what is not used costs nothing."""
    if FN == "swish":
        b_z = b_x if ALPHA == 1.0 else b_x * ALPHA
        b_s = sigmoid(b_z)
        f = b_x * b_s
        d = b_s * (1.0 + b_z * (1.0 - b_s))
    elif FN == "gelu":
        b_s = sigmoid((b_x + b_x * b_x * b_x * _CUBIC) * _GELU)
        f = b_x * b_s
        d = b_s * (1.0 + b_x * (1.0 - b_s) * ((1.0 + b_x * b_x * _CUBIC3) * _GELU))
    elif FN == "sigmoid":
        f = sigmoid(b_x)
        d = f * (1.0 - f)
    elif FN == "relu":
        f = tl.where(b_x <= 0.0, 0.0, b_x)
        d = tl.where(b_x <= 0.0, 0.0, tl.where(b_x > 0.0, 1.0, b_x))
    else:
        tl.static_assert(FN == "srelu")
        b_r = tl.where(b_x <= 0.0, 0.0, b_x)
        f = b_r * b_r
        d = b_r * 2.0
    return f, d


@triton.jit
def linear_half(b_l, LIMIT: tl.constexpr, OFFSET: tl.constexpr):
    """What multiplies the activated half; LIMIT 0: there is none."""
    if LIMIT > 0:
        b_l = tl.where(b_l > LIMIT, LIMIT, tl.where(b_l < -LIMIT, -LIMIT, b_l))
    return b_l + OFFSET if OFFSET != 0.0 else b_l


@triton.jit
def activate(
    b_g, b_l, FN: tl.constexpr, GATED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
):  # fmt: skip
    """y in fp32, before it is rounded."""
    if LIMIT > 0:
        b_g = tl.where(b_g > LIMIT, LIMIT, b_g)
    f, _ = function(b_g, FN, ALPHA)
    return f * linear_half(b_l, LIMIT, OFFSET) if GATED else f


@triton.jit
def differentiate(
    b_g, b_l, b_d, FN: tl.constexpr, GATED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
):  # fmt: skip
    """(dg, dl, y) in fp32, before they are rounded; ungated: (dh, dh, y)."""
    b_c = tl.where(b_g > LIMIT, LIMIT, b_g) if LIMIT > 0 else b_g
    f, d = function(b_c, FN, ALPHA)
    if LIMIT > 0:
        d = tl.where(b_g > LIMIT, 0.0, d)
    dg = b_d * d
    dl = dg
    y = f
    if GATED:
        b_m = linear_half(b_l, LIMIT, OFFSET)
        dg = dg * b_m
        dl = b_d * f
        if LIMIT > 0:
            dl = tl.where(tl.abs(b_l) > LIMIT, 0.0, dl)
        y = f * b_m
    return dg, dl, y


@triton.jit
def normalize(
    b_x, mean, rstd, gamma, beta, MEAN: tl.constexpr, GAMMA: tl.constexpr, BETA: tl.constexpr
):
    """y in fp32, before it is rounded, of what broadcasts to x's shape; gamma is complete."""
    b_y = b_x - mean if MEAN else b_x
    b_y = b_y * rstd
    if GAMMA:
        b_y = b_y * gamma
    return b_y + beta if BETA else b_y


@triton.jit
def load_row(p, o, n, EVEN: tl.constexpr, HAS: tl.constexpr, PLUS: tl.constexpr):
    """`p[o]` in fp32, plus 1 if PLUS and 0 past n; a 0 where HAS says that there is none."""
    if HAS:
        b_v = (tl.load(p + o) if EVEN else tl.load(p + o, mask=o < n, other=0)).to(tl.float32)
        out = b_v + 1.0 if PLUS else b_v
    else:
        out = 0.0
    return out


@triton.jit
def scaled(b_x, number, x):
    """fp32 b_x times `number[0]`, rounded to what x points to; without a number, b_x."""
    if number is not None:
        b_x = (b_x * tl.load(number)).to(x.dtype.element_ty).to(tl.float32)
    return b_x


@triton.jit
def load_produced(
    x, number, mean, rstd, gamma, beta, o_m, o_k, M, K, stride, TYPE: tl.constexpr,
    NORM: tl.constexpr, MEAN: tl.constexpr, GAMMA: tl.constexpr, BETA: tl.constexpr,
    ZERO: tl.constexpr, FN: tl.constexpr, GATED: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, OFFSET: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Tile `[o_m, o_k]` of what is produced, `[M, K]`, in TYPE; zero outside.

    `number[0]`, if any, multiplies the x of an activation.
    """
    m_x = (o_m[:, None] < M) & (o_k[None, :] < K)
    p_x = x + o_m[:, None] * stride + o_k[None, :]
    b_x = (tl.load(p_x) if EVEN else tl.load(p_x, mask=m_x, other=0)).to(tl.float32)  # [BM, BK]
    if NORM:
        b_mean = load_row(mean, o_m, M, EVEN, MEAN, False)
        b_rstd = load_row(rstd, o_m, M, EVEN, True, False)
        b_gamma = load_row(gamma, o_k, K, EVEN, GAMMA, ZERO)
        b_beta = load_row(beta, o_k, K, EVEN, BETA, False)
        b_mean = b_mean[:, None] if MEAN else b_mean
        b_gamma = b_gamma[None, :] if GAMMA else b_gamma
        b_beta = b_beta[None, :] if BETA else b_beta
        b_y = normalize(b_x, b_mean, b_rstd[:, None], b_gamma, b_beta, MEAN, GAMMA, BETA)
        if not EVEN and (MEAN or BETA):
            b_y = tl.where(m_x, b_y, 0.0)
    else:
        b_l = b_x
        if GATED:
            b_l = tl.load(p_x + K) if EVEN else tl.load(p_x + K, mask=m_x, other=0)
            b_l = b_l.to(tl.float32)
        b_x = scaled(b_x, number, x)
        b_l = scaled(b_l, number, x)
        b_y = activate(b_x, b_l, FN, GATED, ALPHA, LIMIT, OFFSET)
        if not EVEN and FN == "sigmoid" and not GATED:
            b_y = tl.where(m_x, b_y, 0.0)
    return b_y.to(TYPE)


@triton.jit
def load_pairs(x, o_w, HAS: tl.constexpr, PLUS: tl.constexpr):
    """Rows `x[2 o_w]` and `x[2 o_w + 1]` in fp32; zeros where HAS says that there is no x."""
    b_0 = load_row(x, 2 * o_w, 0, True, HAS, PLUS)
    b_1 = load_row(x, 2 * o_w + 1, 0, True, HAS, PLUS)
    if HAS:
        b_0, b_1 = b_0[None, :], b_1[None, :]
    return b_0, b_1


@triton.jit
def produced_words(
    b_w, b_v, mean, rstd, g_0, g_1, b_0, b_1, o_m, M, NORM: tl.constexpr, MEAN: tl.constexpr,
    GAMMA: tl.constexpr, BETA: tl.constexpr, FN: tl.constexpr, GATED: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Words of what is produced in rows o_m < M of the words b_w, and b_v of the linear half."""
    if NORM:
        b_mean = load_row(mean, o_m, M, EVEN, MEAN, False)
        b_mean = b_mean[:, None] if MEAN else b_mean
        b_rstd = load_row(rstd, o_m, M, EVEN, True, False)[:, None]
        y_0 = normalize(low(b_w), b_mean, b_rstd, g_0, b_0, MEAN, GAMMA, BETA)
        y_1 = normalize(high(b_w), b_mean, b_rstd, g_1, b_1, MEAN, GAMMA, BETA)
    else:
        y_0 = activate(low(b_w), low(b_v), FN, GATED, ALPHA, LIMIT, OFFSET)
        y_1 = activate(high(b_w), high(b_v), FN, GATED, ALPHA, LIMIT, OFFSET)
    out = pack2(y_0, y_1)
    if not EVEN and BETA:
        out = tl.where(o_m[:, None] < M, out, 0)
    return out


@triton.jit
def differentiated_words(
    b_g, b_l, b_d, FN: tl.constexpr, GATED: tl.constexpr, ALPHA: tl.constexpr,
    CLIP: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Words of dg, dl and y."""
    dg0, dl0, y0 = differentiate(low(b_g), low(b_l), low(b_d), FN, GATED, ALPHA, CLIP, OFFSET)
    dg1, dl1, y1 = differentiate(high(b_g), high(b_l), high(b_d), FN, GATED, ALPHA, CLIP, OFFSET)
    return pack2(dg0, dg1), pack2(dl0, dl1), pack2(y0, y1)


@triton.jit
def load_four(p, step, m_p, EVEN: tl.constexpr):
    """Words of four neighbouring rows, `step` apart; zeros where m_p says so."""
    if EVEN:
        w0, w1, w2, w3 = tl.load(p), tl.load(p + step), tl.load(p + 2 * step), tl.load(p + 3 * step)
    else:
        w0 = tl.load(p, mask=m_p, other=0)
        w1 = tl.load(p + step, mask=m_p, other=0)
        w2 = tl.load(p + 2 * step, mask=m_p, other=0)
        w3 = tl.load(p + 3 * step, mask=m_p, other=0)
    return w0, w1, w2, w3
