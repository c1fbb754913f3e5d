"""The benchmark of experts' gradients, on a shape that a CPU can run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import wgrad
from minifloat import rates
from minifloat.bench.timing import Timer

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", wgrad.CASTS)
def test_a_row(name: str) -> None:
    timer = Timer(CPU, iterations=1, seconds=0.0, warmup=1, least=1)
    row = wgrad.compare((3, 16, 32, 64), name, CPU, timer)
    assert row["codes_tflops"] == 2 * 3 * 16 * 32 * 64 / 1e6 / row["codes_us"]
    assert "3 x (16, 32 -> 64)" in wgrad.line(row)


def test_a_wrong_choice_is_marked() -> None:
    row: dict[str, Any] = dict.fromkeys(("codes_tflops", "bf16_tflops", "bf16_us"), 1.0)
    row |= {"shape": "", "format": "", "codes_us": 100.0, "values_us": 90.0}
    assert wgrad.line(row | {"chosen": "codes"}).endswith("WRONG")
    assert wgrad.line(row | {"chosen": "values"}).endswith("values")


def test_rates_are_what_they_were() -> None:
    before = dict(rates.RATES)
    with pytest.raises(RuntimeError), wgrad.told(True, CPU):
        assert rates.RATES[0].values > rates.RATES[0].blocks
        raise RuntimeError
    assert before == rates.RATES
