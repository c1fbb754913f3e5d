"""What the methods of operations return, checked: a tensor would unpack too, row by row."""

from __future__ import annotations

from typing import Any

__all__ = ["each", "results"]


def results(made: Any, method: str, names: tuple[str, ...]) -> Any:
    """`made`, if it is one thing for each name."""
    if isinstance(made, tuple | list) and len(made) == len(names):
        return made
    got = f"{len(made)} results" if isinstance(made, tuple | list) else type(made).__name__
    raise TypeError(f"{method}: returned {got}; ({', '.join(names)}) is needed")


def each(made: Any, method: str, what: str, count: int) -> list[list[Any]]:
    """`made`, if it is an iterable of tensors for each of `count` basic operations."""
    found = [] if made is None else [None if m is None else list(m) for m in made]
    if len(found) != count or any([m is None for m in found]):  # noqa: C419  (2.11 traces lists)
        raise TypeError(
            f"{method}: {what}: got {_shape(made)}; a tuple for each of its {count} basic "
            "operations is needed, () where there are none"
        )
    return found  # type: ignore[return-value]


def _shape(made: Any) -> str:
    if not isinstance(made, tuple | list):
        return type(made).__name__
    return f"[{', '.join([type(m).__name__ for m in made])}]"
