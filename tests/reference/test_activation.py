"""Activations and their gradients against PyTorch's own in fp64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minifloat import reference
from minifloat.producer import ACTIVATIONS, Producer, activation, columns

FP64: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "srelu": lambda x: F.relu(x) ** 2,
}
GATES = {
    "geglu": "gelu",
    "glu": "sigmoid",
    "qgeglu": "qgelu",
    "reglu": "relu",
    "sreglu": "srelu",
    "swiglu": "silu",
}
CLAMPED = (7.0, 1.702, 1.0)


def oracle(name: str, h: Tensor, numbers: tuple[float, float, float] = CLAMPED) -> Tensor:
    if name in FP64:
        return FP64[name](h)
    g, linear = h.chunk(2, -1)
    if name in GATES:
        return FP64[GATES[name]](g) * linear
    limit, alpha, offset = numbers
    g, linear = g.clamp(max=limit), linear.clamp(-limit, limit)
    return g * torch.sigmoid(alpha * g) * (linear + offset)


def samples(columns: int = 64) -> Tensor:
    """Both tails, zeros of both signs, and the limit of clamped_swiglu itself."""
    h = torch.randn(40, columns) * torch.exp2(torch.randint(-8, 5, (40, columns)).float())
    h[0, :3] = torch.tensor([0.0, -0.0, 7.0])
    h[0, -3:] = torch.tensor([7.0, -7.0, 0.0])
    return h


def check(name: str, p: Producer, numbers: tuple[float, float, float] = CLAMPED) -> None:
    h = samples()
    wide = h.double().requires_grad_()
    expected = oracle(name, wide, numbers)
    y = reference.activate(h, p, torch.float32)
    # A sigmoid, its argument rounded to fp32 (|z| < 100: 2**-24 of 100 in the exponent), a few
    # products. PyTorch's gelu cancels for negative numbers: 2**-52 of them is left.
    torch.testing.assert_close(y.double(), expected, rtol=2e-5, atol=1e-14)
    dy = torch.randn_like(y)
    (dh,) = torch.autograd.grad(expected, wide, dy.double())
    made = reference.activate_gradient(h, dy, p, torch.float32)
    # f' is a sum of terms that cancel where it changes sign: the error is that of the terms.
    torch.testing.assert_close(made.double(), dh, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_against_autograd(name: str) -> None:
    check(name, activation(name))


def test_clamped_with_other_numbers() -> None:
    p = activation("clamped_swiglu", limit=1.5, alpha=0.5, glu_linear_offset=-0.25)
    check("clamped_swiglu", p, (1.5, 0.5, -0.25))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_rounds_once(name: str, dtype: torch.dtype) -> None:
    h, p = samples().to(dtype), activation(name)
    y = reference.activate(h, p, torch.float32)
    assert torch.equal(reference.activate(h, p, dtype), y.to(dtype))
    dy = torch.randn_like(y).to(dtype)
    dh = reference.activate_gradient(h, dy, p, torch.float32)
    assert torch.equal(reference.activate_gradient(h, dy, p, dtype), dh.to(dtype))


@pytest.mark.parametrize("name", [n for n, a in ACTIVATIONS.items() if a.gated])
@pytest.mark.parametrize("size", [1, 8, 32])
def test_interleaved_blocks_take_turns(name: str, size: int) -> None:
    h = samples()
    g, linear = (t.reshape(40, -1, 1, size) for t in h.chunk(2, -1))
    turns = torch.cat((g, linear), 2).reshape(h.shape)
    p, q = activation(name), activation(name, glu_interleave_size=size)
    y = reference.activate(h, p, torch.float32)
    assert torch.equal(reference.activate(turns, q, torch.float32), y)
    dy = torch.randn_like(y)
    dh = reference.activate_gradient(h, dy, p, torch.float32)
    g, linear = (t.reshape(40, -1, 1, size) for t in dh.chunk(2, -1))
    expected = torch.cat((g, linear), 2).reshape(h.shape)
    assert torch.equal(reference.activate_gradient(turns, dy, q, torch.float32), expected)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_nan_stays_nan(name: str) -> None:
    h, p = torch.full((1, 2), torch.nan), activation(name)
    assert reference.activate(h, p, torch.float32).isnan().all()
    dy = torch.ones_like(reference.activate(h, p, torch.float32))
    assert reference.activate_gradient(h, dy, p, torch.float32).isnan().all()


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(0, 8), (4, 0), (0, 0)])
def test_empty(name: str, shape: tuple[int, int]) -> None:
    h, p = torch.empty(shape), activation(name)
    y = reference.activate(h, p, torch.bfloat16)
    assert y.shape == (shape[0], columns(p, shape[1]))
    assert reference.activate_gradient(h, y, p, torch.bfloat16).shape == shape
