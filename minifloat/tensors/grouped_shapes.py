"""Shapes of groups: what the members' shapes say about the group's, and the other way round."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

__all__ = [
    "Shape",
    "check_logical",
    "logical_shape",
    "member_shapes",
    "numel",
    "on_host",
    "outer_shape",
    "starts",
]

Shape = tuple[int, ...]


def logical_shape(shapes: Sequence[Shape], first: bool = False, last: bool = False) -> Shape:
    """(sum of rows, columns), (rows, sum of columns), or (1, all elements) where both vary.

    A member (L,) counts as (L, 1). `first`, `last`: that dim counts as one that varies, though the
    sizes are equal this time.
    """
    rows = [s[0] for s in shapes]
    columns = [s[1] if len(s) > 1 else 1 for s in shapes]
    first = first or any(r != rows[0] for r in rows)
    if not (last or any(c != columns[0] for c in columns)):
        return sum(rows), columns[0]
    if not first:
        return rows[0], sum(columns)
    return 1, sum(r * c for r, c in zip(rows, columns, strict=True))


def outer_shape(logical: Shape, num: int, shapes: Sequence[Shape] | None) -> Shape:
    """The shape of the group as one tensor: stacked members if they are equal, else `logical`."""
    if shapes is None or any(s != shapes[0] for s in shapes):
        return logical
    return (num, *shapes[0])


def member_shapes(
    logical: Shape, num: int, shapes: Sequence[Sequence[int]] | None, varies: tuple[bool, bool]
) -> list[Shape] | None:
    """The members' shapes as far as the host knows them; None where they vary on the device.

    `varies`: whether first_dims, and last_dims, are given.
    """
    if num <= 0:
        raise ValueError(f"num_tensors: got {num}; a group has at least one member")
    if len(logical) != 2:
        raise ValueError(f"shape: got {logical}; the logical shape (rows, columns) is needed")
    if shapes is None:
        if any(varies):
            return None
        if logical[0] % num != 0:
            raise ValueError(
                f"shape: got {logical}; its rows do not divide into {num} equal members, and "
                "neither shapes nor first_dims say how long each is"
            )
        return [(logical[0] // num, logical[1])] * num
    found = [tuple(s) for s in shapes]
    if len(found) != num:
        raise ValueError(f"shapes: got {len(found)}; there are {num} members")
    ranks = {len(s) for s in found}
    if not ranks <= {1, 2} or len(ranks) != 1:
        raise ValueError(f"shapes: got {found}; members have one dim, or two, all alike")
    check_logical(tuple(logical), found, varies, "shape")
    if not any(varies) and any(s != found[0] for s in found):
        raise ValueError(
            f"shapes: got {found}; for members that differ, first_dims or last_dims say so on the "
            "device"
        )
    return found


def check_logical(
    logical: Shape, shapes: Sequence[Shape], varies: tuple[bool, bool], name: str
) -> None:
    """Raise unless members of these shapes make `logical`, by sizes or by which dims vary."""
    made = logical_shape(shapes, *varies)
    if logical not in (made, logical_shape(shapes)):
        raise ValueError(f"{name}: got {logical}; members {list(shapes)} make {made}")


def numel(shape: Sequence[int]) -> int:
    n = 1
    for d in shape:
        n = n * d
    return n


def starts(sizes: Iterable[int]) -> list[int]:
    """`[0, cumsum(sizes)]`."""
    out = [0]
    for n in sizes:
        out.append(out[-1] + n)
    return out


def on_host(sizes: Tensor | None, num: int, common: int) -> list[int]:
    """Sizes that the device knows, which is waited for; without any, `common` for each."""
    return [common] * num if sizes is None else [int(s) for s in sizes.tolist()]
