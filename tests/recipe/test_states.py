"""RecipeState makes the quantizers that the contract lists, slot by slot."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from minifloat import (
    DType,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from minifloat.recipe import (
    CustomRecipe,
    CustomRecipeState,
    DelayedScaling,
    DelayedScalingRecipeState,
    DelayedScalingRequest,
    Float8BlockScaling,
    Float8BlockScalingRecipeState,
    Float8CurrentScaling,
    Float8CurrentScalingRecipeState,
    Format,
    MXFP8BlockScaling,
    MXFP8BlockScalingRecipeState,
    NVFP4BlockScaling,
    NVFP4BlockScalingRecipeState,
    QParams,
    QuantizerRole,
    Recipe,
    RecipeError,
    RecipeState,
)

from .cases import mxfp8_everywhere

E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2
FORWARD, BACKWARD = ("input", "weight", "output"), ("grad_output", "grad_input")


def make(recipe: Recipe, mode: str, n: int, roles: Any = None) -> list[Any]:
    state = RecipeState.create(recipe, mode=mode, num_quantizers=n, device="cpu", roles=roles)
    return state.make_quantizers()


def linear(*tensor_types: str, module_type: str = "linear") -> list[QuantizerRole]:
    return [QuantizerRole(module_type, t) for t in tensor_types]


@pytest.mark.parametrize(
    "recipe, state",
    [
        (DelayedScaling(), DelayedScalingRecipeState),
        (Float8CurrentScaling(), Float8CurrentScalingRecipeState),
        (Float8BlockScaling(), Float8BlockScalingRecipeState),
        (MXFP8BlockScaling(), MXFP8BlockScalingRecipeState),
        (NVFP4BlockScaling(), NVFP4BlockScalingRecipeState),
        (CustomRecipe(mxfp8_everywhere), CustomRecipeState),
    ],
)
def test_create_picks_the_class(recipe: Recipe, state: type[RecipeState]) -> None:
    made = RecipeState.create(recipe, mode="forward", num_quantizers=3, device="cpu")
    assert type(made) is state
    assert (made.recipe, made.mode, made.num_quantizers) == (recipe, "forward", 3)
    assert made.device == torch.device("cpu")


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="recipe: got Recipe"):
        RecipeState.create(Recipe(), mode="forward")
    with pytest.raises(ValueError, match="roles: got 1 for 2 quantizers"):
        RecipeState.create(MXFP8BlockScaling(), mode="forward", num_quantizers=2, roles=[None])
    for error in (ValueError, RuntimeError, AssertionError):
        with pytest.raises(error, match="mode: got 'sideways'"):
            RecipeState.create(MXFP8BlockScaling(), mode="sideways")


# ------------------------------------------------------------------------------------ delayed
@pytest.mark.parametrize(
    "fmt, mode, dtype",
    [
        (Format.HYBRID, "forward", E4M3),
        (Format.HYBRID, "backward", E5M2),
        (Format.E4M3, "forward", E4M3),
        (Format.E4M3, "backward", E4M3),
    ],
)
def test_delayed(fmt: Format, mode: str, dtype: DType) -> None:
    recipe = DelayedScaling(fp8_format=fmt, amax_history_len=5)
    state = RecipeState.create(recipe, mode=mode, num_quantizers=4, device="cpu")
    assert isinstance(state, DelayedScalingRecipeState)
    assert state.dtype == dtype
    assert torch.equal(state.scale, torch.ones(4)) and state.scale.dtype == torch.float32
    assert torch.equal(state.amax_history, torch.zeros(5, 4))
    made = state.make_quantizers()
    assert all(type(q) is Float8Quantizer and q.dtype == dtype for q in made)
    assert state.delayed_slots == (True,) * 4
    made[2](torch.full((4, 4), 3.0))
    assert state.amax_history[0].tolist() == [0, 0, 3, 0]
    state.scale[1] = 2.0
    assert made[1].scale.item() == 2.0 and made[1].scale.dim() == 0
    assert made[1].amax.shape == (1,)


def test_inherit_rebinds() -> None:
    recipe = DelayedScaling(amax_history_len=5)
    one = DelayedScalingRecipeState(recipe, mode="forward", num_quantizers=2, device="cpu")
    two = DelayedScalingRecipeState(recipe, mode="forward", num_quantizers=2, device="cpu")
    assert one._persistent_state_buffers == ("scale", "amax_history")
    assert two.inherit_state_from(one)
    assert two.scale is one.scale and two.amax_history is one.amax_history
    other = DelayedScalingRecipeState(recipe, mode="forward", num_quantizers=3, device="cpu")
    kept = other.scale
    assert not other.inherit_state_from(one) and other.scale is kept
    longer = DelayedScalingRecipeState(
        recipe.replace(amax_history_len=6), mode="forward", num_quantizers=2, device="cpu"
    )
    assert not longer.inherit_state_from(one)
    stateless = RecipeState.create(MXFP8BlockScaling(), mode="forward", device="cpu")
    assert not two.inherit_state_from(stateless) and not two.inherit_state_from(None)
    again = RecipeState.create(MXFP8BlockScaling(), mode="forward", device="cpu")
    assert again.inherit_state_from(stateless) and again._persistent_state_buffers == ()


# ---------------------------------------------------------------------------- current scaling
def test_current_scaling_takes_the_qparams_of_each_tensor() -> None:
    recipe = Float8CurrentScaling(
        use_power_2_scales=True,
        fp8_quant_fwd_inp=QParams(amax_epsilon=0.25),
        fp8_quant_bwd_grad=QParams(power_2_scale=True, amax_epsilon=0.5),
    )
    fwd, bwd = make(recipe, "forward", 6), make(recipe, "backward", 2)
    assert all(type(q) is Float8CurrentScalingQuantizer for q in fwd + bwd)
    assert [q.dtype for q in fwd] == [E4M3] * 6 and [q.dtype for q in bwd] == [E5M2] * 2
    assert [q.force_pow_2_scales for q in fwd] == [False, True, False] * 2
    assert [q.amax_epsilon for q in fwd] == [0.25, 0.0, 0.25] * 2
    assert [(q.force_pow_2_scales, q.amax_epsilon) for q in bwd] == [(True, 0.5)] * 2


def test_roles_beat_positions_and_unknown_ones_do_not() -> None:
    recipe = Float8CurrentScaling(fp8_quant_fwd_weight=QParams(amax_epsilon=1))
    roles = [*linear("weight", "input", "qkv"), None, QuantizerRole(), *linear("weight")]
    made = make(recipe, "forward", 6, roles)
    assert [q.amax_epsilon for q in made] == [1, 0, 0, 0, 1, 1]


# -------------------------------------------------------------------------------------- mxfp8
@pytest.mark.parametrize("fmt, grad", [(Format.E4M3, E4M3), (Format.HYBRID, E5M2)])
def test_mxfp8(fmt: Format, grad: DType) -> None:
    fwd = make(MXFP8BlockScaling(fp8_format=fmt), "forward", 3)
    bwd = make(MXFP8BlockScaling(fp8_format=fmt), "backward", 2)
    assert all(type(q) is MXFP8Quantizer and not q.with_2d_quantization for q in fwd + bwd)
    assert [q.dtype for q in fwd + bwd] == [E4M3] * 3 + [grad] * 2


@pytest.mark.parametrize(
    "roles, expected",
    [
        (None, [False, True, False]),
        ([None, None, None], [False, True, False]),
        (linear(*FORWARD), [False, True, False]),
        (linear("weight", "weight", "input"), [True, True, False]),
        (linear(*FORWARD, module_type="grouped_linear"), [False, True, False]),
        (linear(*FORWARD, module_type="dpa"), [False, False, False]),
    ],
)
def test_mxfp8_tiles_of_weights(roles: Any, expected: list[bool]) -> None:
    recipe = MXFP8BlockScaling(enable_2d_quantization=True)
    assert [q.with_2d_quantization for q in make(recipe, "forward", 3, roles)] == expected
    assert not any(q.with_2d_quantization for q in make(recipe, "backward", 2))


# -------------------------------------------------------------------------------------- block
def test_block() -> None:
    fwd = make(Float8BlockScaling(), "forward", 3)
    bwd = make(Float8BlockScaling(), "backward", 2)
    made = fwd + bwd
    assert all(type(q) is Float8BlockQuantizer and q.force_pow_2_scales for q in made)
    assert all(q.rowwise_usage and q.columnwise_usage for q in made)
    assert [q.block_scaling_dim for q in made] == [1, 2, 1, 1, 1]
    assert [q.dtype for q in made] == [E4M3] * 5


def test_block_options() -> None:
    recipe = Float8BlockScaling(
        True, Format.HYBRID, 1, 1, 2, fp8_quant_fwd_weight=QParams(True, amax_epsilon=0.5)
    )
    fwd, bwd = make(recipe, "forward", 3), make(recipe, "backward", 2)
    assert [q.block_scaling_dim for q in fwd + bwd] == [1, 1, 1, 2, 2]
    assert [q.dtype for q in fwd + bwd] == [E4M3] * 3 + [E5M2] * 2
    assert [q.force_pow_2_scales for q in fwd + bwd] == [False, True, False, False, False]
    assert [q.amax_epsilon for q in fwd + bwd] == [0, 0.5, 0, 0, 0]


# -------------------------------------------------------------------------------------- nvfp4
def test_nvfp4() -> None:
    made = make(NVFP4BlockScaling(), "forward", 3) + make(NVFP4BlockScaling(), "backward", 2)
    assert all(type(q) is NVFP4Quantizer for q in made)
    assert [q.with_rht for q in made] == [True, False, True, True, True]
    assert [q.with_post_rht_amax for q in made] == [q.with_rht for q in made]
    assert [q.with_2d_quantization for q in made] == [False, True, False, False, False]
    assert [q.stochastic_rounding for q in made] == [False] * 3 + [True] * 2
    assert not any(q.row_scaled_nvfp4 or q.nvfp4_use_4over6 for q in made)


def test_nvfp4_row_scaled() -> None:
    recipe = NVFP4BlockScaling(disable_rht=True, row_scaled_activation=True)
    made = make(recipe, "forward", 3) + make(recipe, "backward", 2)
    assert [q.row_scaled_nvfp4 for q in made] == [True, False, True, False, False]


@pytest.mark.parametrize(
    "scope, over", [("all", [1, 1, 1]), ("weights", [0, 1, 0]), ("activations", [1, 0, 1])]
)
@pytest.mark.parametrize("use_256", ["all", "weights", "none"])
def test_nvfp4_4over6(scope: str, over: list[int], use_256: str) -> None:
    recipe = NVFP4BlockScaling(
        disable_rht=True,
        nvfp4_4over6=scope,
        nvfp4_4over6_e4m3_use_256=use_256,
        nvfp4_4over6_err_mode="MSE",
    )
    fwd, bwd = make(recipe, "forward", 3), make(recipe, "backward", 2)
    assert [q.nvfp4_use_4over6 for q in fwd] == [bool(o) for o in over]
    assert not any(q.nvfp4_use_4over6 for q in bwd)
    wide = {"all": [1, 1, 1], "weights": [0, 1, 0], "none": [0, 0, 0]}[use_256]
    small = [bool(o and w) for o, w in zip(over, wide, strict=True)]
    assert [q.nvfp4_e4m3_max == 256 for q in fwd] == small
    assert {q.nvfp4_4over6_err_mode for q in fwd} == {"MSE"}


@pytest.mark.parametrize(
    "recipe, message",
    [
        (NVFP4BlockScaling(nvfp4_4over6="all"), "nvfp4_4over6.*disable_rht=True"),
        (NVFP4BlockScaling(row_scaled_activation=True), "row_scaled_activation.*disable_rht=True"),
        (
            NVFP4BlockScaling(
                True, nvfp4_4over6="all", fp4_quant_fwd_inp=QParams(stochastic_rounding=True)
            ),
            "fp4_quant_fwd_inp",
        ),
    ],
)
def test_nvfp4_combinations_that_mean_nothing(recipe: Recipe, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        make(recipe, "forward", 3)


def test_nvfp4_4over6_of_weights_goes_with_the_transform() -> None:
    made = make(NVFP4BlockScaling(nvfp4_4over6="weights"), "forward", 3)
    assert [q.nvfp4_use_4over6 for q in made] == [False, True, False]


# ------------------------------------------------------------------------------------- custom
def test_custom_calls_the_factory_once_per_slot_with_its_role() -> None:
    seen: list[Any] = []

    def factory(role: Any) -> Any:
        seen.append(role)
        return IdentityQuantizer()

    roles = [*linear("input", "weight"), None]
    state = RecipeState.create(
        CustomRecipe(factory), mode="forward", num_quantizers=3, device="cpu", roles=roles
    )
    assert seen == []
    made = state.make_quantizers()
    assert seen == roles and len(made) == 3
    assert state.delayed_slots == (False,) * 3
    assert isinstance(state, CustomRecipeState) and not state._has_delayed_scaling
    assert state.amax_history is None and state.scale is None
    assert state._inner_delayed_scaling_recipe is None


def test_custom_without_roles_warns() -> None:
    seen: list[Any] = []

    def factory(role: Any) -> Any:
        seen.append(role)
        return IdentityQuantizer()

    with pytest.warns(UserWarning, match="get_quantizer_roles"):
        make(CustomRecipe(factory), "backward", 2)
    assert seen == [QuantizerRole()] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(CustomRecipe(factory), "backward", 2, [None, None])


@pytest.mark.parametrize(
    "answer, error, message",
    [
        (None, ValueError, "returned None for .*IdentityQuantizer"),
        (3, TypeError, "returned 3 for .*DelayedScalingRequest"),
    ],
)
def test_custom_bad_answers(answer: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(CustomRecipe(lambda role: answer), "forward", 1, linear("input"))


def delayed_for(*tensor_types: str, **request: Any) -> Any:
    def factory(role: Any) -> Any:
        asked = role is not None and role.tensor_type in tensor_types
        return DelayedScalingRequest(**request) if asked else MXFP8Quantizer(E4M3)

    return factory


def custom(factory: Any, mode: str = "forward", **kwargs: Any) -> CustomRecipeState:
    roles = linear(*(FORWARD if mode == "forward" else BACKWARD))
    return CustomRecipeState(
        CustomRecipe(factory), mode=mode, num_quantizers=len(roles), device="cpu", roles=roles
    )


def test_custom_delayed_requests_share_a_state() -> None:
    state = custom(delayed_for("input", "output", amax_history_len=7, margin=1))
    made = state.make_quantizers()
    assert [type(q) for q in made] == [Float8Quantizer, MXFP8Quantizer, Float8Quantizer]
    assert state.delayed_slots == (True, False, True) and state._has_delayed_scaling
    assert state.amax_history is not None and state.amax_history.shape == (7, 2)
    assert state.scale is not None and state.scale.shape == (2,)
    assert state._inner_delayed_scaling_recipe is DelayedScaling(1, amax_history_len=7)
    made[2](torch.full((2, 2), 5.0))
    assert state.amax_history[0].tolist() == [0, 5]
    assert made[0].dtype == E4M3
    (grad, _) = custom(delayed_for("grad_output"), "backward").make_quantizers()
    assert grad.dtype == E5M2


def test_custom_requests_must_be_equal() -> None:
    def factory(role: Any) -> Any:
        return DelayedScalingRequest(margin=1 if role.tensor_type == "weight" else 0)

    with pytest.raises(ValueError, match="requests for delayed scaling differ"):
        custom(factory).make_quantizers()


def test_custom_bad_requests_name_the_field() -> None:
    with pytest.raises(RecipeError, match="amax_history_len: got 0"):
        custom(delayed_for("input", amax_history_len=0)).make_quantizers()


def test_custom_inherits_the_inner_state() -> None:
    old = custom(delayed_for("input"))
    old.make_quantizers()
    new = custom(delayed_for("input"))
    assert new.inherit_state_from(old)
    (quantizer, *_) = new.make_quantizers()
    assert new.scale is old.scale and new.amax_history is old.amax_history
    assert quantizer.scale.data_ptr() == old.scale.data_ptr()
    fewer = custom(delayed_for("input", "weight"))
    assert fewer.inherit_state_from(old)
    fewer.make_quantizers()
    assert fewer.scale is not old.scale, "another number of columns"
    shorter = custom(delayed_for("input", amax_history_len=3))
    shorter.inherit_state_from(old)
    shorter.make_quantizers()
    assert shorter.amax_history is not old.amax_history
    again = old.amax_history
    old.make_quantizers()
    assert old.amax_history is again, "the same state makes quantizers again: it keeps what it has"
    plain = custom(mxfp8_everywhere)
    assert not plain.inherit_state_from(custom(mxfp8_everywhere))
    assert not plain.inherit_state_from(
        RecipeState.create(MXFP8BlockScaling(), mode="forward", device="cpu")
    )


# ------------------------------------------------------------------------ quantizer -> recipe
@pytest.mark.parametrize(
    "quantizer, recipe",
    [
        (Float8Quantizer(torch.ones(1), torch.zeros(1), E4M3), DelayedScaling),
        (Float8CurrentScalingQuantizer(E4M3), Float8CurrentScaling),
        (Float8BlockQuantizer(E4M3), Float8BlockScaling),
        (MXFP8Quantizer(E4M3), MXFP8BlockScaling),
        (NVFP4Quantizer(), NVFP4BlockScaling),
        (IdentityQuantizer(), CustomRecipe),
        (
            HybridQuantizer(
                rowwise_quantizer=MXFP8Quantizer(E4M3), columnwise_quantizer=IdentityQuantizer()
            ),
            CustomRecipe,
        ),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_compatible_recipes(quantizer: Any, recipe: type[Recipe]) -> None:
    assert quantizer._get_compatible_recipe() is recipe
