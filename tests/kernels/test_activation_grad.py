"""Casts of activations' gradients against the reference's casts of what the kernels produce."""

from __future__ import annotations

import pytest
import torch
from _cases import (
    DEVICE,
    INTERPRETED,
    assert_codes,
    assert_exact,
    buffer,
    filled,
    run_interpreted,
    wide,
)
from torch import Tensor

from minifloat import reference
from minifloat.formats import Cast
from minifloat.gradients import Given
from minifloat.layout import parts
from minifloat.producer import ACTIVATIONS, activation

pytest.importorskip("triton")
from minifloat.kernels import activation_grad, produce  # noqa: E402

BF16 = torch.bfloat16
SHAPES = [(1, 128), (132, 128), (128, 256)]  # of dy; the last two in words
E4M3, E5M2 = Cast("fp8_e4m3"), Cast("fp8_e5m2")
BLOCKS = Cast("fp8_e4m3_1x128", pow2=True)


def random(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed + sum(shape))
    x = torch.randn(shape, generator=g) * torch.exp2(torch.randint(-6, 3, shape, generator=g))
    return x.to(dtype).to(DEVICE)


def out_of(shape: tuple[int, int], row: Cast | None, col: Cast | None) -> dict[str, Tensor]:
    return {d.name: buffer(torch.empty(d.shape, dtype=d.dtype)) for d in parts(shape, row, col)}  # type: ignore[misc]


def check(
    name: str,
    shape: tuple[int, int],
    casts: tuple[Cast | None, Cast | None, Cast | None],
    given: Given = Given(),  # noqa: B008
    dtype: torch.dtype = BF16,
    *,
    sums: bool = True,
    odd: bool = False,
) -> None:
    p = activation(name)
    m, f = shape
    h, dy = random(m, 2 * f if p.gated else f, dtype=dtype), random(m, f, dtype=dtype, seed=9)
    if odd:  # blocks of zeros, of subnormals, with Inf and with NaN
        dy[7], dy[:, 5], dy[9, 70], h[40, 3] = 0, 0, torch.inf, torch.nan
        dy[64:96, 64:] *= 2.0**-128
    dh, y = buffer(h), buffer(dy)
    assert dh is not None and y is not None
    activation_grad.value(p.gradient(), (h, dy), dh)
    produce.value(p, (h,), y)
    twin = reference.activate_gradient(h.cpu(), dy.cpu(), p, dtype)
    # A derivative's terms cancel where it changes sign.
    near = {"rtol": max(torch.finfo(dtype).eps, 2**-16), "atol": 2e-5, "equal_nan": odd}
    torch.testing.assert_close(dh.cpu(), twin, **near)  # type: ignore[arg-type]
    row, col, act = casts
    of = (p.gradient(), (h, dy), dtype)
    if not activation_grad.fuses_backward(*of, *casts):
        cast = next(c for c in casts if c is not None)
        if p.gated and 2 * f % cast.room[0]:
            return
        assert cast.tiled and (dtype is not BF16 or m % 4 or f % 128)
        return
    out, act_out = out_of(dh.shape, row, col), {} if act is None else out_of(shape, None, act)  # type: ignore[arg-type]
    db = buffer(torch.empty(h.shape[1], dtype=dtype)) if sums else None
    before = None if given.amax is None else given.amax.cpu().clone()
    activation_grad.backward(*of, casts, out, act_out, db, given)
    compare(out, dh.cpu(), (row, col), given.scale, None)
    compare(act_out, y.cpu(), (None, act), given.act_scale, given.act_amax)
    if before is not None and given.amax is not None:
        seen = dh.cpu().float().abs().amax().reshape(1)
        assert_exact(given.amax, torch.maximum(seen, before))
    if db is None:
        return
    exact = dh.cpu().double().sum(0)
    bound = torch.finfo(dtype).eps * exact.abs() + 2**-20 * dh.cpu().double().abs().sum(0)
    assert bool(((db.cpu().double() - exact).abs() <= bound).all())


def compare(
    out: dict[str, Tensor],
    x: Tensor,
    casts: tuple[Cast | None, Cast | None],
    scale: Tensor | None,
    amax: Tensor | None,
) -> None:
    for prefix, cast in zip(("row", "col"), casts, strict=True):
        if cast is None:
            continue
        is_col = prefix == "col"
        if scale is not None:
            data, inverse, _ = reference.quantize_scaled(x, scale.cpu(), cast)
            data = data.t() if is_col else data
        else:
            known = None if amax is None else amax.cpu()
            data, inverse_, _ = reference.quantize(x, cast, col=is_col, amax=known)
            assert inverse_ is not None
            inverse = inverse_
        codes, scales = out[f"{prefix}_data"], out[f"{prefix}_scale" if cast.tiled else "scale"]
        assert_codes(codes, filled(data, codes.shape))
        assert_exact(scales, filled(inverse, scales.shape))


