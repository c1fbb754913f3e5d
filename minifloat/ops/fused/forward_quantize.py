"""Forward fusions of an operation with the cast of its result: the next one gets operands."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..basic_operation import _alone
from ..fused_operation import FusedOperation

__all__ = ["ForwardActivationQuantize", "ForwardNormQuantize"]


class _ForwardQuantize(FusedOperation):
    """One operation that produces, and the cast of what it produces, in one kernel where there is
    one."""

    def fuser_forward_compute(
        self, input_: Any, **fwd_kwargs: Any
    ) -> tuple[Any, Iterable[Iterable[Any]], Any]:
        op, kwargs = self.basic_ops[0], _alone(fwd_kwargs)
        y, saved = self._produced(op, input_, kwargs)
        taker = kwargs["next_op_input_quantizer"]
        return taker.quantize(y, tuple(input_.shape[:-1])), [()], saved

    def _produced(self, op: Any, input_: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """(a lazy matrix, tensors to save)."""
        return op.produce(input_, **kwargs)  # type: ignore[no-any-return]

    def fuser_forward_save_ctx(
        self, basic_op_ctxs: list[Any], input_: Any, tensors_to_save: Any, **fwd_kwargs: Any
    ) -> None:
        self.basic_ops[0].fuser_forward_save_ctx(
            basic_op_ctxs, input_, tensors_to_save, **fwd_kwargs
        )


class ForwardActivationQuantize(_ForwardQuantize):
    """An activation, and the cast of its result."""


class ForwardNormQuantize(_ForwardQuantize):
    """A norm, and the cast of its result."""

    def _produced(self, op: Any, input_: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        amax = kwargs["next_op_input_quantizer"].wants_amax
        return op.produce(input_, lazy=True, amax=amax, **kwargs)  # type: ignore[no-any-return]
