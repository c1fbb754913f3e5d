"""`minifloat bench` from end to end, on the CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from minifloat.bench import Options, measure, runner
from minifloat.bench.cases import CPU_QUICK, Case
from minifloat.bench.providers import LIBRARIES, Provider, _plain
from minifloat.bench.step import Step
from minifloat.bench.work import Work
from minifloat.cli import main

SMALL = ("--quick", "--device", "cpu", "--seconds", "0.01")
TINY = "linear/16x16x16"


def run(folder: Path, *words: str) -> int:
    return main(["bench", *SMALL, "--out", str(folder), *words])


def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


def add(monkeypatch: pytest.MonkeyPatch, name: str, build: Any, **fields: Any) -> None:
    """A library of one provider, by that name."""
    monkeypatch.setitem(LIBRARIES, name, lambda _: [Provider(name, name, build, **fields)])


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The quick run, once: (its folder, what it printed)."""
    folder = tmp_path_factory.mktemp("quick")
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr("builtins.print", lambda *words, **_: printed.append(" ".join(words)))
        assert main(["bench", "--quick", "--device", "cpu", "--out", str(folder)]) == 0
    return folder, "\n".join(printed)


def test_quick_measures_every_recipe_in_every_kind(quick: tuple[Path, str]) -> None:
    found = results(quick[0])
    assert [record["case"] for record in found["cases"]] == [c.id for c in CPU_QUICK]
    for record in found["cases"]:
        rows = {row["provider"]: row for row in record["rows"]}
        assert {"eager", "compile", "delayed", "current", "block", "mxfp8", "nvfp4"} <= set(rows)
        for name in ("eager", "delayed", "current", "block", "mxfp8", "nvfp4"):
            row = rows[name]
            assert row["status"] == "ok", row
            assert row["p20"] <= row["us"] <= row["p80"] and row["samples"] >= 3
            assert row["us_vs_eager"] == pytest.approx(row["us"] / rows["eager"]["us"])
            assert row["percent_of_limit"] == pytest.approx(100 * row["limit_us"] / row["us"])
            assert set(row["errors"]) == set(row["expected_errors"])
        assert rows["compile"]["status"] == "not measured" and rows["compile"]["reason"]
    assert set(found["ceilings_before"]) == set(found["ceilings_after"]) == {"copy", "fp32"}
    assert {"torch", "device", "git", "seed", "dtype"} <= set(found["environment"])


def test_quick_prints_a_table_and_says_what_is_missing(quick: tuple[Path, str]) -> None:
    folder, printed = quick
    page = (folder / "results.md").read_text()
    for case in CPU_QUICK:
        assert case.id in printed and f"## {case.id}" in page
    for word in ("provider", "/eager", "% limit", "error", "ceilings of this run"):
        assert word in printed
    assert "not measured: compile: compiling takes a CPU longer" in printed
    for package in ("torchao", "transformer_engine", "liger_kernel"):
        if package not in sys.modules:
            assert f"{package} is not installed" in printed or package in page


def test_no_matplotlib_no_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    assert run(tmp_path, "--case", TINY, "--providers", "eager") == 0
    assert "no plot: matplotlib" in capsys.readouterr().out
    assert (tmp_path / "results.json").exists() and not (tmp_path / "roofline.png").exists()


def test_the_plot(quick: tuple[Path, str]) -> None:
    pytest.importorskip("matplotlib")
    assert main(["bench", "--report", "--out", str(quick[0])]) == 0
    assert (quick[0] / "roofline.png").read_bytes().startswith(b"\x89PNG")


