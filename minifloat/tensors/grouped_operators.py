"""What PyTorch operators do to grouped tensors.

An operator in `HANDLERS` keeps a group a group, or gives its members. Another one whose result
aliases its argument would cut members up, or alias a dequantized copy, where what is written is
lost: it is refused, as are those in `BANNED`. Any other sees the stacked, dequantized members.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import operators
from .declared import Declared
from .grouped_storage import GroupedTensorStorage
from .storage import _infer
from .views import read_only

__all__ = ["HANDLERS", "flat", "refuse", "refused"]

aten = torch.ops.aten


def refuse(group: Any, what: Any) -> RuntimeError:
    """The error for a view that cuts members up."""
    name = (group if isinstance(group, type) else type(group)).__name__
    return RuntimeError(
        f"{name}: {what} would cut its members up; take them with "
        "split_into_quantized_tensors(), or dequantize() first"
    )


def refused(func: Any) -> bool:
    """Whether an operator without a handler is an error."""
    return func in BANNED or (func.is_view and func is not aten.expand.default)


def _is_group(value: object) -> bool:
    return isinstance(value, GroupedTensorStorage)


def _view(func: Any, t: Any, shape: Sequence[int]) -> Any:
    """The same shape, or all values in a row: the row buffer, or where that has codes a copy, which
    cannot be written.

    DDP takes parameters to its buckets this way. (`GroupedTensor.view` gives codes.)
    """
    size = _infer(shape, t.numel())
    if size == tuple(t.shape):
        return t._aliased()
    if size != (t.numel(),):
        raise refuse(t, f"view{tuple(shape)}")
    if t._quantizer is None:
        return flat(t)
    return read_only(t._dequantize(t.dtype).view(-1), type(t).__name__)


def flat(t: Any) -> Tensor:
    """The flat row buffer."""
    if t.rowwise_data is None:
        raise RuntimeError(
            f"{type(t).__name__}: a flat view is of the rowwise data, which is absent"
        )
    return t.rowwise_data.view(-1)  # type: ignore[no-any-return]


def _unbind(func: Any, t: Any, dim: int = 0) -> Any:
    """The members, where they are stacked: what is written there is written here."""
    if dim not in (0, -t.dim()) or not t.all_same_shape():
        return NotImplemented
    members = t.split_into_quantized_tensors()
    return members if isinstance(members[0], Tensor) else NotImplemented


def _empty_like(func: Any, t: Any, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> Any:
    target = torch.device(device) if device is not None else t.device
    if dtype is not None and dtype != t.dtype:
        return torch.empty(t.shape, dtype=dtype, device=target)
    pin = bool(kwargs.get("pin_memory"))
    payload: dict[str, Tensor | None] = {}
    for attr, b in t._buffers().items():
        if b is None or attr in t._SIZES:  # sizes are not what is empty
            payload[attr] = None if b is None else b.to(target)
        else:
            payload[attr] = torch.empty(b.shape, dtype=b.dtype, device=target, pin_memory=pin)
    return t._like(payload, device=target)


def _copy_(func: Any, dst: Any, src: Any, non_blocking: bool = False) -> Any:
    """Buffer by buffer between groups of one layout; else the values, quantized again."""
    if not _is_group(dst):
        return operators.copy_(func, dst, src, non_blocking)  # `src` is one
    if not dst._difference(src):
        theirs = src._buffers()
        for attr, buffer in dst._buffers().items():
            if buffer is not None:
                buffer.copy_(theirs[attr], non_blocking)
        dst._written()
        operators.record(dst._quantizer, src._quantizer)
        return dst
    dst._check_writable(func)
    values = src._dequantize(dst.dtype) if isinstance(src, Declared) else src
    dst._write_values(values.expand(dst.shape))
    return dst


HANDLERS: dict[Any, Callable[..., Any]] = {
    **{
        func: operators.HANDLERS[func]
        for func in (
            aten.detach.default,
            aten.alias.default,
            aten.clone.default,
            aten._to_copy.default,
            aten._pin_memory.default,
            aten.is_pinned.default,
            aten.record_stream.default,
            aten.as_strided.default,
            aten.expand.default,
        )
    },
    aten._foreach_copy_.default: operators.ANYWHERE[aten._foreach_copy_.default],
    aten.copy_.default: _copy_,
    aten.empty_like.default: _empty_like,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.unbind.int: _unbind,
}

# What makes a copy, of members that are cut up or put into another order.
BANNED = frozenset({aten.cat.default, aten.stack.default})
