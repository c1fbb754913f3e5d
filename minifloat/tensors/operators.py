"""What PyTorch operators do to quantized tensors.

An operator in `HANDLERS` keeps its first argument quantized where it can. Any other sees the
dequantized values; one that writes in place has what it wrote quantized again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..formats import cdiv
from .declared import Declared
from .kept import moved
from .storage import QuantizedTensorStorage, _infer
from .views import is_view, leaves, mapped, read_only

__all__ = ["ANYWHERE", "HANDLERS", "copy_", "dequantized_call", "record"]

aten = torch.ops.aten


def _is_quantized(value: object) -> bool:
    return isinstance(value, QuantizedTensorStorage)


# ------------------------------------------------------------------------------- copies and moves
def _alias(func: Any, t: Any) -> Any:
    return t._aliased()


def _clone(func: Any, t: Any, *, memory_format: Any = None) -> Any:
    return t._like(t._mapped(torch.clone))


def _view(func: Any, t: Any, shape: Sequence[int]) -> Any:
    return t._viewed(_infer(shape, t.numel()))


def _to_copy(func: Any, t: Any, **kwargs: Any) -> Any:
    dtype = kwargs.pop("dtype", None)
    if dtype is not None and dtype != t.dtype:
        return func(t._dequantize(dtype), dtype=dtype, **kwargs)
    move = {k: v for k, v in kwargs.items() if k in ("device", "pin_memory", "non_blocking")}
    payload = t._mapped(lambda b: func(b, **move))
    made = t._like(payload, device=_device(payload, kwargs.get("device")))
    made._keep(moved(made._quantizer, made.device))
    return made


def _device(payload: dict[str, Any], default: Any) -> Any:
    """Where the buffers are: "cuda" becomes "cuda:0"."""
    return next((b.device for b in payload.values() if b is not None), default)


def _pin_memory(func: Any, t: Any, device: Any = None) -> Any:
    return t._like(t._mapped(lambda b: b.pin_memory()))


def _is_pinned(func: Any, t: Any, device: Any = None) -> bool:
    return all(b.is_pinned() for b in t._buffers().values() if b is not None)


def _record_stream(func: Any, t: Any, stream: Any) -> None:
    for b in t._buffers().values():
        if b is not None:
            b.record_stream(stream)


# --------------------------------------------------------------------------------- new tensors
def _empty_like(func: Any, t: Any, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> Any:
    target = torch.device(device) if device is not None else t.device
    if dtype is not None and dtype != t.dtype:
        return torch.empty(t.shape, dtype=dtype, device=target)
    pin = bool(kwargs.get("pin_memory"))

    def fresh(b: torch.Tensor) -> torch.Tensor:
        return torch.empty(b.shape, dtype=b.dtype, device=target, pin_memory=pin)

    payload = t._mapped(fresh)
    return t._like(payload, device=_device(payload, target))


def _new_empty(func: Any, t: Any, size: Sequence[int], **kwargs: Any) -> Any:
    dtype, device = kwargs.get("dtype"), kwargs.get("device") or t.device
    pin = bool(kwargs.get("pin_memory"))
    if dtype is not None and dtype != t.dtype:
        return torch.empty(size, dtype=dtype, device=device, pin_memory=pin)
    if t._quantizer is None:
        raise RuntimeError(f"{type(t).__name__}: a new tensor needs a quantizer; this one has none")
    quantizer = t._quantizer.copy()
    quantizer.internal = False
    quantizer.set_usage(**t.get_usages())
    return quantizer.make_empty(tuple(size), dtype=t.dtype, device=device, pin_memory=pin)


def _new_zeros(func: Any, t: Any, size: Sequence[int], **kwargs: Any) -> Any:
    made = _new_empty(func, t, size, **kwargs).zero_()
    if _is_quantized(made):
        made._mark_zeros()
    return made


def _zero_(func: Any, t: Any) -> Any:
    t.quantize_(torch.zeros(t.shape, dtype=t.dtype, device=t.device))
    return t


# ------------------------------------------------------------------------------------ row slices
def _same_size(func: Any, t: Any, size: Sequence[int], *args: Any, **kwargs: Any) -> Any:
    """`as_strided` and `expand` to the shape the tensor has."""
    return t._aliased() if tuple(size) == tuple(t.shape) else NotImplemented


def _slice(
    func: Any, t: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    if t.dim() == 0 or step != 1:
        return NotImplemented
    n = t.shape[dim]
    first = _clamped(0 if start is None else start, n)
    last = max(first, _clamped(n if end is None else end, n))
    if first == 0 and last == n:
        return t._aliased()
    return _cut(t, first, last) if dim % t.dim() == 0 else NotImplemented


def _clamped(index: int, n: int) -> int:
    """A slice's bound as Python reads it: negative from the end, never outside."""
    return min(max(index + n if index < 0 else index, 0), n)


def _cut(t: Any, start: int, end: int) -> Any:
    piece = t._cut(start, end)
    return NotImplemented if piece is None else piece


def _select(func: Any, t: Any, dim: int, index: int) -> Any:
    if t.dim() < 2 or dim % t.dim() != 0 or not -t.shape[0] <= index < t.shape[0]:
        return NotImplemented
    index = index % t.shape[0]
    piece = _cut(t, index, index + 1)
    return piece if piece is NotImplemented else piece._viewed(tuple(t.shape[1:]))


