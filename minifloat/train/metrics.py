"""Metrics as lines of JSON."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from .files import explained

__all__ = ["Metrics"]


class Metrics:
    """`with Metrics(path) as m: m.add(record)`; without a path, records go nowhere."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.file: IO[str] | None = None

    def __enter__(self) -> Metrics:
        if self.path is not None:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.file = open(self.path, "w", encoding="utf-8")
            except OSError as error:
                raise explained(self.path, error) from error
        return self

    def add(self, *records: dict[str, Any]) -> None:
        """They are on disk afterwards."""
        if self.file is None or self.path is None:
            return
        try:
            self.file.writelines(json.dumps(record) + "\n" for record in records)
            self.file.flush()
        except OSError as error:
            raise explained(self.path, error) from error

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.file is not None:
            try:
                self.file.close()
            except OSError as problem:
                if error is None:
                    assert self.path is not None
                    raise explained(self.path, problem) from problem
