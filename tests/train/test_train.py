"""`minifloat train`: runs, resumes to the bit, survives kill -9, and reports."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from minifloat.train import Options, TrainError, checkpoint, data, peak, progress, train
from minifloat.train.html import report, smooth
from minifloat.train.trainer import rate
from minifloat.train.world import World

CPU = torch.device("cpu")


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"def f{i}(x): return x * {i} + {i * i}\n" for i in range(2000)))
    return str(path)


def run(tmp_path: Path, corpus: str, out: str, **changes: Any) -> tuple[dict[str, Any], list[Any]]:
    given = {"preset": "smoke", "steps": 8, "batch_size": 4, "device": "cpu", "compile": False}
    options = {**given, "data": corpus, "out": str(tmp_path / out), **changes}
    summary = train(Options(**options))
    lines = (tmp_path / out / "metrics.jsonl").read_text().splitlines()
    return summary, [json.loads(line) for line in lines]


def test_a_run_leaves_metrics_a_summary_and_a_report(tmp_path, corpus, capsys) -> None:
    summary, metrics = run(tmp_path, corpus, "out", recipe="mxfp8")
    assert [(m["run"], m["step"]) for m in metrics] == [
        (name, step) for name in ("recipe", "bf16") for step in range(1, 9)
    ]
    low, high = summary["runs"]["recipe"], summary["runs"]["bf16"]
    assert low["recipe"] == "mxfp8"
    assert low["validation"] == pytest.approx(high["validation"], rel=0.015)
    assert summary["validation_gap"] == low["validation"] / high["validation"] - 1
    assert low["tokens_per_second"] > 0
    assert 0.3 < low["quantized_share_of_gemm_flops"] < 1
    assert high["quantized_share_of_gemm_flops"] == 0
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == summary
    assert high["errors"] == {} and list(low["errors"]) == [
        f"blocks.0.{part}" for part in ("attention.qkv", "attention.out", "mlp.fc1", "mlp.fc2")
    ]
    for layer in low["errors"].values():
        assert len(layer["operands"]) == 6  # of forward and backward
        assert all(20 < o["sqnr_db"] < 50 for o in layer["operands"].values())
    said = capsys.readouterr().out
    assert "tokens/s" in said and "ETA" in said and "against bf16" in said
    # both start from the same parameters and see the same data
    assert metrics[0]["loss"] == pytest.approx(metrics[8]["loss"], rel=1e-3)


@pytest.mark.parametrize("recipe", ["delayed", "current", "nvfp4"])
def test_a_resumed_run_is_bit_equal(tmp_path, corpus, recipe: str) -> None:
    _, whole = run(tmp_path, corpus, "whole", recipe=recipe, baseline=False)
    saved = {"recipe": recipe, "baseline": False, "checkpoint_dir": str(tmp_path / "saved")}
    stopped, part = run(tmp_path, corpus, "part", stop_after=4, **saved)
    assert part == whole[:4]
    assert stopped["runs"]["recipe"]["validation"] is None
    torch.manual_seed(99)  # what a new process would not have
    resumed, again = run(tmp_path, corpus, "part", resume=True, **saved)
    assert again == whole
    assert resumed["runs"]["recipe"]["validation"] is not None


@pytest.mark.deep  # compiles three times
def test_a_resumed_compiled_run_is_bit_equal(tmp_path, corpus) -> None:
    same = {"recipe": "delayed", "baseline": False, "compile": True}
    _, whole = run(tmp_path, corpus, "whole", **same)
    saved = {**same, "checkpoint_dir": str(tmp_path / "saved")}
    run(tmp_path, corpus, "part", stop_after=4, **saved)
    _, again = run(tmp_path, corpus, "part", resume=True, **saved)
    assert again == whole


def test_without_safetensors_too(tmp_path, corpus, monkeypatch) -> None:
    real = checkpoint.find_spec
    monkeypatch.setattr(
        checkpoint, "find_spec", lambda name: None if name == "safetensors" else real(name)
    )
    _, whole = run(tmp_path, corpus, "whole", baseline=False)
    saved = {"baseline": False, "checkpoint_dir": str(tmp_path / "saved")}
    run(tmp_path, corpus, "part", stop_after=4, **saved)
    assert list((tmp_path / "saved" / "recipe").glob("*.pt"))
    _, again = run(tmp_path, corpus, "part", resume=True, **saved)
    assert again == whole


def test_what_a_killed_process_was_writing_is_removed(tmp_path, corpus) -> None:
    saved = {"checkpoint_dir": str(tmp_path / "saved"), "checkpoint_every": 2, "baseline": False}
    run(tmp_path, corpus, "a", stop_after=2, **saved)
    half = tmp_path / "saved" / "recipe" / ".step-00000004.safetensors.abc123"
    half.write_bytes(b"half of it")
    run(tmp_path, corpus, "b", steps=8, resume=True, **saved)
    names = sorted(p.name.split(".")[0] for p in half.parent.iterdir())
    assert names == ["checkpoint", "step-00000008"]


@pytest.mark.deep
def test_kill_9_loses_only_steps_since_the_last_checkpoint(tmp_path, corpus) -> None:
    _, whole = run(tmp_path, corpus, "whole", baseline=False, steps=60, log_every=1)
    folder, out = tmp_path / "saved", tmp_path / "killed"
    given = ["--preset", "smoke", "--steps", "60", "--batch-size", "4", "--device", "cpu"]
    given += ["--no-compile", "--no-baseline", "--data", corpus, "--out", str(out)]
    given += ["--checkpoint-dir", str(folder), "--checkpoint-every", "1", "--log-every", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "minifloat", "train", *given],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
    )
    index = folder / "recipe" / "checkpoint.json"
    until = time.monotonic() + 120
    while time.monotonic() < until and process.poll() is None:
        if index.exists() and json.loads(index.read_text())["step"] >= 3:
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    step = checkpoint.find(folder / "recipe")["step"]
    assert 3 <= step < 60
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _, again = run(
            tmp_path, corpus, "killed", baseline=False, steps=60, log_every=1, resume=True,
            checkpoint_dir=str(folder), checkpoint_every=100,
        )  # fmt: skip
    finally:
        torch.set_num_threads(threads)
    assert len(again) == 60
    if threads == 1:
        assert again == whole


def test_the_standard_library_is_split_by_a_fixed_hash() -> None:
    first, second = data.load(None, 128), data.load(None, 128)
    assert first.digest == second.digest
    total = len(first.train) + len(first.valid)
    assert 2**20 < total <= data.CAP
    assert 0.02 < len(first.valid) / total < 0.3


def test_a_folder_is_read_in_order_without_binaries(tmp_path) -> None:
    for index in range(40):
        (tmp_path / f"{index:02d}.txt").write_text(f"{index:02d}" * 100)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    corpus = data.load(str(tmp_path), 16)
    assert corpus.files == 40
    text = bytes(corpus.train.tolist()).decode()
    assert re.findall(r"(\d\d)(?:\1){99}", text) == sorted(re.findall(r"(\d\d)(?:\1){99}", text))
    (tmp_path / "empty").mkdir()
    with pytest.raises(TrainError, match="no text"):
        data.load(str(tmp_path / "empty"), 16)


def test_a_batch_depends_on_seed_and_step_alone(corpus) -> None:
    text = data.load(corpus, 16)
    one = data.Batches(text, 1, 4, 16, World(CPU))
    tokens, targets = one.train(5)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert torch.equal(tokens, data.Batches(text, 1, 4, 16, World(CPU)).train(5)[0])
    assert not torch.equal(tokens, one.train(6)[0])
    assert not torch.equal(tokens, data.Batches(text, 2, 4, 16, World(CPU)).train(5)[0])


def test_processes_share_a_batch(corpus) -> None:
    text = data.load(corpus, 16)
    one = data.Batches(text, 1, 4, 16, World(CPU))
    parts = [data.Batches(text, 1, 4, 16, World(CPU, rank, 2)) for rank in range(2)]
    for whole, shares in (
        (one.train(5), [p.train(5) for p in parts]),
        (one.valid(3)[2], [p.valid(3)[2] for p in parts]),
    ):
        for index in range(2):
            assert torch.equal(whole[index], torch.cat([share[index] for share in shares]))


def test_the_learning_rate_warms_up_and_comes_down() -> None:
    rates = [rate(step, 100, 1.0) for step in range(100)]
    assert max(rates) == rates[10] == pytest.approx(1.0)
    assert rates[:10] == sorted(rates[:10]) and rates[10:] == sorted(rates[10:], reverse=True)
    assert 0.01 <= rates[-1] < 0.012


def test_the_report_is_one_file_that_asks_for_nothing(tmp_path, corpus) -> None:
    run(tmp_path, corpus, "out", steps=3)
    page = (tmp_path / "out" / "report.html").read_text()
    assert not re.search(r"(?:src|href)\s*=|@import|url\(|<script", page)
    tags: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: tags.append(tag)  # type: ignore[method-assign]
    parser.feed(page)
    assert tags.count("polyline") == 4  # two runs, as they were and smoothed
    assert "Throughput" in page and "Environment" in page and "nan" not in page
    assert page.count("background:rgb") == 4 * 6  # layers and their operands
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    summary["options"]["preset"] = "<b>"
    assert "<b>" not in report(summary, {})


def test_the_peak_is_that_of_the_run() -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("needs Linux")
    peak.restart(CPU)
    before = peak.peak(CPU)
    big = torch.ones(2**26)  # 256 MiB
    during = peak.peak(CPU)
    assert during - before > 200 * 2**20
    del big
    peak.restart(CPU)
    assert peak.peak(CPU) < during - 200 * 2**20


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(
    capsys, monkeypatch, terminal: bool
) -> None:
    monkeypatch.setattr(progress, "find_spec", lambda name: None)  # without rich
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal, raising=False)
    with progress.Progress("recipe", 20, 0, quiet=False) as bar:
        bar.step(1, 5.5, None)
        bar.step(10, 4.5, 1234.0)
    lines = capsys.readouterr().out.split("\r" if terminal else "\n")
    assert all("loss" in line for line in lines[1 if terminal else 0 : 3 if terminal else 2])
    assert ("[############------------] 10/20" in lines[-1]) == terminal
    assert "1,234 tokens/s  ETA 0:00" in (lines[2] if terminal else lines[1])
    assert lines[-1].endswith("\n") or not terminal


def test_smoothing_keeps_a_constant() -> None:
    assert smooth([2.0] * 5) == pytest.approx([2.0] * 5)


def test_the_plot_is_a_png(tmp_path, corpus) -> None:
    pytest.importorskip("matplotlib")
    run(tmp_path, corpus, "out", steps=2)
    assert (tmp_path / "out" / "curves.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.deep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_the_default_run_is_within_1_5_percent_of_bf16(tmp_path, recipe: str) -> None:
    summary = train(Options(recipe=recipe, device="cpu", out=str(tmp_path)))
    assert abs(summary["validation_gap"]) < 0.015
