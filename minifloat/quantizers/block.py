"""FP8 with one fp32 scale per 1x128 or 128x128 block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..dtypes import DType
from ..dynamo import register_value_opaque_quantizer
from ..formats import ELEMENTS, Cast, Scale, find_format
from ..layout import parts, transposed_shape
from ..opaque import OpaqueABCMeta
from .base import Quantizer
from .float8 import element_of, positive

__all__ = ["Float8BlockQuantizer"]


@register_value_opaque_quantizer
class Float8BlockQuantizer(Quantizer, metaclass=OpaqueABCMeta):
    """Blocks of 128: `block_scaling_dim` 1 scales 1x128, independently per direction; 2 scales
    128x128 tiles, whose row and column copies carry the same values."""

    dtype: DType
    block_len: int
    amax_epsilon: float
    force_pow_2_scales: bool
    block_scaling_dim: int

    def __init__(
        self,
        fp8_dtype: DType,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True,
        block_scaling_dim: int = 2,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        if block_scaling_dim not in (1, 2):
            raise ValueError(
                f"block_scaling_dim: got {block_scaling_dim}; allowed: 1 (1x128), 2 (128x128)"
            )
        self.dtype = element_of(fp8_dtype, 8, "fp8_dtype").dtype
        self.block_len = 128
        self.amax_epsilon = positive(amax_epsilon, "amax_epsilon")
        self.force_pow_2_scales = force_pow_2_scales
        self.block_scaling_dim = block_scaling_dim

    @property
    def _cast(self) -> Cast:
        n = self.block_len
        tile = (n, n) if self.block_scaling_dim == 2 else (1, n)
        fmt = find_format(ELEMENTS[self.dtype], Scale.F32, tile)
        return Cast(fmt.name, pow2=self.force_pow_2_scales, eps=self.amax_epsilon)

    def _casts(self) -> tuple[Cast | None, Cast | None]:
        cast = self._cast
        return (cast if self.rowwise_usage else None, cast if self.columnwise_usage else None)

    def _plain_kwargs(self) -> dict[str, Any]:
        return {"fp8_dtype": self.dtype, "is_2D_scaled": self.block_scaling_dim == 2}

    def get_scale_shape(self, shape: Sequence[int], columnwise: bool) -> tuple[int, ...]:
        cast = self._cast
        return parts(shape, None if columnwise else cast, cast if columnwise else None)[1].shape

    @staticmethod
    def get_columnwise_shape(shape: Sequence[int]) -> tuple[int, ...]:
        return transposed_shape(shape)

    def is_requantization_safe(self) -> bool:
        return True
