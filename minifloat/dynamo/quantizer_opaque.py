"""Registration of quantizer classes as value-opaque, and their printing into FX graphs."""

from __future__ import annotations

import inspect
import math
import types
import typing
from enum import Enum, IntEnum
from typing import Any, TypeVar

import torch

from .. import opaque

__all__ = ["is_value_opaque_quantizer", "register_value_opaque_quantizer"]

T = TypeVar("T", bound=type)

_LITERALS = (bool, int, float, str)
_NAMED = (Enum, torch.dtype)  # held in a key by name or number, and restored by annotation
# What Dynamo may read or run for real while it traces, for every value quantizer. PyTorch reads
# each registered member when it first meets an object; reading `_traced` freezes the object.
_REAL = (
    "__eq__",
    "_casts",
    "_described",
    "_frozen",
    "_has_global_amax",
    "_holding",
    "_holds_group",
    "_is_frozen",
    "_is_value",
    "_kwarg_order",
    "_part_names",
    "_part_order",
    "_plain_kwargs",
    "_reduces",
    "_reduction_name",
    "_state_written",
    "_storage_class",
    "_swizzles",
    "_tensor_class",
    "_value_key",
    "_with_usages",
    "_without_reduction",
    "copy",
    "get_usages",
    "is_requantization_safe",
    "set_usage",
    "supports_only_rowwise_all_gather",
)
_INLINED = (
    "_assemble",
    "_check_class",
    "_check_destination",
    "_check_input",
    "_for_tensor",
    "_quantize_buffers",
    "_swizzle",
    "alloc_tensors",
    "create_metadata",
    "inner_tensor_specs",
    "is_quantizable",
    "make_empty",
    "multi_quantize",
    "quantize",
    "quantize_impl",
    "storage_metadata",
    "update_quantized",
)


def register_value_opaque_quantizer(cls: T) -> T:
    """Give a quantizer class value semantics, and tell PyTorch (where it has opaque objects).

    The value is the class and its annotated fields, base class first, unless the class overrides
    `_value_fields()`. A field must be annotated as a bool, int, float, str, enum or dtype (or an
    optional one); anything else is a TypeError that names it. A refused class stays as it was.
    """
    if not isinstance(cls, type) or not getattr(cls, "_is_quantizer_class", False):
        given = cls.__name__ if isinstance(cls, type) else repr(cls)
        raise TypeError(f"cls: got {given}; a subclass of Quantizer is needed")
    kinds = _field_kinds(cls)
    extra = vars(cls).get("_traced_members", ())
    opaque.register(cls, real=dict.fromkeys(("_traced", *kinds, *_REAL, *extra)), inlined=_INLINED)
    quantizer_class: Any = cls
    quantizer_class._value_field_names = tuple(kinds)
    quantizer_class._value_field_kinds = {n: k for n, k in kinds.items() if issubclass(k, _NAMED)}
    return cls


def is_value_opaque_quantizer(quantizer: object) -> bool:
    """Whether PyTorch will hold this quantizer in a graph as a constant."""
    cls = type(quantizer)
    if not getattr(cls, "_is_quantizer_class", False) or not opaque.is_registered(cls):
        return False
    # A class that was registered past us is a value by its own `__eq__`.
    return "_value_field_names" not in vars(cls) or quantizer._is_value()  # type: ignore[attr-defined]


def fx_repr(quantizer: Any) -> tuple[str, dict[str, Any]]:
    """Source that rebuilds the quantizer, and the classes and the function that it names."""
    _, items = quantizer._value_key()
    cls = type(quantizer)
    names: dict[str, Any] = {"_rebuild_quantizer": _rebuild_quantizer, cls.__name__: cls}
    printed = []
    for name, value in items:
        if hasattr(value, "__fx_repr__"):  # a quantizer inside a quantizer
            source, inner = value.__fx_repr__()
            for key, named in inner.items():
                if names.setdefault(key, named) is not named:
                    raise TypeError(
                        f"{cls.__name__}.{name}: two classes named {key!r} cannot be printed into "
                        "one graph; rename one"
                    )
        else:
            source = _source(value)
        printed.append(f"({name!r}, {source})")
    return f"_rebuild_quantizer({cls.__name__}, ({', '.join(printed)},))", names


def _source(value: object) -> str:
    finite = not isinstance(value, float) or math.isfinite(value)
    return repr(value) if finite else f"float('{value}')"


def plain(value: object) -> object:
    """A field as keys hold and source prints it: enums and dtypes by number or name."""
    if isinstance(value, IntEnum):
        return int(value)
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return float(value) if isinstance(value, float) else value


def _restored(value: Any, kind: type | None) -> Any:
    """The inverse of `plain` for a field of this kind; a value that is no plain form stays."""
    if kind is None or isinstance(value, (*_NAMED, type(None))):
        return value
    if issubclass(kind, torch.dtype):
        return getattr(torch, value)
    return kind(value) if issubclass(kind, IntEnum) else kind[value]  # type: ignore[index]


def _rebuild_quantizer(cls: Any, items: tuple[tuple[str, Any], ...]) -> Any:
    """The quantizer of class `cls` with these fields, made without `__init__`."""
    quantizer: Any = object.__new__(cls)
    kinds = getattr(cls, "_value_field_kinds", {})
    for name, value in items:
        quantizer.__dict__[name] = _restored(value, kinds.get(name))
    quantizer._rebuild_derived_state()
    return quantizer


def _field_kinds(cls: type) -> dict[str, type]:
    """{field: its class}, over the annotations of `cls` and its bases, base first."""
    kinds: dict[str, type] = {}
    for base in reversed(cls.__mro__):
        annotated = inspect.get_annotations(base)
        hints = typing.get_type_hints(base) if annotated else {}
        for name in annotated:
            hint = hints[name]
            if name.startswith("_") or typing.ClassVar in (hint, typing.get_origin(hint)):
                continue
            kind = _kind(hint)
            if kind is None:
                raise TypeError(
                    f"{cls.__name__}.{name}: a value field cannot be annotated {hint}; "
                    "allowed: bool, int, float, str, an Enum, torch.dtype, or such a type | None. "
                    "Keep live state out of the value (start the name with '_')"
                )
            kinds[name] = kind
    return kinds


def _kind(hint: Any) -> type | None:
    """The class of a field with this annotation, None where it cannot be part of a value."""
    if typing.get_origin(hint) is typing.Literal:
        return str
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        parts = [_kind(a) for a in typing.get_args(hint) if a is not type(None)]
        if len(parts) == 1:
            return parts[0]
        # Which of several enums a plain form stands for would be a guess.
        literal = all(p is not None and issubclass(p, _LITERALS) for p in parts)
        return str if literal and not any(issubclass(p, Enum) for p in parts if p) else None
    if not isinstance(hint, type):
        return None
    is_quantizer = bool(getattr(hint, "_is_quantizer_class", False))
    return hint if is_quantizer or issubclass(hint, (*_LITERALS, *_NAMED)) else None
