"""Tensor and sequence parallelism as operations of a chain: each is the other's backward.

Gather          rows of all ranks        backward: ReduceScatter
ReduceScatter   sum, then own rows       backward: Gather
Replicate       the identity             backward: AllReduce
AllReduce       sum                      backward: the identity
QuantizeGrad    the identity             backward: quantizes what the others summed
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from .. import collectives
from ..producers import Lazy
from ..tensors import QuantizedTensorStorage
from .linear import Call, finish, quantized_grad
from .link import Link

__all__ = ["AllReduce", "Gather", "Group", "QuantizeGrad", "ReduceScatter", "Replicate"]


class Group(NamedTuple):
    """A process group by name, and how many ranks it has."""

    name: str
    size: int


Result = tuple[Tensor, tuple[Any, ...]]


class Gather(Link):
    """All ranks' rows, in rank order; in high precision, so that they share their scales."""

    @staticmethod
    def leading(lead: tuple[int, ...], call: Any) -> tuple[int, ...]:
        return (lead[0] * call.size, *lead[1:])

    @staticmethod
    def compute(x: Any, params: tuple[Any, ...], group: Group) -> Result:
        if isinstance(x, QuantizedTensorStorage):
            x = x.dequantize()
        elif isinstance(x, Lazy):
            x = x.value()
        return collectives.all_gather(x, group.name, group.size), ()

    @staticmethod
    def backward(grad: Tensor | None, saved: tuple[Any, ...], group: Group) -> tuple[Any, Any]:
        if grad is None:
            return None, ()
        return collectives.reduce_scatter(grad, group.name, group.size), ()


class ReduceScatter(Link):
    """This rank's rows of the sum."""

    @staticmethod
    def leading(lead: tuple[int, ...], call: Any) -> tuple[int, ...]:
        return (lead[0] // call.size, *lead[1:])

    @staticmethod
    def compute(x: Tensor, params: tuple[Any, ...], group: Group) -> Result:
        return collectives.reduce_scatter(x, group.name, group.size), ()

    @staticmethod
    def backward(grad: Tensor, saved: tuple[Any, ...], group: Group) -> tuple[Any, Any]:
        return collectives.all_gather(grad, group.name, group.size), ()


class Replicate(Link):
    """The same x on all ranks, each of which has a part of its gradient."""

    @staticmethod
    def compute(x: Tensor, params: tuple[Any, ...], group: Group) -> Result:
        return x, ()

    @staticmethod
    def backward(grad: Tensor | None, saved: tuple[Any, ...], group: Group) -> tuple[Any, Any]:
        return None if grad is None else collectives.all_reduce(grad, group.name), ()


class AllReduce(Link):
    """The sum over the ranks, each of which has all of its gradient."""

    @staticmethod
    def compute(x: Tensor, params: tuple[Any, ...], group: Group) -> Result:
        return collectives.all_reduce(x, group.name), ()

    @staticmethod
    def backward(grad: Tensor, saved: tuple[Any, ...], group: Group) -> tuple[Any, Any]:
        return grad, ()


class QuantizeGrad(Link):
    """`fp8_grad` of a gradient that is summed over ranks, and the end of delayed scaling's step."""

    @staticmethod
    def compute(x: Tensor, params: tuple[Any, ...], call: Call) -> Result:
        return x, ()

    @staticmethod
    def backward(grad: Any, saved: tuple[Any, ...], call: Call) -> tuple[Any, Any]:
        if grad is not None:
            grad = quantized_grad(grad, call)
        finish(call)
        return grad, ()
