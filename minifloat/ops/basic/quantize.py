"""`Quantize`: what passes it is quantized, forward or backward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import library, scalars
from ...core.linear import Gradient, dequantized
from ...inputs import draw_seed
from ...module import Begun
from ...operands import Live, operands
from ...parameters import default_device
from ...producer import Producer
from ...producers import activation_gradient
from ...recipe.autocast import STATE
from ...recipe.delayed import DelayedState, update
from ...recipe.roles import QuantizerRole
from ...sums import column_sums
from ...tensors import QuantizedTensorStorage
from ..context import OperationContext
from ..handover import Handed, Rounded
from ..quantized_operation import QuantizedOperation
from .values import folded

__all__ = ["Quantize"]


class Quantize(QuantizedOperation):
    """`y = quantized(x)`, and the gradient likewise, in the directions asked for.

    A neighbour that quantizes what it reads is handed its operands. Otherwise the result is a
    `QuantizedTensor`, or in a graph, which cannot hand one out, a tensor of its values. What is
    quantized already stays as it is, and so does the gradient under a `backward_override`.
    """

    forward_keywords = ()
    _slot_counts = {"forward": 1, "backward": 1}
    # It casts where a linear layer casts what it hands out, as those cast who read that.
    _live_slots = {"forward": ("output",), "backward": ("grad_input",)}

    def __init__(self, forward: bool = True, backward: bool = False) -> None:
        super().__init__(default_device(None))
        self._quantize_forward, self._quantize_backward = forward, backward

    def get_quantizer_roles(
        self, mode: str | None = None, *, fwd: bool = True, num_quantizers: int | None = None
    ) -> list[QuantizerRole | None] | None:
        """Its one role in a mode; with `num_quantizers`, as the last of a linear layer's slots."""
        made = super().get_quantizer_roles(mode, fwd=fwd)
        assert made is not None
        return [*[None for _ in range((num_quantizers or 1) - 1)], *made]

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
        begun = kwargs["begun"]
        plan = begun.plan
        if not self._quantize_backward or not _quantizes(plan.dx_row) or plan.override:
            return None
        return GradientQuantizer(self.delayed, begun) if before is None else before

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
        begun = self._given(input_, kwargs)["begun"]
        plan = begun.plan
        if not _quantizes(plan.y_row):
            return input_, ()
        if library.traced():
            return Rounded(_rounded(input_, plan.y_row, self._traced_output(begun))), ()
        made: Any = self._live("output", begun) if plan.delayed[2] else plan.output
        return made.quantize(input_), ()

    def _traced_output(self, begun: Begun) -> Live | None:
        if not begun.plan.delayed[2]:
            return None
        if begun.entry is not None:  # eager code, in a checkpoint that watches operators
            made = self._live("output", begun)
            return made.scale, made.amax
        scale, amax = self.delayed.live("output")
        # A recompute would read what the scale has become.
        return (scalars.snapshot(scale) if STATE.checkpointed else scale), amax

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
        made = grad_output
        if ctx.taker is not None and not _is_quantized(made):
            made = ctx.taker.quantize(made)
        return made, ()

    def extra_repr(self) -> str:
        return f"forward={self._quantize_forward}, backward={self._quantize_backward}"


class GradientQuantizer(NamedTuple):
    """Quantizes a gradient that leaves the pipeline, which is the end of delayed scaling's step."""

    state: DelayedState
    begun: Begun

    def quantize(self, grad: Any) -> Any:
        state, slots, plan = self.state, self.begun.slots, self.begun.plan
        delayed = plan.delayed[4]
        made: Any
        if library.traced():
            live = state.live("grad_input") if delayed else None
            made = Rounded(_rounded(grad, plan.dx_row, live))
        else:
            quantizer: Any = state.quantizer("grad_input", plan) if delayed else plan.grad_input
            made = quantizer.quantize(grad)
        if slots is not None and plan.update is not None:
            update(slots, plan.update, self.begun.group)
        return made

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


def _rounded(x: Any, cast: Any, live: Live | None) -> Tensor:
    """The values of `x` quantized: a graph hands out no quantized tensor."""
    seed = None
    if cast.stochastic:  # drawn where quantizers draw it
        seed = draw_seed(x.device)
    row = operands(folded(x), cast, None, live=live, seed=seed, keep_row=True)[0]
    assert row is not None
    return dequantized(row, folded(x).shape, x.dtype).reshape(x.shape)


def _quantizes(cast: Any) -> bool:
    return cast.layout[0] is torch.uint8


def _is_quantized(x: Any) -> bool:
    return isinstance(x, QuantizedTensorStorage | Handed | Gradient | Rounded)
