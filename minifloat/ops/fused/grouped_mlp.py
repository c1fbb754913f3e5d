"""The MLP of experts: two grouped linear operations with a scaled activation between them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..basic.grouped_linear import Again
from ..basic.values import folded
from ..fused_operation import FusedOperation

__all__ = ["ForwardGroupedMLP"]


class ForwardGroupedMLP(FusedOperation):
    """`GroupedLinear`, an activation scaled by row, `GroupedLinear`: nothing of the activation is
    kept for the second one's backward, which makes it again from the activation's own record."""

    def fuser_forward_compute(
        self, input_: Any, **fwd_kwargs: Any
    ) -> tuple[Any, Iterable[Iterable[Any]], Any]:
        first, activation, last = self.basic_ops
        of_first, of_act, of_last = (self.basic_kwargs(i, fwd_kwargs) for i in range(3))
        h, _, kept_first = first.fuser_forward_compute(input_, **of_first)
        x, _, kept_act = activation.fuser_forward_compute(h, **of_act)
        again = None
        if kept_act:
            again = Again(folded(kept_act[0]), kept_act[1], activation._producer)
        y, kept_last = last.multiply(x, again, of_last)
        return y, [(), (), ()], (kept_first, h, kept_act, x, kept_last)

    def fuser_forward_save_ctx(
        self, basic_op_ctxs: list[Any], input_: Any, tensors_to_save: Any, **fwd_kwargs: Any
    ) -> None:
        first, activation, last = self.basic_ops
        of_first, of_act, of_last = (self.basic_kwargs(i, fwd_kwargs) for i in range(3))
        kept_first, h, kept_act, x, kept_last = tensors_to_save
        first.fuser_forward_save_ctx([basic_op_ctxs[0]], input_, kept_first, **of_first)
        activation.fuser_forward_save_ctx([basic_op_ctxs[1]], h, kept_act, **of_act)
        last.fuser_forward_save_ctx([basic_op_ctxs[2]], x, kept_last, **of_last)
