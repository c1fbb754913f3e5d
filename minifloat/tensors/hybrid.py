"""One quantized storage per direction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..formats import Cast, Operand
from ..quantizers import HybridQuantizer, UsageError
from ..quantizers.hybrid import COL, ROW
from .kept import LIVE
from .storage import QuantizedTensorStorage, _missing
from .tensor import QuantizedTensor

__all__ = ["HybridQuantizedTensor", "HybridQuantizedTensorStorage"]

_SUB = {"row": "_rowwise_storage", "col": "_columnwise_storage"}
_PREFIX = {_SUB["row"]: ROW, _SUB["col"]: COL}
_PART = {_SUB["row"]: "rowwise_quantizer", _SUB["col"]: "columnwise_quantizer"}


class HybridQuantizedTensorStorage(QuantizedTensorStorage, quantizers=(HybridQuantizer,)):
    """`_rowwise_storage` serves rows, `_columnwise_storage` columns; each has its own format.

    Its inner tensors are those of the two storages, under joined names: `_row_` or `_col_`, then
    the attribute. They are also constructor arguments, from which the storages are made.
    """

    _POSITIONAL = ("rowwise_storage", "columnwise_storage", "quantizer")
    _PAYLOAD = (
        ("_rowwise_storage", "rowwise_storage"),
        ("_columnwise_storage", "columnwise_storage"),
    )

    _rowwise_storage: Any
    _columnwise_storage: Any

    def _set_fields(self, kwargs: dict[str, Any], shape: Sequence[int] | None = None) -> None:
        quantizer = kwargs.get("quantizer")
        if quantizer is not None and not hasattr(quantizer, "rowwise_quantizer"):
            raise TypeError(
                f"quantizer: got {type(quantizer).__name__}; a HybridQuantizer is needed"
            )
        # Inner tensors of a flat view are laid out for another shape than the tensor's.
        size = kwargs.pop("laid_out", None) or (shape if shape is not None else kwargs.get("shape"))
        for attr, kwarg in self._PAYLOAD:
            prefix = _PREFIX[attr]
            flat = {n[len(prefix) :]: kwargs.pop(n) for n in list(kwargs) if n.startswith(prefix)}
            flat = {n: t for n, t in flat.items() if t is not None}
            sub = kwargs.pop(kwarg, None)
            if flat:
                if quantizer is None:
                    raise TypeError(
                        "quantizer: its parts say how to read the inner tensors; got None"
                    )
                part = getattr(quantizer, _PART[attr])
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
        """The storages present, by attribute."""
        subs = {attr: getattr(self, attr) for attr in _PREFIX}
        return {attr: sub for attr, sub in subs.items() if sub is not None}

    def _each(self, fn: Callable[[Any], Any]) -> dict[str, Any]:
        """A payload: `fn` of each storage."""
        subs = self._subs()
        return {attr: fn(subs[attr]) if attr in subs else None for attr in _PREFIX}

    # ------------------------------------------------------------------------------- reading
    def _derived_shape(self) -> tuple[int, ...]:
        for sub in self._subs().values():
            return tuple(sub.shape)
        return ()

    def _has(self, copy: str) -> bool:
        sub = getattr(self, _SUB[copy])
        return sub is not None and (sub._has("row") or sub._has("col"))

    def _cast(self, col: bool) -> Cast:
        cast: Cast = getattr(self, _SUB["col" if col else "row"])._cast(col)
        return cast

    def _buffers(self) -> dict[str, Tensor | None]:
        return {
            f"{_PREFIX[attr]}{name}": t
            for attr, sub in self._subs().items()
            for name, t in sub._buffers().items()
        }

    def operand(self, col: bool) -> Operand:
        sub = getattr(self, _SUB["col" if col else "row"])
        if sub is None:
            raise UsageError(_missing(self, "col" if col else "row"))
        operand: Operand = sub.operand(col)
        return operand

    def _dequantize(self, dtype: torch.dtype) -> Tensor:
        for sub in self._subs().values():
            out: Tensor = sub._dequantize(dtype)
            return out.reshape(self.shape)
        raise UsageError(f"{type(self).__name__} holds no data to dequantize")

    # ---------------------------------------------------------------------- usages and saving
    def _drop(self, copy: str) -> None:
        setattr(self, _SUB[copy], None)

    def _derivable(self, copy: str) -> bool:
        return False

    def clear(self) -> None:
        for sub in self._subs().values():
            sub.clear()

    def prepare_for_saving(self) -> tuple[list[Tensor | None], Any]:
        tensors: list[Tensor | None] = []
        for sub in self._subs().values():
            tensors.extend(sub.prepare_for_saving()[0])
        return tensors, self

    def restore_from_saved(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        rest = list(tensors)
        for sub in self._subs().values():
            rest = sub.restore_from_saved(rest)
        return rest

    def get_data_tensors(self, rowwise_data: bool = True, columnwise_data: bool = True) -> Any:
        chosen = []
        for copy, want in (("row", rowwise_data), ("col", columnwise_data)):
            if want:
                sub = getattr(self, _SUB[copy])
                chosen.append(None if sub is None else sub.get_data_tensors(**_only(copy)))
        return tuple(chosen) if len(chosen) != 1 else chosen[0]

    # ------------------------------------------------------------------------------- writing
    def _write_buffers(self, made: dict[str, Any], noop_flag: Tensor | None) -> None:
        self._refuse_writes()
        for attr, sub in self._subs().items():
            prefix = _PREFIX[attr]
            new = {n[len(prefix) :]: t for n, t in made.items() if n.startswith(prefix)}
            sub._write_buffers(new, noop_flag)

    def _refuse_writes(self) -> None:
        for sub in self._subs().values():
            sub._refuse_writes()

    def copy_from_storage(self, src: Any) -> None:
        self._check_source(src)
        self._refuse_writes()
        for attr, sub in self._subs().items():
            if attr in src._subs():
                sub.copy_from_storage(src._subs()[attr])
        self._written()

    def _check_source(self, src: Any) -> None:
        super()._check_source(src)
        for attr, sub in self._subs().items():
            if attr in src._subs():
                sub._check_source(src._subs()[attr])

    def _difference(self, other: Any) -> str:
        for attr, sub in self._subs().items():
            theirs = other._subs().get(attr)
            if theirs is None:
                continue
            if type(theirs) is not type(sub):
                return f"got a {type(theirs).__name__}; this has a {type(sub).__name__}"
            difference: str = sub._difference(theirs)
            if difference:
                return difference
        return ""

    # ------------------------------------------------------------- copies, through the storages
    def _mapped(self, fn: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        return self._each(lambda sub: sub._like(sub._mapped(fn)))

    def _aliased(self) -> Any:
        return self._like(self._each(lambda sub: sub._aliased()))

    def _view_payload(self, shape: Sequence[int]) -> dict[str, Any]:
        for sub in self._subs().values():
            sub._view_payload(shape)  # raises where the view would have to stay flat
        return self._each(lambda sub: sub._viewed(tuple(shape)))

    def _cut(self, start: int, end: int) -> Any:
        if self._unflat is not None:
            return None
        subs = self._each(lambda sub: sub._cut(start, end))
        if any(subs[attr] is None for attr in self._subs()):
            return None
        return self._like(subs, (end - start, *self.shape[1:]))

    def _mark_zeros(self) -> None:
        for sub in self._subs().values():
            sub._mark_zeros()

    # ---------------------------------------------------------------------------------- FSDP2
    def fsdp_buffer_fields(self) -> tuple[str, ...]:
        return tuple(
            f"{_PREFIX[attr]}{name}"
            for attr, sub in self._subs().items()
            for name in sub.fsdp_buffer_fields()
        )

    def fsdp_extract_buffers(self) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        buffers: list[Tensor] = []
        metadata: dict[str, Any] = {}
        for attr, sub in self._subs().items():
            some, about = sub.fsdp_extract_buffers()
            metadata[attr] = (len(some), about)
            buffers.extend(some)
        return tuple(buffers), metadata

    def fsdp_assign_gathered(
        self, gathered: Sequence[Tensor], metadata: dict[str, Any]
    ) -> list[Tensor]:
        rest, owned = list(gathered), []
        for attr, (count, about) in metadata.items():
            owned += getattr(self, attr).fsdp_assign_gathered(rest[:count], about)
            rest = rest[count:]
        return owned

    def _check_shards(self, world: int, outer: Sequence[int]) -> None:
        for sub in self._subs().values():
            sub._check_shards(world, outer)

    def _amax_is_global(self) -> bool:
        return any(sub._amax_is_global() for sub in self._subs().values())

    def _shared_buffers(self) -> list[Tensor]:
        subs = [sub for sub in self._subs().values() if sub._amax_is_global()]
        return [t for sub in subs for t in sub._shared_buffers()]

    def _hollow_payload(self, shape: Sequence[int]) -> dict[str, Any]:
        return self._each(lambda sub: sub._like(sub._hollow_payload(shape), shape))

    # ------------------------------------------------------------------- flatten, unflatten
    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, Tensor],
        ctx: dict[str, Any],
        outer_size: Sequence[int] | None = None,
        outer_stride: Sequence[int] | None = None,
    ) -> Any:
        # The joined names are constructor arguments.
        named = {n: t for n, t in inner_tensors.items() if not n.startswith(LIVE)}
        kwargs = {**ctx["nontensor_kwargs"], **named, "laid_out": ctx.get("unflat")}
        ctx = {**ctx, "nontensor_kwargs": kwargs}
        unflatten = QuantizedTensorStorage.__tensor_unflatten__
        return unflatten(inner_tensors, ctx, outer_size, outer_stride)

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
            if name.startswith((ROW, COL)) and value is not None:
                return value.device  # type: ignore[no-any-return]
        return super()._device_of(kwargs)


def _only(copy: str) -> dict[str, bool]:
    return {"rowwise_data": copy == "row", "columnwise_data": copy == "col"}
