"""Statistics and gradients of norms against the reference."""

from __future__ import annotations

import pytest
import torch
from _cases import DEVICE, INTERPRETED, assert_exact, buffer, run_interpreted
from torch import Tensor

from minifloat import reference
from minifloat.producer import norm as producer

pytest.importorskip("triton")
from minifloat.kernels import norm, produce, sums  # noqa: E402

BF16 = torch.bfloat16
SHAPES = [(1, 1), (5, 100), (300, 768), (70, 4096), (9, 20000)]


def random(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=g) + 0.25).to(dtype).to(DEVICE)


def close(made: Tensor, expected: Tensor, terms: int) -> None:
    """fp32 sums in another order, then one rounding."""
    unit = max(torch.finfo(made.dtype).eps, terms * 2.0**-22)
    torch.testing.assert_close(made.cpu(), expected, rtol=unit, atol=8 * unit)


def check(shape: tuple[int, int], rms: bool, dtype: torch.dtype = BF16) -> None:
    m, k = shape
    x, dy, add = (random(m, k, dtype=dtype, seed=s) for s in (0, 1, 2))
    gamma, beta = (random(k, dtype=dtype, seed=s) for s in (3, 4))
    want_mean, want_rstd = reference.norm_stats(x.cpu(), 1e-5, rms)
    mean, rstd = buffer(want_mean), buffer(want_rstd)
    assert rstd is not None
    amax = buffer(torch.empty(1))
    assert amax is not None
    b = None if rms else beta
    norm.stats(x, 1e-5, mean, rstd, (gamma, b, True, dtype), amax)
    close(rstd, want_rstd, 64)
    if mean is not None and want_mean is not None:
        close(mean, want_mean, 64)
    y = buffer(x)
    assert y is not None
    produce.value(producer(True), (x, mean, rstd, gamma, b), y)
    assert_exact(amax, y.cpu().abs().amax().float().reshape(1))
    again = buffer(want_rstd)
    assert again is not None
    norm.stats(x, 1e-5, buffer(want_mean), again)
    close(again, rstd.cpu(), 64)  # another kernel, which may add in another order
    for g, a in ((gamma, add), (gamma, None), (None, add)):
        out = [buffer(x)]
        if g is not None:
            out += [buffer(gamma) for _ in range(1 if rms else 2)]
        made = [t for t in out if t is not None]
        norm.backward(dy, x, mean, rstd, g, a, True, made)
        given = [None if t is None else t.cpu() for t in (dy, x, mean, rstd, g)]
        wanted = reference.norm_backward(*given, True, None if a is None else a.cpu())  # type: ignore[arg-type]
        for t, w in zip(made, wanted, strict=False):
            close(t, w.to(dtype), 64 + m)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_norm(shape: tuple[int, int], rms: bool, dtype: torch.dtype) -> None:
    check(shape, rms, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 1), (63, 33), (1000, 100)])
def test_column_sums(shape: tuple[int, int]) -> None:
    check_sums(shape)


def check_sums(shape: tuple[int, int]) -> None:
    partial = random(*shape, dtype=torch.float32)
    out = buffer(torch.empty(shape[1], dtype=BF16))
    assert out is not None
    sums.column_sums(partial, out)
    close(out, partial.cpu().sum(0).to(BF16), shape[0])


def test_interpreted() -> None:
    run_interpreted(__file__)


if __name__ == "__main__":
    assert INTERPRETED
    for rms in (False, True):
        check((5, 100), rms)
        check((3, 9000), rms)
        check((2, 17000), rms)
    check((300, 8), True, torch.float32)
    check_sums((65, 33))
