"""Registration of quantizer classes as value-opaque, and their printing into FX graphs."""

from __future__ import annotations

import types
import typing
from enum import Enum
from typing import Any, TypeVar

import torch

from .. import opaque

__all__ = ["is_value_opaque_quantizer", "register_value_opaque_quantizer"]

T = TypeVar("T", bound=type)

_SCALARS = (bool, int, float, str, Enum, torch.dtype)
# What Dynamo may read or run for real while it traces, for every value quantizer. Reading `_traced`,
# which PyTorch does for each registered member when it first meets an object, freezes the object.
_REAL = (
    "__eq__",
    "_casts",
    "_frozen",
    "_is_value",
    "_kwarg_order",
    "_part_names",
    "_part_order",
    "_plain_kwargs",
    "_reduction_group",
    "_storage_class",
    "_swizzles",
    "_tensor_class",
    "_value_key",
    "copy",
    "get_usages",
    "is_requantization_safe",
    "set_usage",
    "supports_only_rowwise_all_gather",
)
_INLINED = (
    "_assemble",
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
    """Give a quantizer class value semantics, and tell PyTorch (a no-op where it has no such thing).

    The value is the class and its annotated fields, base class first, unless the class overrides
    `_value_fields()`. A field must be annotated as a bool, int, float, str, enum or dtype (or an
    optional one); anything else is a TypeError that names it.
    """
    names = _annotated_fields(cls)
    cls._value_field_names = names
    extra = vars(cls).get("_traced_members", ())
    opaque.register(cls, real=dict.fromkeys(("_traced", *names, *_REAL, *extra)), inlined=_INLINED)
    return cls


def is_value_opaque_quantizer(quantizer: object) -> bool:
    """Whether PyTorch will hold this quantizer in a graph as a constant."""
    return opaque.is_registered(type(quantizer)) and quantizer._is_value()  # type: ignore[attr-defined,no-any-return]


def fx_repr(quantizer: Any) -> tuple[str, dict[str, Any]]:
    """Source that rebuilds the quantizer, and the class and function that it names."""
    _, items = quantizer._value_key()
    names: dict[str, Any] = {
        "_rebuild_quantizer": _rebuild_quantizer,
        type(quantizer).__name__: type(quantizer),
    }
    printed = []
    for name, value in items:
        if hasattr(value, "__fx_repr__"):  # a quantizer inside a quantizer
            source, inner = value.__fx_repr__()
            names.update(inner)
        else:
            source = repr(value)
        printed.append(f"({name!r}, {source})")
    return f"_rebuild_quantizer({type(quantizer).__name__}, ({', '.join(printed)},))", names


def _rebuild_quantizer(cls: type, items: tuple[tuple[str, Any], ...]) -> Any:
    """The quantizer of class `cls` with these fields, made without `__init__`."""
    quantizer = object.__new__(cls)
    for name, value in items:
        quantizer.__dict__[name] = value
    quantizer._rebuild_derived_state()
    return quantizer


def _annotated_fields(cls: type) -> tuple[str, ...]:
    names: dict[str, None] = {}
    for base in reversed(cls.__mro__):
        annotated = vars(base).get("__annotations__", {})
        if not annotated or base is object:
            continue
        hints = typing.get_type_hints(base)
        for name in annotated:
            if name.startswith("_") or typing.get_origin(hints[name]) is typing.ClassVar:
                continue
            if not _is_scalar(hints[name]):
                raise TypeError(
                    f"{cls.__name__}.{name}: a value field cannot be annotated {hints[name]}; "
                    "allowed: bool, int, float, str, an Enum, torch.dtype, or such a type | None. "
                    "Keep live state out of the value (start the name with '_')"
                )
            names[name] = None
    return tuple(names)


def _is_scalar(hint: Any) -> bool:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return all(_is_scalar(a) for a in typing.get_args(hint) if a is not type(None))
    if typing.get_origin(hint) is typing.Literal:
        return True
    return isinstance(hint, type) and (
        issubclass(hint, _SCALARS) or bool(getattr(hint, "_is_quantizer_class", False))
    )
