"""Every way to run a GroupedLinear is one graph, with the bits of eager; other sizes, the same."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import minifloat as mf
from minifloat import recipe as recipes

from .cases import RECIPES, STATELESS, Case, Counter, compare, duplicate, function, train

SPLITS = torch.tensor([9, 0, 11, 1])
SINGLE: dict[str, Any] = {"single_grouped_weight": True, "single_grouped_bias": True}
CASES = (
    Case("plain"),
    Case("single", module=SINGLE),
    Case("inside", module=SINGLE, inside=True),
    Case("no_bias", module={"bias": False}),
    Case("list", forward={"m_splits": SPLITS.tolist()}),
    Case("no_grad", grad=False),
    Case("primary", primary=True),
    Case("primary_single", primary=True, module=SINGLE, recipes=STATELESS),
    Case("microbatches", microbatches=(True, False, True, False)),
    Case("main_grad", main_grad=True, module={"fuse_wgrad_accumulation": True}),
    Case("main_grad_single", main_grad=True, module={"fuse_wgrad_accumulation": True, **SINGLE}),
    Case("save_original_input", module={"save_original_input": True}, recipes=STATELESS),
    Case("checkpoint", checkpoint="ours"),
    Case("return_bias", module={"return_bias": True, **SINGLE}),
    Case("frozen_input", frozen=("input",)),
    Case("calibrating", calibrating=True),
    Case("two_dim", shape=(21, 48)),
)
MATRIX = [
    pytest.param(
        name, case, id=f"{name}-{case}", marks=[] if case.name == "single" else pytest.mark.deep
    )
    for case in CASES
    for name in RECIPES
    if name in case.recipes
]


def make(case: Case, recipe: recipes.Recipe) -> Any:
    torch.manual_seed(1)
    context: Any = contextlib.nullcontext()
    if case.primary:
        context = mf.quantized_model_init(recipe=recipe)
    with context, mf.autocast(recipe=recipe):
        layer = mf.GroupedLinear(4, 48, 64, device="cpu", **case.module)
    for name, p in layer.named_parameters():
        if case.main_grad and name.startswith("weight"):
            p.main_grad = torch.full(p.shape, 0.5)  # type: ignore[attr-defined]
    return layer


@pytest.mark.parametrize(("name", "case"), MATRIX)
def test_one_graph_with_the_bits_of_eager(name: str, case: Case) -> None:
    torch._dynamo.reset()
    recipe = RECIPES[name]()
    case.forward.setdefault("m_splits", SPLITS)
    layer = make(case, recipe)
    other = duplicate(layer)
    expected = list(train(case, layer, recipe, function(case, layer, recipe)))
    counter = Counter()
    compiled = torch.compile(function(case, other, recipe), backend=counter, fullgraph=True)
    compare(expected, list(train(case, other, recipe, compiled)))
    states = len(set(case.microbatches)) + (
        True in case.microbatches[1:] and True in case.microbatches
    )
    assert counter.graphs <= max(states, 1)


@pytest.mark.parametrize("name", ["current", pytest.param("delayed", marks=pytest.mark.deep)])
def test_other_sizes_need_no_other_graph(name: str) -> None:
    torch._dynamo.reset()
    recipe = RECIPES[name]()
    layer = make(Case("sizes", module=SINGLE), recipe)
    other = duplicate(layer)
    counter = Counter()
    compiled = torch.compile(other, backend=counter, fullgraph=True)
    for sizes in ([9, 0, 11, 1], [0, 21, 0, 0], [5, 5, 5, 6], [0, 0, 0, 21]):
        x = torch.randn(21, 48)
        found = []
        for one, call in ((layer, layer), (other, compiled)):
            y = x.clone().requires_grad_()
            with mf.autocast(recipe=recipe):
                z = call(y, torch.tensor(sizes))
            z.sum().backward()
            found += [[z, y.grad, one.weight.grad, one.bias.grad]]
        compare(*found)
    assert counter.graphs == 1


def test_a_workspace_for_a_compiled_checkpoint() -> None:
    """It is made by an eager forward, as the error says: experts take no `cache_weights`."""
    torch._dynamo.reset()
    recipe = RECIPES["current"]()
    layer = make(Case("checkpoint"), recipe)
    other = duplicate(layer)
    x = torch.randn(21, 48)

    def step(owner: Any, call: Any, first: bool) -> list[Any]:
        y = x.clone().requires_grad_()
        with mf.autocast(recipe=recipe):
            z = call(owner, y, SPLITS, is_first_microbatch=first)
        z.sum().backward()
        return [z, y.grad, *[p.grad for p in owner.parameters()]]

    compiled = torch.compile(mf.checkpoint, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="run one eager forward"):
        step(other, compiled, True)
    for one in (layer, other):
        step(one, lambda owner, *args, **kwargs: owner(*args, **kwargs), True)
    for first in (True, False):
        compare(step(layer, mf.checkpoint, first), step(other, compiled, first))


def _bincount(x: torch.Tensor) -> Any:
    return torch.bincount((x.detach()[:, 0] > 0).long(), minlength=4)  # maybe more, to a graph


def _parts(x: torch.Tensor) -> Any:
    n = x.shape[0]
    return [n // 2, 0, 1, n - n // 2 - 1]


def _read(x: torch.Tensor) -> Any:
    n = int((x.detach()[:, 0] > 0).sum().item())
    return [n, 0, 0, x.shape[0] - n]


def _step(layer: Any, call: Any, x: torch.Tensor, recipe: Any) -> list[Any]:
    """What a call of a layer makes, and its gradients."""
    y = x.clone().requires_grad_()
    with mf.autocast(enabled=recipe is not None, recipe=recipe):
        z = call(y)
    z.sum().backward()
    return [z, y.grad, *[p.grad for p in layer.parameters()]]


@pytest.mark.parametrize("sizes", [_bincount, _parts, _read])
def test_sizes_that_a_graph_computes(sizes: Any) -> None:
    """Neither how many counts there are nor numbers in a list are constants of the graph."""
    torch._dynamo.reset()
    recipe = RECIPES["current"]()
    layer = make(Case("sizes", module=SINGLE), recipe)
    other = duplicate(layer)
    counter = Counter()
    compiled = torch.compile(
        lambda x: other(x, sizes(x)), backend=counter, fullgraph=True, dynamic=True
    )
    graphs = []
    settings: Any = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    with torch._dynamo.config.patch(settings):
        for rows in (21, 30, 7):
            x = torch.randn(rows, 48)
            compare(
                _step(layer, lambda x: layer(x, sizes(x)), x, recipe),
                _step(other, compiled, x, recipe),
            )
            graphs.append(counter.graphs)
        # PyTorch starts over, once, to make constants of floats.
        assert graphs[0] <= 2 and graphs[2] == graphs[0]


def _one_count(x: torch.Tensor) -> Any:
    return torch.bincount((x.detach()[:, 0] > 9).long(), minlength=1)  # the graph knows no length


def _one_sum(x: torch.Tensor) -> Any:
    return (x.detach()[:, 0] < 9).sum().reshape(1)


def _one_read(x: torch.Tensor) -> Any:
    return [int((x.detach()[:, 0] < 9).sum().item())]


@pytest.mark.parametrize("module", [{}, SINGLE], ids=["apart", "single"])
@pytest.mark.parametrize("name", ["none", "delayed", pytest.param("mxfp8", marks=pytest.mark.deep)])
@pytest.mark.parametrize(
    ("fused", "sizes"),
    [
        *[(False, sizes) for sizes in (_one_count, _one_sum, _one_read)],
        *[(True, sizes) for sizes in (_one_count, _one_sum)],  # an operation takes tensors
    ],
)
def test_sizes_that_a_graph_computes_for_one_expert(
    sizes: Any, name: str, module: dict[str, Any], fused: bool
) -> None:
    torch._dynamo.reset()
    recipe = RECIPES[name]() if name in RECIPES else None
    kind: Any = mf.ops.GroupedLinear if fused else mf.GroupedLinear
    layer = kind(1, 32, 64, device="cpu", **module)
    other = duplicate(layer)
    counter = Counter()
    compiled = torch.compile(lambda x: other(x, sizes(x)), backend=counter, fullgraph=True)
    settings: Any = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    with torch._dynamo.config.patch(settings):
        for rows in (21, 30, 7):
            x = torch.randn(rows, 32)
            compare(
                _step(layer, lambda x: layer(x, sizes(x)), x, recipe),
                _step(other, compiled, x, recipe),
            )
    assert counter.graphs <= 2


def test_wrong_sizes_that_a_graph_computes_are_refused() -> None:
    torch._dynamo.reset()
    layer = make(Case("sizes", module=SINGLE), RECIPES["current"]())

    def call(x: torch.Tensor) -> Any:
        return layer(x, [int(x.detach()[0, 0].item()), 0, 0, 5])

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(call, backend=Counter(), fullgraph=True)
        compiled(torch.full((7, 48), 2.0))
        for wrong in (3.0, -2.0):
            with pytest.raises((RuntimeError, ValueError)):
                compiled(torch.full((7, 48), wrong))
