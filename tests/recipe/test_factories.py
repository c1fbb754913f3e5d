"""The factories make CustomRecipe plan as the built-in recipes; the zoo mixes formats."""

from __future__ import annotations

from typing import Any

import pytest

from minifloat import Float8CurrentScalingQuantizer, HybridQuantizer, NVFP4Quantizer
from minifloat import recipe as recipe_module
from minifloat.formats import HADAMARD_SIGN_MASK, Cast
from minifloat.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Plan,
    QuantizerRole,
    Recipe,
    current_scaling_factory,
    delayed_scaling_factory,
    float8_block_scaling_factory,
    high_precision_factory,
    mxfp8_factory,
    nvfp4_factory,
)

from .cases import BWD, FWD

KEEP, MX = Cast("high_precision"), Cast("mxfp8_e4m3")
NV, NV_TILE = Cast("nvfp4"), Cast("nvfp4_16x16")
RHT = NV.replace(hadamard=HADAMARD_SIGN_MASK)
GRAD, GRAD_RHT = NV.replace(stochastic=True), RHT.replace(stochastic=True)
PER_ROW = NV.replace(row_scaled=True)


def casts(plan: Plan) -> tuple[Cast, ...]:
    return plan.x_row, plan.x_col, plan.w_row, plan.w_col, plan.g_row, plan.g_col


def name_of(case: Any) -> str:
    return getattr(case, "__name__", "")


BUILT_IN = [
    (delayed_scaling_factory, DelayedScaling()),
    (current_scaling_factory, Float8CurrentScaling()),
    (float8_block_scaling_factory, Float8BlockScaling()),
    (mxfp8_factory, MXFP8BlockScaling()),
    (nvfp4_factory, NVFP4BlockScaling()),
]


@pytest.mark.parametrize(
    "factory, recipe", BUILT_IN, ids=lambda case: getattr(case, "__name__", "")
)
@pytest.mark.parametrize("module_type", ["linear", "grouped_linear", ""])
def test_a_factory_is_its_recipe(factory: Any, recipe: Recipe, module_type: str) -> None:
    fwd, bwd = (tuple((module_type, *role[1:]) for role in roles) for roles in (FWD, BWD))
    custom = CustomRecipe(factory).plan(fwd, bwd)
    assert custom.replace(name=recipe.plan().name) is recipe.plan(fwd, bwd)


@pytest.mark.parametrize(
    "factory, recipe", BUILT_IN, ids=lambda case: getattr(case, "__name__", "")
)
def test_boundary_slots(factory: Any, recipe: Recipe) -> None:
    custom = CustomRecipe(factory).plan((*FWD[:2], None), (BWD[0], None))
    assert casts(custom) == casts(recipe.plan())
    assert (custom.fast, custom.delayed, custom.update) == (
        recipe.plan().fast,
        recipe.plan().delayed,
        recipe.plan().update,
    )
    assert custom.y_row == recipe.plan().y_row


def test_high_precision() -> None:
    plan = CustomRecipe(high_precision_factory).plan(FWD, BWD)
    assert casts(plan) == (KEEP,) * 6
    assert plan.fast == (False, False, False) and plan.requantizes


ZOO = {
    "high_precision_fwd_mxfp8_bwd": (KEEP, MX, KEEP, MX, MX, MX),
    "mxfp8_fwd_high_precision_bwd": (MX, KEEP, MX, KEEP, KEEP, KEEP),
    "mxfp8_fwd_nvfp4_bwd": (MX, RHT, MX, NV_TILE, GRAD, GRAD_RHT),
    "nvfp4_1d_weight": (NV, RHT, NV, NV, GRAD, GRAD_RHT),
    "nvfp4_row_scaled_fwd_mxfp8_bwd": (PER_ROW, MX, NV_TILE, MX, MX, MX),
    "nvfp4_row_scaled_fwd_high_precision_bwd": (PER_ROW, KEEP, NV_TILE, KEEP, KEEP, KEEP),
    "nvfp4_linear_fp8_dpa": (NV, RHT, NV_TILE, NV_TILE, GRAD, GRAD_RHT),
}


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("roles", [(FWD, BWD), ((*FWD[:2], None), (BWD[0], None))])
def test_zoo(name: str, roles: Any) -> None:
    plan = CustomRecipe(getattr(recipe_module, f"{name}_factory")).plan(*roles)
    assert casts(plan) == ZOO[name]
    assert plan.col_from_row == (False, False, False) and plan.update is None


def test_zoo_is_complete() -> None:
    assert {f"{name}_factory" for name in ZOO} == set(recipe_module.zoo.__all__)


def test_mixed_outputs_are_not_hybrid() -> None:
    plan = CustomRecipe(recipe_module.mxfp8_fwd_nvfp4_bwd_factory).plan(FWD, BWD)
    assert not isinstance(plan.output, HybridQuantizer) and plan.y_row == MX
    assert plan.dx_row == GRAD


@pytest.mark.parametrize("tensor_type", ["qkv", "s", "do", "dp"])
def test_attention_in_fp8(tensor_type: str) -> None:
    factory = recipe_module.nvfp4_linear_fp8_dpa_factory
    made = factory(QuantizerRole("dpa", tensor_type))
    assert isinstance(made, Float8CurrentScalingQuantizer)
    forward = tensor_type in ("qkv", "s")
    assert made._casts()[0] == Cast("fp8_e4m3" if forward else "fp8_e5m2")
    assert isinstance(factory(QuantizerRole("linear", "input")), NVFP4Quantizer)
