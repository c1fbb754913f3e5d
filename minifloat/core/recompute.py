"""`Recomputed`: links whose insides backward computes again, from their input.

The recompute is a function of what forward saved: the input, the parameters, and delayed scaling's
scales as they were. It records no amax, uses no workspace, and knows no module.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from .. import scalars
from ..operands import Live
from ..scaled import parts
from .linear import Call
from .link import Link

__all__ = ["Recomputed", "RecomputedCall", "RecomputedPair"]


class RecomputedCall(NamedTuple):
    """`links` are run again in backward, and then `last`, if any, which is not: of what it saves,
    the first two are the `parts` of its input, and are not kept either."""

    links: tuple[tuple[Any, Any], ...]
    last: tuple[Any, Any] | None = None


class Recomputed(Link):
    """The composition of the links of a norm and two linear operations."""

    params = 6

    @staticmethod
    def leading(lead: tuple[int, ...], call: RecomputedCall) -> tuple[int, ...]:
        for op, of in call.links:
            lead = op.leading(lead, of)
        return lead

    @staticmethod
    def compute(
        x: Any, params: tuple[Any, ...], call: RecomputedCall
    ) -> tuple[Tensor, tuple[Any, ...]]:
        kept: list[Any] = []
        y, at = x, 0
        for op, of in call.links:
            # A graph repeats what only backward reads of a scale: forward reads the copy as well.
            scales = [scalars.snapshot(s) for s in _scales(of)]
            kept.extend(scales)
            y, _ = op.compute(y, params[at : at + op.params], _scaled(of, scales, True))
            at += op.params
        if call.last is not None:
            op, of = call.last
            y, more = op.compute(y, params[at : at + op.params], of)
            kept.extend(more[2:])
        return y, (x, *params[:at], *kept)

    @staticmethod
    def backward(grad: Any, kept: list[Any], call: RecomputedCall) -> tuple[Any, tuple[Any, ...]]:
        y, at = kept[0], 1
        again = []
        held = 1 + sum([op.params for op, _ in call.links])
        for op, of in call.links:
            n = len(_scales(of))
            repeated = _scaled(of, kept[held : held + n], False)
            if isinstance(repeated, Call):
                repeated = repeated._replace(workspace=None, after=_tensor(grad))
            y, saved = op.compute(y, tuple(kept[at : at + op.params]), repeated)
            again.append((op, of, list(saved)))
            at, held = at + op.params, held + n
        found: tuple[Any, ...] = ()
        rest = kept[held:]
        kept.clear()
        if call.last is not None:
            op, of = call.last
            grad, found = op.backward(grad, [*parts(y), *rest], of)
        del y
        for op, of, saved in reversed(again):
            grad, more = op.backward(grad, saved, of)
            found = (*more, *found)
        return grad, found


class RecomputedPair(Recomputed):
    """The composition of two linear operations and what is between them."""

    params = 4


def _scales(call: Any) -> list[Tensor]:
    """Delayed scaling's scales of (x, weight), those there are."""
    if not isinstance(call, Call):
        return []
    return [live[0] for live in call.live[:2] if live is not None]


def _scaled(call: Any, scales: list[Tensor], record: bool) -> Any:
    """The call, with these scales; its amaxes are recorded once."""
    if not scales:
        return call
    at = 0
    live: list[Live | None] = []
    for of in call.live[:2]:
        if of is None:
            live.append(None)
        else:
            live.append((scales[at], of[1] if record else None))
            at += 1
    return call._replace(live=(live[0], live[1], call.live[2]))


def _tensor(grad: Any) -> Tensor:
    return grad if isinstance(grad, Tensor) else grad.row.data
