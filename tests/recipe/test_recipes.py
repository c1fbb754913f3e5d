"""Recipes: the contract's fields, and values in every respect."""

from __future__ import annotations

import copy
import gc
import inspect
import json
import pickle
import subprocess
import sys
import weakref
from typing import Any

import pytest

import minifloat.recipe as recipe_module
from minifloat import opaque
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
    RecipeError,
)

from .cases import BUILT_IN, FWD, RECIPES, VALUES, most_recent, mxfp8_everywhere

# The contract: each constructor's parameters, in order, with their defaults.
FIELDS: dict[type[Recipe], dict[str, Any]] = {
    DelayedScaling: {
        "margin": 0,
        "fp8_format": Format.HYBRID,
        "amax_history_len": 1024,
        "amax_compute_algo": "max",
        "scaling_factor_compute_algo": None,
        "reduce_amax": True,
        "fp8_dpa": False,
        "fp8_mha": False,
        "backward_override": None,
    },
    Float8CurrentScaling: {
        "use_power_2_scales": False,
        "fp8_format": Format.HYBRID,
        "fp8_gemm_fprop": MMParams(False),
        "fp8_gemm_dgrad": MMParams(True),
        "fp8_gemm_wgrad": MMParams(True),
        "fp8_dpa": False,
        "fp8_mha": False,
        "backward_override": None,
    },
    MXFP8BlockScaling: {
        "margin": 0,
        "fp8_format": Format.E4M3,
        "fp8_dpa": False,
        "fp8_mha": False,
        "backward_override": None,
        "enable_2d_quantization": False,
    },
    Float8BlockScaling: {
        "use_f32_scales": False,
        "fp8_format": Format.E4M3,
        "x_block_scaling_dim": 1,
        "w_block_scaling_dim": 2,
        "grad_block_scaling_dim": 1,
        "fp8_gemm_fprop": MMParams(True),
        "fp8_gemm_dgrad": MMParams(True),
        "fp8_gemm_wgrad": MMParams(True),
        "fp8_dpa": False,
        "fp8_mha": False,
        "backward_override": None,
    },
    NVFP4BlockScaling: {
        "disable_rht": False,
        "disable_stochastic_rounding": False,
        "disable_2d_quantization": False,
        "row_scaled_activation": False,
        "nvfp4_4over6": "none",
        "nvfp4_4over6_e4m3_use_256": "all",
        "nvfp4_4over6_err_mode": "MAE",
        "fp4_format": Format.E2M1,
        "fp8_format": Format.E4M3,
        "fp8_dpa": False,
        "fp8_mha": False,
        "backward_override": None,
    },
    CustomRecipe: {
        "qfactory": inspect.Parameter.empty,
        "fp8_format": Format.HYBRID,
        "fp8_dpa": False,
        "fp8_mha": False,
        "backward_override": None,
        "quantization_alignment": 128,
    },
}


@pytest.mark.parametrize("cls", FIELDS)
def test_fields_order_and_defaults(cls: type[Recipe]) -> None:
    signature = {n: p.default for n, p in inspect.signature(cls).parameters.items()}
    expected = FIELDS[cls]
    assert list(signature)[: len(expected)] == list(expected)
    assert {n: signature[n] for n in expected} == expected
    # Beyond the contract there are only the QParams, and how DelayedScaling accumulates.
    more = {n: signature[n] for n in list(signature)[len(expected) :]}
    products = ["fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"]
    assert [n for n in more if "_quant_" not in n] == (products if cls is DelayedScaling else [])
    assert all(v is None for n, v in more.items() if "_quant_" in n)
    if cls is not CustomRecipe:
        made = cls()
        assert {n: getattr(made, n) for n in expected} == expected


@pytest.mark.parametrize(
    "cls, true",
    [
        (DelayedScaling, {"delayed", "float8_per_tensor_scaling"}),
        (Float8CurrentScaling, {"float8_current_scaling", "float8_per_tensor_scaling"}),
        (Float8BlockScaling, {"float8_block_scaling"}),
        (MXFP8BlockScaling, {"mxfp8"}),
        (NVFP4BlockScaling, {"nvfp4"}),
        (CustomRecipe, {"custom"}),
    ],
)
def test_predicates(cls: type[Recipe], true: set[str]) -> None:
    names = [
        "nvfp4", "mxfp8", "delayed", "float8_current_scaling", "float8_block_scaling", "custom",
        "float8_per_tensor_scaling",
    ]  # fmt: skip
    sub = type("Sub", (cls,), {})
    instance = cls(mxfp8_everywhere) if cls is CustomRecipe else cls()
    for owner in (cls, instance, sub):
        assert {n for n in names if getattr(owner, n)()} == true
    assert not any(getattr(Recipe, n)() for n in names)


