"""`Declared`: what follows from a class's declaration of its fields, whatever the class holds.

A class lists its inner tensors (`_INNER`), the order in which they are saved (`_SAVED`) and its
plain attributes (`_PLAIN`). Taking constructor arguments, saving, restoring, flattening and
unflattening come from there, for single tensors and for groups of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..quantizers import UsageError
from .declaration import Inner, Plain
from .kept import joined, live_tensor, taken_apart

__all__ = ["Declared"]


class Declared:
    """Inner tensors, plain attributes, a nominal `_dtype` and a `_quantizer` (or None).

    Invariant: `unflatten(*flatten(t))` holds the same buffers and equals `t` in everything else.
    """

    _INNER: ClassVar[tuple[Inner, ...]] = ()
    _PLAIN: ClassVar[tuple[Plain, ...]] = ()
    _SAVED: ClassVar[tuple[str, ...]] = ()
    # Derived from _INNER: (attribute, argument), and the attribute of a part.
    _INNER_TENSORS: ClassVar[tuple[tuple[str, str], ...]] = ()
    _ATTR: ClassVar[dict[str, str]] = {}
    # (attribute, argument) of what a copy of the object is built around: the inner tensors, here.
    _PAYLOAD: ClassVar[tuple[tuple[str, str], ...]] = ()

    _is_tensor: ClassVar[bool] = False

    _dtype: torch.dtype
    _quantizer: Any
    # Which group reduces a requantization's amax. Only some classes have one.
    _group_name: str | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._INNER_TENSORS = tuple((i.attr, i.kwarg) for i in cls._INNER)
        cls._ATTR = {i.part: i.attr for i in cls._INNER}
        if cls._INNER:
            cls._PAYLOAD = cls._INNER_TENSORS

    def _take(self, kwargs: dict[str, Any]) -> None:
        """Set every declared attribute from constructor arguments, which are used up."""
        for inner in self._INNER:
            setattr(self, inner.attr, kwargs.pop(inner.kwarg, None))
        for plain in self._PLAIN:
            value = kwargs.pop(plain.kwarg, plain.default)
            if value is ...:
                raise TypeError(f"{type(self).__name__}: the argument {plain.kwarg!r} is missing")
            setattr(self, plain.attr, value)

    def _keep(self, quantizer: Any) -> None:
        """Hold `quantizer`, and its live tensors under the names that flattening gives them.

        As attributes: Dynamo reads those of a tensor, unless its class has a `__getattr__`.
        """
        self._quantizer = quantizer
        if self._is_tensor:
            self._show(taken_apart(quantizer)[1])

    def _show(self, live: Sequence[str]) -> None:
        for name in live:
            setattr(self, name, live_tensor(self._quantizer, name))

    # ------------------------------------------------------------------------------- reading
    def _part(self, name: str) -> Tensor | None:
        """The buffer that holds a part of `layout.parts`; one scale may serve both copies."""
        attr = self._ATTR.get(name)
        return None if attr is None else getattr(self, attr)

    def _buffers(self) -> dict[str, Tensor | None]:
        return {attr: getattr(self, attr) for attr, _ in self._INNER_TENSORS}

    def _any_buffer(self) -> Tensor:
        for t in self._buffers().values():
            if t is not None:
                return t
        raise UsageError(f"{type(self).__name__} holds no data: it was cleared or saved")

    @property
    def device(self) -> torch.device:
        return self._any_buffer().device

    def get_data_tensors(self, rowwise_data: bool = True, columnwise_data: bool = True) -> Any:
        """The data buffers asked for: both as a tuple, one as it is."""
        chosen = []
        if rowwise_data:
            chosen.append(self._part("row_data"))
        if columnwise_data:
            chosen.append(self._part("col_data"))
        return tuple(chosen) if len(chosen) != 1 else chosen[0]

    def _plain_kwargs(self) -> dict[str, Any]:
        return {p.kwarg: getattr(self, p.attr) for p in self._PLAIN}

    def get_metadata(self) -> dict[str, Any]:
        """Constructor arguments that rebuild this object."""
        kwargs: dict[str, Any] = {kwarg: getattr(self, attr) for attr, kwarg in self._PAYLOAD}
        kwargs.update(self._plain_kwargs())
        kwargs["quantizer"] = self._quantizer
        kwargs["fake_dtype"] = self._dtype
        return kwargs

    def _mapped(self, fn: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """The payload with `fn` applied to every tensor."""
        return {a: None if t is None else fn(t) for a, t in self._buffers().items()}

    # ------------------------------------------------------------------------------- writing
    def _check_writable(self, func: Any) -> None:
        """Raise where no operator can write new values here."""

    def _write_values(self, values: Tensor) -> None:
        """Hold `values`, which have this object's shape, in the buffers that are there."""
        raise NotImplementedError

    def _written(self) -> None:
        """Count new values in the buffers, as PyTorch does after its operators: a backward that has
        saved them raises then. What is written inside the operator of a wrapper is not counted."""
        if not torch.compiler.is_compiling():
            held = [t for t in self._buffers().values() if t is not None]
            torch.autograd.graph.increment_version([t for t in held if not t.is_inference()])

    def _dequantize(self, dtype: torch.dtype) -> Any:
        """The values, outside autograd."""
        raise NotImplementedError

    # -------------------------------------------------------------------------------- saving
    def prepare_for_saving(self) -> tuple[list[Tensor | None], Any]:
        """(buffers in `_SAVED` order, self); the fields are emptied."""
        tensors = [getattr(self, attr) for attr in self._SAVED]
        for attr in self._SAVED:
            setattr(self, attr, None)
        return tensors, self

    def restore_from_saved(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Take back the buffers; returns what is left of `tensors`."""
        n = len(self._SAVED)
        if len(tensors) < n:
            raise ValueError(f"tensors: got {len(tensors)}; {type(self).__name__} saved {n}")
        for attr, tensor in zip(self._SAVED, tensors, strict=False):
            setattr(self, attr, tensor)
        return list(tensors[n:])

    # ------------------------------------------------------------------- flatten, unflatten
    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        """(names of the inner tensors present, what rebuilds the object around them)."""
        names = [attr for attr, t in self._buffers().items() if t is not None]
        quantizer, live = taken_apart(self._quantizer)
        self._show(live)
        return [*names, *live], {
            "cls": type(self),
            "is_tensor": self._is_tensor,
            "requires_grad": bool(getattr(self, "requires_grad", False)),
            "nontensor_kwargs": {
                **self._plain_kwargs(),
                "quantizer": quantizer,
                "fake_dtype": self._dtype,
            },
            "group_name": self._group_name,
            **self._context(),
        }

    def _context(self) -> dict[str, Any]:
        """What else a class needs to rebuild one of its objects: constants, for a graph."""
        return {}

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, Tensor],
        ctx: dict[str, Any],
        outer_size: Sequence[int] | None = None,
        outer_stride: Sequence[int] | None = None,
    ) -> Any:
        cls = ctx["cls"]
        kwargs = dict(ctx["nontensor_kwargs"])
        kwargs["quantizer"] = joined(kwargs["quantizer"], inner_tensors)
        kwargs.update({kwarg: inner_tensors.get(attr) for attr, kwarg in cls._INNER_TENSORS})
        made = cls._rebuilt(kwargs, ctx, outer_size, outer_stride)
        made._group_name = ctx.get("group_name")
        return made

    @classmethod
    def _rebuilt(cls, kwargs: dict[str, Any], ctx: dict[str, Any], size: Any, stride: Any) -> Any:
        """The object made of these constructor arguments and what `_context` said."""
        raise NotImplementedError
