"""MXFP8: FP8 with one power-of-two (E8M0) scale per 32 elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import inputs
from ..dtypes import DType
from ..dynamo import register_value_opaque_quantizer
from ..formats import ELEMENTS, Cast, Scale, find_format
from ..layout import parts
from ..opaque import OpaqueABCMeta
from .base import Quantizer
from .float8 import element_of

__all__ = ["MXFP8Quantizer"]


@register_value_opaque_quantizer
class MXFP8Quantizer(Quantizer, metaclass=OpaqueABCMeta):
    """1x32 blocks, or 32x32 tiles with `with_2d_quantization`."""

    dtype: DType
    with_2d_quantization: bool

    def __init__(
        self,
        fp8_dtype: DType,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_2d_quantization: bool = False,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = element_of(fp8_dtype, 8, "fp8_dtype").dtype
        self.with_2d_quantization = with_2d_quantization

    @property
    def _cast(self) -> Cast:
        tile = (32, 32) if self.with_2d_quantization else (1, 32)
        return Cast(find_format(ELEMENTS[self.dtype], Scale.E8M0, tile).name)

    def _casts(self) -> tuple[Cast | None, Cast | None]:
        cast = self._cast
        return (cast if self.rowwise_usage else None, cast if self.columnwise_usage else None)

    def _plain_kwargs(self) -> dict[str, Any]:
        return {"fp8_dtype": self.dtype, "with_gemm_swizzled_scales": self.optimize_for_gemm}

    def get_scale_shape(self, shape: Sequence[int], columnwise: bool) -> tuple[int, ...]:
        cast = self._cast
        return parts(shape, None if columnwise else cast, cast if columnwise else None)[1].shape

    def create_tensor_from_data(
        self,
        data: Tensor,
        scale_inv: Tensor,
        fake_dtype: torch.dtype,
        fp8_dtype: DType = DType.kFloat8E4M3,
    ) -> Any:
        """A rowwise tensor of codes and scale bytes that exist already."""
        element = element_of(fp8_dtype, 8, "fp8_dtype")
        inputs.check_codes(data, element.torch_dtype)
        inputs.check_nominal(fake_dtype)
        needed = self.get_scale_shape(data.shape, False)
        if scale_inv.dtype != torch.uint8 or tuple(scale_inv.shape) != needed:
            raise ValueError(
                f"scale_inv: got {scale_inv.dtype} of shape {tuple(scale_inv.shape)}; torch.uint8 "
                f"of shape {needed} is needed for data of shape {tuple(data.shape)}"
            )
        quantizer = self.copy()
        quantizer.dtype = element.dtype
        quantizer.set_usage(rowwise=True, columnwise=False)
        data = data if data.dtype == torch.uint8 else data.view(torch.uint8)
        buffers = {"_rowwise_data": data, "_rowwise_scale_inv": scale_inv}
        return quantizer._assemble(data.shape, fake_dtype, buffers)

    def is_requantization_safe(self) -> bool:
        return True