# ------------------------------------------------------------------------------------- values
@pytest.mark.parametrize("recipe", VALUES, ids=lambda r: type(r).__name__)
def test_equal_by_content(recipe: Recipe) -> None:
    twin = type(recipe)(*recipe._key[1:])
    assert twin is recipe, "interned: a guard is a pointer compare"
    assert twin == recipe and hash(twin) == hash(recipe)
    assert sum(recipe == other for other in VALUES) == 1
    assert recipe != recipe._key


@pytest.mark.parametrize("recipe", VALUES, ids=lambda r: type(r).__name__)
def test_copies(recipe: Recipe) -> None:
    assert copy.copy(recipe) is recipe and copy.deepcopy([recipe])[0] is recipe
    assert pickle.loads(pickle.dumps(recipe)) is recipe
    assert eval(repr(recipe), vars(recipe_module)) is recipe
    text, names = recipe.__fx_repr__()
    assert eval(text, dict(names)) is recipe
    assert all(isinstance(named, type) for named in names.values())


@pytest.mark.parametrize("recipe", VALUES, ids=lambda r: type(r).__name__)
def test_json(recipe: Recipe) -> None:
    assert Recipe.from_json(recipe.to_json()) is recipe
    assert type(recipe).from_json(recipe.to_json(indent=1).encode()) is recipe
    data = recipe.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["recipe"] == type(recipe).__name__
    assert Recipe.from_dict(data) is recipe and data == recipe.to_dict()


