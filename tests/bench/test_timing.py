"""The timing of benchmarks, with a made-up device."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from minifloat.bench import timing


def test_stats() -> None:
    stats = timing.Stats.of([5.0, 1.0, 3.0, 2.0, 4.0, 100.0], host=7.0)
    assert (stats.median, stats.samples, stats.host) == (3.5, 6, 7.0)
    assert stats.p20 == 2.0 and stats.p80 == 5.0


class FakeDevice:
    """A stream that sleeps, and a host clock that only enqueueing moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, host: float) -> None:
        self.now = self.slept_until = 0.0
        self.device_time = 0.0
        self.host = host  # seconds the host needs for a call
        device = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                pass

            def record(self) -> None:
                self.at = device.device_time

            def query(self) -> bool:
                return device.now > device.slept_until

            def elapsed_time(self, other: Any) -> float:
                return 1e3 * float(other.at - self.at)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "_sleep", self.sleep)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)

    def sleep(self, cycles: int) -> None:
        self.slept_until = self.now + cycles / timing.SLEEP_HZ

    def call(self, seconds: float) -> timing.Call:
        def enqueue() -> None:
            self.now += self.host
            self.device_time += seconds

        return enqueue


def fake_timer(iterations: int) -> timing.Timer:
    timer = timing.Timer(torch.device("cpu"), iterations=iterations, seconds=60, warmup=1)
    timer.cuda = True
    return timer


def test_batches_are_timed_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(monkeypatch, host=1e-6)
    slow, fast = fake_timer(25).time([device.call(80e-6), device.call(40e-6)])
    assert slow.median == pytest.approx(80) and fast.median == pytest.approx(40)
    assert slow.samples == fast.samples == 30  # whole batches


def test_a_batch_that_outran_its_sleep_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(monkeypatch, host=1e-3)
    timer = fake_timer(10)
    samples: list[list[float]] = [[]]
    slept = timer._batch_cuda([device.call(50e-6)], samples, 1e-3)
    assert slept >= 10e-3  # ten calls take the host 10 ms
    assert len(samples[0]) == timing.BATCH


def test_a_host_that_waits_for_the_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(monkeypatch, host=10.0)
    with pytest.raises(RuntimeError, match="host"):
        fake_timer(10)._batch_cuda([device.call(50e-6)], [[]], 1e-3)


# ------------------------------------------------------------------------------- hosts that wait
def lenient(iterations: int) -> timing.Timer:
    cpu = torch.device("cpu")
    timer = timing.Timer(cpu, iterations=iterations, seconds=60, warmup=1, batch=1, strict=False)
    timer.cuda = True
    return timer


def test_a_call_that_waits_is_timed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(monkeypatch, host=1e-6)
    ahead = device.call(40e-6)

    def waits() -> None:
        device.now = max(device.now, device.slept_until) + 1e-6  # until the device is done
        ahead()
        device.device_time += 30e-6

    first, second = lenient(7).time([ahead, waits])
    assert (first.waits, second.waits) == (False, True)
    assert first.median == pytest.approx(40) and second.median == pytest.approx(70)
    assert first.samples == second.samples == 7


def test_a_host_that_is_never_ahead_is_said_to_be_in_the_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = FakeDevice(monkeypatch, host=10.0)
    timer = lenient(3)
    monkeypatch.setattr(timer, "waits", lambda call, host: False)
    (stats,) = timer.time([device.call(50e-6)])
    assert stats.waits and stats.samples == 3
    assert stats.median == pytest.approx(50)


def test_a_timer_leaves_the_collector_as_it_was() -> None:
    timer = timing.Timer(torch.device("cpu"), iterations=1, seconds=0, warmup=0)
    seen = []
    timer.time([lambda: seen.append(gc.isenabled())])
    assert set(seen) == {False} and gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        timer.time([lambda: 1 / 0])
    assert gc.isenabled()


def test_fewer_samples_when_time_is_up() -> None:
    timer = timing.Timer(torch.device("cpu"), iterations=100, seconds=0, warmup=0, least=3)
    (stats,) = timer.time([lambda: None])
    assert stats.samples == 3
