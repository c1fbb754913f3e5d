"""Compiled Linear layers over time: shapes, recipes and layers that share graphs, Inductor, caches.

Also what a graph of autograd keeps of a layer, which compiled code depends on.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from torch.utils.flop_counter import FlopCounterMode

import minifloat
from minifloat import recipe as recipes

from ..quantizers.cases import run_python
from .cases import CUSTOM, RECIPES, Counter, compare

DEEP = pytest.mark.deep


def quick(names: tuple[str, ...], every: Any = RECIPES) -> Any:
    """All of `every` as parameters, those outside `names` in the long suite."""
    marked = [pytest.param(n, marks=[] if n in names else DEEP) for n in every]
    return pytest.mark.parametrize("name", marked)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def linear(**kwargs: Any) -> Any:
    """48 -> 64, the same every time."""
    torch.manual_seed(1)
    made = minifloat.Linear(48, 64, device="cpu", **kwargs)
    if made.bias is not None:
        with torch.no_grad():
            made.bias.copy_(torch.linspace(-1, 1, 64))
    return made


def sample(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def step(call: Callable[[Tensor], Tensor], x: Tensor, recipe: Any, seed: int = 0) -> list[Any]:
    """Forward inside autocast, backward outside: [output, gradient of x]."""
    torch.manual_seed(seed)
    x = x.clone().requires_grad_()
    with minifloat.autocast(recipe=recipe):
        y = call(x)
    backward(y)
    return [y, x.grad]


def backward(y: Tensor) -> None:
    y.backward(torch.linspace(-1, 1, y.numel()).reshape(y.shape).to(y.dtype))


def state(module: Any) -> list[Any]:
    """Gradients and buffers."""
    return [*(p.grad for p in module.parameters()), *module.buffers()]


# ------------------------------------------------------------------------------------------- shapes
# No feature size, both sides of every block size, and the two orders of a dynamic size.
TOKENS = (2, 3, 5, 7, 8, 15, 16, 17, 31, 32, 33, 40, 63, 65, 100, 127, 128, 129, 130, 9)
SHAPES: dict[str, Callable[[int], tuple[int, ...]]] = {
    "2d": lambda t: (t, 48),
    "3d": lambda t: (t, 3, 48),
    "3d-both": lambda t: (t, 2 * t + 5, 48),
}
FEW = {("current", "2d"), ("delayed", "3d"), ("block", "2d")}
SHAPED = [
    pytest.param(name, shape, id=f"{name}-{shape}", marks=[] if (name, shape) in FEW else DEEP)
    for name in RECIPES
    for shape in SHAPES
]


@pytest.mark.parametrize(("name", "shape"), SHAPED)
def test_twenty_token_counts_are_at_most_two_graphs(name: str, shape: str) -> None:
    assert len(set(TOKENS)) == 20
    recipe, layer = RECIPES[name](), linear()
    other, counter = copy.deepcopy(layer), Counter()
    compiled = torch.compile(other, backend=counter, fullgraph=True)
    for i, tokens in enumerate(TOKENS):
        x = sample(*SHAPES[shape](tokens), seed=i)
        compare(step(layer, x, recipe, i), step(compiled, x, recipe, i))
        compare(state(layer), state(other))
    assert counter.graphs <= 2


# ------------------------------------------------------------------------------------ shared graphs
CHANGED: dict[str, Callable[[], recipes.Recipe]] = {
    "delayed": lambda: recipes.DelayedScaling(margin=2),
    "current": lambda: recipes.Float8CurrentScaling(use_power_2_scales=True),
    "block": lambda: recipes.Float8BlockScaling(use_f32_scales=True),
    "mxfp8": lambda: recipes.MXFP8BlockScaling(backward_override="dequantized"),
    "nvfp4": lambda: recipes.NVFP4BlockScaling(disable_rht=True),
}


@quick(("delayed", "current"), CHANGED)
def test_equal_recipes_share_a_graph_and_a_change_is_one_more(name: str) -> None:
    layer = linear()
    other, counter = copy.deepcopy(layer), Counter()
    compiled = torch.compile(other, backend=counter, fullgraph=True)
    x = sample(6, 48)
    for make, graphs in ((RECIPES[name], 1), (CHANGED[name], 2), (RECIPES[name], 2)):
        for _ in range(3):
            compare(step(layer, x, make()), step(compiled, x, make()))
            compare(state(layer), state(other))
            assert counter.graphs == graphs


def test_a_new_custom_recipe_is_another_one() -> None:
    layer, counter = linear(), Counter()
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    x = sample(6, 48)
    for recipe, graphs in ((CUSTOM, 1), (CUSTOM, 1), (copy.copy(CUSTOM), 2), (CUSTOM, 2)):
        step(compiled, x, recipe)
        assert counter.graphs <= graphs


@quick(("delayed", "current"))
def test_layers_of_one_shape_share_their_graphs(name: str) -> None:
    recipe, counter = RECIPES[name](), Counter()
    # A custom recipe is asked by name, so that its layers are told apart by it.
    names = [None if name == "custom" else f"block.{i}.linear" for i in range(10)]
    layers = [linear(name=of) for of in names]
    others = copy.deepcopy(layers)
    for other in others:
        other.compile(backend=counter, fullgraph=True)
    for i in range(2):
        for layer, other in zip(layers, others, strict=True):
            x = sample(6, 48, seed=i)
            compare(step(layer, x, recipe, i), step(other, x, recipe, i))
            compare(state(layer), state(other))
    assert counter.graphs <= 2


class Block(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.up = minifloat.Linear(48, 64, device="cpu", name=f"{name}.up")
        self.down = minifloat.Linear(64, 48, device="cpu", name=f"{name}.down")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(x)))
        return out


@quick(("delayed",), CHANGED)
def test_compiled_blocks_in_one_autocast(name: str) -> None:
    torch.manual_seed(1)
    recipe, counter = RECIPES[name](), Counter()
    model = nn.Sequential(*(Block(f"block.{i}") for i in range(10)))
    other = copy.deepcopy(model)
    for block in other:
        block.compile(backend=counter, fullgraph=True)
    for i in range(3):
        x = sample(6, 48, seed=i)
        compare(step(model, x, recipe, i), step(other, x, recipe, i))
        compare(state(model), state(other))
    # The first block's input and the others' need a gradient alike: one graph serves them all.
    assert counter.graphs <= 2


# ----------------------------------------------------------------------------------------- Inductor
@quick(("current",))
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=DEEP)], ids=str
)
def test_inductor_is_close_to_eager(name: str, dtype: torch.dtype) -> None:
    """A cast sees the same numbers, so that only sums differ: by their order, in fp32."""
    recipe, layer = RECIPES[name](), linear(params_dtype=dtype)
    other = copy.deepcopy(layer)
    compiled = torch.compile(other, fullgraph=True)
    x = sample(10, 48).to(dtype)
    # Its own generator draws other bits for stochastic rounding.
    with torch._inductor.config.patch(fallback_random=True):
        for i in range(2):
            got = [*step(compiled, x, recipe, i), *state(other)]
            for a, b in zip([*step(layer, x, recipe, i), *state(layer)], got, strict=True):
                assert a is not None and b is not None and a.dtype == b.dtype
                unit = torch.finfo(a.dtype).eps
                assert (a - b).abs().max() <= 4 * unit * a.abs().max()


@quick(("current",))
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=DEEP)], ids=str
)
def test_codes_that_flip_behind_a_norm(name: str, dtype: torch.dtype) -> None:
    """Inductor's norm rounds differently in its last bit, which now and then is a code's."""
    recipe, layer = RECIPES[name](), linear(params_dtype=dtype)
    quantizer = input_quantizer(recipe, columnwise=False)
    delayed = not quantizer._is_value()

    def fn(x: Tensor) -> Any:
        h = rms_norm(x, (48,))
        with minifloat.autocast(recipe=recipe):
            y = layer(h)
        return y, h if delayed else quantizer.quantize(h)

    x = sample(256, 48).to(dtype)
    with torch.no_grad():
        y, coded = fn(x)
        y2, coded2 = torch.compile(fn, fullgraph=True)(x)
    if delayed:  # PyTorch 2.11 has no live quantizers in graphs
        coded, coded2 = quantizer.quantize(coded), quantizer.quantize(coded2)
    codes, codes2 = (c.get_data_tensors(columnwise_data=False) for c in (coded, coded2))
    assert (codes != codes2).float().mean() <= 0.002
    # A flipped code moves an output by a few parts in a hundred of one product of 48.
    assert (y - y2).norm() <= 0.01 * y.norm()


def input_quantizer(recipe: Any, columnwise: bool = True) -> Any:
    """What the recipe casts a layer's input with."""
    roles = [recipes.QuantizerRole("linear", kind, "") for kind in ("input", "weight")]
    made = recipes.RecipeState.create(
        recipe, mode="forward", num_quantizers=3, device="cpu", roles=[*roles, None]
    )
    quantizer = made.make_quantizers()[0].copy()
    quantizer.set_usage(rowwise=True, columnwise=columnwise)
    quantizer.internal = False
    return quantizer


