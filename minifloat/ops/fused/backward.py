"""Backward fusions. They read what their basic operations recorded, however forward was fused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..basic.values import folded, plain
from ..fused_operation import FusedOperation

__all__ = [
    "BackwardActivationBias",
    "BackwardActivationQuantize",
    "BackwardAddRMSNorm",
    "BackwardLinearAdd",
    "BackwardLinearScale",
]

Gradients = tuple[Any, Iterable[Iterable[Any]], Iterable[Iterable[Any]]]


class BackwardLinearAdd(FusedOperation):
    """`MakeExtraOutput` and a linear operation: `dx = dy w + d(extra)`, in the latter's memory: the
    product adds it, if it can."""

    def fuser_backward(
        self, basic_op_ctxs: list[Any], grad_output: Any, *, basic_op_grad_extra_outputs: list[Any]
    ) -> Gradients:
        extra, linear = self.basic_ops
        ctx, grad_extra = basic_op_ctxs[1], basic_op_grad_extra_outputs[0][0]
        call, joining = ctx.call, None
        if call.needs[0] and linear.tensor_parallel_mode is None:
            shape = (*ctx.lead, linear.local_in_features)
            joining = extra.joining(grad_extra, shape, call.dtype)
        if joining is not None:
            dx, params = linear.differentiate(ctx, grad_output, call._replace(**joining))
            return dx, [(), params], [(), ()]
        dx, params = linear.op_backward(ctx, grad_output)
        return extra.join(dx, grad_extra), [(), params], [(), ()]


class BackwardLinearScale(FusedOperation):
    """A linear operation and `ConstantScale`: its products scale their results. What is cast is the
    gradient as it comes, before it is scaled, which delayed scaling's amaxes show."""

    def fuser_backward(
        self, basic_op_ctxs: list[Any], grad_output: Any, *, basic_op_grad_extra_outputs: list[Any]
    ) -> Gradients:
        linear, scale = self.basic_ops
        ctx = basic_op_ctxs[0]
        call = ctx.call._replace(alpha=scale.scale)
        dx, params = linear.differentiate(ctx, grad_output, call)
        return dx, [params, ()], [(), ()]


class BackwardActivationQuantize(FusedOperation):
    """(A bias and) an activation, after an operation that quantizes its gradient: the gradient of
    the activation, the bias's, and both casts, in one kernel where there is one."""

    def fuser_backward(
        self, basic_op_ctxs: list[Any], grad_output: Any, *, basic_op_grad_extra_outputs: list[Any]
    ) -> Gradients:
        op, ctx = self.basic_ops[-1], basic_op_ctxs[-1]
        bias = self.basic_ops[0] if len(self.basic_ops) > 1 else None
        # The neighbour of the first operation, which is the bias if there is one.
        taker = basic_op_ctxs[0].prev_op_grad_output_quantizer
        dh, db = taker.of_activation(
            op.saved_input(ctx),
            folded(plain(grad_output).to(ctx.dtype)),
            op._producer,
            shape=ctx.shape,
            dbias=bias is not None and bias.bias.requires_grad,
        )
        if bias is None:
            return dh, [()], [()]
        return dh, [(None if db is None else db.to(bias.bias.dtype),), ()], [(), ()]


class BackwardActivationBias(BackwardActivationQuantize):
    """GELU or ReLU after a bias: see `BackwardActivationQuantize`."""


class BackwardAddRMSNorm(FusedOperation):
    """`MakeExtraOutput` and `RMSNorm`: the residual's gradient joins before dx is rounded."""

    def fuser_backward(
        self, basic_op_ctxs: list[Any], grad_output: Any, *, basic_op_grad_extra_outputs: list[Any]
    ) -> Gradients:
        norm = self.basic_ops[1]
        dx, params = norm.differentiate(
            basic_op_ctxs[1], grad_output, basic_op_grad_extra_outputs[0][0]
        )
        return dx, [(), params], [(), ()]
