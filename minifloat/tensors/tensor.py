"""`QuantizedTensor`: a storage that is a real `torch.Tensor`.

It stores, prints, saves and moves; the library's own math reads its fields. An operator that knows
nothing of quantization sees the dequantized values; one that writes in place requantizes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import straight_through
from ..quantizers import UsageError, adopt
from .storage import QuantizedTensorStorage, _infer

__all__ = ["QuantizedTensor"]

aten = torch.ops.aten


class QuantizedTensor(QuantizedTensorStorage, Tensor):
    """Wrapper subclass: shape, nominal dtype and device are the tensor's, the data is the storage's."""

    @staticmethod
    def __new__(
        cls: Any,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        fake_dtype: torch.dtype | None = None,
        requires_grad: bool = False,
        device: torch.device | str | None = None,
        stride: Sequence[int] | None = None,
        storage_offset: int = 0,
        **kwargs: Any,
    ) -> Any:
        if fake_dtype is not None and fake_dtype != dtype:
            raise ValueError(f"fake_dtype: got {fake_dtype}; it must equal dtype, {dtype}")
        if device is None:
            device = cls._device_of(kwargs)
        self = Tensor._make_wrapper_subclass(
            cls,
            shape,
            strides=stride if stride is not None else _contiguous_stride(shape),
            storage_offset=storage_offset,
            dtype=dtype,
            device=device,
            requires_grad=requires_grad,
        )
        kwargs["fake_dtype"] = dtype
        self._set_fields(kwargs, shape)
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass  # __new__ has set the fields

    @classmethod
    def _device_of(cls, kwargs: dict[str, Any]) -> torch.device:
        for _, kwarg in cls._INNER_TENSORS:
            t = kwargs.get(kwarg)
            if t is not None:
                return t.device  # type: ignore[no-any-return]
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    # `torch.Tensor` has the truth about these; the storage's versions serve bare storages.
    shape = Tensor.shape  # type: ignore[assignment]
    size = Tensor.size  # type: ignore[assignment]
    device = Tensor.device  # type: ignore[assignment]
    dim = Tensor.dim
    numel = Tensor.numel
    __repr__ = QuantizedTensorStorage.__repr__

    # --------------------------------------------------------------------------- user methods
    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:
        """The high-precision tensor; the gradient passes unchanged."""
        dtype = self.dtype if dtype is None else dtype
        if torch.is_grad_enabled() and self.requires_grad:
            return straight_through.dequantize(self, dtype)
        return self._dequantize(dtype)

    def quantize_(self, tensor: Tensor, *, noop_flag: Tensor | None = None) -> Any:
        with torch.no_grad():
            return super().quantize_(tensor, noop_flag=noop_flag)

    def detach(self) -> Any:
        return type(self).make_like(self)

    @classmethod
    def make_like(
        cls,
        tensor: Any,
        *,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        requires_grad: bool = False,
    ) -> Any:
        """A new tensor on the same buffers."""
        return tensor._like(tensor._buffers(), shape, dtype=dtype, requires_grad=requires_grad)

    def to_dtype(self, dtype: torch.dtype) -> Any:
        """The same buffers under another nominal dtype."""
        return type(self).make_like(self, dtype=dtype, requires_grad=self.requires_grad)

    def float(self) -> Tensor:  # type: ignore[override]
        return self.dequantize(dtype=torch.float32)

    def half(self) -> Tensor:  # type: ignore[override]
        return self.dequantize(dtype=torch.float16)

    def bfloat16(self) -> Tensor:  # type: ignore[override]
        return self.dequantize(dtype=torch.bfloat16)

    def cpu(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        return self.to("cpu")

    def expand_as(self, other: Tensor) -> Any:  # type: ignore[override]
        return self if other is self else self.dequantize().expand_as(other)

    def contiguous(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        return self if self.is_contiguous() else self.dequantize().contiguous()

    def view(self, *shape: Any) -> Any:  # type: ignore[override]
        """A view that stays quantized where the last dim is kept; else a dequantized one, warned."""
        size = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if isinstance(size, torch.dtype):
            return self.dequantize().view(size)
        if not self._viewable(_infer(size, self.numel())):
            warnings.warn(
                f"{type(self).__name__}: a view as {tuple(size)} moves elements between blocks and is "
                "taken of the dequantized values; dequantize() first to silence this",
                stacklevel=2,
            )
            return self.dequantize().view(size)
        return Tensor.view(self, size)

    def reshape(self, *shape: Any) -> Any:  # type: ignore[override]
        size = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        return Tensor.view(self, _infer(size, self.numel()))

    def _viewable(self, shape: Sequence[int]) -> bool:
        try:
            self._view_buffers(shape)
        except UsageError:
            return False
        return True

    def untyped_storage(self) -> Any:
        return torch.UntypedStorage(0, device=self.device)

    @property
    def data(self) -> Any:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, value: Any) -> None:
        """Rebind to another tensor's buffers, or requantize plain data."""
        if tuple(value.shape) != tuple(self.shape):
            raise ValueError(f"data: got shape {tuple(value.shape)}; {tuple(self.shape)} is needed")
        if isinstance(value, type(self)._storage_type()):
            for attr, tensor in value._buffers().items():
                setattr(self, attr, tensor)
            for plain in self._PLAIN:
                setattr(self, plain.attr, getattr(value, plain.attr))
            if value._quantizer is not None:
                self._quantizer = adopt(value._quantizer)
        else:
            self.quantize_(value)

    # ----------------------------------------------------------------------- copies of itself
    def _like(  # type: ignore[override]
        self,
        buffers: dict[str, Tensor | None],
        shape: Sequence[int] | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        requires_grad: bool = False,
    ) -> Any:
        kwargs = self.get_metadata()
        kwargs.update({kwarg: buffers[attr] for attr, kwarg in self._INNER_TENSORS})
        dtype = kwargs.pop("fake_dtype") if dtype is None else dtype
        kwargs.pop("fake_dtype", None)
        made = type(self)(
            self.shape if shape is None else shape,
            dtype,
            requires_grad=requires_grad,
            device=self.device if device is None else device,
            **kwargs,
        )
        made.amax_reduction_group = self.amax_reduction_group
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        names, ctx = self.__tensor_flatten__()
        ctx = {k: v for k, v in ctx.items() if k != "group_name"}
        ctx["nontensor_kwargs"] = {**ctx["nontensor_kwargs"], "quantizer": self._quantizer}
        inner = {n: getattr(self, n) for n in names}
        return _rebuild_tensor, (inner, ctx, tuple(self.shape), isinstance(self, torch.nn.Parameter))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with torch.no_grad():
            made = self.clone()
        if self._quantizer is not None:
            made._quantizer = self._quantizer.copy()
        made.requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=self.requires_grad)
        memo[id(self)] = made
        return made

    def _stable_hash_for_caching(self) -> str:
        """What compile caches key this tensor by: everything but the data."""
        names, ctx = self.__tensor_flatten__()
        inner = [(n, tuple(getattr(self, n).shape), str(getattr(self, n).dtype)) for n in names]
        plain = {k: v for k, v in ctx["nontensor_kwargs"].items() if k != "quantizer"}
        quantizer = self._quantizer
        key = quantizer._value_key() if quantizer is not None and quantizer._is_value() else id(quantizer)
        return repr((ctx["cls"].__qualname__, tuple(self.shape), self.dtype, inner, plain, key,
                     self.requires_grad, ctx["group_name"]))  # fmt: skip

    # ------------------------------------------------------------------------------- dispatch
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is not None and isinstance(args[0], QuantizedTensor):
            out = handler(func, *args, **kwargs)
            if out is not NotImplemented:
                return out
        if func is aten.copy_.default:
            return _copy_(*args, **kwargs)
        return _dequantized_call(func, args, kwargs)


