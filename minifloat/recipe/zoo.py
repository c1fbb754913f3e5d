"""Factories that mix formats: what to write for `CustomRecipe(qfactory=...)`.

Forward multiplies the row copies of input and weight; backward multiplies their column copies and
the gradient. So "A forward, B backward" is `HybridQuantizer(A, B)` for input and weight, and B for
gradients. Each part is what the built-in recipe of its format gives to the slot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..quantizers import HybridQuantizer
from .factories import (
    current_scaling_factory,
    high_precision_factory,
    is_backward,
    mxfp8_factory,
    nvfp4_factory,
    quantizer_of,
)
from .recipes import NVFP4BlockScaling
from .roles import QuantizerRole

__all__ = [
    "high_precision_fwd_mxfp8_bwd_factory",
    "mxfp8_fwd_high_precision_bwd_factory",
    "mxfp8_fwd_nvfp4_bwd_factory",
    "nvfp4_1d_weight_factory",
    "nvfp4_linear_fp8_dpa_factory",
    "nvfp4_row_scaled_fwd_high_precision_bwd_factory",
    "nvfp4_row_scaled_fwd_mxfp8_bwd_factory",
]

Factory = Callable[[QuantizerRole | None], Any]


def _mixed(forward: Factory, backward: Factory, role: QuantizerRole | None) -> Any:
    if is_backward(role):
        return backward(role)
    if role is None or role.tensor_type not in ("input", "weight"):
        return forward(role)  # an output: backward does not multiply it
    return HybridQuantizer(rowwise_quantizer=forward(role), columnwise_quantizer=backward(role))


def _nvfp4_row_scaled(role: QuantizerRole | None) -> Any:
    return quantizer_of(NVFP4BlockScaling(row_scaled_activation=True, disable_rht=True), role)


def high_precision_fwd_mxfp8_bwd_factory(role: QuantizerRole | None) -> Any:
    """Forward in high precision, backward in MXFP8."""
    return _mixed(high_precision_factory, mxfp8_factory, role)


def mxfp8_fwd_high_precision_bwd_factory(role: QuantizerRole | None) -> Any:
    """Forward in MXFP8, backward in high precision."""
    return _mixed(mxfp8_factory, high_precision_factory, role)


def mxfp8_fwd_nvfp4_bwd_factory(role: QuantizerRole | None) -> Any:
    """Forward in MXFP8, backward in NVFP4."""
    return _mixed(mxfp8_factory, nvfp4_factory, role)


def nvfp4_1d_weight_factory(role: QuantizerRole | None) -> Any:
    """NVFP4 with 1x16 blocks for weights as well."""
    return quantizer_of(NVFP4BlockScaling(disable_2d_quantization=True), role)


def nvfp4_row_scaled_fwd_mxfp8_bwd_factory(role: QuantizerRole | None) -> Any:
    """Forward in NVFP4 with a global scale per row of the input, backward in MXFP8."""
    return _mixed(_nvfp4_row_scaled, mxfp8_factory, role)


def nvfp4_row_scaled_fwd_high_precision_bwd_factory(role: QuantizerRole | None) -> Any:
    """Forward in NVFP4 with a global scale per row of the input, backward in high precision."""
    return _mixed(_nvfp4_row_scaled, high_precision_factory, role)


def nvfp4_linear_fp8_dpa_factory(role: QuantizerRole | None) -> Any:
    """NVFP4 in linear layers, FP8 current scaling in attention."""
    if role is not None and role.module_type == "dpa":
        return current_scaling_factory(role)
    return nvfp4_factory(role)
