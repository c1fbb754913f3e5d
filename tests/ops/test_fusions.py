"""The table of fusions: which one appears where, and that it changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import minifloat
from minifloat import norms, ops
from minifloat import recipe as recipes
from minifloat.ops import OperationFuser
from minifloat.ops.fused.rows import BACKWARD, BOTH, FORWARD

from .cases import RECIPES, assert_same, mlp, step

BF16 = torch.bfloat16


@contextmanager
def unfused() -> Iterator[None]:
    """No fusion at all."""
    lists = (
        OperationFuser.forward_backward_fusion_functions,
        OperationFuser.forward_fusion_functions,
        OperationFuser.backward_fusion_functions,
    )
    kept = [list(x) for x in lists]
    for x in lists:
        x.clear()
    try:
        yield
    finally:
        for now, then in zip(lists, kept, strict=True):
            now[:] = then


@dataclass(frozen=True)
class Case:
    """A pipeline, and the classes of its operations as fused; backward's run from the end."""

    name: str
    make: Callable[[], list[Any]]
    forward: tuple[str, ...]
    backward: tuple[str, ...]
    recipe: str | None = None
    extra: int = 0
    rounds: bool = False  # fused, it rounds less often
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


def linear(bias: bool = True, dtype: torch.dtype = BF16) -> ops.Linear:
    return ops.Linear(32, 32, bias=bias, dtype=dtype)


