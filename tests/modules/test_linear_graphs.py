"""Linear on a GPU without eager's help: compiled, in CUDA graphs of PyTorch's and of one's own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import minifloat
from minifloat import recipe as recipes

from .graphs import EVERY, Captured, copies, same

pytestmark = pytest.mark.gpu

every = pytest.mark.parametrize("name", EVERY)
ROWS, IN, OUT = 192, 256, 384


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def linear(recipe: Any, **kwargs: Any) -> Any:
    torch.manual_seed(1)
    with minifloat.autocast(recipe=recipe):  # for which cache_weights makes its workspace
        made = minifloat.Linear(IN, OUT, params_dtype=torch.bfloat16, device="cuda", **kwargs)
    with torch.no_grad():
        made.bias.copy_(torch.linspace(-1, 1, OUT))
    return made


def sample(seed: int) -> Tensor:
    made = torch.randn(ROWS, IN, generator=torch.Generator().manual_seed(seed))
    return (made * (1 + seed)).to("cuda", torch.bfloat16)


def gradient() -> Tensor:
    return torch.linspace(-1, 1, ROWS * OUT, device="cuda").reshape(ROWS, OUT).bfloat16()


def step(
    call: Callable[..., Tensor], layer: Any, seed: int, recipe: Any, **forward: Any
) -> dict[str, Tensor]:
    layer.zero_grad(set_to_none=True)
    x, g = sample(seed).requires_grad_(), gradient()
    torch.manual_seed(seed)
    with minifloat.autocast(recipe=recipe):
        y = call(x, **forward)
    y.backward(g)
    return copies(layer, x, y)


@every
def test_compiled_with_the_bits_of_eager(name: str) -> None:
    recipe = EVERY[name]()
    layer = linear(recipe)
    other = copy.deepcopy(layer)
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    for i in range(3):
        same(step(layer, layer, i, recipe), step(compiled, other, i, recipe))


@every
def test_reduce_overhead(name: str) -> None:
    """Warm-up, recording and two replays."""
    recipe = EVERY[name]()
    layer = linear(recipe)
    other = copy.deepcopy(layer)
    counters.clear()
    # PyTorch's own generator: Inductor's draws other bits for stochastic rounding.
    with torch._inductor.config.patch(fallback_random=True):
        compiled = torch.compile(other, mode="reduce-overhead", fullgraph=True)
        for i in range(4):
            expected = step(layer, layer, i, recipe)
            torch.compiler.cudagraph_mark_step_begin()
            same(expected, step(compiled, other, i, recipe), close=("bias.grad",))
    assert counters["inductor"]["cudagraph_skips"] == 0


@every
def test_reduce_overhead_with_weights_cast_once(name: str) -> None:
    recipe = EVERY[name]()
    layer = linear(recipe, cache_weights=True)
    other = copy.deepcopy(layer)
    with torch._inductor.config.patch(fallback_random=True):
        compiled = torch.compile(other, mode="reduce-overhead", fullgraph=True)
        for i in range(8):
            first = i % 2 == 0
            if first:
                change(layer, i)
                change(other, i)
            expected = step(layer, layer, i, recipe, is_first_microbatch=first)
            torch.compiler.cudagraph_mark_step_begin()
            got = step(compiled, other, i, recipe, is_first_microbatch=first)
            same(expected, got, close=("bias.grad",))


def change(layer: Any, seed: int) -> None:
    """What an optimizer does."""
    with torch.no_grad():
        layer.weight.mul_(1.0 + seed / 8)


@every
def test_a_graph_of_ones_own(name: str) -> None:
    recipe = EVERY[name]()
    layer = linear(recipe)
    other = copy.deepcopy(layer)
    captured = Captured(other, sample, gradient(), recipe)
    before = {n: b.clone() for n, b in other.named_buffers()}
    for i in range(4):
        expected, got = step(layer, layer, i, recipe), captured.replay(i)
        same(expected, got)
        if name == "delayed":  # every replay is a step of its state
            for key in ("delayed.scale_input", "delayed.history_backward"):
                assert not torch.equal(got[key], before[key])
            before = got


def test_a_graph_does_not_make_a_workspace() -> None:
    recipe = recipes.Float8CurrentScaling()
    layer, x = linear(recipe, name="proj"), sample(0)
    other = linear(recipe)
    for first in (True, None):  # another one: kernels are compiled, and this layer has no workspace
        step(other, other, 0, recipe, is_first_microbatch=first)
    torch.cuda.synchronize()
    with (
        pytest.raises(RuntimeError, match=r"Linear\(proj\).*CUDA graph.*cache_weights=True"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
        minifloat.autocast(recipe=recipe),
    ):
        layer(x, is_first_microbatch=True)
    torch.cuda.synchronize()
    same(step(other, other, 1, recipe), step(layer, layer, 1, recipe))


@every
def test_a_graph_casts_into_a_workspace_that_is_there(name: str) -> None:
    recipe = EVERY[name]()
    layer = linear(recipe, cache_weights=True)
    other = copy.deepcopy(layer)
    graphs = {
        first: Captured(other, sample, gradient(), recipe, is_first_microbatch=first)
        for first in (True, False)
    }
    for i in range(6):
        change(layer, i)  # which the steps in between do not see
        change(other, i)
        first = i % 3 == 0
        expected = step(layer, layer, i, recipe, is_first_microbatch=first)
        same(expected, graphs[first].replay(i))
