"""What a user can cause and mend: said in one sentence, without a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

__all__ = ["BenchError", "choose", "unknown"]


class BenchError(Exception):
    """Its message is for the user."""


def unknown(
    kind: str, name: str, known: Iterable[str], more: str = "", nearest: str = ""
) -> BenchError:
    """The error for a name that is not known: the list, and the nearest match."""
    names = list(known)
    near = [nearest] if nearest else difflib.get_close_matches(name.lower(), names, 1, 0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return BenchError(f"unknown {kind} {name!r}: there are {', '.join(names)}{more}{hint}")


def choose(kind: str, text: str | None, known: Sequence[str], default: Sequence[str]) -> list[str]:
    """The names of a comma-separated list, each known; `default` for None."""
    if text is None:
        return list(default)
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise BenchError(f"no {kind} is named: there are {', '.join(known)}")
    for name in names:
        if name not in known:
            raise unknown(kind, name, known)
    return list(dict.fromkeys(names))
