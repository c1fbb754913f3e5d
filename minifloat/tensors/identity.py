"""High precision as a quantized tensor like any other."""

from __future__ import annotations

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
        dtype = None if self._hp_data is None else self._hp_data.dtype
        cast: Cast = Cast(HIGH_PRECISION.name, dtype=dtype)
        return cast

    def _has(self, copy: str) -> bool:
        return self._hp_data is not None

    def _drop(self, copy: str) -> None:
        """The buffer stays: it serves the other direction."""

    def _derive(self, copy: str) -> dict[str, Tensor]:
        return {}

    def _dequantize(self, dtype: torch.dtype) -> Tensor:
        return self._any_buffer().to(dtype, copy=True)

    def operand(self, col: bool) -> Operand:
        m, k = flatten(self.shape)
        data = self._any_buffer().reshape(m, k)
        return Operand(data.t() if col else data, None, None, self._cast(col), m if col else k)


class IdentityTensor(IdentityTensorStorage, QuantizedTensor, quantizers=(IdentityQuantizer,)):
    """A `torch.Tensor` that keeps its data."""