def test_report_measures_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--report", "--out", str(tmp_path)]) == 2
    assert "has no results.jsonl" in capsys.readouterr().err
    assert run(tmp_path, "--case", TINY, "--providers", "eager") == 0
    before = (tmp_path / "results.jsonl").read_text()
    (tmp_path / "results.md").unlink()
    assert main(["bench", "--report", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "results.jsonl").read_text() == before
    assert TINY in (tmp_path / "results.md").read_text()


# ------------------------------------------------------------------------------------------ resume
def test_resume_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--providers", "eager", "--case", TINY, "--case", "linear/16x16x32")
    real = runner.Bench.case

    def stop(self: runner.Bench, case: Case) -> Any:
        if case.id != TINY:
            raise KeyboardInterrupt
        return real(self, case)

    monkeypatch.setattr(runner.Bench, "case", stop)
    assert run(tmp_path, *words) == 130
    assert "--resume goes on" in capsys.readouterr().err
    assert [r["case"] for r in results(tmp_path)["cases"]] == [TINY]
    ran = []

    def count(self: runner.Bench, case: Case) -> Any:
        ran.append(case.id)
        return real(self, case)

    monkeypatch.setattr(runner.Bench, "case", count)
    assert run(tmp_path, *words, "--resume") == 0
    assert ran == ["linear/16x16x32"]
    assert [r["case"] for r in results(tmp_path)["cases"]] == [TINY, "linear/16x16x32"]
    assert run(tmp_path, *words, "--resume") == 0
    assert len(ran) == 1
    assert "2 of 2 cases are there already" in capsys.readouterr().out


def test_resume_refuses_another_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--case", TINY, "--providers", "eager") == 0
    before = (tmp_path / "results.jsonl").read_text()
    assert run(tmp_path, "--case", TINY, "--providers", "eager", "--resume", "--seed", "7") == 2
    error = capsys.readouterr().err
    assert "was measured with seed 0, and this is 7: --out DIR starts anew" in error
    assert (tmp_path / "results.jsonl").read_text() == before


# --------------------------------------------------------------------------------- what goes wrong
def test_a_wrong_provider_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def cheat(work: Work) -> Step:
        """Half of the tokens, twice."""
        step = _plain(work)
        real = step.forward
        half = work.x.shape[0] // 2
        step.forward = lambda: torch.cat([real()[:half], real()[:half]])
        return step

    add(monkeypatch, "cheat", cheat)
    assert run(tmp_path, "--case", TINY, "--providers", "eager,cheat") == 1
    good, bad = results(tmp_path)["rows"]
    assert (good["status"], bad["status"]) == ("ok", "wrong")
    assert bad["reason"].startswith("y: error ") and bad["us"] > 0
    printed = capsys.readouterr().out
    assert "WRONG" in printed and f"wrong: {TINY} cheat" in printed


def test_one_that_fails_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(work: Work) -> Step:
        raise ValueError("no such kernel\nand more")

    def full(work: Work) -> Step:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 TiB")

    def late(work: Work) -> Step:
        step = _plain(work)
        step.results = lambda: broken(work)  # type: ignore[assignment, return-value]
        return step

    for name, build in (("broken", broken), ("full", full), ("late", late)):
        add(monkeypatch, name, build)
    add(monkeypatch, "foreign", broken, foreign=True)
    add(monkeypatch, "absent", broken, missing=lambda case, device: "it is not installed")
    names = "broken,full,late,foreign,absent,eager"
    assert run(tmp_path, "--case", TINY, "--providers", names) == 1
    rows = {row["provider"]: row for row in results(tmp_path)["rows"]}
    assert rows["broken"]["status"] == rows["late"]["status"] == "failed"
    assert rows["broken"]["reason"] == "ValueError: no such kernel"
    assert rows["full"]["status"] == "out of memory" and "--providers" in rows["full"]["reason"]
    assert rows["foreign"]["status"] == rows["absent"]["status"] == "not measured"
    assert rows["absent"]["reason"] == "it is not installed"
    assert rows["eager"]["status"] == "ok" and rows["eager"]["us"] > 0
    names = "full,foreign,absent,eager"  # nothing of which is a fault of this package
    assert run(tmp_path, "--case", TINY, "--providers", names) == 0
    with pytest.raises(ValueError, match="no such kernel"):
        run(tmp_path, "--case", TINY, "--providers", "broken", "--debug")


def test_data_that_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate")

    monkeypatch.setattr(runner, "make_work", full)
    assert run(tmp_path, "--case", TINY, "--providers", "eager") == 0
    (row,) = results(tmp_path)["rows"]
    assert row["status"] == "out of memory"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--recipes", "delayd"], "unknown recipe 'delayd': there are delayed, current, block"),
        (["--recipes", "delayd"], "did you mean 'delayed'?"),
        (["--providers", "ours,tourchao"], "did you mean 'torchao'?"),
        (["--providers", ","], "no provider is named: there are eager, compile"),
        (["--case", "liner/1x2x3"], "unknown case 'liner/1x2x3': there are linear/16384x4096x4096"),
        (["--case", "mlp/1x2"], "mlp/TOKENSxHIDDENxFFN is needed"),
        (["--device", "gpu"], "--device gpu: not a device"),
        (["--device", "meta"], "cpu and cuda are timed"),
        (["--device", "cuda:99"], "CUDA devices here"),
        (["--seconds", "0"], "--seconds 0.0: must be positive"),
        (["--all"], "--all and --quick exclude each other"),
        (["--out", __file__], "is a file, and a folder is wanted"),
    ],
)
def test_bad_input(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, *words) == 2
    error = capsys.readouterr().err
    assert error.startswith("minifloat bench: ") and said in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list"]) == 0
    assert "grouped/64x32768x2048x2048" in capsys.readouterr().out.splitlines()


