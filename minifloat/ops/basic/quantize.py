"""`Quantize`: what passes it is quantized, forward or backward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import library
from ...core.linear import Gradient, dequantized
from ...operands import operands
from ...producer import Producer
from ...producers import activation_gradient
from ...recipe.delayed import DelayedState
from ...recipe.plan import Plan
from ...sums import column_sums
from ...tensors import QuantizedTensorStorage
from ..context import OperationContext
from ..handover import Handed
from ..quantized_operation import QuantizedOperation
from .values import folded

__all__ = ["Quantize"]


class Quantize(QuantizedOperation):
    """`y = quantized(x)`, and the gradient likewise, in the directions asked for.

    A neighbour that quantizes what it reads is handed its operands. Otherwise the result is a
    `QuantizedTensor`, or in a graph, which cannot hand one out, a tensor of its values. What is
    quantized already stays as it is, and so does the gradient under a `backward_override`.
    """

    _slot_counts = {"forward": 1, "backward": 1}

    def __init__(self, forward: bool = True, backward: bool = False) -> None:
        super().__init__()
        self._quantize_forward, self._quantize_backward = forward, backward

    def begin(
        self,
        *,
        requires_grad: bool,
        input_requires_grad: bool,
        autocast_dtype: torch.dtype | None,
    ) -> dict[str, Any]:
        return {"begun": self._begin()}

    def _input_taker(self, after: Any, **kwargs: Any) -> Any:
        return after if self._quantize_forward else None

    def _grad_taker(self, before: Any, **kwargs: Any) -> Any:
        plan = kwargs["begun"].plan
        if not self._quantize_backward or not _quantizes(plan.dx_row) or plan.override:
            return None
        return GradientQuantizer(self.delayed, plan) if before is None else before

    def takes_gradients(self, recipe: Any) -> bool:
        """Whether the next operation may quantize the gradient."""
        plan = recipe.plan(*self._roles(recipe))
        return self._quantize_backward and _quantizes(plan.dx_row) and not plan.override

    def op_forward_compute(
        self, input_: Any, *, next_op_input_quantizer: Any = None, **kwargs: Any
    ) -> tuple[Any, Any]:
        if not self._quantize_forward or _is_quantized(input_):
            return input_, ()
        if next_op_input_quantizer is not None:
            return next_op_input_quantizer.quantize(input_), ()
        plan = self._given(input_, kwargs)["begun"].plan
        return _quantized(input_, self.delayed, plan, "output"), ()

    def op_forward_save_ctx(
        self,
        ctx: OperationContext,
        input_: Any,
        tensors_to_save: Any,
        *,
        prev_op_grad_output_quantizer: Any = None,
        **kwargs: Any,
    ) -> None:
        given = self._given(input_, kwargs)
        ctx.taker = self._grad_taker(prev_op_grad_output_quantizer, **given)

    def op_backward(self, ctx: OperationContext, grad_output: Any) -> tuple[Any, Iterable[Any]]:
        if ctx.taker is None or _is_quantized(grad_output):
            return grad_output, ()
        return ctx.taker.quantize(grad_output), ()

    def extra_repr(self) -> str:
        return f"forward={self._quantize_forward}, backward={self._quantize_backward}"


class GradientQuantizer(NamedTuple):
    """Quantizes a gradient that leaves the pipeline."""

    state: DelayedState
    plan: Plan

    def quantize(self, grad: Any) -> Any:
        return _quantized(grad, self.state, self.plan, "grad_input")

    def __call__(self, grad: Any) -> Any:
        """As quantizers are called."""
        return self.quantize(grad)

    def of_activation(
        self, h: Tensor, dy: Tensor, producer: Producer, *, shape: Any, dbias: bool
    ) -> tuple[Any, Tensor | None]:
        """(the gradient of an activation of the matrix h, its sum over rows)."""
        dh = activation_gradient(h, dy, producer).value()
        of_bias = column_sums(dh) if dbias else None
        return self.quantize(dh.reshape(shape)), of_bias


def _quantized(x: Any, state: DelayedState, plan: Plan, slot: str) -> Any:
    forward = slot == "output"
    cast = plan.y_row if forward else plan.dx_row
    if not _quantizes(cast):
        return x
    delayed = plan.delayed[2 if forward else 4]
    if not library.traced():
        made: Any = plan.output if forward else plan.grad_input
        return (state.quantizer(slot, plan) if delayed else made).quantize(x)
    live = state.live(slot) if delayed else None
    row = operands(folded(x), cast, None, live=live, keep_row=True)[0]
    assert row is not None
    return dequantized(row, folded(x).shape, x.dtype).reshape(x.shape)


def _quantizes(cast: Any) -> bool:
    return cast.layout[0] is torch.uint8


def _is_quantized(x: Any) -> bool:
    return isinstance(x, QuantizedTensorStorage | Handed | Gradient)
