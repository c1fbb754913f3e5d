"""LayerNorm, RMSNorm and L2 normalisation over the last dimension, in fp32 and rounded once.

rstd = 1 / sqrt(mean((x - mean)^2) + eps)        RMSNorm: mean = 0; L2: the sum for the mean
y    = (x - mean) * rstd * gamma + beta          gamma is 1 + gamma if zero-centered
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["l2_norm", "l2_norm_backward", "norm", "norm_backward", "norm_stats"]


def norm_stats(x: Tensor, eps: float, rms: bool) -> tuple[Tensor | None, Tensor]:
    """(mean, rstd) of the rows of `x[M, K]`, fp32 `[M]`; no mean for RMSNorm."""
    t = x.to(torch.float32)
    mean = None if rms else t.mean(1)
    centered = t if mean is None else t - mean[:, None]
    return mean, 1 / torch.sqrt((centered * centered).mean(1) + eps)


def norm(
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    zero_centered: bool,
    dtype: torch.dtype,
) -> Tensor:
    """y `[M, K]`."""
    y = _normalized(x, mean, rstd)
    if gamma is not None:
        y = y * _gamma(gamma, zero_centered)
    if beta is not None:
        y = y + beta.to(torch.float32)
    return y.to(dtype)


def norm_backward(
    dy: Tensor,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    gamma: Tensor | None,
    zero_centered: bool,
    add: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx in x's dtype, dgamma, dbeta in fp32); `add` is added to dx before it is rounded."""
    d, xhat = dy.to(torch.float32), _normalized(x, mean, rstd)
    w = d if gamma is None else d * _gamma(gamma, zero_centered)
    inner = w - xhat * (w * xhat).mean(1, keepdim=True)
    if mean is not None:
        inner = inner - w.mean(1, keepdim=True)
    dx = inner * rstd[:, None]
    if add is not None:
        dx = dx + add.to(torch.float32)
    return dx.to(x.dtype), (d * xhat).sum(0), d.sum(0)


def l2_norm(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(y in x's dtype, rstd): every row of y has length 1, up to eps."""
    t = x.to(torch.float32)
    rstd = 1 / torch.sqrt((t * t).sum(1) + eps)
    return (t * rstd[:, None]).to(x.dtype), rstd


def l2_norm_backward(dy: Tensor, x: Tensor, rstd: Tensor) -> Tensor:
    """dx in x's dtype."""
    d, xhat = dy.to(torch.float32), _normalized(x, None, rstd)
    return ((d - xhat * (d * xhat).sum(1, keepdim=True)) * rstd[:, None]).to(x.dtype)


def _normalized(x: Tensor, mean: Tensor | None, rstd: Tensor) -> Tensor:
    t = x.to(torch.float32)
    return (t if mean is None else t - mean[:, None]) * rstd[:, None]


def _gamma(gamma: Tensor, zero_centered: bool) -> Tensor:
    g = gamma.to(torch.float32)
    return g + 1 if zero_centered else g
