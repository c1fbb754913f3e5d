"""`QuantizedTensorStorage`: the buffers of a quantized tensor, from one declaration per class.

A concrete class declares its inner tensors (`_INNER`: attribute, constructor argument, part of
`layout.parts`), the order in which they are saved (`_SAVED`), its plain attributes (`_PLAIN`), and
in `_cast` how a copy is read. Construction, flattening, saving, cloning, moving, pickling, slicing,
gathering and usages all come from there; `Declared` has what groups of tensors share.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import dispatch
from ..formats import Cast, Operand, cdiv
from ..layout import flatten, parts
from ..quantizers import Quantizer, UsageError, adopt
from . import rows
from .declaration import Inner, Plain
from .declared import Declared
from .derive import derive
from .fsdp import GatheredStorage

__all__ = ["Inner", "Plain", "QuantizedTensorStorage"]


class QuantizedTensorStorage(GatheredStorage, Declared):
    """Buffers of a quantized tensor and what is needed to read them.

    Invariant: the tensor of logical `shape` and nominal `_dtype` is `dequantize(data, scale, amax)`
    of either copy that is present.
    """

    _POSITIONAL: ClassVar[tuple[str, ...]] = ()  # constructor arguments by position
    _PARTS: ClassVar[tuple[tuple[str, str], ...]] = ()  # (attribute, part), derived from _INNER

    _shape: tuple[int, ...]
    _with_gemm_swizzled_scales: bool = False
    # A flat (1-D) view keeps its buffers as they are: this is the shape they are laid out for.
    _unflat: tuple[int, ...] | None = None
    # Rows cut out of a larger tensor cannot take new values: see `_refuse_writes`.
    _is_cut: bool = False
    # A tensor of zeros may be cut once: True, then the rows that were handed out.
    _zero_rows: Any = None

    def __init_subclass__(cls, quantizers: Iterable[type[Quantizer]] = (), **kwargs: Any) -> None:
        """Bind the class to the quantizers whose results it holds."""
        super().__init_subclass__(**kwargs)
        cls._PARTS = tuple((i.attr, i.part) for i in cls._INNER)
        if "scale" in cls._ATTR:  # one scale serves both copies
            cls._ATTR |= dict.fromkeys(("row_scale", "col_scale"), cls._ATTR["scale"])
        for quantizer in quantizers:
            if cls._is_tensor:
                quantizer._tensor_class = cls
            else:
                quantizer._storage_class = cls

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if len(args) > len(self._POSITIONAL):
            raise TypeError(
                f"{type(self).__name__}: {len(args)} positional arguments; at most "
                f"{self._POSITIONAL}"
            )
        given = dict(zip(self._POSITIONAL, args, strict=False))
        twice = set(given) & set(kwargs)
        if twice:
            raise TypeError(f"{type(self).__name__}: {sorted(twice)[0]!r} was given twice")
        self._set_fields({**kwargs, **given})

    def _set_fields(self, kwargs: dict[str, Any], shape: Sequence[int] | None = None) -> None:
        """Set every declared attribute from constructor arguments."""
        self._take(kwargs)
        self._keep(adopt(kwargs.pop("quantizer", None)))
        self._dtype = kwargs.pop("fake_dtype", None) or torch.float32
        given = kwargs.pop("shape", None)
        if kwargs:
            raise TypeError(f"{type(self).__name__}: no argument named {sorted(kwargs)[0]!r}")
        if shape is None:
            self._shape = tuple(given) if given is not None else self._derived_shape()

    @property
    def amax_reduction_group(self) -> Any:
        """The process group over which a requantization reduces its amax, or None.

        Kept by name: a group can be neither copied, nor pickled, nor held by a graph.
        """
        return None if self._group_name is None else _resolve_group(self._group_name)

    @amax_reduction_group.setter
    def amax_reduction_group(self, group: Any) -> None:
        self._group_name = None if group is None else group.group_name

    # ------------------------------------------------------------------------------- reading
    def _cast(self, col: bool) -> Cast:
        """What one copy was cast with, as far as reading it needs to know."""
        raise NotImplementedError

    def _has(self, copy: str) -> bool:
        return self._part(f"{copy}_data") is not None

    def _derived_shape(self) -> tuple[int, ...]:
        """Logical shape as far as the buffers tell: an odd 4-bit row rounds up."""
        data, col = self._part("row_data"), self._part("col_data")
        oriented = data if data is not None else col
        if oriented is None:
            return ()
        fmt = self._cast(data is None).format
        shape = tuple(oriented.shape)
        if fmt.element is not None:
            shape = (*shape[:-1], fmt.element.per_byte * shape[-1])
        if data is None and fmt.col_transposed:
            shape = (*shape[1:], shape[0])
        return shape

    @property
    def _laid_out(self) -> tuple[int, ...]:
        """The shape that the buffers are laid out for: the logical one, but for a flat view."""
        return tuple(self.shape) if self._unflat is None else self._unflat

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return self.shape.numel()

    def operand(self, col: bool) -> Operand:
        """One copy as a GEMM reads it, contraction last."""
        prefix = "col_" if col else "row_"
        data = self._part(prefix + "data")
        if data is None and col and self._derivable("col"):
            derived = self._like({**self._mapped(_same), **self._derive("col")})
            return derived.operand(True)  # type: ignore[no-any-return]
        if data is None:
            raise UsageError(_missing(self, "col" if col else "row"))
        cast = self._cast(col)
        m, k = flatten(self._laid_out)
        c = cast.format.columns(m if col else k, cast.transforms)
        scale = self._part(prefix + "scale")
        amax = self._part(prefix + "amax")
        if col and not cast.format.col_transposed:
            if scale is not None:
                # Swizzled bytes are those of the contraction-last matrix already.
                swizzled = self._with_gemm_swizzled_scales
                scale = scale.reshape(scale.shape[::-1]) if swizzled else scale.t()
            return Operand(data.reshape(m, k).t(), scale, amax, cast, c, True)
        element = cast.format.element
        width = c if element is None else cdiv(c, element.per_byte)
        return Operand(data.reshape(k if col else m, width), scale, amax, cast, c)

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:
        """The high-precision tensor, from the rowwise copy if there is one."""
        return self._dequantize(self._dtype if dtype is None else dtype)

    def _dequantize(self, dtype: torch.dtype) -> Tensor:
        col = not self._has("row")
        if self._with_gemm_swizzled_scales:
            raise UsageError(
                f"{type(self).__name__}: GEMM-swizzled scales cannot be read back; quantize with "
                "optimize_for_gemm=False to dequantize"
            )
        prefix = "col_" if col else "row_"
        data = self._part(prefix + "data")
        if data is None:
            raise UsageError(f"{type(self).__name__} holds no data to dequantize")
        out = dispatch.dequantize(
            data,
            self._part(prefix + "scale"),
            self._part(prefix + "amax"),
            self._cast(col),
            self._laid_out,
            dtype,
            col=col,
        )
        return out if self._unflat is None else out.reshape(self.shape)

    # -------------------------------------------------------------------------------- usages
    def get_usages(self) -> dict[str, bool]:
        return {"rowwise": self._has("row"), "columnwise": self._has("col")}

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """Make or drop copies; a copy that cannot be made is a UsageError, and nothing changes."""
        wanted = {"row": rowwise_usage, "col": columnwise_usage}
        present = [copy for copy in wanted if self._has(copy)]
        if present and not any(wanted[c] or (wanted[c] is None and c in present) for c in wanted):
            raise UsageError(
                f"{type(self).__name__}: update_usage would drop every copy; use clear() to do that"
            )
        made: dict[str, Tensor] = {}
        for copy, want in wanted.items():
            if want and copy not in present:
                if not self._derivable(copy):
                    raise UsageError(_missing(self, copy))
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

    def _derivable(self, copy: str) -> bool:
        """Whether `update_usage` makes this copy: a column copy that has the row copy's codes."""
        return copy == "col" and self._has("row") and self._square("row")

    def _square(self, copy: str) -> bool:
        """Whether a copy's codes and scales are, transposed, those of the other copy."""
        return self._cast(copy == "col").format.square and not self._with_gemm_swizzled_scales

    def _derive(self, copy: str) -> dict[str, Tensor]:
        """Buffers of one copy of a square format, from the other one. Exact."""
        source = "row" if copy == "col" else "col"
        data, scale = self._part(f"{source}_data"), self._part(f"{source}_scale")
        assert data is not None and scale is not None
        cast, amax = self._cast(source == "col"), self._part(f"{source}_amax")
        made = derive(data, scale, amax, cast, self._laid_out, col=copy == "col")
        return {self._ATTR[part]: t for part, t in made.items()}

    def clear(self) -> None:
        """Free the data buffers; a scale shared by both copies stays."""
        for inner in self._INNER:
            if inner.usage != "both":
                setattr(self, inner.attr, None)

    # ------------------------------------------------------------------------------- writing
    def quantize_(self, tensor: Tensor, *, noop_flag: Tensor | None = None) -> Any:
        """Quantize `tensor` into this storage, unless `noop_flag` is 1.0."""
        if self._quantizer is None:
            raise RuntimeError(
                f"{type(self).__name__}: quantize_ needs a quantizer; this tensor has none"
            )
        source: Any = tensor
        if isinstance(source, Declared):
            source = source._dequantize(source._dtype)
        if self._unflat is None:
            self._quantizer.update_quantized(source, self, noop_flag=noop_flag)
        else:
            self._viewed(self._unflat).quantize_(source.reshape(self._unflat), noop_flag=noop_flag)
            self._written()
        return self

    def _write_values(self, values: Tensor) -> None:
        self.quantize_(values)

    def _write_buffers(self, made: dict[str, Tensor], noop_flag: Tensor | None) -> None:
        """Write new buffers over the present ones, in place: every alias sees them."""
        present = {a: t for a, t in self._buffers().items() if t is not None}
        if set(made) != set(present):
            raise UsageError(f"{type(self).__name__} has {sorted(present)}; got {sorted(made)}")
        self._refuse_writes()
        for attr, dst in present.items():
            src = made[attr].reshape(dst.shape)
            if noop_flag is not None:
                src = torch.where(noop_flag.reshape(()) == 1, dst, src)
            dst.copy_(src)

    def _refuse_writes(self) -> None:
        """Raise if new values here would leave the tensor that these rows were cut from wrong."""
        self._zero_rows = None
        if self._is_cut:
            raise UsageError(
                f"{type(self).__name__}: these rows were cut out of a larger tensor and share its "
                "scale, or have scales of their own that it does not see, or are a view without "
                "its column copy; write the whole tensor (index assignment does), or clone() the "
                "rows first; a distributed checkpoint that more ranks saved is read into plain "
                "tensors, and those are loaded"
            )

    def copy_from_storage(self, src: Any) -> None:
        """Copy the buffers present on both; class, shape and format must agree."""
        self._check_source(src)
        self._refuse_writes()
        for attr, dst in self._buffers().items():
            other = getattr(src, attr)
            if dst is not None and other is not None:
                dst.copy_(other.reshape(dst.shape))
        self._written()

    def _check_source(self, src: Any) -> None:
        """Raise unless `src` holds what these buffers can take as they are."""
        if not isinstance(src, type(self)._storage_type()):
            raise TypeError(f"src: got {type(src).__name__}; {type(self).__name__} is needed")
        if self._laid_out != src._laid_out:
            raise ValueError(
                f"src: got shape {tuple(src.shape)}; {tuple(self.shape)} is needed, laid out alike"
            )
        difference = self._difference(src)
        if difference:
            raise RuntimeError(f"src: {difference}")

    def _difference(self, other: Any) -> str:
        """In what way the buffers that both have are read differently; "" if in none."""
        for plain in self._PLAIN:
            mine, theirs = getattr(self, plain.attr), getattr(other, plain.attr)
            if mine != theirs:
                return f"got {plain.attr} {theirs!r}; this has {mine!r}"
        for copy in ("row", "col"):
            if self._has(copy) and other._has(copy):
                mine, theirs = self._cast(copy == "col"), other._cast(copy == "col")
                if mine != theirs:
                    return f"got a {copy} copy cast with {theirs!r}; this has {mine!r}"
        return ""

    @classmethod
    def _storage_type(cls) -> Any:
        """The bare storage class of this class."""
        for base in cls.__mro__:
            if issubclass(base, QuantizedTensorStorage) and not base._is_tensor:
                return base
        raise AssertionError(f"{cls.__name__} has no storage class")

    def update_quantizer(self, quantizer: Quantizer) -> None:
        """Replace the quantizer this tensor keeps."""
        if self._quantizer is None:
            raise RuntimeError(f"{type(self).__name__}: there is no quantizer to replace")
        warnings.warn(f"{type(self).__name__}: the quantizer is replaced", stacklevel=2)
        self._keep(adopt(quantizer))

    # ---------------------------------------------------------------------- views and copies
    def _view_payload(self, shape: Sequence[int]) -> dict[str, Any]:
        """Buffers of a view of `shape`: the last dim stays, or one scale serves the tensor."""
        shape, laid_out = tuple(shape), self._laid_out
        keeps_last = len(shape) > 0 and len(laid_out) > 0 and shape[-1] == laid_out[-1]
        row, col = self._has("row"), self._has("col")
        if not keeps_last and (self._tiled() or not row):
            if math.prod(shape) != self.numel():
                raise RuntimeError(f"shape '{list(shape)}' is invalid for size {self.numel()}")
            raise UsageError(
                f"{type(self).__name__}: a view of {tuple(self.shape)} as {shape} moves elements "
                "between blocks; keep the last dim, or dequantize() first"
            )
        casts = (self._cast(False) if row else None, self._cast(True) if col else None)
        shapes = {p.name: p.shape for p in parts(shape, casts[0], casts[1] if keeps_last else None)}
        return {i.attr: _reshaped(getattr(self, i.attr), shapes.get(i.part)) for i in self._INNER}

    def view(self, *shape: Any) -> Any:
        """The same buffers under another shape that keeps the last dim, or flat."""
        return self._viewed(_infer(_as_size(shape), self.numel()))

    def _viewed(self, size: tuple[int, ...]) -> Any:
        flat = len(size) == 1 and len(self._laid_out) > 1
        if flat and not self._viewable(size):
            made = self._flat(size)
        else:
            made = self._like(self._view_payload(size), size)
            if self._has("col") and not made._has("col"):
                # What is written to these rows has to reach the column copy, or is refused.
                made = self._flat(size) if flat else made
                made._is_cut = not flat
        made._is_cut = made._is_cut or self._is_cut
        return made

    def _flat(self, size: tuple[int, ...]) -> Any:
        made = self._like(self._mapped(_same), size)
        made._unflat = self._laid_out
        return made

    def _viewable(self, shape: Sequence[int]) -> bool:
        try:
            self._view_payload(shape)
        except UsageError:
            return False
        return True

    def _cut(self, start: int, end: int) -> Any:
        """Rows [start, end) of the first dim, or None where a block would be cut."""
        payload = None if self._unflat is not None else rows.cut(self, start, end)
        if payload is None:
            return None
        made = self._like(payload, (end - start, *self.shape[1:]))
        # Rows without a scale are independent. The rest of a tensor of zeros is zero under any
        # scale, so that one piece of it (the shard inside its padding) may change its scale.
        spare = not self._tiled() and (self._zero_rows is True or self._zero_rows == (start, end))
        if spare:
            self._zero_rows = (start, end)
        whole = start == 0 and end == self.shape[0]
        made._is_cut = self._is_cut or not (whole or spare or self._scaleless())
        return made

    def _casts(self) -> list[Cast]:
        """What the copies present were cast with."""
        return [self._cast(copy == "col") for copy in ("row", "col") if self._has(copy)]

    def _tiled(self) -> bool:
        return any(cast.format.tile is not None for cast in self._casts())

    def _scaleless(self) -> bool:
        return all(cast.format.element is None for cast in self._casts())

    def _mark_zeros(self) -> None:
        """Say that every value is zero, as `new_zeros` may."""
        self._zero_rows = True

    def _like(self, payload: dict[str, Any], shape: Sequence[int] | None = None) -> Any:
        """A storage of the same class around another payload."""
        kwargs = self.get_metadata()
        kwargs.update({kwarg: payload[attr] for attr, kwarg in self._PAYLOAD})
        made = self._storage_type()(**kwargs, shape=self._shape if shape is None else tuple(shape))
        return self._continued(made, shape)

    def _continued(self, made: Any, shape: Sequence[int] | None) -> Any:
        """Give a copy of this object what no constructor argument carries."""
        made._group_name = self._group_name
        made._unflat = self._unflat if shape is None else None
        return made

    def _aliased(self) -> Any:
        """A copy of the object on the same buffers."""
        made = self._like(self._mapped(_same))
        made._is_cut = self._is_cut
        return made

    # ------------------------------------------------------------------- flatten, unflatten
    def _context(self) -> dict[str, Any]:
        return {"unflat": self._unflat}

    @classmethod
    def _rebuilt(cls, kwargs: dict[str, Any], ctx: dict[str, Any], size: Any, stride: Any) -> Any:
        if ctx["is_tensor"]:
            make: Any = cls
            requires_grad = ctx["requires_grad"]
            made = make(
                size, kwargs["fake_dtype"], requires_grad=requires_grad, stride=stride, **kwargs
            )
        else:
            made = cls(**kwargs, shape=size)
        made._unflat = ctx.get("unflat")
        return made

    def __repr__(self) -> str:
        # No tensor is read: AOTAutograd prints tensors whose data is fake.
        copies = "+".join(k for k, v in self.get_usages().items() if v) or "no data"
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self._dtype}, {copies})"


def _missing(storage: QuantizedTensorStorage, copy: str) -> str:
    usage = {"row": "rowwise", "col": "columnwise"}[copy]
    return (
        f"{type(storage).__name__}: the {usage} copy is absent and cannot be made from what is "
        f"here; quantize the source again with {usage}=True"
    )


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _reshaped(tensor: Tensor | None, shape: tuple[int, ...] | None) -> Tensor | None:
    return None if tensor is None or shape is None else tensor.view(shape)


def _as_size(shape: Sequence[Any]) -> Any:
    """The size of `view(2, 3)` or `view((2, 3))`."""
    return shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape


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
    from torch.distributed import distributed_c10d

    return distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined,arg-type]
