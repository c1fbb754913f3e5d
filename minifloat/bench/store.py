"""Results as lines of JSON, appended as they come: a run that is killed loses one case at most."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import BenchError

__all__ = ["Store", "plain_numbers", "write_json", "write_text"]

Record = dict[str, Any]


class Store:
    """`results.jsonl` of a folder: records with a `type` ("session", "case" or "end")."""

    def __init__(self, folder: Path, resume: bool) -> None:
        self.path = folder / "results.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if resume:
                self.records = self._read()
            else:
                self._set_aside()
                self.records = []
            self._write(self.records)
        except OSError as error:
            raise _explained(self.path, error) from error

    def append(self, record: Record) -> None:
        self.records.append(plain_numbers(record))
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(self.records[-1], allow_nan=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise _explained(self.path, error) from error

    def of(self, kind: str) -> list[Record]:
        return [r for r in self.records if r["type"] == kind]

    @property
    def rows(self) -> list[Record]:
        return [row for record in self.of("case") for row in record["rows"]]

    def _read(self) -> list[Record]:
        if not self.path.exists():
            return []
        found: list[Record] = []
        lines = self.path.read_text(encoding="utf-8").splitlines()
        for i, line in enumerate(lines):
            try:
                record = json.loads(line)
                if not isinstance(record, dict) or "type" not in record:
                    raise ValueError("not a record")
            except ValueError as error:
                if i == len(lines) - 1:
                    break  # cut off while it was written: that case runs again
                raise BenchError(
                    f"{self.path}: line {i + 1} is damaged ({error}): --out DIR starts anew"
                ) from error
            found.append(record)
        return found

    def _set_aside(self) -> None:
        """Keep results of an earlier run under another name."""
        if self.path.exists() and self.path.stat().st_size:
            number = 1
            while (aside := self.path.with_name(f"results-{number}.jsonl")).exists():
                number += 1
            self.path.rename(aside)

    def _write(self, records: list[Record]) -> None:
        text = "".join(json.dumps(r, allow_nan=False) + "\n" for r in records)
        fresh = self.path.with_name(f".{self.path.name}.new")
        fresh.write_text(text, encoding="utf-8")
        os.replace(fresh, self.path)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(plain_numbers(value), indent=1, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _explained(path, error) from error


def plain_numbers(value: Any) -> Any:
    """Without what JSON cannot say: no number is null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): plain_numbers(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain_numbers(v) for v in value]
    return value


def _explained(path: Path, error: OSError) -> BenchError:
    return BenchError(
        f"{path}: cannot be written: {error.strerror or error}; --out DIR names another folder"
    )
