"""`QuantizedTensorStorage`: the buffers of a quantized tensor, from one declaration per class.

A concrete class declares its inner tensors (`_INNER`: attribute, constructor argument, part of
`layout.parts`), the order in which they are saved (`_SAVED`) and its plain attributes (`_PLAIN`).
Construction, flattening, saving, cloning, moving, pickling and usages all come from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .. import dispatch, reference
from ..formats import Cast, Operand
from ..layout import flatten, parts
from ..quantizers import Quantizer, UsageError, adopt

__all__ = ["Inner", "Plain", "QuantizedTensorStorage"]


class Inner(NamedTuple):
    """An inner tensor: its attribute, constructor argument and part of `layout.parts`."""

    attr: str
    kwarg: str
    part: str

    @property
    def usage(self) -> str:
        """The copy it belongs to: "row", "col", or "both"."""
        return self.part[:3] if self.part[:4] in ("row_", "col_") else "both"


class Plain(NamedTuple):
    """A plain attribute: its name, constructor argument and default (`...`: required)."""

    attr: str
    kwarg: str
    default: Any = ...


class QuantizedTensorStorage:
    """Buffers of a quantized tensor and what is needed to read them.

    Invariant: the tensor of logical `shape` and nominal `_dtype` is
    `dequantize(data, scale, amax)` of either copy that is present.
    """

    _INNER: ClassVar[tuple[Inner, ...]] = ()
    _PLAIN: ClassVar[tuple[Plain, ...]] = ()
    _SAVED: ClassVar[tuple[str, ...]] = ()
    _POSITIONAL: ClassVar[tuple[str, ...]] = ()  # constructor arguments by position
    _INNER_TENSORS: ClassVar[tuple[tuple[str, str], ...]] = ()
    _PARTS: ClassVar[tuple[tuple[str, str], ...]] = ()

    _dtype: torch.dtype
    _quantizer: Any
    _shape: tuple[int, ...]
    amax_reduction_group: Any = None

    def __init_subclass__(cls, quantizers: Iterable[type[Quantizer]] = (), **kwargs: Any) -> None:
        """Bind the class to the quantizers whose results it holds."""
        super().__init_subclass__(**kwargs)
        cls._INNER_TENSORS = tuple((i.attr, i.kwarg) for i in cls._INNER)
        cls._PARTS = tuple((i.attr, i.part) for i in cls._INNER)
        for quantizer in quantizers:
            if issubclass(cls, Tensor):
                quantizer._tensor_class = cls
            else:
                quantizer._storage_class = cls

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if len(args) > len(self._POSITIONAL):
            raise TypeError(
                f"{type(self).__name__}: {len(args)} positional arguments; at most "
                f"{self._POSITIONAL}"
            )
        kwargs.update(zip(self._POSITIONAL, args, strict=False))
        self._set_fields(kwargs)

    def _set_fields(self, kwargs: dict[str, Any], shape: Sequence[int] | None = None) -> None:
        """Set every declared attribute from constructor arguments."""
        for inner in self._INNER:
            setattr(self, inner.attr, kwargs.pop(inner.kwarg, None))
        for plain in self._PLAIN:
            value = kwargs.pop(plain.kwarg, plain.default)
            if value is ...:
                raise TypeError(f"{type(self).__name__}: the argument {plain.kwarg!r} is missing")
            setattr(self, plain.attr, value)
        quantizer = kwargs.pop("quantizer", None)
        self._quantizer = adopt(quantizer)
        self._dtype = kwargs.pop("fake_dtype", None) or torch.float32
        given = kwargs.pop("shape", None)
        if kwargs:
            raise TypeError(f"{type(self).__name__}: no argument named {sorted(kwargs)[0]!r}")
        if shape is None:
            shape = given if given is not None else self._derived_shape()
            self._shape = tuple(shape)

    # ------------------------------------------------------------------------------- reading
    def _cast(self, col: bool) -> Cast:
        """What one copy was cast with."""
        raise NotImplementedError

    def _part(self, name: str) -> Tensor | None:
        """The buffer that holds a part of `layout.parts`; tensor-wide `scale` serves both copies."""
        for inner in self._INNER:
            if inner.part == name or (inner.part == "scale" and name in ("row_scale", "col_scale")):
                return getattr(self, inner.attr)  # type: ignore[no-any-return]
        return None

    def _has(self, copy: str) -> bool:
        return self._part(f"{copy}_data") is not None

    def _derived_shape(self) -> tuple[int, ...]:
        """Logical shape as far as the buffers tell: an odd 4-bit row rounds up."""
        data, col = self._part("row_data"), self._part("col_data")
        if data is None and col is None:
            return ()
        oriented = data if data is not None else col
        assert oriented is not None
        cast = self._cast(data is None)
        element = cast.format.element
        shape = tuple(oriented.shape)
        if element is not None and element.per_byte == 2:
            shape = (*shape[:-1], 2 * shape[-1])
        if data is None and cast.format.col_transposed:
            shape = (*shape[1:], shape[0])
        return shape

    def _buffers(self) -> dict[str, Tensor | None]:
        return {attr: getattr(self, attr) for attr, _ in self._INNER_TENSORS}

    def _any_buffer(self) -> Tensor:
        for t in self._buffers().values():
            if t is not None:
                return t
        raise UsageError(f"{type(self).__name__} holds no data: it was cleared or saved")

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    @property
    def device(self) -> torch.device:
        return self._any_buffer().device

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return self.shape.numel()

    def operand(self, col: bool) -> Operand:
        """One copy as a GEMM reads it, contraction last."""
        data = self._part("col_data" if col else "row_data")
        if data is None:
            raise UsageError(_missing(self, "columnwise" if col else "rowwise"))
        cast = self._cast(col)
        m, k = flatten(self.shape)
        c = cast.format.columns(m if col else k, cast.transforms)
        scale = self._part("col_scale" if col else "row_scale")
        amax = self._part("col_amax" if col else "row_amax")
        if col and not cast.format.col_transposed:
            return Operand(data.reshape(m, k).t(), None if scale is None else scale.t(), amax, cast, c)
        return Operand(data.reshape(k if col else m, -1), scale, amax, cast, c)

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:
        """The high-precision tensor, from the rowwise copy if there is one."""
        return self._dequantize(self._dtype if dtype is None else dtype)

    def _dequantize(self, dtype: torch.dtype) -> Tensor:
        col = not self._has("row")
        if getattr(self, "_with_gemm_swizzled_scales", False):
            raise UsageError(
                f"{type(self).__name__}: GEMM-swizzled scales cannot be read back; quantize with "
                "optimize_for_gemm=False to dequantize"
            )
        prefix = "col_" if col else "row_"
        data = self._part(prefix + "data")
        if data is None:
            raise UsageError(f"{type(self).__name__} holds no data to dequantize")
        return dispatch.dequantize(
            data,
            self._part(prefix + "scale"),
            self._part(prefix + "amax"),
            self._cast(col),
            self.shape,
            dtype,
            col=col,
        )

    # -------------------------------------------------------------------------------- usages
    def get_usages(self) -> dict[str, bool]:
        return {"rowwise": self._has("row"), "columnwise": self._has("col")}

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """Make or drop copies; a copy that cannot be made is a UsageError, and nothing changes."""
        wanted = {"row": rowwise_usage, "col": columnwise_usage}
        keeps = [c for c in wanted if wanted[c] or (wanted[c] is None and self._has(c))]
        if not keeps and (self._has("row") or self._has("col")):
            raise UsageError(f"{type(self).__name__}: update_usage would drop every copy; use clear()")
        made: dict[str, Tensor] = {}
        for copy, want in wanted.items():
            if want and not self._has(copy):
                made.update(self._derive(copy))
        for attr, tensor in made.items():
            setattr(self, attr, tensor)
        for copy, want in wanted.items():
            if want is False:
                self._drop(copy)

    def _drop(self, copy: str) -> None:
        for inner in self._INNER:
            if inner.usage == copy:
                setattr(self, inner.attr, None)

    def _derive(self, copy: str) -> dict[str, Tensor]:
        """Buffers of a missing copy, from the other one, where its codes are the same."""
        source = "row" if copy == "col" else "col"
        name = "columnwise" if copy == "col" else "rowwise"
        data = self._part(f"{source}_data")
        cast = self._cast(source == "col")
        if data is None or not cast.format.square or copy == "row":
            raise UsageError(_missing(self, name))
        made = {f"{copy}_data": dispatch.transpose(data)}
        if cast.format.tile is not None:
            m, k = flatten(self.shape)
            scale = self._part("row_scale")
            assert scale is not None
            flipped, made["col_scale"] = reference.flip(data.reshape(m, -1), scale, cast, (m, k))
            (described,) = (p for p in parts(self.shape, None, cast) if p.name == "col_data")
            made["col_data"] = flipped.reshape(described.shape)
            amax = self._part("row_amax")
            if amax is not None:
                made["col_amax"] = amax.clone()
        return {i.attr: made[i.part] for i in self._INNER if i.part in made}

    # -------------------------------------------------------------------------------- saving
    def prepare_for_saving(self) -> tuple[list[Tensor | None], Any]:
        """(buffers in `_SAVED` order, self); the fields are emptied."""
        tensors = [getattr(self, attr) for attr in self._SAVED]
        for attr in self._SAVED:
            setattr(self, attr, None)
        return tensors, self

    def restore_from_saved(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Take back the buffers; returns what is left of `tensors`."""
        n = len(self._SAVED)
        if len(tensors) < n:
            raise ValueError(f"tensors: got {len(tensors)}; {type(self).__name__} saved {n}")
        for attr, tensor in zip(self._SAVED, tensors, strict=False):
            setattr(self, attr, tensor)
        return list(tensors[n:])

    def get_data_tensors(self, rowwise_data: bool = True, columnwise_data: bool = True) -> Any:
        """The data buffers asked for: both as a tuple, one as it is."""
        chosen = []
        if rowwise_data:
            chosen.append(self._part("row_data"))
        if columnwise_data:
            chosen.append(self._part("col_data"))
        return tuple(chosen) if len(chosen) != 1 else chosen[0]

    def get_metadata(self) -> dict[str, Any]:
        """Constructor arguments that rebuild this storage."""
        kwargs: dict[str, Any] = {kwarg: getattr(self, attr) for attr, kwarg in self._INNER_TENSORS}
        kwargs.update(self._plain_kwargs())
        kwargs["quantizer"] = self._quantizer
        kwargs["fake_dtype"] = self._dtype
        return kwargs

    def _plain_kwargs(self) -> dict[str, Any]:
        return {p.kwarg: getattr(self, p.attr) for p in self._PLAIN}

    def clear(self) -> None:
        """Free the data buffers; a scale shared by both copies stays."""
        for copy in ("row", "col"):
            self._drop(copy)

    # ------------------------------------------------------------------------------- writing
    def quantize_(self, tensor: Tensor, *, noop_flag: Tensor | None = None) -> Any:
        """Quantize `tensor` into this storage, unless `noop_flag` is 1.0."""
        if self._quantizer is None:
            raise RuntimeError(
                f"{type(self).__name__}: quantize_ needs a quantizer; this tensor was made without one"
            )
        if isinstance(tensor, QuantizedTensorStorage):
            tensor = tensor.dequantize()
        self._quantizer.update_quantized(tensor, self, noop_flag=noop_flag)
        return self

    def _write_buffers(self, made: dict[str, Tensor], noop_flag: Tensor | None) -> None:
        present = {a: t for a, t in self._buffers().items() if t is not None}
        if set(made) != set(present):
            raise UsageError(f"{type(self).__name__} has {sorted(present)}; got {sorted(made)}")
        for attr, dst in present.items():
            src = made[attr].reshape(dst.shape)
            dst.copy_(src if noop_flag is None else torch.where(noop_flag.reshape(()) == 1, dst, src))

    def copy_from_storage(self, src: Any) -> None:
        """Copy the buffers present on both; same class, same element."""
        if not isinstance(src, type(self)._storage_type()):
            raise TypeError(f"src: got {type(src).__name__}; {type(self).__name__} is needed")
        for p in self._PLAIN:
            if p.attr.endswith("_dtype") and getattr(self, p.attr) != getattr(src, p.attr):
                raise RuntimeError(
                    f"src: got {p.attr} {getattr(src, p.attr)!r}; this has {getattr(self, p.attr)!r}"
                )
        for attr, dst in self._buffers().items():
            other = getattr(src, attr)
            if dst is not None and other is not None:
                dst.copy_(other)

    @classmethod
    def _storage_type(cls) -> type:
        """The bare storage class of this class."""
        for base in cls.__mro__:
            if issubclass(base, QuantizedTensorStorage) and not issubclass(base, Tensor):
                return base
        return cls

    def update_quantizer(self, quantizer: Quantizer) -> None:
        """Replace the quantizer this tensor keeps."""
        if self._quantizer is None:
            raise RuntimeError(f"{type(self).__name__}: there is no quantizer to replace")
        import warnings

        warnings.warn(f"{type(self).__name__}: the quantizer is replaced", UserWarning, stacklevel=2)
        self._quantizer = adopt(quantizer)

    # ---------------------------------------------------------------------- views and copies
    def _view_buffers(self, shape: Sequence[int]) -> dict[str, Tensor | None]:
        """Buffers of a view of `shape`: the last dim stays, or one scale serves the tensor."""
        shape = tuple(shape)
        keeps_last = len(shape) > 0 and len(self.shape) > 0 and shape[-1] == self.shape[-1]
        row, col = self._has("row"), self._has("col")
        tiled = (row and self._cast(False).format.tile is not None) or (
            col and self._cast(True).format.tile is not None
        )
        if not keeps_last and (tiled or not row):
            raise UsageError(
                f"{type(self).__name__}: a view of {tuple(self.shape)} as {shape} moves elements "
                "between blocks; keep the last dim, or dequantize() first"
            )
        casts = (self._cast(False) if row else None, self._cast(True) if col and keeps_last else None)
        shapes = {p.name: p.shape for p in parts(shape, *casts)}
        return {
            i.attr: _reshaped(getattr(self, i.attr), shapes.get(i.part)) for i in self._INNER
        }

    def view(self, *shape: Any) -> Any:
        """The same buffers under another shape that keeps the last dim."""
        size = _infer(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape, self.numel())
        return self._like(self._view_buffers(size), size)

    def _like(self, buffers: dict[str, Tensor | None], shape: Sequence[int] | None = None) -> Any:
        """A storage of the same class on other buffers."""
        kwargs = self.get_metadata()
        kwargs.update({kwarg: buffers[attr] for attr, kwarg in self._INNER_TENSORS})
        shape = self._shape if shape is None else tuple(shape)
        made = self._storage_type()(**kwargs, shape=shape)
        made.amax_reduction_group = self.amax_reduction_group
        return made

    def _mapped(self, fn: Callable[[Tensor], Tensor]) -> dict[str, Tensor | None]:
        return {a: None if t is None else fn(t) for a, t in self._buffers().items()}

    # ------------------------------------------------------------------- flatten, unflatten
    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        """(names of the buffers present, what rebuilds the object around them)."""
        names = [attr for attr, t in self._buffers().items() if t is not None]
        is_tensor = isinstance(self, Tensor)
        return names, {
            "cls": type(self),
            "is_tensor": is_tensor,
            "requires_grad": self.requires_grad if is_tensor else False,
            "nontensor_kwargs": {
                **self._plain_kwargs(),
                "quantizer": _kept(self._quantizer),
                "fake_dtype": self._dtype,
            },
            "group_name": getattr(self.amax_reduction_group, "group_name", None),
        }

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, Tensor],
        ctx: dict[str, Any],
        outer_size: Sequence[int] | None = None,
        outer_stride: Sequence[int] | None = None,
    ) -> Any:
        cls = ctx["cls"]
        kwargs = dict(ctx["nontensor_kwargs"])
        if isinstance(kwargs["quantizer"], _Kept):
            kwargs["quantizer"] = kwargs["quantizer"].quantizer
        kwargs.update({kwarg: inner_tensors.get(attr) for attr, kwarg in cls._INNER_TENSORS})
        if ctx["is_tensor"]:
            made = cls(
                outer_size,
                kwargs["fake_dtype"],
                requires_grad=ctx["requires_grad"],
                stride=outer_stride,
                **kwargs,
            )
        else:
            made = cls(**kwargs, shape=outer_size)
        if ctx.get("group_name") is not None:
            made.amax_reduction_group = _resolve_group(ctx["group_name"])
        return made

    def __repr__(self) -> str:
        # No tensor is read: AOTAutograd prints tensors whose data is fake.
        copies = "+".join(k for k, v in self.get_usages().items() if v) or "no data"
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self._dtype}, {copies})"


