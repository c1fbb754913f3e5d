"""Saving quantized storages and tensors through autograd as flat lists of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from .declared import Declared
from .wrapper import Wrapper

__all__ = [
    "joined",
    "prepare_for_saving",
    "restore_from_func_ctx",
    "restore_from_saved",
    "taken_apart",
]


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


def taken_apart(saved: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """(flat tensors, for each of `saved` what `joined` needs, or None): quantized tensors in parts,
    others as they are. A hook that packs what is saved into memory of its own would keep the values
    of a quantized tensor, which are not what it was cast from.

    Those of a parameter are parameters, which hooks that move activations leave where they are.
    """
    flat: list[Any] = []
    apart: list[Any] = []
    for t in saved:
        if not isinstance(t, Wrapper):
            flat.append(t)
            apart.append(None)
            continue
        whole: Any = t
        names, context = whole.__tensor_flatten__()
        inner = [getattr(whole, name) for name in names]
        flat.extend([Parameter(i, False) for i in inner] if isinstance(t, Parameter) else inner)
        apart.append((type(t), names, context, whole.shape, whole.stride()))
    return flat, apart


def joined(flat: Sequence[Any], apart: Sequence[Any] | None) -> list[Any]:
    """The inverse; with None, of what nobody took apart."""
    if apart is None:
        return list(flat)
    rest = iter(flat)
    made: list[Any] = []
    for of in apart:
        if of is None:
            made.append(next(rest))
            continue
        cls, names, context, shape, stride = of
        inner = {name: next(rest) for name in names}
        made.append(cls.__tensor_unflatten__(inner, context, shape, stride))
    return made
