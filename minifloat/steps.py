"""Steps of recorded work: what is allocated, launched and called, on memory known by names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

__all__ = [
    "ALIGNED",
    "Address",
    "Allocate",
    "Call",
    "Constant",
    "Form",
    "Launch",
    "Piece",
    "Record",
    "Region",
    "Shared",
    "bytes_of",
    "dense",
    "leaves",
    "numel",
]

ALIGNED = 16  # bytes: of addresses, what keys of programs tell
Shared = tuple[int, int, int]  # two arguments, and how many bytes the second starts after the first
Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, int]  # shape, strides, dtype, offset


class Region(NamedTuple):
    """Memory that came into being at once: an argument, an allocation, an operator's result."""

    name: str
    start: int
    end: int
    form: Form  # as it was made; the offset is 0


class Piece(NamedTuple):
    """A tensor as code will name it: where it lies, and in which form."""

    region: str
    form: Form


class Address(NamedTuple):
    region: str
    offset: int  # bytes


class Constant(NamedTuple):
    value: Any


class Allocate(NamedTuple):
    region: str
    form: Form


class Launch(NamedTuple):
    kernel: Any
    programs: int
    args: list[Address | Constant]
    of: Any = None  # what it is an instance of, if that can be launched beside another one
    aside: bool = False  # it shares no memory with products that were made just before


class Call(NamedTuple):
    function: Any
    args: Any  # trees of Piece, Constant
    kwargs: dict[str, Any]
    makes: tuple[str, ...]  # regions; () where it returns what it was given


class Record(NamedTuple):
    """What was watched: steps, all regions by name, how many arguments, who shares memory, and what
    starts at no multiple of ALIGNED bytes."""

    steps: list[Allocate | Launch | Call]
    forms: dict[str, Form]
    inputs: int
    shared: set[Shared]
    unaligned: frozenset[str] = frozenset()


def dense(form: Form) -> bool:
    """Whether elements lie side by side, in whatever order."""
    step = 1
    for stride, n in sorted(zip(form[1], form[0], strict=True)):
        if n != 1:
            if stride != step:
                return False
            step *= n
    return True


def numel(form: Form) -> int:
    return int(torch.Size(form[0]).numel())


def bytes_of(form: Form) -> int:
    """From the first element to the last, both included."""
    last = sum((n - 1) * step for n, step in zip(form[0], form[1], strict=True))
    return (last + 1) * form[2].itemsize


def leaves(tree: Any) -> Iterable[Any]:
    """What is in lists of lists, or in the values of a dict."""
    if isinstance(tree, list):
        for value in tree:
            yield from leaves(value)
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from leaves(value)
    else:
        yield tree
