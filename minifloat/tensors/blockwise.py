"""FP8 with an fp32 scale per block of 128."""

from __future__ import annotations

from torch import Tensor

from ..dtypes import DType
from ..formats import ELEMENTS, Cast, Scale, find_format
from ..quantizers import Float8BlockQuantizer
from .storage import Inner, Plain, QuantizedTensorStorage
from .tensor import QuantizedTensor

__all__ = ["Float8BlockwiseQTensor", "Float8BlockwiseQTensorStorage"]


class Float8BlockwiseQTensorStorage(QuantizedTensorStorage, quantizers=(Float8BlockQuantizer,)):
    """Column data is (K, *leading); 1-D scales are stored contraction-block major."""

    _INNER = (
        Inner("_rowwise_data", "rowwise_data", "row_data"),
        Inner("_rowwise_scale_inv", "rowwise_scale_inv", "row_scale"),
        Inner("_columnwise_data", "columnwise_data", "col_data"),
        Inner("_columnwise_scale_inv", "columnwise_scale_inv", "col_scale"),
    )
    _PLAIN = (Plain("_fp8_dtype", "fp8_dtype"), Plain("_is_2D_scaled", "is_2D_scaled"))
    _SAVED = ("_rowwise_data", "_columnwise_data", "_rowwise_scale_inv", "_columnwise_scale_inv")
    _POSITIONAL = (
        "rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv",
        "fp8_dtype", "quantizer", "is_2D_scaled",
    )  # fmt: skip

    _rowwise_data: Tensor | None
    _rowwise_scale_inv: Tensor | None
    _columnwise_data: Tensor | None
    _columnwise_scale_inv: Tensor | None
    _fp8_dtype: DType
    _is_2D_scaled: bool

    def _cast(self, col: bool) -> Cast:
        tile = (128, 128) if self._is_2D_scaled else (1, 128)
        cast: Cast = Cast(find_format(ELEMENTS[self._fp8_dtype], Scale.F32, tile).name)
        return cast


class Float8BlockwiseQTensor(
    Float8BlockwiseQTensorStorage, QuantizedTensor, quantizers=(Float8BlockQuantizer,)
):
    """A `torch.Tensor` held in block-scaled FP8."""
