"""One FP8 scale for the whole tensor: delayed scaling and current scaling."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import dispatch
from ..dtypes import DType
from ..dynamo import register_value_opaque_quantizer
from ..formats import ELEMENTS, Cast, Element, Scale, find_format
from ..layout import transposed_shape
from ..opaque import OpaqueABCMeta
from .base import Quantizer

__all__ = ["Float8CurrentScalingQuantizer", "Float8Quantizer", "fp8_element"]


def fp8_element(dtype: object, name: str) -> Element:
    """The 8-bit element of `dtype`; TypeError naming the argument otherwise."""
    element = ELEMENTS.get(DType.cast(dtype))
    if element is None or element.bits != 8:
        allowed = ", ".join(f"DType.{e.dtype.name}" for e in ELEMENTS.values() if e.bits == 8)
        raise TypeError(f"{name}: got {dtype!r}; allowed: {allowed}")
    return element


class _TensorScaled(Quantizer):
    """What delayed and current scaling share: one scale, and a column copy that is a transpose."""

    @staticmethod
    def get_columnwise_shape(shape: Sequence[int]) -> tuple[int, ...]:
        return transposed_shape(shape)

    def supports_only_rowwise_all_gather(self) -> bool:
        return True

    def is_quantizable(self, inp: Tensor) -> bool:
        return inp.dtype in dispatch.INPUT_DTYPES

    def _wrap(
        self,
        data: Tensor,
        scale_inv: Tensor,
        fake_dtype: torch.dtype,
        requires_grad: bool,
        internal: bool,
    ) -> Any:
        quantizer = self.copy()
        quantizer.internal = internal
        data = data if data.dtype == torch.uint8 else data.view(torch.uint8)
        buffers = {"_data": data, "_scale_inv": scale_inv}
        return quantizer._assemble(data.shape, fake_dtype, buffers, requires_grad)


class Float8Quantizer(_TensorScaled):
    """Delayed scaling: casts with a live `scale` and accumulates a live `amax`. Equals only itself."""

    def __init__(
        self,
        scale: Tensor,
        amax: Tensor,
        fp8_dtype: DType,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        for name, tensor in (("scale", scale), ("amax", amax)):
            if tensor.dtype != torch.float32 or tensor.numel() != 1:
                raise ValueError(
                    f"{name}: got {tensor.dtype} of shape {tuple(tensor.shape)}; one fp32 is needed"
                )
        self.scale = scale
        self.amax = amax
        self.dtype = fp8_element(fp8_dtype, "fp8_dtype").dtype

    def _casts(self) -> tuple[Cast | None, Cast | None]:
        cast = Cast(find_format(ELEMENTS[self.dtype], Scale.F32, None).name)
        return (cast if self.rowwise_usage else None, cast if self.columnwise_usage else None)

    def _plain_kwargs(self) -> dict[str, Any]:
        return {"fp8_dtype": self.dtype}

    def _quantize_buffers(
        self, tensor: Tensor, seed: Tensor | None = None, group: Any = None
    ) -> dict[str, Tensor]:
        row, col = self._casts()
        cast = row or col
        dispatch.check_input(tensor, row, col)
        assert cast is not None
        made = dispatch.quantize_scaled(
            tensor, self.scale, self.amax, cast, row=row is not None, col=col is not None
        )
        return dict(zip(self.inner_tensor_specs(tensor.shape), made, strict=True))

    def calibrate(self, tensor: Tensor) -> None:
        """Record the amax of `tensor` without quantizing it."""
        (seen,) = dispatch.amax(tensor, self.copy_rowwise()._casts()[0], None)
        self.amax.copy_(seen.reshape(self.amax.shape))

    def copy_rowwise(self) -> Any:
        other = self.copy()
        other.set_usage(rowwise=True)
        return other

    def create_tensor_from_data(
        self,
        data: Tensor,
        fake_dtype: torch.dtype = torch.float32,
        requires_grad: bool = False,
        internal: bool = False,
    ) -> Any:
        """Wrap codes that were cast with the current scale."""
        scale_inv = torch.ones_like(self.scale).reshape(1) / self.scale.reshape(1)
        return self._wrap(data, scale_inv, fake_dtype, requires_grad, internal)


@register_value_opaque_quantizer
class Float8CurrentScalingQuantizer(_TensorScaled, metaclass=OpaqueABCMeta):
    """Current scaling: the scale comes from the amax of the tensor that is being cast."""

    dtype: DType
    with_amax_reduction: bool
    force_pow_2_scales: bool
    amax_epsilon: float

    def __init__(
        self,
        fp8_dtype: DType,
        device: torch.device | str | None = None,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        use_existing_amax: bool = False,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
        scale: Tensor | None = None,
        amax: Tensor | None = None,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        if use_existing_amax or scale is not None or amax is not None:
            warnings.warn(
                "Float8CurrentScalingQuantizer ignores use_existing_amax, scale and amax: current "
                "scaling computes them",
                DeprecationWarning,
                stacklevel=2,
            )
        self.dtype = fp8_element(fp8_dtype, "fp8_dtype").dtype
        self.with_amax_reduction = with_amax_reduction
        self.amax_reduction_group = amax_reduction_group
        self.force_pow_2_scales = force_pow_2_scales
        self.amax_epsilon = float(amax_epsilon)

    def _casts(self) -> tuple[Cast | None, Cast | None]:
        fmt = find_format(ELEMENTS[self.dtype], Scale.F32, None)
        cast = Cast(fmt.name, pow2=self.force_pow_2_scales, eps=self.amax_epsilon)
        return (cast if self.rowwise_usage else None, cast if self.columnwise_usage else None)

    def _plain_kwargs(self) -> dict[str, Any]:
        return {"fp8_dtype": self.dtype}

    def create_tensor_from_data(
        self,
        data: Tensor,
        fake_dtype: torch.dtype = torch.float32,
        requires_grad: bool = False,
        internal: bool = False,
    ) -> Any:
        """Wrap codes whose decode scale is yet to be written: `_scale_inv` is uninitialised."""
        scale_inv = torch.empty(1, dtype=torch.float32, device=data.device)
        return self._wrap(data, scale_inv, fake_dtype, requires_grad, internal)

    def is_requantization_safe(self) -> bool:
        return True
