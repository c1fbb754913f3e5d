"""Transposed bytes."""

from __future__ import annotations

import importlib

import pytest
import torch
from _cases import DEVICE, SHAPES, SMALL, assert_exact, buffer, on_device, run_interpreted

pytest.importorskip("triton")
from minifloat.kernels import transpose  # noqa: E402


def check(shape: tuple[int, int]) -> None:
    data = torch.randint(0, 256, shape, dtype=torch.uint8)
    wider = torch.randint(0, 256, (shape[0], shape[1] + 5), dtype=torch.uint8)
    for d in (data, wider[:, : shape[1]], wider[:, 2 : shape[1] + 2]):
        expected = d.t().contiguous()
        out = buffer(expected)
        transpose(on_device(d), out)
        assert_exact(out, expected)
    storage = buffer(torch.empty(data.numel() + 1, dtype=torch.uint8))  # an unaligned output
    transpose(on_device(data), storage[1:].view(shape[1], shape[0]))
    assert_exact(storage[1:].view(shape[1], shape[0]), data.t().contiguous())


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (128, 128), (256, 48), (1000, 260)])
def test_transpose(shape: tuple[int, int]) -> None:
    check(shape)


@pytest.mark.gpu
def test_empty() -> None:
    empty = torch.empty(0, 5, dtype=torch.uint8, device=DEVICE)
    transpose(empty, empty.t().contiguous())


@pytest.mark.parametrize(("start", "words"), [(0, True), (1, False), (2, False), (4, True)])
def test_words_begin_where_memory_does_not(start: int, words: bool) -> None:
    """Memory of others is told by its address alone: its offset is that of a storage of its own."""
    module = importlib.import_module("minifloat.kernels.transpose")
    memory = torch.empty(8 * 12 + 4, dtype=torch.uint8)[start : start + 8 * 12]
    out = torch.from_dlpack(memory).view(12, 8)
    assert out.storage_offset() == 0
    fn = module._transpose(torch.empty(8, 12, dtype=torch.uint8), out).fn
    assert (fn is module.words_kernel) == words


def test_interpreted() -> None:
    run_interpreted(__file__)


if __name__ == "__main__":
    for shape in SMALL:
        check(shape)
