"""The benchmark runner on the CPU, and its timing with a made-up device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import cases, run, timing

FAST = [
    "--device",
    "cpu",
    "--shapes",
    "32x48",
    "--iterations",
    "2",
    "--seconds",
    "0",
    "--warmup",
    "0",
]


def test_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "b.json"
    assert run.main([*FAST, "--quick", "--json", str(report)]) == 0
    result = json.loads(report.read_text())
    ids = [case.id for case in run.select("", quick=True)]
    assert [row["case"] for row in result["rows"]] == ids
    for row in result["rows"]:
        assert row["us"] > 0 and row["gb_s"] > 0 and row["percent_of_copy"] > 0
        assert row["p20"] <= row["us"] <= row["p80"]
    assert {"torch", "triton", "device", "git", "seed"} <= set(result["environment"])
    assert set(result["ceilings_before"]) == set(result["ceilings_after"]) == set(run.CEILINGS)
    printed = capsys.readouterr().out
    assert run.HEADER in printed
    assert all(id in printed for id in ids)


def test_select() -> None:
    assert run.select("", quick=False) == list(cases.CASES)
    found = run.select("nvfp4 row+col", quick=False)
    assert found and all("nvfp4" in c.id and "row+col" in c.id for c in found)
    assert len(run.select("", quick=True)) < len(cases.CASES) / 2


def test_nothing_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main([*FAST, "--filter", "fp3"]) == 2
    assert "fp3" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu() -> None:
    assert run.main([]) == 2


def test_a_case_that_fails_is_reported_and_the_rest_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(run.Case, "call", lambda case, x: broken if case.op == "swizzle" else list)
    assert run.main([*FAST, "--filter", "mxfp8_e4m3/row"]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if "mxfp8_e4m3/row" in line]
    assert sum("no such kernel" in line for line in lines) == 1
    assert len(lines) > 1


def test_drift() -> None:
    before = {"a": 100.0, "b": 100.0, "c": 100.0}
    lines = run.drifted(before, {"a": 102.9, "b": 96.0, "c": 104.0})
    assert [line.split()[1] for line in lines] == ["b", "c"]


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
