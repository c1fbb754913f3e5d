"""`TensorSpec`: what a plain or quantized tensor is made of, without its data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["TensorSpec", "to_tensor_spec"]


@dataclass
class TensorSpec:
    """Shape, dtype, device and quantizer of a tensor; makes one, or its inner tensors, on demand."""

    shape: Sequence[int]
    dtype: torch.dtype
    quantizer: Any = None
    requires_grad: bool = False
    device: torch.device | str | None = None

    def __post_init__(self) -> None:
        if self.quantizer is not None:
            self.quantizer = self.quantizer.copy()

    @property
    def is_quantized(self) -> bool:
        return self.quantizer is not None

    def update_usage(
        self, *, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """Change which copies the tensor will have."""
        if self.quantizer is None:
            raise ValueError("update_usage: this TensorSpec describes a plain tensor, not a quantized one")
        quantizer = self.quantizer.copy()
        quantizer.set_usage(rowwise=rowwise_usage, columnwise=columnwise_usage)
        self.quantizer = quantizer

    def inner_names(self) -> tuple[str, ...]:
        """Names of the inner tensors, in the order of the storage class's declaration."""
        if self.quantizer is None:
            return ("data",)
        names = tuple(self.quantizer.inner_tensor_specs(self.shape))
        cls = self.quantizer.storage_metadata(self.dtype)["cls"]
        declared = tuple(attr for attr, _ in cls._INNER_TENSORS if attr in names)
        if declared != names:
            raise RuntimeError(
                f"{type(self.quantizer).__name__}.inner_tensor_specs gives {names}, but "
                f"{cls.__name__} declares {declared}"
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
        return self.quantizer.create_metadata(  # type: ignore[no-any-return]
            self.shape, dtype=self.dtype, requires_grad=self.requires_grad
        )

    def create_inner_tensors(self) -> list[Tensor]:
        """Uninitialised inner tensors."""
        if self.quantizer is None:
            return [torch.empty(tuple(self.shape), dtype=self.dtype, device=self.device)]
        return self.quantizer.alloc_tensors(self.shape, device=self.device)  # type: ignore[no-any-return]

    def assemble(self, inner_tensors: Iterable[Tensor]) -> Any:
        """The tensor made of these inner tensors."""
        inner = list(inner_tensors)
        names = self.inner_names()
        if len(inner) != len(names):
            raise ValueError(f"inner_tensors: got {len(inner)}; {names} are needed")
        if self.quantizer is None:
            return inner[0].requires_grad_() if self.requires_grad else inner[0]
        return self.quantizer._assemble(
            tuple(self.shape),
            self.dtype,
            dict(zip(names, inner, strict=True)),
            requires_grad=self.requires_grad,
        )

    def create_tensor(self) -> Any:
        """An uninitialised tensor of this description."""
        return self.assemble(self.create_inner_tensors())


def to_tensor_spec(tensor: Any) -> TensorSpec:
    """The description of a tensor or of a bare quantized storage."""
    dtype = tensor.dtype if isinstance(tensor, Tensor) else tensor._dtype
    return TensorSpec(
        tuple(tensor.shape),
        dtype,
        getattr(tensor, "_quantizer", None),
        bool(getattr(tensor, "requires_grad", False)),
        tensor.device,
    )
