"""NVFP4: E2M1 with an E4M3 scale per 16 elements and one fp32 amax per tensor (or row)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .. import reference
from ..dtypes import DType
from ..dynamo import register_value_opaque_quantizer
from ..formats import E4M3, ELEMENTS, HADAMARD_SIGN_MASK, Cast, Scale, cdiv, find_format
from ..layout import parts, transposed_shape
from ..opaque import OpaqueABCMeta
from .base import Quantizer
from .float8 import element_of

__all__ = ["NVFP4Quantizer"]


@register_value_opaque_quantizer
class NVFP4Quantizer(Quantizer, metaclass=OpaqueABCMeta):
    """1x16 blocks, or 16x16 tiles with `with_2d_quantization`.

    `with_rht` transforms the columnwise copy by a random Hadamard matrix; `stochastic_rounding`
    rounds both copies stochastically; `row_scaled_nvfp4` keeps an amax per row; `nvfp4_use_4over6`
    picks each block's scale by the smaller error.
    """

    dtype: DType
    with_rht: bool
    with_post_rht_amax: bool
    with_amax_reduction: bool
    with_2d_quantization: bool
    stochastic_rounding: bool
    row_scaled_nvfp4: bool
    nvfp4_use_4over6: bool
    nvfp4_e4m3_max: int
    nvfp4_4over6_err_mode: str
    rht_matrix_random_sign_mask_t: int

    def __init__(  # noqa: PLR0913  (the contract's signature)
        self,
        fp4_dtype: DType = DType.kFloat4E2M1,
        rowwise: bool = True,
        columnwise: bool = True,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        with_rht: bool = False,
        with_post_rht_amax: bool = False,
        with_2d_quantization: bool = False,
        stochastic_rounding: bool = False,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = int(E4M3.max),
        nvfp4_4over6_err_mode: str = "MAE",
        with_random_sign_mask: bool = True,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        if nvfp4_4over6_err_mode not in ("MAE", "MSE"):
            raise ValueError(
                f"nvfp4_4over6_err_mode: got {nvfp4_4over6_err_mode!r}; allowed: 'MAE', 'MSE'"
            )
        if nvfp4_e4m3_max not in (256, int(E4M3.max)):
            raise ValueError(f"nvfp4_e4m3_max: got {nvfp4_e4m3_max}; allowed: 256, {int(E4M3.max)}")
        if with_rht and not with_post_rht_amax:
            raise ValueError(
                "with_rht: the columnwise scale comes from the transformed data; "
                "pass with_post_rht_amax=True too"
            )
        if row_scaled_nvfp4 and with_amax_reduction:
            raise ValueError("row_scaled_nvfp4: per-row amaxes exclude with_amax_reduction")
        self.dtype = element_of(fp4_dtype, 4, "fp4_dtype").dtype
        self.with_rht = with_rht
        self.with_post_rht_amax = with_post_rht_amax
        self.with_amax_reduction = with_amax_reduction
        self.amax_reduction_group = amax_reduction_group
        self.with_2d_quantization = with_2d_quantization
        self.stochastic_rounding = stochastic_rounding
        self.row_scaled_nvfp4 = row_scaled_nvfp4
        self.nvfp4_use_4over6 = nvfp4_use_4over6
        self.nvfp4_e4m3_max = nvfp4_e4m3_max if nvfp4_use_4over6 else int(E4M3.max)
        self.nvfp4_4over6_err_mode = nvfp4_4over6_err_mode
        self.rht_matrix_random_sign_mask_t = HADAMARD_SIGN_MASK if with_random_sign_mask else 0
        self._both()  # a combination that means nothing is refused here, by Cast

    def _both(self) -> tuple[Cast, Cast]:
        tile = (16, 16) if self.with_2d_quantization else (1, 16)
        row = Cast(
            find_format(ELEMENTS[self.dtype], Scale.E4M3_F32, tile).name,
            stochastic=self.stochastic_rounding,
            row_scaled=self.row_scaled_nvfp4,
            error=self.nvfp4_4over6_err_mode if self.nvfp4_use_4over6 else "",
            scale_max=self.nvfp4_e4m3_max,
        )
        col = row.replace(hadamard=self.rht_matrix_random_sign_mask_t) if self.with_rht else row
        return row, col

    def _casts(self) -> tuple[Cast | None, Cast | None]:
        row, col = self._both()
        return (row if self.rowwise_usage else None, col if self.columnwise_usage else None)

    def _plain_kwargs(self) -> dict[str, Any]:
        return {
            "fp4_dtype": self.dtype,
            "with_gemm_swizzled_scales": self.optimize_for_gemm,
            "row_scaled_nvfp4": self.row_scaled_nvfp4,
            "nvfp4_use_4over6": self.nvfp4_use_4over6,
            "nvfp4_e4m3_max": self.nvfp4_e4m3_max,
        }

    @property
    def rht_matrix(self) -> Tensor:
        """`diag(signs) H16 / 4` in bf16."""
        return reference.hadamard_matrix(self.rht_matrix_random_sign_mask_t)

    @staticmethod
    def convert_shape_for_fp4(shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the packed bytes: the last dim halved, rounded up."""
        return (*shape[:-1], cdiv(shape[-1], 2))

    @staticmethod
    def get_columnwise_shape(shape: Sequence[int]) -> tuple[int, ...]:
        return transposed_shape(shape)

    def get_scale_shape(self, shape: Sequence[int], columnwise: bool) -> tuple[int, ...]:
        row, col = self._both()
        return parts(shape, None if columnwise else row, col if columnwise else None)[1].shape

    def is_requantization_safe(self) -> bool:
        return not self.stochastic_rounding
