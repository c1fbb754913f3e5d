"""MXFP8: FP8 with an E8M0 scale per 32 elements."""

from __future__ import annotations

from torch import Tensor

from ..dtypes import DType
from ..formats import ELEMENTS, Cast, Scale, find_format
from ..quantizers import MXFP8Quantizer
from .storage import Inner, Plain, QuantizedTensorStorage
from .tensor import QuantizedTensor

__all__ = ["MXFP8Tensor", "MXFP8TensorStorage"]


class MXFP8TensorStorage(QuantizedTensorStorage, quantizers=(MXFP8Quantizer,)):
    """Both data buffers have the logical shape: the column copy is not transposed."""

    _INNER = (
        Inner("_rowwise_data", "rowwise_data", "row_data"),
        Inner("_rowwise_scale_inv", "rowwise_scale_inv", "row_scale"),
        Inner("_columnwise_data", "columnwise_data", "col_data"),
        Inner("_columnwise_scale_inv", "columnwise_scale_inv", "col_scale"),
    )
    _PLAIN = (
        Plain("_fp8_dtype", "fp8_dtype"),
        Plain("_with_gemm_swizzled_scales", "with_gemm_swizzled_scales", False),
    )
    _SAVED = ("_rowwise_data", "_columnwise_data", "_rowwise_scale_inv", "_columnwise_scale_inv")
    _POSITIONAL = (
        "rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv",
        "fp8_dtype", "quantizer", "with_gemm_swizzled_scales",
    )  # fmt: skip

    _rowwise_data: Tensor | None
    _rowwise_scale_inv: Tensor | None
    _columnwise_data: Tensor | None
    _columnwise_scale_inv: Tensor | None
    _fp8_dtype: DType
    _with_gemm_swizzled_scales: bool

    def _cast(self, col: bool) -> Cast:
        square = bool(getattr(self._quantizer, "with_2d_quantization", False))
        tile = (32, 32) if square else (1, 32)
        cast: Cast = Cast(find_format(ELEMENTS[self._fp8_dtype], Scale.E8M0, tile).name)
        return cast


class MXFP8Tensor(MXFP8TensorStorage, QuantizedTensor, quantizers=(MXFP8Quantizer,)):
    """A `torch.Tensor` held in MXFP8."""
