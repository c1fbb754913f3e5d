"""Which of the two forward APIs a class of operations uses, settled when the class is defined."""

from __future__ import annotations

from typing import Any

__all__ = ["settle"]

LEGACY = {"op": "op_forward", "fuser": "fuser_forward"}
HALVES = {
    "op": ("op_forward_compute", "op_forward_save_ctx"),
    "fuser": ("fuser_forward_compute", "fuser_forward_save_ctx"),
}
FORWARDS = {*LEGACY.values(), *(half for pair in HALVES.values() for half in pair)}
BACKWARDS = {"op_backward", "fuser_backward"}


def settle(cls: type[Any]) -> None:
    """Set `cls._use_split_forward`; TypeError where the class does not say clearly.

    The class nearest in the method resolution order that defines a forward decides. One class
    defines one style, and a pair whole; a half may come from a parent that is split itself.
    `cls._computes_as` is the nearest that defines a forward or a backward. Whoever defines a
    forward and does not say its `forward_keywords` takes any.
    """
    found = [_defined(base, FORWARDS) for base in cls.__mro__]
    for base, names in zip(cls.__mro__, found, strict=True):
        _check_one_style(base, names)
    legacy_at = _first(found, set(LEGACY.values()))
    split_at = _first(found, {half for pair in HALVES.values() for half in pair})
    for pair in HALVES.values():
        at = [_first(found, {half}) for half in pair]
        if min(at) < legacy_at and max(at) >= legacy_at:  # the other half is none, or shadowed
            have, lack = pair if at[0] < at[1] else (pair[1], pair[0])
            raise TypeError(
                f"{cls.__name__}: defines {have} without {lack}; a split forward is the pair of "
                f"them: define {lack} too"
            )
    if min(split_at, legacy_at) < len(found):
        cls._use_split_forward = split_at < legacy_at
    computing = [base for base in cls.__mro__ if _defined(base, FORWARDS | BACKWARDS)]
    if computing:
        cls._computes_as = computing[0]
    says = next(i for i, base in enumerate(cls.__mro__) if "forward_keywords" in vars(base))
    if min(split_at, legacy_at) < says:
        cls.forward_keywords = None


def _defined(base: type[Any], names: set[str]) -> set[str]:
    """Those of the names that a class defines itself; the defaults of the framework are none."""
    return set() if vars(base).get("_framework", False) else names & set(vars(base))


def _first(found: list[set[str]], names: set[str]) -> int:
    """Where in the resolution order one of the names is defined first; past its end: nowhere."""
    return next((i for i, have in enumerate(found) if have & names), len(found))


def _check_one_style(base: type[Any], names: set[str]) -> None:
    legacy = sorted(names & set(LEGACY.values()))
    split = sorted(names - set(LEGACY.values()))
    if legacy and split:
        raise TypeError(
            f"{base.__name__}: defines both {legacy[0]} and {split[0]}; use one API: either the "
            f"legacy {legacy[0]}, or the pair {' and '.join(_pair_of(split[0]))}"
        )


def _pair_of(half: str) -> tuple[str, str]:
    return next(pair for pair in HALVES.values() if half in pair)
