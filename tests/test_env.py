"""The environment is read in one place, late, and cached."""

from __future__ import annotations

import sys

import pytest
import torch

from minifloat import env


@pytest.fixture(autouse=True)
def fresh():
    for read in (env.reference_only, env.advise):
        read.cache_clear()
    yield
    for read in (env.reference_only, env.advise):
        read.cache_clear()


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("0", False), ("", False)])
def test_reference_only_reads_its_variable(monkeypatch, value, expected):
    monkeypatch.setenv("MINIFLOAT_REFERENCE", value)
    assert env.reference_only() is expected


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("0", False), ("", False)])
def test_advise_reads_its_variable(monkeypatch, value, expected):
    monkeypatch.setenv("MINIFLOAT_ADVISE", value)
    assert env.advise() is expected


def test_the_answer_is_kept(monkeypatch):
    monkeypatch.delenv("MINIFLOAT_REFERENCE", raising=False)
    assert not env.reference_only()
    monkeypatch.setenv("MINIFLOAT_REFERENCE", "1")
    assert not env.reference_only()


def test_looking_for_triton_does_not_import_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    env.triton_available.cache_clear()
    env.triton_version()
    assert "triton" not in sys.modules


def test_a_cpu_has_no_compute_capability():
    assert env.capability("cpu") is None
    assert env.capability(torch.device("meta")) is None
    assert env.device_name("cpu") == "cpu"


@pytest.mark.gpu
def test_a_gpu_has_one():
    major, minor = torch.cuda.get_device_capability()
    assert env.capability("cuda") == 10 * major + minor
