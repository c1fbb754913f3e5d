"""Delayed scaling: what is recorded, what is kept, and the scale that follows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minifloat.formats import E4M3, E5M2, FP32_MAX
from minifloat.reference import amax_from_history, delayed_update, scale_from_amax

INF, NAN = math.inf, math.nan


def column(*values: float) -> torch.Tensor:
    return torch.tensor([[v] for v in values])


@pytest.mark.parametrize(
    "algorithm, amax",
    [
        ("max", [5.0, 9.0]),
        ("most_recent", [2.0, 9.0]),
        (lambda h: h.mean(dim=0), [3.0, 4.0]),
        (lambda h: h[-1], [5.0, 1.0]),
    ],
)
def test_amax_from_history(algorithm: object, amax: list[float]) -> None:
    history = torch.tensor([[2.0, 9.0], [2.0, 2.0], [5.0, 1.0]])
    assert amax_from_history(history, algorithm).tolist() == amax


@pytest.mark.parametrize("algorithm", ["mean", "", None])
def test_unknown_algorithm(algorithm: object) -> None:
    with pytest.raises(ValueError, match="allowed: 'max', 'most_recent', or a callable"):
        amax_from_history(torch.ones(2, 1), algorithm)


@pytest.mark.parametrize(
    "before, after",
    [
        ([7], [0]),
        ([7, 1], [0, 7]),
        ([7, 1, 2], [0, 2, 7]),
        ([7, 1, 2, 3, 4], [0, 2, 3, 4, 7]),
        ([0], [0]),
        ([0, 1, 2], [0, 1, 2]),
        ([NAN, 1, 2], [0, 2, NAN]),
        ([INF, 1, 2], [0, 2, INF]),
    ],
)
def test_history(before: list[float], after: list[float]) -> None:
    """Rolled by -1, row 0 zeroed: the oldest, row 1, is dropped. Without a record nothing rolls."""
    source = column(*before)
    kept = source.clone()
    history, _ = delayed_update(source, torch.ones(1), 448.0)
    torch.testing.assert_close(history, column(*after), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(source, kept, rtol=0, atol=0, equal_nan=True)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 2**31))
def test_history_is_roll_then_zero(length: int, n: int, seed: int) -> None:
    history = torch.rand(length, n, generator=torch.Generator().manual_seed(seed)) + 1
    want = history.roll(-1, 0)
    want[0] = 0
    assert torch.equal(delayed_update(history, torch.ones(n), 448.0)[0], want)


@pytest.mark.parametrize(
    "algorithm, history, scale",
    [
        ("max", [2, 1, 4], 112.0),
        ("max", [4, 1, 2], 112.0),
        ("most_recent", [2, 1, 4], 224.0),
        (lambda h: h.sum(dim=0), [2, 1, 4], 64.0),
        ("max", [2], 224.0),
        ("most_recent", [2], 224.0),
        ("max", [0, 1, 4], 3.0),  # nothing recorded: the scale stays, whatever the history says
        (lambda h: h[-1], [0, 1, 4], 3.0),
        (lambda h: h[1], [2, 0, 4], 3.0),  # an amax of 0 keeps the scale
        ("max", [INF, 1, 4], 3.0),
        ("max", [NAN, 1, 4], 3.0),
        ("max", [2, INF, 4], 3.0),
        ("most_recent", [2, INF, NAN], 224.0),
        ("max", [1e-40, 0, 0], FP32_MAX),
    ],
)
def test_scale(algorithm: object, history: list[float], scale: float) -> None:
    new = delayed_update(column(*history), torch.tensor([3.0]), 448.0, amax_algorithm=algorithm)[1]
    assert new.tolist() == [scale]


def test_columns_are_independent() -> None:
    history = torch.tensor([[2.0, 0.0, INF, 7.0], [1.0, 5.0, 1.0, 1.0]])
    fmax = torch.tensor([E4M3.max, E4M3.max, E4M3.max, E5M2.max])
    new, scale = delayed_update(history, torch.full((4,), 3.0), fmax)
    assert new.tolist() == [[0, 0, 0, 0], [2, 5, INF, 7]]
    assert scale.tolist() == [224.0, 3.0, 3.0, 8192.0]


@pytest.mark.parametrize("margin", [-1, 0, 1, 3])
def test_margin_and_rounding(margin: int) -> None:
    """The fused rule, `(fmax * 2**-margin) / amax`, one rounding per operation."""
    amax = np.random.default_rng(7).uniform(0.01, 100, 500).astype(np.float32)
    got = scale_from_amax(torch.from_numpy(amax), torch.ones(500), 448.0, margin)
    want = (np.float32(448) * np.float32(2.0**-margin)) / amax
    np.testing.assert_array_equal(got.numpy(), want)
    updated = delayed_update(torch.from_numpy(amax)[None], torch.ones(500), 448.0, margin=margin)[1]
    np.testing.assert_array_equal(updated.numpy(), want)


@pytest.mark.parametrize("amax", [0.0, -0.0, -1.0, INF, -INF, NAN])
def test_amax_that_says_nothing_keeps_the_scale(amax: float) -> None:
    assert scale_from_amax(torch.tensor([amax]), torch.tensor([5.0]), 448.0).tolist() == [5.0]


@pytest.mark.parametrize("amax", [1e-45, 1e-40, 1e-37])
def test_infinite_scale_becomes_the_largest(amax: float) -> None:
    assert scale_from_amax(torch.tensor([amax]), torch.ones(1), 448.0).tolist() == [FP32_MAX]


def test_scale_algorithm() -> None:
    seen = []

    def algorithm(amax: torch.Tensor, scale: torch.Tensor, fmax: torch.Tensor) -> torch.Tensor:
        seen.append((amax.tolist(), scale.tolist(), fmax.item()))
        return amax + scale

    history = torch.tensor([[2.0, 0.0], [1.0, 4.0]])
    _, scale = delayed_update(history, torch.tensor([3.0, 5.0]), 448.0, scale_algorithm=algorithm)
    assert seen == [([2.0, 4.0], [3.0, 5.0], 448.0)]
    assert scale.tolist() == [5.0, 5.0], "an idle column keeps its scale here too"


def test_three_steps() -> None:
    """The slot is row 0; 'max' forgets a value after `len` updates."""
    history, scale = torch.zeros(2, 1), torch.ones(1)
    scales = []
    for amax in (4.0, 1.0, 2.0):
        history[0] = amax
        history, scale = delayed_update(history, scale, 448.0)
        scales.append(scale.item())
    assert scales == [112.0, 112.0, 224.0]
    assert history.flatten().tolist() == [0.0, 2.0]
