"""Recorded launches, without a GPU: a kernel here is a Python function of addresses."""

from __future__ import annotations

import gc
import linecache
import math
from contextlib import contextmanager
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minifloat import env, programs, writer
from minifloat.formats import Cast
from minifloat.recorder import Recorder
from minifloat.writer import Program

CAST = Cast("fp8_e4m3")


def kernel(seen: list[Any]) -> Any:
    """What Triton returns from a launch; its `run` notes the arguments."""
    return SimpleNamespace(run=lambda *a: seen.append(a), function="f", packed_metadata="m")


def record(work: Any, *inputs: torch.Tensor | None) -> Program | None:
    watching = Recorder(inputs)
    with watching:
        made = work(watching)
    return watching.program(made, torch.device("cpu"))


def test_a_program_allocates_and_launches_with_new_addresses(monkeypatch: Any) -> None:
    monkeypatch.setattr(writer, "_stream", lambda index: "stream")
    seen: list[Any] = []
    x, scale = torch.randn(4, 8), torch.ones(2)

    def work(watching: Recorder) -> list[torch.Tensor]:
        out = torch.empty((4, 8), dtype=torch.uint8)
        partial = torch.empty(3, dtype=torch.int32)
        watching.launch(kernel(seen), 7, [x, partial, 5, None])
        watching.launch(kernel(seen), 9, [x, scale[1:], out, 2.0])
        return [out]

    program = record(work, x, scale)
    assert program is not None
    other, others = torch.randn(4, 8), torch.ones(2)
    (made,) = program.run((other, others))
    assert made.shape == (4, 8) and made.dtype is torch.uint8
    first, second = seen
    head = (1, 1, "stream", "f", "m", None, None, None)
    assert first[0] == 7 and first[1:9] == head
    assert first[9] == other.data_ptr() and first[11:] == (5, None)
    assert second[0] == 9
    assert second[9:] == (other.data_ptr(), others.data_ptr() + 4, made.data_ptr(), 2.0)


def test_other_work_is_not_replayed() -> None:
    x = torch.randn(4, 8)
    assert record(lambda r: [torch.rand(3)], x) is None  # another one every time
    assert record(lambda r: [x.view(8, 4)], x) is None  # not its own memory

    def unknown(watching: Recorder) -> list[torch.Tensor]:
        watching.launch(kernel([]), 1, [hidden])
        return [torch.empty(2)]

    hidden = torch.randn(3)
    assert record(unknown, x) is None


def test_keys_tell_casts_shapes_strides_and_alignment_apart() -> None:
    x, one = torch.empty(64, 64, dtype=torch.bfloat16), torch.ones(2)
    keys = {
        programs.key("a", (x,), CAST, None),
        programs.key("b", (x,), CAST, None),
        programs.key("a", (x,), None, CAST),
        programs.key("a", (x,), Cast("fp8_e5m2"), None),
        programs.key("a", (x[:32],), CAST, None),
        programs.key("a", (x[:, :32],), CAST, None),
        programs.key("a", (x.view(-1)[1:33].view(4, 8),), CAST, None),
        programs.key("a", (x.float(),), CAST, None),
        programs.key("a", (x, one), CAST, None),
        programs.key("a", (x, one[:1]), CAST, None),
        programs.key("a", (x, one.long()), CAST, None),
        programs.key("a", (x, None), CAST, None),
    }
    assert len(keys) == 12
    assert programs.key("a", (x,), CAST) == programs.key("a", (x.clone(),), Cast("fp8_e4m3"))


def test_nothing_is_recorded_without_kernels() -> None:
    x = torch.randn(2, 2)
    calls = []

    def ordinary() -> list[torch.Tensor]:
        calls.append(programs.recording())
        return [x]

    assert programs.replay("key", (x,), ordinary) == [x]
    assert calls == [None] and programs.again("key", (x,)) is None


def test_views_of_one_storage_are_told_apart() -> None:
    """A program must not find its second input at some distance from its first."""
    memory = torch.zeros(1000, dtype=torch.uint8)
    a, b = memory[100:110], memory[500:520].view(4, 5)
    watching = Recorder([a, None, b])
    assert watching._find(b) == ("i2", 0)
    assert watching._find(b[1:]) == ("i2", 5)
    assert watching._find(a[3:]) == ("i0", 3)
    assert watching._find(memory[110:]) is None  # behind a, though in its storage
    assert watching._find(memory) is None


def test_memory_that_is_given_anew_is_known_by_its_last_owner() -> None:
    memory = torch.zeros(100, dtype=torch.uint8)
    watching = Recorder([memory[:10]])
    watching._made(memory[20:40])
    watching._made(memory[10:60])
    assert watching._find(memory[20:]) == ("t2", 10)
    assert watching._find(memory[:5]) == ("i0", 0)


