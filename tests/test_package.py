"""The wheel: pure Python, typed, and with torch as its only requirement."""

from __future__ import annotations

import email
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import minifloat

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy by the setuptools at hand, so without a network and leaving no traces."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(
        ROOT / "minifloat", source / "minifloat", ignore=shutil.ignore_patterns("__pycache__")
    )
    dist = tmp_path_factory.mktemp("dist")
    code = f"import setuptools.build_meta as b; b.build_wheel({str(dist)!r})"
    build = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True)
    assert build.returncode == 0, build.stderr
    (path,) = dist.iterdir()
    return path


def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_name_and_tag(wheel: Path) -> None:
    assert wheel.name == f"minifloat-{minifloat.__version__}-py3-none-any.whl"


def test_contents(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    shipped = {p.relative_to(ROOT).as_posix() for p in (ROOT / "minifloat").rglob("*.py")}
    assert shipped <= names
    assert {"minifloat/py.typed", "minifloat/batch.c"} <= names
    assert {"minifloat/py.typed", "minifloat/batch.c"} <= names
    assert not [n for n in names if n.startswith("tests")]
    assert any(n.endswith("/LICENSE") for n in names)


def test_requirements(wheel: Path) -> None:
    requirements = metadata(wheel).get_all("Requires-Dist", [])
    assert [r for r in requirements if "extra ==" not in r] == ["torch>=2.11"]


def test_python(wheel: Path) -> None:
    assert metadata(wheel)["Requires-Python"] == ">=3.10"
