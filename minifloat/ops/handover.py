"""What one operation hands to the next in place of a tensor: its operands, quantized.

The consumer says how: it gives its neighbours an `InputTaker` or a `GradientTaker`, whose
`quantize` makes what its products read, row and column copies, of a matrix that may be lazy. No
tensor stands between them, so nothing is read or written twice.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core import linear as core
from ..formats import Operand
from ..operands import activation_backward
from ..producer import Producer
from ..producers import Lazy, activation_gradient
from ..recipe.plan import Plan
from .basic.values import matrix

__all__ = ["GradientTaker", "Handed", "InputTaker", "Rounded", "takes_gradients", "takes_inputs"]


class Handed(NamedTuple):
    """The quantized operands of a tensor with the leading dims `lead`."""

    row: Operand
    col: Operand | None
    lead: tuple[int, ...]


class Rounded(NamedTuple):
    """What a graph has in place of a quantized tensor: its values. Operations that leave alone what
    is quantized are given it as it is, all others the values."""

    values: Tensor


class InputTaker(NamedTuple):
    """Quantizes the input of a call of the linear operation."""

    call: core.Call

    @property
    def wants_amax(self) -> bool:
        """Whether the amax of the input, where it is known, spares a read of it."""
        return self.call.plan.input_amax

    def quantize(self, x: Tensor | Lazy, lead: tuple[int, ...] | None = None) -> Handed:
        """`x[..., K]`, or a matrix `[M, K]` that stands for `[*lead, K]`."""
        lead = tuple(x.shape[:-1]) if lead is None else lead
        value = x if isinstance(x, Lazy) else matrix(x)
        row, col = core.input_operands(value, self.call, self.call.needs[1])
        return Handed(row, col, lead)

    def __call__(self, x: Tensor) -> Handed:
        """As quantizers are called."""
        return self.quantize(x)


class GradientTaker(NamedTuple):
    """Quantizes the gradient of the output of a call of the linear operation."""

    call: core.Call

    def quantize(self, grad: Tensor | Lazy) -> core.Gradient:
        value = grad if isinstance(grad, Lazy) else matrix(grad)
        row, col, _ = core.cast_gradient(value, self.call)
        return core.Gradient(row, col, None, (value.shape[0], value.shape[1]))

    def __call__(self, grad: Tensor) -> core.Gradient:
        """As quantizers are called."""
        return self.quantize(grad)

    def of_activation(
        self, h: Tensor, dy: Tensor, producer: Producer, *, shape: Any, dbias: bool
    ) -> tuple[core.Gradient, Tensor | None]:
        """(the gradient of an activation of the matrix h, its sum over rows), from one read."""
        call, plan = self.call, self.call.plan
        row, col, _, of_bias = activation_backward(
            h,
            dy,
            producer,
            plan.g_row if call.needs[0] else None,
            plan.g_col if call.needs[1] else None,
            None,
            live=call.live[2],
            seed=call.seed,
            dbias=dbias,
        )
        if call.probe is not None:
            dh = activation_gradient(h, dy, producer)
            row, col = core.probed_gradient(row, col, dh, call)
        return core.Gradient(row, col, None, (h.shape[0], h.shape[1])), of_bias


def takes_inputs(plan: Plan) -> bool:
    """Whether casts are all that reads the input, in forward and in backward."""
    return core.read_by_casts(plan, False) and not plan.override


def takes_gradients(plan: Plan) -> bool:
    """Whether casts are all that reads the gradient."""
    return plan.g_row.layout[0] is torch.uint8 and not (plan.override or plan.col_from_row[2])
