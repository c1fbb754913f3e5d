"""Interleaved parameters are those that `glu_interleave_size` reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import minifloat


def test_blocks_take_turns() -> None:
    made = minifloat.interleave_glu_tensor(torch.arange(8), 2)
    assert made.tolist() == [0, 1, 4, 5, 2, 3, 6, 7]


@pytest.mark.parametrize("size", [1, 2, 6])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_back_again(size: int, dim: int) -> None:
    x = torch.randn(12, 24, 36)
    made = minifloat.interleave_glu_tensor(x, size, dim)
    assert made.shape == x.shape
    assert torch.equal(minifloat.deinterleave_glu_tensor(made, size, dim), x)
    whole = x.shape[dim] // 2 == size  # one block of each
    assert torch.equal(made, x) is whole


def test_a_layer_of_interleaved_parameters_computes_the_same() -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(64, 16), torch.randn(64), torch.randn(5, 16)
    plain = minifloat.ops.SwiGLU()(x @ weight.t() + bias)
    weight, bias = (minifloat.interleave_glu_tensor(t, 8) for t in (weight, bias))
    made = minifloat.ops.SwiGLU(glu_interleave_size=8)(x @ weight.t() + bias)
    torch.testing.assert_close(made, plain)


@pytest.mark.parametrize(
    ("shape", "size", "dim", "word"),
    [
        ((12,), 0, 0, "interleave_size: got 0"),
        ((12,), 4, 0, "interleave_size: got 4.*12"),
        ((12,), 2.0, 0, "interleave_size: got 2.0"),
        ((12,), 2, 1, "dim: got 1"),
        ((), 2, 0, "dim: got 0"),
    ],
)
def test_what_cannot_be_interleaved(shape: Any, size: Any, dim: int, word: str) -> None:
    for turn in (minifloat.interleave_glu_tensor, minifloat.deinterleave_glu_tensor):
        with pytest.raises(ValueError, match=word):
            turn(torch.zeros(shape), size, dim)
