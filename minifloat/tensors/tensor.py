"""`QuantizedTensor`: a storage that is a real `torch.Tensor`.

It stores, prints, saves and moves; the library's own math reads its fields. An operator that knows
nothing of quantization sees the dequantized values; one that writes in place requantizes.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..quantizers import adopt
from .fsdp import GatheredTensor
from .operators import ANYWHERE, HANDLERS, dequantized_call
from .storage import QuantizedTensorStorage, _as_size, _infer
from .wrapper import Wrapper, contiguous_stride

__all__ = ["QuantizedTensor"]


class QuantizedTensor(Wrapper, GatheredTensor, QuantizedTensorStorage, Tensor):
    """Wrapper subclass: shape, nominal dtype and device are its own, the data is the storage's."""

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
        self: Any = Tensor._make_wrapper_subclass(
            cls,
            shape,
            strides=stride if stride is not None else contiguous_stride(shape),
            storage_offset=storage_offset,
            dtype=dtype,
            device=torch.device(device),
            requires_grad=requires_grad,
        )
        kwargs["fake_dtype"] = dtype
        self._set_fields(kwargs, shape)
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass  # __new__ has set the fields

    @classmethod
    def _device_of(cls, kwargs: dict[str, Any]) -> torch.device:
        for _, kwarg in cls._PAYLOAD:
            t = kwargs.get(kwarg)
            if t is not None:
                return t.device  # type: ignore[no-any-return]
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    # `torch.Tensor` has the truth about these; the storage's versions serve bare storages.
    shape = Tensor.shape
    size = Tensor.size  # type: ignore[assignment]
    device = Tensor.device
    dim = Tensor.dim
    numel = Tensor.numel
    __repr__ = QuantizedTensorStorage.__repr__  # type: ignore[assignment]

    # --------------------------------------------------------------------------- user methods
    def quantize_(self, tensor: Tensor, *, noop_flag: Tensor | None = None) -> Any:
        with torch.no_grad():
            return super().quantize_(tensor, noop_flag=noop_flag)

    def _updated(self, quantizer: Any, src: Any, noop_flag: Any, seed: Any) -> Any:
        """`quantizer.update_quantized` as a graph holds it."""
        return quantizer.update_quantized(src, self, noop_flag=noop_flag, seed=seed)

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
        source = tensor if shape is None else tensor._viewed(tuple(shape))
        made = source._like(source._mapped(lambda t: t), dtype=dtype, requires_grad=requires_grad)
        made._is_cut = source._is_cut
        return made

    def to_dtype(self, dtype: torch.dtype) -> Any:
        """The same buffers under another nominal dtype."""
        return type(self).make_like(self, dtype=dtype, requires_grad=self.requires_grad)

    def contiguous(self, *args: Any, **kwargs: Any) -> Any:
        return self if self.is_contiguous() else self.dequantize().contiguous()

    def view(self, *shape: Any) -> Any:
        """A view that stays quantized if it is flat or keeps the last dim; else, with a warning, a
        view of the dequantized values, which cannot be written."""
        size = _as_size(shape)
        if len(size) == 1 and isinstance(size[0], torch.dtype):
            return self._values().view(size[0])
        size = _infer(size, self.numel())
        if len(size) != 1 and not self._viewable(size):
            warnings.warn(
                f"{type(self).__name__}: a view as {size} moves elements between blocks and is "
                "taken of the dequantized values; dequantize() first to silence this",
                stacklevel=2,
            )
            return self._values().view(size)
        return Tensor.view(self, size)

    def _values(self) -> Tensor:
        """The values as a view of this tensor: differentiable, and read-only."""
        return self.unsqueeze(0).squeeze(0)

    def reshape(self, *shape: Any) -> Any:
        """A view that stays quantized, or a UsageError."""
        return Tensor.view(self, _infer(_as_size(shape), self.numel()))

    def __setitem__(self, index: Any, value: Any) -> None:
        """Requantizes the whole tensor: its scales may change."""
        # Through a view, PyTorch's way, the write would reach dequantized values that nobody keeps.
        plain = self._dequantize(self.dtype)
        plain[index] = value
        self.quantize_(plain)

    @property
    def data(self) -> Any:
        return self._aliased()

    @data.setter
    def data(self, value: Any) -> None:
        """Rebind to another tensor's buffers, or requantize plain data."""
        if tuple(value.shape) != tuple(self.shape):
            raise ValueError(f"data: got shape {tuple(value.shape)}; {tuple(self.shape)} is needed")
        if isinstance(value, type(self)._storage_type()):
            payload = value._mapped(lambda t: t)
            for attr, _ in self._PAYLOAD:
                setattr(self, attr, payload[attr])
            for plain in self._PLAIN:
                setattr(self, plain.attr, getattr(value, plain.attr))
            self._unflat = value._unflat
            if value._quantizer is not None:
                self._keep(adopt(value._quantizer))
        else:
            self.quantize_(value)

    # ----------------------------------------------------------------------- copies of itself
    def _like(
        self,
        payload: dict[str, Any],
        shape: Sequence[int] | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        requires_grad: bool = False,
    ) -> Any:
        kwargs = self.get_metadata()
        kwargs.update({kwarg: payload[attr] for attr, kwarg in self._PAYLOAD})
        nominal = kwargs.pop("fake_dtype")
        made = type(self)(
            self.shape if shape is None else shape,
            nominal if dtype is None else dtype,
            requires_grad=requires_grad,
            device=self.device if device is None else device,
            **kwargs,
        )
        return self._continued(made, shape)

    # ------------------------------------------------------------------------------- dispatch
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return cls._dispatched(func, args, kwargs or {})

    @classmethod
    def _operate(cls, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        handler = ANYWHERE.get(func)
        if handler is None and args and isinstance(args[0], QuantizedTensor):
            handler = HANDLERS.get(func)
        if handler is not None:
            out = handler(func, *args, **kwargs)
            if out is not NotImplemented:
                return out
        return dequantized_call(func, args, kwargs)
