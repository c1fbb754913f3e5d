"""FP8 with one scale for the tensor (delayed and current scaling)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..dtypes import DType
from ..formats import ELEMENTS, Cast, Scale, find_format
from ..layout import flatten
from ..quantizers import Float8CurrentScalingQuantizer, Float8Quantizer
from .storage import Inner, Plain, QuantizedTensorStorage
from .tensor import QuantizedTensor

__all__ = ["Float8Tensor", "Float8TensorStorage"]

_QUANTIZERS = (Float8Quantizer, Float8CurrentScalingQuantizer)


class Float8TensorStorage(QuantizedTensorStorage, quantizers=_QUANTIZERS):
    """`_data` has the logical shape, `_transpose` is (K, *leading); both carry the same codes."""

    _INNER = (
        Inner("_data", "data", "row_data"),
        Inner("_transpose", "data_transpose", "col_data"),
        Inner("_scale_inv", "fp8_scale_inv", "scale"),
    )
    _PLAIN = (Plain("_fp8_dtype", "fp8_dtype"),)
    _SAVED = ("_data", "_transpose", "_scale_inv")
    _POSITIONAL = (
        "data", "fp8_scale_inv", "fp8_dtype", "fake_dtype", "data_transpose", "quantizer",
    )  # fmt: skip

    _data: Tensor | None
    _transpose: Tensor | None
    _scale_inv: Tensor | None
    _fp8_dtype: DType

    def _cast(self, col: bool) -> Cast:
        return Cast(find_format(ELEMENTS[self._fp8_dtype], Scale.F32, None).name)

    @property
    def _transpose_invalid(self) -> bool:
        return self._transpose is None

    def _create_transpose(self) -> None:
        """Make `_transpose` from `_data` if it is absent."""
        if self._transpose is None:
            self.update_usage(columnwise_usage=True)

    def _reset_caches(self) -> None:
        """Drop the transpose, unless it is the only payload."""
        if self._data is not None:
            self._transpose = None

    remove_caches = _reset_caches

    def _slice_rows(self, start: int, end: int) -> Any:
        """Rows [start, end) of the first dim: any slice, for one scale serves all elements."""
        shape = (end - start, *self.shape[1:])
        if self._data is None or len(self.shape) < 2:
            return NotImplemented if self._data is None else self._like(
                {"_data": self._data[start:end], "_transpose": None, "_scale_inv": self._scale_inv},
                shape,
            )  # fmt: skip
        transpose = None
        if self._transpose is not None:
            m, k = flatten(self.shape)
            inner = m // max(self.shape[0], 1)
            rows = self._transpose.reshape(k, m)[:, start * inner : end * inner]
            transpose = rows.reshape(k, *shape[:-1])
        return self._like(
            {"_data": self._data[start:end], "_transpose": transpose, "_scale_inv": self._scale_inv},
            shape,
        )


class Float8Tensor(Float8TensorStorage, QuantizedTensor, quantizers=_QUANTIZERS):
    """A `torch.Tensor` held in FP8 under one scale."""
