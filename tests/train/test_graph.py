"""Steps in CUDA graphs: the same losses to the bit, resumed or not; what cannot be is told."""

from __future__ import annotations

import contextlib
import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minifloat.train import Options, TrainError, train
from minifloat.train.graph import ORDINARY, StepGraph
from minifloat.train.repeats import repeatable
from minifloat.train.run import _blocks, _graphs, _repeats
from minifloat.train.world import World

gpu = pytest.mark.gpu
deep = pytest.mark.deep
RECIPES = ["bf16", "delayed", "current", "block", "mxfp8", "nvfp4"]


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"def f{i}(x): return x * {i} + {i * i}\n" for i in range(2000)))
    return str(path)


def run(tmp_path: Path, corpus: str, out: str, **changes: Any) -> list[Any]:
    given = {"preset": "smoke", "steps": 12, "batch_size": 4, "device": "cuda", "compile": False}
    more = {"data": corpus, "baseline": False, "out": str(tmp_path / out), "deterministic": True}
    train(Options(**{**given, **more, **changes}))
    return [json.loads(s) for s in (tmp_path / out / "metrics.jsonl").read_text().splitlines()]


def test_where_a_step_is_a_graph() -> None:
    gpu, cpu = World(torch.device("cuda")), World(torch.device("cpu"))
    several = World(torch.device("cuda"), 1, 2)
    assert _graphs(Options(), gpu)
    assert not _graphs(Options(cuda_graphs=False), gpu)
    assert not _graphs(Options(), several) and not _graphs(Options(), cpu)
    assert not _graphs(Options(cuda_graphs=False), cpu)
    with pytest.raises(TrainError, match="--cuda-graphs: needs a CUDA GPU, and this runs on cpu"):
        _graphs(Options(cuda_graphs=True), cpu)
    with pytest.raises(TrainError, match="--cuda-graphs: is for one process"):
        _graphs(Options(cuda_graphs=True), several)


def test_a_checkpoint_does_not_depend_on_graphs() -> None:
    with_graphs, without = (Options(cuda_graphs=on).checked().identity() for on in (True, False))
    assert with_graphs == without


def test_a_graph_has_one_shape() -> None:
    """Told before anything is overwritten: `copy_` would broadcast."""
    graph = StepGraph.__new__(StepGraph)  # a CPU has no streams
    graph.inputs, graph.calls = (torch.zeros(4, 3), torch.zeros(4)), 3
    with pytest.raises(ValueError, match=r"input 1: got shape \(1,\), the first call had \(4,\)"):
        graph(torch.ones(4, 3), torch.ones(1))
    assert graph.calls == 3 and not graph.inputs[0].any()


def test_where_blocks_are_compiled_one_by_one() -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert _blocks(Options(), gpu) and not _blocks(Options(), cpu)
    assert not _blocks(Options(compile=False), gpu)
    assert not _blocks(Options(compile_blocks=False), gpu)
    assert _blocks(Options(compile_blocks=True), cpu)


def test_where_steps_repeat_to_the_bit() -> None:
    gpu, cpu = World(torch.device("cuda")), World(torch.device("cpu"))
    saved = Options(checkpoint_dir="somewhere")
    assert _repeats(saved, gpu) and _repeats(Options(deterministic=True), gpu)
    assert not _repeats(Options(), gpu) and not _repeats(saved, cpu)
    assert not _repeats(Options(checkpoint_dir="somewhere", deterministic=False), gpu)
    assert Options(deterministic=True).identity() != Options().identity()


def test_repeatable_puts_back_what_was_set() -> None:
    def found() -> tuple[int, bool]:
        memory = torch.utils.deterministic
        return torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory

    for before in (0, 1):
        torch.set_deterministic_debug_mode(before)
        try:
            with repeatable(False):
                assert found() == (before, True)
            with pytest.raises(KeyError), repeatable(True):
                assert found() == (2, False)
                raise KeyError
            assert found() == (before, True)
        finally:
            torch.set_deterministic_debug_mode(0)


@gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_are_those_of_steps_without_graphs(tmp_path, corpus, recipe: str) -> None:
    without = run(tmp_path, corpus, "without", recipe=recipe, cuda_graphs=False)
    assert run(tmp_path, corpus, "with", recipe=recipe) == without
    assert without[-1]["loss"] < without[0]["loss"]


@gpu
@deep
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_too(tmp_path, corpus, recipe: str, blocks: bool) -> None:
    same = {"recipe": recipe, "compile": True, "compile_blocks": blocks}
    without = run(tmp_path, corpus, "without", cuda_graphs=False, **same)
    assert run(tmp_path, corpus, "with", **same) == without


@gpu
@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
def test_a_resumed_run_is_bit_equal(tmp_path, corpus, recipe: str) -> None:
    whole = run(tmp_path, corpus, "whole", recipe=recipe)
    saved = {"recipe": recipe, "checkpoint_dir": str(tmp_path / "saved")}
    assert run(tmp_path, corpus, "part", stop_after=6, **saved) == whole[:6]
    assert run(tmp_path, corpus, "part", resume=True, **saved) == whole


@gpu
def test_experts_in_a_graph(tmp_path, corpus) -> None:
    same = {"recipe": "current", "experts": 4}
    without = run(tmp_path, corpus, "without", cuda_graphs=False, **same)
    assert run(tmp_path, corpus, "with", **same) == without


@gpu
def test_a_call_does_what_the_work_does() -> None:
    total = torch.zeros(3, device="cuda")
    seen = 0

    def work(x: Tensor) -> Tensor:
        nonlocal seen
        seen += 1
        total.add_(x)
        return total + torch.rand(3, device="cuda")

    step, results = StepGraph(work), []
    for i in range(ORDINARY + 3):
        torch.manual_seed(i)
        results.append(step(torch.full((3,), float(i), device="cuda")))
    assert seen == ORDINARY + 1  # the last one is the capture
    for i, result in enumerate(results):  # none is overwritten by those that follow
        torch.manual_seed(i)
        assert torch.equal(result, sum(range(i + 1)) + torch.rand(3, device="cuda"))
    step.release()
    assert step(torch.zeros(3, device="cuda")).shape == (3,)
    assert seen == ORDINARY + 2


@pytest.mark.parametrize(
    ("problem", "raised", "said"),
    [
        (RuntimeError("no such thing in a capture\nand more"), TrainError, "no such thing in a"),
        (torch.OutOfMemoryError("too much"), RuntimeError, "the capture was invalidated"),
    ],
)
def test_what_cannot_be_captured_is_told(monkeypatch, problem, raised, said) -> None:
    """A capture that failed leaves the device's generator unusable: these are stand-ins."""

    @contextlib.contextmanager
    def capture(*args: Any, **options: Any) -> Iterator[None]:
        try:
            yield
        finally:
            raise RuntimeError("the capture was invalidated")

    nothing = types.SimpleNamespace(wait_stream=lambda other: None)
    for name in ("Stream", "current_stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, lambda: nothing)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", capture)
    calls = 0

    def work(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > ORDINARY:
            raise problem
        return x + 1

    step, x = StepGraph(work), torch.ones(3)
    for _ in range(ORDINARY):
        assert torch.equal(step(x), x + 1)
    with pytest.raises(raised, match=said) as found:
        step(x)
    if raised is TrainError:
        assert "--no-cuda-graphs" in str(found.value) and "\n" not in str(found.value)
    else:
        assert found.value.__context__ is problem  # from which the sentence about memory is made
