"""How long a step is timed, on a device that is made up."""

from __future__ import annotations

import pytest
import torch

from minifloat.bench import measure


class Device:
    """A device whose steps take `seconds` each; the host takes nothing to enqueue one."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.now = 0.0  # of the host
        self.busy = 0.0  # the device has work until then
        self.rested = 0.0  # how long it had none
        self.steps = 0

    def step(self) -> None:
        self.rested += max(0.0, self.now - self.busy)
        self.busy = max(self.now, self.busy) + self.seconds
        self.steps += 1

    def wait(self, until: float) -> None:
        self.now = max(self.now, until)


@pytest.mark.parametrize(("seconds", "least"), [(5e-3, 40), (50e-3, 12), (20e-6, 10000)])
def test_a_step_sets_its_own_clocks(
    monkeypatch: pytest.MonkeyPatch, seconds: float, least: int
) -> None:
    device = Device(seconds)

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            self.at = 0.0
            self.steps = 0

        def record(self) -> None:
            self.at, self.steps = max(device.busy, device.now), device.steps

        def synchronize(self) -> None:
            device.wait(self.at)

        def elapsed_time(self, other: Event) -> float:
            timed.append((self.steps, other.steps - self.steps))
            return 1e3 * (other.at - self.at)

    timed: list[tuple[int, int]] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: device.wait(device.busy))
    monkeypatch.setattr(measure.time, "perf_counter", lambda: device.now)
    found = measure.device_time(device.step, 12)
    assert found == pytest.approx(1e6 * seconds)
    ((before, steps),) = timed
    assert before * seconds >= measure.WARM
    assert steps >= least
    assert device.rested == 0.0
