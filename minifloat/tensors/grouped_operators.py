"""What PyTorch operators do to grouped tensors.

An operator in `HANDLERS` keeps a group a group; one in `BANNED` would cut members up. Any other
sees the stacked, dequantized members.
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

__all__ = ["BANNED", "HANDLERS", "refuse"]

aten = torch.ops.aten


def refuse(group: Any, what: Any) -> RuntimeError:
    """The error for a view that cuts members up."""
    name = (group if isinstance(group, type) else type(group)).__name__
    return RuntimeError(
        f"{name}: {what} would cut its members up; take them with "
        "split_into_quantized_tensors(), or dequantize() first"
    )


def _is_group(value: object) -> bool:
    return isinstance(value, GroupedTensorStorage)


def _view(func: Any, t: Any, shape: Sequence[int]) -> Any:
    """The same shape, or the flat row buffer; nothing else."""
    size = _infer(shape, t.numel())
    if size == tuple(t.shape):
        return t._aliased()
    if len(size) != 1:
        raise refuse(t, f"view{tuple(shape)}")
    if t.rowwise_data is None:
        raise RuntimeError(
            f"{type(t).__name__}: a flat view is of the rowwise data, which is absent"
        )
    return t.rowwise_data.view(-1)


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
}

BANNED = frozenset(
    {
        aten.cat.default,
        aten.permute.default,
        aten.reshape.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.stack.default,
        aten.t.default,
        aten.transpose.int,
        aten.unsqueeze.default,
    }
)
