"""Two linear operations that read one input, as one: the gate and the other half of a gated MLP."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import scalars
from ..recipe.plan import products
from .linear import Call, Linear
from .link import Link

__all__ = ["JoinedCall", "JoinedLinear"]


class JoinedCall(NamedTuple):
    """`call` of the one product; `counts` are the counters of the second operation, if any."""

    call: Call
    counts: Tensor | None = None


class JoinedLinear(Link):
    """`y = x [w1; w2]^T + [b1; b2]`, of `x[M, K]`, `w1[N, K]`, `w2[N, K]`, `b1[N]`, `b2[N]`.

    The joined weight exists for the time of a pass: backward keeps the parts and joins them again.
    """

    params = 4

    @staticmethod
    def compute(
        x: Any, params: tuple[Any, ...], both: JoinedCall
    ) -> tuple[Tensor, tuple[Any, ...]]:
        w1, w2, b1, b2 = params
        bias = None if b1 is None else torch.cat((b1, b2))
        y, kept = Linear.compute(x, (torch.cat((w1, w2)), bias), both.call)
        weight, scale = kept[-2:]
        parts = (None, None) if weight is None else (w1, w2)
        return _counted(y, 0, both), (*kept[:-2], *parts, scale)

    @staticmethod
    def backward(grad: Any, kept: list[Any], both: JoinedCall) -> tuple[Any, tuple[Any, ...]]:
        w1, w2, scale = kept[-3:]
        weight = None if w1 is None else torch.cat((w1, w2))
        whole = [*kept[:-3], weight, scale]
        kept.clear()
        del w1, w2, weight
        dx, (dw, db) = Linear.backward(grad, whole, both.call)
        return _counted(dx, 1, both), (*_halves(_counted(dw, 2, both)), *_halves(db))


def _halves(of: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    if of is None:
        return None, None
    n = of.shape[0] // 2
    return of[:n], of[n:]


def _counted(t: Any, product: int, both: JoinedCall) -> Any:
    """`t`, once its product is counted for the second operation as well: see `linear.tally`."""
    if both.counts is None or t is None:
        return t
    plan = both.call.plan
    a, b = products(plan)[product]
    kind = 0
    if a.layout[0] is not torch.uint8 or b.layout[0] is not torch.uint8:
        kind = 1 if plan.quantizes else 2
    return scalars.tallied(t, both.counts, 3 * product + kind)
