"""Fronts of the norms: what they return, and the kernels against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from minifloat import norms, producers, reference

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = [(1, 1), (33, 100), (129, 4096), (7, 20000), (300, 768)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def inputs(shape: tuple[int, int], dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    m, k = shape
    x, dy, add = ((torch.randn(m, k) + 0.5).to(dtype).to(device) for _ in range(3))
    gamma, beta = (torch.randn(k).to(dtype).to(device) for _ in range(2))
    return x, dy, add, gamma, beta


def close(made: Tensor, expected: Tensor, terms: int) -> None:
    """Sums of fp32 terms in another order, then a rounding to the dtype: one unit at most."""
    unit = max(torch.finfo(made.dtype).eps, terms * 2.0**-22)
    torch.testing.assert_close(made.cpu(), expected.cpu(), rtol=unit, atol=8 * unit)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_stats_and_gradients(
    shape: tuple[int, int], dtype: torch.dtype, rms: bool, device: str
) -> None:
    x, dy, add, gamma, beta = inputs(shape, dtype, device)
    mean, rstd = norms.norm_stats(x, 1e-5, rms=rms)
    expected = reference.norm_stats(x.cpu(), 1e-5, rms)
    assert (mean is None) == rms
    if mean is not None and expected[0] is not None:
        close(mean, expected[0], 64)
    close(rstd, expected[1], 64)
    zero_centered = dtype is torch.float32
    dx, dgamma, dbeta = norms.norm_backward(
        dy, x, mean, rstd, gamma, zero_centered=zero_centered, add=add
    )
    given = [None if t is None else t.cpu() for t in (dy, x, mean, rstd, gamma)]
    want = reference.norm_backward(*given, zero_centered, add.cpu())  # type: ignore[arg-type]
    assert dx.dtype is dtype and dgamma is not None and dgamma.dtype is gamma.dtype
    close(dx, want[0], 64)
    close(dgamma, want[1].to(dtype), 64 + shape[0])
    assert (dbeta is None) == rms
    if dbeta is not None:
        close(dbeta, want[2].to(dtype), 64 + shape[0])
    dx, dgamma, dbeta = norms.norm_backward(dy, x, mean, rstd, None)
    assert dgamma is None and dbeta is None
    close(dx, reference.norm_backward(*given[:4], None, False)[0], 64)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
@pytest.mark.parametrize("shape", [*SHAPES, (0, 8)], ids=str)
def test_the_amax_is_that_of_the_value(shape: tuple[int, int], rms: bool, device: str) -> None:
    x, _, _, gamma, beta = inputs(shape, torch.bfloat16, device)
    for g, b in ((gamma, None if rms else beta), (None, None)):
        mean, rstd, amax = norms.norm_stats_amax(x, 1e-5, g, b, rms=rms, zero_centered=True)
        apart = norms.norm_stats(x, 1e-5, rms=rms)
        close(rstd, apart[1].cpu(), 64)  # another kernel, which may add in another order
        y = producers.normalized(x, mean, rstd, g, b, zero_centered=True).value()
        largest = y.abs().amax().float() if y.numel() else torch.zeros((), device=device)
        assert amax.shape == (1,) and torch.equal(amax[0], largest)


@pytest.mark.parametrize("device", DEVICES)
def test_nan_reaches_the_amax(device: str) -> None:
    x = torch.randn(40, 64, device=device, dtype=torch.bfloat16)
    x[3, 5] = torch.nan
    assert norms.norm_stats_amax(x, 1e-5, None, None, rms=True)[2].isnan().all()


@pytest.mark.gpu
def test_gradients_are_the_same_every_time() -> None:
    x, dy, _, gamma, _ = inputs((4000, 1024), torch.bfloat16, "cuda")
    _, rstd = norms.norm_stats(x, 1e-5, rms=True)
    first = norms.norm_backward(dy, x, None, rstd, gamma)
    for _ in range(3):
        again = norms.norm_backward(dy, x, None, rstd, gamma)
        assert torch.equal(first[0], again[0])
        assert first[1] is not None and again[1] is not None and torch.equal(first[1], again[1])


def test_l2() -> None:
    x = torch.randn(4, 8)
    y, rstd = norms.l2_norm(x, 1e-6)
    torch.testing.assert_close(y.norm(dim=1), torch.ones(4))
    # A row's length does not change along the row itself.
    dx = norms.l2_norm_backward(x, x, rstd)
    torch.testing.assert_close(dx, torch.zeros_like(x), rtol=0, atol=1e-5)


def test_what_is_refused() -> None:
    x = torch.randn(4, 8)
    with pytest.raises(ValueError, match=r"x: got \(4,\); a matrix"):
        norms.norm_stats(x[:, 0], 1e-5, rms=True)
    with pytest.raises(ValueError, match="dy, x, add: got .*; they must have one shape"):
        norms.norm_backward(x[:2], x, None, torch.ones(4), None)
