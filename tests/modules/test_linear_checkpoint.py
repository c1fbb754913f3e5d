"""Activation checkpointing changes no bit, and what backward keeps is one copy of the input."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils import checkpoint as torch_checkpoint

import minifloat
from minifloat import recipe as recipes
from minifloat.layout import parts
from minifloat.recipe.autocast import STATE
from minifloat.recipe.factories import delayed_scaling_factory

from .cases import RECIPES as SIX

CheckpointPolicy = torch_checkpoint.CheckpointPolicy
RECIPES: dict[str, Callable[[], recipes.Recipe]] = {
    **SIX,
    "delayed": lambda: recipes.DelayedScaling(amax_history_len=3),
    "requests": lambda: recipes.CustomRecipe(qfactory=delayed_scaling_factory),
    "override": lambda: recipes.Float8CurrentScaling(backward_override="dequantized"),
}
SAVES = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    return CheckpointPolicy.MUST_SAVE if op in SAVES else CheckpointPolicy.PREFER_RECOMPUTE


def _selective(save: Any = _policy) -> Any:
    return functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, save)


WAYS: dict[str, Callable[..., Any]] = {
    "ours": minifloat.checkpoint,
    "ours_reentrant": functools.partial(minifloat.checkpoint, use_reentrant=True),
    "reentrant": functools.partial(torch_checkpoint.checkpoint, use_reentrant=True),
    "non_reentrant": functools.partial(torch_checkpoint.checkpoint, use_reentrant=False),
    "selective": functools.partial(
        torch_checkpoint.checkpoint, use_reentrant=False, context_fn=_selective()
    ),
}


def plain(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


class Block(nn.Module):
    """Two layers and something between them."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up = minifloat.Linear(32, 48, **kwargs)
        self.down = minifloat.Linear(48, 32, **kwargs)

    def forward(self, x: Tensor, first: bool | None = None) -> Any:
        h = nn.functional.gelu(self.up(x, is_first_microbatch=first))
        return self.down(h, is_first_microbatch=first)


def data(i: int) -> Tensor:
    x = torch.randn(3, 7, 32, generator=torch.Generator().manual_seed(i)) * (i + 1)
    return x.requires_grad_()


def backward(y: Tensor, **kwargs: Any) -> None:
    (y * torch.linspace(-1, 2, y.numel()).reshape(y.shape)).sum().backward(**kwargs)


def state(module: nn.Module) -> list[Tensor]:
    """Everything that a step leaves: gradients, delayed scaling's buffers."""
    found = [p.grad for p in module.parameters()]
    assert all(g is not None for g in found)
    return [t.clone() for t in (*found, *module.buffers()) if t is not None]


def equal(expected: list[Tensor], got: list[Tensor]) -> None:
    assert len(expected) == len(got)
    for i, (a, b) in enumerate(zip(expected, got, strict=True)):
        assert torch.equal(a, b), f"tensor {i}: {(a - b).abs().max().item()} off"


def both(run: Callable[[Any], list[Tensor]], way: str) -> None:
    """The same with and without checkpointing; `run` starts from scratch."""
    torch.manual_seed(11)
    expected = run(plain)
    torch.manual_seed(11)
    equal(expected, run(WAYS[way]))


def region(recipe: recipes.Recipe, open_it: bool) -> Any:
    return minifloat.autocast(recipe=recipe) if open_it else contextlib.nullcontext()


# ----------------------------------------------------------------------------------- schedules
@pytest.mark.parametrize("flags", [(None, None, None), (True, False, False, True)], ids=str)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", RECIPES)
def test_step_by_step(name: str, way: str, inside: bool, flags: tuple[bool | None, ...]) -> None:
    recipe = RECIPES[name]()

    def run(call: Any) -> list[Tensor]:
        block, made = Block(), []

        def function(x: Tensor, first: bool | None) -> Any:
            with region(recipe, inside):
                return block(x, first)

        for i, first in enumerate(flags):
            x = data(i)
            with region(recipe, not inside):
                y = call(function, x, first)
            backward(y)
            assert x.grad is not None
            made += [y.detach(), x.grad, *state(block)]
        return made

    both(run, way)


