"""`Quantizer`: what turns a tensor into a quantized one.

A quantizer with value semantics is its class and the fields `_value_fields()` names: equal by
content, hashable, printed into FX graphs. A graph never sees a later change of a constant, so
tracing (or printing) a quantizer freezes it: setting a field then raises and names `copy()`.
"""

from __future__ import annotations

import abc
import copy
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._guards import TracingContext

from .. import collectives, dispatch, inputs, straight_through
from ..dynamo.quantizer_opaque import _rebuild_quantizer, fx_repr, plain
from ..dynamo.tensor_spec import Described, Specs, allocate, assemble, describe, metadata
from ..formats import Cast
from ..layout import part_names

__all__ = ["Quantizer", "UsageError", "adopt"]


def adopt(quantizer: Any) -> Any:
    """The quantizer for a tensor to keep: itself once it cannot change, else a copy."""
    return quantizer if quantizer is None or quantizer._is_frozen() else quantizer.copy()


class UsageError(ValueError, NotImplementedError):
    """A copy (rowwise or columnwise) was asked for that is not there and cannot be made.

    A ValueError and a RuntimeError (as NotImplementedError is) too: TE raises one or the other.
    """


class Quantizer(abc.ABC):
    """Base of all quantizers. A subclass says in `_casts` what each direction does.

    `rowwise_usage` / `columnwise_usage` choose the copies; `internal` returns a bare storage
    instead of a `torch.Tensor`; `optimize_for_gemm` allows layouts that only a GEMM can read.
    """

    rowwise_usage: bool
    columnwise_usage: bool
    internal: bool
    optimize_for_gemm: bool

    _is_quantizer_class: ClassVar[bool] = True
    _value_field_names: ClassVar[tuple[str, ...] | None] = None
    _value_field_kinds: ClassVar[dict[str, type]] = {}
    # The classes of the results; the module that defines them binds them here.
    _storage_class: ClassVar[Any] = None
    _tensor_class: ClassVar[Any] = None
    _recipe_class: ClassVar[Any] = None  # bound by `recipe`, too
    _frozen = False
    amax_reduction_group = None  # type: Any  # no annotation: it is never part of the value

    def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
        self.rowwise_usage = rowwise
        self.columnwise_usage = columnwise
        self.internal = False
        self.optimize_for_gemm = False

    # ------------------------------------------------------------------------------ identity
    def _value_fields(self) -> tuple[str, ...] | None:
        """Names of the fields that are this quantizer's value; None: it equals only itself."""
        return vars(type(self)).get("_value_field_names")

    def _is_value(self) -> bool:
        return self._value_fields() is not None

    def _value_key(self) -> tuple[str, tuple[tuple[str, Any], ...]]:
        """The value: (class name, ((field, value), ...)), enums and dtypes by number or name."""
        fields = self._value_fields()
        if fields is None:
            raise TypeError(f"{type(self).__name__} has no value: it equals only itself")
        self._refuse_process_groups()
        return type(self).__qualname__, tuple((f, plain(getattr(self, f))) for f in fields)

    def _refuse_process_groups(self) -> None:
        distributed = torch.distributed
        if not distributed.is_available():
            return
        for name, value in vars(self).items():
            if isinstance(value, distributed.ProcessGroup):
                raise TypeError(
                    f"{type(self).__name__}.{name} holds a live ProcessGroup, which no graph and "
                    "no cache can keep: pass the group beside the quantizer, or set it to None"
                )

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(self) is not type(other) or not self._is_value():
            return False
        return self._value_key() == other._value_key()

    def __hash__(self) -> int:
        return hash(self._value_key()) if self._is_value() else object.__hash__(self)

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        printed = fx_repr(self)
        self._freeze()
        return printed

    def _freeze(self) -> None:
        self.__dict__["_frozen"] = True

    def _is_frozen(self) -> bool:
        """`_frozen` for traced code, which would put a guard on the attribute."""
        return self._frozen

    @property
    def _traced(self) -> bool:
        """Read by PyTorch when it starts to trace this object: from here on it is a constant."""
        if self._is_value():
            self._refuse_process_groups()
            self._freeze()
        return True

    def __setattr__(self, name: str, value: object) -> None:
        if self._frozen and name in (self._value_fields() or ()):
            raise RuntimeError(
                f"{type(self).__name__}.{name} cannot change: a graph holds this quantizer as a "
                "constant and would not see it. Change a copy, outside the graph: q = q.copy()"
            )
        object.__setattr__(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and deepcopy: the fields, never a process group; the result is not frozen."""
        return _rebuild_quantizer, (type(self), tuple(self._state().items()))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # PyTorch 2.11 traces with a deep copy of a constant: a change of the copy would go unseen.
        if TracingContext.try_get() is not None and self._is_value() and self._traced:
            return self
        rebuild, args = self.__reduce__()
        return rebuild(*copy.deepcopy(args, memo))

    def _state(self) -> dict[str, Any]:
        dropped = ("_frozen", "amax_reduction_group")
        return {k: v for k, v in vars(self).items() if k not in dropped}

    def _rebuild_derived_state(self) -> None:  # noqa: B027  (a hook)
        """Called on an object that was made from its fields alone."""

    def __repr__(self) -> str:
        fields = self._value_fields() or tuple(self._state())
        return f"{type(self).__name__}({', '.join(f'{f}={getattr(self, f)!r}' for f in fields)})"

    # --------------------------------------------------------------------------------- usage
    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Choose the copies the next result has; a frozen quantizer raises and names `copy()`."""
        if rowwise is not None:
            self.rowwise_usage = rowwise
        if columnwise is not None:
            self.columnwise_usage = columnwise

    def get_usages(self) -> dict[str, bool]:
        return {"rowwise": self.rowwise_usage, "columnwise": self.columnwise_usage}

    def copy(self) -> Any:
        """A quantizer of the same fields that may be changed; live state and groups are shared."""
        other = object.__new__(type(self))
        other.__dict__.update(vars(self))
        other.__dict__.pop("_frozen", None)
        return other

    def _with_usages(self, rowwise: bool | None, columnwise: bool | None) -> Any:
        """A copy with these usages, in the one step that traced code can take."""
        other = self.copy()
        other.set_usage(rowwise=rowwise, columnwise=columnwise)
        return other

    # ------------------------------------------------------------------------------ quantize
    def _casts(self) -> tuple[Cast | None, Cast | None]:
        """(row, column) casts of the copies in use."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it casts to (_casts)")

    def quantize(
        self,
        tensor: Tensor,
        *,
        out: Any = None,
        dtype: torch.dtype | None = None,
        seed: Tensor | None = None,
    ) -> Any:
        """`tensor` quantized, into `out` if given; differentiable, the gradient passing unchanged.

        `dtype` is the nominal dtype of the result (default: the input's). `seed`, an int64 tensor
        `[seed, offset]`, fixes stochastic rounding; the default is drawn from PyTorch's generator.
        """
        if out is not None:
            return self.update_quantized(tensor, out, seed=seed)
        inputs.check_nominal(dtype)
        if not (torch.is_grad_enabled() and getattr(tensor, "requires_grad", False)):
            return straight_through.run(self, tensor, dtype, seed)
        if self.internal:  # a bare storage is outside autograd
            with torch.no_grad():
                return straight_through.run(self, tensor, dtype, seed)
        return straight_through.quantize(tensor, self, dtype, seed)

    def __call__(self, tensor: Tensor, **kwargs: Any) -> Any:
        return self.quantize(tensor, **kwargs)

    def quantize_impl(
        self, tensor: Tensor, *, dtype: torch.dtype | None = None, seed: Tensor | None = None
    ) -> Any:
        """The work of `quantize`, outside autograd."""
        buffers = self._quantize_buffers(tensor, seed)
        # The result was reduced over the group; what is quantized into it later need not be.
        kept = self._without_reduction() if self._reduces() else self
        return assemble(kept, tensor.shape, tensor.dtype if dtype is None else dtype, buffers)

    def _quantize_buffers(
        self, tensor: Tensor, seed: Tensor | None = None, group: Any = None
    ) -> dict[str, Tensor]:
        """Inner tensors of the result, by attribute; amaxes are reduced over `group`."""
        row, col = self._casts()
        if seed is None and ((row and row.stochastic) or (col and col.stochastic)):
            self._check_input(tensor)  # before the generator moves
            seed = inputs.draw_seed(tensor.device)
        group_name = self._reduction_name() if group is None else group.group_name
        row_amax = col_amax = None
        if group_name is not None and self._has_global_amax():
            amaxes = [
                collectives.all_reduce(a, group_name, "max")
                for a in dispatch.amax(tensor, row, col)
            ]
            row_amax, col_amax = (amaxes[0] if row or len(amaxes) == 1 else None), amaxes[-1]
        made = dispatch.quantize(tensor, row, col, row_amax=row_amax, col_amax=col_amax, seed=seed)
        by_part = dict(zip(self._part_names(), made, strict=True))
        if self.optimize_for_gemm:
            self._swizzle(by_part)
        return {attr: by_part[part] for attr, part in self._part_order() if part in by_part}

    def _check_input(self, tensor: Tensor) -> None:
        """Raise for what this quantizer cannot hold, before anything is written."""
        dispatch.check_input(tensor, *self._casts())

    def _part_names(self) -> tuple[str, ...]:
        """Names of what `dispatch.quantize` returns for the copies in use."""
        return part_names(*self._casts())

    def _swizzle(self, by_part: dict[str, Tensor]) -> None:
        """Put the scales into the layout GEMMs read, where the format has one."""
        row, col = self._swizzles()
        if row:
            by_part["row_scale"] = dispatch.swizzle(by_part["row_scale"])
        if col:
            scale = by_part["col_scale"]
            oriented = scale if col == "transposed" else scale.t()
            by_part["col_scale"] = dispatch.swizzle(oriented).reshape(scale.shape)

    def _swizzles(self) -> tuple[str, str]:
        """How each copy's scale is stored if GEMMs read it swizzled: "transposed" or "source"."""
        row, col = self._casts()
        return (
            "transposed" if row is not None and row.format.swizzles else "",
            ""
            if col is None or not col.format.swizzles
            else ("transposed" if col.format.col_transposed else "source"),
        )

    def _part_order(self) -> tuple[tuple[str, str], ...]:
        """(attribute, part of `layout.parts`) of the storage's inner tensors, in its order."""
        return self._storage_class._PARTS  # type: ignore[no-any-return]

    def _kwarg_order(self) -> tuple[tuple[str, str], ...]:
        """(attribute, constructor argument) of the storage's inner tensors, in its order."""
        return self._storage_class._INNER_TENSORS  # type: ignore[no-any-return]

    def _has_global_amax(self) -> bool:
        """Whether a scale depends on an amax of the whole tensor, which a group can share."""
        return any(
            cast is not None and not cast.row_scaled and (cast.format.two_level or not cast.tiled)
            for cast in self._casts()
        )

    def _reduces(self) -> bool:
        """Whether amaxes are reduced over a process group."""
        return bool(getattr(self, "with_amax_reduction", False))

    def _holds_group(self) -> bool:
        return self.amax_reduction_group is not None

    def _reduction_name(self) -> str | None:
        """Name of the group over which amaxes are reduced, or None: graphs hold names."""
        if not self._reduces():
            return None
        group = self.amax_reduction_group
        if group is None and torch.distributed.is_initialized():
            group = torch.distributed.group.WORLD
        return None if group is None else str(group.group_name)

    def _without_reduction(self) -> Any:
        """A copy that reduces nothing and holds no group."""
        other = self.copy()
        other.with_amax_reduction = False
        other.amax_reduction_group = None
        return other

    def multi_quantize(self, tensors: Sequence[Tensor]) -> list[Any]:
        return [self.quantize(t) for t in tensors]

    def update_quantized(
        self,
        src: Tensor,
        dst: Any,
        *,
        noop_flag: Tensor | None = None,
        seed: Tensor | None = None,
    ) -> Any:
        """Quantize `src` into the buffers of `dst`; nothing happens where `noop_flag` is 1.0.

        The copies `dst` has are the copies that are written.
        """
        if torch.compiler.is_dynamo_compiling() and isinstance(dst, Tensor):
            # Dynamo traces what a method of a tensor returns, and reads no field of a new one.
            return dst._updated(self, src, noop_flag, seed)  # type: ignore[attr-defined]
        self._check_destination(dst)
        inputs.check_noop(noop_flag)
        if not isinstance(src, Tensor):
            raise TypeError(f"src: got {type(src).__name__}; a torch.Tensor is needed")
        if tuple(src.shape) != tuple(dst.shape):
            raise ValueError(
                f"src: got shape {tuple(src.shape)}; dst has {tuple(dst.shape)}: they must agree"
            )
        with torch.no_grad():
            src = src.to(dst.device)
            quantizer = self._for_tensor(dst)
            state = [(t, t.clone()) for t in self._state_written()] if noop_flag is not None else []
            made = quantizer._quantize_buffers(
                src, seed, getattr(dst, "amax_reduction_group", None)
            )
            dst._write_buffers(made, noop_flag)
            dst._written()
            for live, before in state:
                live.copy_(torch.where(noop_flag.reshape(()) == 1, before, live))  # type: ignore[union-attr]
        return dst

    def _check_class(self, dst: Any) -> None:
        storage_class, tensor_class = self._storage_class, self._tensor_class
        if storage_class is None:
            raise NotImplementedError(f"{type(self).__name__} has no tensor class to update")
        if not isinstance(dst, storage_class):
            raise ValueError(
                f"dst: got {type(dst).__name__}; {type(self).__name__} updates "
                f"{storage_class.__name__} or {tensor_class.__name__}"
            )

    def _check_destination(self, dst: Any) -> None:
        """Raise unless `dst` is stored the way this quantizer writes."""
        self._check_class(dst)
        stored = dst._plain_kwargs()
        for name, value in self._plain_kwargs().items():
            if stored[name] != value:
                raise ValueError(
                    f"dst: its {name} is {stored[name]!r}; this {type(self).__name__} writes "
                    f"{value!r}"
                )
        _, col = self._casts()
        if col is not None and col.hadamard != dst._cast(True).hadamard:
            raise ValueError(
                "dst: its columnwise copy is Hadamard-transformed in another way than this "
                f"{type(self).__name__} transforms"
            )

    def _state_written(self) -> Sequence[Tensor]:
        """Live tensors that quantizing writes; only delayed scaling has any."""
        return ()

    def _meet(self, group_name: str) -> None:  # noqa: B027  (nothing that could differ)
        """Have the live tensors of the quantizers of a tensor's other shards."""

    def _for_tensor(self, tensor: Any) -> Any:
        """This quantizer with the usages that `tensor` has."""
        usages = tensor.get_usages()
        if usages == self.get_usages():
            return self
        return self._with_usages(usages["rowwise"], usages["columnwise"])

    def calibrate(self, tensor: Tensor) -> None:  # noqa: B027  (nothing to record)
        """Record statistics of `tensor`; only delayed scaling has any."""

    # -------------------------------------------------------------------- description, allocation
    def _described(self) -> tuple[Described, ...]:
        """What each storage of a result is made of."""
        return (("", *self._casts(), self._part_order()),)

    def _holding(self, dtype: torch.dtype) -> Any:
        """A quantizer that describes what this one makes of a tensor of `dtype`."""
        return self

    def inner_tensor_specs(self, shape: Sequence[int]) -> Specs:
        """Ordered {attribute: (shape, dtype)} of the inner tensors of a result."""
        return describe(self, shape)

    def storage_metadata(self, fake_dtype: torch.dtype) -> dict[str, Any]:
        """{"cls", "nontensor_kwargs"}: the storage class and its arguments that are not tensors."""
        if self._storage_class is None:
            raise NotImplementedError(f"{type(self).__name__} has no storage class to describe")
        kwargs = metadata(self, adopt(self), fake_dtype, False)["nontensor_kwargs"]
        return {"cls": self._storage_class, "nontensor_kwargs": kwargs}

    def _plain_kwargs(self) -> dict[str, Any]:
        """Constructor arguments of the storage that are neither tensors nor common to all."""
        return {}

    def alloc_tensors(
        self, shape: Sequence[int], *, device: torch.device | str | None = None
    ) -> list[Tensor]:
        """Uninitialised inner tensors, in the order of `inner_tensor_specs`."""
        return allocate(self.inner_tensor_specs(shape), device)

    def create_metadata(
        self, shape: Sequence[int], *, dtype: torch.dtype, requires_grad: bool = False
    ) -> dict[str, Any]:
        """What rebuilds a result from its inner tensors, a part of what flattening one gives."""
        self.storage_metadata(dtype)  # raises for a quantizer without classes
        return metadata(self, adopt(self), dtype, requires_grad)

    def make_empty(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> Any:
        """An uninitialised result that honours the usages."""
        inputs.check_nominal(dtype)
        described = self._holding(dtype)
        if torch.compiler.is_compiling():  # it may have been made while tracing: see `describe`
            specs = describe(described, shape)
            inner = allocate(specs, device)
        else:
            specs = described.inner_tensor_specs(shape)
            inner = described.alloc_tensors(shape, device=device)
        if pin_memory:
            inner = [t.pin_memory() for t in inner]
        buffers = dict(zip(specs, inner, strict=True))
        if not self._holds_group():
            return assemble(self, shape, dtype, buffers, requires_grad)
        quantizer = self.copy()
        quantizer.amax_reduction_group = None  # the tensor holds it, beside the value
        made = assemble(quantizer, shape, dtype, buffers, requires_grad)
        made.amax_reduction_group = self.amax_reduction_group
        return made

    def _assemble(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        buffers: dict[str, Tensor],
        requires_grad: bool = False,
    ) -> Any:
        """The result made of these inner tensors (by attribute)."""
        return assemble(self, shape, dtype, buffers, requires_grad)

    # ------------------------------------------------------------------------------- answers
    def supports_only_rowwise_all_gather(self) -> bool:
        """Whether a gather moves the rowwise copy only and derives the other."""
        return False

    def is_requantization_safe(self) -> bool:
        """Whether quantizing a dequantized result again changes nothing that matters."""
        return False

    def is_quantizable(self, inp: Tensor) -> bool:
        """Whether the format holds `inp`: any floating tensor with at least one dim."""
        return inp.dtype in dispatch.INPUT_DTYPES and inp.dim() > 0

    def _get_compatible_recipe(self) -> Any:
        """The recipe class this quantizer belongs to; None for a class of the user's own."""
        return self._recipe_class
