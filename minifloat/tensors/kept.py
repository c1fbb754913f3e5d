"""A tensor's quantizer as metadata of the flattened tensor, which graphs compare, copy and pickle.

A value quantizer is metadata as it is. One with live tensors (delayed scaling) is taken apart: its
live tensors travel as inner tensors of the tensor that keeps it, so that a graph reads and updates
the ones it is given, and what is left is a value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..dynamo.quantizer_opaque import _rebuild_quantizer

__all__ = ["LIVE", "Template", "joined", "live_tensor", "moved", "taken_apart"]

LIVE = "_live_"  # prefix of the inner names of a quantizer's live tensors
_STEP = "__"  # between a part of a quantizer and that part's tensor


class Template:
    """A quantizer without its live tensors: its class, plain fields, and parts as templates."""

    def __init__(self, cls: type, fields: tuple[tuple[str, Any], ...]) -> None:
        self.cls = cls
        self.fields = fields

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Template) and self.cls is other.cls and self.fields == other.fields

    def __hash__(self) -> int:
        return hash((self.cls, self.fields))

    def __reduce__(self) -> Any:
        return Template, (self.cls, self.fields)

    def __repr__(self) -> str:
        return f"{self.cls.__name__}{self.fields}"


def taken_apart(quantizer: Any) -> tuple[Any, tuple[str, ...]]:
    """(metadata, inner names of the live tensors)."""
    if quantizer is None or quantizer._is_value():
        return quantizer, ()
    fields, names = [], []
    for field, value in quantizer._state().items():
        if isinstance(value, Tensor):
            names.append(f"{LIVE}{field}")
        elif hasattr(value, "_is_value"):
            part, inner = taken_apart(value)
            fields.append((field, part))
            names += [f"{LIVE}{field}{_STEP}{name.removeprefix(LIVE)}" for name in inner]
        else:
            fields.append((field, value))
    return Template(type(quantizer), tuple(fields)), tuple(names)


def live_tensor(quantizer: Any, name: str) -> Tensor:
    """The live tensor with this inner name."""
    for step in name.removeprefix(LIVE).split(_STEP):
        quantizer = getattr(quantizer, step)
    return quantizer  # type: ignore[no-any-return]


def moved(quantizer: Any, device: torch.device) -> Any:
    """The quantizer with its live tensors on `device`: itself where they are there already."""
    metadata, names = taken_apart(quantizer)
    live = {name: live_tensor(quantizer, name) for name in names}
    if all(t.device == device for t in live.values()):
        return quantizer
    return joined(metadata, {name: t.to(device) for name, t in live.items()})


def joined(metadata: Any, inner: dict[str, Tensor]) -> Any:
    """The quantizer made of its metadata and the live tensors among `inner`."""
    if not isinstance(metadata, Template):
        return metadata
    live = {n.removeprefix(LIVE): t for n, t in inner.items() if n.startswith(LIVE)}
    return _joined(metadata, live)


def _joined(template: Template, live: dict[str, Tensor]) -> Any:
    fields: dict[str, Any] = {n: t for n, t in live.items() if _STEP not in n}
    for field, value in template.fields:
        if isinstance(value, Template):
            prefix = field + _STEP
            part = {n.removeprefix(prefix): t for n, t in live.items() if n.startswith(prefix)}
            value = _joined(value, part)
        fields[field] = value
    return _rebuild_quantizer(template.cls, tuple(fields.items()))
