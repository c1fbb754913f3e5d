"""Options: the transform, stochastic rounding, 4-over-6, row scaling, known amaxes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from minifloat.formats import E2M1, E4M3, HADAMARD_SIGN_MASK, Cast, Scale, rup
from minifloat.reference import (
    amax,
    decode,
    dequantize,
    fake_quantize,
    hadamard,
    quantize,
    quantize_scaled,
    unpack,
    unscaled,
)

from . import oracle
from .cases import (
    ALL,
    BOTH,
    DEVICES,
    QUANTIZED,
    RHT,
    RHT_STOCHASTIC,
    STOCHASTIC,
    casts,
    matrices,
    matrix,
    rows,
    same,
)

NAN, INF = math.nan, math.inf
SHAPES = [(0, 0), (0, 5), (5, 0), (1, 1), (3, 17), (32, 32), (33, 45)]
LARGE = (129, 131)  # more than one tile of every format
MATRICES = st.one_of(matrices(), rows())
BOUNDED = [c for c in QUANTIZED if not c.error and not c.eps]
IDEMPOTENT = [c for c in QUANTIZED if not c.format.two_level and not c.eps]


@pytest.mark.parametrize("shape", [(1, 3), (16, 16), (17, 20), (40, 5)])
@BOTH
def test_hadamard_is_quantized_after_the_transform(shape: tuple[int, int], col: bool) -> None:
    """All outputs of a zero-padded tail chunk are kept, and the amax is that of the outputs."""
    x = matrix(shape).to(torch.bfloat16)
    t = hadamard(x.t() if col else x, HADAMARD_SIGN_MASK)
    got = quantize(x, RHT, col=col)
    assert same(got, quantize(t, Cast("nvfp4")))
    assert got[0].shape[1] * 2 == rup(shape[0] if col else shape[1], 16)
    assert torch.equal(got[2], t.abs().amax().reshape(1))


@casts([STOCHASTIC, RHT_STOCHASTIC])
@BOTH
def test_stochastic_rounding_repeats(cast: Cast, col: bool) -> None:
    x = matrix((40, 72), spread=1)
    runs = [quantize(x, cast, col=col, seed=torch.tensor([3, 4])) for _ in range(2)]
    assert same(*runs)
    for other in ([4, 4], [3, 5], [3 + 2**32, 4]):
        data, *scales = quantize(x, cast, col=col, seed=torch.tensor(other))
        assert not torch.equal(data, runs[0][0])
        assert same(scales, runs[0][1:])


def test_stochastic_rounding_has_a_stream_per_direction() -> None:
    x, seed = matrix((64, 64), spread=1), torch.tensor([3, 4])
    row = quantize(x, STOCHASTIC, seed=seed)
    col = quantize(x.t().contiguous(), STOCHASTIC, col=True, seed=seed)
    assert same(row[1:], col[1:])
    assert not torch.equal(row[0], col[0])


def test_stochastic_rounding_needs_a_seed() -> None:
    with pytest.raises(ValueError, match="seed"):
        quantize(torch.ones(2, 2), STOCHASTIC)


def test_stochastic_rounding_is_unbiased_between_neighbours() -> None:
    """The sum of all elements' mean errors is within five standard errors of 0.

    The largest element of every block is the global amax, which maps to 6: nothing saturates.
    """
    x = torch.rand(8, 64) * 2 - 1
    x[:, ::16] = 1.0
    n, plain = 400, Cast("nvfp4")
    runs = [quantize(x, STOCHASTIC, seed=torch.tensor([17, i])) for i in range(n)]
    nearest = quantize(x, plain)
    assert all(same(r[1:], nearest[1:]) for r in runs)

    codes = torch.stack([unpack(r[0], 64) for r in runs])
    magnitude = (codes & 7).int()
    low, high = magnitude.amin(0), magnitude.amax(0)
    rne = (unpack(nearest[0], 64) & 7).int()
    assert int((high - low).max()) == 1, "never further than a neighbour"
    assert bool(((low <= rne) & (rne <= high)).all())
    assert bool((codes >> 3 == (unpack(nearest[0], 64) >> 3)).all())

    values = torch.stack([dequantize(*r, plain, (8, 64), torch.float32) for r in runs]).double()
    mean, variance = values.mean(0), values.var(0)
    assert abs((mean - x).sum()) <= 5 * (variance.sum() / n).sqrt()

    # A mean of 400 samples has a 20th of one sample's deviation, itself at most half a step;
    # rounding to nearest errs by 0.29 steps (uniform within a step).
    rne_error = (dequantize(*nearest, plain, (8, 64), torch.float32) - x).norm()
    assert (mean - x).norm() < rne_error / 4


@casts([c for c in QUANTIZED if c.error])
def test_four_over_six_uses_both_maps_and_errs_less(cast: Cast) -> None:
    x = torch.randn(64, 64)
    x[:, 32:] = x[:, 32:].sign() * (0.7 + 0.3 * torch.rand(64, 32))  # between 4 and 6: map4's
    plain, shape = cast.replace(error=""), (64, 64)
    out, base = quantize(x, cast), quantize(x, plain)
    chose4 = decode(out[1], E4M3)[:64, :4] > 1.2 * decode(base[1], E4M3)[:64, :4]  # 1.5 times
    assert 0.1 < chose4.double().mean() < 0.9
    error, base_error = (
        (dequantize(*q, plain, shape, torch.float32) - x).double().abs() for q in (out, base)
    )
    power = 1 if cast.error == "MAE" else 2
    assert (error**power).sum() < (base_error**power).sum()


def test_four_over_six_prefers_six_on_a_tie() -> None:
    """Zeros err by nothing under both maps; so does a block that both represent."""
    cast = Cast("nvfp4", error="MAE")
    assert quantize(torch.zeros(1, 16), cast)[1][0, 0] == 0
    whole = torch.tensor([2688.0])  # S_enc = 1
    x = torch.tensor([[0.0] * 15 + [96.0]])  # 6 * 16 and 4 * 24
    _, scale, _ = quantize(x, cast, amax=whole)
    assert decode(scale, E4M3)[0, 0] == 16.0


def oracle_bytes(blocks: np.ndarray, whole: float, cast: Cast) -> list[int]:
    """The scale that 4-over-6 chooses for each of `blocks[n, rows, 16]`."""
    enc, dec = oracle.nvfp4_global(np.float32(whole), cast.scale_max)
    return [oracle.four_over_six(b, enc, dec, np.float32(whole), cast) for b in blocks]


@pytest.mark.parametrize("fmt, error", [("nvfp4", "MAE"), ("nvfp4", "MSE"), ("nvfp4_16x16", "MAE")])
@DEVICES
def test_four_over_six_adds_errors_in_the_stated_order(fmt: str, error: str, device: str) -> None:
    """Blocks that tie in exact arithmetic: the roundings of fp32, in their order, decide.

    With amax 96 the steps are 16 (map6) and 24 (map4), and integers err by integers; 10/2688 of
    that, under a global amax of 10, has the same codes and rounded errors.
    """
    cast, g = Cast(fmt, error=error), np.random.default_rng(9)
    rows, power = cast.format.tile[0], 1 if error == "MAE" else 2
    x = g.integers(-96, 97, (3000, rows, 16))
    x[:, 0, 0] = 96
    errors = [
        (np.abs(np.abs(x)[..., None] - step * oracle.magnitudes(E2M1)).min(-1) ** power).sum((1, 2))
        for step in (16, 24)
    ]
    blocks = x[errors[0] == errors[1]].astype(np.float32) * np.float32(10 / 2688)
    want = oracle_bytes(blocks, 10.0, cast)
    assert len(set(want)) == 2 and len(want) > 20, "both maps win somewhere"
    source = torch.from_numpy(blocks.reshape(-1, 16)).to(device)
    _, scale, _ = quantize(source, cast, amax=torch.tensor([10.0], device=device))
    assert scale[: len(source) : rows, 0].tolist() == want


@DEVICES
def test_four_over_six_divides_before_it_multiplies(device: str) -> None:
    """`(amax/6) * S_enc` at E4M3's ties, where another order rounds to another byte."""
    cast, ties = Cast("nvfp4", error="MAE"), oracle.middles_of(E4M3)[8:]
    for whole in (10.0, 0.7, 33.3):
        enc, _ = oracle.nvfp4_global(np.float32(whole), 448)
        blocks = np.zeros((5 * len(ties), 1, 16), np.float32)
        blocks[:, 0, 0] = oracle.around((ties * 6 / float(enc)).astype(np.float32))
        x = torch.from_numpy(blocks[:, 0]).to(device)
        _, scale, _ = quantize(x, cast, amax=torch.tensor([whole], device=device))
        assert scale[: len(blocks), 0].tolist() == oracle_bytes(blocks, whole, cast)


