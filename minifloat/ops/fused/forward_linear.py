"""Forward fusions around a linear operation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..basic.bias import Bias
from ..fused_operation import FusedOperation

__all__ = ["ForwardLinearBiasActivation", "ForwardLinearBiasAdd", "ForwardLinearScaleAdd"]

Outputs = Iterable[Iterable[Any]]


class _ForwardLinear(FusedOperation):
    """A linear operation first; the others record what they need of shapes and dtypes only."""

    def fuser_forward_save_ctx(
        self, basic_op_ctxs: list[Any], input_: Any, tensors_to_save: Any, **fwd_kwargs: Any
    ) -> None:
        """Each basic operation records as it does alone; only the first saves tensors."""
        for i, (op, ctx) in enumerate(zip(self.basic_ops, basic_op_ctxs, strict=True)):
            saved = () if i else tensors_to_save
            op.fuser_forward_save_ctx([ctx], input_, saved, **self.basic_kwargs(i, fwd_kwargs))

    def fuser_forward_compute(self, input_: Any, **fwd_kwargs: Any) -> tuple[Any, Outputs, Any]:
        call = fwd_kwargs["basic_op_kwargs"][0]["call"]
        y, saved = self._product(input_, call, fwd_kwargs)
        return y, [() for _ in self.basic_ops], saved

    def _product(self, input_: Any, call: Any, fwd_kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """(`x w^T` as the call says, plus the bias of a Bias that follows, tensors to save)."""
        bias = None
        if isinstance(self.basic_ops[1], Bias):
            bias = self.basic_ops[1].bias.to(call.dtype)
        return self.basic_ops[0].multiply(input_, bias, call)  # type: ignore[no-any-return]


class ForwardLinearBiasActivation(_ForwardLinear):
    """`x w^T + bias`, in one product. (No activation is fused with it: the name is the
    contract's.)"""


class ForwardLinearBiasAdd(_ForwardLinear):
    """`x w^T (+ bias) + extra`, in the memory of `extra`: the product adds it, if it can."""

    def fuser_forward_save_ctx(
        self, basic_op_ctxs: list[Any], input_: Any, tensors_to_save: Any, **fwd_kwargs: Any
    ) -> None:
        super().fuser_forward_save_ctx(basic_op_ctxs, input_, tensors_to_save, **fwd_kwargs)
        basic_op_ctxs[-1].of_x = self.basic_ops[0].output_shape(input_)

    def _product(self, input_: Any, call: Any, fwd_kwargs: dict[str, Any]) -> tuple[Any, Any]:
        linear, add = self.basic_ops[0], self.basic_ops[-1]
        extra = fwd_kwargs["basic_op_extra_inputs"][-1][0]
        joining = None
        if linear.tensor_parallel_mode is None:
            joining = add.joining(extra, linear.output_shape(input_), call.dtype)
        if joining is not None:
            return super()._product(input_, call._replace(**joining), fwd_kwargs)
        y, saved = super()._product(input_, call, fwd_kwargs)
        return add.add(extra, y), saved


class ForwardLinearScaleAdd(ForwardLinearBiasAdd):
    """`scale x w^T + extra`, in the memory of `extra`: the product scales and adds, if it can."""

    def _product(self, input_: Any, call: Any, fwd_kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return super()._product(input_, call._replace(alpha=self.basic_ops[1].scale), fwd_kwargs)
