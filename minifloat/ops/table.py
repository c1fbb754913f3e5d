"""Fusions as rows of a table, and the one scanner that applies a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["Row", "Slot", "scan"]


def _always(op: Any, recipe: Any) -> bool:
    return True


def _fits(ops: list[Any], recipe: Any) -> bool:
    return True


class Slot(NamedTuple):
    """One operation of a pattern: of one of `classes` (and no subclass, if `exact`), and such that
    `when(op, recipe)`. `optional` ones may be missing. A subclass with a forward or a backward of
    its own does not match: what is fused would pass it by."""

    classes: tuple[type[Any], ...]
    when: Callable[[Any, Any], bool] = _always
    optional: bool = False
    exact: bool = False

    def matches(self, op: Any, recipe: Any) -> bool:
        if self.exact:
            # One by one: `type(op) in classes` compares classes by a method Dynamo does not know.
            same = any([type(op) is c for c in self.classes])  # noqa: C419
        else:
            same = any([_computes(op, c) for c in self.classes])  # noqa: C419
        return same and self.when(op, recipe)


class Row(NamedTuple):
    """`pattern` is replaced by `fused(its operations)`, where `before` and `after`, if given, match
    the operations next to it, which stay."""

    fused: Callable[[list[Any]], Any]
    pattern: tuple[Slot, ...]
    before: Slot | None = None
    after: Slot | None = None
    quantized: bool = False  # only under a recipe that quantizes backward too
    fits: Callable[[list[Any], Any], bool] = _fits  # of all operations that the pattern found


def _computes(op: Any, cls: type[Any]) -> bool:
    return isinstance(op, cls) and issubclass(cls, op._computes_as)


def scan(row: Row, ops: list[Any], recipe: Any) -> list[Any]:
    """The operations with every match of the row fused, from the left, without overlap."""
    if row.quantized and (recipe is None or recipe.backward_override is not None):
        return ops
    made: list[Any] = []
    at = 0
    while at < len(ops):
        length = _match(row, ops, at, recipe)
        if length:
            made.append(row.fused(ops[at : at + length]))
        else:
            made.append(ops[at])
        at += length or 1
    return made


def _match(row: Row, ops: list[Any], at: int, recipe: Any) -> int:
    """How many operations from `at` on the row replaces; 0: none."""
    if row.before is not None and not (
        at > 0 and row.before.matches(_basic(ops[at - 1], -1), recipe)
    ):
        return 0
    end = at
    for slot in row.pattern:
        if end < len(ops) and slot.matches(ops[end], recipe):
            end += 1
        elif not slot.optional:
            return 0
    if row.after is not None and not (
        end < len(ops) and row.after.matches(_basic(ops[end], 0), recipe)
    ):
        return 0
    return end - at if row.fits(ops[at:end], recipe) else 0


def _basic(op: Any, index: int) -> Any:
    """The first or last basic operation of what may be fused already."""
    return op.basic_ops[index] if op.is_fused_op else op
