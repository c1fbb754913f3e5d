"""Layers whose steps are replayed on a GPU, against the same layers run by their ordinary code."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import minifloat
from minifloat import pairs, programs, replays, writer
from minifloat.writer import Program

from .cases import RECIPES

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
STEPS = 5
LAYERS: dict[str, Any] = {
    "linear": lambda: minifloat.Linear(160, 96, params_dtype=BF16),
    "odd": lambda: minifloat.Linear(50, 70, bias=False, params_dtype=BF16),
    "main_grad": lambda: minifloat.Linear(
        160, 96, bias=False, fuse_wgrad_accumulation=True, params_dtype=BF16
    ),
    "cached": lambda: minifloat.Linear(160, 96, cache_weights=True, params_dtype=BF16),
    "norm": lambda: minifloat.LayerNormLinear(160, 96, params_dtype=BF16),
    "mlp": lambda: minifloat.LayerNormMLP(
        160, 96, normalization="RMSNorm", activation="swiglu", bias=False, params_dtype=BF16
    ),
    "mlp_again": lambda: minifloat.LayerNormMLP(160, 96, checkpoint=True, params_dtype=BF16),
    "experts": lambda: minifloat.GroupedLinear(
        4, 160, 96, single_grouped_weight=True, single_grouped_bias=True, params_dtype=BF16
    ),
    "apart": lambda: minifloat.GroupedLinear(4, 160, 96, params_dtype=BF16),
}
# What is replayed: the rest gives the same results by its ordinary code.
EVERY = ("none", "delayed", "current", "block", "mxfp8", "custom")
WHOLE = dict.fromkeys(("experts", "apart"), ("delayed", "current", "block", "custom"))
SIZES = ([10, 20, 0, 34], [64, 0, 0, 0], [16, 16, 16, 16], [1, 2, 3, 58], [0, 0, 63, 1])


def steps(layer: Any, recipe: Any, run: Any = None) -> list[Tensor]:
    """All that each of a few steps makes, on other inputs each time; `run`: the layer, compiled."""
    seen: list[Tensor] = []
    width = layer.in_features
    for i in range(STEPS):
        torch.manual_seed(i)
        layer.zero_grad(set_to_none=True)
        x = torch.randn(64, width, device="cuda", dtype=BF16, requires_grad=True)
        more = ()
        if isinstance(layer, minifloat.GroupedLinear):
            more = (torch.tensor(SIZES[i], device="cuda"),)
        if getattr(layer, "fuse_wgrad_accumulation", False):
            layer.weight.main_grad = torch.ones(layer.weight.shape, device="cuda")
        with minifloat.autocast(enabled=recipe is not None, recipe=recipe):
            y = (layer if run is None else run)(x, *more)
        y.backward(torch.randn_like(y) * 2.0**i)
        made = [y, x.grad, *[p.grad for p in layer.parameters()], *layer.buffers()]
        if getattr(layer, "fuse_wgrad_accumulation", False):
            made.append(layer.weight.main_grad)
        seen += [t.detach().clone() for t in made if t is not None]
        with torch.no_grad():  # the optimizer's step, in the same memory
            for p in layer.parameters():
                p.mul_(1.125)
    return seen


def ordinary(kind: str, recipe: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[Tensor]]:
    """A layer, and what the steps of one like it make without replays."""
    torch.manual_seed(7)
    layer = LAYERS[kind]()
    if not hasattr(layer, "in_features"):
        layer.in_features = 160
    with monkeypatch.context() as patch:
        patch.setattr(replays, "_kind", lambda *given: None)
        return layer, steps(copy.deepcopy(layer), recipe)


@pytest.mark.parametrize("name", ["none", *RECIPES])
@pytest.mark.parametrize("kind", LAYERS)
def test_replayed_steps_are_the_ordinary_ones_bit_for_bit(
    kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = None if name == "none" else RECIPES[name]()
    layer, expected = ordinary(kind, recipe, monkeypatch)
    monkeypatch.setattr(replays, "_KINDS", {})
    found = steps(layer, recipe)
    assert len(found) == len(expected)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(a, b), i
    if name not in WHOLE.get(kind, EVERY):
        return
    recorded = [k for k in replays._KINDS.values() if isinstance(k, replays.Recorded)]
    assert recorded, list(replays._KINDS.values())
    found_programs = [p for r in recorded for p in r.backward.values()]
    assert found_programs and not [p for p in found_programs if isinstance(p, str)]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", ["linear", "mlp", "experts"])
def test_graphs_replay_their_operators_bit_for_bit(
    kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = RECIPES[name]()
    layer, expected = ordinary(kind, recipe, monkeypatch)
    monkeypatch.setattr(programs, "_OPERATORS", {})
    torch._dynamo.reset()
    found = steps(layer, recipe, torch.compile(layer, fullgraph=True, backend="aot_eager"))
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(a, b), i
    known = list(programs._OPERATORS.values())
    assert any(isinstance(k, tuple) for k in known), known


def test_replays_live_in_cuda_graphs_of_ones_own() -> None:
    torch.manual_seed(0)
    layer = LAYERS["linear"]()
    recipe = RECIPES["current"]()
    x = torch.randn(64, 160, device="cuda", dtype=BF16, requires_grad=True)

    def step() -> Tensor:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        with minifloat.autocast(recipe=recipe):
            y: Tensor = layer(x)
        y.sum().backward()
        return y

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            expected = step().detach().clone()
    torch.cuda.current_stream().wait_stream(side)
    layer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    graph.replay()
    assert torch.equal(y, expected)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ["delayed", "current", "block"])
@pytest.mark.parametrize("shape", [(64, 160, 96), (16, 1024, 128), (2048, 768, 3072)], ids=str)
def test_a_step_is_batches_with_the_bits_of_pytorchs_products(
    shape: tuple[int, int, int], name: str, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches and products of FP8 need no Python; whichever algorithm is taken, bits are the
    first one's."""
    written = replayed_as_ordinary(shape, name, bias, monkeypatch)
    assert written
    for program in written:
        assert "stream, p" in program.source
        called = list(map(id, program.run.__globals__.values()))
        assert id(torch._scaled_mm) not in called and id(torch._scaled_mm_v2) not in called


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ["none", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("shape", [(64, 160, 96), (2048, 768, 3072), (4096, 4096, 4096)], ids=str)
def test_products_of_values_have_the_bits_of_pytorchs(
    shape: tuple[int, int, int], name: str, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In batches or, where no algorithm has them, by PyTorch."""
    written = replayed_as_ordinary(shape, name, bias, monkeypatch)
    assert written or name not in EVERY


def replayed_as_ordinary(
    shape: tuple[int, int, int], name: str, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> list[Program]:
    """The programs of a layer's steps, which make what ordinary steps make."""
    torch.manual_seed(0)
    tokens, k, n = shape
    layer = minifloat.Linear(k, n, bias=bias, params_dtype=BF16)
    recipe = None if name == "none" else RECIPES[name]()
    x = torch.randn(tokens, k, device="cuda", dtype=BF16, requires_grad=True)
    grad = torch.randn(tokens, n, device="cuda", dtype=BF16)

    def made() -> list[list[Tensor | None]]:
        own, found = copy.deepcopy(layer), []
        for i in range(4):
            torch.manual_seed(i)  # of roundings that are drawn
            own.zero_grad(set_to_none=True)
            x.grad = None
            with minifloat.autocast(enabled=recipe is not None, recipe=recipe):
                y = own(x)
            y.backward(grad)
            found.append([y.detach(), x.grad, *[p.grad for p in own.parameters()]])
        return found

    monkeypatch.setattr(replays, "_KINDS", {})
    found = made()
    kinds = list(replays._KINDS.values())
    assert len(kinds) == 1
    recorded = [r for r in kinds if isinstance(r, replays.Recorded)]
    written = [p for r in recorded for p in (r.program, *r.backward.values())]
    assert name not in EVERY or all(isinstance(p, Program) for p in written)
    monkeypatch.setattr(replays, "_kind", lambda *given: None)
    for a, b in zip(found, made(), strict=True):
        assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))  # type: ignore[arg-type]
    return [p for p in written if isinstance(p, Program)]


