"""`AllGather`, `AllReduce`, `ReduceScatter`: collectives over the first dim."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ... import collectives
from ..basic_operation import BasicOperation
from ..context import OperationContext
from ..group import group_of
from .values import plain

__all__ = ["AllGather", "AllReduce", "ReduceScatter"]


class _Collective(BasicOperation):
    """Over the ranks of a group, the world's if None; alone in it, the identity."""

    forward_keywords = ()

    def __init__(self, process_group: Any = None) -> None:
        super().__init__()
        self.process_group = process_group
        self._group = group_of(process_group)

    def op_forward_save_ctx(
        self, ctx: OperationContext, input_: Any, tensors_to_save: Any, **kwargs: Any
    ) -> None:
        pass

    def op_forward_compute(self, input_: Any, **kwargs: Any) -> tuple[Any, Any]:
        return (input_ if self._group is None else self._forward(plain(input_))), ()

    def op_backward(self, ctx: OperationContext, grad_output: Any) -> tuple[Any, Iterable[Any]]:
        return (grad_output if self._group is None else self._backward(plain(grad_output))), ()

    def _forward(self, x: Any) -> Any:
        raise NotImplementedError

    def _backward(self, grad: Any) -> Any:
        raise NotImplementedError

    def _gather(self, x: Any) -> Any:
        assert self._group is not None
        return collectives.all_gather(x, self._group.name, self._group.size)

    def _scatter(self, x: Any) -> Any:
        assert self._group is not None
        if x.shape[0] % self._group.size:
            raise ValueError(
                f"input: got shape {tuple(x.shape)}; the {self._group.size} ranks do not divide "
                "its first dim"
            )
        return collectives.reduce_scatter(x, self._group.name, self._group.size)


class AllGather(_Collective):
    """The ranks' rows, one below the other; backward: reduce-scatter."""

    def _forward(self, x: Any) -> Any:
        return self._gather(x)

    def _backward(self, grad: Any) -> Any:
        return self._scatter(grad)


class ReduceScatter(_Collective):
    """This rank's rows of the sum; backward: all-gather."""

    def _forward(self, x: Any) -> Any:
        return self._scatter(x)

    def _backward(self, grad: Any) -> Any:
        return self._gather(grad)


class AllReduce(_Collective):
    """The sum over the ranks. Each has the whole gradient, so backward is the identity;
    `reduce_in_backward` changes nothing, and is there for code that passes it."""

    def __init__(self, process_group: Any = None, reduce_in_backward: bool = True) -> None:
        super().__init__(process_group)

    def _forward(self, x: Any) -> Any:
        assert self._group is not None
        return collectives.all_reduce(x, self._group.name)

    def _backward(self, grad: Any) -> Any:
        return grad
