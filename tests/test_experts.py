"""Sizes that only the device knows, checked there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from minifloat.experts import _assert_sizes

WRONG = ([3, 3, 2], [-2, 4, 5], [8, -1, 0], [9, 0, -2])


@pytest.mark.parametrize("sizes", WRONG)
def test_wrong_sizes_stop_the_device(sizes: list[int]) -> None:
    _assert_sizes(torch.tensor([3, 0, 4]), 7, "layer: m_splits", False)
    with pytest.raises(RuntimeError, match="layer: m_splits: none may be negative.*7 rows"):
        _assert_sizes(torch.tensor(sizes), 7, "layer: m_splits", False)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.deep)])
def test_in_a_graph(backend: str) -> None:
    torch._dynamo.reset()

    def checked(x: Tensor, sizes: Tensor) -> Tensor:
        _assert_sizes(sizes, x.shape[0], "layer: m_splits", True)
        return x * 2

    compiled = torch.compile(checked, backend=backend, fullgraph=True)
    x = torch.randn(7, 2, requires_grad=True)
    compiled(x, torch.tensor([3, 0, 4])).sum().backward()
    for sizes in WRONG:
        with pytest.raises(RuntimeError, match="layer: m_splits: none may be negative"):
            compiled(x, torch.tensor(sizes))
