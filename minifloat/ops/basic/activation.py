"""Activations: `y = act(x)`, and gated ones, `y = act(g) l` of `x = [g | l]`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from ... import dispatch
from ...formats import E4M3, Cast, Scale, find_format
from ...producer import Producer, activation
from ...producers import Lazy, activated, activation_gradient
from ..basic_operation import BasicOperation
from ..context import OperationContext
from .values import folded, plain

__all__ = [
    "GEGLU",
    "GELU",
    "GLU",
    "QGEGLU",
    "QGELU",
    "ActivationOperation",
    "ClampedSwiGLU",
    "ReGLU",
    "ReLU",
    "SReGLU",
    "SReLU",
    "SiLU",
    "SwiGLU",
]


# What `cache_quantized_input` saves: E4M3, scaled by the amax of the tensor.
CACHED = Cast(find_format(E4M3, Scale.F32, None).name)


class ActivationOperation(BasicOperation):
    """`activation` says which, as `minifloat.producer` has it.

    The result has the dtype of `torch.autocast`, or of the input. `cache_quantized_input` saves
    the input for backward as E4M3 codes.
    """

    forward_keywords = ()
    activation: ClassVar[str]

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__()
        self.cache_quantized_input = cache_quantized_input
        self._producer = self._make()

    def _make(self) -> Producer:
        return activation(self.activation)

    def begin(
        self,
        *,
        requires_grad: bool,
        input_requires_grad: bool,
        autocast_dtype: torch.dtype | None,
    ) -> dict[str, Any]:
        return {"dtype": autocast_dtype}

    # ------------------------------------------------------------------------------------ forward
    def op_forward_compute(
        self, input_: Any, *, requires_grad: bool = True, **kwargs: Any
    ) -> tuple[Any, Any]:
        y, saved = self.produce(input_, requires_grad=requires_grad, **kwargs)
        return y.value().reshape(*input_.shape[:-1], y.shape[1]), saved

    def produce(
        self, input_: Any, *, requires_grad: bool, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> tuple[Lazy, Any]:
        """(the result as a matrix to be made, tensors to save)."""
        x = plain(input_)
        if x.dim() == 0:
            raise ValueError("input: got a scalar; an activation works on [..., features]")
        h = folded(x)
        h = h if dtype is None else h.to(dtype)
        try:
            y = activated(h, self._producer)
        except ValueError as error:
            raise ValueError(f"input: got shape {tuple(x.shape)}; {error}") from error
        if not requires_grad:
            return y, ()
        if not self.cache_quantized_input:
            return y, (h,)
        made = dispatch.quantize(h, CACHED, None)
        return y, tuple(made)

    def op_forward_save_ctx(
        self,
        ctx: OperationContext,
        input_: Any,
        tensors_to_save: Any,
        *,
        prev_op_grad_output_quantizer: Any = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        ctx.prev_op_grad_output_quantizer = prev_op_grad_output_quantizer
        ctx.shape = input_.shape
        ctx.dtype = input_.dtype if dtype is None else dtype
        ctx.save_for_backward(*tensors_to_save)

    # ----------------------------------------------------------------------------------- backward
    def op_backward(self, ctx: OperationContext, grad_output: Any) -> tuple[Any, Iterable[Any]]:
        dh = self.gradient(ctx, grad_output).value()
        return dh.reshape(ctx.shape), ()

    def gradient(self, ctx: OperationContext, grad_output: Any) -> Lazy:
        """The gradient of the input, as a matrix to be made."""
        return activation_gradient(
            self.saved_input(ctx), folded(plain(grad_output).to(ctx.dtype)), self._producer
        )

    def saved_input(self, ctx: OperationContext) -> Tensor:
        """The input, as a matrix."""
        assert ctx.saved_tensors is not None
        if not self.cache_quantized_input:
            return ctx.saved_tensors[0]  # type: ignore[no-any-return]
        data, scale = ctx.saved_tensors
        return dispatch.dequantize(data, scale, None, CACHED, data.shape, ctx.dtype)


class GELU(ActivationOperation):
    """`y = x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2`."""

    activation = "gelu"


class GEGLU(ActivationOperation):
    """`y = gelu(g) l`."""

    activation = "geglu"


class GLU(ActivationOperation):
    """`y = sigmoid(g) l`."""

    activation = "glu"


class QGELU(ActivationOperation):
    """`y = x sigmoid(1.702 x)`."""

    activation = "qgelu"


class QGEGLU(ActivationOperation):
    """`y = qgelu(g) l`."""

    activation = "qgeglu"


class ReLU(ActivationOperation):
    """`y = max(x, 0)`."""

    activation = "relu"


class ReGLU(ActivationOperation):
    """`y = max(g, 0) l`."""

    activation = "reglu"


class SReLU(ActivationOperation):
    """`y = max(x, 0)^2`."""

    activation = "srelu"


class SReGLU(ActivationOperation):
    """`y = max(g, 0)^2 l`."""

    activation = "sreglu"


class SiLU(ActivationOperation):
    """`y = x sigmoid(x)`."""

    activation = "silu"


class SwiGLU(ActivationOperation):
    """`y = silu(g) l`; with `glu_interleave_size`, blocks of that many columns of g and l
    alternate."""

    activation = "swiglu"

    def __init__(
        self, *, cache_quantized_input: bool = False, glu_interleave_size: int | None = None
    ) -> None:
        self.glu_interleave_size = glu_interleave_size
        super().__init__(cache_quantized_input=cache_quantized_input)

    def _make(self) -> Producer:
        return activation(self.activation, glu_interleave_size=self.glu_interleave_size)


class ClampedSwiGLU(ActivationOperation):
    """`y = c sigmoid(alpha c) (clamp(l, -limit, limit) + offset)`, with `c = min(g, limit)` and the
    offset `glu_linear_offset`."""

    activation = "clamped_swiglu"

    def __init__(
        self,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        self.limit, self.alpha, self.glu_linear_offset = limit, alpha, glu_linear_offset
        self.glu_interleave_size = glu_interleave_size
        super().__init__(cache_quantized_input=cache_quantized_input)

    def _make(self) -> Producer:
        return activation(
            self.activation,
            limit=self.limit,
            alpha=self.alpha,
            glu_linear_offset=self.glu_linear_offset,
            glu_interleave_size=self.glu_interleave_size,
        )
