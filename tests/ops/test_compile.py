"""Pipelines are one graph, forward and backward, with the bits of eager."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import minifloat
from minifloat import ops
from minifloat import recipe as recipes

from .cases import (
    CASES,
    RECIPES,
    Case,
    Counter,
    assert_same,
    compiled_like_eager,
    inputs,
    made,
    mlp,
    step,
)
from .test_fuser import Twice, fuse_scales, residual
from .test_styles import LegacyGELU, OldSquare, Square

BF16 = torch.bfloat16
DEEP = pytest.mark.deep
QUICK = ("BasicLinear", "Quantize", "AddExtraInput", "MakeExtraOutput", "Identity", "ScaledSwiGLU")
ALONE = [pytest.param(c, id=c.name, marks=[] if c.name in QUICK else DEEP) for c in CASES]


def data(*shape: int, steps: int = 2, dtype: torch.dtype = torch.float32) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(shape, generator=generator).to(dtype)] for _ in range(steps)]


def as_is(model: Any) -> Any:
    return model


@pytest.mark.parametrize("case", ALONE)
def test_an_operation_alone(case: Case) -> None:
    compiled_like_eager(made(case), as_is, [inputs(case, seed) for seed in range(2)])


@DEEP
@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_operation_alone_under_a_recipe(case: Case) -> None:
    recipe = recipes.Float8CurrentScaling()
    compiled_like_eager(made(case), as_is, [inputs(case, seed) for seed in range(2)], recipe)


@pytest.mark.parametrize("name", RECIPES)
def test_the_mlp(name: str) -> None:
    compiled_like_eager(mlp(), as_is, data(3, 7, 32), RECIPES[name])


def inside(recipe: recipes.Recipe) -> Callable[[Any], Callable[..., Any]]:
    def of(model: Any) -> Callable[..., Any]:
        def run(x: Tensor) -> Any:
            with minifloat.autocast(recipe=recipe):
                return model(x)

        return run

    return of


def block(dtype: torch.dtype) -> ops.Sequential:
    """Everything of a transformer's block but attention: two branches with residuals."""
    torch.manual_seed(6)
    return ops.Sequential(
        ops.MakeExtraOutput().set_extra_output_channel(0, "x", output_to_caller=False),
        ops.LayerNorm(32, dtype=dtype),
        ops.Linear(32, 32, dtype=dtype),
        ops.Dropout(0.25),
        ops.AddExtraInput().set_extra_input_channel(0, "x"),
        ops.MakeExtraOutput(in_place=True).set_extra_output_channel(0, "y", output_to_caller=False),
        ops.RMSNorm(32, dtype=dtype),
        ops.Linear(32, 64, dtype=dtype),
        ops.GELU(),
        ops.Linear(64, 32, bias=False, dtype=dtype),
        ops.ConstantScale(0.5),
        ops.AddExtraInput(in_place=True).set_extra_input_channel(0, "y"),
    )


@DEEP
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_a_block(name: str, dtype: torch.dtype) -> None:
    compiled_like_eager(block(dtype), as_is, data(4, 8, 32, dtype=dtype), RECIPES[name])


@DEEP
@pytest.mark.parametrize("name", RECIPES)
def test_autocast_inside(name: str) -> None:
    compiled_like_eager(mlp(BF16), inside(RECIPES[name]), data(3, 7, 32, dtype=BF16))


@DEEP
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("bias", [False, True])
def test_bf16(name: str, bias: bool) -> None:
    compiled_like_eager(mlp(BF16, bias), as_is, data(5, 32, dtype=BF16), RECIPES[name])


@DEEP
@pytest.mark.parametrize("name", RECIPES)
def test_our_checkpoint(name: str) -> None:
    def of(model: Any) -> Callable[..., Any]:
        return lambda x: minifloat.checkpoint(model, x)

    compiled_like_eager(mlp(), of, data(3, 7, 32), RECIPES[name])


@DEEP
@pytest.mark.parametrize("name", [*RECIPES, "none"])
def test_any_number_of_tokens(name: str) -> None:
    """One graph for the first, one for all others; block scaling has one for fewer than 128."""
    sizes = (17, 18, 40, 40, 100)
    given = [data(n, 32, steps=1)[0] for n in sizes]
    compiled_like_eager(mlp(), as_is, given, RECIPES.get(name), graphs=2)