def test_arguments_that_lie_in_one_another_must_do_so_again() -> None:
    """Which of the two a view was taken of cannot be told."""
    whole = torch.arange(8.0)
    program = record(lambda r: [whole[4:].add(1.0)], whole, whole[4:6])
    assert program is not None and program.fits((whole, whole[4:6]))
    (made,) = program.run((whole, whole[4:6]))
    assert torch.equal(made, whole[4:] + 1)
    assert not program.fits((whole, torch.zeros(2))) and not program.fits((whole, whole[2:4]))


def test_an_argument_inside_another_that_starts_alike_is_told_apart() -> None:
    whole = torch.arange(8.0)
    program = record(lambda r: [whole[4:].add(1.0)], whole[:2], whole, whole[4:])
    assert program is not None
    assert not program.fits((whole[:2], whole, torch.zeros(4)))


def test_values_that_leave_the_device_are_not_replayed() -> None:
    """The host could read them, and decide by them."""
    x = torch.randn(3)
    watching = Recorder([x])
    with watching:
        x.to("meta")
        made = x.add(1.0)
    assert watching.program([made], x.device) is None and "meta" in watching.why


def test_sizes_that_values_decide_are_not_replayed() -> None:
    x, mask = torch.randn(3), torch.tensor([True, False, True])
    assert record(lambda r: [x[mask]], x, mask) is None
    index = torch.tensor([2, 0])
    program = record(lambda r: [x[index]], x, index)
    assert program is not None
    assert torch.equal(program.run((x + 1, index - 1 + 1))[0], x[index] + 1)


def test_the_interpreter_is_not_replayed() -> None:
    x = torch.randn(3)

    def work(watching: Recorder) -> list[torch.Tensor]:
        watching.launch(None, 1, [x])
        return [x.add(1.0)]

    assert record(work, x) is None


def test_programs_that_are_gone_leave_nothing_behind() -> None:
    x = torch.randn(3)

    def left() -> int:
        gc.collect()
        return sum(name.startswith("<minifloat program") for name in linecache.cache)

    before = left()
    programs_ = [record(lambda r: [x.add(1.0)], x) for _ in range(3)]
    assert left() == before + 3
    programs_.clear()
    assert left() == before


def test_an_output_is_no_base_of_what_is_saved(monkeypatch: Any) -> None:
    """A saved view of an output would keep the graph alive that keeps it."""
    monkeypatch.setattr(writer, "_stream", lambda index: "stream")
    x = torch.randn(6)
    watching = Recorder([x])
    with watching:
        made = torch.empty(2, 3)
        watching.launch(kernel([]), 1, [x, made])
        y = made.view(1, 2, 3)
    program = watching.program([y, made], x.device, fresh=1)
    assert program is not None
    y, saved = program.run((x,))
    assert y.shape == (1, 2, 3) and y.data_ptr() == saved.data_ptr()
    assert not y._is_view() and saved._base is not y
    before = saved._version
    y.add_(1)
    assert saved._version > before  # autograd sees that it changed


def test_arguments_die_with_their_last_use_or_at_once() -> None:
    used, twice, unused = torch.randn(3), torch.randn(3), torch.randn(3)
    watching = Recorder([used, twice, twice, unused])
    with watching:
        made = used.add(twice).mul(2.0)
    program = watching.program([made], used.device, consume=True)
    assert program is not None
    lines = [line.strip() for line in program.source.splitlines()]
    assert lines[3] == "del i2, i3"  # behind the signature, the arguments and given.clear()
    assert sum(line.startswith("del ") for line in lines) > 1


def test_launches_go_to_the_device_of_their_tensors(monkeypatch: Any) -> None:
    """Triton launches on the current device."""
    pytest.importorskip("triton")
    from minifloat.kernels.variant import Config, Launch

    seen: list[Any] = []

    class Fn:
        arg_names = ("n", "x")

        def __getitem__(self, grid: Any) -> Any:
            return lambda **args: seen.append((grid, args["n"]))

    @contextmanager
    def device(index: int) -> Any:
        seen.append(index)
        yield
        seen.append("left")

    monkeypatch.setattr(torch.cuda, "device", device)
    launch = Launch(Fn(), 3, {"n": 5, "x": torch.ones(2)}, Config(1, 1, 4))
    launch.run()
    monkeypatch.setattr(env, "is_current", lambda index: False)
    launch.run()
    assert seen == [((3,), 5), -1, ((3,), 5), "left"]
    monkeypatch.undo()
    monkeypatch.setattr(env, "_current", lambda: 1)
    assert [env.is_current(i) for i in (-1, 0, 1)] == [True, False, True]


def test_constants_of_any_type_are_written(monkeypatch: Any) -> None:
    monkeypatch.setattr(writer, "_stream", lambda index: "stream")

    class Kind(IntEnum):
        ONE = 1

    seen: list[Any] = []
    x = torch.ones(2)
    values = (Kind.ONE, 1, True, 0.5, math.inf, -math.inf, "it's", None, torch.float32, x.shape)

    def work(watching: Recorder) -> list[torch.Tensor]:
        watching.launch(kernel(seen), 1, [x, *values])
        return [x.add(1.0)]

    program = record(work, x)
    assert program is not None
    program.run((x,))
    assert seen[0][10:] == values
