"""State dicts of plain tensors: the layout of docs/checkpoints.md, for safetensors and its like.

A quantized tensor becomes its inner tensors, named `<name>.<attribute>`, and one line of JSON that
says how to put them together. Nothing is pickled, and reading makes classes of this package only.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import quantizers
from ..dtypes import DType
from ..dynamo.quantizer_opaque import _rebuild_quantizer
from ..quantizers import Quantizer
from .declared import Declared
from .grouped_factories import CLASSES
from .kept import LIVE, Template, joined, taken_apart
from .wrapper import contiguous_stride

__all__ = ["flatten_state_dict", "unflatten_state_dict"]

VERSION = 1
_HEADER = "minifloat"  # metadata key of the version; `minifloat.<name>` describes a tensor


def flatten_state_dict(state_dict: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(plain tensors, metadata): what `unflatten_state_dict` turns back into `state_dict`.

    `safetensors.torch.save_file(tensors, path, metadata=metadata)` writes them.
    """
    tensors: dict[str, Tensor] = {}
    metadata = {_HEADER: json.dumps({"version": VERSION})}
    for name, value in state_dict.items():
        if isinstance(value, Declared):
            inner, described = _described(name, value)
            metadata[f"{_HEADER}.{name}"] = json.dumps(described)
        elif isinstance(value, Tensor) and not hasattr(value, "_local_tensor"):
            inner = {name: value.detach()}
        else:
            raise TypeError(
                f"state_dict: {name!r} is a {type(value).__name__}; allowed: plain and quantized "
                "tensors (a DTensor: take full_tensor(), or use torch.distributed.checkpoint)"
            )
        taken = sorted(set(inner) & set(tensors))
        if taken:
            raise ValueError(f"state_dict: two tensors would be stored as {taken[0]!r}")
        tensors.update(inner)
    return tensors, metadata


def _described(name: str, value: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    attrs, ctx = value.__tensor_flatten__()
    kwargs = dict(ctx["nontensor_kwargs"])
    described = {
        "class": type(value).__name__,
        "dtype": _encoded(kwargs.pop("fake_dtype")),
        "shape": list(value.shape),
        "inner": attrs,
        "quantizer": _encoded(kwargs.pop("quantizer")),
        "fields": {k: _encoded(v) for k, v in kwargs.items()},
    }
    if ctx.get("unflat") is not None:
        described["laid_out"] = list(ctx["unflat"])
    if ctx.get("members") is not None:
        described["members"] = ctx["members"]
    # Live tensors are their layer's buffers, which the state dict has by their own names, too.
    # safetensors refuses memory that is named twice; these are a few numbers.
    inner = {
        f"{name}.{attr}": t.clone() if attr.startswith(LIVE) else t.contiguous()
        for attr, t in ((attr, getattr(value, attr).detach()) for attr in attrs)
    }
    return inner, described


def _encoded(value: Any) -> Any:
    """A plain value or a quantizer (its template, if it has live tensors) as JSON."""
    if isinstance(value, DType):
        return {"DType": value.name}
    if isinstance(value, torch.dtype):
        return {"torch.dtype": str(value).removeprefix("torch.")}
    if isinstance(value, (Quantizer, Template)):
        if isinstance(value, Template):
            cls, fields = value.cls, dict(value.fields)
        else:
            cls, fields = type(value), value._state()
        if _known(Quantizer).get(cls.__name__) is not cls:
            raise TypeError(
                f"quantizer: got {cls.__name__}, a class of your own; save such a tensor with "
                "torch.save, or set its _quantizer to None"
            )
        return {"class": cls.__name__, "fields": {k: _encoded(v) for k, v in fields.items()}}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"state_dict: a {type(value).__name__} has no place in a checkpoint")


def unflatten_state_dict(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None
) -> dict[str, Any]:
    """The state dict that `flatten_state_dict` took apart; tensors without a description stay."""
    metadata = metadata or {}
    described = {
        key.removeprefix(f"{_HEADER}."): _parsed(key, text)
        for key, text in metadata.items()
        if key.startswith(f"{_HEADER}.")
    }
    if described:
        version = _parsed(_HEADER, metadata.get(_HEADER, "{}")).get("version")
        if version != VERSION:
            raise ValueError(
                f"metadata: layout version {version!r}; this minifloat reads {VERSION}"
            )
    out: dict[str, Any] = {}
    used: set[str] = set()
    for name, about in described.items():
        out[name] = _rebuilt(name, about, tensors, used)
    plain = {name: t for name, t in tensors.items() if name not in used}
    clash = sorted(set(plain) & set(out))
    if clash:
        raise ValueError(f"tensors: {clash[0]!r} is there as a plain and as a quantized tensor")
    return {**plain, **out}