def test_two_recipes_in_one_graph() -> None:
    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = ops.Sequential(ops.RMSNorm(32), ops.BasicLinear(32, 32))
            self.b = ops.Sequential(ops.GELU(), ops.BasicLinear(32, 32))

        def forward(self, x: Tensor) -> Any:
            with minifloat.autocast(recipe=recipes.MXFP8BlockScaling()):
                x = self.a(x)
                with minifloat.autocast(recipe=recipes.DelayedScaling()):
                    x = self.b(x)
                with minifloat.autocast(enabled=False):
                    x = self.b(x)
                return self.a(x)

    compiled_like_eager(Both(), as_is, data(3, 7, 32))


@DEEP
@pytest.mark.parametrize("dynamic", [None, True])
def test_torch_autocast(dynamic: bool | None) -> None:
    def of(model: Any) -> Callable[..., Any]:
        def run(x: Tensor) -> Any:
            with torch.autocast("cpu", BF16):
                return model(x).float()

        return run

    recipe = recipes.Float8CurrentScaling()
    graphs = 2 if dynamic else 1  # PyTorch starts over, to make constants of numbers
    compiled_like_eager(mlp(), of, data(3, 7, 32), recipe, graphs, dynamic=dynamic)


@DEEP
@pytest.mark.parametrize("first", [ops.SiLU, ops.L2Normalization, ops.Identity])
def test_dynamic_before_a_width_is_known(first: Any) -> None:
    model = ops.Sequential(first(), ops.Linear(32, 48, device="cpu"))
    recipe = recipes.Float8CurrentScaling()
    compiled_like_eager(model, as_is, data(3, 7, 32), recipe, 2, dynamic=True)


@pytest.mark.parametrize("name", [pytest.param("delayed", marks=DEEP), "none"])
def test_without_gradients(name: str) -> None:
    model = mlp()
    other = copy.deepcopy(model)
    torch._dynamo.reset()
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 7, 32)
    recipe = RECIPES.get(name)
    with torch.no_grad(), minifloat.autocast(enabled=recipe is not None, recipe=recipe):
        assert torch.equal(model(x), compiled(x))
    for p in (*model.parameters(), *other.parameters()):
        p.requires_grad_(False)
    with minifloat.autocast(enabled=recipe is not None, recipe=recipe):
        assert torch.equal(model(x), compiled(x))


@DEEP
def test_frozen_parts() -> None:
    model = mlp()
    model[1].requires_grad_(False)
    compiled_like_eager(model, as_is, data(3, 7, 32), recipes.Float8CurrentScaling())
    model.requires_grad_(True)
    model.zero_grad()
    model[0].requires_grad_(False)
    other = copy.deepcopy(model)
    torch._dynamo.reset()
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 7, 32)
    for call in (model, compiled):
        call(x).sum().backward()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert (p.grad is None and q.grad is None) or torch.equal(p.grad, q.grad)


def test_channels() -> None:
    compiled_like_eager(residual(), as_is, data(3, 8))


class HandsOn(ops.Identity):
    """Returns what an operator returns as it got it."""

    def op_forward_compute(self, input_: Any, **kwargs: Any) -> tuple[Any, Any]:
        return input_.sin().to(input_.dtype), (input_,)

    def op_forward_save_ctx(
        self, ctx: Any, input_: Any, tensors_to_save: Any, **kwargs: Any
    ) -> None:
        ctx.save_for_backward(*tensors_to_save)

    def op_backward(self, ctx: Any, grad_output: Any) -> tuple[Any, Any]:
        return grad_output * ctx.saved_tensors[0].cos(), ()


@pytest.mark.parametrize("last", [HandsOn, ops.MakeExtraOutput])
def test_outputs_that_are_other_tensors(last: Any) -> None:
    """Which lost their gradients in graphs of 2.11."""
    model = ops.Sequential(ops.GELU(), last())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = []
    for call in (model, compiled):
        x = torch.linspace(-2, 2, 24).reshape(3, 8).requires_grad_()
        made = call(x)
        outputs = made if isinstance(made, tuple) else (made,)
        torch.autograd.backward(outputs, [(i + 1) * t.detach() for i, t in enumerate(outputs)])
        assert x.grad is not None
        found.append([*outputs, x.grad])
    assert_same(*found)


