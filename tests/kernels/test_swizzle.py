"""The 128x4-tiled scale layout."""

from __future__ import annotations

import pytest
import torch
from _cases import DEVICE, assert_exact, buffer, on_device, run_interpreted

from minifloat import reference

pytest.importorskip("triton")
from minifloat.kernels import swizzle  # noqa: E402

SHAPES = [(1, 1), (128, 4), (130, 5), (256, 128), (100, 127), (384, 260), (4096, 300)]


def check(shape: tuple[int, int]) -> None:
    scale = torch.randint(0, 256, shape, dtype=torch.uint8)
    wider = torch.randint(0, 256, (shape[0], shape[1] + 3), dtype=torch.uint8)
    view = torch.randint(0, 256, shape[::-1], dtype=torch.uint8).t()
    for s in (scale, wider[:, 1 : shape[1] + 1], view):
        expected = reference.swizzle(s)
        out = buffer(expected)
        swizzle(on_device(s), out)
        assert_exact(out, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_swizzle(shape: tuple[int, int]) -> None:
    check(shape)


@pytest.mark.gpu
def test_empty() -> None:
    empty = torch.empty(0, 5, dtype=torch.uint8, device=DEVICE)
    swizzle(empty, empty)


def test_interpreted() -> None:
    run_interpreted(__file__)


if __name__ == "__main__":
    for shape in SHAPES[:-1]:
        check(shape)
