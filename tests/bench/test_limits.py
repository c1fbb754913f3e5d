"""Rooflines by hand: an H200's, from its capability and from round numbers."""

from __future__ import annotations

import pytest
import torch

from minifloat import env
from minifloat.bench import limits
from minifloat.bench.cases import Case
from minifloat.bench.providers import RECIPES

BF16 = torch.bfloat16
TENSOR = ("fp8_e4m3 x fp8_e4m3 fast", "fp8_e5m2 x fp8_e4m3 split")
BLOCK = ("fp8_e4m3_1x128 x fp8_e4m3_128x128", "fp8_e4m3_1x128 x fp8_e4m3_1x128")


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr(env, "capability", lambda device: 90)
    return torch.device("cuda")


def bytes_of(case: Case, name: str, device: torch.device) -> float:
    return limits.limit_of(case, RECIPES.get(name), device, BF16).bytes


@pytest.mark.parametrize(
    ("name", "each"),
    # Bytes per number of input, weight and gradient: 2 read (twice for a scale of the whole), and
    # two copies of codes, or of bf16 values where the device does not multiply the format.
    [("eager", 0.0), ("delayed", 4.0), ("current", 6.0), ("mxfp8", 6.0), ("nvfp4", 8.0)],
)
def test_bytes_of_a_linear_layer(name: str, each: float, h200: torch.device) -> None:
    t, k, n = 1024, 256, 512
    assert bytes_of(Case("linear", (t, k, n)), name, h200) == each * (t * k + k * n + t * n)


def test_bytes_of_blocks(h200: torch.device) -> None:
    t, k, n = 1024, 256, 512
    line, square = 4 + 2 * 4 / 128, 4 + 2 * 4 / 128**2
    wanted = line * (t * k + t * n) + square * k * n
    assert bytes_of(Case("linear", (t, k, n)), "block", h200) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("name", "hidden", "ffn", "weight"),
    [
        ("eager", 10, 16, 0),
        ("delayed", 14, 16, 4),
        ("current", 18, 26, 6),
        ("mxfp8", 18, 22, 6),
    ],
)
def test_bytes_of_an_mlp(name: str, hidden: int, ffn: int, weight: int, h200: torch.device) -> None:
    t, h, f = 1024, 256, 512
    wanted = hidden * t * h + ffn * t * f + weight * 3 * h * f
    assert bytes_of(Case("mlp", (t, h, f)), name, h200) == wanted


def test_experts_have_a_weight_each(h200: torch.device) -> None:
    one, many = Case("linear", (1024, 256, 512)), Case("grouped", (1024, 256, 512), 8)
    more = bytes_of(many, "delayed", h200) - bytes_of(one, "delayed", h200)
    assert more == 7 * 4 * 256 * 512
    assert many.flops == one.flops


def test_products_by_name(h200: torch.device) -> None:
    case = Case("linear", (64, 64, 64))
    third = 2 * 64**3
    found = {n: limits.limit_of(case, r, h200, BF16).operations for n, r in RECIPES.items()}
    assert found["delayed"] == found["current"] == {TENSOR[0]: third, TENSOR[1]: 2 * third}
    assert found["block"] == {BLOCK[0]: 2 * third, BLOCK[1]: third}
    assert found["mxfp8"] == found["nvfp4"] == {"bf16": 3 * third}
    cpu = limits.limit_of(case, RECIPES["delayed"], torch.device("cpu"), torch.float32)
    assert cpu.operations == {"fp32": 3 * third}


def test_the_time_adds_up(h200: torch.device) -> None:
    case = Case("linear", (1000, 1000, 1000))
    limit = limits.limit_of(case, RECIPES["delayed"], h200, BF16)
    rates = {"copy": 4e12, TENSOR[0]: 1e12, TENSOR[1]: 0.5e12}
    assert limit.seconds(rates) == pytest.approx(2e9 / 1e12 + 4e9 / 0.5e12 + 4 * 3e6 / 4e12)
    assert limit.seconds({"copy": 4e12, TENSOR[0]: 1e12}) is None
    # Products read two codes of one byte and write two bytes, three times; casts move 4.
    assert limit.intensity == pytest.approx(6e9 / ((3 * 4 + 4 * 3) * 1e6))


def test_the_data_sheet(h200: torch.device) -> None:
    peak = limits.peak_of("NVIDIA H200")
    assert peak is not None and limits.peak_of("a toaster") is None
    case = Case("linear", (8192, 8192, 8192))
    plain = limits.peak_time(case, None, h200, peak)
    assert plain == pytest.approx(case.flops / 989.5e12)
    delayed = limits.peak_time(case, RECIPES["delayed"], h200, peak)
    assert delayed == pytest.approx(case.flops / 1979e12 + 12 * 8192**2 / 4.8e12)
    assert limits.peak_time(case, RECIPES["mxfp8"], h200, peak) > plain
