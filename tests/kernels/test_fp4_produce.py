"""Activations and gradients with amaxes: the values of other kernels, the reference's amaxes."""

from __future__ import annotations

import pytest
import torch
from _cases import DEVICE, INTERPRETED, assert_exact, buffer, run_interpreted
from torch import Tensor

from minifloat import reference
from minifloat.formats import HADAMARD_SIGN_MASK, Cast
from minifloat.producer import ACTIVATIONS, Producer, activation

pytest.importorskip("triton")
from minifloat.kernels import activation_grad, fp4_produce, produce  # noqa: E402

BF16 = torch.bfloat16
FP4, RHT = Cast("nvfp4"), Cast("nvfp4", hadamard=HADAMARD_SIGN_MASK)
Casts = tuple[Cast | None, Cast | None]
CASTS: list[Casts] = [(FP4, RHT), (FP4, None), (None, RHT), (None, FP4), (FP4, FP4)]


def random(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed + sum(shape))
    x = torch.randn(shape, generator=g) * torch.exp2(torch.randint(-6, 3, shape, generator=g))
    return x.to(BF16).to(DEVICE)


def outputs(casts: Casts) -> tuple[Tensor | None, Tensor | None]:
    made = [None if c is None else buffer(torch.empty(1)) for c in casts]
    return made[0], made[1]


def assert_amaxes(made: tuple[Tensor | None, Tensor | None], x: Tensor, casts: Casts) -> None:
    for amax, cast, col in zip(made, casts, (False, True), strict=True):
        if cast is not None:
            assert amax is not None
            assert_exact(amax, reference.amax(x.cpu(), cast, col=col))


def check(p: Producer, shape: tuple[int, int], casts: Casts, odd: bool = False) -> None:
    m, f = shape
    h, dy = random(m, 2 * f if p.gated else f), random(m, f, seed=1)
    if odd:
        h[3, 5], dy[7, 9] = torch.inf, torch.nan
    one, two = (torch.tensor([v], device=DEVICE) for v in (0.37, 1.9))
    for of_h, of_dy in ((None, None), (one, two)):
        y, dh = buffer(dy), buffer(h)
        assert y is not None and dh is not None
        produce.value(p, (h, of_h), y)
        activation_grad.value(p.gradient(), (h, dy, of_h, of_dy), dh)
        for of, inputs, expected in (
            (p, (h, of_h), y), (p.gradient(), (h, dy, of_h, of_dy), dh)
        ):  # fmt: skip
            assert fp4_produce.fuses(of, inputs, BF16, *casts)
            got, amaxes = buffer(expected), outputs(casts)
            assert got is not None
            fp4_produce.produce(of, inputs, got, *casts, *amaxes)
            assert_exact(got, expected.cpu())
            assert_amaxes(amaxes, expected, casts)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation(name: str) -> None:
    check(activation(name), (48, 512), CASTS[0])


@pytest.mark.gpu
@pytest.mark.parametrize("casts", CASTS)
def test_every_amax(casts: Casts) -> None:
    check(activation("swiglu"), (4128, 1024), casts)  # more tiles than programs
    check(activation("gelu"), (16, 256), casts)


@pytest.mark.gpu
def test_what_is_not_a_number() -> None:
    check(activation("swiglu"), (32, 256), CASTS[0], odd=True)


def test_what_other_kernels_make() -> None:
    """Partial tiles, other dtypes, other formats, rows with an amax each."""
    h, p = torch.zeros(32, 512, dtype=BF16), activation("swiglu")
    assert fp4_produce.fuses(p, (h,), BF16, FP4, RHT)
    assert not fp4_produce.fuses(p, (h[:, :-32],), BF16, FP4, None)
    assert not fp4_produce.fuses(p, (h[:17],), BF16, FP4, None)
    assert not fp4_produce.fuses(p, (h.float(),), torch.float32, FP4, None)
    assert not fp4_produce.fuses(p, (h,), BF16, Cast("mxfp8_e4m3"), None)
    assert not fp4_produce.fuses(p, (h,), BF16, Cast("nvfp4", row_scaled=True), None)
    assert not fp4_produce.fuses(p.replace(interleave=8), (h,), BF16, FP4, None)


@pytest.mark.skipif(INTERPRETED, reason="runs itself")
def test_interpreted() -> None:
    run_interpreted(__file__)


if __name__ == "__main__":
    check(activation("swiglu"), (16, 256), CASTS[0])
    check(activation("gelu"), (16, 256), CASTS[1])
