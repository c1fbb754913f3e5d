"""`Identity` and `Reshape`: the same values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..basic_operation import BasicOperation
from ..context import OperationContext
from .values import plain

__all__ = ["Identity", "Reshape"]


class Identity(BasicOperation):
    """`y = x`."""

    forward_keywords = ()

    def op_forward_compute(self, input_: Any, **kwargs: Any) -> tuple[Any, Any]:
        return input_, ()

    def op_forward_save_ctx(
        self, ctx: OperationContext, input_: Any, tensors_to_save: Any, **kwargs: Any
    ) -> None:
        pass

    def op_backward(self, ctx: OperationContext, grad_output: Any) -> tuple[Any, Iterable[Any]]:
        return grad_output, ()


class Reshape(BasicOperation):
    """`y = x.reshape(shape)`."""

    forward_keywords = ()

    def __init__(self, shape: int | Iterable[int]) -> None:
        super().__init__()
        self._shape = (shape,) if isinstance(shape, int) else tuple(shape)

    def op_forward_compute(self, input_: Any, **kwargs: Any) -> tuple[Any, Any]:
        return plain(input_).reshape(self._shape), ()

    def op_forward_save_ctx(
        self, ctx: OperationContext, input_: Any, tensors_to_save: Any, **kwargs: Any
    ) -> None:
        ctx.input_shape = input_.shape

    def op_backward(self, ctx: OperationContext, grad_output: Any) -> tuple[Any, Iterable[Any]]:
        return plain(grad_output).reshape(ctx.input_shape), ()

    def extra_repr(self) -> str:
        return f"shape={self._shape}"