@pytest.mark.parametrize("order", ["fifo", "lifo"])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["delayed", "requests", "current", "nvfp4"])
def test_two_microbatches_in_flight(name: str, way: str, together: bool, order: str) -> None:
    """Forward, forward, backward, backward: by then the scales have moved on, twice."""
    recipe = RECIPES[name]()

    def run(call: Any) -> list[Tensor]:
        block, made = Block(), []
        for step in range(2):
            inputs = [data(2 * step), data(2 * step + 1)]
            with region(recipe, together):
                outputs = []
                for x, first in zip(inputs, (True, False), strict=True):
                    with region(recipe, not together):
                        outputs.append(call(block, x, first))
            for y in outputs if order == "fifo" else outputs[::-1]:
                backward(y)
            made += [*outputs, *(x.grad for x in inputs if x.grad is not None), *state(block)]
        return [t.detach() for t in made]

    both(run, way)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("way", [w for w in WAYS if w != "selective"])
@pytest.mark.parametrize("name", RECIPES)
def test_nested(name: str, way: str, inside: bool) -> None:
    recipe = RECIPES[name]()

    def run(call: Any) -> list[Tensor]:
        block, made = Block(), []

        def inner(x: Tensor) -> Any:
            with region(recipe, inside):
                return block.up(x)

        def outer(x: Tensor) -> Any:
            h = nn.functional.gelu(call(inner, x))
            with region(recipe, inside):
                return block.down(h)

        for i in range(3):
            x = data(i)
            with region(recipe, not inside):
                y = call(outer, x)
            backward(y)
            assert x.grad is not None
            made += [y.detach(), x.grad, *state(block)]
        return made

    both(run, way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["delayed", "nvfp4"])
def test_several_regions_under_one_autocast(name: str, way: str) -> None:
    recipe = RECIPES[name]()

    def run(call: Any) -> list[Tensor]:
        blocks, made = [Block(), Block()], []
        for i in range(2):
            x = data(i)
            with minifloat.autocast(recipe=recipe):
                y = x
                for block in blocks:
                    y = call(block, y)
            backward(y)
            made += [y.detach(), *state(blocks[0]), *state(blocks[1])]
        return made

    both(run, way)


@pytest.mark.parametrize("way", WAYS)
def test_two_recipes_in_one_region(way: str) -> None:
    def run(call: Any) -> list[Tensor]:
        block, made = Block(), []

        def function(x: Tensor) -> Any:
            with minifloat.autocast(recipe=recipes.NVFP4BlockScaling()):
                h = block.up(x)
            with minifloat.autocast(recipe=RECIPES["delayed"]()):
                return block.down(h) + h[..., :32].sum()

        for i in range(3):
            y = call(function, data(i))
            backward(y)
            made += [y.detach(), *state(block)]
        return made

    both(run, way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["delayed", "nvfp4"])
def test_one_module_twice_in_one_region(name: str, way: str) -> None:
    recipe = RECIPES[name]()

    def run(call: Any) -> list[Tensor]:
        torch.manual_seed(0)
        layer, made = minifloat.Linear(32, 32), []
        for i in range(3):
            with minifloat.autocast(recipe=recipe):
                y = call(lambda x: layer(layer(x) + x), data(i))
            backward(y)
            made += [y.detach(), *state(layer)]
        return made

    both(run, way)


@pytest.mark.parametrize("way", ["ours", "non_reentrant"])
@pytest.mark.parametrize("name", RECIPES)
def test_backward_twice(name: str, way: str) -> None:
    """A retained graph is recomputed once more, from the start."""
    recipe = RECIPES[name]()

    def run(call: Any) -> list[Tensor]:
        block = Block()
        x = data(0)
        with minifloat.autocast(recipe=recipe):
            y = call(block, x)
        backward(y, retain_graph=True)
        backward(y)
        assert x.grad is not None
        return [y.detach(), x.grad, *state(block)]

    both(run, way)


