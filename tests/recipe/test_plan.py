"""Plans: what each recipe makes of a linear layer."""

from __future__ import annotations

import copy
import pickle
import timeit
from typing import Any

import pytest
import torch

from minifloat import (
    DType,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from minifloat.formats import HADAMARD_SIGN_MASK, Cast
from minifloat.recipe import (
    CustomRecipe,
    DelayedScaling,
    DelayedScalingRequest,
    DelayedUpdate,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Plan,
    QParams,
    QuantizerRole,
    Recipe,
)
from minifloat.recipe.factories import nvfp4_factory

from .cases import BWD, FWD, RECIPES, most_recent, mxfp8_everywhere

E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2
FP8, FP8_GRAD = Cast("fp8_e4m3"), Cast("fp8_e5m2")
ROW, TILE = Cast("fp8_e4m3_1x128", pow2=True), Cast("fp8_e4m3_128x128", pow2=True)
MX = Cast("mxfp8_e4m3")
NV, NV_RHT = Cast("nvfp4"), Cast("nvfp4", hadamard=HADAMARD_SIGN_MASK)
NV_GRAD, NV_GRAD_RHT = NV.replace(stochastic=True), NV_RHT.replace(stochastic=True)
NV_TILE = Cast("nvfp4_16x16")


def casts(plan: Plan) -> tuple[Cast, ...]:
    return plan.x_row, plan.x_col, plan.w_row, plan.w_col, plan.g_row, plan.g_col


@pytest.mark.parametrize(
    "recipe, expected, y, dx",
    [
        (DelayedScaling(), (FP8, FP8, FP8, FP8, FP8_GRAD, FP8_GRAD), FP8, FP8_GRAD),
        (DelayedScaling(fp8_format=Format.E4M3), (FP8,) * 6, FP8, FP8),
        (Float8CurrentScaling(), (FP8, FP8, FP8, FP8, FP8_GRAD, FP8_GRAD), FP8, FP8_GRAD),
        (
            Float8CurrentScaling(True),
            tuple(c.replace(pow2=True) for c in (FP8, FP8, FP8, FP8, FP8_GRAD, FP8_GRAD)),
            FP8.replace(pow2=True),
            FP8_GRAD.replace(pow2=True),
        ),
        (
            Float8CurrentScaling(fp8_quant_fwd_weight=QParams(amax_epsilon=0.5)),
            (FP8, FP8, *[FP8.replace(eps=0.5)] * 2, FP8_GRAD, FP8_GRAD),
            FP8,
            FP8_GRAD,
        ),
        (Float8BlockScaling(), (ROW, ROW, TILE, TILE, ROW, ROW), ROW, ROW),
        (
            Float8BlockScaling(use_f32_scales=True),
            tuple(c.replace(pow2=False) for c in (ROW, ROW, TILE, TILE, ROW, ROW)),
            ROW.replace(pow2=False),
            ROW.replace(pow2=False),
        ),
        (MXFP8BlockScaling(), (MX,) * 6, MX, MX),
        (
            MXFP8BlockScaling(fp8_format=Format.HYBRID, enable_2d_quantization=True),
            (MX, MX, *[Cast("mxfp8_e4m3_32x32")] * 2, *[Cast("mxfp8_e5m2")] * 2),
            MX,
            Cast("mxfp8_e5m2"),
        ),
        (
            NVFP4BlockScaling(),
            (NV, NV_RHT, NV_TILE, NV_TILE, NV_GRAD, NV_GRAD_RHT),
            NV,
            NV_GRAD,
        ),
        (NVFP4BlockScaling(True, True, True), (NV,) * 6, NV, NV),
        (CustomRecipe(mxfp8_everywhere), (MX,) * 6, MX, MX),
    ],
)
@pytest.mark.parametrize("roles", [(FWD, BWD), ((*FWD[:2], None), (BWD[0], None))])
def test_casts(recipe: Recipe, expected: Any, y: Cast, dx: Cast, roles: Any) -> None:
    plan = recipe.plan(*roles)
    assert casts(plan) == expected
    assert (plan.y_row, plan.dx_row) == (y, dx)
    assert plan.col_from_row == (False, False, False)
    assert plan.name == type(recipe).__name__


def test_without_roles_the_position_decides() -> None:
    for recipe in RECIPES:
        if not recipe.custom():
            assert recipe.plan() is recipe.plan(FWD, BWD) is recipe.plan((None,) * 3, (None,) * 2)


@pytest.mark.parametrize(
    "recipe, fast",
    [
        (DelayedScaling(), (True, False, False)),
        (Float8CurrentScaling(), (True, False, False)),
        (Float8CurrentScaling(fp8_gemm_fprop=MMParams(True)), (False, False, False)),
        (
            Float8CurrentScaling(fp8_gemm_dgrad=MMParams(False), fp8_gemm_wgrad=MMParams(False)),
            (True, True, True),
        ),
        (Float8BlockScaling(), (False, False, False)),
        (MXFP8BlockScaling(), (False, False, False)),
        (NVFP4BlockScaling(), (False, False, False)),
        (CustomRecipe(lambda role: Float8CurrentScalingQuantizer(E4M3)), (True, False, False)),
        (CustomRecipe(mxfp8_everywhere), (False, False, False)),
        (CustomRecipe(lambda role: IdentityQuantizer()), (False, False, False)),
    ],
)
def test_fast_accumulation(recipe: Recipe, fast: tuple[bool, ...]) -> None:
    assert recipe.plan(FWD, BWD).fast == fast


@pytest.mark.parametrize("override", [None, "high_precision", "dequantized"])
def test_override(override: str | None) -> None:
    assert Float8CurrentScaling(backward_override=override).plan().override == (override or "")


def test_delayed() -> None:
    plan = DelayedScaling(1, amax_history_len=4, amax_compute_algo="most_recent").plan(FWD, BWD)
    assert plan.delayed == (True,) * 5
    assert plan.output is plan.grad_input is None
    assert plan.update is DelayedUpdate(1, 4, "most_recent", None, True)
    assert plan.update.recipe is None
    with_algo = DelayedScaling(scaling_factor_compute_algo=most_recent, reduce_amax=False)
    update = with_algo.plan().update
    assert update is not None and update.scale_algo is most_recent
    assert update.recipe is with_algo and update.reduce_amax is False
    for recipe in RECIPES:
        if not recipe.delayed():
            made = recipe.plan(FWD, BWD)
            assert made.delayed == (False,) * 5 and made.update is None


def test_output_and_grad_input() -> None:
    plan = Float8CurrentScaling().plan(FWD, BWD)
    assert isinstance(plan.output, Float8CurrentScalingQuantizer)
    assert isinstance(plan.grad_input, Float8CurrentScalingQuantizer)
    assert (plan.output.dtype, plan.grad_input.dtype) == (E4M3, E5M2)
    assert plan.output.get_usages() == {"rowwise": True, "columnwise": False}
    with pytest.raises(RuntimeError, match="copy"):
        plan.output.set_usage(columnwise=True)
    made = plan.output(torch.ones(4, 4))
    assert torch.equal(made.dequantize(), torch.ones(4, 4))


@pytest.mark.parametrize(
    "recipe, safe",
    [
        (DelayedScaling(), False),
        (Float8CurrentScaling(), True),
        (Float8BlockScaling(), True),
        (MXFP8BlockScaling(), True),
        (NVFP4BlockScaling(), True),
        (CustomRecipe(lambda role: NVFP4Quantizer(stochastic_rounding=True)), False),
    ],
)
def test_requantizes(recipe: Recipe, safe: bool) -> None:
    assert recipe.plan(FWD, BWD).requantizes is safe


# ------------------------------------------------------------------------------- memory, value
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
def test_memoised_and_a_value(recipe: Recipe) -> None:
    plan = recipe.plan(FWD, BWD)
    assert recipe.plan(FWD, BWD) is plan
    assert recipe.plan(copy.deepcopy(FWD), copy.deepcopy(BWD)) is plan
    assert hash(plan) == hash(copy.deepcopy(plan)) and copy.deepcopy(plan) is plan
    assert plan.replace(name="other") != plan
    text, names = plan.__fx_repr__()
    assert eval(text, {"torch": torch, **names}) is plan
    with pytest.raises(AttributeError, match="is a value"):
        plan.name = "x"  # type: ignore[misc]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
def test_plans_are_pickled(recipe: Recipe) -> None:
    plan = recipe.plan(FWD, BWD)
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_a_hit_is_quick() -> None:
    recipe = Float8CurrentScaling()
    recipe.plan(FWD, BWD)
    # The machine may be busy: the least of many short runs.
    least = min(timeit.repeat(lambda: recipe.plan(FWD, BWD), number=1000, repeat=50))
    assert least / 1000 < 1e-6


# ------------------------------------------------------------------------------------- custom
def test_the_factory_is_called_once_per_slot_and_recipe() -> None:
    seen: list[Any] = []

    def factory(role: Any) -> Any:
        seen.append(role)
        return MXFP8Quantizer(E4M3)

    recipe = CustomRecipe(factory)
    plan = recipe.plan((*FWD[:2], None), (BWD[0], None))
    assert recipe.plan((*FWD[:2], None), (BWD[0], None)) is plan
    assert seen == [
        QuantizerRole("linear", "input", "fc"),
        QuantizerRole("linear", "weight", "fc"),
        None,
        QuantizerRole("linear", "grad_output", "fc"),
        None,
    ]
    other = CustomRecipe(factory)
    assert other.plan((*FWD[:2], None), (BWD[0], None)) is plan, "equal plans are one"
    assert len(seen) == 10
    recipe.plan(FWD, BWD)
    assert len(seen) == 15


def by_type(**made: Any) -> CustomRecipe:
    """A recipe of {tensor_type: quantizer}; `rest` for the others."""
    return CustomRecipe(lambda role: made.get(role.tensor_type, made["rest"]))


def hybrid(row: Quantizer, col: Quantizer, **kwargs: Any) -> HybridQuantizer:
    return HybridQuantizer(rowwise_quantizer=row, columnwise_quantizer=col, **kwargs)


def test_hybrid_and_identity() -> None:
    mixed = hybrid(MXFP8Quantizer(E4M3), Float8CurrentScalingQuantizer(E5M2))
    derived = hybrid(
        IdentityQuantizer(dtype=torch.bfloat16),
        MXFP8Quantizer(E4M3),
        columnwise_source="rowwise_dequantized",
    )
    plan = by_type(input=mixed, weight=derived, rest=IdentityQuantizer()).plan(FWD, BWD)
    keep = Cast("high_precision")
    assert keep.dtype is None
    assert casts(plan) == (
        MX,
        FP8_GRAD,
        Cast("high_precision", dtype=torch.bfloat16),
        MX,
        keep,
        keep,
    )
    assert plan.col_from_row == (False, True, False)
    assert plan.fast == (False, False, False)
    assert plan.y_row == keep and isinstance(plan.output, IdentityQuantizer)


def test_usages_of_the_factory_do_not_matter() -> None:
    row_only = MXFP8Quantizer(E4M3, columnwise=False)
    assert casts(by_type(rest=row_only).plan(FWD, BWD)) == (MX,) * 6
    assert row_only.get_usages() == {"rowwise": True, "columnwise": False}
    row_only.set_usage(columnwise=True)  # not frozen by the plan


def test_custom_delayed() -> None:
    request = DelayedScalingRequest(amax_history_len=8)
    plan = by_type(input=request, grad_output=request, rest=MXFP8Quantizer(E4M3)).plan(FWD, BWD)
    assert plan.delayed == (True, False, False, True, False)
    assert plan.update is DelayedUpdate(0, 8, "max", None, True)
    assert (plan.x_row, plan.g_row, plan.w_row) == (FP8, FP8_GRAD, MX)
    assert plan.output is not None


def test_custom_delayed_must_agree_between_directions() -> None:
    recipe = by_type(
        input=DelayedScalingRequest(), grad_output=DelayedScalingRequest(margin=1),
        rest=MXFP8Quantizer(E4M3),
    )  # fmt: skip
    with pytest.raises(ValueError, match="requests for delayed scaling differ"):
        recipe.plan(FWD, BWD)


class Opaque(Quantizer):
    """A quantizer that does its own thing."""

    def __init__(self) -> None:
        super().__init__(rowwise=True, columnwise=True)

    def quantize_impl(self, tensor: Any, **kwargs: Any) -> Any:
        return tensor.round()


class Speaking(Opaque):
    def _casts(self) -> Any:
        return (MX if self.rowwise_usage else None, MX if self.columnwise_usage else None)


def test_a_users_quantizer_says_its_casts() -> None:
    with pytest.raises(TypeError, match="CustomRecipe, slot weight: Opaque .*implement _casts"):
        by_type(weight=Opaque(), rest=MXFP8Quantizer(E4M3)).plan(FWD, BWD)
    with pytest.raises(TypeError, match="implement _casts"):
        by_type(rest=hybrid(MXFP8Quantizer(E4M3), Opaque())).plan(FWD, BWD)
    assert casts(by_type(rest=Speaking()).plan(FWD, BWD)) == (MX,) * 6


def test_live_scales_do_not_fit_into_a_plan() -> None:
    live = Float8Quantizer(torch.ones(1), torch.zeros(1), E4M3)
    with pytest.raises(TypeError, match="slot input.*DelayedScalingRequest"):
        by_type(input=live, rest=MXFP8Quantizer(E4M3)).plan(FWD, BWD)


_TRANSFORMED = QParams(random_hadamard_transform=True)


@pytest.mark.parametrize(
    ("recipe", "product"),
    [
        (NVFP4BlockScaling(fp4_quant_fwd_inp=QParams()), "wgrad"),
        (NVFP4BlockScaling(fp4_quant_bwd_grad=QParams()), "wgrad"),
        (NVFP4BlockScaling(fp4_quant_fwd_weight=_TRANSFORMED), "dgrad"),
    ],
)
def test_half_a_hadamard_transform_is_refused(recipe: Recipe, product: str) -> None:
    with pytest.raises(ValueError, match=f"{product} multiplies.*Hadamard transforms differ"):
        recipe.plan()
    # Without a quantized backward nothing is multiplied.
    recipe.replace(backward_override="high_precision").plan()


def test_what_multiplies_nothing_has_any_transforms() -> None:
    plan = CustomRecipe(qfactory=nvfp4_factory).plan((None, None, FWD[0]), (None, None))
    assert plan.w_col.transforms and plan.y_row.format_name == "nvfp4"


def test_wrong_numbers_of_roles() -> None:
    with pytest.raises(ValueError, match="roles: got 2 for 3"):
        MXFP8BlockScaling().plan(FWD[:2], BWD)
