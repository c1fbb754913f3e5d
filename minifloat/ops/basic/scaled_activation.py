"""Gated activations whose rows are multiplied by given scales, such as a router's weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ...producer import Producer, activation
from ...producers import activated, activation_gradient
from ..basic_operation import BasicOperation
from .values import folded, plain

__all__ = [
    "ScaledActivationOperation",
    "ScaledClampedQGeGLU",
    "ScaledSReLU",
    "ScaledSwiGLU",
    "scaled",
]


class ScaledActivationOperation(BasicOperation):
    """`y = act(x) s`, with the extra input `s[...]`, a scale for each row of `x[..., features]`.

    Between grouped linear operations, backward computes it again whether or not
    `activation_recompute_in_mlp` asks for that: see `ForwardGroupedMLP`.
    """

    forward_keywords = ()
    num_extra_inputs = 1

    def __init__(self, producer: Producer, activation_recompute_in_mlp: bool) -> None:
        super().__init__()
        self.activation_recompute_in_mlp = activation_recompute_in_mlp
        self._producer = producer

    def begin(
        self,
        *,
        requires_grad: bool,
        input_requires_grad: bool,
        autocast_dtype: torch.dtype | None,
    ) -> dict[str, Any]:
        return {"dtype": autocast_dtype}

    def fuser_forward_compute(
        self, input_: Any, **fwd_kwargs: Any
    ) -> tuple[Any, Iterable[Iterable[Any]], Any]:
        x, dtype = plain(input_), fwd_kwargs["basic_op_kwargs"][0].get("dtype")
        scales = fwd_kwargs["basic_op_extra_inputs"][0][0]
        rows = x.shape[:-1]
        if scales.numel() != rows.numel():
            raise ValueError(
                f"scales: got shape {tuple(scales.shape)}; one for each row of the input, "
                f"{tuple(rows)}, is needed"
            )
        h = folded(x)
        h = h if dtype is None else h.to(dtype)
        try:
            y = scaled(h, scales, self._producer)
        except ValueError as error:
            raise ValueError(f"input: got shape {tuple(x.shape)}; {error}") from error
        saved = (h, scales) if fwd_kwargs["requires_grad"][0] else ()
        return y.reshape(*rows, y.shape[1]), [()], saved

    def fuser_forward_save_ctx(
        self, basic_op_ctxs: list[Any], input_: Any, tensors_to_save: Any, **fwd_kwargs: Any
    ) -> None:
        ctx = basic_op_ctxs[0]
        ctx.shape = input_.shape
        ctx.scaled = self._differentiates(0, fwd_kwargs["basic_op_extra_inputs"][0][0])
        ctx.save_for_backward(*tensors_to_save)

    def fuser_backward(
        self, basic_op_ctxs: list[Any], grad_output: Any, *, basic_op_grad_extra_outputs: list[Any]
    ) -> tuple[Any, Iterable[Iterable[Any]], Iterable[Iterable[Any]]]:
        ctx = basic_op_ctxs[0]
        h, scales = ctx.saved_tensors
        dy = folded(plain(grad_output)).float()
        dh = activation_gradient(h, dy * _column(scales), self._producer, h.dtype).value()
        ds = None
        if ctx.scaled:
            y = activated(h, self._producer, torch.float32).value()
            ds = (y * dy).sum(1).reshape(scales.shape).to(scales.dtype)
        return dh.reshape(ctx.shape), [()], [(ds,)]


def scaled(h: Tensor, scales: Tensor, producer: Producer) -> Tensor:
    """`act(h) s` of the matrix h, in fp32, rounded once to its dtype."""
    return (activated(h, producer, torch.float32).value() * _column(scales)).to(h.dtype)


def _column(scales: Tensor) -> Tensor:
    return scales.reshape(-1, 1).float()


class ScaledSwiGLU(ScaledActivationOperation):
    """`y = silu(g) l s`."""

    def __init__(
        self, glu_interleave_size: int | None = None, *, activation_recompute_in_mlp: bool = False
    ) -> None:
        self.glu_interleave_size = glu_interleave_size
        producer = activation("swiglu", glu_interleave_size=glu_interleave_size)
        super().__init__(producer, activation_recompute_in_mlp)


class ScaledClampedQGeGLU(ScaledActivationOperation):
    """`y = c sigmoid(alpha c) (clamp(l, -limit, limit) + glu_linear_offset) s`, `c = min(g,
    limit)`."""

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        activation_recompute_in_mlp: bool = False,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
    ) -> None:
        self.glu_interleave_size = glu_interleave_size
        producer = activation(
            "clamped_swiglu",
            limit=limit,
            alpha=alpha,
            glu_linear_offset=glu_linear_offset,
            glu_interleave_size=glu_interleave_size,
        )
        super().__init__(producer, activation_recompute_in_mlp)


class ScaledSReLU(ScaledActivationOperation):
    """`y = max(x, 0)^2 s`."""

    def __init__(self, *, activation_recompute_in_mlp: bool = False) -> None:
        super().__init__(activation("srelu"), activation_recompute_in_mlp)
