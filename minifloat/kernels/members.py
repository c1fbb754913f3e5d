"""Where the members of a group are: tables made on the device from their sizes.

`table[e] = (start, end, place, place end, ...)`: rows of member e in the source, and its columns in
a copy whose members begin at multiples of TILE, with zeros up to the next. `table[r][4]` is the
member of rank r by size: what takes longest starts first. Every member has at least
one tile of TILE rows, and a place of TILE columns, an empty one too: its scale and its zeros are
written like any other's. `tiles[t] = (e, first row, start, end, place, place end, full, 0)`, e = -1
behind the last one. They go by size, too: tiles that are multiplied at a time are then more often
of one member, and share its weights. Those with rows come first, and are `full` together.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import cdiv
from .variant import Config, Launch, Variant

__all__ = ["ENTRY", "TILE", "WIDTH", "locate", "tables", "tile_count", "variants"]

TILE = 128  # rows of a tile
ENTRY = 8  # numbers of a tile, a sector of memory
WIDTH = 5  # numbers of a member


@triton.jit
def tables_kernel(
    sizes, table, tiles, n, num, total, TILE: tl.constexpr,
    ENTRY: tl.constexpr, WIDTH: tl.constexpr, BE: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """One program for each member. Sizes that are wrong are cut off at `total` rows, or at 0."""
    e = tl.program_id(0)
    o_e = tl.arange(0, BE)
    b_size = tl.load(sizes + o_e, mask=o_e < num, other=0).to(tl.int64)
    b_size = tl.minimum(tl.maximum(b_size, 0), total)  # of wrong ones, no sum leaves int64
    b_end = tl.cumsum(b_size, 0)
    b_start = tl.minimum(b_end - b_size, total)
    b_size = tl.minimum(b_end, total) - b_start
    b_full = tl.cdiv(b_size, TILE)
    b_tiles = tl.where(o_e < num, tl.maximum(b_full, 1), 0)
    here = o_e == e
    before = o_e < e
    start = tl.sum(tl.where(here, b_start, 0)).to(tl.int32)
    size = tl.sum(tl.where(here, b_size, 0)).to(tl.int32)
    at = tl.sum(tl.where(before, b_tiles, 0)).to(tl.int32)
    count = tl.sum(tl.where(here, b_tiles, 0)).to(tl.int32)
    place, width = at * TILE, count * TILE
    full = tl.sum(b_full).to(tl.int32)
    larger = ((b_size > size) | ((b_size == size) & before)) & (o_e < num)
    rank = tl.sum(larger.to(tl.int32))
    listed = tl.sum(tl.where(larger, b_tiles, 0)).to(tl.int32)
    tl.store(table + rank * WIDTH + 4, e)
    tl.store(table + e * WIDTH, start)
    tl.store(table + e * WIDTH + 1, start + size)
    tl.store(table + e * WIDTH + 2, place)
    tl.store(table + e * WIDTH + 3, place + width)
    o_t = tl.arange(0, BT)
    for t in range(0, count, BT):
        p_t = tiles + (listed + t + o_t) * ENTRY
        ok = t + o_t < count
        zero = tl.zeros((BT,), tl.int32)
        tl.store(p_t, zero + e, mask=ok)
        tl.store(p_t + 1, start + (t + o_t) * TILE, mask=ok)
        tl.store(p_t + 2, zero + start, mask=ok)
        tl.store(p_t + 3, zero + start + size, mask=ok)
        tl.store(p_t + 4, zero + place, mask=ok)
        tl.store(p_t + 5, zero + place + width, mask=ok)
        tl.store(p_t + 6, zero + full, mask=ok)
    if e == num - 1:
        for t in range(at + count, n, BT):
            tl.store(tiles + (t + o_t) * ENTRY, tl.zeros((BT,), tl.int32) - 1, mask=t + o_t < n)


@triton.jit
def locate(tiles, i_t, rows, EQUAL: tl.constexpr, TILE: tl.constexpr, ENTRY: tl.constexpr):
    """(member, rows of it before, start, end, place, place end) of tile i_t; -1 for no member.

    EQUAL: members of `rows` rows each, in place. What is a multiple of 16 is said to be, for stores
    along it.
    """
    if EQUAL:
        per = tl.maximum(tl.cdiv(rows, TILE), 1)
        e = (i_t // per).to(tl.int64)
        start = e * rows
        local = ((i_t % per) * TILE).to(tl.int64)
        end = start + rows
        place = start
        place_end = end
    else:
        p_t = tiles + i_t * ENTRY
        e = tl.load(p_t).to(tl.int64)
        start = tl.load(p_t + 2).to(tl.int64)
        local = tl.multiple_of(tl.load(p_t + 1).to(tl.int64) - start, 16)
        end = tl.load(p_t + 3).to(tl.int64)
        place = tl.multiple_of(tl.load(p_t + 4).to(tl.int64), 16)
        place_end = tl.multiple_of(tl.load(p_t + 5).to(tl.int64), 16)
    return e, local, start, end, place, place_end


def tile_count(rows: int, num: int) -> int:
    """Tiles that suffice for any sizes of `num` members with `rows` rows together."""
    return cdiv(rows, TILE) + num


def tables(sizes: Tensor, table: Tensor, tiles: Tensor, rows: int) -> None:
    """Fill `table[num, WIDTH]` and `tiles[tile_count, ENTRY]`, int32."""
    if sizes.shape[0] > 0:
        _tables(sizes, table, tiles, rows).run()


def _tables(sizes: Tensor, table: Tensor, tiles: Tensor, rows: int) -> Launch:
    num = table.shape[0]
    args = {
        "sizes": sizes.contiguous(),
        "table": table,
        "tiles": tiles,
        "n": tiles.shape[0],
        "num": num,
        "total": rows,
        "TILE": TILE,
        "ENTRY": ENTRY,
        "WIDTH": WIDTH,
        "BE": max(16, triton.next_power_of_2(num)),
        "BT": 128,
    }
    return Launch(tables_kernel, num, args, Config(1, 1, 4))


def variants() -> Iterator[Variant]:
    table = torch.empty(64, WIDTH, dtype=torch.int32, device="meta")
    tiles = torch.empty(tile_count(1 << 15, 64), ENTRY, dtype=torch.int32, device="meta")
    for dtype in (torch.int32, torch.int64):
        sizes = torch.empty(64, dtype=dtype, device="meta")
        launch = _tables(sizes, table, tiles, 1 << 15)
        yield Variant.of(f"members_{str(dtype)[6:]}", launch)
