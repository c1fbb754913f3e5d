"""Which algorithm of a product is taken: proposals that write numbers, and are timed by hand."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minifloat import cublaslt, env, fastest


class Trial:
    """A product whose proposals write numbers, as far as `fastest` goes."""

    def __init__(self, *made: float) -> None:
        self.a = cublaslt.Operand(4, 8, 8, torch.float8_e4m3fn)
        self.b = cublaslt.Operand(6, 8, 8, torch.float8_e5m2)
        self.dtype, self.fast, self.bias = torch.bfloat16, True, False
        self.proposals = [SimpleNamespace(workspace=0) for _ in made]
        self.attributes = [17, 18]
        self.made = made
        self.is_pytorchs = self.of_codes = True
        self.settings = ()

    def ordinary(self, a: torch.Tensor, b: torch.Tensor, ones: torch.Tensor) -> Any:
        return torch.ones(4, 6, dtype=torch.bfloat16)

    def point(self, addresses: list[int]) -> None:
        assert len(addresses) == 2
        self.scales = [ctypes.c_float.from_address(a).value for a in addresses]

    def run(self, i: int, a: int, b: int, d: int, scratch: int, stream: int) -> bool:
        if self.made[i] < 0:
            return False
        if self.made[i] > 0:  # else it leaves what there was
            out = torch.full((4, 6), self.made[i], dtype=torch.bfloat16)
            ctypes.memmove(d, out.data_ptr(), 48)
        return True


@pytest.mark.parametrize(
    ("made", "times", "best"),
    [
        ((1.0, 1.0, 1.0), (1.0, 0.9, 0.8), 2),
        ((1.0, 1.0, 2.0), (1.0, 0.9, 0.8), 1),  # other bits
        ((1.0, 0.0, -1.0), (1.0, 0.9, 0.8), 0),  # nothing written, and an error
        ((1.0, 1.0), (1.0, 0.995), 0),  # noise
        ((-1.0, 1.0), (1.0, 0.5), 0),  # nothing to compare with
    ],
)
def test_the_fastest_of_those_with_the_same_bits_is_taken(
    monkeypatch: pytest.MonkeyPatch, made: Any, times: Any, best: int
) -> None:
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0), raising=False
    )
    monkeypatch.setattr(fastest, "_times", lambda alike, run, *_: {i: times[i] for i in alike})
    state = torch.get_rng_state()
    assert fastest._fastest(Trial(*made), torch.device("cpu")) == best
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_scales_of_a_trial_are_those_of_products_whatever_the_default_dtype(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0), raising=False
    )
    monkeypatch.setattr(fastest, "_times", lambda alike, run, *_: dict.fromkeys(alike, 1.0))
    given: list[torch.dtype] = []

    class Other(Trial):
        def ordinary(self, a: torch.Tensor, b: torch.Tensor, ones: torch.Tensor) -> Any:
            given.append(ones.dtype)
            return super().ordinary(a, b, ones)

    trial, before = Other(1.0, 1.0), torch.get_default_dtype()
    trial.is_pytorchs = False
    torch.set_default_dtype(dtype)
    try:
        assert fastest._fastest(trial, torch.device("cpu")) == 0
    finally:
        torch.set_default_dtype(before)
    assert given == [torch.float32] and trial.scales == [1.0, 1.0]


@pytest.mark.parametrize(
    ("made", "best"), [((2.0, 1.0, 1.0), 2), ((1.0, 1.0, 2.0), 1), ((2.0, 0.0, -1.0), None)]
)
def test_bits_are_compared_with_what_pytorch_made_where_its_algorithm_is_not_known(
    monkeypatch: pytest.MonkeyPatch, made: Any, best: int | None
) -> None:
    times = (1.0, 0.99, 0.985)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0), raising=False
    )
    monkeypatch.setattr(fastest, "_times", lambda alike, run, *_: {i: times[i] for i in alike})
    trial = Trial(*made)
    trial.is_pytorchs = False
    assert fastest._fastest(trial, torch.device("cpu")) == best
    monkeypatch.setattr(env, "tunes", lambda: False)
    assert fastest.choose(trial) is None


def test_the_fastest_few_and_pytorchs_are_timed_with_care(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []

    def times(alike: list[int], run: Any, rounds: int, span: float) -> dict[int, float]:
        asked.append(list(alike))
        return {i: 1.0 - 0.01 * i for i in alike}

    monkeypatch.setattr(fastest, "_times", times)
    assert fastest._best(list(range(9)), None, True) == 8  # type: ignore[arg-type]
    assert asked == [list(range(9)), [0, 8, 7, 6, 5, 4]]


def test_trials_take_turns_behind_a_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host takes to enqueue is not timed."""
    now, slept, ran = [0.0], [], []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = now[0]

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: Any) -> float:
            return float(end.at - self.at)

    def run(i: int) -> None:
        ran.append(i)
        now[0] += (0.4, 0.2)[i]  # milliseconds

    cuda = SimpleNamespace(Event=Event, _sleep=slept.append)
    monkeypatch.setattr(fastest, "CUDA", cuda)
    times = fastest._times([0, 1], run, 3, 1e-3)
    assert times == pytest.approx({0: 4e-4, 1: 2e-4})
    assert ran[2:] == [0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1]
    assert slept == [n * fastest.AHEAD for n in (2, *[3] * 6)]


def test_a_product_is_tried_once_and_not_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []
    capturing = [True]
    monkeypatch.setattr(fastest, "_CHOSEN", {})
    monkeypatch.setattr(fastest, "_fits", lambda product: True)
    monkeypatch.setattr(fastest, "_fastest", lambda product, device: tried.append(product) or 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    assert fastest.choose(Trial(1.0, 1.0)) == 0 and tried == []
    capturing[0] = False
    assert [fastest.choose(Trial(1.0, 1.0)) for _ in range(3)] == [1, 1, 1] and len(tried) == 1
    assert fastest.choose(Trial(1.0)) == 0
    wider = Trial(1.0, 1.0)
    wider.b = wider.b._replace(lines=7)
    monkeypatch.setattr(fastest, "LIMIT", 1)
    assert fastest.choose(wider) == 0 and len(tried) == 1
    monkeypatch.setattr(env, "tunes", lambda: False)
    assert fastest.choose(Trial(1.0, 1.0)) == 0


def test_a_trial_without_memory_takes_pytorchs_and_is_not_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[Any] = []

    def fails(product: Any, device: Any) -> int:
        tried.append(product)
        raise torch.OutOfMemoryError("a limit of the process")

    monkeypatch.setattr(fastest, "_CHOSEN", {})
    monkeypatch.setattr(fastest, "_fits", lambda product: True)
    monkeypatch.setattr(fastest, "_fastest", fails)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert [fastest.choose(Trial(1.0, 1.0)) for _ in range(2)] == [0, 0] and len(tried) == 1
