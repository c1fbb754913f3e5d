"""Linear operations that read one input, as one: gate and up; queries, keys and values."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import scalars
from ..recipe.plan import products
from .linear import Call, Linear
from .link import Link

__all__ = ["JoinedCall", "JoinedLinear", "Split"]


class JoinedCall(NamedTuple):
    """`call` of the one product, `sizes` the rows of each weight.

    `counts` are the counters of the operations after the first, whose own are in `call`.
    """

    call: Call
    sizes: tuple[int, ...]
    counts: tuple[Tensor | None, ...] = ()


class JoinedLinear(Link):
    """`y = x [w1; w2; ...]^T + [b1; b2; ...]`, of `x[M, K]`, `wi[Ni, K]`, `bi[Ni]`.

    Parameters are the weights, then the biases: all of them, or None for all. The joined weight
    exists for the time of a pass: backward keeps the parts and joins them again.
    """

    @classmethod
    def takes(cls, call: JoinedCall) -> int:
        return 2 * len(call.sizes)

    @staticmethod
    def compute(
        x: Any, params: tuple[Any, ...], joined: JoinedCall
    ) -> tuple[Tensor, tuple[Any, ...]]:
        n = len(joined.sizes)
        weights, biases = params[:n], params[n:]
        bias = None if biases[0] is None else torch.cat(biases)
        y, kept = Linear.compute(x, (torch.cat(weights), bias), joined.call)
        weight, scale = kept[-2:]
        parts = (None,) * n if weight is None else weights
        return _counted(y, 0, joined), (*kept[:-2], *parts, scale)

    @staticmethod
    def backward(grad: Any, kept: list[Any], joined: JoinedCall) -> tuple[Any, tuple[Any, ...]]:
        n = len(joined.sizes)
        weights, scale = kept[-n - 1 : -1], kept[-1]
        weight = None if weights[0] is None else torch.cat(weights)
        whole = [*kept[: -n - 1], weight, scale]
        kept.clear()
        del weights, weight
        dx, (dw, db) = Linear.backward(grad, whole, joined.call)
        dw = _counted(dw, 2, joined)
        return _counted(dx, 1, joined), (*_parts(dw, joined.sizes), *_parts(db, joined.sizes))


class Split(Link):
    """The columns of `x[M, N]` as matrices of their own, `call` wide each: the end of a chain.

    They are copies, so that whoever gets one may do with it what a layer's output allows: change
    it in place, or fold its dims in any order.
    """

    splits = True

    @staticmethod
    def compute(x: Any, params: tuple[Any, ...], call: tuple[int, ...]) -> tuple[Any, Any]:
        parts = torch.split(x, list(call), -1)
        return tuple([p.clone(memory_format=torch.contiguous_format) for p in parts]), ()

    @staticmethod
    def backward(grad: Any, kept: list[Any], call: tuple[int, ...]) -> tuple[Any, tuple[()]]:
        return torch.cat(grad, -1), ()


def _parts(of: Tensor | None, sizes: tuple[int, ...]) -> tuple[Tensor | None, ...]:
    return (None,) * len(sizes) if of is None else torch.split(of, list(sizes))


def _counted(t: Any, product: int, joined: JoinedCall) -> Any:
    """`t`, once its product is counted for the other operations as well: see `linear.tally`."""
    if t is None:
        return t
    plan = joined.call.plan
    a, b = products(plan)[product]
    kind = 0
    if a.layout[0] is not torch.uint8 or b.layout[0] is not torch.uint8:
        kind = 1 if plan.quantizes else 2
    for counts in joined.counts:
        if counts is not None:
            t = scalars.tallied(t, counts, 3 * product + kind)
    return t
