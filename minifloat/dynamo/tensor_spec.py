"""`TensorSpec`: what a plain or quantized tensor is made of, without its data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..formats import Cast
from ..layout import parts

__all__ = ["TensorSpec", "to_tensor_spec"]

# Ordered {attribute: (shape, dtype)} of inner tensors.
Specs = dict[str, tuple[tuple[int, ...], torch.dtype]]
# One storage: a prefix of its attributes, row cast, column cast, and (attribute, part of
# `layout.parts`) in its order.
Described = tuple[str, Cast | None, Cast | None, tuple[tuple[str, str], ...]]


# Functions, not methods: Dynamo traces into a method of a constant only where the constant comes
# from outside the graph, and the quantizer of a description may have been made while tracing.
def describe(quantizer: Any, shape: Sequence[int]) -> Specs:
    """The inner tensors of a result of `shape`."""
    made: Specs = {}
    for prefix, row, col, order in quantizer._described():
        for cast in (row, col):
            if cast is not None and cast.tiled and len(shape) == 0:
                raise ValueError(
                    f"shape: got (); {cast.format_name} scales blocks of a tensor with at least "
                    "one dim: use (1,)"
                )
        by_part = {p.name: (p.shape, p.dtype) for p in parts(tuple(shape), row, col)}
        made.update({prefix + attr: by_part[part] for attr, part in order if part in by_part})
    return made


def allocate(specs: Specs, device: torch.device | str | None) -> list[Tensor]:
    """Uninitialised tensors of `specs`, by default on the accelerator if there is one."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in specs.values()]


def metadata(quantizer: Any, kept: Any, dtype: torch.dtype, requires_grad: bool) -> dict[str, Any]:
    """What rebuilds a result from its inner tensors; `kept` is the quantizer that it keeps."""
    internal = quantizer.internal
    return {
        "cls": quantizer._storage_class if internal else quantizer._tensor_class,
        "is_tensor": not internal,
        "requires_grad": requires_grad and not internal,
        "nontensor_kwargs": {**quantizer._plain_kwargs(), "quantizer": kept, "fake_dtype": dtype},
    }


def assemble(
    quantizer: Any,
    shape: Sequence[int],
    dtype: torch.dtype,
    buffers: dict[str, Tensor],
    requires_grad: bool = False,
) -> Any:
    """The result made of these inner tensors (by attribute)."""
    kwargs = {kwarg: buffers.get(attr) for attr, kwarg in quantizer._kwarg_order()}
    kwargs.update(quantizer._plain_kwargs())
    if quantizer.internal:
        make = quantizer._storage_class
        return make(**kwargs, quantizer=quantizer, fake_dtype=dtype, shape=tuple(shape))
    make = quantizer._tensor_class
    return make(tuple(shape), dtype, requires_grad=requires_grad, quantizer=quantizer, **kwargs)


@dataclass
class TensorSpec:
    """Shape, dtype, device and quantizer of a tensor; makes one, or its inner tensors, on demand.

    The quantizer is private to the description: a copy, or one that cannot change.
    """

    shape: Sequence[int]
    dtype: torch.dtype
    quantizer: Any = None
    requires_grad: bool = False
    device: torch.device | str | None = None

    def __post_init__(self) -> None:
        if self.quantizer is not None and not self.quantizer._is_frozen():
            self.quantizer = self.quantizer.copy()

    @property
    def is_quantized(self) -> bool:
        return self.quantizer is not None

    def update_usage(
        self, *, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """Change which copies the tensor will have."""
        if self.quantizer is None:
            raise ValueError(
                "update_usage: this TensorSpec describes a plain tensor, which has no copies"
            )
        self.quantizer = self.quantizer._with_usages(rowwise_usage, columnwise_usage)

    def _specs(self) -> Specs:
        if self.quantizer is None:
            return {"data": (tuple(self.shape), self.dtype)}
        described = self.quantizer._holding(self.dtype)
        if torch.compiler.is_compiling():
            return describe(described, self.shape)
        return described.inner_tensor_specs(self.shape)  # type: ignore[no-any-return]

    def inner_names(self) -> tuple[str, ...]:
        """Names of the inner tensors, in the order of the storage class's declaration."""
        names = tuple(self._specs())
        if self.quantizer is not None:
            declared = tuple(a for a, _ in self.quantizer._kwarg_order() if a in names)
            if declared != names:
                raise RuntimeError(
                    f"{type(self.quantizer).__name__}.inner_tensor_specs gives {names}, but the "
                    f"storage class declares {declared}"
                )
        return names

    def create_metadata(self) -> dict[str, Any]:
        """What `assemble` needs besides the inner tensors."""
        if self.quantizer is None:
            return {
                "is_tensor": True,
                "is_quantized": False,
                "dtype": self.dtype,
                "requires_grad": self.requires_grad,
            }
        if torch.compiler.is_compiling():
            return metadata(self.quantizer, self.quantizer, self.dtype, self.requires_grad)
        return self.quantizer.create_metadata(  # type: ignore[no-any-return]
            self.shape, dtype=self.dtype, requires_grad=self.requires_grad
        )

    def create_inner_tensors(self) -> list[Tensor]:
        """Uninitialised inner tensors."""
        return allocate(self._specs(), self.device)

    def assemble(self, inner_tensors: Iterable[Tensor]) -> Any:
        """The tensor made of these inner tensors."""
        inner = list(inner_tensors)
        names = self.inner_names()
        if len(inner) != len(names):
            raise ValueError(f"inner_tensors: got {len(inner)}; {names} are needed")
        if self.quantizer is None:
            return inner[0].requires_grad_() if self.requires_grad else inner[0]
        buffers = dict(zip(names, inner, strict=True))
        return assemble(self.quantizer, self.shape, self.dtype, buffers, self.requires_grad)

    def create_tensor(self) -> Any:
        """An uninitialised tensor of this description."""
        return self.assemble(self.create_inner_tensors())


def to_tensor_spec(tensor: Any) -> TensorSpec:
    """The description of a tensor or of a bare quantized storage."""
    if not isinstance(tensor, Tensor) and not hasattr(type(tensor), "_INNER_TENSORS"):
        raise TypeError(
            f"tensor: got {type(tensor).__name__}; a Tensor or a quantized storage is needed"
        )
    dtype = tensor.dtype if isinstance(tensor, Tensor) else tensor._dtype
    # No getattr with a default: Dynamo takes it where it cannot read the quantizer.
    quantized = hasattr(type(tensor), "_INNER_TENSORS")
    return TensorSpec(
        tuple(tensor.shape),
        dtype,
        tensor._quantizer if quantized else None,
        bool(getattr(tensor, "requires_grad", False)),
        tensor.device,
    )
