"""An installed torch is kept exactly when pip would keep it, and nothing then re-pins it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "tools" / "make_venv.py"
spec = importlib.util.spec_from_file_location("make_venv", SCRIPT)
assert spec is not None
assert spec.loader is not None
make_venv = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make_venv)


@pytest.mark.parametrize(
    "version",
    ["2.11", "2.11.0", "2.11.0+cu130", "2.11.1a0", "2.12.0.dev20260101", "2.13.0+cpu", "3.0.0"],
)
def test_suitable(version: str) -> None:
    assert make_venv.is_suitable(version)


@pytest.mark.parametrize(
    "version", ["1.13.1", "2.9.1", "2.10.1", "2.11.0a0+git1", "2.11.0rc1", "2.11.0.dev1", "unknown"]
)
def test_not_suitable(version: str) -> None:
    assert not make_venv.is_suitable(version)


def test_pins_give_way_to_an_installed_torch() -> None:
    fresh = make_venv.constraints(None)
    kept = make_venv.constraints("2.11.0+cu130")
    assert "torch==2.13.0" in fresh
    assert [line for line in kept if line.startswith("torch")] == ["torch==2.11.0+cu130"]
    assert not [line for line in kept if line.startswith(("triton", "numpy", "setuptools"))]
    assert [line for line in kept if line.startswith("pytest==")]
