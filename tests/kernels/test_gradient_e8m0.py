"""E8M0 copies of activations' gradients against the reference's casts of what kernels produce."""

from __future__ import annotations

import pytest
import torch
from _cases import INTERPRETED, buffer, run_interpreted
from test_activation_grad import random
from test_produce_e8m0 import buffers, compare
from torch import Tensor

from minifloat.formats import Cast
from minifloat.producer import ACTIVATIONS, activation

pytest.importorskip("triton")
from minifloat.kernels import activation_grad, gradient_e8m0, produce  # noqa: E402

BF16 = torch.bfloat16
SHAPES = [(1, 128), (130, 256), (128, 384)]  # of dy
MX, E5M2 = Cast("mxfp8_e4m3"), Cast("mxfp8_e5m2")
Casts = tuple[Cast | None, Cast | None, Cast | None]


def check(name: str, shape: tuple[int, int], casts: Casts, form: str, dbias: bool = True) -> None:
    p, (m, f) = activation(name), shape
    h, dy = random(m, 2 * f if p.gated else f), random(m, f, seed=9)
    dh, y = buffer(h), buffer(dy)
    assert dh is not None and y is not None
    activation_grad.value(p.gradient(), (h, dy), dh)
    produce.value(p, (h,), y)
    row, col, act = casts
    assert gradient_e8m0.fuses_backward(p.gradient(), (h, dy), BF16, *casts)
    out = buffers((m, dh.shape[1]), row, col, form)
    act_out = buffers(shape, None, act, form)
    db = buffer(torch.empty(h.shape[1], dtype=BF16)) if dbias else None
    gradient_e8m0.backward(p.gradient(), (h, dy), casts, out, act_out, db)
    compare(out, dh.cpu(), row, col)
    compare(act_out, y.cpu(), None, act)
    if db is not None:
        assert_sums(db.cpu(), dh.cpu())


def assert_sums(db: Tensor, dh: Tensor) -> None:
    """The order of an fp32 sum, then one rounding."""
    exact = dh.double().sum(0)
    bound = torch.finfo(BF16).eps * exact.abs() + 2**-20 * dh.double().abs().sum(0)
    assert bool(((db.double() - exact).abs() <= bound).all())


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["codes", "values"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["swiglu", "gelu", "clamped_swiglu"])
def test_copies(name: str, shape: tuple[int, int], form: str) -> None:
    check(name, shape, (MX, MX, MX), form)
    check(name, shape, (MX, MX, None), form, dbias=False)
    check(name, shape, (MX, None, None), form)
    check(name, shape, (None, MX, MX), form, dbias=False)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["codes", "values"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation(name: str, form: str) -> None:
    check(name, (256, 512), (E5M2, E5M2, MX), form)


def test_what_is_left_to_others() -> None:
    h, dy = torch.zeros(128, 512, dtype=BF16), torch.zeros(128, 256, dtype=BF16)
    p = activation("swiglu").gradient()
    fuses = gradient_e8m0.fuses_backward
    assert fuses(p, (h, dy), BF16, MX, MX, MX) and fuses(p, (h, dy), BF16, E5M2, E5M2, MX)
    assert not fuses(p, (h, dy), BF16, MX, E5M2, MX)
    assert not fuses(p, (h, dy), torch.float32, MX, MX, MX)
    assert not fuses(p, (h[:, :400], dy[:, :200]), BF16, MX, MX, MX)
    assert not fuses(p, (h, dy), BF16, MX, MX, Cast("fp8_e4m3_1x128"))
    between = activation("swiglu", glu_interleave_size=32).gradient()
    assert not fuses(between, (h, dy), BF16, MX, MX, MX)


def test_interpreted() -> None:
    run_interpreted(__file__)


if __name__ == "__main__":
    assert INTERPRETED
    check("swiglu", (36, 128), (MX, MX, MX), "values")