def _contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    stride, step = [], 1
    for d in reversed(tuple(shape)):
        stride.append(step)
        step = step * max(d, 1) if isinstance(d, int) else step * d
    return tuple(reversed(stride))


def _rebuild_tensor(inner: dict[str, Tensor], ctx: dict[str, Any], shape: Any, is_param: bool) -> Any:
    """Unpickle: `torch.load(weights_only=True)` may call this and the classes it names."""
    made = ctx["cls"].__tensor_unflatten__(inner, ctx, shape, _contiguous_stride(shape))
    return torch.nn.Parameter(made, requires_grad=ctx["requires_grad"]) if is_param else made


# ---------------------------------------------------------------------------------- operator rules
def _detach(func: Any, t: Any) -> Any:
    return t._like(t._buffers())


def _clone(func: Any, t: Any, *, memory_format: Any = None) -> Any:
    return t._like(t._mapped(torch.clone))


def _view(func: Any, t: Any, shape: Sequence[int]) -> Any:
    size = _infer(shape, t.numel())
    return t._like(t._view_buffers(size), size)


def _to_copy(func: Any, t: Any, **kwargs: Any) -> Any:
    dtype = kwargs.pop("dtype", None)
    if dtype is not None and dtype != t.dtype:
        return func(t._dequantize(dtype), dtype=dtype, **kwargs)
    device = kwargs.get("device") or t.device
    move = {k: v for k, v in kwargs.items() if k in ("device", "pin_memory", "non_blocking")}
    return t._like(t._mapped(lambda b: func(b, **move)), device=torch.device(device))


def _pin_memory(func: Any, t: Any, device: Any = None) -> Any:
    return t._like(t._mapped(lambda b: b.pin_memory()))


