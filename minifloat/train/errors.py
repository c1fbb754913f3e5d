"""What a user can cause and mend: said in one sentence, without a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["TrainError", "pick"]


class TrainError(Exception):
    """Its message is for the user; `told` where another process says it."""

    def __init__(self, message: str, told: bool = False) -> None:
        super().__init__(message)
        self.told = told


def pick(kind: str, name: str, known: Iterable[str]) -> str:
    """`name` if it is known; else an error with the list and the nearest match."""
    names = list(known)
    if name in names:
        return name
    near = difflib.get_close_matches(name.lower(), names, 1, 0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise TrainError(f"unknown {kind} {name!r}: there are {', '.join(names)}{hint}")
