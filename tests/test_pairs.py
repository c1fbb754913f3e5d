"""Launches two by two, without a GPU: what stands for a kernel tells what it was made of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minifloat import env, pairs
from minifloat.recorder import Recorder
from minifloat.steps import Address, Allocate, Call, Constant, Launch, Record


class Kernel:
    """What a launch is an instance of; `beside` makes one named after both."""

    def __init__(self, name: str, file: str = "casts", reduces: bool = False, **given: Any) -> None:
        self.name = name
        names = ["x", "partial"] if reduces else ["x", "out"]
        self.fn = SimpleNamespace(fn=SimpleNamespace(__module__=file), arg_names=names)
        metadata = SimpleNamespace(num_warps=4)
        self.given = {"n_regs": 40, "n_spills": 0, "metadata": metadata, **given}  # of two in one
        self.exists = True

    @property
    def kernel(self) -> Any:
        return SimpleNamespace(name=self.name, n_regs=40, n_spills=0)

    def beside(self, other: Kernel) -> Any:
        made = SimpleNamespace(name=f"{self.name}+{other.name}", **self.given)
        return (made, 70) if self.exists else None


def watched(work: Any, *inputs: torch.Tensor) -> Record:
    watching = Recorder(inputs)
    with watching:
        work(watching)
    assert watching.replayable, watching.why
    return Record(watching.steps, watching.forms, watching.inputs, watching.shared)


def paired(record: Record) -> Record:
    return pairs.paired(record, torch.device("cpu"))


def named(record: Record) -> list[str]:
    """Launches by the names of their kernels, calls by the operator's."""
    return [
        s.kernel.name if isinstance(s, Launch) else s.function._schema.name
        for s in record.steps
        if not isinstance(s, Allocate)
    ]


def cast(watching: Recorder, of: Kernel, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    watching.launch(of.kernel, 7, [x, out, 5], of)
    return out


def layer(watching: Recorder, *of: Kernel) -> None:
    x, w = cast(watching, of[0], X), None
    first = X @ x.t()
    w = cast(watching, of[1], W)
    first @ w


X, W, V = (torch.randn(8, 8) for _ in range(3))
A, B = Kernel("a"), Kernel("b")


def test_two_casts_with_a_product_between_are_one_launch() -> None:
    record = watched(lambda watching: layer(watching, A, B), X, W)
    assert named(record) == ["a", "aten::mm", "b", "aten::mm"]
    made = paired(record)
    assert named(made) == ["a+b", "aten::mm", "aten::mm"]
    (both,) = (s for s in made.steps if isinstance(s, Launch))
    alone = [s for s in record.steps if isinstance(s, Launch)]
    assert both.programs == 70
    assert both.args == [Constant(7), *alone[0].args, *alone[1].args]


def test_memory_is_there_before_the_launch() -> None:
    made = paired(watched(lambda watching: layer(watching, A, B), X, W))
    at = next(i for i, s in enumerate(made.steps) if isinstance(s, Launch))
    launch = made.steps[at]
    assert isinstance(launch, Launch)
    touched = {a.region for a in launch.args if isinstance(a, Address)} - {"i0", "i1"}
    assert touched == {s.region for s in made.steps[:at] if isinstance(s, Allocate)}
    assert len(made.steps) == 5  # nothing came twice


def test_passes_pair_with_passes_of_their_kind() -> None:
    """amax x, cast x, amax w, cast w -> amax both, cast both."""

    def work(watching: Recorder) -> None:
        for given in (X, W):
            out, partial = torch.empty(8, 8), torch.empty(8)
            for of in (Kernel("amax", reduces=True), Kernel("cast")):
                watching.launch(of.kernel, 7, [given, partial, out], of)

    assert named(paired(watched(work, X, W))) == ["amax+amax", "cast+cast"]


@pytest.mark.parametrize("other", [Kernel("c", file="norms"), Kernel("c", reduces=True)])
def test_kernels_of_another_kind_stay_alone(other: Kernel) -> None:
    record = watched(lambda watching: layer(watching, A, other), X, W)
    assert paired(record).steps == record.steps


@pytest.mark.parametrize("worse", [{"n_regs": 81}, {"n_spills": 8}])
def test_a_kernel_that_is_worse_than_the_two_is_not_taken(
    worse: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env, "multiprocessors", lambda device: 1)
    first = Kernel("a", **worse)
    record = watched(lambda watching: layer(watching, first, B), X, W)
    assert paired(record).steps == record.steps


def test_registers_do_not_matter_where_all_programs_run_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = Kernel("a", n_regs=128)  # 4 programs on a multiprocessor, and there are 70
    record = watched(lambda watching: layer(watching, first, B), X, W)
    monkeypatch.setattr(env, "multiprocessors", lambda device: 17)
    assert paired(record).steps == record.steps
    monkeypatch.setattr(env, "multiprocessors", lambda device: 18)
    assert named(paired(record))[0] == "a+b"


def test_kernels_that_nobody_joins_stay_alone() -> None:
    first = Kernel("a")
    first.exists = False
    record = watched(lambda watching: layer(watching, first, B), X, W)
    assert paired(record).steps == record.steps


def test_what_reads_a_result_waits_for_it() -> None:
    def work(watching: Recorder) -> None:
        cast(watching, B, cast(watching, A, X))

    record = watched(work, X)
    assert paired(record).steps == record.steps


def test_what_a_step_between_touches_is_not_moved_before_it() -> None:
    def work(watching: Recorder) -> None:
        y = cast(watching, A, X)
        W.add_(y)
        cast(watching, B, W)

    record = watched(work, X, W)
    assert paired(record).steps == record.steps


@pytest.mark.parametrize("limit", ["EARLIER", "SHORT"])
def test_large_ones_stay_alone(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, limit, 8 * 8 * 4 - 1)
    record = watched(lambda watching: layer(watching, A, B), X, W)
    assert paired(record).steps == record.steps


@pytest.mark.parametrize("shared", [{(0, 1, 0)}, {(2, 1, 8), (0, 2, 8)}])
def test_arguments_that_share_memory_keep_their_order(shared: set[Any]) -> None:
    record = watched(lambda watching: layer(watching, A, B), X, W, V)
    assert named(paired(record._replace(shared={(1, 2, 8)}))) != named(record)
    record = record._replace(shared=shared)
    assert paired(record).steps == record.steps


def test_three_are_two_and_one() -> None:
    def work(watching: Recorder) -> None:
        for of, given in ((A, X), (B, W), (Kernel("c"), V)):
            cast(watching, of, given)

    assert named(paired(watched(work, X, W, V))) == ["a+b", "c"]


def test_calls_keep_their_order() -> None:
    def work(watching: Recorder) -> None:
        y = X @ W
        layer(watching, A, B)
        y @ X

    made = paired(watched(work, X, W))
    assert named(made) == ["aten::mm", "a+b", "aten::mm", "aten::mm", "aten::mm"]
    assert all(isinstance(s, Allocate | Call | Launch) for s in made.steps)
