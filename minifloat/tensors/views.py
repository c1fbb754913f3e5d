"""`ValuesView`: a view of what a quantized tensor stands for, which cannot be written.

PyTorch makes views of tensors to write to them. Where codes cannot be viewed that way, their values
are, and a write would reach a copy that nobody keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from ..quantizers import UsageError

__all__ = ["ValuesView", "is_view", "leaves", "mapped", "read_only"]


class ValuesView(Tensor):
    """A plain tensor to who reads it. Views of it are such views, and nothing else is."""

    _plain: Tensor
    _of: str  # the class that it is a view of

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._can_decompose():  # whole where autograd does not take it apart: inference
            return func.decompose(*args, **(kwargs or {}))
        bound = {**dict(zip([a.name for a in func._schema.arguments], args, strict=False)),
                 **(kwargs or {})}  # fmt: skip
        of = ""
        for argument in func._schema.arguments:
            written = argument.alias_info is not None and argument.alias_info.is_write
            for t in leaves(bound.get(argument.name)):
                if not isinstance(t, ValuesView):
                    continue
                of = t._of
                if written:
                    raise UsageError(
                        f"{func}: {argument.name} is a view of a {of}'s values, which nobody "
                        "keeps: write the whole tensor (index assignment does), or clone() the "
                        "view first. Nothing was written"
                    )
        out = func(*mapped(args, _unwrapped), **mapped(kwargs or {}, _unwrapped))
        return read_only(out, of) if is_view(func) else out

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        return ["_plain"], self._of

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], of: str, size: Any, stride: Any) -> Any:
        return _view(inner["_plain"], of)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self._plain)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self._plain.clone()

    def __format__(self, spec: str) -> str:
        return format(self._plain, spec)

    def numpy(self, *, force: bool = False) -> Any:
        return self._plain.numpy(force=force)

    def tolist(self) -> Any:
        return self._plain.tolist()


def is_view(func: Any) -> bool:
    """Whether what an operator returns is memory of its arguments, as far as PyTorch knows."""
    infos = [r.alias_info for r in func._schema.returns]
    return any(info is not None and not info.is_write for info in infos)


def read_only(out: Any, of: str) -> Any:
    """The tensors of `out` as views of the values of an `of`; fake ones as they are, of which
    PyTorch makes views to learn what a graph's inputs look like."""
    known = (Tensor, FunctionalTensor)
    return mapped(out, lambda t: _view(t, of) if type(t) in known else t)


def _view(plain: Tensor, of: str) -> Any:
    made: Any
    if type(plain) is Tensor:
        made = Tensor._make_subclass(ValuesView, plain)  # kernels read its memory
    else:
        made = Tensor._make_wrapper_subclass(
            ValuesView, plain.shape, strides=plain.stride(), dtype=plain.dtype, device=plain.device
        )
    made._plain, made._of = plain, of
    return made


def mapped(value: Any, fn: Callable[[Any], Any]) -> Any:
    """`fn` of everything in lists, tuples and dicts."""
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(v, fn) for v in value)
    if isinstance(value, dict):
        return {k: mapped(v, fn) for k, v in value.items()}
    return fn(value)


def leaves(value: Any) -> list[Any]:
    """Everything in lists and tuples."""
    return [x for v in value for x in leaves(v)] if isinstance(value, (list, tuple)) else [value]


def _unwrapped(value: Any) -> Any:
    return value._plain if isinstance(value, ValuesView) else value
