"""Recipes and plans in compiled code: constants, guarded by value, in one graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from minifloat import dispatch
from minifloat.opaque import AVAILABLE, Value, register
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
    QuantizerRole,
    Recipe,
    available,
    current_scaling_factory,
    mxfp8_factory,
)

from .cases import BWD, FWD, RECIPES, most_recent, mxfp8_everywhere

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="this PyTorch has no opaque objects")


class State:
    recipe: Any = None


STATE = State()


class use:  # noqa: N801
    """What autocast does."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def __enter__(self) -> None:
        self.outer = STATE.recipe
        STATE.recipe = self.recipe

    def __exit__(self, *error: object) -> None:
        STATE.recipe = self.outer


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    STATE.recipe = None
    yield
    STATE.recipe = None


def compiled(fn: Callable[..., Any]) -> tuple[Callable[..., Any], Any]:
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(fn, fullgraph=True, backend=counter), counter


def layer(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    """Everything a module reads of a plan, from constants only."""
    plan = STATE.recipe.plan(
        (("linear", "input", "fc"), ("linear", "weight", "fc"), None),
        (("linear", "grad_output", "fc"), None),
    )
    out = []
    if plan.fast[0] and not plan.override:
        x = x * 2
    if plan.update is not None:
        out.append(x * plan.update.margin + plan.update.history_len)
        if plan.update.amax_algo == "max":
            out.append(x + 1)
    if plan.delayed[0]:
        out += dispatch.quantize_scaled(
            x, torch.ones(()), torch.zeros(1), plan.x_row, row=True, col=plan.delayed[1]
        )
    else:
        seed = torch.tensor([1, 2])
        out += dispatch.quantize(x, plan.x_row, plan.x_col)
        out += dispatch.quantize(w, plan.w_row, None)
        out += dispatch.quantize(x, plan.g_row, plan.g_col, seed=seed)
    if plan.output is not None and plan.requantizes:
        out.append(x + len(plan.name))
    return out


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(32, 64, dtype=torch.bfloat16), torch.randn(16, 64, dtype=torch.bfloat16)


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
def test_a_plan_in_compiled_code(recipe: Recipe) -> None:
    STATE.recipe = recipe
    x, w = tensors()
    fn, counter = compiled(layer)
    assert same(fn(x, w), layer(x, w))
    assert counter.frame_count == 1


def test_one_graph_per_value() -> None:
    x, w = tensors()
    fn, counter = compiled(layer)
    for make, graphs in [
        (lambda: Float8CurrentScaling(), 1),
        (lambda: Float8CurrentScaling(use_power_2_scales=False), 1),
        (lambda: MXFP8BlockScaling(), 2),
        (lambda: Float8CurrentScaling(use_power_2_scales=True), 3),
        (lambda: Float8CurrentScaling(), 3),
        (lambda: CustomRecipe(mxfp8_everywhere), 4),
        (lambda: CustomRecipe(mxfp8_everywhere), 5),
    ]:
        STATE.recipe = make()
        assert same(fn(x, w), layer(x, w))
        assert counter.frame_count == graphs


MADE_INSIDE: list[Callable[[], Recipe]] = [
    lambda: DelayedScaling(),
    lambda: Float8CurrentScaling(),
    lambda: Float8BlockScaling(),
    lambda: MXFP8BlockScaling(),
    lambda: NVFP4BlockScaling(),
    lambda: CustomRecipe(mxfp8_factory),
    lambda: DelayedScaling(2, Format.E4M3, amax_history_len=4, amax_compute_algo="most_recent"),
    lambda: DelayedScaling(amax_compute_algo=most_recent),
    lambda: Float8CurrentScaling(True, fp8_format=Format.E4M3, backward_override="dequantized"),
    lambda: Float8CurrentScaling(fp8_gemm_fprop=MMParams(use_split_accumulator=True)),
    lambda: Float8CurrentScaling(fp8_quant_fwd_inp=QParams(True, amax_epsilon=0.5)),
    lambda: Float8CurrentScaling().replace(use_power_2_scales=True),
    lambda: Float8BlockScaling(use_f32_scales=True, grad_block_scaling_dim=1),
    lambda: MXFP8BlockScaling(enable_2d_quantization=True, fp8_format=Format.HYBRID),
    lambda: NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True),
    lambda: CustomRecipe(qfactory=current_scaling_factory, quantization_alignment=64),
]