def _split(func: Any, t: Any, size: Any, dim: int = 0) -> Any:
    if dim % t.dim() != 0:
        return NotImplemented
    n = t.shape[dim]
    if isinstance(size, (list, tuple)):
        sizes = list(size)
    else:  # a number, which a graph may have computed
        count = int(cdiv(n, size)) if size else 0
        sizes = [min(size, n - i * size) for i in range(count)] or [n]
    if len(sizes) == 1 and sizes[0] == n:
        return [t._aliased()]
    out, start = [], 0
    for s in sizes:
        piece = _cut(t, start, start + s)
        if piece is NotImplemented:
            return NotImplemented
        out.append(piece)
        start += s
    return out


# ------------------------------------------------------------------------------------- in place
def copy_(func: Any, dst: Any, src: Any, non_blocking: bool = False) -> Any:
    """Buffer by buffer between equals; else requantize or dequantize."""
    if not _is_quantized(dst):  # `src` is
        dtype = dst.dtype if dst.dtype.is_floating_point else torch.float32
        return dst.copy_(src._dequantize(dtype), non_blocking)
    if tuple(src.shape) != tuple(dst.shape):
        src = src.expand(dst.shape)
    same = (
        isinstance(src, type(dst)._storage_type())
        and type(src._quantizer) is type(dst._quantizer)
        and _has_copies(src, dst)
        and src._laid_out == dst._laid_out
        and not dst._difference(src)
    )
    if same:
        dst.copy_from_storage(src)
        record(dst._quantizer, src._quantizer)
    else:
        dst.quantize_(src)
    return dst


def _has_copies(src: Any, dst: Any) -> bool:
    """Whether src has each copy that dst has: a model made under `torch.no_grad()` has rows alone,
    and reads what a trained one saved."""
    there, wanted = src.get_usages(), dst.get_usages()
    return there == wanted or (any(wanted.values()) and all(there[c] for c in wanted if wanted[c]))


def record(quantizer: Any, other: Any) -> None:
    """What was recorded of the copied values has now been seen here too.

    This is also how PyTorch hands back what a graph did to a tensor: it copies the new one over it.
    """
    if quantizer is None:
        return
    for mine, theirs in zip(quantizer._state_written(), other._state_written(), strict=True):
        if mine is not theirs:
            mine.copy_(torch.maximum(mine, theirs))


def _foreach_copy_(func: Any, dsts: Any, srcs: Any, non_blocking: bool = False) -> None:
    for dst, src in zip(dsts, srcs, strict=True):
        dst.copy_(src, non_blocking)
    _count(dsts)


def _count(written: Sequence[Any]) -> None:
    """Versions of what a list operator wrote: PyTorch has its kernels count, who cannot in here."""
    torch.autograd.graph.increment_version([t for t in written if not t.is_inference()])


HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.clone.default: _clone,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten._to_copy.default: _to_copy,
    aten._pin_memory.default: _pin_memory,
    aten.is_pinned.default: _is_pinned,
    aten.record_stream.default: _record_stream,
    aten.empty_like.default: _empty_like,
    aten.new_empty.default: _new_empty,
    aten.new_zeros.default: _new_zeros,
    aten.zero_.default: _zero_,
    aten.as_strided.default: _same_size,
    aten.expand.default: _same_size,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
}
# These take a quantized tensor in any argument.
ANYWHERE: dict[Any, Callable[..., Any]] = {
    aten.copy_.default: copy_,
    aten._foreach_copy_.default: _foreach_copy_,
}


# ------------------------------------------------------------------------------- everything else
def dequantized_call(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run `func` on dequantized arguments; what its schema says it writes is quantized again.

    The written arguments are found by name, and all their shapes are checked before the first of
    them is written.
    """
    arguments = func._schema.arguments
    names = [a.name for a in arguments]
    written = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
    bound = {**dict(zip(names, args, strict=False)), **kwargs}
    for name in sorted(written & set(bound)):
        for original in leaves(bound[name]):
            if isinstance(original, Declared):
                original._check_writable(func)
    plain = {name: mapped(value, _plain_tensor) for name, value in bound.items()}
    out = func(*(plain[n] for n in names[: len(args)]), **{n: plain[n] for n in kwargs})
    if not written:
        return read_only(out, _name(bound)) if is_view(func) else out
    pairs: list[tuple[Any, Any]] = [
        (original, value)
        for name in names
        if name in written and name in bound
        for original, value in zip(leaves(bound[name]), leaves(plain[name]), strict=True)
        if isinstance(original, Declared)
    ]
    for original, value in pairs:
        if tuple(value.shape) != tuple(original.shape):
            raise RuntimeError(
                f"{func}: would give a {type(original).__name__} of shape "
                f"{tuple(original.shape)} the shape {tuple(value.shape)}; "
                "dequantize() it first. Nothing was written"
            )
    for name in written & set(bound):
        if isinstance(bound[name], (list, tuple)):
            _count(bound[name])
    results: dict[int, Any] = {}
    for original, value in pairs:
        original._write_values(value)
        results[id(value)] = original
    return mapped(out, lambda t: results.get(id(t), t))


def _name(bound: dict[str, Any]) -> str:
    found = [x for value in bound.values() for x in leaves(value) if isinstance(x, Declared)]
    return type(found[0]).__name__


def _plain_tensor(value: Any) -> Any:
    return value._dequantize(value._dtype) if isinstance(value, Declared) else value
