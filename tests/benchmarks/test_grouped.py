"""The benchmark of experts, on shapes that a CPU can run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import grouped
from minifloat.bench.timing import Timer

CPU = torch.device("cpu")
TINY = grouped.Shape(4, 8, 32, 64)


@pytest.mark.parametrize(("experts", "total"), [(8, 16384), (32, 32768), (64, 32768), (2, 5)])
def test_zipf(experts: int, total: int) -> None:
    sizes = grouped.zipf(experts, total)
    assert len(sizes) == experts and sum(sizes) == total and min(sizes) >= 0
    assert sizes.count(0) >= max(1, experts // 8)
    assert max(sizes) > 2 * total / experts or experts == 2
    assert sizes == grouped.zipf(experts, total)


@pytest.mark.parametrize("name", grouped.RECIPES)
def test_a_row_of_each_recipe(name: str) -> None:
    timer = Timer(CPU, iterations=1, seconds=0.0, warmup=1, least=1)
    bench = grouped.Bench(TINY, CPU, compiled=False)
    for kept in (False, True):
        row = grouped.measure(bench, name, kept, timer)
        assert row["equal"] == row["ours_equal_us"] / row["bf16_equal_us"]
        assert row["ragged"] == row["ours_zipf_us"] / row["ours_equal_us"]
        assert str(TINY) in grouped.line(row) and row["weights"] in grouped.line(row)
        assert row["wgrad"] == ("values" if name in ("mxfp8", "nvfp4") else "codes")


def test_both_compute_the_same() -> None:
    bench = grouped.Bench(TINY, CPU, compiled=False)
    ours = bench.ours(grouped.RECIPES["best"](), False)
    with torch.no_grad():
        ours["zipf"].weight.copy_(bench.plain["zipf"].weight)
    for name in ("equal", "zipf"):
        a, b = bench.plain[name].forward().float(), ours[name].forward().float()
        assert 0 < (a - b).norm() < 0.1 * a.norm()  # E4M3 has three bits


def test_best_is_what_it_says() -> None:
    plan = grouped.RECIPES["best"]().plan(None, None)
    assert plan.fast == (True, True, True)
    assert plan.g_row == plan.x_row


def test_a_failure_does_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(grouped, "measure", broken)
    monkeypatch.setattr(torch, "compile", lambda module: module)
    timer = Timer(CPU, iterations=1, seconds=0.0, warmup=1, least=1)
    result = grouped.run([TINY], ["best", "block"], CPU, timer)
    assert len(result["rows"]) == 4 and "no kernel" in capsys.readouterr().out


def test_wrong_names(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SystemExit):
        grouped.main(["--recipes", "fp7"])
    assert "--recipes: got fp7; allowed: best" in capsys.readouterr().err
