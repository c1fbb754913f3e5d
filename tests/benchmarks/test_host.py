"""`benchmarks.host`: stages of a step on the host, on a CPU that replays nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import host
from benchmarks.linear import layer
from minifloat import autograd, replays, writer


def test_stages_are_timed_and_the_library_is_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (autograd._apply, replays.forward, vars(autograd._Run)["backward"])
    monkeypatch.setattr(host, "CPU", ((8, 16, 16),))
    out = tmp_path / "host.json"
    words = ["--device", "cpu", "--filter", "delayed", "--iterations", "2", "--json", str(out)]
    assert host.main(words) == 0
    assert (autograd._apply, replays.forward, vars(autograd._Run)["backward"]) == before
    (found,) = json.loads(out.read_text())
    ours, plain = found["stages"]["delayed"], found["stages"]["nn.Linear"]
    assert set(plain) == {"step", "forward", "backward"}
    nested = ("step", "forward", "forward: function", "forward: replay")
    assert all(ours[a] >= ours[b] > 0 for a, b in zip(nested, nested[1:], strict=False))
    assert ours["backward"] >= ours["backward: replay"] > 0 and ours["backward: hop"] > 0
    assert "forward: end of autocast" in capsys.readouterr().out


def test_medians_are_of_the_rounds_in_which_a_stage_ran() -> None:
    rounds = [{"step": 5.0}, {"step": 1.0, "forward": 2.0}, {"step": 3.0, "forward": 4.0}]
    assert host.medians(rounds) == {"step": 3.0, "forward": 3.0}


def test_programs_are_watched_and_put_back() -> None:
    program = writer.Program("def program(given):\n    return [given[0]]\n", {"c0": len}, shared=())
    kind = replays.Recorded(program, -1, None, torch.device("cpu"))
    one = layer((4, 16, 16), "current", torch.device("cpu"))
    watch, run = host.Watch(), program.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replays, "_KINDS", {(): kind, (1,): "why not", (2,): None})
        patch.setattr(host, "is_batches", lambda value: value is len)
        with watch.on():
            assert program.run is not run and program.run([one.x])[0] is one.x
            assert run.__globals__["c0"] is not len and run.__globals__["c0"]((1, 2)) == 2
        assert program.run is run and run.__globals__["c0"] is len
    assert set(watch.now) == {"forward: program", "forward: batches"}
