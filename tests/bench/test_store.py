"""Results on disk: appended, resumed, never lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minifloat.bench.errors import BenchError
from minifloat.bench.store import Store, plain_numbers


def test_records_are_there_as_soon_as_they_are_appended(tmp_path: Path) -> None:
    store = Store(tmp_path / "new" / "folder", resume=False)
    store.append({"type": "case", "case": "a", "rows": [{"us": 1.5}, {"us": float("nan")}]})
    assert json.loads(store.path.read_text())["rows"] == [{"us": 1.5}, {"us": None}]
    again = Store(store.path.parent, resume=True)
    assert again.rows == [{"us": 1.5}, {"us": None}]
    again.append({"type": "end"})
    assert len(store.path.read_text().splitlines()) == 2


def test_a_line_that_was_cut_off_is_dropped(tmp_path: Path) -> None:
    store = Store(tmp_path, resume=False)
    for case in "ab":
        store.append({"type": "case", "case": case, "rows": []})
    text = store.path.read_text()
    store.path.write_text(text[:-9])
    again = Store(tmp_path, resume=True)
    assert [r["case"] for r in again.records] == ["a"]
    again.append({"type": "case", "case": "b", "rows": []})
    assert store.path.read_text() == text


@pytest.mark.parametrize("line", ["{", "[1]", '{"case": 1}'])
def test_damage_in_the_middle_is_not_overwritten(tmp_path: Path, line: str) -> None:
    path = tmp_path / "results.jsonl"
    text = f'{{"type": "end"}}\n{line}\n{{"type": "end"}}\n'
    path.write_text(text)
    with pytest.raises(BenchError, match=r"line 2 is damaged .*: --out DIR starts anew"):
        Store(tmp_path, resume=True)
    assert path.read_text() == text


def test_a_new_run_keeps_the_old_one(tmp_path: Path) -> None:
    for count in range(3):
        store = Store(tmp_path, resume=False)
        store.append({"type": "end", "count": count})
    kept = {p.name: json.loads(p.read_text())["count"] for p in tmp_path.glob("*.jsonl")}
    assert kept == {"results-1.jsonl": 0, "results-2.jsonl": 1, "results.jsonl": 2}


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BenchError, match="cannot be written: .*--out"):
        Store(tmp_path / "file" / "folder", resume=False)


def test_numbers_that_json_has_not() -> None:
    value = {"a": [1.0, float("inf"), (float("nan"), "x")], "b": None, "c": True}
    assert plain_numbers(value) == {"a": [1.0, None, [None, "x"]], "b": None, "c": True}
