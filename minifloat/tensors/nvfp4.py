"""NVFP4: packed E2M1, an E4M3 scale per 16 elements, an fp32 amax per tensor (or row)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..dtypes import DType
from ..formats import E4M3, ELEMENTS, Cast, Scale, find_format
from ..quantizers import NVFP4Quantizer, UsageError
from .storage import Inner, Plain, QuantizedTensorStorage
from .tensor import QuantizedTensor

__all__ = ["NVFP4Tensor", "NVFP4TensorStorage"]


class NVFP4TensorStorage(QuantizedTensorStorage, quantizers=(NVFP4Quantizer,)):
    """Two codes per byte along the contraction; the column copy is transposed and may be
    Hadamard-transformed, which its quantizer knows."""

    _INNER = (
        Inner("_rowwise_data", "rowwise_data", "row_data"),
        Inner("_rowwise_scale_inv", "rowwise_scale_inv", "row_scale"),
        Inner("_columnwise_data", "columnwise_data", "col_data"),
        Inner("_columnwise_scale_inv", "columnwise_scale_inv", "col_scale"),
        Inner("_amax_rowwise", "amax_rowwise", "row_amax"),
        Inner("_amax_columnwise", "amax_columnwise", "col_amax"),
    )
    _PLAIN = (
        Plain("_fp4_dtype", "fp4_dtype", DType.kFloat4E2M1),
        Plain("_with_gemm_swizzled_scales", "with_gemm_swizzled_scales", False),
        Plain("_row_scaled_nvfp4", "row_scaled_nvfp4", False),
        Plain("_nvfp4_use_4over6", "nvfp4_use_4over6", False),
        Plain("_nvfp4_e4m3_max", "nvfp4_e4m3_max", int(E4M3.max)),
    )
    _SAVED = (
        "_rowwise_data", "_columnwise_data", "_rowwise_scale_inv", "_columnwise_scale_inv",
        "_amax_rowwise", "_amax_columnwise",
    )  # fmt: skip
    _POSITIONAL = (
        "rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv",
        "amax_rowwise", "amax_columnwise", "fp4_dtype", "quantizer", "with_gemm_swizzled_scales",
    )  # fmt: skip

    _rowwise_data: Tensor | None
    _rowwise_scale_inv: Tensor | None
    _columnwise_data: Tensor | None
    _columnwise_scale_inv: Tensor | None
    _amax_rowwise: Tensor | None
    _amax_columnwise: Tensor | None
    _fp4_dtype: DType
    _with_gemm_swizzled_scales: bool
    _row_scaled_nvfp4: bool
    _nvfp4_use_4over6: bool
    _nvfp4_e4m3_max: int

    def _cast(self, col: bool) -> Cast:
        quantizer = self._quantizer
        square = bool(getattr(quantizer, "with_2d_quantization", False))
        transforms = col and bool(getattr(quantizer, "with_rht", False))
        cast: Cast = Cast(
            find_format(
                ELEMENTS[self._fp4_dtype], Scale.E4M3_F32, (16, 16) if square else (1, 16)
            ).name,
            row_scaled=self._row_scaled_nvfp4,
            hadamard=quantizer.rht_matrix_random_sign_mask_t if transforms else -1,
            scale_max=self._nvfp4_e4m3_max,
        )
        return cast

    def _dequantize(self, dtype: torch.dtype) -> Tensor:
        if not self._has("row") and self._has("col"):
            if self._quantizer is None:
                raise UsageError(
                    f"{type(self).__name__}: without a quantizer nothing says whether the "
                    "columnwise copy is Hadamard-transformed; keep the rowwise copy, or the "
                    "quantizer"
                )
            if self._cast(True).transforms:
                raise UsageError(
                    f"{type(self).__name__}: the columnwise copy is Hadamard-transformed and "
                    "cannot be read back; keep the rowwise copy to dequantize"
                )
        return super()._dequantize(dtype)


class NVFP4Tensor(NVFP4TensorStorage, QuantizedTensor, quantizers=(NVFP4Quantizer,)):
    """A `torch.Tensor` held in NVFP4."""
