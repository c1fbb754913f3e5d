"""Recipes and roles that the tests here share."""

from __future__ import annotations

from typing import Any

from minifloat import DType, MXFP8Quantizer
from minifloat.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    Recipe,
)

FWD = (("linear", "input", "fc"), ("linear", "weight", "fc"), ("linear", "output", "fc"))
BWD = (("linear", "grad_output", "fc"), ("linear", "grad_input", "fc"))


def mxfp8_everywhere(role: Any) -> Any:
    return MXFP8Quantizer(DType.kFloat8E4M3)


def most_recent(history: Any) -> Any:
    return history[0]


BUILT_IN: tuple[type[Recipe], ...] = (
    DelayedScaling,
    Float8CurrentScaling,
    Float8BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

# Every built-in recipe, by default and with its arguments.
VALUES: tuple[Recipe, ...] = (
    *(cls() for cls in BUILT_IN),
    DelayedScaling(2, Format.E4M3, 16, "most_recent", None, False, True, True),
    Float8CurrentScaling(True, Format.E4M3, MMParams(), fp8_mha=True),
    Float8CurrentScaling(fp8_quant_fwd_inp=QParams(amax_epsilon=0.5, power_2_scale=True)),
    Float8BlockScaling(True, Format.HYBRID, 1, 1, 2, backward_override="dequantized"),
    MXFP8BlockScaling(fp8_format=Format.HYBRID, enable_2d_quantization=True),
    NVFP4BlockScaling(True, True, True, True, "all", "weights", "MSE"),
    NVFP4BlockScaling(fp4_quant_bwd_grad=QParams(random_hadamard_transform=True)),
)
RECIPES = (*VALUES, CustomRecipe(mxfp8_everywhere), DelayedScaling(amax_compute_algo=most_recent))
