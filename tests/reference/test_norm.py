"""Norms and their gradients against PyTorch's own in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minifloat import reference

EPS = 1e-5
M, K = 33, 96
# Sums of K fp32 terms: K * 2**-24 relative to the sum of their magnitudes, with room for rstd's.
CLOSE = {"rtol": 1e-5, "atol": 4e-5}


def oracle(x: Tensor, gamma: Tensor | None, beta: Tensor | None, rms: bool) -> Tensor:
    if rms:
        return F.rms_norm(x, (x.shape[1],), gamma, EPS)
    return F.layer_norm(x, (x.shape[1],), gamma, beta, EPS)


@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_against_autograd(rms: bool, zero_centered: bool, affine: bool, residual: bool) -> None:
    x = 3 * torch.randn(M, K) + 1
    gamma = torch.randn(K) if affine else None
    beta = torch.randn(K) if affine and not rms else None
    wide = [None if t is None else t.double().requires_grad_() for t in (x, gamma, beta)]
    scale = wide[1]
    if scale is not None and zero_centered:
        scale = scale + 1
    assert wide[0] is not None
    expected = oracle(wide[0], scale, wide[2], rms)
    mean, rstd = reference.norm_stats(x, EPS, rms)
    assert (mean is None) == rms
    y = reference.norm(x, mean, rstd, gamma, beta, zero_centered, torch.float32)
    torch.testing.assert_close(y.double(), expected, **CLOSE)
    dy, add = torch.randn(M, K), torch.randn(M, K) if residual else None
    inputs = [t for t in wide if t is not None]
    grads = torch.autograd.grad(expected, inputs, dy.double())
    dx, dgamma, dbeta = reference.norm_backward(dy, x, mean, rstd, gamma, zero_centered, add)
    want = grads[0] if add is None else grads[0] + add
    torch.testing.assert_close(dx.double(), want, **CLOSE)
    for made, grad in zip((dgamma, dbeta), grads[1:], strict=False):
        torch.testing.assert_close(made.double(), grad, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounds_once(dtype: torch.dtype) -> None:
    x, dy, add = (torch.randn(M, K).to(dtype) for _ in range(3))
    gamma, beta = torch.randn(K).to(dtype), torch.randn(K).to(dtype)
    mean, rstd = reference.norm_stats(x, EPS, False)
    assert mean is not None and mean.dtype is rstd.dtype is torch.float32
    y = reference.norm(x, mean, rstd, gamma, beta, True, torch.float32)
    assert torch.equal(reference.norm(x, mean, rstd, gamma, beta, True, dtype), y.to(dtype))
    dx, dgamma, dbeta = reference.norm_backward(dy, x, mean, rstd, gamma, True, add)
    wide = (t.float() for t in (dy, x))
    exact = reference.norm_backward(*wide, mean, rstd, gamma, True, add.float())
    assert torch.equal(dx, exact[0].to(dtype))
    assert dgamma.dtype is dbeta.dtype is torch.float32


def test_l2_against_autograd() -> None:
    x = torch.randn(M, K)
    wide = x.double().requires_grad_()
    expected = wide / torch.sqrt((wide * wide).sum(1, keepdim=True) + EPS)
    y, rstd = reference.l2_norm(x, EPS)
    torch.testing.assert_close(y.double(), expected, **CLOSE)
    dy = torch.randn(M, K)
    (dx,) = torch.autograd.grad(expected, wide, dy.double())
    torch.testing.assert_close(reference.l2_norm_backward(dy, x, rstd).double(), dx, **CLOSE)
