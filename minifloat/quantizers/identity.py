"""High precision as a format like any other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import dispatch
from ..dynamo import register_value_opaque_quantizer
from ..formats import HIGH_PRECISION, Cast
from ..opaque import OpaqueABCMeta
from .base import Quantizer

__all__ = ["IdentityQuantizer"]


@register_value_opaque_quantizer
class IdentityQuantizer(Quantizer, metaclass=OpaqueABCMeta):
    """Keeps the data, cast to `dtype` if one is given; one buffer serves both directions."""

    dtype: torch.dtype | None

    def __init__(
        self, *, dtype: torch.dtype | None = None, rowwise: bool = True, columnwise: bool = True
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"dtype: got {dtype!r}; a floating torch dtype or None is needed")
        self.dtype = dtype

    def _casts(self) -> tuple[Cast | None, Cast | None]:
        if not (self.rowwise_usage or self.columnwise_usage):
            return None, None
        return Cast(HIGH_PRECISION.name, dtype=self.dtype or torch.float32), None

    def _quantize_buffers(
        self, tensor: Tensor, seed: Tensor | None = None, group: Any = None
    ) -> dict[str, Tensor]:
        self._check_input(tensor)
        row, col = self._casts()
        rounds = self.dtype is not None and self.dtype != tensor.dtype
        if rounds and tensor.dtype in dispatch.INPUT_DTYPES:
            # An op: Inductor would fuse the cast with its inverse, and round nothing.
            return {"_hp_data": dispatch.quantize(tensor, row, col)[0]}
        return {"_hp_data": tensor.to(self.dtype or tensor.dtype, copy=True)}

    def _check_input(self, tensor: Tensor) -> None:
        if not isinstance(tensor, Tensor) or not tensor.dtype.is_floating_point:
            given = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"tensor: got {given}; a tensor of a floating dtype is needed")
        dispatch.check_usage(self.rowwise_usage, self.columnwise_usage)

    def _holding(self, dtype: torch.dtype) -> Any:
        if self.dtype is not None:
            return self
        other = self.copy()
        other.dtype = dtype
        return other

    def is_requantization_safe(self) -> bool:
        return True

    def is_quantizable(self, inp: Tensor) -> bool:
        return inp.dtype.is_floating_point