def test_row_scaled_rows_are_tensors_of_their_own() -> None:
    cast, x = Cast("nvfp4", row_scaled=True), matrix((5, 40))
    data, scale, top = quantize(x, cast)
    for i in range(5):
        alone = quantize(x[i : i + 1], Cast("nvfp4"))
        assert torch.equal(data[i], alone[0][0])
        assert torch.equal(scale[i], alone[1][0])
        assert top[i] == alone[2][0]


@casts([c for c in ALL if c.format.element])
@BOTH
def test_amax_that_is_known_is_used(cast: Cast, col: bool) -> None:
    x, seed = matrix((20, 37)), torch.tensor([1, 2])
    known = amax(x, cast, col=col)
    t = (x.t() if col else x).contiguous()
    t = hadamard(t, cast.hadamard) if cast.transforms else t
    assert torch.equal(known, t.abs().amax(1) if cast.row_scaled else t.abs().amax().reshape(1))
    assert same(
        quantize(x, cast, col=col, amax=known, seed=seed)[:2],
        quantize(x, cast, col=col, seed=seed)[:2],
    )
    data, scale, _ = quantize(x, cast, col=col, amax=8 * known, seed=seed)
    if cast.format.tile is None:  # 1/8 of the encode scale
        assert torch.equal(scale, 8 * quantize(x, cast, col=col)[1])
    elif not cast.format.two_level:
        assert torch.equal(data, quantize(x, cast, col=col)[0])
    elif not cast.error:  # the block scales take the factor up
        assert not torch.equal(scale, quantize(x, cast, col=col, seed=seed)[1])


