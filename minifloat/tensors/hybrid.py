"""One quantized storage per direction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..formats import Operand
from ..quantizers import HybridQuantizer, UsageError
from ..quantizers.hybrid import COL, ROW
from .storage import QuantizedTensorStorage, _missing
from .tensor import QuantizedTensor

__all__ = ["HybridQuantizedTensor", "HybridQuantizedTensorStorage"]

_PREFIX = {"_rowwise_storage": ROW, "_columnwise_storage": COL}
_SUBS = (("_rowwise_storage", "rowwise_storage"), ("_columnwise_storage", "columnwise_storage"))


class HybridQuantizedTensorStorage(QuantizedTensorStorage, quantizers=(HybridQuantizer,)):
    """`_rowwise_storage` serves rows, `_columnwise_storage` columns; each has its own format.

    Its inner tensors are those of the two storages, under joined names: `_row_` or `_col_`, then the
    attribute. They are also constructor arguments, from which the storages are made.
    """

    _POSITIONAL = ("rowwise_storage", "columnwise_storage", "quantizer")

    _rowwise_storage: Any
    _columnwise_storage: Any

    def _set_fields(self, kwargs: dict[str, Any], shape: Sequence[int] | None = None) -> None:
        quantizer = kwargs.get("quantizer")
        if quantizer is not None and not hasattr(quantizer, "rowwise_quantizer"):
            raise TypeError(
                f"quantizer: got {type(quantizer).__name__}; a HybridQuantizer is needed"
            )
        for attr, kwarg in _SUBS:
            prefix = _PREFIX[attr]
            flat = {n[len(prefix) :]: kwargs.pop(n) for n in list(kwargs) if n.startswith(prefix)}
            flat = {n: t for n, t in flat.items() if t is not None}
            sub = kwargs.pop(kwarg, None)
            if flat:
                part = quantizer.rowwise_quantizer if prefix == ROW else quantizer.columnwise_quantizer
                size = shape if shape is not None else kwargs.get("shape")
                sub = part._assemble(size, kwargs.get("fake_dtype") or torch.float32, flat)
            setattr(self, attr, sub)
        super()._set_fields(kwargs, shape)

    @property
    def rowwise_sub_storage(self) -> Any:
        return self._rowwise_storage

    @property
    def columnwise_sub_storage(self) -> Any:
        return self._columnwise_storage

    def _subs(self) -> dict[str, Any]:
        return {attr: getattr(self, attr) for attr, _ in _SUBS}

    def _derived_shape(self) -> tuple[int, ...]:
        for sub in self._subs().values():
            if sub is not None:
                return tuple(sub.shape)
        return ()

    def _has(self, copy: str) -> bool:
        return self._subs()["_rowwise_storage" if copy == "row" else "_columnwise_storage"] is not None

    def _drop(self, copy: str) -> None:
        setattr(self, "_rowwise_storage" if copy == "row" else "_columnwise_storage", None)

    def _derive(self, copy: str) -> dict[str, Tensor]:
        raise UsageError(_missing(self, "columnwise" if copy == "col" else "rowwise"))

    def _buffers(self) -> dict[str, Tensor | None]:
        return {
            f"{_PREFIX[attr]}{name}": t
            for attr, sub in self._subs().items()
            if sub is not None
            for name, t in sub._buffers().items()
        }

    def operand(self, col: bool) -> Operand:
        sub = self._columnwise_storage if col else self._rowwise_storage
        if sub is None:
            raise UsageError(_missing(self, "columnwise" if col else "rowwise"))
        return sub.operand(col)  # type: ignore[no-any-return]

    def _dequantize(self, dtype: torch.dtype) -> Tensor:
        sub = self._rowwise_storage if self._rowwise_storage is not None else self._columnwise_storage
        if sub is None:
            raise UsageError(f"{type(self).__name__} holds no data to dequantize")
        return sub._dequantize(dtype)  # type: ignore[no-any-return]

    def prepare_for_saving(self) -> tuple[list[Tensor | None], Any]:
        tensors: list[Tensor | None] = []
        for sub in self._subs().values():
            if sub is not None:
                tensors.extend(sub.prepare_for_saving()[0])
        return tensors, self

    def restore_from_saved(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        rest = list(tensors)
        for sub in self._subs().values():
            if sub is not None:
                rest = sub.restore_from_saved(rest)
        return rest

    def get_data_tensors(self, rowwise_data: bool = True, columnwise_data: bool = True) -> Any:
        chosen = []
        for want, sub, copy in (
            (rowwise_data, self._rowwise_storage, "row_data"),
            (columnwise_data, self._columnwise_storage, "col_data"),
        ):
            if want:
                chosen.append(None if sub is None else sub._part(copy))
        return tuple(chosen) if len(chosen) != 1 else chosen[0]

    def get_metadata(self) -> dict[str, Any]:
        return {
            **{kwarg: getattr(self, attr) for attr, kwarg in _SUBS},
            "quantizer": self._quantizer,
            "fake_dtype": self._dtype,
        }

    def _write_buffers(self, made: dict[str, Any], noop_flag: Tensor | None) -> None:
        for attr, sub in self._subs().items():
            if sub is not None:
                prefix = _PREFIX[attr]
                src = {n[len(prefix) :]: t for n, t in made.items() if n.startswith(prefix)}
                sub._write_buffers(src, noop_flag)

    def copy_from_storage(self, src: Any) -> None:
        if not isinstance(src, HybridQuantizedTensorStorage):
            raise TypeError(f"src: got {type(src).__name__}; {type(self).__name__} is needed")
        for attr, sub in self._subs().items():
            other = getattr(src, attr)
            if sub is not None and other is not None:
                sub.copy_from_storage(other)

    def _plain_kwargs(self) -> dict[str, Any]:
        return {
            attr: None if sub is None else (type(sub), sub._plain_kwargs())
            for attr, sub in self._subs().items()
        }

    # Every rebuilding of the object goes through its two storages.
    def _mapped(self, fn: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        return self._each(lambda sub: sub._like(sub._mapped(fn)))

    def _view_buffers(self, shape: Sequence[int]) -> dict[str, Any]:
        return self._each(lambda sub: sub._like(sub._view_buffers(shape), shape))

    def _each(self, fn: Callable[[Any], Any]) -> dict[str, Any]:
        return {attr: None if sub is None else fn(sub) for attr, sub in self._subs().items()}

    def _like(self, buffers: dict[str, Any], shape: Sequence[int] | None = None, **kwargs: Any) -> Any:
        subs = buffers if set(buffers) <= {a for a, _ in _SUBS} else self._each(
            lambda sub: sub._like(sub._buffers())
        )  # fmt: skip
        made = {kwarg: subs.get(attr) for attr, kwarg in _SUBS}
        dtype = kwargs.pop("dtype", None) or self._dtype
        if isinstance(self, Tensor):
            device = kwargs.pop("device", None) or self.device
            out = type(self)(
                self.shape if shape is None else shape,
                dtype,
                device=device,
                quantizer=self._quantizer,
                **made,
                **kwargs,
            )
        else:
            size = self._shape if shape is None else tuple(shape)
            out = type(self)(**made, quantizer=self._quantizer, fake_dtype=dtype, shape=size)
        out.amax_reduction_group = self.amax_reduction_group
        return out

    def _slice_rows(self, start: int, end: int) -> Any:
        subs = self._each(lambda sub: sub._slice_rows(start, end))
        if any(s is NotImplemented for s in subs.values()):
            return NotImplemented
        return self._like(subs, (end - start, *self.shape[1:]))

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        names, ctx = super().__tensor_flatten__()
        ctx["nontensor_kwargs"] = {
            k: v for k, v in ctx["nontensor_kwargs"].items() if k in ("quantizer", "fake_dtype")
        }
        return names, ctx

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, Tensor],
        ctx: dict[str, Any],
        outer_size: Sequence[int] | None = None,
        outer_stride: Sequence[int] | None = None,
    ) -> Any:
        # The joined names are constructor arguments.
        ctx = {**ctx, "nontensor_kwargs": {**ctx["nontensor_kwargs"], **inner_tensors}}
        return QuantizedTensorStorage.__tensor_unflatten__({}, ctx, outer_size, outer_stride)

    def __getattr__(self, name: str) -> Any:
        """A joined name reads the attribute of its part."""
        for attr, prefix in _PREFIX.items():
            if name.startswith(prefix) and attr in self.__dict__:
                return getattr(self.__dict__[attr], name[len(prefix) :])
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")


class HybridQuantizedTensor(
    HybridQuantizedTensorStorage, QuantizedTensor, quantizers=(HybridQuantizer,)
):
    """A `torch.Tensor` held in one format per direction."""

    @classmethod
    def _device_of(cls, kwargs: dict[str, Any]) -> torch.device:
        for name, value in kwargs.items():
            given = name in dict(_SUBS).values() or name.startswith((ROW, COL))
            if given and value is not None:
                return value.device  # type: ignore[no-any-return]
        return super()._device_of(kwargs)
