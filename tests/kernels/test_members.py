"""The tables of members and of their tiles, made on the device."""

from __future__ import annotations

import pytest
import torch
from _cases import DEVICE, INTERPRETED, run_interpreted

pytest.importorskip("triton")
from minifloat.kernels import members  # noqa: E402

SIZES = (
    [0, 130, 1, 0, 257, 64, 16, 130],
    [3],
    [0, 0, 0],
    [128, 256, 40000],
    [-5, 20, 1 << 40],  # wrong: cut off at the number of rows
)


def expected(sizes: list[int], rows: int) -> tuple[list[list[int]], list[list[int]], int]:
    """(members, tiles, how many of them have rows), by the rule."""
    table, at, place = [], 0, 0
    for size in sizes:
        end = min(at + max(size, 0), rows)
        width = max(1, -(-(end - at) // members.TILE)) * members.TILE
        table.append([at, end, place, place + width])
        at, place = end, place + width
    order = sorted(range(len(sizes)), key=lambda e: table[e][0] - table[e][1])
    tiles = [
        [e, table[e][0] + i, *table[e]]
        for e in order
        for i in range(0, table[e][3] - table[e][2], members.TILE)
    ]
    full = sum(first < end for _, first, _, end, _, _ in tiles)
    return [[*at, e] for at, e in zip(table, order, strict=True)], tiles, full


def check(sizes: list[int]) -> None:
    rows = sum(max(s, 0) for s in sizes if s < 1 << 20) + 7
    count = members.tile_count(rows, len(sizes))
    table = torch.empty(len(sizes), members.WIDTH, dtype=torch.int32, device=DEVICE)
    tiles = torch.empty(count, members.ENTRY, dtype=torch.int32, device=DEVICE)
    members.tables(torch.tensor(sizes, device=DEVICE), table, tiles, rows)
    want_table, want_tiles, full = expected(sizes, rows)
    n = len(want_tiles)
    assert table.tolist() == want_table
    assert tiles[:n, :6].tolist() == want_tiles
    assert set(tiles[:n, 6].tolist()) == {full}
    assert [e for e, first, _, end, _, _ in want_tiles[full:] if first < end] == []
    assert set(tiles[n:, 0].tolist()) <= {-1}


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_tables(sizes: list[int]) -> None:
    check(sizes)


def test_interpreted() -> None:
    run_interpreted(__file__)


if __name__ == "__main__":
    assert INTERPRETED
    for each in SIZES:
        check(each)
