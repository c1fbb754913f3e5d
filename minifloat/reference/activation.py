"""Activations and their gradients, in fp32 and rounded once.

gelu is the tanh approximation, in the form that does not cancel for negative numbers:

    (1 + tanh(u)) / 2 = sigmoid(2 u)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..producer import CUBIC, GELU, Producer

__all__ = ["FUNCTIONS", "Function", "activate", "activate_gradient"]


class Function(NamedTuple):
    """(f(x), f'(x)) of fp32 x; `alpha` is swish's."""

    f: Callable[[Tensor, float], Tensor]
    df: Callable[[Tensor, float], Tensor]


def _swish(x: Tensor, alpha: float) -> Tensor:
    return x * torch.sigmoid(alpha * x)


def _dswish(x: Tensor, alpha: float) -> Tensor:
    s = torch.sigmoid(alpha * x)
    return s * (1 + alpha * x * (1 - s))


def _gelu(x: Tensor, alpha: float) -> Tensor:
    return x * torch.sigmoid(GELU * (x + CUBIC * (x * x * x)))


def _dgelu(x: Tensor, alpha: float) -> Tensor:
    s = torch.sigmoid(GELU * (x + CUBIC * (x * x * x)))
    return s * (1 + x * (1 - s) * (GELU * (1 + 3 * CUBIC * (x * x))))


def _dsigmoid(x: Tensor, alpha: float) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 - s)


def _relu(x: Tensor, alpha: float) -> Tensor:
    return torch.where(x <= 0, 0.0, x)  # NaN stays NaN


def _drelu(x: Tensor, alpha: float) -> Tensor:
    return torch.where(x <= 0, 0.0, torch.where(x > 0, 1.0, x))


FUNCTIONS: dict[str, Function] = {
    "gelu": Function(_gelu, _dgelu),
    "sigmoid": Function(lambda x, alpha: torch.sigmoid(x), _dsigmoid),
    "swish": Function(_swish, _dswish),
    "relu": Function(_relu, _drelu),
    "srelu": Function(lambda x, a: _relu(x, a) * _relu(x, a), lambda x, a: 2 * _relu(x, a)),
}


def activate(h: Tensor, p: Producer, dtype: torch.dtype) -> Tensor:
    """y `[M, F]` of `h[M, F]`, or `[M, 2 F]` if gated."""
    g, linear = _split(h, p)
    y = FUNCTIONS[p.function].f(_upper(g, p), p.alpha)
    return (y if linear is None else y * (_both(linear, p) + p.offset)).to(dtype)


def activate_gradient(h: Tensor, dy: Tensor, p: Producer, dtype: torch.dtype) -> Tensor:
    """dh, of the shape of `h`; a clamp passes the gradient of what it leaves alone."""
    function, d = FUNCTIONS[p.function], dy.to(torch.float32)
    g, linear = _split(h, p)
    c = _upper(g, p)
    dg = function.df(c, p.alpha)
    if math.isfinite(p.limit):
        dg = torch.where(g > p.limit, 0.0, dg)
    if linear is None:
        return (d * dg).to(dtype)
    dg = d * dg * (_both(linear, p) + p.offset)
    dl = d * function.f(c, p.alpha)
    if math.isfinite(p.limit):
        dl = torch.where(linear.abs() > p.limit, 0.0, dl)
    return _join(dg.to(dtype), dl.to(dtype), p)


def _split(h: Tensor, p: Producer) -> tuple[Tensor, Tensor | None]:
    """(g, l) in fp32; l is None where nothing is gated."""
    h = h.to(torch.float32)
    if not p.gated:
        return h, None
    m, f = h.shape[0], h.shape[1] // 2
    if not p.interleave:
        return h[:, :f], h[:, f:]
    # Contiguous: PyTorch's sigmoid of elements that are apart is another one.
    blocks = h.reshape(m, f // p.interleave, 2, p.interleave)
    return blocks[:, :, 0].reshape(m, f).contiguous(), blocks[:, :, 1].reshape(m, f).contiguous()


def _join(g: Tensor, linear: Tensor, p: Producer) -> Tensor:
    """The inverse of `_split`."""
    if not p.interleave:
        return torch.cat((g, linear), dim=1)
    m, f = g.shape
    halves = (t.reshape(m, f // p.interleave, 1, p.interleave) for t in (g, linear))
    return torch.cat(tuple(halves), dim=2).reshape(m, 2 * f)


def _upper(g: Tensor, p: Producer) -> Tensor:
    return torch.where(g > p.limit, p.limit, g) if math.isfinite(p.limit) else g


def _both(linear: Tensor, p: Producer) -> Tensor:
    return linear.clamp(-p.limit, p.limit) if math.isfinite(p.limit) else linear
