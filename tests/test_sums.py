"""Sums over rows: in fp32, rounded once, the same in a graph."""

from __future__ import annotations

import pytest
import torch

from minifloat.sums import column_sums

# Few rows, partial tiles, one step and two.
SHAPES = [(1, 1), (3, 5), (64, 32), (511, 33), (512, 768), (2048, 3072), (5000, 100), (16384, 48)]


def check(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, device=device).to(dtype)
    exact, magnitude = x.double().sum(0), x.double().abs().sum(0)
    for out in (None, torch.float32):
        y = column_sums(x, out)
        assert y.dtype is (out or dtype) and y.shape == shape[1:]
        # n additions in fp32, then one rounding.
        bound = magnitude * (shape[0] * 2.0**-24) + exact.abs() * torch.finfo(y.dtype).eps
        assert bool(((y.double() - exact).abs() <= bound).all())
        for _ in range(3):  # recorded, replayed
            assert torch.equal(column_sums(x, out), y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES[:5])
def test_sums_are_rounded_once(shape: tuple[int, int], dtype: torch.dtype) -> None:
    check(shape, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_are_rounded_once_on_a_gpu(shape: tuple[int, int], dtype: torch.dtype) -> None:
    check(shape, dtype, "cuda")


@pytest.mark.gpu
def test_rows_may_lie_apart() -> None:
    x = torch.randn(700, 200, device="cuda", dtype=torch.bfloat16)
    assert torch.equal(column_sums(x[::2, :96]), column_sums(x[::2, :96].contiguous()))
    assert torch.equal(column_sums(x.t()), column_sums(x.t().contiguous()))


def test_wider_and_empty_matrices() -> None:
    x = torch.randn(7, 3, dtype=torch.float64)
    assert torch.equal(column_sums(x), x.sum(0))
    assert torch.equal(column_sums(torch.empty(0, 3)), torch.zeros(3))
    assert column_sums(torch.empty(4, 0)).shape == (0,)


def test_a_graph_sums_alike() -> None:
    x = torch.randn(33, 17).bfloat16()
    graph = torch.compile(column_sums, fullgraph=True, backend="aot_eager")
    assert torch.equal(graph(x), column_sums(x))