def test_json_is_readable_and_lenient() -> None:
    assert MXFP8BlockScaling().to_dict() == {
        "recipe": "MXFP8BlockScaling",
        "margin": 0,
        "fp8_format": "E4M3",
        "fp8_dpa": False,
        "fp8_mha": False,
        "backward_override": None,
        "enable_2d_quantization": False,
    }
    assert Recipe.from_dict({"recipe": "DelayedScaling"}) is DelayedScaling()
    assert DelayedScaling.from_dict({"margin": 1}) is DelayedScaling(margin=1)


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: Recipe.from_dict({"recipe": "Nope"}), RecipeError, "recipe: got 'Nope'.*MXFP8"),
        (lambda: Recipe.from_dict({"margin": 1}), RecipeError, "recipe: got 'Recipe'.*MXFP8"),
        (lambda: Recipe.from_json("{}"), RecipeError, "recipe: got 'Recipe'.*MXFP8"),
        (lambda: Recipe.from_json("[1]"), TypeError, "text: got"),
        (
            lambda: MXFP8BlockScaling.from_json(DelayedScaling().to_json()),
            RecipeError,
            "MXFP8BlockScaling reads: MXFP8BlockScaling",
        ),
        (lambda: DelayedScaling.from_dict({"marginn": 1}), TypeError, "marginn"),
        (lambda: DelayedScaling.from_dict({"fp8_format": "E3"}), RecipeError, "fp8_format: got"),
        (lambda: CustomRecipe(mxfp8_everywhere).to_json(), TypeError, "qfactory"),
        (
            lambda: DelayedScaling(amax_compute_algo=most_recent).to_json(),
            TypeError,
            "amax_compute_algo",
        ),
        (
            lambda: DelayedScaling(scaling_factor_compute_algo=most_recent).to_dict(),
            TypeError,
            "scaling_factor_compute_algo",
        ),
    ],
)
def test_json_that_cannot_be(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
def test_immutable(recipe: Recipe) -> None:
    for name in (recipe._fields[0], "fp8_format", "backward_override", "brand_new"):
        with pytest.raises(AttributeError, match=rf"is a value.*replace\({name}="):
            setattr(recipe, name, 1)
        with pytest.raises(AttributeError, match="is a value"):
            delattr(recipe, name)


def test_repr_is_what_differs() -> None:
    assert repr(Float8CurrentScaling()) == "Float8CurrentScaling()"
    assert repr(DelayedScaling(3)) == "DelayedScaling(margin=3)"
    made = Float8CurrentScaling(fp8_gemm_dgrad=MMParams(False), fp8_format=Format.E4M3)
    assert repr(made) == (
        "Float8CurrentScaling(fp8_format=Format.E4M3, "
        "fp8_gemm_dgrad=MMParams(use_split_accumulator=False))"
    )


@pytest.mark.parametrize("cls", FIELDS)
def test_registered(cls: type[Recipe]) -> None:
    assert opaque.is_registered(cls) == opaque.AVAILABLE


def test_equal_in_another_process() -> None:
    code = (
        "import pickle, sys; from minifloat.recipe import *; "
        "r = pickle.loads(bytes.fromhex(sys.argv[1])); "
        "assert r is Float8CurrentScaling(True); print(r.to_json())"
    )
    sent = pickle.dumps(Float8CurrentScaling(True)).hex()
    out = subprocess.run([sys.executable, "-c", code, sent], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    assert Recipe.from_json(out.stdout) is Float8CurrentScaling(True)


def test_the_environment_is_not_read() -> None:
    given = {
        "NVTE_BACKWARD_OVERRIDE": "dequantized",
        "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": "1",
        "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1",
        "NVTE_NVFP4_DISABLE_RHT": "1",
    }
    code = (
        f"import os; os.environ.update({given}); from minifloat.recipe import *\n"
        "print([r().to_dict() for r in (Float8CurrentScaling, Float8BlockScaling, "
        "NVFP4BlockScaling)])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    made = [Float8CurrentScaling(), Float8BlockScaling(), NVFP4BlockScaling()]
    assert eval(out.stdout) == [r.to_dict() for r in made]


# ----------------------------------------------------------------------------------- replace
def test_replace() -> None:
    made = DelayedScaling().replace(margin=2, amax_history_len=4)
    assert made is DelayedScaling(margin=2, amax_history_len=4)
    assert DelayedScaling().margin == 0
    assert made.replace() is made
    with pytest.raises(TypeError, match="no field named 'nope'; fields: margin"):
        made.replace(nope=1)
    with pytest.raises(RecipeError, match="amax_history_len: got 0"):
        made.replace(amax_history_len=0)


QUANT = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")


@pytest.mark.parametrize("name", QUANT)
def test_a_flag_always_takes_effect(name: str) -> None:
    pow2, not_pow2 = QParams(power_2_scale=True), QParams()
    assert getattr(Float8CurrentScaling(), name) is not_pow2
    assert getattr(Float8CurrentScaling(use_power_2_scales=True), name) is pow2
    assert getattr(Float8CurrentScaling().replace(use_power_2_scales=True), name) is pow2
    assert getattr(Float8BlockScaling(), name) is pow2
    assert getattr(Float8BlockScaling(use_f32_scales=True), name) is not_pow2


@pytest.mark.parametrize("cls", [Float8CurrentScaling, Float8BlockScaling])
@pytest.mark.parametrize("name", QUANT)
def test_given_qparams_win(cls: Any, name: str) -> None:
    own = QParams(amax_epsilon=0.25)
    for made in (cls(**{name: own}), cls().replace(**{name: own})):
        assert getattr(made, name) is own
        for other in sorted(set(QUANT) - {name}):
            assert getattr(made, other) is getattr(cls(), other)
        assert Recipe.from_json(made.to_json()) is made
    flag = cls._fields[0]
    assert getattr(cls(**{name: own}).replace(**{flag: True}), name) is own


def test_qparams_that_follow_anyway_are_no_difference() -> None:
    pow2 = QParams(power_2_scale=True)
    made = Float8CurrentScaling(use_power_2_scales=True, fp8_quant_bwd_grad=pow2)
    assert made is Float8CurrentScaling(use_power_2_scales=True)


def test_nvfp4_qparams() -> None:
    made = NVFP4BlockScaling()
    assert made.fp4_quant_fwd_inp is QParams(random_hadamard_transform=True)
    assert made.fp4_quant_fwd_weight is QParams(fp4_2d_quantization=True)
    assert made.fp4_quant_bwd_grad is QParams(
        random_hadamard_transform=True, stochastic_rounding=True
    )
    plain = NVFP4BlockScaling(True, True, True)
    names = ("fp4_quant_fwd_inp", "fp4_quant_fwd_weight", "fp4_quant_bwd_grad")
    assert [getattr(plain, name) for name in names] == [QParams()] * 3
    own = made.replace(fp4_quant_fwd_weight=QParams())
    assert own.fp4_quant_fwd_weight is QParams()
    assert own.replace(disable_rht=True).fp4_quant_fwd_inp is QParams()


# -------------------------------------------------------------------------------- validation
def both(cls: type[Recipe], **kwargs: Any) -> Any:
    return lambda: cls(**kwargs)


@pytest.mark.parametrize(
    "make, message",
    [
        *((both(cls, fp8_format=Format.E5M2), "fp8_format: got Format.E5M2") for cls in BUILT_IN),
        *((both(cls, fp8_format=Format.E2M1), "fp8_format: got Format.E2M1") for cls in BUILT_IN),
        *((both(cls, backward_override="fp8"), "backward_override: got 'fp8'") for cls in BUILT_IN),
        (both(DelayedScaling, backward_override="dequantized"), "DelayedScaling allows None only"),
        (both(DelayedScaling, amax_compute_algo="mean"), "amax_compute_algo: got 'mean'"),
        (both(DelayedScaling, amax_history_len=0), "amax_history_len: got 0"),
        (both(DelayedScaling, margin=0.5), "margin: got 0.5"),
        (both(Float8BlockScaling, x_block_scaling_dim=3), "x_block_scaling_dim: got 3.*1, 2"),
        (both(Float8BlockScaling, x_block_scaling_dim=True), "x_block_scaling_dim: got True"),
        (both(Float8BlockScaling, x_block_scaling_dim=2), "x_block_.*w_block_.*both are 2"),
        (both(Float8BlockScaling, grad_block_scaling_dim=2), "w_block_.*grad_block_.*both"),
        (
            lambda: Float8BlockScaling(
                w_block_scaling_dim=1, x_block_scaling_dim=2, grad_block_scaling_dim=2
            ),
            "x_block_.*grad_block_.*both",
        ),
        *(
            (both(Float8BlockScaling, **{f"fp8_gemm_{n}": MMParams(False)}), f"fp8_gemm_{n}.*split")
            for n in ("fprop", "dgrad", "wgrad")
        ),
        (both(Float8BlockScaling, fp8_dpa=True), "fp8_dpa"),
        (both(Float8BlockScaling, fp8_mha=True), "fp8_mha"),
        (both(NVFP4BlockScaling, fp4_format=Format.E4M3), "fp4_format"),
        (both(NVFP4BlockScaling, fp8_format=Format.HYBRID), "fp8_format"),
        (both(NVFP4BlockScaling, nvfp4_4over6="some"), "nvfp4_4over6: got 'some'.*'weights'"),
        (both(NVFP4BlockScaling, nvfp4_4over6_e4m3_use_256=True), "nvfp4_4over6_e4m3_use_256"),
        (both(NVFP4BlockScaling, nvfp4_4over6_err_mode="L1"), "nvfp4_4over6_err_mode"),
        (
            both(NVFP4BlockScaling, fp4_quant_fwd_inp=QParams(power_2_scale=True)),
            "fp4_quant_fwd_inp: power_2_scale belongs to fp8",
        ),
        (
            both(Float8CurrentScaling, fp8_quant_bwd_grad=QParams(stochastic_rounding=True)),
            "fp8_quant_bwd_grad: stochastic_rounding belongs to fp4",
        ),
        (lambda: CustomRecipe(mxfp8_everywhere, quantization_alignment=0), "quantization_align"),
        (lambda: CustomRecipe(mxfp8_everywhere, quantization_alignment=-1), "quantization_align"),
        (lambda: CustomRecipe(mxfp8_everywhere, Format.E2M1), "fp8_format"),
        (lambda: CustomRecipe(mxfp8_everywhere, backward_override="x"), "backward_override"),
    ],
)
def test_bad_values(make: Any, message: str) -> None:
    for error in (ValueError, AssertionError):
        with pytest.raises(error, match=message):
            make()


@pytest.mark.parametrize(
    "make, message",
    [
        *(
            (both(cls, fp8_format="E4M3"), "fp8_format: got 'E4M3'.*Format.E4M3")
            for cls in BUILT_IN
        ),
        *((both(cls, fp8_dpa=1), "fp8_dpa: got 1") for cls in BUILT_IN if cls.delayed()),
        (both(Float8CurrentScaling, use_power_2_scales="yes"), "use_power_2_scales: got 'yes'"),
        (both(Float8CurrentScaling, fp8_gemm_fprop=True), "fp8_gemm_fprop: got True.*MMParams"),
        (both(Float8CurrentScaling, fp8_quant_fwd_inp={}), "fp8_quant_fwd_inp: got {}"),
        (both(DelayedScaling, scaling_factor_compute_algo="x"), "scaling_factor_compute_algo"),
        (both(DelayedScaling, margin="2"), "margin: got '2'"),
        (both(DelayedScaling, amax_history_len=4.0), "amax_history_len: got 4.0"),
        (both(MXFP8BlockScaling, enable_2d_quantization=None), "enable_2d_quantization"),
        (both(NVFP4BlockScaling, disable_rht=0), "disable_rht"),
        (both(NVFP4BlockScaling, nope=0), "nope"),
        (lambda: CustomRecipe(None), "qfactory: got None"),
        (lambda: CustomRecipe(), "qfactory"),
    ],
)
def test_bad_types(make: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()


@pytest.mark.parametrize("cls", [Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling])
@pytest.mark.parametrize("override", [None, "high_precision", "dequantized"])
def test_overrides(cls: Any, override: str | None) -> None:
    assert cls(backward_override=override).backward_override == override


def test_a_whole_margin() -> None:
    assert DelayedScaling(margin=2.0) is DelayedScaling(margin=2)


# ------------------------------------------------------------------- custom, user subclasses
def test_custom_recipes_are_themselves_only() -> None:
    one, other = CustomRecipe(mxfp8_everywhere), CustomRecipe(mxfp8_everywhere)
    assert one == one and one != other and len({one, other}) == 2
    assert copy.deepcopy(one) is one and copy.copy(one) is one
    again = pickle.loads(pickle.dumps(one))
    assert again != one and again.qfactory is mxfp8_everywhere
    assert one.replace(fp8_dpa=True).fp8_dpa and not one.fp8_dpa
    text, names = one.__fx_repr__()
    assert eval(text, dict(names)) is one


def test_custom_recipes_are_not_kept() -> None:
    class Factory:
        def __call__(self, role: Any) -> Any:
            return mxfp8_everywhere(role)

    factory = Factory()
    recipe = CustomRecipe(factory)
    recipe.plan(FWD, (None, None))
    gone = weakref.ref(factory)
    del recipe, factory
    gc.collect()
    assert gone() is None


class Mine(MXFP8BlockScaling):
    """A user's recipe, which nobody registered."""

    def describe(self) -> str:
        return f"mine, margin {self.margin}"


def test_a_users_subclass() -> None:
    made = Mine(margin=1, enable_2d_quantization=True)
    assert made.mxfp8() and made.describe() == "mine, margin 1"
    assert made is Mine(1, enable_2d_quantization=True)
    assert made != MXFP8BlockScaling(margin=1, enable_2d_quantization=True)
    assert pickle.loads(pickle.dumps(made)) is made and copy.deepcopy(made) is made
    assert Recipe.from_json(made.to_json()) is made
    assert type(made.replace(margin=0)) is Mine
    assert made.plan().replace(name="") is made.replace(margin=0).plan().replace(name="")
    assert made.plan().name == "Mine"


def test_functions_are_fields() -> None:
    made = DelayedScaling(amax_compute_algo=most_recent, scaling_factor_compute_algo=most_recent)
    assert made.amax_compute_algo is most_recent
    assert made == DelayedScaling(
        amax_compute_algo=most_recent, scaling_factor_compute_algo=most_recent
    )
    assert made != DelayedScaling(amax_compute_algo=most_recent)
    text, names = made.__fx_repr__()
    assert eval(text, dict(names)) is made


def test_delayed_scaling_accumulates_as_it_says() -> None:
    assert recipe_module.DelayedScaling().plan(None, None).fast == (True, False, False)
    fast = recipe_module.MMParams(use_split_accumulator=False)
    recipe = recipe_module.DelayedScaling(fp8_gemm_dgrad=fast, fp8_gemm_wgrad=fast)
    assert recipe.plan(None, None).fast == (True, True, True)
    assert recipe_module.Recipe.from_json(recipe.to_json()) == recipe