@pytest.mark.parametrize("way", ["ours", "reentrant", "non_reentrant"])
@pytest.mark.parametrize("name", ["delayed", "nvfp4"])
@pytest.mark.parametrize("kwargs", [{"cache_weights": True}], ids=["cache_weights"])
def test_module_options(name: str, way: str, kwargs: Any) -> None:
    recipe = RECIPES[name]()

    def run(call: Any) -> list[Tensor]:
        with minifloat.autocast(recipe=recipe):
            block, made = Block(**kwargs), []
        for i in range(3):
            with minifloat.autocast(recipe=recipe):
                y = call(block, data(i))
            backward(y)
            made += [y.detach(), *state(block)]
            with torch.no_grad():
                block.up.weight.mul_(1.5)
        return made

    both(run, way)


@pytest.mark.parametrize("way", WAYS)
def test_an_autocast_around_backward_means_nothing(way: str) -> None:
    """Recompute reads what forward read, whatever is open by then."""
    recipe = RECIPES["delayed"]()

    def run(call: Any) -> list[Tensor]:
        block, made = Block(), []
        for i in range(2):
            with minifloat.autocast(recipe=recipe):
                y = call(block, data(i))
            with minifloat.autocast(recipe=recipes.MXFP8BlockScaling()):
                backward(y)
            made += [y.detach(), *state(block)]
        return made

    both(run, way)


@pytest.mark.parametrize("way", WAYS)
def test_outside_autocast(way: str) -> None:
    def run(call: Any) -> list[Tensor]:
        block = Block()
        y = call(block, data(0))
        with minifloat.autocast(recipe=recipes.MXFP8BlockScaling()):
            backward(y)
        return [y.detach(), *state(block)]

    both(run, way)


class Own(minifloat.Module):
    """A module of a user's, that casts what it gets by its own quantizers."""

    def forward(self, x: Tensor) -> Any:
        first, _, last = self.quantizers["scaling_fwd"]
        return last.quantize(first.quantize(x).dequantize() * 3.0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["delayed", "current"])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "Own"])
def test_quantized_outputs(kind: str, name: str, way: str) -> None:
    """What is cast is the same again, and its amax is recorded once."""
    recipe = RECIPES[name]()

    def run(call: Any) -> list[Tensor]:
        torch.manual_seed(3)
        module = Own() if kind == "Own" else getattr(minifloat, kind)(32, 32)
        kwargs = {} if kind == "Own" else {"fp8_output": True}
        made = []
        for i in range(3):
            x = data(i)
            with minifloat.autocast(recipe=recipe):
                y = call(lambda t: module(t, **kwargs).dequantize() ** 3, x)
            backward(y)
            assert x.grad is not None
            made += [y.detach(), x.grad, *state(module)]
        return made

    both(run, way)


@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear"])
def test_the_amax_of_a_quantized_output_counts_in_its_own_step(kind: str) -> None:
    """Where no autocast ends the step, the layer does: after all of its casts."""
    module = getattr(minifloat, kind)(32, 32)
    module.recipe = RECIPES["delayed"]()
    module(data(0), fp8_output=True)
    assert module.delayed.amax_output.item() == 0.0
    assert module.delayed.scale_output.item() != 1.0


@pytest.mark.parametrize("way", ["ours", "reentrant"])
def test_calibration_records_once(way: str) -> None:
    recipe = RECIPES["delayed"]()

    def run(call: Any) -> list[Tensor]:
        block = Block()
        with minifloat.autocast(enabled=False, calibrating=True, recipe=recipe):
            y = call(block, data(0))
        for layer in (block.up, block.down):
            layer.delayed.amax_input.mul_(0.5)  # would be raised again by a second recording
        backward(y)
        return [y.detach(), *state(block)]

    both(run, way)


def test_what_minifloat_checkpoint_does_not_take() -> None:
    for name in ("distribute_saved_activations", "get_rng_state_tracker", "tp_group"):
        with pytest.raises(NotImplementedError, match=name):
            minifloat.checkpoint(lambda x: x, data(0), **{name: object()})


@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_of_an_evaluation_ends_no_step(way: str) -> None:
    module, recipe = minifloat.Linear(32, 32), RECIPES["delayed"]()

    def inside(x: Tensor) -> Any:
        with minifloat.autocast(recipe=recipe):
            return module(x)

    with torch.no_grad():
        WAYS[way](inside, torch.randn(4, 32, requires_grad=True))
    assert not module.delayed.history_forward.any()