# ------------------------------------------------------------------------------------------- caches
SCRIPT = """
import json, torch, minifloat
from torch._dynamo.utils import counters
from tests.modules.cases import RECIPES

def run(name):
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(1)
    recipe, layer = RECIPES[name](), minifloat.Linear(48, 64, device="cpu")
    x = torch.randn(10, 48, requires_grad=True)
    with minifloat.autocast(recipe=recipe):
        y = torch.compile(layer, fullgraph=True)(x)
    y.sum().backward()
    assert layer.weight.grad is not None and x.grad is not None
    inductor, aot = counters["inductor"], counters["aot_autograd"]
    return {
        "fx": (inductor["fxgraph_cache_hit"], inductor["fxgraph_cache_miss"]),
        "aot": (aot["autograd_cache_hit"], aot["autograd_cache_miss"]),
        "bypass": aot["autograd_cache_bypass"],
        "sum": layer.weight.grad.double().sum().item(),
    }

print(json.dumps([run(name) for name in NAMES]))
"""


def process(folder: Path, names: tuple[str, ...], switch: bool) -> list[dict[str, Any]]:
    """Reports of a fresh process with PyTorch's switch for autograd.Functions on or off."""
    said = run_python(
        SCRIPT.replace("NAMES", repr(names)),
        TORCHINDUCTOR_CACHE_DIR=str(folder),
        TORCHINDUCTOR_COMPILE_THREADS="1",
        TORCHINDUCTOR_FX_GRAPH_CACHE="1",
        TORCHINDUCTOR_AUTOGRAD_CACHE="1",
        TORCHINDUCTOR_AUTOGRAD_CACHE_ALLOW_CUSTOM_AUTOGRAD=str(int(switch)),
        OMP_NUM_THREADS="1",
    )
    reports: list[dict[str, Any]] = json.loads(said.splitlines()[-1])
    return reports


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("current",), id="current"),
        pytest.param(("delayed", "block", "mxfp8", "nvfp4"), marks=DEEP, id="others"),
    ],
)
def test_a_fresh_process_finds_what_another_compiled(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    runs = [process(tmp_path, names, switch) for switch in (True, True, False)]
    for first, r, off in zip(*runs, strict=True):
        assert first["aot"][0] == 0 and first["aot"][1] >= 1 and first["bypass"] == 0, first
        assert first["fx"][1] >= 1, first
        assert r["aot"][0] >= 1 and r["aot"][1] == 0 and r["bypass"] == 0, r
        assert r["fx"][1] == 0, r
        # Without the switch PyTorch traces what has an autograd.Function anew, and finds its code.
        assert off["aot"] == [0, 0] and off["bypass"] >= 1, off
        assert off["fx"][0] >= 2 and off["fx"][1] == 0, off
        assert r["sum"] == off["sum"] == first["sum"]


# --------------------------------------------------------------------------- what autograd holds on
@pytest.mark.parametrize("name", RECIPES)
def test_no_module_in_autograd(name: str) -> None:
    layer, x = linear(), sample(6, 48).requires_grad_()
    weight, dead = layer.weight, weakref.ref(layer)
    with minifloat.autocast(recipe=RECIPES[name]()):
        y = layer(x)
    del layer
    gc.collect()
    assert dead() is None
    backward(y)
    assert x.grad is not None and weight.grad is not None
    assert x.grad.isfinite().all() and weight.grad.isfinite().all()


@quick(("current",))
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_forward_says_that_main_grad_has_the_gradient(name: str, compiled: bool) -> None:
    layer = linear(fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros(64, 48)
    layer.weight.grad_added_to_main_grad = False
    call = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    x = sample(6, 48).requires_grad_()
    with minifloat.autocast(recipe=RECIPES[name]()):
        y = call(x)
    assert layer.weight.grad_added_to_main_grad is True
    assert not layer.weight.main_grad.any()
    backward(y)
    plain = linear()
    step(plain, x.detach(), RECIPES[name]())
    # Stochastic rounding drew other bits.
    tolerance = 0.2 if name == "nvfp4" else 0.0
    off = (layer.weight.main_grad - plain.weight.grad).norm()
    assert off <= tolerance * plain.weight.grad.norm()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_options_that_are_set_later(compiled: bool) -> None:
    """Megatron sets `save_original_input` on layers it was given: what is set, is in force."""
    layer, x, recipe = linear(), sample(6, 48), RECIPES["current"]()
    call = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    step(call, x, recipe)
    expected = layer.weight.grad
    layer.weight.grad, layer.weight.main_grad = None, torch.zeros(64, 48)
    layer.fuse_wgrad_accumulation = True
    step(call, x, recipe)
    assert layer.weight.grad is None and torch.equal(layer.weight.main_grad, expected)
    layer.save_original_input = True
    with pytest.raises(ValueError, match="save_original_input"):
        step(layer, x, RECIPES["delayed"]())


@quick(("current", "delayed", "nvfp4"))
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_retained_graph_gives_its_gradients_twice(name: str, compiled: bool) -> None:
    layer, x = linear(), sample(6, 48).requires_grad_()
    call = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    with minifloat.autocast(recipe=RECIPES[name]()):
        y = call(x)
    inputs, g = [x, *layer.parameters()], torch.linspace(-1, 1, y.numel()).reshape(y.shape)
    first = torch.autograd.grad(y, inputs, g, retain_graph=True)
    if name == "delayed":
        layer.delayed.reset()
    second = torch.autograd.grad(y, inputs, g, retain_graph=True)
    if name == "delayed":  # every backward moves the gradient's scale
        layer.delayed.reset()
    third = torch.autograd.grad(y, inputs, g)
    compare(list(first), list(second))
    compare(list(first), list(third))
    with pytest.raises(RuntimeError, match="second time|only be accessed once"):
        torch.autograd.grad(y, inputs, g)


@quick(("current", "delayed"))
def test_a_layer_used_twice_in_a_graph(name: str) -> None:
    torch.manual_seed(1)
    layer = minifloat.Linear(48, 48, device="cpu")
    other, counter = copy.deepcopy(layer), Counter()

    def twice(module: Any) -> Callable[[Tensor], Tensor]:
        return lambda x: module(torch.tanh(module(x)))

    compiled = torch.compile(twice(other), backend=counter, fullgraph=True)
    for i in range(2):
        x, recipe = sample(6, 48, seed=i), RECIPES[name]()
        compare(step(twice(layer), x, recipe, i), step(compiled, x, recipe, i))
        compare(state(layer), state(other))
    assert counter.graphs == 1


@quick(("current", "delayed"))
def test_two_uses_are_the_sum_of_each(name: str) -> None:
    """Gradients of both uses add up; a use apart from the other has the same ones."""
    recipe, first, second = RECIPES[name](), linear(), linear()
    a, b = sample(6, 48), sample(7, 48, seed=1)
    with minifloat.autocast(recipe=recipe):
        both = first(a), first(b)
    for y in both:
        backward(y)
    if name in ("nvfp4", "delayed"):  # other random bits; a moved scale of the gradient
        assert first.weight.grad.isfinite().all()
        return
    for x in (a, b):
        with minifloat.autocast(recipe=recipe):
            y = second(x)
        backward(y)
    compare([first.weight.grad, first.bias.grad], [second.weight.grad, second.bias.grad])


@quick(("current", "nvfp4"))
@pytest.mark.parametrize("outside", [False, True], ids=["in-graph", "around"])
def test_torch_autocast_on_fp32_parameters(name: str, outside: bool) -> None:
    torch_autocast(RECIPES[name](), outside)


@pytest.mark.parametrize("outside", [pytest.param(False, marks=DEEP), True], ids=["in", "around"])
@pytest.mark.parametrize("override", ["high_precision", pytest.param("dequantized", marks=DEEP)])
def test_torch_autocast_and_a_backward_in_high_precision(override: str, outside: bool) -> None:
    torch_autocast(recipes.MXFP8BlockScaling(backward_override=override), outside)


def torch_autocast(recipe: recipes.Recipe, outside: bool) -> None:
    """Its dtype is that of the activations, and of nothing inside the layer."""
    layer = linear()
    other, counter = copy.deepcopy(layer), Counter()
    none = contextlib.nullcontext()

    def amp() -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16)

    def fn(module: Any) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            with none if outside else amp():
                y: Tensor = module(x)
                return y

        return run

    compiled = torch.compile(fn(other), backend=counter, fullgraph=True)
    for i in range(2):
        results = []
        for call in (fn(layer), compiled):
            x = sample(6, 48, seed=i).requires_grad_()
            torch.manual_seed(i)
            with minifloat.autocast(recipe=recipe), amp() if outside else none:
                y = call(x)
            backward(y)
            assert y.dtype is torch.bfloat16
            assert x.grad is not None and x.grad.dtype is torch.float32
            results.append([y, x.grad])
        assert other.weight.grad.dtype is torch.float32
        compare(*results)
        compare(state(layer), state(other))
    assert counter.graphs == 1


@quick(("current",))
@pytest.mark.parametrize("amp", [False, True], ids=["plain", "amp"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_nothing_to_differentiate_with_gradients_on(name: str, bias: bool, amp: bool) -> None:
    layer = linear(bias=bias).requires_grad_(False)
    other = copy.deepcopy(layer)
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    results = []
    for call in (layer, compiled):
        with (
            minifloat.autocast(recipe=RECIPES[name]()),
            torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp),
        ):
            results.append(call(sample(6, 48)))
        assert not results[-1].requires_grad
    compare([results[0], *layer.buffers()], [results[1], *other.buffers()])


@quick(("current", "delayed"))
def test_inference_mode(name: str) -> None:
    recipe, layer = RECIPES[name](), linear()
    counter, x = Counter(), sample(6, 48)
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    with torch.no_grad(), minifloat.autocast(recipe=recipe):
        expected = layer(x)
    layer.delayed.reset()
    for call in (layer, compiled):
        with torch.inference_mode(), minifloat.autocast(recipe=recipe):
            got = call(x)
        assert got.is_inference() and not got.requires_grad
        assert torch.equal(expected, got)
        layer.delayed.reset()
    # And then the layer trains, compiled.
    other = copy.deepcopy(layer)
    compare(step(other, x, recipe), step(compiled, x, recipe))
    compare(state(other), state(layer))


@pytest.mark.parametrize("override", [None, "high_precision"])
def test_a_gradient_that_is_rounded_stochastically(override: str | None) -> None:
    """By bits that follow from forward's seed: eager, compiled and recomputed alike."""
    recipe, layer = recipes.NVFP4BlockScaling(backward_override=override), linear()
    other, again = copy.deepcopy(layer), copy.deepcopy(layer)

    def call(module: Any) -> Callable[[Tensor], Tensor]:
        return lambda x: module(x, fp8_grad=True)

    def recomputed(x: Tensor) -> Any:
        return minifloat.checkpoint(call(again), x)

    def plain(t: Any) -> Tensor:
        return t.dequantize() if isinstance(t, minifloat.QuantizedTensor) else t

    x = sample(6, 48)
    made = step(call(layer), x, recipe)
    assert isinstance(made[1], minifloat.NVFP4Tensor)
    graph = torch.compile(call(other), backend="aot_eager", fullgraph=True)
    for found in (step(graph, x, recipe), step(recomputed, x, recipe)):
        for a, b in zip(made, found, strict=True):
            assert torch.equal(plain(a), plain(b))


@pytest.mark.parametrize("case", ["linear", "mlp", "grouped", "quantized"])
def test_forward_draws_what_backward_rounds_by(case: str) -> None:
    """Also where no cast of forward reads it: in a graph PyTorch left that to backward."""
    quantizer = minifloat.NVFP4Quantizer()
    other = quantizer if case == "quantized" else minifloat.IdentityQuantizer()

    def factory(role: Any) -> Any:
        if role is not None and role.tensor_type == "grad_output":
            return minifloat.NVFP4Quantizer(stochastic_rounding=True)
        return other

    recipe = recipes.CustomRecipe(qfactory=factory)
    layer: Any = linear()
    sizes: tuple[Tensor, ...] = ()
    if case == "grouped":
        layer = minifloat.GroupedLinear(2, 48, 32, device="cpu")
        sizes = (torch.tensor([2, 4]),)
    elif case == "mlp":
        layer = minifloat.LayerNormMLP(48, 64, device="cpu")
    x: Any = sample(6, 48)
    x = quantizer(x) if case == "quantized" else x.requires_grad_()
    graph = torch.compile(layer, backend="aot_eager", fullgraph=True)
    found = []
    for run in (layer, graph):
        layer.zero_grad(set_to_none=True)
        x.grad = None
        torch.manual_seed(3)
        with minifloat.autocast(recipe=recipe):
            y = run(x, *sizes)
        torch.rand(5)  # somebody else's bits
        state = torch.get_rng_state()
        y.backward(sample(*y.shape))
        assert torch.equal(state, torch.get_rng_state())
        found.append([y.detach(), x.grad, *(p.grad for p in layer.parameters())])
    for a, b in zip(*found, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@quick(("delayed", "nvfp4"))
def test_a_dispatch_mode_changes_nothing(name: str) -> None:
    recipe, layer = RECIPES[name](), linear()
    other = copy.deepcopy(layer)
    for i in range(2):
        expected = step(layer, sample(6, 48, seed=i), recipe, i)
        with FlopCounterMode(display=False):
            got = step(other, sample(6, 48, seed=i), recipe, i)
        compare(expected, got)
        compare(state(layer), state(other))


@quick(("current",))
def test_an_exported_layer_runs_where_gradients_are_on(name: str) -> None:
    """Its operators have none, whoever calls them: parameters are found among their arguments."""
    recipe = RECIPES[name]()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear()

        def forward(self, x: Tensor) -> Any:
            with minifloat.autocast(recipe=recipe):
                return self.layer(x)

    model, x = Model(), sample(6, 48)
    other = copy.deepcopy(model)
    exported = torch.export.export(model, (x,)).module()
    torch.manual_seed(0)
    expected = other(x)
    torch.manual_seed(0)
    assert torch.equal(expected, exported(x))