def live() -> Given:
    one, two, three = (torch.tensor([v], device=DEVICE) for v in (3.0, 0.5, 7.0))
    return Given(one, two, three)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (17, 100)])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_delayed(name: str, shape: tuple[int, int]) -> None:
    check(name, shape, (E5M2, E5M2, E4M3), live())
    check(name, shape, (E5M2, None, None), live())
    check(name, shape, (None, E5M2, E4M3), live())


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (17, 100)])
@pytest.mark.parametrize("name", ["swiglu", "gelu"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_current(name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    check(name, shape, (E5M2, E5M2, E4M3), dtype=dtype)
    known = Given(act_amax=torch.tensor([50.0], device=DEVICE))
    check(name, shape, (E5M2, E5M2, E4M3), known, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["swiglu", "gelu", "clamped_swiglu"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_blocks(name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    check(name, shape, (BLOCKS, BLOCKS, BLOCKS), dtype=dtype)
    check(name, shape, (BLOCKS, None, None), dtype=dtype)
    check(name, shape, (None, BLOCKS, BLOCKS), dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["swiglu", "gelu"])
def test_room_is_filled_with_zeros(name: str) -> None:
    wide_e5m2, wide_e4m3, blocks = map(wide, (E5M2, E4M3, BLOCKS))
    for shape in ((1, 128), (132, 128), (17, 100), (17, 1), (1, 33), (33, 24)):
        check(name, shape, (wide_e5m2, wide_e5m2, wide_e4m3), live())
        check(name, shape, (wide_e5m2, wide_e5m2, wide_e4m3))
    for shape in ((132, 128), (196, 256)):
        check(name, shape, (blocks, blocks, blocks))
        check(name, shape, (blocks, None, None))


def test_halves_that_end_anywhere_are_made_apart() -> None:
    """What comes after the second half of a row is in no tile of it."""
    h, dy = torch.zeros(3, 114, dtype=BF16), torch.zeros(3, 57, dtype=BF16)
    p, e4m3 = activation("swiglu").gradient(), wide(E4M3)
    assert activation_grad.fuses_backward(p, (h, dy), BF16, E4M3, E4M3, None)
    assert not activation_grad.fuses_backward(p, (h, dy), BF16, e4m3, e4m3, None)
    p = activation("gelu").gradient()
    assert activation_grad.fuses_backward(p, (dy, dy), BF16, e4m3, e4m3, None)


GATED = [name for name, a in ACTIVATIONS.items() if a.gated]
POW2 = [BLOCKS, BLOCKS.replace(eps=1e-3), Cast("fp8_e5m2_1x128", pow2=True)]


@pytest.mark.gpu
@pytest.mark.parametrize("cast", POW2, ids=("plain", "eps", "e5m2"))
@pytest.mark.parametrize("name", GATED)
def test_gates(name: str, cast: Cast) -> None:
    """Whole tiles without sums: scales in words, and where y is cast, tiles copied ahead."""
    check(name, (128, 256), (cast, cast, cast), sums=False, odd=True)
    check(name, (128, 256), (cast, cast, cast.replace(eps=1e-2)), sums=False, odd=True)
    check(name, (256, 128), (cast, cast, None), sums=False, odd=True)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1024, 5120), (640, 3968)])
def test_many_gates(shape: tuple[int, int]) -> None:
    """Programs with two and three tiles, and with unequal numbers of them."""
    check("swiglu", shape, (BLOCKS, BLOCKS, BLOCKS), sums=False)
    check("geglu", shape, (BLOCKS, BLOCKS, None), sums=False)


@pytest.mark.parametrize(("f", "fused"), [(1 << 24, True), (3 << 23, False)])
def test_blocks_of_a_gradient_are_made_in_words_where_32_bits_span_its_tiles(
    f: int, fused: bool
) -> None:
    """Of gated ones it is twice as wide as dy: 124 rows in words were more than 2**31 apart."""
    h, dy = (
        torch.empty(1, dtype=BF16, device="meta").as_strided((128, n), (n, 1)) for n in (2 * f, f)
    )
    cast = Cast("fp8_e4m3_1x128")
    given = (activation("swiglu").gradient(), (h, dy), BF16, cast, cast, None)
    assert activation_grad.fuses_backward(*given) == fused


def test_interpreted() -> None:
    run_interpreted(__file__)


if __name__ == "__main__":
    assert INTERPRETED
    for name in ("swiglu", "gelu", "clamped_swiglu"):
        check(name, (132, 128), (BLOCKS, BLOCKS, BLOCKS))
        check(name, (128, 128), (BLOCKS, BLOCKS, BLOCKS))
        check(name, (64, 128), (E5M2, E5M2, E4M3), live())
        check(name, (17, 100), (E5M2, E5M2, E4M3))
    blocks, e5m2, e4m3 = map(wide, (BLOCKS, E5M2, E4M3))
    check("swiglu", (132, 128), (blocks, blocks, blocks))
    check("gelu", (36, 128), (e5m2, e5m2, e4m3), live())
    check("swiglu", (17, 24), (e5m2, e5m2, e4m3))
    check("gelu", (17, 33), (e5m2, e5m2, e4m3))
    check("swiglu", (128, 128), (BLOCKS, BLOCKS, BLOCKS), sums=False, odd=True)
    check("swiglu", (128, 128), (BLOCKS, BLOCKS, None), sums=False, odd=True)