def test_keywords_of_the_function_in_a_reentrant_checkpoint() -> None:
    layer = minifloat.Linear(32, 48)
    grads = []
    for repeat in (False, True):
        layer.zero_grad()
        x = data(0)
        with minifloat.autocast(recipe=recipes.Float8CurrentScaling()):
            if repeat:
                y = minifloat.checkpoint(
                    layer, x, use_reentrant=True, preserve_rng_state=False, is_first_microbatch=True
                )
            else:
                y = layer(x, is_first_microbatch=True)
        backward(y)
        grads.append([y, x.grad, layer.weight.grad])
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


def test_determinism_checks_pass() -> None:
    block = Block()
    with minifloat.autocast(recipe=recipes.NVFP4BlockScaling()):
        y = minifloat.checkpoint(block, data(0), determinism_check="default")
    backward(y)


# ---------------------------------------------------------------------------------- saved bytes
def bytes_of(tensors: Any) -> int:
    return sum(t.untyped_storage().nbytes() for t in {id(t): t for t in tensors}.values())


def copy_bytes(recipe: recipes.Recipe | None, m: int, k: int) -> int:
    """One quantized copy of `x[M, K]`, the direction that wgrad multiplies."""
    if recipe is None:
        return m * k * 2
    roles = tuple(("linear", kind, "") for kind in ("input", "weight"))
    plan = recipe.plan((*roles, None), (("linear", "grad_output", ""), None))
    row, col = (plan.x_row, None) if plan.override else (None, plan.x_col)
    total = 0
    for part in parts((m, k), row, col):
        size = part.dtype.itemsize
        for d in part.shape:
            size *= d
        total += size
    return total


SAVED = {**RECIPES, "none": None}


@pytest.mark.parametrize("name", SAVED)
@pytest.mark.parametrize("shape", [(40, 96), (2, 33, 96), (7, 96)])
def test_eager_saves_one_copy_of_the_input(name: str, shape: tuple[int, ...]) -> None:
    made = SAVED[name]
    recipe = None if made is None else made()
    layer = minifloat.Linear(96, 64, params_dtype=torch.bfloat16)
    x = torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
    saved: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        minifloat.autocast(enabled=recipe is not None, recipe=recipe),
    ):
        y = layer(x)
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    others = [t for t in saved if t.untyped_storage().data_ptr() not in own]
    m = x.numel() // 96
    # And at most the weight's scale, with which backward casts it again.
    assert 0 <= bytes_of(others) - copy_bytes(recipe, m, 96) <= (4 if recipe is not None else 0)
    assert len(saved) - len(others) == 1  # the weight, as it is
    y.sum().backward()


@pytest.mark.parametrize("name", [n for n in SAVED if n not in ("none", "override")])
def test_frozen_tensors_save_less(name: str) -> None:
    made = SAVED[name]
    assert made is not None
    saved: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    layer = minifloat.Linear(96, 64)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
    with hooks, minifloat.autocast(recipe=made()):
        layer(torch.randn(40, 96))  # no dgrad: the weight is not kept
        assert all(t.numel() != layer.weight.numel() for t in saved)
        saved.clear()
        layer.weight.requires_grad_(False)
        layer(torch.randn(40, 96, requires_grad=True))  # no wgrad: the input is not
    own = layer.weight.untyped_storage().data_ptr()
    assert sum(t.numel() for t in saved if t.untyped_storage().data_ptr() != own) <= 1