@pytest.mark.parametrize("width", [pytest.param(15, marks=DEEP), 16])
def test_dropout(width: int) -> None:
    model = ops.Sequential(ops.ConstantScale(2.0), ops.Dropout(0.5))
    compiled_like_eager(model, as_is, data(8, width, dtype=BF16))


@DEEP
def test_main_grad() -> None:
    layer = ops.Linear(32, 32, accumulate_into_main_grad=True)
    other = copy.deepcopy(layer)
    for m in (layer, other):
        m.weight.main_grad = torch.full((32, 32), 0.5)
    torch._dynamo.reset()
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    for (x,) in data(5, 32):
        recipe = recipes.Float8CurrentScaling()
        assert_same(step(layer, layer, x, recipe), step(other, compiled, x, recipe))
    assert torch.equal(layer.weight.main_grad, other.weight.main_grad)


# -------------------------------------------------------------------------------- users' operations
def test_a_users_split_operation() -> None:
    model = ops.Sequential(ops.RMSNorm(32), Square(), ops.Linear(32, 32))
    compiled_like_eager(model, as_is, data(3, 7, 32), recipes.Float8CurrentScaling())


@pytest.fixture(params=["forward", "backward", "forward_backward"])
def registered(request: pytest.FixtureRequest) -> Iterator[str]:
    functions = getattr(ops.OperationFuser, f"{request.param}_fusion_functions")
    getattr(ops, f"register_{request.param}_fusion")(fuse_scales)
    yield request.param
    functions.remove(fuse_scales)


def test_a_users_fusion(registered: str) -> None:
    model = ops.Sequential(ops.ConstantScale(2.0), ops.ConstantScale(0.75), ops.Bias(8))
    compiled_like_eager(model, as_is, data(3, 8))
    fuser = model._module_groups[0]
    found = {"forward": fuser._forward_ops[0][0], "backward": fuser._backward_ops[-1][0]}
    for direction, op in found.items():
        assert isinstance(op, Twice) == (direction in registered.split("_"))
    if registered == "backward":
        return
    seen: list[str] = []

    def look(module: Any, inputs: Any) -> Any:
        seen.append(module.print_readable(print_output=False))
        return module

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=look, fullgraph=True)(torch.ones(3, 8))
    assert "1.5" in seen[0] and "0.75" not in seen[0]  # the graph multiplies once


@pytest.mark.parametrize("cls", [OldSquare, LegacyGELU])
def test_a_legacy_operation_that_dynamo_follows(cls: Any) -> None:
    model = ops.Sequential(ops.RMSNorm(32), cls(), ops.Linear(32, 32))
    compiled_like_eager(model, as_is, data(3, 7, 32), recipes.Float8CurrentScaling())


class Prints(ops.Identity):
    """Cannot be traced: it asks the outside."""

    def op_forward(self, ctx: Any, input_: Any, **kwargs: Any) -> Any:
        torch._dynamo.graph_break()
        return input_ * 1.5

    def op_backward(self, ctx: Any, grad_output: Any) -> tuple[Any, Iterable[Any]]:
        return grad_output * 1.5, ()


def test_a_legacy_operation_breaks_the_graph_around_itself() -> None:
    model = ops.Sequential(ops.RMSNorm(32), ops.BasicLinear(32, 32), Prints(), ops.Linear(32, 32))
    recipe = recipes.Float8CurrentScaling()
    # Before it, after it, what it does itself, and the front of the pipeline without an operation.
    compiled_like_eager(model, as_is, data(3, 7, 32), recipe, graphs=4, fullgraph=False)
    torch._dynamo.reset()
    found: list[list[str]] = []

    def look(module: Any, inputs: Any) -> Any:
        found.append([str(n.target) for n in module.graph.nodes if n.op == "call_function"])
        return module

    with torch.no_grad(), minifloat.autocast(recipe=recipe):
        torch.compile(model, backend=look)(torch.randn(3, 7, 32))
    casts = [sum("quantize" in name for name in names) for names in found]
    assert len([n for n in casts if n]) == 2, found


@DEEP
def test_compiled_then_eager_then_compiled() -> None:
    """What eager stores on the modules is no guard of the graph."""
    model = mlp()
    torch._dynamo.reset()
    counter = Counter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    x = torch.randn(3, 7, 32)
    for _ in range(2):
        assert torch.equal(compiled(x), model(x))
    assert counter.graphs == 1
