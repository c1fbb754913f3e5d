"""One FP8 scale for the whole tensor: delayed scaling and current scaling."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import collectives, dispatch, inputs
from ..dtypes import DType
from ..dynamo import register_value_opaque_quantizer
from ..formats import ELEMENTS, Cast, Element, Scale, find_format
from ..layout import transposed_shape
from ..opaque import OpaqueABCMeta
from .base import Quantizer

__all__ = ["Float8CurrentScalingQuantizer", "Float8Quantizer", "element_of"]


def element_of(dtype: object, bits: int, name: str) -> Element:
    """The element of `dtype`, which has `bits` bits; TypeError naming the argument otherwise."""
    allowed = {e.dtype: e for e in ELEMENTS.values() if e.bits == bits}
    try:
        return allowed[DType.cast(dtype)]
    except (KeyError, TypeError):
        names = ", ".join(f"DType.{d.name}" for d in allowed)
        raise TypeError(f"{name}: got {dtype!r}; allowed: {names}") from None


def positive(value: float, name: str) -> float:
    """`value` as a float; ValueError naming the argument unless it is finite and not negative."""
    if not isinstance(value, (int, float)):
        raise TypeError(f"{name}: got {value!r}; a number is needed")
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name}: got {value!r}; it must be finite and >= 0")
    return float(value)


class _TensorScaled(Quantizer):
    """What delayed and current scaling share: one scale, and a column copy that is a transpose."""

    dtype: DType

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
        inputs.check_codes(data, ELEMENTS[self.dtype].torch_dtype)
        inputs.check_nominal(fake_dtype)
        quantizer = self.copy()
        quantizer.internal = internal
        data = data if data.dtype == torch.uint8 else data.view(torch.uint8)
        buffers = {"_data": data, "_scale_inv": scale_inv}
        return quantizer._assemble(data.shape, fake_dtype, buffers, requires_grad)


class Float8Quantizer(_TensorScaled):
    """Delayed scaling: casts with a live `scale`, accumulates a live `amax`, equals only itself."""

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
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{name}: got {type(tensor).__name__}; a torch.Tensor is needed")
            if tensor.dtype != torch.float32 or tensor.numel() != 1:
                raise ValueError(
                    f"{name}: got {tensor.dtype} of shape {tuple(tensor.shape)}; one fp32 is needed"
                )
        self.scale = scale
        self.amax = amax
        self.dtype = element_of(fp8_dtype, 8, "fp8_dtype").dtype

    @property
    def _cast(self) -> Cast:
        return Cast(find_format(ELEMENTS[self.dtype], Scale.F32, None).name)

    def _casts(self) -> tuple[Cast | None, Cast | None]:
        cast = self._cast
        return (cast if self.rowwise_usage else None, cast if self.columnwise_usage else None)

    def _plain_kwargs(self) -> dict[str, Any]:
        return {"fp8_dtype": self.dtype}

    def _quantize_buffers(
        self, tensor: Tensor, seed: Tensor | None = None, group: Any = None
    ) -> dict[str, Tensor]:
        row, col = self.rowwise_usage, self.columnwise_usage
        made = dispatch.quantize_scaled(tensor, self.scale, self.amax, self._cast, row=row, col=col)
        if group is not None:
            self._share_amax(group.group_name)
        return dict(zip(self.inner_tensor_specs(tensor.shape), made, strict=True))

    def _share_amax(self, group_name: str) -> None:
        """Record what all shards of a tensor have: the next scale is that of all of them, whoever
        else a recipe reduces amaxes over."""
        self.amax.copy_(collectives.all_reduce(self.amax, group_name, "max"))

    def _meet(self, group_name: str) -> None:
        self._share_amax(group_name)
        # The smallest scale saturates on no shard.
        self.scale.copy_(-collectives.all_reduce(-self.scale, group_name, "max"))

    def _state_written(self) -> Sequence[Tensor]:
        return (self.amax,)

    def calibrate(self, tensor: Tensor) -> None:
        """Record the amax of `tensor` without quantizing it."""
        with torch.no_grad():
            (seen,) = dispatch.amax(tensor, self._cast, None)
            self.amax.copy_(seen.reshape(self.amax.shape))

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

    with_amax_reduction: bool
    force_pow_2_scales: bool
    amax_epsilon: float

    def __init__(  # noqa: PLR0913  (the contract's signature)
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
        self.dtype = element_of(fp8_dtype, 8, "fp8_dtype").dtype
        self.with_amax_reduction = with_amax_reduction
        self.amax_reduction_group = amax_reduction_group
        self.force_pow_2_scales = force_pow_2_scales
        self.amax_epsilon = positive(amax_epsilon, "amax_epsilon")

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
