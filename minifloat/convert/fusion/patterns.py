"""What is fused, as data: each pattern is the shape of an expression.

A shape is nested tuples like those that `trace` makes of a forward. Its strings in the second place
are names for what is found there.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, NamedTuple

__all__ = ["ACTIVATIONS", "PATTERNS", "Pattern", "X", "asked", "match"]

X = ("x",)  # the input of the forward, as it is or normalized


class Pattern(NamedTuple):
    """`shape` is what a whole forward must compute, or (`inside`) some part of it."""

    name: str
    shape: tuple[Any, ...]
    gated: bool = False
    inside: bool = False


PATTERNS = (
    Pattern(
        "gated_mlp",
        ("linear", "down", ("mul", ("act", "act", ("linear", "gate", X)), ("linear", "up", X))),
        gated=True,
    ),
    Pattern(  # both halves in one layer
        "gated_mlp",
        (
            "linear",
            "down",
            (
                "mul",
                ("act", "act", ("half", 0, ("linear", "up", X))),
                ("half", 1, ("linear", "up", X)),
            ),
        ),
        gated=True,
    ),
    Pattern("mlp", ("linear", "down", ("act", "act", ("linear", "up", X)))),
    Pattern("norm_mlp", ("mlp", "reader", ("norm", "norm", X)), inside=True),
    Pattern("norm_linear", ("linear", "reader", ("norm", "norm", X)), inside=True),
)

# What is traced -> the names of the fused activation, (gated, not gated); "" where there is none.
ACTIVATIONS = {
    "silu": ("swiglu", "silu"),
    "gelu_tanh": ("geglu", "gelu"),
    "relu": ("reglu", "relu"),
    "sigmoid": ("glu", ""),
}


def asked(fuse: bool | str | Iterable[str]) -> tuple[Pattern, ...]:
    """The patterns of `fuse`: True is all, a name or names are those."""
    if isinstance(fuse, bool):
        return PATTERNS if fuse else ()
    known = dict.fromkeys(pattern.name for pattern in PATTERNS)
    given = [fuse] if isinstance(fuse, str) or not isinstance(fuse, Iterable) else list(fuse)
    names = [name for name in given if name in known]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"fuse: got {name!r}; allowed: True, {', '.join(known)}{hint}")
    return tuple(pattern for pattern in PATTERNS if pattern.name in names)


def match(shape: Any, found: Any) -> dict[str, str] | None:
    """The names of `shape` and what they stand for in `found`; None if it is something else."""
    if shape == X:
        if found[0] == "norm" and found[2][0] == "input":
            return {"norm": found[1]}
        return {} if found[0] == "input" else None
    if found[0] != shape[0]:
        return None
    if shape[0] == "mul":
        (a, b), (x, y) = shape[1:], found[1:]
        return _both((a, b), (x, y)) or _both((a, b), (y, x))
    if shape[0] == "norm":  # of anything
        return {shape[1]: found[1]}
    if shape[0] == "half":
        return match(shape[2], found[2]) if found[1] == shape[1] else None
    inner = match(shape[2], found[2])
    return None if inner is None else {shape[1]: found[1], **inner}


def _both(shapes: tuple[Any, Any], found: tuple[Any, Any]) -> dict[str, str] | None:
    first, second = (match(shape, of) for shape, of in zip(shapes, found, strict=True))
    if first is None or second is None:
        return None
    return _joined(first, second)


def _joined(a: dict[str, str], b: dict[str, str]) -> dict[str, str] | None:
    """Both; None if one name stands for two things, or a norm for one of them alone."""
    same = all(b.get(name, of) == of for name, of in a.items())
    return {**a, **b} if same and ("norm" in a) == ("norm" in b) else None
