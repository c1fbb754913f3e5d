"""LayerNorm and RMSNorm as a link: `y = (x - mean) rstd gamma + beta`, or `x rstd gamma`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import norms
from ..producers import normalized
from ..scaled import Scaled
from .link import Link

__all__ = ["Norm", "NormCall"]


class NormCall(NamedTuple):
    """One call. `needs` says which of (x, gamma, beta) want a gradient.

    `lazy`: what follows casts the result, and makes it on the way; `amax`: by a scale that comes
    from its amax, which the statistics' read of x can find.
    """

    eps: float
    rms: bool
    zero_centered: bool
    needs: tuple[bool, bool, bool]
    dtype: torch.dtype
    lazy: bool = False
    amax: bool = False


class Norm(Link):
    """Over the columns of `x[M, K]`, with `gamma[K]` and `beta[K]` (None: RMSNorm).

    The gradient may be `Scaled`.
    """

    params = 2

    @staticmethod
    def compute(x: Tensor, params: tuple[Any, ...], call: NormCall) -> tuple[Any, tuple[Any, ...]]:
        gamma, beta = params
        zero, dtype = call.zero_centered, call.dtype
        amax = None
        if call.amax:
            mean, rstd, amax = norms.norm_stats_amax(
                x, call.eps, gamma, beta, rms=call.rms, zero_centered=zero, dtype=dtype
            )
        else:
            mean, rstd = norms.norm_stats(x, call.eps, rms=call.rms)
        y = normalized(x, mean, rstd, gamma, beta, zero_centered=zero, dtype=dtype)
        if amax is not None:
            y = y._replace(amax=amax)
        kept = (x, mean, rstd, gamma) if True in call.needs else (None,) * 4
        return (y if call.lazy else y.value()), kept

    @staticmethod
    def backward(
        grad: Tensor | Scaled | None, kept: list[Any], call: NormCall
    ) -> tuple[Tensor | None, tuple[Tensor | None, Tensor | None]]:
        x, mean, rstd, gamma = kept
        kept.clear()
        if grad is None or True not in call.needs:
            return None, (None, None)
        dx, dgamma, dbeta = norms.norm_backward(
            grad, x, mean, rstd, gamma, zero_centered=call.zero_centered
        )
        found = [
            t if need else None for t, need in zip((dx, dgamma, dbeta), call.needs, strict=True)
        ]
        return found[0], (found[1], found[2])