@pytest.mark.parametrize("make", MADE_INSIDE, ids=lambda make: type(make()).__name__)
def test_a_recipe_made_in_compiled_code(make: Callable[[], Recipe]) -> None:
    def step(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        with use(make()):
            return layer(x, w)

    x, w = tensors()
    fn, counter = compiled(step)
    assert same(fn(x, w), step(x, w))
    assert counter.frame_count == 1 and STATE.recipe is None


def test_nested_recipes_one_graph() -> None:
    STATE.recipe = MXFP8BlockScaling()

    def step(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        out = layer(x, w)
        with use(Float8CurrentScaling()):
            out += layer(x, w)
            with use(NVFP4BlockScaling(disable_stochastic_rounding=True)):
                out += layer(x, w)
        return out + layer(x, w)

    x, w = tensors()
    fn, counter = compiled(step)
    assert same(fn(x, w), step(x, w))
    assert counter.frame_count == 1


def by_tensor_type(role: QuantizerRole | None) -> Any:
    """A factory that reads its role."""
    if role is not None and role.tensor_type == "weight":
        return mxfp8_factory(role)
    return current_scaling_factory(role)


def test_two_custom_recipes_one_graph() -> None:
    outer, inner = CustomRecipe(by_tensor_type), CustomRecipe(mxfp8_factory)

    def step(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        with use(outer):
            out = layer(x, w)
            with use(inner):
                out += layer(x, w)
            return out + layer(x, w)

    x, w = tensors()
    fn, counter = compiled(step)
    assert same(fn(x, w), step(x, w))
    assert same(fn(x, w), step(x, w))
    assert counter.frame_count == 1
    assert outer.plan((*FWD[:2], None), (BWD[0], None)).w_row.format_name == "mxfp8_e4m3"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
def test_fields_and_predicates(recipe: Recipe) -> None:
    STATE.recipe = recipe

    def read(x: torch.Tensor) -> torch.Tensor:
        r = STATE.recipe
        if r.fp8_dpa or r.fp8_mha or r.backward_override == "dequantized":
            x = x + 1
        if r.mxfp8():
            return x * (2 if r.enable_2d_quantization else 3)
        if r.nvfp4():
            return x * (4 if r.fp4_quant_fwd_weight.fp4_2d_quantization else 5)
        if r.float8_current_scaling():
            return x * (6 if r.fp8_quant_fwd_inp.power_2_scale else 7)
        if r.float8_block_scaling():
            return x * (8 if r.fp8_gemm_fprop.use_split_accumulator else 9)
        if r.delayed():
            return x * r.amax_history_len + r.margin
        return x * r.quantization_alignment if r.custom() and isinstance(r, Recipe) else x

    x = torch.randn(4)
    fn, _ = compiled(read)
    assert torch.equal(fn(x), read(x))


def test_availability_is_a_constant() -> None:
    def ask(x: torch.Tensor) -> torch.Tensor:
        for native in (
            available.is_fp8_available(),
            available.is_mxfp8_available(),
            available.is_nvfp4_available(),
            available.is_fp8_block_scaling_available(),
        ):
            x = x * 2 if native else x + 1
        native, reason = available.is_mxfp8_available(return_reason=True)
        x = x + len(reason)
        recipe = available.get_default_recipe()
        with use(recipe):
            available.check_recipe_support(STATE.recipe)
            x = x * available.get_align_size_for_quantization(STATE.recipe)
            plan = STATE.recipe.plan(FWD, BWD)
        x = x / available.get_fp8_max(recipe) / available.get_fp8_max(recipe, False)
        y = x.to(available.get_fp8_torch_dtype(recipe)).float() * plan.x_row.scale_max
        return y + int(available.get_fp8_te_dtype(recipe, fprop_tensor=False))

    x = torch.randn(4)
    fn, counter = compiled(ask)
    assert torch.equal(fn(x), ask(x))
    assert counter.frame_count == 1


def test_the_default_recipe_may_stay() -> None:
    def keep(x: torch.Tensor) -> torch.Tensor:
        STATE.recipe = available.get_default_recipe()
        return x + 1

    fn, _ = compiled(keep)
    fn(torch.ones(2))
    assert STATE.recipe is available.get_default_recipe()


def test_alignment_of_a_custom_recipe() -> None:
    STATE.recipe = CustomRecipe(mxfp8_everywhere, quantization_alignment=48)
    fn, _ = compiled(lambda x: x * available.get_align_size_for_quantization(STATE.recipe))
    assert torch.equal(fn(torch.ones(2)), torch.full((2,), 48.0))


# --------------------------------------------------------------- a plan as an operator's argument
class Holder(Value):
    """A value of values: printing it must name every class inside."""

    _fields = ("plan", "more")


register(Holder, real=("plan", "more", "_key", "__eq__"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
def test_values_in_values_are_printed_with_their_classes(recipe: Recipe) -> None:
    plan = recipe.plan(FWD, BWD)
    holder = Holder(plan, (1, (plan.x_row, None), float("inf"), Format.E4M3))
    text, names = holder.__fx_repr__()
    assert {"Holder", "Plan", "Cast", "Format"} <= set(names)
    assert eval(text, {"torch": torch, **names}) is holder


def test_classes_of_one_name_cannot_be_told_apart() -> None:
    impostor = type("Holder", (Value,), {"_fields": ("x",)})
    with pytest.raises(TypeError, match="two classes named 'Holder'"):
        Holder(impostor(1), ()).__fx_repr__()


class Scale(torch.autograd.Function):
    """A plan as a plain argument of an autograd.Function, kept for backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, plan: Any) -> torch.Tensor:  # type: ignore[override]
        ctx.plan = plan
        return x * (2 if plan.fast[0] else 3)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        row = dispatch.quantize(grad, ctx.plan.g_row, None)[0]
        return grad * (1 + row.shape[0]), None


@pytest.mark.parametrize(
    "recipe", [Float8CurrentScaling(), MXFP8BlockScaling()], ids=lambda r: type(r).__name__
)
def test_a_plan_goes_through_autograd(recipe: Recipe) -> None:
    STATE.recipe = recipe

    def step(x: torch.Tensor) -> torch.Tensor:
        return Scale.apply(x, STATE.recipe.plan(FWD, BWD))

    grads = []
    for fn in (step, compiled(step)[0]):
        x = torch.ones(32, 32, requires_grad=True)
        fn(x).sum().backward()
        grads.append(x.grad)
    assert torch.equal(grads[0], grads[1])
