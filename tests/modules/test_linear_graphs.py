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

from .cases import RECIPES

pytestmark = pytest.mark.gpu

EVERY = {
    **RECIPES,
    "nvfp4-nearest": lambda: recipes.NVFP4BlockScaling(disable_stochastic_rounding=True),
}
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


def copies(layer: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Everything a step leaves, by name, safe from the next one."""
    assert x.grad is not None
    found = {"output": y.detach(), "input.grad": x.grad}
    found |= {f"{name}.grad": p.grad for name, p in layer.named_parameters()}
    found |= dict(layer.named_buffers())
    return {name: t.clone() for name, t in found.items()}


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


def same(expected: dict[str, Tensor], got: dict[str, Tensor], close: tuple[str, ...] = ()) -> None:
    """Bit for bit; those in `close`, sums that Inductor orders anew, to two roundings of bf16."""
    assert list(expected) == list(got)
    for name, a in expected.items():
        b = got[name]
        assert a.shape == b.shape and a.dtype == b.dtype, name
        if name in close:
            assert (a - b).abs().max() <= 2**-7 * a.abs().max(), name
        else:
            off = (a.float() - b.float()).abs().max().item()
            assert torch.equal(a, b), f"{name}: {off} off"


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


class Captured:
    """Forward and backward of a layer in a CUDA graph, the autocast inside."""

    def __init__(self, layer: Any, recipe: Any, **forward: Any) -> None:
        self.layer, self.recipe, self.forward = layer, recipe, forward
        self.x, self.g = sample(0).requires_grad_(), gradient()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.clear()
                self.run()
        torch.cuda.current_stream().wait_stream(side)
        self.clear()
        layer.delayed.reset()  # of what the warm-up recorded
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.y = self.run()
        # A replay writes the gradients that the capture made.
        self.grads = [self.x.grad, *(p.grad for p in layer.parameters())]

    def clear(self) -> None:
        self.layer.zero_grad(set_to_none=True)
        self.x.grad = None

    def run(self) -> Tensor:
        with minifloat.autocast(recipe=self.recipe):
            y = self.layer(self.x, **self.forward)
        y.backward(self.g)
        return y.detach()  # type: ignore[no-any-return]

    def replay(self, seed: int) -> dict[str, Tensor]:
        with torch.no_grad():
            self.x.copy_(sample(seed))
        torch.manual_seed(seed)
        for t, grad in zip((self.x, *self.layer.parameters()), self.grads, strict=True):
            t.grad = grad
        self.graph.replay()
        return copies(self.layer, self.x, self.y)


@every
def test_a_graph_of_ones_own(name: str) -> None:
    recipe = EVERY[name]()
    layer = linear(recipe)
    other = copy.deepcopy(layer)
    captured = Captured(other, recipe)
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
    graphs = {first: Captured(other, recipe, is_first_microbatch=first) for first in (True, False)}
    for i in range(6):
        change(layer, i)  # which the steps in between do not see
        change(other, i)
        first = i % 3 == 0
        expected = step(layer, layer, i, recipe, is_first_microbatch=first)
        same(expected, graphs[first].replay(i))
