"""`ConstantScale`: multiplication by a number."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..basic_operation import BasicOperation
from ..context import OperationContext
from .values import plain

__all__ = ["ConstantScale"]


class ConstantScale(BasicOperation):
    """`y = scale x`."""

    forward_keywords = ()

    def __init__(self, scale: float) -> None:
        super().__init__()
        if not isinstance(scale, int | float):
            raise TypeError(f"ConstantScale: scale: got {scale!r}; a number is needed")
        self.scale = scale

    def op_forward_compute(self, input_: Any, **kwargs: Any) -> tuple[Any, Any]:
        return plain(input_) * self.scale, ()

    def op_forward_save_ctx(
        self, ctx: OperationContext, input_: Any, tensors_to_save: Any, **kwargs: Any
    ) -> None:
        pass

    def op_backward(self, ctx: OperationContext, grad_output: Any) -> tuple[Any, Iterable[Any]]:
        return plain(grad_output) * self.scale, ()

    def extra_repr(self) -> str:
        return f"scale={self.scale}"
