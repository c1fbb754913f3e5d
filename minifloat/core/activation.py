"""An activation between two linear operations.

`Activation` is a link by itself. `ActivatedLinear` is one together with the linear operation that
reads it, which is where the bytes are: nothing of the activation is kept between forward and
backward. Backward finds the gradient `dy` of its result, and one kernel then reads h and dy once
and writes what all three neighbours multiply:

    dh.row, dh.col      for the operation that made h
    act(h).col          for the gradient of this one's weight
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import library, scalars
from ..operands import activation_backward, operands
from ..producer import Producer
from ..producers import activated, activation_gradient
from ..scaled import Scaled, parts, whole
from .linear import Call, Gradient, cast_gradient, dgrad, finish, fprop, probed_gradient, wgrad
from .link import Link
from .probe import X_COL, X_ROW, probed

__all__ = ["ActivatedCall", "ActivatedLinear", "Activation", "ActivationCall", "fusable"]


class ActivationCall(NamedTuple):
    """One call: which activation, and the dtype of its result."""

    activation: Producer
    dtype: torch.dtype


class Activation(Link):
    """`y = act(h)`; what follows makes it when it reads it. h and the gradient may be `Scaled`."""

    @staticmethod
    def compute(
        h: Tensor | Scaled, params: tuple[Any, ...], call: ActivationCall
    ) -> tuple[Any, tuple[Any, ...]]:
        return activated(h, call.activation, call.dtype), parts(h)

    @staticmethod
    def backward(
        grad: Tensor | Scaled | None, kept: list[Any], call: ActivationCall
    ) -> tuple[Tensor | None, tuple[()]]:
        h = whole(*kept)
        kept.clear()
        if grad is None:
            return None, ()
        return activation_gradient(h, grad, call.activation, h.dtype).value(), ()


class ActivatedCall(NamedTuple):
    """`call` of the linear operation; `before` of the one that made h, whose casts dh gets."""

    activation: Producer
    before: Call
    call: Call


def fusable(before: Call, call: Call) -> bool:
    """Whether casts are all that reads the activation and the gradient of h."""
    plan, earlier = call.plan, before.plan
    if plan.override or earlier.override or call.save_input or before.grad_input is not None:
        return False
    return not (plan.col_from_row[0] or earlier.col_from_row[2] or plan.x_col.stochastic)


class ActivatedLinear(Link):
    """`y = act(h) w^T + bias`; h may be `Scaled`, and so may dy be, which stays in here."""

    params = 2

    @staticmethod
    def compute(
        h: Tensor | Scaled, params: tuple[Any, ...], both: ActivatedCall
    ) -> tuple[Tensor, tuple[Any, ...]]:
        weight, bias = params
        call, plan = both.call, both.call.plan
        need_dw, live = call.needs[1], call.live[0]
        if live is not None and need_dw and library.traced():
            # Backward scales the column copy by it, when it has moved on.
            live = (scalars.snapshot(live[0]), live[1])
        x = activated(h, both.activation, call.dtype)
        x_row, _ = operands(
            x,
            plan.x_row,
            None,
            live=live,
            seed=call.seed,
            keep_amax=need_dw and not plan.x_row.tiled and plan.x_row == plan.x_col,
            after=call.after,
        )
        assert x_row is not None
        a = x_row if call.probe is None else probed(X_ROW, x_row, x, call)
        y, kept_w = fprop(a, weight, bias, call)
        # What the column copy is scaled by: forward's amax, or its delayed scale.
        known = x_row.amax if need_dw and not plan.x_row.tiled else None
        kept_h = parts(h) if need_dw or call.needs[0] else (None, None)
        return y, (*kept_h, known, *kept_w)

    @staticmethod
    def backward(
        grad: Any, kept: list[Any], both: ActivatedCall
    ) -> tuple[Any, tuple[Tensor | None, Tensor | None]]:
        h, known, kept_w = whole(*kept[:2]), kept[2], kept[3:]
        kept.clear()
        call, before = both.call, both.before
        plan, earlier = call.plan, before.plan
        if grad is None:
            return None, (None, None)
        need_dx, need_dw, need_db = call.needs
        rows = call._replace(needs=(need_dx, False, need_db))
        keeps = need_dw and not plan.g_row.tiled and plan.g_row == plan.g_col
        g_row, _, db = cast_gradient(grad, rows, keep_amax=keeps and not plan.delayed[3])
        g_amax = g_row.amax if keeps and g_row is not None else None
        dy = dgrad(g_row, kept_w, call, True)
        del g_row
        x_col = plan.x_col if need_dw else None
        live = (known, None) if plan.delayed[0] and known is not None else None
        amax = None if plan.delayed[0] else known
        made: Any = None
        of_x: Any = None
        if dy is not None:
            d_row, d_col, of_x, of_bias = activation_backward(
                h,
                dy,
                both.activation,
                earlier.g_row if before.needs[0] else None,
                earlier.g_col if before.needs[1] else None,
                x_col,
                live=before.live[2],
                seed=before.seed,
                act_live=live,
                act_amax=amax,
                dtype=call.dtype,
                dbias=before.needs[2],
            )
            if before.probe is not None:
                dh = activation_gradient(h, dy, both.activation, call.dtype)
                d_row, d_col = probed_gradient(d_row, d_col, dh, before)
            made = Gradient(d_row, d_col, of_bias, (h.shape[0], h.shape[1]))
        elif x_col is not None:
            x = activated(h, both.activation, call.dtype)
            of_x = operands(x, None, x_col, live=live, amax=amax, after=_data(grad))[1]
        if call.probe is not None and of_x is not None:
            of_x = probed(X_COL, of_x, activated(h, both.activation, call.dtype), call)
        del dy, h
        dw: Tensor | None = None
        if of_x is not None:
            # Not with the row copy: autograd keeps the gradient until backward ends, and memory is
            # shortest where dh is made (block, 16384 x 4096 x 14336: 69 MB of a peak of 2893).
            columns = call._replace(needs=(False, True, False))
            g_col = cast_gradient(grad, columns, amax=g_amax, after=of_x.data)[1]
            dw = wgrad(g_col, of_x, call)
        finish(call)
        return made, (dw, db)


def _data(grad: Any) -> Tensor:
    """A tensor that is there once the gradient is."""
    if isinstance(grad, Gradient):
        one = grad.row if grad.row is not None else grad.col
        assert one is not None
        return one.data
    return grad  # type: ignore[no-any-return]
