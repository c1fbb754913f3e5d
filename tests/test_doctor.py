"""The doctor tells what runs where, for any device, without a GPU."""

from __future__ import annotations

import pytest
import torch

from minifloat import casting, doctor, env, native
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
    ("recipe", "chosen", "why"),
    [
        ("DelayedScaling", "codes", "never"),
        ("Float8BlockScaling", "codes or values", "values where in out / (in + out) > "),
        ("MXFP8BlockScaling", "values", "no kernel multiplies the codes of mxfp8"),
        ("high precision", "values", "high precision"),
    ],
)
def test_what_the_gradient_of_experts_multiplies(hopper, recipe, chosen, why):
    (row,) = [r for r in doctor.expert_rows(CUDA) if r.recipe == recipe]
    assert (row.step, row.backend) == ("experts' dw", chosen)
    assert why in row.why
    assert "experts' dw" in doctor.report(CPU)


@pytest.mark.parametrize(
    ("recipe", "capability", "backend"),
    [
        ("DelayedScaling", 80, "emulated"),
        ("DelayedScaling", 89, "native"),
        ("Float8CurrentScaling", 89, "native"),
        ("Float8CurrentScaling", 120, "native"),
        ("Float8BlockScaling", 89, "emulated"),
        ("Float8BlockScaling", 90, "native"),
        ("Float8BlockScaling", 100, "emulated"),
        ("MXFP8BlockScaling", 90, "emulated"),
        ("MXFP8BlockScaling", 100, "native"),
        ("MXFP8BlockScaling", 120, "emulated"),
        ("NVFP4BlockScaling", 90, "emulated"),
        ("NVFP4BlockScaling", 120, "native"),
        ("high precision", 80, "native"),
    ],
)
def test_gemm_is_what_the_table_of_products_says(monkeypatch, recipe, capability, backend):
    monkeypatch.setattr(env, "capability", lambda device: capability)
    (row,) = [r for r in doctor.rows(CUDA) if (r.recipe, r.step) == (recipe, "gemm")]
    assert row.backend == backend
    assert f"sm_{capability}" in row.why or recipe == "high precision"


def test_a_recipe_is_as_good_as_its_worst_product(monkeypatch, hopper):
    # fprop is native here; no tensor cores multiply the two MXFP8 operands of wgrad.
    block, mx = (doctor.RECIPES[f"{name}BlockScaling"] for name in ("Float8", "MXFP8"))
    mixed = block.replace(x_col=mx.x_col, g_col=mx.g_col)
    monkeypatch.setattr(doctor, "RECIPES", {"mixed": mixed})
    quantize, gemm = doctor.rows(CUDA)
    assert quantize.backend in ("triton", "emulated")
    assert gemm.backend == "emulated"
    assert gemm.why == native.backend(mixed.g_col, mixed.x_col, CUDA).why


def test_quantize_says_why_there_is_no_kernel(monkeypatch, hopper):
    monkeypatch.setattr(env, "triton_available", lambda: False)
    backend, why = casting.choose(doctor.RECIPES["DelayedScaling"].x_row, CUDA)
    assert backend == "emulated" and "triton is not installed" in why
    monkeypatch.setattr(env, "reference_only", lambda: True)
    backend, why = casting.choose(None, CUDA)
    assert backend == "emulated" and "MINIFLOAT_REFERENCE" in why


def test_report_names_versions_device_and_every_format():
    text = doctor.report(CPU)
    assert torch.__version__ in text and "cpu" in text
    for name in FORMATS:
        assert name in text
    for recipe in doctor.RECIPES:
        assert recipe in text


@pytest.mark.parametrize(("name", "capability"), doctor.DEVICES)
def test_the_matrix_is_what_the_table_of_products_says(monkeypatch, name, capability):
    monkeypatch.setattr(env, "capability", lambda device: capability)
    head, _, *lines = [
        [cell.strip(" `") for cell in line.strip("|").split("|")]
        for line in doctor.matrix().splitlines()
    ]
    told = {line[0]: line[head.index(name)] for line in lines}
    assert told == {r.recipe: r.backend for r in doctor.rows(CUDA) if r.step == "gemm"}
