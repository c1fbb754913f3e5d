"""Checks of arguments; an error names the argument, what was given, what is allowed."""

from __future__ import annotations

import math
from typing import Any, TypeVar

__all__ = ["ModeError", "RecipeError", "choice", "count", "flag", "instance", "number", "whole"]

T = TypeVar("T")


class RecipeError(ValueError, AssertionError):
    """A recipe's values mean nothing together, or are not among those allowed."""


class ModeError(RecipeError, RuntimeError):
    """A recipe state's mode is neither "forward" nor "backward"."""


def flag(value: object, name: str) -> bool:
    """`value`, a bool; TypeError otherwise."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: got {value!r}; True or False is needed")
    return value


def number(value: object, name: str) -> float | int:
    """`value`, a finite number that is no bool."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: got {value!r}; a number is needed")
    if not math.isfinite(value):
        raise RecipeError(f"{name}: got {value!r}; it must be finite")
    return value


def whole(value: object, name: str) -> int:
    """`value`, a whole number, as an int."""
    given = number(value, name)
    if given != int(given):
        raise RecipeError(f"{name}: got {value!r}; a whole number is needed")
    return int(given)


def count(value: object, name: str) -> int:
    """`value`, an int > 0."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: got {value!r}; an int is needed")
    if value <= 0:
        raise RecipeError(f"{name}: got {value}; it must be > 0")
    return value


def choice(value: Any, name: str, allowed: tuple[T, ...]) -> T:
    """`value`, one of `allowed`."""
    for one in allowed:  # not `in`: True == 1
        if value is one or (type(value) is type(one) and value == one):
            return one
    raise RecipeError(f"{name}: got {value!r}; allowed: {', '.join(map(repr, allowed))}")


def instance(value: Any, name: str, cls: type[T], example: str) -> T:
    """`value`, an instance of `cls`; TypeError shows the example otherwise."""
    if not isinstance(value, cls):
        raise TypeError(f"{name}: got {value!r}; a {cls.__name__} is needed, like {example}")
    return value
