"""Every way to run a LayerNormLinear or a LayerNormMLP is one graph, with the bits of eager."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import minifloat

from .cases import Case, Counter, compare, duplicate, function, make, train
from .layers import KINDS, RECIPES, design

DEEP = pytest.mark.deep
MATRIX = [
    pytest.param(
        name, case, id=f"{case.kind}-{case}-{name}", marks=[] if case.name == "plain" else DEEP
    )
    for name, case in design()
]


@pytest.mark.parametrize(("name", "case"), MATRIX)
def test_one_graph_with_the_bits_of_eager(name: str, case: Case) -> None:
    torch._dynamo.reset()
    recipe = RECIPES[name]()
    layer = make(case, recipe)
    other = duplicate(layer)
    expected = list(train(case, layer, recipe, function(case, layer, recipe)))
    assert any(isinstance(t, Tensor) and bool(t.any()) for t in expected)
    counter = Counter()
    compiled = torch.compile(function(case, other, recipe), backend=counter, fullgraph=True)
    compare(expected, list(train(case, other, recipe, compiled)))
    states = len(set(case.microbatches)) + (
        True in case.microbatches[1:] and True in case.microbatches
    )
    assert counter.graphs <= max(states, 1)


OTHERS = ("current", "block", "mxfp8", "nvfp4")


# ------------------------------------------------------------------------------------------- shapes
# No feature size (48, 64, 128), both sides of every block size.
TOKENS = (2, 3, 5, 7, 8, 15, 16, 17, 31, 32, 33, 40, 63, 65, 100, 127, 129, 130, 9, 200)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "again": {"checkpoint": True, "activation": "swiglu"},
    "norm_output": {"return_layernorm_output": True},
}
SHAPED = [
    pytest.param(
        kind,
        option,
        name,
        id=f"{kind}-{option}-{name}",
        marks=[] if (kind, option, name) == ("LayerNormMLP", "plain", "current") else DEEP,
    )
    for kind in KINDS
    for option in OPTIONS
    for name in ("delayed", *OTHERS)
    if option == "plain" or (kind == "LayerNormMLP") == (option == "again")
]


def outputs(y: Any) -> list[Tensor]:
    return list(y) if isinstance(y, tuple) else [y]


def step(layer: Any, call: Any, x: Tensor, recipe: Any, seed: int = 0) -> list[Any]:
    """Everything that a step makes."""
    torch.manual_seed(seed)
    x = x.clone().requires_grad_()
    with minifloat.autocast(recipe=recipe):
        y = outputs(call(x))
    torch.autograd.backward(y, [torch.linspace(-1, 1, t.numel()).reshape(t.shape) for t in y])
    return [*y, x.grad, *(p.grad for p in layer.parameters()), *layer.buffers()]


@pytest.mark.parametrize(("kind", "option", "name"), SHAPED)
def test_twenty_token_counts_are_at_most_one_recompile(kind: str, option: str, name: str) -> None:
    torch._dynamo.reset()
    assert len(set(TOKENS)) == 20
    recipe = RECIPES[name]()
    layer = make(Case(option, kind=kind, module=OPTIONS[option]), recipe)
    other, counter = copy.deepcopy(layer), Counter()
    compiled = torch.compile(other, backend=counter, fullgraph=True)
    for i, tokens in enumerate(TOKENS):
        x = torch.randn(tokens, 48, generator=torch.Generator().manual_seed(i))
        compare(step(layer, layer, x, recipe, i), step(other, compiled, x, recipe, i))
    assert counter.graphs <= 2


@pytest.mark.parametrize("name", ["delayed", *(pytest.param(n, marks=DEEP) for n in OTHERS)])
def test_dynamic_from_the_start(name: str) -> None:
    """With `dynamic=True` every number that a module holds could be an input of the graph."""
    torch._dynamo.reset()
    recipe = RECIPES[name]()
    layer = make(Case("plain", kind="LayerNormMLP", module={}), recipe)
    other, counter = copy.deepcopy(layer), Counter()
    compiled = torch.compile(other, backend=counter, fullgraph=True, dynamic=True)
    graphs = []
    for i, tokens in enumerate((7, 33, 100)):
        x = torch.randn(tokens, 48, generator=torch.Generator().manual_seed(i))
        compare(step(layer, layer, x, recipe, i), step(other, compiled, x, recipe, i))
        graphs.append(counter.graphs)
    # PyTorch starts over, once, to make constants of numbers.
    assert graphs[0] <= 2 and graphs[2] == graphs[0]


@pytest.mark.parametrize("name", RECIPES)
def test_dynamic_layers_of_one_graph(name: str) -> None:
    """A default that is a float, which a layer shares with the next one, was an input that PyTorch
    cannot hand to the second."""
    torch._dynamo.reset()
    recipe, counter = RECIPES[name](), Counter()
    net = torch.nn.Sequential(*[minifloat.Linear(32, 32, device="cpu") for _ in range(2)])
    other = copy.deepcopy(net)
    compiled = torch.compile(other, backend=counter, fullgraph=True, dynamic=True)
    x = torch.randn(7, 32)
    for of, run in ((net, net), (other, compiled)):
        torch.manual_seed(1)
        with minifloat.autocast(recipe=recipe):
            run(x).square().sum().backward()
        assert all(p.grad is not None for p in of.parameters())
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)


# ------------------------------------------------------------------------------- several in a graph
class Block(torch.nn.Module):
    """Two layers with a recipe each, a third with neither."""

    def __init__(self, first: Any, second: Any, **more: Any) -> None:
        super().__init__()
        self.first, self.second = first, second
        torch.manual_seed(3)
        self.qkv = minifloat.LayerNormLinear(48, 48, **more)
        self.mlp = minifloat.LayerNormMLP(48, 64, activation="swiglu", **more)
        self.out = minifloat.LayerNormLinear(48, 40, **more)

    def forward(self, x: Tensor) -> Any:
        with minifloat.autocast(recipe=self.first):
            h = x + self.qkv(x)
            with minifloat.autocast(recipe=self.second):
                h = h + self.mlp(h)
            with minifloat.autocast(enabled=False):
                return self.out(h)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("delayed", "mxfp8"),
        pytest.param("nvfp4", "delayed", marks=DEEP),
        pytest.param("block", "current", marks=DEEP),
        pytest.param("custom", "nvfp4", marks=DEEP),
    ],
)
def test_two_recipes_in_one_region(first: str, second: str) -> None:
    torch._dynamo.reset()
    block = Block(RECIPES[first](), RECIPES[second]())
    other, counter = copy.deepcopy(block), Counter()
    compiled = torch.compile(other, backend=counter, fullgraph=True)
    for i in range(3):
        x = torch.randn(6, 48, generator=torch.Generator().manual_seed(i))
        results = []
        for module, call in ((block, block), (other, compiled)):
            torch.manual_seed(i)
            inp = x.clone().requires_grad_()
            y = call(inp)
            y.backward(torch.linspace(-1, 1, y.numel()).reshape(y.shape))
            results.append([y, inp.grad, *(p.grad for p in module.parameters())])
            results[-1] += list(module.buffers())
        compare(*results)
    assert counter.graphs == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", ["delayed", *(pytest.param(n, marks=DEEP) for n in ("current", "mxfp8"))]
)
def test_layers_of_one_shape_share_their_graphs(kind: str, name: str) -> None:
    torch._dynamo.reset()
    recipe, counter = RECIPES[name](), Counter()
    layers = [getattr(minifloat, kind)(48, 64, name=f"block.{i}") for i in range(5)]
    others = copy.deepcopy(layers)
    for other in others:
        other.compile(backend=counter, fullgraph=True)
    for i in range(2):
        for layer, other in zip(layers, others, strict=True):
            x = torch.randn(6, 48, generator=torch.Generator().manual_seed(i))
            compare(step(layer, layer, x, recipe, i), step(other, other, x, recipe, i))
    assert counter.graphs <= 2


@torch.compiler.nested_compile_region
def _region(layer: Any, x: Tensor) -> Any:
    return layer(x)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="regions with operators of opaque values")
@pytest.mark.parametrize("kind", KINDS)
def test_a_region_that_is_compiled_once(kind: str) -> None:
    torch._dynamo.reset()
    layer = getattr(minifloat, kind)(48, 64 if "MLP" in kind else 48)
    other, counter = copy.deepcopy(layer), Counter()
    compiled = torch.compile(
        lambda x: _region(other, _region(other, x)), backend=counter, fullgraph=True
    )
    x, recipe = torch.randn(6, 48), RECIPES["current"]()
    expected = step(layer, lambda x: layer(layer(x)), x, recipe, 0)
    compare(expected, step(other, compiled, x, recipe, 0))
    assert counter.graphs == 1


# -------------------------------------------------------------------------------------- later wgrad
@pytest.mark.parametrize("kind", KINDS)
def test_delayed_wgrad_is_refused_by_name(kind: str) -> None:
    torch._dynamo.reset()
    layer = getattr(minifloat, kind)(48, 64, delay_wgrad_compute=True, name="fc")
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with (
        pytest.raises(Exception, match=rf"(?s){kind}\(fc\).*delay_wgrad_compute.*torch.compile"),
        minifloat.autocast(recipe=RECIPES["current"]()),
    ):
        compiled(torch.randn(6, 48))
