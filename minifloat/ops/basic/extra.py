"""`AddExtraInput` and `MakeExtraOutput`: where another tensor joins a pipeline, or leaves it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ...tensors import QuantizedTensorStorage
from ..basic_operation import BasicOperation
from .values import folded, plain, summed

__all__ = ["AddExtraInput", "MakeExtraOutput"]


def _added(into: Any, x: Any, in_place: bool) -> Any:
    """`into + x`, in the memory and the dtype of `into` if allowed. In a graph, memory is the
    compiler's."""
    if not in_place:
        return x + into
    if torch.compiler.is_compiling() or x.shape != into.shape or _expanded(into):
        return (x + into).to(into.dtype)
    return into.detach().add_(x)


def _expanded(t: Any) -> bool:
    """Whether its elements share memory, such as those of a sum's gradient."""
    return 0 in [stride for n, stride in zip(t.shape, t.stride(), strict=True) if n > 1]


def _joining(into: Any, shape: tuple[int, ...], dtype: torch.dtype, in_place: bool) -> Any:
    """What lets a product that makes a tensor of this shape and dtype add `into` on its way, as
    fields of a linear operation's call; None: it cannot, add it afterwards."""
    if isinstance(into, QuantizedTensorStorage) or into.dtype != dtype:
        return None
    if tuple(into.shape) != shape:  # it is broadcast
        return None
    in_place = in_place and not torch.compiler.is_compiling()
    if in_place and not into.is_contiguous():
        return None
    return {"add": folded(into.detach()), "in_place": in_place}


class AddExtraInput(BasicOperation):
    """`y = x + extra`; with `in_place`, in the memory of an `extra` that the caller gave. (What
    comes by a channel may be saved by operations in between.)"""

    forward_keywords = ()
    num_extra_inputs = 1

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self._in_place = in_place

    def fuser_forward_compute(
        self, input_: Any, **fwd_kwargs: Any
    ) -> tuple[Any, Iterable[Iterable[Any]], Any]:
        return self.add(fwd_kwargs["basic_op_extra_inputs"][0][0], input_), [()], ()

    def add(self, extra: Any, x: Any) -> Any:
        """The output."""
        return _added(plain(extra), plain(x), self._reuses)

    def joining(self, extra: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        """The same for a product that would make x: see `_joining`."""
        return _joining(extra, shape, dtype, self._reuses)

    @property
    def _reuses(self) -> bool:
        return self._in_place and self._extra_input_channels[0] is None

    @property
    def _writes_extra_inputs(self) -> bool:
        return self._reuses

    def fuser_forward_save_ctx(
        self, basic_op_ctxs: list[Any], input_: Any, tensors_to_save: Any, **fwd_kwargs: Any
    ) -> None:
        # The shape of x, where a fused operation made it: what comes from others is their fuser's.
        basic_op_ctxs[0].of_x = None

    def fuser_backward(
        self, basic_op_ctxs: list[Any], grad_output: Any, *, basic_op_grad_extra_outputs: list[Any]
    ) -> tuple[Any, Iterable[Iterable[Any]], Iterable[Iterable[Any]]]:
        return summed(grad_output, basic_op_ctxs[0].of_x), [()], [(grad_output,)]


class MakeExtraOutput(BasicOperation):
    """`y = x`, and x once more; with `in_place`, backward adds in the memory of the latter's
    gradient, if that comes from the caller."""

    forward_keywords = ()
    num_extra_outputs = 1

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self._in_place = in_place

    def fuser_forward_compute(
        self, input_: Any, **fwd_kwargs: Any
    ) -> tuple[Any, Iterable[Iterable[Any]], Any]:
        return input_, [(input_,)], ()

    def fuser_forward_save_ctx(
        self, basic_op_ctxs: list[Any], input_: Any, tensors_to_save: Any, **fwd_kwargs: Any
    ) -> None:
        pass

    def fuser_backward(
        self, basic_op_ctxs: list[Any], grad_output: Any, *, basic_op_grad_extra_outputs: list[Any]
    ) -> tuple[Any, Iterable[Iterable[Any]], Iterable[Iterable[Any]]]:
        return self.join(grad_output, basic_op_grad_extra_outputs[0][0]), [()], [()]

    def join(self, grad_output: Any, grad_extra: Any) -> Any:
        """The gradient of the input from those of both outputs."""
        if grad_extra is None or grad_output is None:
            return grad_output if grad_extra is None else grad_extra
        return _added(plain(grad_extra), plain(grad_output), self._reuses)

    def joining(self, grad_extra: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        """The same for a product that would make `grad_output`: see `_joining`."""
        return None if grad_extra is None else _joining(grad_extra, shape, dtype, self._reuses)

    @property
    def _reuses(self) -> bool:
        return self._in_place and self._extra_output_channels[0] is None
