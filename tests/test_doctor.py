"""The doctor tells what runs where, for any device, without a GPU."""

from __future__ import annotations

import pytest
import torch

from minifloat import dispatch, doctor, env
from minifloat.formats import FORMATS

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(env, "capability", lambda device: 90)


def test_every_recipe_has_a_backend_and_a_reason_for_both_steps():
    rows = doctor.rows(CPU)
    assert {r.recipe for r in rows} == set(doctor.RECIPES)
    for row in rows:
        assert row.step in ("quantize", "gemm")
        assert row.backend in ("native", "triton", "emulated", "cpu")
        assert row.why
    assert len(rows) == 2 * len(doctor.RECIPES)


@pytest.mark.parametrize(
    ("name", "capability", "backend"),
    [
        ("fp8_e4m3", 80, "emulated"),
        ("fp8_e4m3", 89, "native"),
        ("fp8_e4m3", 90, "native"),
        ("fp8_e4m3_1x128", 90, "native"),
        ("fp8_e4m3_1x128", 100, "emulated"),
        ("mxfp8_e4m3", 90, "emulated"),
        ("mxfp8_e4m3", 100, "native"),
        ("mxfp8_e4m3", 120, "emulated"),
        ("nvfp4", 90, "emulated"),
        ("nvfp4", 120, "native"),
        ("high_precision", 80, "native"),
    ],
)
def test_gemm_backend_follows_the_format_and_the_capability(monkeypatch, name, capability, backend):
    monkeypatch.setattr(env, "capability", lambda device: capability)
    chosen, why = doctor.gemm_backend(FORMATS[name], CUDA)
    assert chosen == backend
    assert name in why or backend == "native"


def test_quantize_says_why_there_is_no_kernel(monkeypatch, hopper):
    monkeypatch.setattr(env, "triton_available", lambda: False)
    backend, why = dispatch.choose(next(iter(doctor.RECIPES.values()))[0], CUDA)
    assert backend == "emulated" and "triton is not installed" in why
    monkeypatch.setattr(env, "reference_only", lambda: True)
    backend, why = dispatch.choose(None, CUDA)
    assert backend == "emulated" and "MINIFLOAT_REFERENCE" in why


def test_report_names_versions_device_and_every_format():
    text = doctor.report(CPU)
    assert torch.__version__ in text and "cpu" in text
    for name in FORMATS:
        assert name in text
    for recipe in doctor.RECIPES:
        assert recipe in text
