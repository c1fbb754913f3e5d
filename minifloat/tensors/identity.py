"""High precision as a quantized tensor like any other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..formats import HIGH_PRECISION, Cast, Operand
from ..layout import flatten
from ..quantizers import IdentityQuantizer
from .storage import Inner, QuantizedTensorStorage
from .tensor import QuantizedTensor

__all__ = ["IdentityTensor", "IdentityTensorStorage"]


class IdentityTensorStorage(QuantizedTensorStorage, quantizers=(IdentityQuantizer,)):
    """`_hp_data` holds the values and serves both directions."""

    _INNER = (Inner("_hp_data", "hp_data", "row_data"),)
    _SAVED = ("_hp_data",)
    _POSITIONAL = ("hp_data", "quantizer", "fake_dtype")

    _hp_data: Tensor | None

    def _cast(self, col: bool) -> Cast:
        return Cast(HIGH_PRECISION.name, dtype=None if self._hp_data is None else self._hp_data.dtype)

    def _dequantize(self, dtype: torch.dtype) -> Tensor:
        return self._any_buffer().to(dtype, copy=True)

    def get_usages(self) -> dict[str, bool]:
        present = self._hp_data is not None
        return {"rowwise": present, "columnwise": present}

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """One buffer serves both copies: it goes only when neither is wanted."""
        if rowwise_usage is False and columnwise_usage is False:
            self._hp_data = None

    def operand(self, col: bool) -> Operand:
        m, k = flatten(self.shape)
        data = self._any_buffer().reshape(m, k)
        return Operand(data.t() if col else data, None, None, self._cast(col), m if col else k)

    def _slice_rows(self, start: int, end: int) -> Any:
        return self._like({"_hp_data": self._any_buffer()[start:end]}, (end - start, *self.shape[1:]))

    def _view_buffers(self, shape: Any) -> dict[str, Tensor | None]:
        return {"_hp_data": self._any_buffer().view(tuple(shape))}


class IdentityTensor(IdentityTensorStorage, QuantizedTensor, quantizers=(IdentityQuantizer,)):
    """A `torch.Tensor` that keeps its data."""
