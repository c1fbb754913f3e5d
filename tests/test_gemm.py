"""The product of every pair of formats against the reference's, and the table that picks it."""

from __future__ import annotations

import itertools

import pytest
import torch

from minifloat import gemm, native, reference
from minifloat.formats import HADAMARD_SIGN_MASK, HIGH, Cast, Operand
from minifloat.operands import operands

MX, FP4 = Cast("mxfp8_e4m3"), Cast("nvfp4")
RHT = Cast("nvfp4", hadamard=HADAMARD_SIGN_MASK)
PAIRS = [
    (Cast("fp8_e4m3"), Cast("fp8_e4m3")),
    (Cast("fp8_e5m2"), Cast("fp8_e4m3")),
    (Cast("fp8_e5m2"), Cast("fp8_e5m2")),
    (Cast("fp8_e4m3_1x128", pow2=True), Cast("fp8_e4m3_128x128", pow2=True)),
    (Cast("fp8_e4m3_1x128"), Cast("fp8_e4m3_128x128")),
    (Cast("fp8_e4m3_128x128"), Cast("fp8_e4m3_1x128")),
    (Cast("fp8_e5m2_1x128"), Cast("fp8_e4m3_1x128")),
    (MX, Cast("mxfp8_e4m3_32x32")),
    (FP4, Cast("nvfp4_16x16")),
    (Cast("nvfp4", row_scaled=True), FP4),
    (HIGH, MX),
    (Cast("fp8_e4m3"), HIGH),
    (HIGH, HIGH),
]
SHAPES = [(5, 7, 19), (32, 48, 256), (1, 3, 1), (0, 4, 8), (4, 4, 0), (130, 257, 129)]
DTYPES = (torch.float32, torch.bfloat16)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# FP8 tensor cores of Hopper add 32 products at 13 fraction bits of the largest; CPUs add in fp32.
PARTIAL = {"cpu": 2.0**-18, "cuda": 2.0**-11}


def on_cpu(o: Operand) -> Operand:
    parts = (None if t is None else t.cpu() for t in (o.data, o.scale, o.amax))
    return Operand(*parts, *o[3:])  # type: ignore[arg-type]


def made(x: torch.Tensor, cast: Cast, col: bool) -> Operand:
    """Codes (a column copy to keep is codes), contraction last."""
    row, column = operands(
        x, None if col else cast, cast if col else None, keep_col=True, keep_row=True
    )
    found = column if col else row
    assert found is not None
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("col", [False, True], ids=["row", "col"])
@pytest.mark.parametrize(
    ("a", "b"), PAIRS, ids=lambda c: "_".join(map(str, (c.format_name, c.pow2, c.row_scaled)))
)
def test_products(a: Cast, b: Cast, col: bool, dtype: torch.dtype, device: str) -> None:
    for m, n, k in SHAPES:
        x = torch.randn((k, m) if col else (m, k), device=device)
        w = torch.randn((k, n) if col else (n, k), device=device)
        left, right = made(x, a, col), made(w, b, col)
        bias = torch.randn(n, device=device)
        y = gemm.gemm(left, right, dtype, bias=bias)
        assert y.dtype is dtype and y.shape == (m, n)
        expected = reference.matmul(on_cpu(left), on_cpu(right), torch.float32, bias=bias.cpu())
        # Terms are added with PARTIAL relative error, results are rounded to dtype up to three
        # times (product, scale, bias). 1.25: a format may enlarge a value by its rounding.
        terms = 1.25 * ((x.t() if col else x).abs() @ (w if col else w.t()).abs()).cpu()
        results = expected.abs() + 2 * bias.abs().cpu()
        bound = PARTIAL[device] * terms + 3 * torch.finfo(dtype).eps / 2 * results + 1e-30
        assert bool(((y.cpu().float() - expected).abs() <= bound).all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("a", "b"), PAIRS, ids=lambda c: "_".join(map(str, (c.format_name, c.pow2, c.row_scaled)))
)
def test_products_are_scaled_and_added_to(
    a: Cast, b: Cast, dtype: torch.dtype, device: str
) -> None:
    for (m, n, k), alpha, with_bias, with_add, in_place in itertools.product(
        ((5, 7, 19), (32, 48, 256), (4, 4, 0)), (1.0, -0.3), *[(False, True)] * 3
    ):
        if (alpha == 1.0 and not with_add) or (in_place and not with_add):
            continue
        x, w = torch.randn(m, k, device=device), torch.randn(n, k, device=device)
        left, right = made(x, a, False), made(w, b, False)
        bias = torch.randn(n, device=device) if with_bias else None
        add = torch.randn(m, n, device=device).to(dtype) if with_add else None
        before = None if add is None else add.clone()
        how = {"bias": bias, "alpha": alpha, "add": add, "in_place": in_place}
        y = gemm.gemm(left, right, dtype, **how)  # type: ignore[arg-type]
        assert y.dtype is dtype and y.shape == (m, n)
        if add is not None:
            assert (y.data_ptr() == add.data_ptr()) == (in_place and m * n > 0)
            assert in_place or torch.equal(add, before)  # type: ignore[arg-type]
        parts = [alpha * reference.matmul(on_cpu(left), on_cpu(right), torch.float32)]
        parts += [] if bias is None else [bias.cpu().expand(m, n)]
        parts += [] if before is None else [before.cpu().float()]
        terms = 1.25 * abs(alpha) * (x.abs() @ w.t().abs()).cpu()
        results = sum(t.abs() for t in parts)
        # Rounded as a product, with a bias, and with what is added.
        bound = PARTIAL[device] * terms + 3 * torch.finfo(dtype).eps / 2 * results + 1e-30
        assert bool(((y.cpu().float() - sum(parts)).abs() <= bound).all())


