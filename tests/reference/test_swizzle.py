"""The 128x4 tiling against the index formula, element by element."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minifloat.reference import swizzle, unswizzle


def numbered(rows: int, cols: int) -> torch.Tensor:
    """Distinct numbers, none of them zero."""
    return torch.arange(1, rows * cols + 1, dtype=torch.int32).reshape(rows, cols)


def place(i: int, j: int, tile_columns: int) -> int:
    """CONTRACT 1.7."""
    return ((i // 128) * tile_columns + j // 4) * 512 + (i % 32) * 16 + (i % 128 // 32) * 4 + j % 4


@pytest.mark.parametrize("shape", [(128, 4), (256, 4), (128, 12), (384, 16)])
def test_every_place(shape: tuple[int, int]) -> None:
    scale = numbered(*shape)
    out = swizzle(scale)
    assert out.shape == scale.shape
    flat = out.flatten().tolist()
    for i, row in enumerate(scale.tolist()):
        for j, value in enumerate(row):
            assert flat[place(i, j, shape[1] // 4)] == value


@given(st.integers(0, 300), st.integers(0, 20))
def test_round_trip_and_padding(rows: int, cols: int) -> None:
    scale = numbered(rows, cols)
    out = swizzle(scale)
    assert out.shape == (-(-rows // 128) * 128, -(-cols // 4) * 4)
    back = unswizzle(out)
    assert torch.equal(back[:rows, :cols], scale)
    assert int((back != 0).sum()) == rows * cols, "padding is zero"


def test_bytes_stay_bytes() -> None:
    scale = torch.randint(0, 256, (128, 8), dtype=torch.uint8)
    assert swizzle(scale).dtype is torch.uint8
    assert torch.equal(unswizzle(swizzle(scale)), scale)
    assert torch.equal(swizzle(unswizzle(scale)), scale)
