"""`GroupedTensorStorage`: members of one quantizer in flat buffers, back to back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import ragged
from ..formats import E4M3, HIGH, Cast
from ..inputs import check_noop
from ..quantizers import UsageError
from . import grouped_cast
from .declaration import Inner, Plain
from .declared import Declared
from .grouped_factories import CLASSES, Factories, fields
from .grouped_shapes import Shape, logical_shape, member_shapes, numel, on_host, outer_shape, starts

__all__ = ["GroupedTensorStorage"]


class GroupedTensorStorage(Factories, Declared):
    """`num_tensors` members; member i's part of `layout.parts` is a slice of that part's buffer.

    Invariant: `split_into_quantized_tensors()[i]` has the bits of `quantizer.quantize(member i)`.
    `logical_shape` is (sum of rows, columns), (rows, sum of columns) or, where both vary, (1, all).
    `first_dims` / `last_dims` are the members' rows / columns on the device, None where all agree.
    `tensor_shapes` are the members' shapes on the host, None while only the device knows them.
    `quantized_tensors`, where it is not None, holds the members that a factory has split already.
    """

    _INNER = (
        Inner("rowwise_data", "data", "row_data"),
        Inner("columnwise_data", "columnwise_data", "col_data"),
        Inner("scale_inv", "scale_inv", "row_scale"),
        Inner("_columnwise_scale_inv", "columnwise_scale_inv", "col_scale"),
        Inner("amax", "amax", "row_amax"),
        Inner("columnwise_amax", "columnwise_amax", "col_amax"),
        Inner("scale", "scale", "encode"),
        Inner("first_dims", "first_dims", "first_dims"),
        Inner("last_dims", "last_dims", "last_dims"),
        Inner("tensor_offsets", "tensor_offsets", "tensor_offsets"),
    )
    _PLAIN = (
        Plain("num_tensors", "num_tensors"),
        Plain("_with_gemm_swizzled_scales", "with_gemm_swizzled_scales", False),
        Plain("row_scaled_nvfp4", "row_scaled_nvfp4", False),
        Plain("nvfp4_use_4over6", "nvfp4_use_4over6", False),
        Plain("nvfp4_e4m3_max", "nvfp4_e4m3_max", int(E4M3.max)),
    )
    _SAVED = tuple(inner.attr for inner in _INNER)
    # What says where members lie; the rest is what they hold.
    _SIZES: ClassVar[tuple[str, ...]] = ("first_dims", "last_dims", "tensor_offsets")

    num_tensors: int
    rowwise_data: Tensor | None
    columnwise_data: Tensor | None
    scale_inv: Tensor | None
    amax: Tensor | None
    columnwise_amax: Tensor | None
    scale: Tensor | None
    first_dims: Tensor | None
    last_dims: Tensor | None
    tensor_offsets: Tensor | None
    logical_shape: Shape
    tensor_shapes: list[Shape] | None
    quantized_tensors: list[Any] | None
    row_scaled_nvfp4: bool
    nvfp4_use_4over6: bool
    nvfp4_e4m3_max: int
    _columnwise_scale_inv: Tensor | None
    _with_gemm_swizzled_scales: bool
    _shares_scale: bool

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, **kwargs: Any) -> None:
        """`shape` is the logical shape. The arguments are those of `GroupedTensor`; what makes a
        tensor of it (`requires_grad`, `stride`, `device`) means nothing here."""
        for name in ("requires_grad", "stride", "device"):
            kwargs.pop(name, None)
        self._set_group(shape, dtype, kwargs)

    def _set_group(self, shape: Sequence[int], dtype: torch.dtype, kwargs: dict[str, Any]) -> None:
        shapes = kwargs.pop("shapes", None)
        quantizer = kwargs.pop("quantizer", None)
        fake_dtype = kwargs.pop("fake_dtype", None)
        self.offsets = kwargs.pop("offsets", None)
        self.scale_inv_offsets = kwargs.pop("scale_inv_offsets", None)
        self.columnwise_scale_inv_offsets = kwargs.pop("columnwise_scale_inv_offsets", None)
        self._take(kwargs)
        if kwargs:
            raise TypeError(f"{type(self).__name__}: no argument named {sorted(kwargs)[0]!r}")
        if fake_dtype is not None and fake_dtype != dtype:
            raise ValueError(f"fake_dtype: got {fake_dtype}; it must equal dtype, {dtype}")
        self._keep(quantizer)  # the object itself: what `output=` is checked against
        self._dtype = dtype
        self.logical_shape = tuple(shape)
        varies = self.first_dims is not None, self.last_dims is not None
        self.tensor_shapes = member_shapes(self.logical_shape, self.num_tensors, shapes, varies)
        self.quantized_tensors = None
        if not self.nvfp4_use_4over6:
            self.nvfp4_e4m3_max = int(E4M3.max)
        # One scale for a member is one buffer, whichever copy reads it.
        self._shares_scale = quantizer is not None and grouped_cast.shares(quantizer)
        if self._shares_scale:
            if self.scale_inv is None:
                self.scale_inv = self._columnwise_scale_inv
            self._columnwise_scale_inv = None

    # -------------------------------------------------------------------------------- fields
    @property
    def columnwise_scale_inv(self) -> Tensor | None:
        return self.scale_inv if self._shares_scale else self._columnwise_scale_inv

    @property
    def quantizer(self) -> Any:
        return self._quantizer

    @property
    def fake_dtype(self) -> torch.dtype:
        return self._dtype

    def get_dtype(self) -> torch.dtype:
        return self._dtype

    def _part(self, name: str) -> Tensor | None:
        if name in ("scale", "row_scale") or (name == "col_scale" and self._shares_scale):
            return self.scale_inv
        return super()._part(name)

    @property
    def shape(self) -> torch.Size:
        """(n, M, N) or (n, L) where all members are equal, else the logical shape."""
        return torch.Size(self._outer_shape())

    def _outer_shape(self) -> Shape:
        shapes = self.tensor_shapes if self.all_same_shape() else None
        return outer_shape(self.logical_shape, self.num_tensors, shapes)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return self.shape.numel()

    def has_data(self) -> bool:
        return self.rowwise_data is not None

    def has_columnwise_data(self) -> bool:
        return self.columnwise_data is not None

    def get_usages(self) -> dict[str, bool]:
        return {"rowwise": self.has_data(), "columnwise": self.has_columnwise_data()}

    def all_same_first_dim(self) -> bool:
        return self.first_dims is None

    def all_same_last_dim(self) -> bool:
        return self.last_dims is None

    def all_same_shape(self) -> bool:
        return self.first_dims is None and self.last_dims is None

    def varying_both_dims(self) -> bool:
        return self.first_dims is not None and self.last_dims is not None

    def get_common_first_dim(self) -> int:
        if not self.all_same_first_dim():
            raise RuntimeError(f"{type(self).__name__}: the members' first dims differ")
        return self.logical_shape[0] // (self.num_tensors if self.all_same_last_dim() else 1)

    def get_common_last_dim(self) -> int:
        if not self.all_same_last_dim():
            raise RuntimeError(f"{type(self).__name__}: the members' last dims differ")
        return self.logical_shape[1]

    @staticmethod
    def make_tensor_offsets(split_dims: Tensor, common_dim: int) -> Tensor:
        """int64 `[n + 1]`: where members begin, in elements."""
        ends = torch.cumsum(split_dims.to(torch.int64) * common_dim, 0)
        return torch.nn.functional.pad(ends, (1, 0))

    def __repr__(self) -> str:
        # No tensor is read: AOTAutograd prints tensors whose data is fake.
        copies = "+".join(k for k, v in self.get_usages().items() if v) or "no data"
        held = "high precision" if self._quantizer is None else type(self._quantizer).__name__
        return (
            f"{type(self).__name__}(num_tensors={self.num_tensors}, shape={tuple(self.shape)}, "
            f"dtype={self._dtype}, {copies}, {held})"
        )

    def detach(self) -> Any:
        """`nn.Parameter` asks for this first: here it is told why it cannot have one."""
        raise _no_parameter(self)

    # ------------------------------------------------------------------------------- members
    def _known_shapes(self) -> list[Shape]:
        """The members' shapes, which the device is asked for if need be."""
        if self.tensor_shapes is None:
            rows, columns = self.logical_shape
            first = on_host(self.first_dims, self.num_tensors, rows)
            last = on_host(self.last_dims, self.num_tensors, columns)
            self.tensor_shapes = list(zip(first, last, strict=True))
        return self.tensor_shapes

    def _reader(self) -> Any:
        """The quantizer with the usages of the buffers that are there."""
        return self._quantizer._for_tensor(self)

    def _writer(self) -> Any:
        """`_reader`, checked to write what these buffers are read as: who made the group may have
        changed its quantizer since."""
        if not (self.has_data() or self.has_columnwise_data()):
            raise UsageError(f"{type(self).__name__} holds no data to write")
        stored = self._plain_kwargs()
        for name, value in fields(self._quantizer).items():
            if name != "quantizer" and value != stored[name]:
                raise ValueError(
                    f"quantizer: it writes {name} {value!r} since the group was made, which has "
                    f"{stored[name]!r}: make another group"
                )
        return self._reader()

    def _cast(self, col: bool) -> Cast:
        """What one copy of the members was cast with."""
        if self._quantizer is None:
            return HIGH
        row, other = self._quantizer._with_usages(True, True)._casts()
        return other if col else row  # type: ignore[no-any-return]

    def split_into_quantized_tensors(self) -> list[Any]:
        """The members, as views of the flat buffers: what is written there is written here.

        Plain tensors without a quantizer, bare storages of an `internal` one. Where only the device
        knows the sizes, this waits for it, and keeps what it learned.
        """
        shapes = self._known_shapes()
        if self.offsets is None:
            self.offsets = starts(numel(s) for s in shapes)
        if self._quantizer is None:
            data = self.rowwise_data if self.rowwise_data is not None else self.columnwise_data
            if data is None:
                raise UsageError(f"{type(self).__name__} holds no data to split")
            spans = zip(self.offsets, shapes, strict=False)
            return [data.narrow(0, at, numel(s)).view(s) for at, s in spans]
        quantizer = self._reader()
        members = []
        at = ragged.places(shapes, *quantizer._casts())
        if not self._shares_scale:
            self._note_scale_offsets(at)
        for shape, places in zip(shapes, at, strict=True):
            buffers = {
                attr: places[part].of(self._present(part))
                for attr, part in quantizer._part_order()
                if part in places
            }
            members.append(quantizer._assemble(shape, self._dtype, buffers))
        return members

    def _note_scale_offsets(self, at: list[dict[str, ragged.Place]]) -> None:
        for part, attr in (
            ("row_scale", "scale_inv_offsets"),
            ("col_scale", "columnwise_scale_inv_offsets"),
        ):
            if part in at[0] and getattr(self, attr) is None:
                setattr(self, attr, starts(p[part].numel for p in at))

    def _present(self, part: str) -> Tensor:
        buffer = self._part(part)
        if buffer is None:
            raise UsageError(
                f"{type(self).__name__}: the buffer of {part} is absent; it was cleared, or never "
                "given to the constructor"
            )
        return buffer

    def quantize(self, tensors: Sequence[Tensor], noop_flag: Tensor | None = None) -> list[Any]:
        """Quantize `tensors` into the members, in place; nothing happens where the flag is 1.0."""
        check_noop(noop_flag)
        shapes = self._known_shapes()
        if len(tensors) != self.num_tensors:
            raise ValueError(f"tensors: got {len(tensors)}; there are {self.num_tensors} members")
        for i, (t, shape) in enumerate(zip(tensors, shapes, strict=True)):
            if tuple(t.shape) != tuple(shape):
                raise ValueError(
                    f"tensors[{i}]: got shape {tuple(t.shape)}; the member has {tuple(shape)}"
                )
        with torch.no_grad():
            if self._quantizer is None:
                made = self._plain(torch.cat([t.reshape(-1).to(self._dtype) for t in tensors]))
            else:
                made = grouped_cast.of_members(self._writer(), tensors, noop_flag=noop_flag)
            self._write_parts(made, noop_flag)
            self._written()
        if self.quantized_tensors is None:
            self.quantized_tensors = self.split_into_quantized_tensors()
        return self.quantized_tensors

    # ------------------------------------------------------------------------------- writing
    def _write_parts(self, made: dict[str, Tensor], noop_flag: Tensor | None = None) -> None:
        """Write new parts over the present buffers, in place: every alias and member sees them."""
        for part, new in made.items():
            buffer = self._part(part)
            if buffer is None:
                continue
            # A buffer may have room for sizes that the members turned out not to have.
            room = min(buffer.shape[0], new.shape[0])
            old, new = buffer.narrow(0, 0, room), new.narrow(0, 0, room)
            if noop_flag is not None:
                new = torch.where(noop_flag.reshape(()) == 1, old, new)
            old.copy_(new)

    def _plain(self, data: Tensor) -> dict[str, Tensor]:
        """`data` as what each buffer of unquantized members is to hold; one at least is there."""
        held = [part for part in ("row_data", "col_data") if self._part(part) is not None]
        if not held:
            raise UsageError(f"{type(self).__name__} holds no data to write")
        return dict.fromkeys(held, data)

    def _check_writable(self, func: Any) -> None:
        if not self.all_same_shape():
            raise NotImplementedError(
                f"{func}: writes into a {type(self).__name__} whose members differ in shape; "
                "write the members, which split_into_quantized_tensors() gives"
            )

    def _write_values(self, values: Tensor) -> None:
        """Hold `values`, of the outer shape of equal members."""
        with torch.no_grad():
            if self._quantizer is None:
                made = self._plain(values.to(self._dtype).reshape(-1))
            else:
                matrix = values.to(self.device).reshape(self.logical_shape)
                made = grouped_cast.of_matrix(self._writer(), matrix, None, self.num_tensors)
            self._write_parts(made)
            self._written()

    # ------------------------------------------------------------------------------- reading
    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:
        """The high-precision values, in the outer shape."""
        return self._dequantize(self._dtype if dtype is None else dtype)

    def _dequantize(self, dtype: torch.dtype) -> Tensor:
        outer = self._outer_shape()
        if self._quantizer is None and self.all_same_last_dim():
            data = self.rowwise_data if self.rowwise_data is not None else self.columnwise_data
            if data is None:
                raise UsageError(f"{type(self).__name__} holds no data")
            return data.to(dtype, copy=True).reshape(outer)
        if self._with_gemm_swizzled_scales:
            raise UsageError(
                f"{type(self).__name__}: GEMM-swizzled scales cannot be read back; quantize with "
                "optimize_for_gemm=False to dequantize"
            )
        if not self.all_same_last_dim():
            return self._dequantized_members(dtype)
        col = not self.has_data()
        prefix = "col_" if col else "row_"
        buffers = (
            self._present(prefix + "data"),
            self._part(prefix + "scale"),
            self._part(prefix + "amax"),
        )
        cast = self._reader()._casts()[1 if col else 0]
        sizes, shape = self.first_dims, self.logical_shape
        return ragged.dequantize(
            buffers, sizes, self.num_tensors, cast, shape, dtype, col=col
        ).reshape(outer)

    def _plain_members(self, dtype: torch.dtype) -> list[Tensor]:
        members = self.split_into_quantized_tensors()
        if self._quantizer is None:
            return [m.to(dtype) for m in members]
        return [m.dequantize(dtype=dtype) for m in members]

    def _dequantized_members(self, dtype: torch.dtype) -> Tensor:
        """Members of several widths: side by side, or one after the other where both dims vary."""
        plain = self._plain_members(dtype)
        if self.varying_both_dims():
            return torch.cat([p.reshape(-1) for p in plain]).reshape(self.logical_shape)
        return torch.cat(plain, dim=1)

    def _dequantized_group(self, dtype: torch.dtype | None) -> Any:
        """A group of the same members, unquantized; they lie back to back."""
        dtype = self._dtype if dtype is None else dtype
        if self.all_same_last_dim():
            data = self._dequantize(dtype).view(-1)
        else:
            data = torch.cat([p.reshape(-1) for p in self._plain_members(dtype)])
        make: Any = type(self)
        return make(
            self.logical_shape,
            dtype,
            num_tensors=self.num_tensors,
            shapes=self.tensor_shapes,
            data=data,
            first_dims=self.first_dims,
            last_dims=self.last_dims,
            tensor_offsets=self.tensor_offsets,
        )

    # -------------------------------------------------------------------------------- copies
    def clear(self) -> None:
        """Free what the members hold, and the members; the sizes stay."""
        for inner in self._INNER:
            if inner.attr not in self._SIZES:
                setattr(self, inner.attr, None)
        self.quantized_tensors = None

    def prepare_for_saving(self) -> tuple[list[Tensor | None], Any]:
        self.quantized_tensors = None  # they would keep the buffers alive
        return super().prepare_for_saving()

    def copy(self) -> GroupedTensorStorage:
        """A bare storage on the same buffers."""
        return self._copied(GroupedTensorStorage, self._mapped(_same))  # type: ignore[no-any-return]

    def _copied(self, make: Any, payload: dict[str, Any], **kwargs: Any) -> Any:
        about = self.get_metadata()
        about.update({kwarg: payload[attr] for attr, kwarg in self._PAYLOAD})
        dtype = kwargs.pop("dtype", None) or about["fake_dtype"]
        about["fake_dtype"] = dtype
        about.update(
            shapes=self.tensor_shapes,
            offsets=self.offsets,
            scale_inv_offsets=self.scale_inv_offsets,
            columnwise_scale_inv_offsets=self.columnwise_scale_inv_offsets,
        )
        return make(self.logical_shape, dtype, **about, **kwargs)

    def _like(self, payload: dict[str, Any], **kwargs: Any) -> Any:
        return self._copied(type(self), payload, **kwargs)

    def _under(self, dtype: torch.dtype) -> dict[str, Any]:
        """The payload under another nominal dtype; without a quantizer, the values cast."""
        payload = self._mapped(_same)
        if self._quantizer is None:
            held = ("rowwise_data", "columnwise_data")
            payload |= {a: payload[a].to(dtype) for a in held if payload[a] is not None}
        return payload

    def _aliased(self) -> Any:
        """A new object on the same buffers."""
        made = self._like(self._mapped(_same))
        made.quantized_tensors = self.quantized_tensors
        return made

    def _difference(self, other: Any) -> str:
        """In what way `other` is laid out differently; "" if in none."""
        if not isinstance(other, GroupedTensorStorage):
            return f"got {type(other).__name__}"
        for name in ("num_tensors", "logical_shape", "_with_gemm_swizzled_scales"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"got {name} {theirs!r}; this has {mine!r}"
        mine, theirs = self._buffers(), other._buffers()
        if any(_shape(mine[a]) != _shape(theirs[a]) for a in mine):
            return "buffers are of other sizes, or others are present"
        # Sizes that only the device knows here are copied as they are there.
        shapes = self.tensor_shapes
        if shapes is not None and shapes != other._known_shapes():
            return f"got tensor_shapes {other.tensor_shapes!r}; this has {shapes!r}"
        if (self._quantizer is None) != (other._quantizer is None):
            return "one is quantized and one is not"
        if self._quantizer is None:
            return ""
        same = self._reader()._casts() == other._reader()._casts()
        return "" if same else f"got {other._quantizer!r}; this has {self._quantizer!r}"

    # ------------------------------------------------------------------- flatten, unflatten
    def _context(self) -> dict[str, Any]:
        """How members are shaped. Numbers only where they differ from member to member: equal
        members follow from the outer size, which a graph may leave open."""
        if self.tensor_shapes is None:
            return {"members": None}
        if self.all_same_shape():
            return {"members": len(self.tensor_shapes[0])}
        return {"members": tuple(tuple(s) for s in self.tensor_shapes)}

    @classmethod
    def _rebuilt(cls, kwargs: dict[str, Any], ctx: dict[str, Any], size: Any, stride: Any) -> Any:
        members, shapes = ctx["members"], None
        shape = tuple(size)
        if isinstance(members, int):
            shapes = [shape[1:]] * kwargs["num_tensors"]
            shape = logical_shape(shapes)
        elif members is not None:
            shapes = list(members)
        return cls(
            shape,
            kwargs["fake_dtype"],
            requires_grad=ctx["requires_grad"],
            stride=stride,
            shapes=shapes,
            **kwargs,
        )


def _no_parameter(value: object) -> RuntimeError:
    return RuntimeError(
        f"a {type(value).__name__} is no torch.Tensor and cannot be a parameter; a GroupedTensor "
        "can: make the group with a quantizer whose internal is False"
    )


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _shape(tensor: Tensor | None) -> torch.Size | None:
    return None if tensor is None else tensor.shape


CLASSES[True] = GroupedTensorStorage