@pytest.mark.parametrize("fmt", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantize_scaled(fmt: str, dtype: torch.dtype) -> None:
    cast, x = Cast(fmt), matrix((7, 9)).to(dtype)
    element = cast.format.element
    for scale in (0.7, 1.0, 1e6):
        codes, inverse, top = quantize_scaled(x, torch.tensor([scale]), cast)
        want = oracle.encode(x.float().numpy() * np.float32(scale), element)
        np.testing.assert_array_equal(codes.numpy(), want)
        assert inverse.item() == np.float32(1) / np.float32(scale)
        assert torch.equal(top, x.float().abs().amax().reshape(1))
    assert quantize_scaled(x[:0], torch.ones(1), cast)[2].tolist() == [0.0]


@casts([c for c in ALL if c.format.element])
@BOTH
def test_fake_quantize(cast: Cast, col: bool) -> None:
    """Codes times block scales; exact in bf16 unless the scales are fp32 numbers."""
    x, seed = matrix((20, 37)), torch.tensor([1, 2])
    fake = fake_quantize(x, cast, col=col, seed=seed)
    kept = (rup(20, 16), 37) if col and cast.transforms else (20, 37)
    kept = (20, rup(37, 16)) if cast.transforms and not col else kept
    assert (fake.dtype, tuple(fake.shape)) == (torch.bfloat16, kept)
    assert fake.is_contiguous()
    data, scale, _ = quantize(x, cast, col=col, seed=seed)
    exact = unscaled(data, scale, cast, kept[0] if col else kept[1], col=col)
    exact = exact.t() if col else exact
    assert torch.equal(fake, exact.to(torch.bfloat16))
    if cast.format.scale is not Scale.F32:
        assert torch.equal(fake.float(), exact)


@BOTH
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_high_precision_is_a_copy(col: bool, dtype: torch.dtype | None) -> None:
    x = matrix((5, 7)).to(torch.float16)
    data, scale, top = quantize(x, Cast("high_precision", dtype=dtype), col=col)
    assert scale is None and top is None
    assert torch.equal(data, (x.t() if col else x).to(dtype or x.dtype))
    assert data.data_ptr() != x.data_ptr()


@casts(QUANTIZED)
def test_input_is_not_changed(cast: Cast) -> None:
    x = matrix((20, 37))
    before = x.clone()
    quantize(x, cast)
    quantize(x, cast, col=True)
    assert torch.equal(x, before)


@casts(QUANTIZED)
def test_strided_input(cast: Cast) -> None:
    x = matrix((40, 74))[::2, ::2]
    assert same(quantize(x, cast), quantize(x.contiguous(), cast))