def test_a_product_of_one_dtype_is_rounded_once_with_what_is_added() -> None:
    x, w, add = (torch.randn(s).bfloat16() for s in ((6, 64), (8, 64), (6, 8)))
    left, right = (Operand(t, None, None, HIGH, 64) for t in (x, w))
    exact = 0.3 * (x.double() @ w.double().t()) + add.double()
    expected = exact.float().bfloat16()
    twice = (0.3 * (x.float() @ w.float().t()).bfloat16()).bfloat16() + add
    got = gemm.gemm(left, right, torch.bfloat16, alpha=0.3, add=add)
    # But for ties that the fp32 sum of the product makes or breaks.
    assert (got != expected).sum() <= 1 < (twice != expected).sum()


@pytest.mark.parametrize("cast", [Cast("fp8_e4m3"), FP4], ids=lambda c: c.format_name)
def test_a_factor_joins_the_scale_of_an_operand(cast: Cast) -> None:
    """A power of two is exact there, so that the product has the same digits."""
    left, right = (made(torch.randn(6, 64), cast, False) for _ in range(2))
    y = gemm.gemm(left, right, torch.float32)
    assert torch.equal(gemm.gemm(left, right, torch.float32, alpha=-0.25), y * -0.25)


def test_transformed_columns_multiply_in_their_domain() -> None:
    x, w = torch.randn(19, 5), torch.randn(19, 7)
    left, right = made(x, RHT, True), made(w, RHT, True)
    assert left.columns == right.columns == 32
    y = gemm.gemm(left, right, torch.float32)
    assert torch.allclose(y, reference.matmul(left, right, torch.float32), atol=1e-4)


@pytest.mark.parametrize(
    ("accumulate", "dtype"), itertools.product((False, True), (torch.float32, torch.bfloat16))
)
def test_results_go_into_a_buffer(accumulate: bool, dtype: torch.dtype) -> None:
    left, right = (made(torch.randn(6, 16), Cast("fp8_e4m3"), False) for _ in range(2))
    out = torch.full((6, 6), 2.0, dtype=dtype)
    y = gemm.gemm(left, right, dtype)
    assert gemm.gemm(left, right, dtype, out=out, accumulate=accumulate) is out
    assert torch.equal(out, y + 2.0 if accumulate else y)
    out.fill_(2.0)
    gemm.gemm(left, right, dtype, alpha=0.5, out=out, accumulate=accumulate)
    assert torch.equal(out, 0.5 * y + 2.0 if accumulate else 0.5 * y)


def test_contractions_must_agree() -> None:
    left = made(torch.randn(4, 16), Cast("fp8_e4m3"), False)
    right = made(torch.randn(4, 17), Cast("fp8_e4m3"), False)
    with pytest.raises(ValueError, match="16 columns and b has 17"):
        gemm.gemm(left, right, torch.float32)


def test_two_square_operands_have_no_product() -> None:
    square = Cast("fp8_e4m3_128x128")
    left, right = (made(torch.randn(4, 16), square, False) for _ in range(2))
    with pytest.raises(ValueError, match="one operand must have 1-D blocks"):
        gemm.gemm(left, right, torch.float32)


@pytest.mark.parametrize(
    ("capability", "a", "b", "name"),
    [
        (90, Cast("fp8_e4m3"), Cast("fp8_e4m3"), "native"),
        (90, Cast("fp8_e5m2"), Cast("fp8_e4m3"), "native"),
        (90, Cast("fp8_e5m2"), Cast("fp8_e5m2"), "emulated"),
        (80, Cast("fp8_e4m3"), Cast("fp8_e4m3"), "emulated"),
        (90, Cast("fp8_e4m3_1x128"), Cast("fp8_e4m3_128x128"), "native"),
        (90, Cast("fp8_e5m2_1x128"), Cast("fp8_e4m3_128x128"), "emulated"),
        (100, Cast("fp8_e4m3_1x128"), Cast("fp8_e4m3_128x128"), "emulated"),
        (90, MX, MX, "emulated"),
        (100, MX, MX, "native"),
        (100, FP4, Cast("nvfp4_16x16"), "native"),
        (100, Cast("nvfp4", row_scaled=True), FP4, "emulated"),
        (90, HIGH, MX, "emulated"),
        (80, HIGH, HIGH, "native"),
    ],
)
def test_the_table(
    capability: int, a: Cast, b: Cast, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native.env, "capability", lambda device: capability)
    found = native.backend(a, b, torch.device("cuda", 0))
    assert found.name == name and found.why
    high = a.format.element is None and b.format.element is None
    assert native.backend(a, b, torch.device("cpu")).name == ("native" if high else "cpu")


def test_opcheck() -> None:
    left, right = (made(torch.randn(6, 32), MX, False) for _ in range(2))
    args = (*gemm.flat(left), *gemm.flat(right), torch.bfloat16, None, False)
    add = torch.randn(6, 6).bfloat16()
    for more in ((), (0.5,), (0.5, add), (1.0, add)):
        torch.library.opcheck(
            torch.ops.minifloat.gemm.default,
            (*args, *more),
            test_utils=("test_schema", "test_faketensor"),
        )
