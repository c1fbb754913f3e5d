"""On a GPU nothing of GroupedLinear waits for the device, and nothing grows with the experts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import minifloat as mf
from minifloat import ops, programs, replays, writer
from minifloat import recipe as recipes

pytestmark = pytest.mark.gpu

RECIPES: dict[str, Any] = {
    "none": lambda: None,
    "delayed": recipes.DelayedScaling,
    "current": recipes.Float8CurrentScaling,
    "block": recipes.Float8BlockScaling,
    "mxfp8": recipes.MXFP8BlockScaling,
    "nvfp4": recipes.NVFP4BlockScaling,
}
BF16 = torch.bfloat16
SIZES = ([40, 0, 70, 18], [0, 128, 0, 0], [1, 2, 3, 122])
WAYS = ("single", "apart", "list", "op")


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever waits for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Layer:
    """A grouped layer and a step of it."""

    def __init__(self, way: str, recipe: Any, experts: int = 4, rows: int = 128) -> None:
        torch.manual_seed(0)
        names = ("single_grouped_weight", "single_grouped_bias")
        common: dict[str, Any] = {"device": "cuda", **dict.fromkeys(names, way != "apart")}
        if way == "op":
            made: Any = ops.GroupedLinear(experts, 256, 128, dtype=BF16, **common)
        else:
            made = mf.GroupedLinear(experts, 256, 128, params_dtype=BF16, **common)
        self.layer, self.recipe = made, recipe
        self.x = torch.randn(rows, 256, device="cuda", dtype=BF16, requires_grad=True)
        self.grad = torch.randn(rows, 128, device="cuda", dtype=BF16)

    def step(self, sizes: Any) -> Tensor:
        with mf.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            y = self.layer(self.x, sizes)
        y.backward(self.grad)
        return y.detach()

    def clear(self) -> None:
        self.x.grad = None
        self.layer.zero_grad(set_to_none=True)

    def results(self, y: Tensor) -> list[Tensor]:
        grads = [p.grad for p in self.layer.parameters()]
        return [t.clone() for t in (y, self.x.grad, *grads) if t is not None]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", RECIPES)
def test_nothing_waits(name: str, way: str) -> None:
    one = Layer(way, RECIPES[name]())
    given = [s if way == "list" else torch.tensor(s, device="cuda") for s in SIZES]
    for sizes in given:  # what is compiled or recorded once
        one.step(sizes)
    one.clear()
    with no_waiting():
        for sizes in given:
            one.step(sizes)
    assert one.x.grad is not None and bool(one.x.grad.isfinite().all())


@pytest.mark.parametrize("name", RECIPES)
def test_a_block_of_experts_waits_for_nothing(name: str) -> None:
    torch.manual_seed(0)
    recipe = RECIPES[name]()
    model = ops.Sequential(
        ops.GroupedLinear(4, 256, 512, device="cuda", dtype=BF16, single_grouped_weight=True),
        ops.ScaledSwiGLU(),
        ops.GroupedLinear(4, 256, 256, device="cuda", dtype=BF16, single_grouped_weight=True),
    )
    x = torch.randn(64, 256, device="cuda", dtype=BF16, requires_grad=True)
    scores = torch.rand(64, 4, device="cuda", requires_grad=True)

    def step() -> None:
        chosen = scores.topk(2, -1).indices
        mask = torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True)
        rows, probs, row_id_map = mf.moe_permute_with_probs(x, scores * mask, mask, 128)
        counts = mask.sum(0)
        with mf.autocast(enabled=recipe is not None, recipe=recipe):
            y = model(rows, counts, probs, counts)
        mf.moe_unpermute(y, row_id_map).sum().backward()

    for _ in range(2):
        step()
    with no_waiting():
        step()
    assert scores.grad is not None and bool(scores.grad.isfinite().all())


@pytest.mark.parametrize("way", ["single", "op"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_cuda_graph_runs_other_sizes(name: str, way: str) -> None:
    """Captured once; replayed with other splits, it computes what eager computes."""
    recipe = RECIPES[name]()
    if name == "nvfp4":
        recipe = recipes.NVFP4BlockScaling(disable_stochastic_rounding=True)
    captured, eager = Layer(way, recipe), Layer(way, recipe)
    sizes = torch.tensor(SIZES[0], device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for one in (captured, eager):
            for _ in range(3):
                one.step(sizes)
                one.clear()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = captured.step(sizes)
    for splits in SIZES:
        sizes.copy_(torch.tensor(splits))
        graph.replay()
        expected = eager.results(eager.step(sizes))
        for a, b in zip(expected, captured.results(y), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
        eager.clear()


def kernels(name: str, experts: int) -> int:
    """Kernels of a step."""
    one = Layer("single", RECIPES[name](), experts, 16 * experts)
    sizes = torch.full((experts,), 16, device="cuda")
    for _ in range(3):
        one.step(sizes)
        one.clear()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        one.step(sizes)
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type.name == "CUDA"]
    return len([e for e in events if not e.name.startswith("Mem")])


@pytest.mark.parametrize("name", RECIPES)
def test_launches_do_not_grow_with_the_experts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less those that poison the memory of programs: large buffers are allocations of their own."""
    plain = getattr(writer._allocate, "__wrapped__", writer._allocate)
    monkeypatch.setattr(writer, "_allocate", plain)
    monkeypatch.setattr(replays, "_KINDS", {})
    monkeypatch.setattr(programs, "_PROGRAMS", {})
    few, many = kernels(name, 8), kernels(name, 64)
    assert 0 < many <= few


def test_a_list_cannot_be_captured() -> None:
    one = Layer("list", None)
    one.step(SIZES[0])
    one.clear()
    with (
        pytest.raises(RuntimeError, match="sizes on the host inside the capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        one.step(SIZES[0])


PROGRAM = """
import torch, minifloat
layer = minifloat.GroupedLinear(2, 32, 32, name="moe", bias=False, params_dtype=torch.bfloat16)
x = torch.randn(8, 32, device="cuda", dtype=torch.bfloat16)
layer(x, torch.tensor([4, 4], device="cuda"))
torch.cuda.synchronize()
print("right sizes pass", flush=True)
layer(x, torch.tensor([{sizes}], device="cuda"))
torch.cuda.synchronize()
"""


@pytest.mark.parametrize("sizes", ["4, 5", "9, -1"])
def test_wrong_sizes_stop_the_device(sizes: str) -> None:
    """In a process of its own: the device is lost to it."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(sizes=sizes)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode != 0 and "right sizes pass" in done.stdout
    assert "GroupedLinear(moe): m_splits: none may be negative" in done.stderr + done.stdout


@pytest.mark.parametrize("name", RECIPES)
def test_gradients_and_splits_of_any_strides(name: str) -> None:
    """A sum's gradient has one element, and a column of counts is not contiguous."""
    made = Layer("single", RECIPES[name]())
    counts = torch.tensor([[40, 1], [0, 2], [70, 3], [18, 4]], device="cuda")
    found = []
    for sizes, whole in ((counts[:, 0], False), (counts[:, 0].contiguous(), True)):
        made.clear()
        torch.manual_seed(0)
        with mf.autocast(enabled=made.recipe is not None, recipe=made.recipe):
            y = made.layer(made.x, sizes)
        one = torch.ones((), device="cuda", dtype=BF16).expand(y.shape)
        y.backward(one.contiguous() if whole else one)
        found.append(made.results(y.detach()))
    if name not in ("delayed", "nvfp4"):  # whose second step is not the first
        for a, b in zip(*found, strict=True):
            assert torch.equal(a, b)
    assert all(t.isfinite().all() for t in found[0])