CASES = (
    Case(
        "LinearBiasActivation",
        lambda: [linear(), ops.GELU()],
        ("ForwardLinearBiasActivation", "GELU"),
        ("GELU", "Bias", "BasicLinear"),
        rounds=True,
    ),
    Case(
        "no_LinearBiasActivation_in_fp32",
        lambda: [linear(dtype=torch.float32)],
        ("BasicLinear", "Bias"),
        ("Bias", "BasicLinear"),
    ),
    Case(
        "LinearBiasAdd",
        lambda: [linear(), ops.AddExtraInput(in_place=True)],
        ("ForwardLinearBiasAdd",),
        ("AddExtraInput", "Bias", "BasicLinear"),
        extra=1,
        rounds=True,
    ),
    Case(
        "LinearAdd_forward",
        lambda: [linear(bias=False), ops.AddExtraInput(in_place=True)],
        ("ForwardLinearBiasAdd",),
        ("AddExtraInput", "BasicLinear"),
        extra=1,
        rounds=True,
    ),
    Case(
        "no_LinearAdd_out_of_place",
        lambda: [linear(bias=False), ops.AddExtraInput()],
        ("BasicLinear", "AddExtraInput"),
        ("AddExtraInput", "BasicLinear"),
        extra=1,
    ),
    Case(
        "LinearScaleAdd",
        lambda: [linear(bias=False), ops.ConstantScale(0.5), ops.AddExtraInput(in_place=True)],
        ("ForwardLinearScaleAdd",),
        ("AddExtraInput", "BackwardLinearScale"),
        extra=1,
        rounds=True,
    ),
    Case(
        "LinearAdd_backward",
        lambda: [ops.GELU(), ops.MakeExtraOutput(in_place=True), linear(bias=False)],
        ("GELU", "MakeExtraOutput", "BasicLinear"),
        ("BackwardLinearAdd", "GELU"),
        rounds=True,
    ),
    Case(
        "ActivationBias",
        lambda: [linear(), ops.GELU(), ops.Identity(), linear(bias=False)],
        ("ForwardLinearBiasActivation", "GELU", "Identity", "BasicLinear"),
        ("BasicLinear", "Identity", "BackwardActivationBias", "BasicLinear"),
        recipe="mxfp8",
        rounds=True,
    ),
    Case(
        "ActivationBias_after_Quantize",
        lambda: [ops.Quantize(forward=False, backward=True), ops.Bias(32), ops.ReLU()],
        ("Quantize", "Bias", "ReLU"),
        ("BackwardActivationBias", "Quantize"),
        recipe="current",
    ),
    Case(
        "no_ActivationBias_without_recipe",
        lambda: [ops.Quantize(forward=False, backward=True), ops.Bias(32), ops.ReLU()],
        ("Quantize", "Bias", "ReLU"),
        ("ReLU", "Bias", "Quantize"),
    ),
    Case(
        "d_activation_quantize",
        lambda: [linear(bias=False), ops.SReLU(), ops.Identity(), linear(bias=False)],
        ("BasicLinear", "SReLU", "Identity", "BasicLinear"),
        ("BasicLinear", "Identity", "BackwardActivationQuantize", "BasicLinear"),
        recipe="delayed",
    ),
    Case(
        "activation_quantize",
        lambda: [ops.GELU(), linear(bias=False)],
        ("ForwardActivationQuantize", "BasicLinear"),
        ("BasicLinear", "GELU"),
        recipe="delayed",
    ),
    Case(
        "MLP",
        lambda: [linear(bias=False), ops.SReLU(), linear(bias=False)],
        ("FusedMLP",),
        ("FusedMLP",),
        recipe="delayed",
    ),
    Case(
        "MLP_whole",
        lambda: [linear(), ops.ReLU(), linear(), ops.AddExtraInput(in_place=True)],
        ("FusedMLP",),
        ("FusedMLP",),
        recipe="current",
        extra=1,
        rounds=True,
    ),
    Case(
        "MLP_and_more",
        lambda: [*(linear(bias=False), ops.SiLU()) * 2, linear(bias=False)],
        ("FusedMLP", "ForwardActivationQuantize", "BasicLinear"),
        ("BasicLinear", "BackwardActivationQuantize", "FusedMLP"),
        recipe="block",
    ),
    Case(
        "no_MLP_without_recipe",
        lambda: [linear(bias=False), ops.ReLU(), linear(bias=False)],
        ("BasicLinear", "ReLU", "BasicLinear"),
        ("BasicLinear", "ReLU", "BasicLinear"),
    ),
    Case(
        "no_MLP_for_a_cached_input",
        lambda: [linear(bias=False), ops.ReLU(cache_quantized_input=True), linear(bias=False)],
        ("BasicLinear", "ForwardActivationQuantize", "BasicLinear"),
        ("BasicLinear", "BackwardActivationQuantize", "BasicLinear"),
        recipe="mxfp8",
    ),
    Case(
        "no_MLP_for_override",
        lambda: [linear(bias=False), ops.ReLU(), linear(bias=False)],
        ("BasicLinear", "ReLU", "BasicLinear"),
        ("BasicLinear", "ReLU", "BasicLinear"),
        recipe="override",
    ),
    Case(
        "AddRMSNorm",
        lambda: [ops.MakeExtraOutput(), ops.RMSNorm(32, dtype=BF16)],
        ("MakeExtraOutput", "RMSNorm"),
        ("BackwardAddRMSNorm",),
        rounds=True,
    ),
    Case(
        "norm_quantize",
        lambda: [ops.LayerNorm(32, dtype=BF16), linear()],
        ("ForwardNormQuantize", "ForwardLinearBiasActivation"),
        ("Bias", "BasicLinear", "LayerNorm"),
        recipe="block",
        rounds=True,
    ),
    Case(
        "no_norm_quantize_for_override",
        lambda: [ops.RMSNorm(32, dtype=BF16), linear(bias=False)],
        ("RMSNorm", "BasicLinear"),
        ("BasicLinear", "RMSNorm"),
        recipe="override",
    ),
    Case(
        "quantize_hands_over",
        lambda: [ops.GELU(), ops.Quantize(), linear(bias=False)],
        ("GELU", "Quantize", "BasicLinear"),
        ("BasicLinear", "Quantize", "GELU"),
        recipe="mxfp8",
    ),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_which_fusion_appears_where(case: Case) -> None:
    recipe = RECIPES.get(case.recipe or "")
    if case.recipe == "override":
        recipe = recipes.Float8CurrentScaling(backward_override="high_precision")
    torch.manual_seed(4)
    model = ops.Sequential(*case.make())
    other = copy.deepcopy(model)
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    x = torch.randn(4, 8, 32).to(dtype)
    extra = [torch.randn(4, 8, 32).to(dtype) for _ in range(case.extra)]
    got = step(model, _without_leaves(model), x, recipe, *extra)
    fuser = model._module_groups[0]
    assert tuple(type(op).__name__ for op, _ in fuser._forward_ops) == case.forward
    assert tuple(type(op).__name__ for op, _ in fuser._backward_ops) == case.backward
    with unfused():
        expected = step(other, _without_leaves(other), x, recipe, *extra)
    for a, b in zip(expected, got, strict=True):
        if case.rounds:  # a sum is rounded once instead of twice: one code apart, or one ulp
            assert (a - b).norm() <= 0.02 * a.norm()
        else:
            assert torch.equal(a, b)


def _without_leaves(model: Any) -> Callable[..., Any]:
    """Extra inputs that may be written to."""
    return lambda x, *extra: model(x, *[t * 1.0 for t in extra])


def test_every_row_is_covered() -> None:
    seen = {name for case in CASES for name in (*case.forward, *case.backward)}
    seen.add("ForwardGroupedMLP")  # in test_grouped_linear.py
    assert {row.fused.__name__ for row in (*BOTH, *FORWARD, *BACKWARD)} <= seen  # type: ignore[attr-defined]


def test_the_functions_of_rows_are_on_their_classes() -> None:
    parts = [ops.BasicLinear(8, 8, dtype=BF16), ops.Bias(8, dtype=BF16)]
    (made,) = ops.ForwardLinearBiasActivation.fuse_forward_ops(parts)  # type: ignore[attr-defined]
    assert isinstance(made, ops.ForwardLinearBiasActivation)
    found = ops.BackwardActivationBias.fuse_backward_ops(  # type: ignore[attr-defined]
        [*parts, ops.GELU()], recipe=recipes.MXFP8BlockScaling()
    )
    assert [type(op) for op in found] == [ops.BasicLinear, ops.BackwardActivationBias]


@pytest.mark.parametrize("whole", [True, False], ids=["MLP", "parts"])
@pytest.mark.parametrize("name", RECIPES)
def test_hand_over_has_the_bits_of_separate_casts(
    name: str, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without biases, whose sum a fused product rounds once."""
    if not whole:
        monkeypatch.setattr(OperationFuser, "forward_backward_fusion_functions", [])
    fused, plain = mlp(BF16, bias=False), mlp(BF16, bias=False)
    for seed in range(2):
        x = torch.randn(5, 7, 32, generator=torch.Generator().manual_seed(seed)).to(BF16)
        got = step(fused, fused, x, RECIPES[name])
        with unfused():
            expected = step(plain, plain, x, RECIPES[name])
        for a, b in zip(expected, got, strict=True):
            assert torch.equal(a, b)
    there = [type(op).__name__ for op, _ in fused._module_groups[0]._forward_ops]
    parts = ["FusedMLP"] if whole else ["BasicLinear", "ForwardActivationQuantize", "BasicLinear"]
    assert there == ["ForwardNormQuantize", *parts]


FROZEN = (
    ("input",),
    ("input", "0.weight"),
    ("input", "0.weight", "1.basic_ops.0.weight"),  # no gradient passes the activation
    ("1.basic_ops.0.weight",),
    ("3.basic_ops.0.weight",),
    ("1.basic_ops.0.weight", "3.basic_ops.0.weight"),
    ("input", "0.weight", "3.basic_ops.0.weight"),
)


@pytest.mark.parametrize("frozen", FROZEN, ids=lambda names: "+".join(names))
@pytest.mark.parametrize("name", ["delayed", "mxfp8"])
def test_frozen_parts_of_an_mlp(name: str, frozen: tuple[str, ...]) -> None:
    models = mlp(BF16, bias=False), mlp(BF16, bias=False)
    for model in models:
        for key, p in model.named_parameters():
            p.requires_grad_(key not in frozen)
    x = torch.randn(5, 7, 32, generator=torch.Generator().manual_seed(0)).to(BF16)
    found = []
    for model, context in zip(models, (nullcontext, unfused), strict=True):
        given = x.clone().requires_grad_("input" not in frozen)
        with context(), minifloat.autocast(recipe=RECIPES[name]):
            y = model(given)
        y.backward(torch.linspace(-1, 1, y.numel()).reshape(y.shape).to(BF16))
        grads = {k: p.grad for k, p in (("input", given), *model.named_parameters())}
        assert {k for k, g in grads.items() if g is None} == set(frozen)
        found.append([y.detach(), *[g for g in grads.values() if g is not None]])
    there = [type(op).__name__ for op, _ in models[0]._module_groups[0]._forward_ops]
    assert there == ["ForwardNormQuantize", "FusedMLP"]
    for got, expected in zip(*found, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("first", [True, False], ids=["first", "second"])
def test_the_biases_of_an_mlp(first: bool) -> None:
    """Sums of the gradient: the first's comes out of the kernel that casts it."""
    models = mlp(BF16), mlp(BF16)
    x = torch.randn(5, 7, 32, generator=torch.Generator().manual_seed(0)).to(BF16)
    found = []
    for model, context in zip(models, (nullcontext, unfused), strict=True):
        frozen, kept = (model[3], model[1]) if first else (model[1], model[3])
        frozen.bias.requires_grad_(False)
        with context(), minifloat.autocast(recipe=RECIPES["current"]):
            y = model(x)
        y.backward(torch.linspace(-1, 1, y.numel()).reshape(y.shape).to(BF16))
        assert frozen.bias.grad is None
        found.append(kept.bias.grad.float())
    assert (found[0] - found[1]).norm() <= 0.02 * found[1].norm()


def test_an_mlp_under_torch_autocast() -> None:
    """Weights in fp32, everything else in bf16."""
    models = mlp(bias=False), mlp(bias=False)
    x = torch.randn(5, 7, 32, generator=torch.Generator().manual_seed(0))
    found = []
    for model, context in zip(models, (nullcontext, unfused), strict=True):
        with context(), torch.autocast("cpu", BF16):
            found.append(step(model, model, x, RECIPES["current"]))
    assert found[0][0].dtype is BF16
    for got, expected in zip(*found, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_an_mlp_is_repeated_by_a_checkpoint(name: str) -> None:
    models = mlp(BF16, bias=False), mlp(BF16, bias=False)
    x = torch.randn(5, 7, 32, generator=torch.Generator().manual_seed(0)).to(BF16)
    again = lambda x: minifloat.checkpoint(models[1], x)  # noqa: E731
    for _ in range(2):
        expected = step(models[0], models[0], x, RECIPES[name])
        for got, wanted in zip(step(models[1], again, x, RECIPES[name]), expected, strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("width", [32, 64])
def test_what_does_not_fit_is_not_fused(width: int) -> None:
    """An MLP whose second weight is of another width or dtype: errors, and casts, as ever."""
    dtype = BF16 if width == 64 else torch.float32
    model = ops.Sequential(
        ops.BasicLinear(32, 96, dtype=BF16), ops.SwiGLU(), ops.BasicLinear(width, 32, dtype=dtype)
    )
    with minifloat.autocast(recipe=RECIPES["mxfp8"]), pytest.raises(ValueError, match="op 2 of 3"):
        model(torch.randn(4, 32, dtype=BF16))


@pytest.mark.parametrize("name", RECIPES)
def test_a_norm_finds_the_amax_that_scales_its_cast(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One read of x for both, where the scale of the tensor comes of its own amax."""
    found = []

    def noted(which: str, original: Any) -> Any:
        def note(*args: Any, **how: Any) -> Any:
            found.append(which)
            return original(*args, **how)

        return note

    for which in ("norm_stats", "norm_stats_amax"):
        monkeypatch.setattr(norms, which, noted(which, getattr(norms, which)))
    model = mlp(BF16)
    step(model, model, torch.randn(4, 32, dtype=BF16), RECIPES[name])
    assert found == ["norm_stats_amax" if name in ("current", "custom") else "norm_stats"]


def test_fusing_follows_the_recipe() -> None:
    model = mlp(BF16)
    x = torch.randn(4, 32, dtype=BF16)
    fuser = model._module_groups[0]
    found = []
    for recipe in (None, recipes.MXFP8BlockScaling(), None):
        step(model, model, x, recipe)
        found.append([type(op).__name__ for op, _ in fuser._forward_ops])
    assert found[0] == found[2] != found[1]


class Doubled(ops.GELU):
    """A forward of its own."""

    def op_forward_compute(self, input_: Any, **kwargs: Any) -> tuple[Any, Any]:
        y, saved = super().op_forward_compute(input_, **kwargs)
        return 2 * y, saved


class Legacy(ops.GELU):
    """The legacy one of a split parent."""

    def op_forward(self, ctx: Any, input_: Any, **kwargs: Any) -> Any:
        return 2 * super().op_forward(ctx, input_, **kwargs)


class Stopped(ops.BasicLinear):
    """A backward of its own."""

    def op_backward(self, ctx: Any, grad_output: Any) -> tuple[Any, Any]:
        dx, grads = super().op_backward(ctx, grad_output)
        return dx * 0, grads


class Renamed(ops.GELU):
    """Computes as its parent does."""


def own(first: type[Any], act: type[Any]) -> ops.Sequential:
    torch.manual_seed(0)
    return ops.Sequential(first(32, 32, dtype=BF16), act(), ops.BasicLinear(32, 32, dtype=BF16))


def test_a_subclass_with_a_forward_or_a_backward_of_its_own_is_not_passed_by() -> None:
    recipe = RECIPES["mxfp8"]
    x = torch.randn(8, 32, dtype=BF16)

    def found(first: type[Any], act: type[Any]) -> list[Tensor]:
        model = own(first, act)
        return step(model, model, x, recipe)

    y, dx, *_ = plain = found(ops.BasicLinear, ops.GELU)
    for act in (Doubled, Legacy):
        assert torch.equal(found(ops.BasicLinear, act)[0], 2 * y)
    assert dx.any() and not found(Stopped, ops.GELU)[1].any()
    assert_same(plain, found(ops.BasicLinear, Renamed))
    model = own(ops.BasicLinear, Renamed)
    step(model, model, x, recipe)
    assert isinstance(model._module_groups[0]._forward_ops[0][0], ops.FusedMLP)


def test_nor_is_it_in_a_graph() -> None:
    model, x = own(ops.BasicLinear, Doubled), torch.randn(8, 32, dtype=BF16)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad(), minifloat.autocast(recipe=RECIPES["mxfp8"]):
        assert torch.equal(compiled(x), 2 * own(ops.BasicLinear, ops.GELU)(x))


@pytest.mark.parametrize("way", ["quantize", "__call__"])
def test_a_users_operation_may_hand_over(way: str) -> None:
    """`next_op_input_quantizer` quantizes for the next operation, whatever stands before it, and
    `prev_op_grad_output_quantizer` for the previous one."""

    def handed(y: Tensor, quantizer: Any) -> Any:
        return y if quantizer is None else getattr(quantizer, way)(y)

    class Doubles(ops.Identity):
        def op_forward_compute(
            self, input_: Any, *, next_op_input_quantizer: Any, **kwargs: Any
        ) -> tuple[Any, Any]:
            return handed(input_ * 2, next_op_input_quantizer), ()

        def op_forward_save_ctx(
            self, ctx: Any, input_: Any, tensors_to_save: Any, **kwargs: Any
        ) -> None:
            ctx.quantizer = kwargs["prev_op_grad_output_quantizer"]

        def op_backward(self, ctx: Any, grad_output: Any) -> Any:
            return handed(grad_output * 2, ctx.quantizer), ()

    torch.manual_seed(0)
    first, last = linear(bias=False), linear(bias=False)
    model = ops.Sequential(first, Doubles(), last)
    plain = ops.Sequential(first, ops.ConstantScale(2.0), last)
    x: Tensor = torch.randn(4, 8, 32, dtype=BF16)
    for recipe in (None, *RECIPES.values()):
        with minifloat.autocast(enabled=recipe is not None, recipe=recipe):
            assert torch.equal(model(x), plain(x))
    for name in ("current", "block", "mxfp8"):
        assert_same(step(plain, plain, x, RECIPES[name]), step(model, model, x, RECIPES[name]))
