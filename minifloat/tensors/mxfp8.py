"""MXFP8: FP8 with an E8M0 scale per 32 elements."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..dtypes import DType
from ..formats import ELEMENTS, Cast, Scale, find_format
from ..layout import flatten, parts
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
        return Cast(find_format(ELEMENTS[self._fp8_dtype], Scale.E8M0, tile).name)

    def _slice_rows(self, start: int, end: int) -> Any:
        """Rows [start, end) where no block is cut: starts and lengths are whole blocks."""
        m, _ = flatten(self.shape)
        inner = m // max(self.shape[0], 1)
        first, last = start * inner, end * inner
        block = 32
        whole = first % block == 0 and (last % block == 0 or last == m)
        if not whole or self._with_gemm_swizzled_scales or len(self.shape) < 2:
            return NotImplemented
        shape = (end - start, *self.shape[1:])
        sliced = dict(self._buffers())
        for name, per in (("_rowwise", 1), ("_columnwise", block)):
            data, scale = sliced[f"{name}_data"], sliced[f"{name}_scale_inv"]
            if data is None or scale is None:
                continue
            sliced[f"{name}_data"] = data[start:end]
            rows = scale[first // per : -(-last // per)]
            col = per == block
            cast = self._cast(col)
            described = parts(shape, None if col else cast, cast if col else None)[1].shape
            padded = scale.new_zeros(described)
            padded[: rows.shape[0]] = rows
            sliced[f"{name}_scale_inv"] = padded
        return self._like(sliced, shape)


class MXFP8Tensor(MXFP8TensorStorage, QuantizedTensor, quantizers=(MXFP8Quantizer,)):
    """A `torch.Tensor` held in MXFP8."""