def _is_pinned(func: Any, t: Any, device: Any = None) -> bool:
    return all(b.is_pinned() for b in t._buffers().values() if b is not None)


def _record_stream(func: Any, t: Any, stream: Any) -> None:
    for b in t._buffers().values():
        if b is not None:
            b.record_stream(stream)


def _empty_like(func: Any, t: Any, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> Any:
    if dtype is not None and dtype != t.dtype:
        return torch.empty(t.shape, dtype=dtype, device=device or t.device)
    target = torch.device(device) if device is not None else t.device
    return t._like(t._mapped(lambda b: torch.empty_like(b, device=target)), device=target)


def _new_empty(func: Any, t: Any, size: Sequence[int], *, dtype: Any = None, device: Any = None, **kwargs: Any) -> Any:
    if dtype is not None and dtype != t.dtype:
        return torch.empty(size, dtype=dtype, device=device or t.device)
    if t._quantizer is None:
        raise RuntimeError(f"{type(t).__name__}: new_empty needs a quantizer; this tensor has none")
    quantizer = t._quantizer.copy()
    quantizer.internal = False
    quantizer.set_usage(**t.get_usages())
    return quantizer.make_empty(tuple(size), dtype=t.dtype, device=device or t.device)


def _new_zeros(func: Any, t: Any, size: Sequence[int], **kwargs: Any) -> Any:
    made = _new_empty(func, t, size, **kwargs)
    return made.zero_()


def _zero_(func: Any, t: Any) -> Any:
    t.quantize_(torch.zeros(t.shape, dtype=t.dtype, device=t.device))
    return t


def _same_or_dequantize(func: Any, t: Any, size: Sequence[int], *args: Any, **kwargs: Any) -> Any:
    if tuple(size) == tuple(t.shape):
        return t._like(t._buffers())
    return NotImplemented


def _slice(func: Any, t: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    n = t.shape[dim]
    whole = (start is None or start == 0) and (end is None or end >= n) and step == 1
    if whole:
        return t._like(t._buffers())
    return t._slice_rows(start or 0, min(n, end) if end is not None else n) if (
        dim % t.dim() == 0 and step == 1
    ) else NotImplemented  # fmt: skip


def _split(func: Any, t: Any, size: Any, dim: int = 0) -> Any:
    n = t.shape[dim]
    if isinstance(size, int):
        sizes = [min(size, n - i) for i in range(0, n, size)] or [0]
    else:
        sizes = list(size)
    if dim % t.dim() != 0:
        return NotImplemented
    out, start = [], 0
    for s in sizes:
        piece = t._slice_rows(start, start + s)
        if piece is NotImplemented:
            return NotImplemented
        out.append(piece)
        start += s
    return out


_HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _detach,
    aten.alias.default: _detach,
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
    aten.as_strided.default: _same_or_dequantize,
    aten.expand.default: _same_or_dequantize,
    aten.slice.Tensor: _slice,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
}


def _copy_(dst: Any, src: Any, non_blocking: bool = False) -> Any:
    """Buffer by buffer between equals; else requantize or dequantize."""
    if not isinstance(dst, QuantizedTensor):
        dtype = dst.dtype if dst.dtype.is_floating_point else torch.float32
        return dst.copy_(src._dequantize(dtype), non_blocking)
    if tuple(src.shape) != tuple(dst.shape):
        src = src.expand(dst.shape)
    same = (
        isinstance(src, type(dst)._storage_type())
        and type(src._quantizer) is type(dst._quantizer)
        and src.get_usages() == dst.get_usages()
        and src._plain_kwargs() == dst._plain_kwargs()
    )
    if same:
        dst.copy_from_storage(src)
    else:
        dst.quantize_(src)
    return dst


def _dequantized_call(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run `func` on dequantized arguments; what its schema says it writes is quantized again."""
    schema = func._schema
    names = [a.name for a in schema.arguments]
    written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    bound = {**dict(zip(names, args, strict=False)), **kwargs}
    plain = {name: _map(value, _plain_tensor) for name, value in bound.items()}
    out = func(*(plain[n] for n in names[: len(args)]), **{n: plain[n] for n in kwargs})
    if not written:
        return out
    results: dict[int, Any] = {}
    for name in written & set(bound):
        for original, value in zip(_flat(bound[name]), _flat(plain[name]), strict=True):
            if isinstance(original, QuantizedTensor):
                original.quantize_(value)
                results[id(value)] = original
    return _map(out, lambda t: results.get(id(t), t))


def _plain_tensor(value: Any) -> Any:
    return value._dequantize(value.dtype) if isinstance(value, QuantizedTensor) else value


def _map(value: Any, fn: Callable[[Any], Any]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_map(v, fn) for v in value)
    return fn(value)


def _flat(value: Any) -> list[Any]:
    return [x for v in value for x in _flat(v)] if isinstance(value, (list, tuple)) else [value]