def test_nothing_is_recorded_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """One ordinary step, then a capture, with whatever algorithms PyTorch takes."""
    monkeypatch.setattr(replays, "_KINDS", {})
    torch.manual_seed(0)
    layer, recipe = LAYERS["linear"](), RECIPES["current"]()
    x = torch.randn(80, 160, device="cuda", dtype=BF16, requires_grad=True)

    def step() -> Tensor:
        with minifloat.autocast(recipe=recipe):
            y: Tensor = layer(x)
        y.sum().backward()
        return y

    expected = step().detach().clone()
    layer.zero_grad(set_to_none=True)
    x.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    graph.replay()
    assert torch.equal(y, expected)
    assert list(replays._KINDS.values()) == [None]


def test_memory_dies_as_in_the_ordinary_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak of a replayed step is that of an ordinary one, and what batches and pairs hold."""
    recipe = RECIPES["current"]()
    x = torch.randn(4096, 1024, device="cuda", dtype=BF16, requires_grad=True)
    grad = torch.randn(4096, 2048, device="cuda", dtype=BF16)

    def peak() -> int:
        layer = minifloat.Linear(1024, 2048, bias=False, params_dtype=BF16)
        for _ in range(4):
            layer.zero_grad(set_to_none=True)
            x.grad = None
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            with minifloat.autocast(recipe=recipe):
                layer(x).backward(grad)
        return torch.cuda.max_memory_allocated()

    replayed = peak()
    monkeypatch.setattr(replays, "_kind", lambda *given: None)
    assert replayed <= peak() + writer.HELD + pairs.EARLIER
