"""The benchmark runner on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import cases, run

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
