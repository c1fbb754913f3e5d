"""Saving quantized storages through autograd as flat lists of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .declared import Declared

__all__ = ["prepare_for_saving", "restore_from_func_ctx", "restore_from_saved"]


def prepare_for_saving(*tensors: Any) -> tuple[list[Tensor | None], list[Any]]:
    """(flat tensors, objects): None and tensors pass through, bare storages are taken apart."""
    flat: list[Tensor | None] = []
    objects: list[Any] = []
    for t in tensors:
        if t is None or isinstance(t, Tensor):
            flat.append(t)
            objects.append(None)
        elif isinstance(t, Declared):
            buffers, obj = t.prepare_for_saving()
            flat.extend(buffers)
            objects.append(obj)
        else:
            raise TypeError(
                f"tensors: got {type(t).__name__}; a Tensor, a quantized storage or None is needed"
            )
    return flat, objects


def restore_from_saved(
    objects: Sequence[Any], saved: Sequence[Tensor | None], return_saved_tensors: bool = False
) -> Any:
    """The inverse; with `return_saved_tensors`, also what is left of `saved`."""
    rest = list(saved)
    out: list[Any] = []
    for obj in objects:
        if obj is None:
            if not rest:
                raise ValueError(
                    f"saved: got {len(saved)} tensors; {len(objects)} objects need more of them"
                )
            out.append(rest.pop(0))
        else:
            rest = obj.restore_from_saved(rest)
            out.append(obj)
    return (out, rest) if return_saved_tensors else out


def restore_from_func_ctx(ctx: Any, return_saved_tensors: bool = False) -> Any:
    """`restore_from_saved` of an autograd context; `ctx.tensor_objects` is consumed."""
    if getattr(ctx, "tensor_objects", None) is None:
        raise AttributeError(
            "ctx.tensor_objects is missing: set it to the objects that prepare_for_saving returned"
        )
    out = restore_from_saved(ctx.tensor_objects, ctx.saved_tensors, return_saved_tensors)
    ctx.tensor_objects = None
    return out
