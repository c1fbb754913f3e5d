"""Factories that make a CustomRecipe behave as a built-in recipe: `CustomRecipe(qfactory=...)`.

Each slot gets what the built-in recipe gives it, by the role's `tensor_type` and `module_type`. A
slot without a role (the boundary of a module) is taken for an output, the role not telling.
"""

from __future__ import annotations

from typing import Any

from ..quantizers import IdentityQuantizer
from .base import Recipe
from .recipes import (
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from .roles import DelayedScalingRequest, QuantizerRole
from .states import RecipeState

__all__ = [
    "current_scaling_factory",
    "delayed_scaling_factory",
    "float8_block_scaling_factory",
    "high_precision_factory",
    "is_backward",
    "mxfp8_factory",
    "nvfp4_factory",
    "quantizer_of",
]

# Tensors of backward, attention's included, which goes by dO and dP.
BACKWARD = ("grad_output", "grad_input", "do", "dp")


def is_backward(role: QuantizerRole | None) -> bool:
    """Whether the slot holds a gradient."""
    return role is not None and role.tensor_type in BACKWARD


def quantizer_of(recipe: Recipe, role: QuantizerRole | None) -> Any:
    """The quantizer that `recipe` gives to a slot of this role."""
    known = role if role is not None else QuantizerRole(tensor_type="output")
    mode = "backward" if is_backward(role) else "forward"
    return RecipeState.create(recipe, mode=mode, roles=[known]).make_quantizers()[0]


def high_precision_factory(role: QuantizerRole | None) -> Any:
    """Nothing is quantized."""
    return IdentityQuantizer()


def delayed_scaling_factory(role: QuantizerRole | None) -> Any:
    """As DelayedScaling()."""
    return DelayedScalingRequest()


def current_scaling_factory(role: QuantizerRole | None) -> Any:
    """As Float8CurrentScaling()."""
    return quantizer_of(Float8CurrentScaling(), role)


def float8_block_scaling_factory(role: QuantizerRole | None) -> Any:
    """As Float8BlockScaling()."""
    return quantizer_of(Float8BlockScaling(), role)


def mxfp8_factory(role: QuantizerRole | None) -> Any:
    """As MXFP8BlockScaling()."""
    return quantizer_of(MXFP8BlockScaling(), role)


def nvfp4_factory(role: QuantizerRole | None) -> Any:
    """As NVFP4BlockScaling()."""
    return quantizer_of(NVFP4BlockScaling(), role)
