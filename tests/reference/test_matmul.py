"""The products of every pair of formats; when scales, bias and sums are applied."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from minifloat.formats import E4M3, FORMATS, Cast, Operand, Scale
from minifloat.reference import dequantize, encode, hadamard, matmul, quantize

from . import oracle
from .cases import RHT, RHT_STOCHASTIC, matrix

BLOCKS = [n for n, f in FORMATS.items() if f.scale is Scale.F32 and f.tile is not None]
SQUARE_BLOCKS = [n for n in BLOCKS if FORMATS[n].square]
PAIRS = [
    (a, b)
    for a, b in itertools.product(FORMATS, FORMATS)
    if not (a in SQUARE_BLOCKS and b in SQUARE_BLOCKS)
]
SEED = torch.tensor([1, 2])


def operand(x: torch.Tensor, cast: Cast, col: bool = False) -> Operand:
    data, scale, amax = quantize(x, cast, col=col, seed=SEED)
    if col and not cast.format.col_transposed:
        data, scale = data.t(), scale.t()
    columns = x.shape[0] if col else x.shape[1]
    return Operand(data, scale, amax, cast, cast.format.columns(columns, cast.transforms))


def values(x: torch.Tensor, cast: Cast, col: bool = False) -> torch.Tensor:
    """The fp32 values of `operand(x, cast, col)`, contraction last."""
    if cast.transforms:  # quantize what the transform gives, without a transform
        x, col, cast = hadamard(x.t() if col else x, cast.hadamard), False, Cast(cast.format_name)
    q = quantize(x, cast, col=col)
    out = dequantize(*q, cast, tuple(x.shape), torch.float32, col=col)
    return out.t() if col else out


def assert_as_good_as_fp32(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Against fp64, at most twice the error of torch's own fp32 product of the same values."""
    exact = a.double() @ b.double().t()
    assert (y - exact).norm() <= 2 * ((a @ b.t()) - exact).norm()


@pytest.mark.parametrize("fa", FORMATS)
def test_every_pair(fa: str) -> None:
    x, w = torch.randn(17, 300), torch.randn(19, 300)
    a, a_values = operand(x, Cast(fa)), values(x, Cast(fa))
    for fb in (b for a, b in PAIRS if a == fa):
        y = matmul(a, operand(w, Cast(fb)), torch.float32)
        assert y.dtype is torch.float32, fb
        assert_as_good_as_fp32(y, a_values, values(w, Cast(fb)))


@pytest.mark.parametrize(
    "a, b",
    [
        (Cast("nvfp4", row_scaled=True), Cast("nvfp4", row_scaled=True)),
        (Cast("nvfp4", row_scaled=True), Cast("nvfp4_16x16")),
        (Cast("mxfp8_e4m3"), Cast("nvfp4", row_scaled=True)),
        (Cast("nvfp4", error="MAE", scale_max=256), Cast("nvfp4_16x16", error="MSE")),
        (Cast("fp8_e4m3_1x128", pow2=True), Cast("fp8_e4m3_128x128", pow2=True)),
        (Cast("high_precision", dtype=torch.bfloat16), Cast("fp8_e4m3")),
    ],
)
def test_options(a: Cast, b: Cast) -> None:
    x, w = matrix((17, 300), spread=2), matrix((19, 300), seed=1, spread=2)
    y = matmul(operand(x, a), operand(w, b), torch.float32)
    assert_as_good_as_fp32(y, values(x, a), values(w, b))


@pytest.mark.parametrize("fmt", [f for f in FORMATS if (f, f) in PAIRS])
def test_column_copies_contract_over_rows(fmt: str) -> None:
    """wgrad: dy^T x."""
    cast, dy, x = Cast(fmt), torch.randn(300, 17), torch.randn(300, 19)
    y = matmul(operand(dy, cast, col=True), operand(x, cast, col=True), torch.float32)
    assert y.shape == (17, 19)
    assert_as_good_as_fp32(y, values(dy, cast, col=True), values(x, cast, col=True))


@pytest.mark.parametrize("rows", [300, 304])
def test_transformed_copies(rows: int) -> None:
    """The tail chunk's 16 outputs take part; the product approximates dy^T x, untransformed."""
    dy, x = torch.randn(rows, 17), torch.randn(rows, 19)
    a, b = operand(dy, RHT, col=True), operand(x, RHT, col=True)
    assert a.columns == b.columns == 304
    y = matmul(a, b, torch.float32)
    assert_as_good_as_fp32(y, values(dy, RHT, col=True), values(x, RHT, col=True))
    # Two independent relative errors of at most half_ulp = 1/4 each: sqrt(2)/4 = 0.35.
    assert (y - dy.t() @ x).norm() < 0.5 * (dy.t() @ x).norm()
    noisy = operand(dy, RHT_STOCHASTIC, col=True)
    assert not torch.equal(matmul(noisy, b, torch.float32), y)