def _parsed(key: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"metadata: {key!r} holds no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"metadata: {key!r} holds {text!r}; an object is needed")
    return value


_KEYS = {"class", "dtype", "shape", "inner", "fields", "quantizer"}
_FLAGS = {name for name in inspect.get_annotations(Quantizer) if not name.startswith("_")}


def _rebuilt(
    name: str, about: dict[str, Any], tensors: Mapping[str, Tensor], used: set[str]
) -> Any:
    _check_names(name, "description", about, _KEYS, optional={"laid_out", "members"})
    cls = _class(name, about["class"], Declared)
    _check_names(name, "fields", about["fields"], {p.kwarg for p in cls._PLAIN})
    inner = {}
    for attr in about["inner"]:
        key = f"{name}.{attr}"
        if key not in tensors:
            raise ValueError(f"tensors: {key!r} is missing, which belongs to {name!r}")
        used.add(key)
        inner[attr] = tensors[key]
    quantizer = joined(_decoded(name, about["quantizer"]), inner)
    declared = {attr for attr, _ in cls._INNER_TENSORS or (quantizer and quantizer._kwarg_order())}
    declared |= set(taken_apart(quantizer)[1])
    unknown = sorted(set(inner) - declared)
    if unknown:
        raise ValueError(
            f"metadata: {name!r} names an inner tensor {unknown[0]!r} that {cls.__name__} does not "
            f"have; it has {sorted(declared)}"
        )
    shape = tuple(about["shape"])
    context = {
        "cls": cls,
        "is_tensor": cls._is_tensor,
        "requires_grad": False,
        "nontensor_kwargs": {
            **{k: _decoded(name, v) for k, v in about["fields"].items()},
            "quantizer": quantizer,
            "fake_dtype": _decoded(name, about["dtype"]),
        },
        "unflat": tuple(about["laid_out"]) if "laid_out" in about else None,
        "members": about.get("members"),
    }
    return cls.__tensor_unflatten__(inner, context, shape, contiguous_stride(shape))


def _decoded(name: str, value: Any) -> Any:
    """The inverse of `_encoded`; a quantizer that is no value comes as a template."""
    if not isinstance(value, dict):
        return value
    if set(value) == {"class", "fields"}:
        cls = _class(name, value["class"], Quantizer)
        fields = {k: _decoded(name, v) for k, v in value["fields"].items()}
        is_value = cls._value_field_names is not None
        needed = set(cls._value_field_names) if is_value else _FLAGS | {"dtype"}
        _check_names(name, f"fields of {cls.__name__}", fields, needed)
        items = tuple(fields.items())
        has_live = not is_value or any(isinstance(v, Template) for v in fields.values())
        return Template(cls, items) if has_live else _rebuild_quantizer(cls, items)
    if len(value) == 1:
        ((tag, content),) = value.items()
        if tag == "DType" and content in DType.__members__:
            return DType[content]
        if tag == "torch.dtype" and isinstance(getattr(torch, str(content), None), torch.dtype):
            return getattr(torch, content)
    raise ValueError(f"metadata: {name!r} holds {value!r}, which this minifloat does not know")


def _known(base: type) -> dict[str, Any]:
    """The classes of this package under `base`, by name: the only ones that reading makes."""
    if base is Quantizer:
        found = (getattr(quantizers, name) for name in quantizers.__all__)
        return {c.__name__: c for c in found if isinstance(c, type) and issubclass(c, Quantizer)}
    known: dict[str, Any] = {cls.__name__: cls for cls in CLASSES.values()}
    for quantizer in _known(Quantizer).values():
        for cls in (quantizer._storage_class, quantizer._tensor_class):
            if cls is not None:
                known[cls.__name__] = cls
    return known


def _class(name: str, class_name: object, base: type) -> Any:
    known = _known(base)
    if class_name not in known:
        raise ValueError(
            f"metadata: {name!r} is of class {class_name!r}; known: {', '.join(sorted(known))}"
        )
    return known[class_name]


def _check_names(
    name: str, what: str, given: Any, needed: set[str], optional: set[str] | None = None
) -> None:
    missing = sorted(needed - set(given))
    unknown = sorted(set(given) - needed - (optional or set()))
    if missing:
        raise ValueError(f"metadata: the {what} of {name!r} has no {missing[0]!r}")
    if unknown:
        raise ValueError(f"metadata: the {what} of {name!r} has an unknown {unknown[0]!r}")