@pytest.mark.parametrize("name", [*SIX, "override"])
def test_a_graph_saves_one_copy_of_the_input(name: str) -> None:
    from functorch.compile import min_cut_rematerialization_partition

    torch._dynamo.reset()
    recipe = {**RECIPES, **SIX}[name]()
    layer = minifloat.Linear(96, 64, params_dtype=torch.bfloat16)
    kept: list[Any] = []

    def backward_graph(graph: Any, inputs: Any) -> Any:
        for node in graph.graph.find_nodes(op="placeholder"):
            value = node.meta["val"]
            if isinstance(value, Tensor) and not node.name.startswith(("tangents", "primals")):
                kept.append((node.name, value.numel() * value.dtype.itemsize))
        return graph

    backend = aot_autograd(
        fw_compiler=lambda graph, _: graph,
        bw_compiler=backward_graph,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=False)
    x = torch.randn(40, 96, dtype=torch.bfloat16, requires_grad=True)
    with minifloat.autocast(recipe=recipe):
        y = compiled(x)
    y.sum().backward()
    assert abs(sum(size for _, size in kept) - copy_bytes(recipe, 40, 96)) <= 64, kept


# ---------------------------------------------------------- selective: what ends with the first run
RECORDS = (
    torch.ops.aten.view.default,
    torch.ops.aten.maximum.default,
    torch.ops.aten.copy_.default,
)


