"""Recorded launches, without a GPU: a kernel here is a Python function of addresses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from minifloat import programs, recorder
from minifloat.formats import Cast
from minifloat.recorder import Program, Recorder

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
    monkeypatch.setattr(recorder, "_stream", lambda index: "stream")
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
    x = torch.empty(64, 64, dtype=torch.bfloat16)
    keys = {
        programs.key("a", x, CAST, None),
        programs.key("b", x, CAST, None),
        programs.key("a", x, None, CAST),
        programs.key("a", x, Cast("fp8_e5m2"), None),
        programs.key("a", x[:32], CAST, None),
        programs.key("a", x[:, :32], CAST, None),
        programs.key("a", x.view(-1)[1:33].view(4, 8), CAST, None),
        programs.key("a", x.float(), CAST, None),
        programs.key("a", x, CAST, None, torch.ones(1)),
        programs.key("a", x, CAST, None, None),
    }
    assert len(keys) == 10
    assert programs.key("a", x, CAST, None) == programs.key("a", x.clone(), Cast("fp8_e4m3"), None)


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
