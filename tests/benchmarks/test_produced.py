"""The benchmark of produced casts, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import produced

MIB = 2**20


def test_smoke(tmp_path: Path) -> None:
    report = tmp_path / "b.json"
    arguments = ["--device", "cpu", "--quick", "--filter", "1x128", "--json", str(report)]
    assert produced.main(arguments) == 0
    rows = json.loads(report.read_text())["rows"]
    assert rows and all(row["us"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("id", "per_element"),
    [
        ("swiglu/delayed/row+col", 6),
        ("swiglu/current/row+col", 10),
        ("rmsnorm/delayed/row+col", 4),
        ("rmsnorm/current/row+col", 4),
        ("dswiglu/delayed/row+col", 10),
        ("dswiglu/delayed/row+col+act", 11),
        ("rmsnorm/backward/dx", 6),
    ],
)
def test_bytes_by_hand(id: str, per_element: int) -> None:
    (case,) = (c for c in produced.CASES if c.id == id)
    assert 0 <= case.bytes((1024, 1024)) - per_element * MIB < 64


def test_names_are_unique() -> None:
    assert len({c.id for c in produced.CASES}) == len(produced.CASES)