def _most(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    """All but how an amax is recorded: PyTorch keeps no result that is written in place."""
    return CheckpointPolicy.PREFER_RECOMPUTE if op in RECORDS else CheckpointPolicy.PREFER_SAVE


class Rounds(minifloat.Module):
    """A user's module, which asks for its quantizers, with operations that updates have as well."""

    def forward(self, x: Tensor) -> Tensor:
        scale = self.quantizers["scaling_fwd"][0].scale.clone()
        return torch.cat((x, x * 2)).abs().reciprocal() * scale


class Rounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up, self.down = Rounds(), minifloat.Linear(32, 32)

    def forward(self, x: Tensor) -> Any:
        return torch.cat((self.down(self.up(x)), x)).abs()


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up, self.down = (minifloat.GroupedLinear(2, 32, 32) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        h = self.up(x.flatten(0, 1), [8, 13])
        return torch.cat((self.down(torch.cat((h, h)), [22, 20]), h)).abs()


@pytest.mark.parametrize(
    ("make", "where", "name"),
    [
        *itertools.product((Block, Rounded, Experts), ("around", "inside", "layers"), ["delayed"]),
        *itertools.product((Block, Experts), ["calibrating"], ["delayed"]),
        *itertools.product((Block, Experts), ["around"], [n for n in RECIPES if n != "delayed"]),
    ],
)
def test_a_selective_checkpoint_that_keeps_most_finds_what_it_kept(
    make: Any, where: str, name: str
) -> None:
    """What ends a step, and what is made once, was counted in the first run alone: what came after
    it got its results."""
    recipe = RECIPES[name]()
    if name == "delayed":  # that was not asked before
        recipe = recipes.DelayedScaling(amax_history_len=3, margin=len(where + make.__name__))

    def opened(here: str) -> Any:
        if where == "calibrating" and here == "around":
            return minifloat.autocast(enabled=False, calibrating=True, recipe=recipe)
        return region(recipe, where == here)

    def run(call: Any) -> list[Tensor]:
        torch.manual_seed(5)
        model, made = make(), []
        for module in model.modules():
            if isinstance(module, minifloat.Module) and where == "layers":
                module.recipe = recipe

        def function(x: Tensor) -> Any:
            with opened("inside"):
                return model(x) * 3

        for i in range(4):
            x = data(i)
            with opened("around"):
                y = call(function, x)
            backward(y)
            assert x.grad is not None
            made += [y.detach(), x.grad, *state(model)]
        return made

    save = _selective(_most)
    again = functools.partial(torch_checkpoint.checkpoint, use_reentrant=False, context_fn=save)
    got = run(again)
    equal(run(plain), got)


# ----------------------------------------------------------------- graphs inside and around eager
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["current", "mxfp8", "nvfp4"])
def test_a_graph_is_repeated_in_the_autocast_of_its_forward(name: str, reentrant: bool) -> None:
    """Backward ran it in high precision, where no autocast is open any more."""

    def run(call: Any) -> list[Tensor]:
        torch.compiler.reset()
        block, made = Block(), []
        for i in range(2):
            x = data(i)
            with minifloat.autocast(recipe=RECIPES[name]()):
                y = call(torch.compile(block, backend="aot_eager", fullgraph=True), x)
            backward(y)
            assert x.grad is not None
            made += [y.detach(), x.grad, *state(block)]
        return made

    again = functools.partial(minifloat.checkpoint, use_reentrant=reentrant)
    for a, b in zip(run(again), run(plain), strict=True):
        assert torch.equal(a, b)
    assert STATE.recipe is None and STATE.depth == 0


def test_a_state_dict_after_graphs_that_repeat_their_forward() -> None:
    layer = minifloat.Linear(32, 32, device="cpu")
    layer.delayed.fit(3)
    step = torch.compile(
        lambda x: minifloat.checkpoint(layer, x), backend="aot_eager", fullgraph=True
    )
    assert "delayed.scale_input" not in layer.state_dict()
    with minifloat.autocast(recipe=RECIPES["delayed"]()):
        y = step(data(0))
    backward(y)
    saved = layer.state_dict()
    assert saved["delayed.scale_input"].item() == layer.delayed.scale_input.item() != 1.0


def test_eager_code_in_a_graphs_checkpoint() -> None:
    """Where the graph breaks at it, it is an eager checkpoint."""

    def run(call: Any) -> list[Tensor]:
        torch.manual_seed(0)
        layer, made = minifloat.Linear(32, 32, device="cpu"), []
        function = torch.compiler.disable(lambda x: layer(layer(x) + x))
        for i in range(3):
            with minifloat.autocast(recipe=RECIPES["delayed"]()):
                y = call(function, data(i))
            backward(y)
            made += [y.detach(), *state(layer)]
        assert "delayed.scale_input" in layer.state_dict()
        return made

    compiled = torch.compile(minifloat.checkpoint, backend="aot_eager")
    for a, b in zip(run(compiled), run(plain), strict=True):
        assert torch.equal(a, b)


def test_a_graphs_checkpoint_without_gradients_is_none() -> None:
    def run(call: Any) -> list[Tensor]:
        torch.manual_seed(0)
        layer, x = minifloat.Linear(32, 32), torch.randn(4, 32)
        with minifloat.autocast(recipe=RECIPES["delayed"]()), torch.no_grad():
            y = call(layer, x, is_first_microbatch=True)
        return [y, layer.delayed.history_forward[:3], layer._cached.copies[0][0]]

    def again(*args: Any, **kwargs: Any) -> Any:
        return minifloat.checkpoint(*args, preserve_rng_state=False, **kwargs)

    torch._dynamo.reset()
    made, expected = run(torch.compile(again, backend="aot_eager", fullgraph=True)), run(plain)
    assert expected[1].any()
    for a, b in zip(made, expected, strict=True):
        assert torch.equal(a, b)


def test_a_checkpoint_that_fails_in_a_graph_leaves_nothing() -> None:
    @torch.compiler.disable
    def fails(x: Tensor) -> Tensor:
        raise ArithmeticError("of the user")

    with pytest.raises(ArithmeticError):
        torch.compile(lambda x: minifloat.checkpoint(fails, x), backend="aot_eager")(data(0))
    assert not STATE.checkpointed


@pytest.mark.parametrize(
    "option", [{"activation_memory_budget": 0.5}, {"aggressive_recomputation": True}]
)
def test_a_graph_whose_backward_may_repeat_any_operator(option: dict[str, Any]) -> None:
    """It would cast by delayed scaling's scales of then; other recipes repeat what they did."""
    torch._dynamo.reset()
    layer = minifloat.Linear(48, 64, device="cpu")
    call = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(6, 48)

    def gradient(run: Any, recipe: Any) -> Any:
        layer.zero_grad()
        with minifloat.autocast(recipe=recipe):
            y = run(x * 2)
        y.square().sum().backward()
        return layer.weight.grad

    with torch._functorch.config.patch(**option):
        block = recipes.Float8BlockScaling()
        assert torch.equal(gradient(call, block), gradient(layer, block))
        with pytest.raises(torch._dynamo.exc.Unsupported, match="activation_memory_budget"):
            gradient(call, recipes.DelayedScaling())
        with torch.no_grad(), minifloat.autocast(recipe=recipes.DelayedScaling()):
            assert torch.equal(call(x), layer(x))
    assert not layer.delayed.history_backward.any()