# ---------------------------------------------------------------------------- what a GPU adds to it
class Event:
    """A CUDA event of a device that takes a microsecond for everything."""

    count = 0

    def __init__(self, enable_timing: bool = False) -> None:
        pass

    def record(self) -> None:
        Event.count += 1
        self.at = Event.count

    def query(self) -> bool:
        return False

    def elapsed_time(self, other: Event) -> float:
        return 1e-3 * (other.at - self.at)


class Graph:
    def replay(self) -> None:
        pass


def test_the_steps_of_a_gpu_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What only runs on a GPU, with CUDA made up: memory, host, wall and graph are in the rows."""
    made = {
        "Event": Event,
        "_sleep": lambda cycles: None,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "memory_allocated": lambda: 1000,
        "max_memory_allocated": lambda: 5000,
        "reset_peak_memory_stats": lambda: None,
    }
    for name, value in made.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(measure, "capture", lambda step: Graph())
    monkeypatch.setattr(measure, "WARM", 0.0)
    monkeypatch.setattr(runner.env, "device_name", lambda device: "NVIDIA H200")
    options = Options(quick=True, device="cpu", out=str(tmp_path), seconds=0.01)
    bench = runner.Bench(options, torch.device("cpu"), ["eager", "ours"], ["delayed"])
    bench.cuda = bench.timer.cuda = True
    bench.ceilings = {"copy": 1e12, "fp32": 1e12}
    eager, delayed = bench.case(Case("linear", (16, 32, 64)))
    for row in (eager, delayed):
        assert row["status"] == "ok"
        assert row["us"] == pytest.approx(1.0)
        assert (row["peak_bytes"], row["waits"]) == (4000, False)
        assert row["host_us"] > 0 and row["wall_us"] > 0 and row["graph_us"] > 0
        assert row["percent_of_peak"] > 0 and row["percent_of_limit"] > 0
    assert delayed["host_vs_eager"] > 0 and delayed["graph_vs_eager"] > 0


def test_a_step_that_waits_is_not_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = runner.Bench(Options(device="cpu", out=str(tmp_path)), torch.device("cpu"), [], [])
    provider = Provider("p", "ours", _plain)
    row: dict[str, Any] = {"waits": True}
    bench._graph(runner._Live(provider, None, row))  # type: ignore[arg-type]
    assert row["graph_note"] == "the step waits for the device"
    row = {"waits": False}

    def refuse(step: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(measure, "capture", refuse)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    bench._graph(runner._Live(provider, None, row))  # type: ignore[arg-type]
    assert row["graph_note"] == "operation not permitted when stream is capturing"
    assert "graph_us" not in row
