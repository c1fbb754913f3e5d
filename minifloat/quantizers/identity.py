"""High precision as a format like any other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..dtypes import TE_DType_To_Torch
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

    def _rebuild_derived_state(self) -> None:
        if isinstance(self.dtype, int):
            self.__dict__["dtype"] = TE_DType_To_Torch[self.dtype]

    def _casts(self) -> tuple[Cast | None, Cast | None]:
        if not (self.rowwise_usage or self.columnwise_usage):
            return None, None
        return Cast(HIGH_PRECISION.name, dtype=self.dtype or torch.float32), None

    def _quantize_buffers(
        self, tensor: Tensor, seed: Tensor | None = None, group: Any = None
    ) -> dict[str, Tensor]:
        # Not an op: a copy in the input's dtype is a clone, which PyTorch traces and fuses.
        return {"_hp_data": tensor.to(self.dtype or tensor.dtype, copy=True)}

    def is_requantization_safe(self) -> bool:
        return True

    def is_quantizable(self, inp: Tensor) -> bool:
        return inp.dtype.is_floating_point
