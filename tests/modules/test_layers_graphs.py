"""LayerNormLinear and LayerNormMLP by Inductor, and in CUDA graphs of PyTorch's and of one's own.

Their norms, activations, casts and products are operators, which Inductor runs as they are: what it
makes anew are sums of gradients over rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import minifloat

from .graphs import EVERY, Captured, copies, same

ROWS, HIDDEN, WIDE = 192, 256, 384
SUMS = ("bias.grad", "fc2_bias.grad")
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("LayerNormLinear", {}),
    "mlp": ("LayerNormMLP", {"normalization": "RMSNorm", "activation": "swiglu"}),
    "mlp_again": ("LayerNormMLP", {"activation": "gelu", "checkpoint": True}),
}
every = pytest.mark.parametrize("name", EVERY)
ways = pytest.mark.parametrize("way", WAYS)
gpu = pytest.mark.gpu
deep = pytest.mark.deep
DEVICES = [pytest.param("cpu", marks=deep), pytest.param("cuda", marks=(gpu, deep))]
QUICK = {("current", "linear"), *((name, "mlp") for name in ("delayed", "current", "block"))}
some = pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(n, w, marks=() if (n, w) in QUICK else deep, id=f"{n}-{w}")
        for n in EVERY
        for w in WAYS
    ],
)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def made(way: str, recipe: Any, device: str = "cuda", **more: Any) -> Any:
    kind, options = WAYS[way]
    torch.manual_seed(1)
    with minifloat.autocast(recipe=recipe):  # for which cache_weights makes its workspaces
        layer = getattr(minifloat, kind)(
            HIDDEN, WIDE, params_dtype=torch.bfloat16, device=device, **options, **more
        )
    with torch.no_grad():
        for name, p in layer.named_parameters():
            if p.dim() == 1:
                p.copy_(torch.linspace(-1, 1, p.numel()) + (2 if name.endswith("weight") else 0))
    return layer


def sample(seed: int, device: str = "cuda") -> Tensor:
    x = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(seed))
    return (x * (1 + seed)).to(device, torch.bfloat16)


def gradient(way: str, device: str = "cuda") -> Tensor:
    n = WIDE if way == "linear" else HIDDEN
    return torch.linspace(-1, 1, ROWS * n, device=device).reshape(ROWS, n).bfloat16()


def step(
    call: Callable[..., Any], layer: Any, way: str, seed: int, recipe: Any, **forward: Any
) -> dict[str, Tensor]:
    device = layer.layer_norm_weight.device.type
    layer.zero_grad(set_to_none=True)
    x = sample(seed, device).requires_grad_()
    torch.manual_seed(seed)
    with minifloat.autocast(recipe=recipe):
        y = call(x, **forward)
    y.backward(gradient(way, device))
    return copies(layer, x, y)


@pytest.mark.parametrize("device", DEVICES)
@ways
@every
def test_inductor(name: str, way: str, device: str) -> None:
    recipe = EVERY[name]()
    layer = made(way, recipe, device)
    other = copy.deepcopy(layer)
    with torch._inductor.config.patch(fallback_random=True):
        compiled = torch.compile(other, fullgraph=True)
        for i in range(2):
            expected = step(layer, layer, way, i, recipe)
            same(expected, step(compiled, other, way, i, recipe), close=SUMS)


@gpu
@some
def test_reduce_overhead(name: str, way: str) -> None:
    """Warm-up, recording and two replays."""
    recipe = EVERY[name]()
    layer = made(way, recipe)
    other = copy.deepcopy(layer)
    counters.clear()
    with torch._inductor.config.patch(fallback_random=True):
        compiled = torch.compile(other, mode="reduce-overhead", fullgraph=True)
        for i in range(4):
            expected = step(layer, layer, way, i, recipe)
            torch.compiler.cudagraph_mark_step_begin()
            same(expected, step(compiled, other, way, i, recipe), close=SUMS)
    assert counters["inductor"]["cudagraph_skips"] == 0


def change(layer: Any, seed: int) -> None:
    """What an optimizer does."""
    with torch.no_grad():
        for p in layer.parameters():
            if p.dim() == 2:
                p.mul_(1.0 + seed / 8)


@gpu
@ways
@every
def test_a_graph_of_ones_own(name: str, way: str) -> None:
    recipe = EVERY[name]()
    layer = made(way, recipe)
    other = copy.deepcopy(layer)
    captured = Captured(other, sample, gradient(way), recipe)
    before = {n: b.clone() for n, b in other.named_buffers()}
    for i in range(4):
        expected, got = step(layer, layer, way, i, recipe), captured.replay(i)
        same(expected, got)
        if name == "delayed":  # every replay is a step of its state
            moved = [n for n in before if n.endswith(("history_forward", "history_backward"))]
            assert moved and not any(torch.equal(got[n], before[n]) for n in moved)
            before = got


@gpu
@ways
@every
def test_a_graph_casts_into_workspaces_that_are_there(name: str, way: str) -> None:
    recipe = EVERY[name]()
    layer = made(way, recipe, cache_weights=True)
    other = copy.deepcopy(layer)
    graphs = {
        first: Captured(other, sample, gradient(way), recipe, is_first_microbatch=first)
        for first in (True, False)
    }
    for i in range(6):
        change(layer, i)  # which the steps in between do not see
        change(other, i)
        first = i % 3 == 0
        expected = step(layer, layer, way, i, recipe, is_first_microbatch=first)
        same(expected, graphs[first].replay(i))
