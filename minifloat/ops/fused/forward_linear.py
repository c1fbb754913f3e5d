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

    def _product(self, input_: Any, fwd_kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """(`x w^T`, plus the bias of a Bias that follows, tensors to save)."""
        call = fwd_kwargs["basic_op_kwargs"][0]["call"]
        bias = None
        if isinstance(self.basic_ops[1], Bias):
            bias = self.basic_ops[1].bias.to(call.dtype)
        return self.basic_ops[0].multiply(input_, bias, call)  # type: ignore[no-any-return]

    def fuser_forward_save_ctx(
        self, basic_op_ctxs: list[Any], input_: Any, tensors_to_save: Any, **fwd_kwargs: Any
    ) -> None:
        """Each basic operation records as it does alone; only the first saves tensors."""
        for i, (op, ctx) in enumerate(zip(self.basic_ops, basic_op_ctxs, strict=True)):
            saved = () if i else tensors_to_save
            op.fuser_forward_save_ctx([ctx], input_, saved, **self.basic_kwargs(i, fwd_kwargs))

    def fuser_forward_compute(self, input_: Any, **fwd_kwargs: Any) -> tuple[Any, Outputs, Any]:
        y, saved = self._product(input_, fwd_kwargs)
        return self._finished(y, fwd_kwargs), [() for _ in self.basic_ops], saved

    def _finished(self, y: Any, fwd_kwargs: dict[str, Any]) -> Any:
        """What follows the product, and its bias."""
        return y


class ForwardLinearBiasActivation(_ForwardLinear):
    """`x w^T + bias`, in one product. (No activation is fused with it: the name is the
    contract's.)"""


class ForwardLinearBiasAdd(_ForwardLinear):
    """`x w^T (+ bias) + extra`, in the memory of `extra`."""

    def _finished(self, y: Any, fwd_kwargs: dict[str, Any]) -> Any:
        return self.basic_ops[-1].add(fwd_kwargs["basic_op_extra_inputs"][-1][0], y)


class ForwardLinearScaleAdd(_ForwardLinear):
    """`scale x w^T + extra`, in the memory of `extra`."""

    def _finished(self, y: Any, fwd_kwargs: dict[str, Any]) -> Any:
        y = y * self.basic_ops[1].scale
        return self.basic_ops[-1].add(fwd_kwargs["basic_op_extra_inputs"][-1][0], y)