class _Kept:
    """A quantizer that equals only itself, as tensor metadata: guards deep-copy metadata and compare
    the copy, so this wrapper is its own copy and compares by the quantizer it holds."""

    def __init__(self, quantizer: Any) -> None:
        self.quantizer = quantizer

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Kept) and self.quantizer is other.quantizer

    def __hash__(self) -> int:
        return id(self.quantizer)

    def __deepcopy__(self, memo: object) -> _Kept:
        return self


def _kept(quantizer: Any) -> Any:
    return quantizer if quantizer is None or quantizer._is_value() else _Kept(quantizer)


def _missing(storage: QuantizedTensorStorage, usage: str) -> str:
    return (
        f"{type(storage).__name__}: the {usage} copy is absent and cannot be made from the other one; "
        f"quantize the source again with {usage}=True"
    )


def _reshaped(tensor: Tensor | None, shape: tuple[int, ...] | None) -> Tensor | None:
    return None if tensor is None or shape is None else tensor.view(shape)


def _infer(shape: Sequence[int], numel: int) -> tuple[int, ...]:
    """`shape` with its -1 filled in."""
    shape = tuple(shape)
    if -1 not in shape:
        return shape
    known = 1
    for d in shape:
        known = known * d if d != -1 else known
    return tuple(numel // max(known, 1) if d == -1 else d for d in shape)


def _resolve_group(name: str) -> Any:
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(name)
