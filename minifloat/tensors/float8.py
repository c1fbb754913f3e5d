"""FP8 with one scale for the tensor (delayed and current scaling)."""

from __future__ import annotations

from torch import Tensor

from ..dtypes import DType
from ..formats import ELEMENTS, Cast, Scale, find_format
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
        cast: Cast = Cast(find_format(ELEMENTS[self._fp8_dtype], Scale.F32, None).name)
        return cast

    @property
    def _transpose_invalid(self) -> bool:
        """Never metadata: a transpose is there or it is not, and no other is kept."""
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


class Float8Tensor(Float8TensorStorage, QuantizedTensor, quantizers=_QUANTIZERS):
    """A `torch.Tensor` held in FP8 under one scale."""