def test_integers_are_exact() -> None:
    """Integers below 16 fit E4M3, powers of two scale them, fp32 adds them: nothing is rounded."""
    a = torch.randint(-15, 16, (5, 300)).float()
    b = torch.randint(-15, 16, (7, 300)).float()
    a[0, ::128] = b[0, ::128] = 15.0
    exact = [Cast("mxfp8_e4m3"), Cast("fp8_e4m3", pow2=True), Cast("fp8_e4m3_1x128", pow2=True)]
    for ca, cb in itertools.product([*exact, Cast("high_precision")], repeat=2):
        assert torch.equal(matmul(operand(a, ca), operand(b, cb), torch.float32), a @ b.t())


def block_operand(codes: torch.Tensor, scales: torch.Tensor, fmt: str) -> Operand:
    """A 128-block operand from small integers and a plain matrix of its tiles' scales."""
    cast = Cast(fmt)
    stored = torch.full(cast.format.scale_shape(*codes.shape), float("nan"))
    t = scales.t() if cast.format.scale_transposed else scales
    stored[: t.shape[0], : t.shape[1]] = t
    return Operand(encode(codes, E4M3), stored, None, cast, codes.shape[1])


@pytest.mark.parametrize(
    "fa, fb",
    [
        ("fp8_e4m3_1x128", "fp8_e4m3_1x128"),
        ("fp8_e4m3_1x128", "fp8_e4m3_128x128"),
        ("fp8_e4m3_128x128", "fp8_e4m3_1x128"),
    ],
)
def test_block_partials_bit_for_bit(fa: str, fb: str) -> None:
    """`y = fma(partial * scale_1d, scale_other, y)` per block; two 1-D operands: a's scale first.

    Partials of small integers are exact in any order of summation; the scales are arbitrary.
    """
    m, n, k = (130, 3, 300) if FORMATS[fa].square else (3, 130, 300)
    a, b = (torch.randint(-4, 5, (r, k)).float() for r in (m, n))
    sa, sb = (torch.rand(-(-r // FORMATS[f].tile[0]), 3) + 0.1 for r, f in ((m, fa), (n, fb)))
    y = matmul(block_operand(a, sa, fa), block_operand(b, sb, fb), torch.float32)
    for i, j in itertools.product(range(0, m, 7), range(0, n, 2)):
        want = np.float32(0)
        for t in range(3):
            part = slice(t * 128, (t + 1) * 128)
            partial = np.float32((a[i, part] @ b[j, part]).item())
            va = np.float32(sa[i // FORMATS[fa].tile[0], t].item())
            vb = np.float32(sb[j // FORMATS[fb].tile[0], t].item())
            first, second = (vb, va) if FORMATS[fa].square else (va, vb)
            want = oracle.fma(partial * first, second, want)
        assert y[i, j].item() == want


@pytest.mark.parametrize("fa, fb", [p for p in itertools.product(BLOCKS, BLOCKS) if p in PAIRS])
def test_blocks_against_a_loop_in_fp64(fa: str, fb: str) -> None:
    """Per block: <= 127 additions of exact products, two scalings and an add; three blocks.

    |error| <= (127 + 3 * 3) * 2**-24 * sum |a||b|, whatever the order of the additions.
    """
    a, b = torch.randn(5, 300), torch.randn(6, 300)
    va, vb = values(a, Cast(fa)).double(), values(b, Cast(fb)).double()
    want = torch.zeros(5, 6).double()
    for t in range(0, 300, 128):
        want += va[:, t : t + 128] @ vb[:, t : t + 128].t()
    y = matmul(operand(a, Cast(fa)), operand(b, Cast(fb)), torch.float32)
    # Dequantized values carry a rounding of 2**-24 each, which the codes do not.
    bound = (127 + 9 + 2) * 2.0**-24 * (va.abs() @ vb.abs().t())
    assert bool(((y - want).abs() <= bound).all())


def test_multiply_add_rounds_once() -> None:
    """fma(1 + 2**-12, 1 + 2**-12, 2**-60): the sum is just above a tie, which fp64 cannot see."""
    one = torch.zeros(1, 256)
    one[0, ::128] = 1.0
    scales = torch.tensor([[2.0**-30, 1 + 2.0**-12]])
    a = block_operand(one, scales, "fp8_e4m3_1x128")
    want = oracle.fma(scales[0, 1].item(), scales[0, 1].item(), 2.0**-60)
    assert want == np.float32(1 + 2.0**-11 + 2.0**-23)
    assert matmul(a, a, torch.float32).item() == want


@pytest.mark.parametrize("fa, fb", list(itertools.product(SQUARE_BLOCKS, repeat=2)))
def test_two_square_block_operands_are_refused(fa: str, fb: str) -> None:
    x = torch.ones(2, 128)
    with pytest.raises(ValueError, match=f"{fa} by {fb}"):
        matmul(operand(x, Cast(fa)), operand(x, Cast(fb)), torch.float32)


@pytest.mark.parametrize("fa, fb", [("high_precision", "high_precision"), ("nvfp4", "mxfp8_e4m3")])
def test_contraction_mismatch(fa: str, fb: str) -> None:
    with pytest.raises(ValueError, match="a has 64 columns and b has 63"):
        matmul(
            operand(torch.ones(2, 64), Cast(fa)),
            operand(torch.ones(2, 63), Cast(fb)),
            torch.float32,
        )


PRODUCTS = [("fp8_e4m3", "fp8_e5m2"), ("fp8_e4m3_1x128", "fp8_e4m3_128x128"), ("nvfp4", "nvfp4")]


@pytest.mark.parametrize("fa, fb", PRODUCTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_output_is_rounded_once(fa: str, fb: str, dtype: torch.dtype) -> None:
    a, b = operand(torch.randn(5, 64), Cast(fa)), operand(torch.randn(6, 64), Cast(fb))
    assert torch.equal(matmul(a, b, dtype), matmul(a, b, torch.float32).to(dtype))


@pytest.mark.parametrize("fa, fb", PRODUCTS)
def test_bias_is_added_in_fp32_and_sums_after_the_cast(fa: str, fb: str) -> None:
    a, b = operand(torch.randn(50, 64), Cast(fa)), operand(torch.randn(60, 64), Cast(fb))
    bias, total = torch.randn(60).bfloat16(), torch.randn(50, 60)
    y = matmul(a, b, torch.float32)
    biased = (y + bias.float()).bfloat16()
    assert torch.equal(matmul(a, b, torch.bfloat16, bias=bias), biased)
    assert not torch.equal(y.bfloat16() + bias, biased), "the order must show"
    before = total.clone()
    assert torch.equal(matmul(a, b, torch.bfloat16, accumulate=total), total + y.bfloat16().float())
    got = matmul(a, b, torch.bfloat16, bias=bias, accumulate=total)
    assert torch.equal(got, total + biased.float())
    assert torch.equal(total, before)


def test_row_scales_multiply_rows_and_columns() -> None:
    """Rows of very different size: a shared amax would lose the small ones."""
    cast = Cast("nvfp4", row_scaled=True)
    sizes = torch.tensor([[2.0**-20], [1.0], [2.0**20]])
    a, b = torch.randn(3, 64), torch.randn(3, 64)
    y = matmul(operand(a * sizes, cast), operand(b * sizes, cast), torch.float32)
    assert_as_good_as_fp32(
        y / (sizes * sizes.t()),
        values(a * sizes, cast) / sizes,
        values(b * sizes, cast) / sizes,
    )


@pytest.mark.parametrize("fmt", FORMATS)
def test_empty_and_single(fmt: str) -> None:
    """1 is its block's amax: only fp32 roundings (a dozen of 2**-24 at most) part y from k."""
    other = fmt.replace("128x128", "1x128")
    for m, n, k in ((0, 3, 5), (3, 0, 5), (0, 0, 0), (3, 4, 0), (1, 1, 1)):
        a, b = operand(torch.ones(m, k), Cast(fmt)), operand(torch.ones(n, k), Cast(other))
        y = matmul(a, b, torch.float32)
        assert y.shape == (m, n)
        assert bool(((y - k).abs() <= 12 * 2.0**-24).all())


@pytest.mark.parametrize("fmt", [f for f in FORMATS if FORMATS[f].tile is not None])
def test_scale_padding_is_not_read(fmt: str) -> None:
    cast, other = Cast(fmt), Cast("high_precision" if fmt not in BLOCKS else "fp8_e4m3_1x128")
    x, w = torch.randn(3, 50), operand(torch.randn(4, 50), other)
    a = operand(x, cast)
    garbage = torch.where(a.scale == 0, float("nan") if fmt in BLOCKS else 0xFF, a.scale)
    garbage = garbage.to(a.scale.dtype)
    assert not torch.equal(garbage, a.scale)
    y = matmul(a._replace(scale=garbage), w, torch.float32)
    assert torch.equal(y, matmul(a, w, torch.float32))
