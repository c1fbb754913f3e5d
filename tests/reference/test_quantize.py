"""Quantization against the scalar oracle, and the properties that define a format."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

from minifloat.formats import E4M3, FP32_MAX, Cast, Scale, cdiv, rup
from minifloat.reference import (
    amax,
    decode,
    dequantize,
    encode,
    quantize,
    unpack,
    unscaled,
)

from . import oracle
from .cases import (
    ALL,
    BOTH,
    NEAREST,
    QUANTIZED,
    RHT,
    RHT_STOCHASTIC,
    SQUARE,
    TILED,
    casts,
    codes_of,
    matrices,
    matrix,
    name,
    rows,
    same,
    stored_scale,
)

NAN, INF = math.nan, math.inf
SHAPES = [(0, 0), (0, 5), (5, 0), (1, 1), (3, 17), (32, 32), (33, 45)]
LARGE = (129, 131)  # more than one tile of every format
MATRICES = st.one_of(matrices(), rows())
BOUNDED = [c for c in QUANTIZED if not c.error and not c.eps]
IDEMPOTENT = [c for c in QUANTIZED if not c.format.two_level and not c.eps]


# --- the numbers -----------------------------------------------------------------------------


@casts(QUANTIZED)
@BOTH
def test_equals_the_oracle(cast: Cast, col: bool) -> None:
    """Codes, stored scales (their zero padding too) and amaxes: bit for bit, in every shape."""
    fmt = cast.format
    large = (35, 50) if fmt.two_level else LARGE  # more than one tile; the oracle is slow
    for shape in (*SHAPES, large):
        x = matrix(shape, seed=sum(shape))
        t = x.t() if col else x
        codes, scales, top = oracle.quantize(t.numpy(), cast)
        data, scale, got_amax = quantize(x, cast, col=col)
        want = torch.from_numpy(stored_scale(scales, cast, tuple(t.shape)))
        want = want.t() if col and not fmt.col_transposed else want
        got_codes = codes_of(data, cast, t.shape[1], col)
        assert torch.equal(got_codes, torch.from_numpy(codes)), shape
        assert scale.dtype is fmt.scale.dtype, shape
        assert torch.equal(scale, want), shape
        if fmt.two_level:
            assert torch.equal(got_amax, torch.from_numpy(top)), shape
        else:
            assert got_amax is None, shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@casts(ALL)
def test_half_precision_input_is_read_as_fp32(cast: Cast, dtype: torch.dtype) -> None:
    x, seed = matrix((19, 37)).to(dtype), torch.tensor([1, 2])
    got = quantize(x, cast.replace(dtype=None), seed=seed)
    want = quantize(x.float(), cast, seed=seed)
    if cast.format.element is None:
        assert got[0].dtype is dtype
        want = (want[0].to(dtype), None, None)
    assert same(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_value_for_an_infinite_scale(dtype: torch.dtype) -> None:
    """448 / 1e-40 overflows: fp32's largest for a whole tensor, the input's largest for a block."""
    x = torch.full((1, 4), 1e-40).to(dtype)
    largest = torch.finfo(dtype).max
    assert quantize(x, Cast("fp8_e4m3"))[1].item() == np.float32(1) / np.float32(FP32_MAX)
    for blocks in ("fp8_e4m3_1x128", "fp8_e4m3_128x128"):
        assert quantize(x, Cast(blocks))[1][0, 0].item() == np.float32(1) / np.float32(largest)
        assert quantize(x, Cast(blocks, pow2=True))[1][0, 0].item() == 2.0**-127


def error_bound(x: torch.Tensor, cast: Cast) -> np.ndarray:
    """Largest |dequantize(quantize(x)) - x| of each element.

    With a block's decode step d (scale of code 1.0), rounding to the element costs
    max(half_ulp * |x|, tiny/2 * d), and the steps are
      fp32 scales  d <= amax/max, twice that after rounding the encode scale down to a power of
                   two; at least 1/FP32_MAX (the encode scale is finite);
      E8M0         d < 2 * amax/max (exponent rounded up), at least 2**-127;
      E4M3         d <= amax/6 * (1 + 2**-4) + 2**-10 * A/(6*B), the block scale being rounded to
                   E4M3: to half an ulp, or to tiny/2 = 2**-10 units of A/(6*B), where A is the
                   global amax and B scale_max. A block scale rounded down saturates the block's
                   largest elements: by less than half_ulp * |x| where it is normal, by
                   2**-10 * A/B where it is subnormal.
    fp32 arithmetic adds a few roundings of 2**-24 (2**-22 where 1/scale is subnormal), and the
    result itself half of 2**-149: 2**-20 relative and 2**-149 absolute cover them.
    """
    fmt, v = cast.format, x.double().numpy()
    element, a = fmt.element, np.abs(v)
    block = oracle.amax_per_element(v, fmt.tile)
    saturation = np.zeros(())
    if fmt.scale is Scale.F32:
        step = np.maximum(block / element.max * (2 if cast.pow2 else 1), 1 / FP32_MAX)
    elif fmt.scale is Scale.E8M0:
        step = np.maximum(2 * block / element.max, 2.0**-127)
    else:
        top = a.max(axis=1, keepdims=True) if cast.row_scaled else a.max()
        saturation = E4M3.tiny / 2 * top / cast.scale_max
        step = block / element.max * (1 + E4M3.half_ulp) + saturation / element.max
    rounding = np.maximum(element.half_ulp * a, element.tiny / 2 * step)
    return np.maximum(rounding, saturation) * (1 + 2.0**-20) + 2.0**-20 * a + 2.0**-149


@casts(BOUNDED)
@given(MATRICES)
def test_error_is_bounded(cast: Cast, x: torch.Tensor) -> None:
    if cast.format.two_level:  # below, 1/amax and amax * scale leave fp32's normal range
        tops = x.abs().amax(dim=1) if cast.row_scaled else x.abs().amax()
        assume(bool(((tops == 0) | (tops > 1e-30)).all()))
    out = dequantize(*quantize(x, cast), cast, tuple(x.shape), torch.float32)
    assert (np.abs(out.double().numpy() - x.double().numpy()) <= error_bound(x, cast)).all()


@casts(IDEMPOTENT)
@given(MATRICES)
def test_values_are_idempotent(cast: Cast, x: torch.Tensor) -> None:
    """Quantizing what was dequantized gives the same values.

    Exactly where scales are powers of two. With a general scale s the codes are the same; 1/s is
    recomputed through amax' = max*(1/s), s' = max/amax' and 1/s', three roundings, and each value
    has one of its own: five of 2**-24 (three where the values are subnormal: 2**-149 covers those).
    """
    shape = tuple(x.shape)
    q = quantize(x, cast)
    once = dequantize(*q, cast, shape, torch.float32)
    again = quantize(once, cast)
    twice = dequantize(*again, cast, shape, torch.float32)
    if cast.pow2 or cast.format.scale is Scale.E8M0:
        assert torch.equal(once, twice)
    else:
        assert torch.equal(q[0], again[0])
        assert ((twice - once).abs() <= 5 * 2.0**-24 * once.abs() + 2.0**-149).all()


@casts([c for c in QUANTIZED if c.error != "MSE"])  # slow, and MAE takes the same way
@given(MATRICES)
def test_sign_symmetry(cast: Cast, x: torch.Tensor) -> None:
    """Codes of -x differ in the sign bit, and in nothing else."""
    (data, *scales), (minus, *minus_scales) = quantize(x, cast), quantize(-x, cast)
    codes, minus_codes = (codes_of(d, cast, x.shape[1]) for d in (data, minus))
    sign = 1 << (cast.format.element.bits - 1)
    assert torch.equal(codes ^ minus_codes, torch.full_like(codes, sign))
    assert same(scales, minus_scales)


def test_sign_symmetry_of_a_transformed_matrix() -> None:
    """Values, not codes: a difference of equal numbers is +0 for x and for -x."""
    x = matrix((33, 20))
    (data, *scales), (minus, *minus_scales) = (quantize(v, RHT, col=True) for v in (x, -x))
    a, b = (decode(unpack(d, 48), RHT.format.element) for d in (data, minus))
    assert torch.equal(a, -b)
    assert same(scales, minus_scales)


@casts([c for c in TILED if not c.error])  # 4-over-6 chooses: its scales need not be ordered
@given(st.floats(2.0**-60, 2.0**60, width=32), st.floats(2.0**-60, 2.0**60, width=32))
def test_scale_is_monotonic_in_amax(cast: Cast, a: float, b: float) -> None:
    """Decode scales do not fall when a block's amax grows (global amax given)."""
    whole = torch.tensor([2.0**60])
    low, high = (
        quantize(torch.tensor([[v, -v / 2]]), cast, amax=whole)[1].flatten()[0]
        for v in sorted((a, b))
    )
    assert low <= high


SPECIAL = [
    # format, block, stored scale of its tile, bytes
    ("fp8_e4m3", [NAN, 1, -2, 0], 1.0, "7f 38 c0 00"),
    ("fp8_e4m3", [INF, 1, -2, 0], 1.0, "7e 38 c0 00"),
    ("fp8_e4m3", [-INF, NAN, -2, 0], 1.0, "fe 7f c0 00"),
    ("fp8_e4m3", [0, -0.0, 0, 0], 1.0, "00 80 00 00"),
    ("fp8_e4m3", [1e30, 5e29, -1e30, 0], None, "7e 76 fe 00"),
    ("fp8_e4m3", [1e-30, 5e-31, -1e-30, 0], None, "7e 76 fe 00"),
    ("fp8_e5m2", [NAN, 1, -2, 0], 1.0, "7f 3c c0 00"),
    ("fp8_e5m2", [INF, 1, -2, 0], 1.0, "7b 3c c0 00"),
    ("fp8_e5m2", [1e30, 5e29, -1e30, 0], None, "7b 77 fb 00"),
    ("fp8_e4m3_1x128", [NAN, 1, -2, 0], 1.0, "7f 38 c0 00"),
    ("fp8_e4m3_1x128", [INF, 1, -2, 0], 1.0, "7e 38 c0 00"),
    ("fp8_e4m3_1x128", [0, -0.0, 0, 0], 1.0, "00 80 00 00"),
    ("fp8_e4m3_128x128", [NAN, 1, -2, 0], 1.0, "7f 38 c0 00"),
    ("fp8_e4m3_128x128", [1e-30, 5e-31, -1e-30, 0], None, "7e 76 fe 00"),
    ("mxfp8_e4m3", [NAN, 1, -2, 0], 255, "7f 7f 7f 7f"),
    ("mxfp8_e4m3", [INF, 1, -2, 0], 254, "7e 00 80 00"),
    ("mxfp8_e4m3", [0, -0.0, 0, 0], 0, "00 80 00 00"),
    ("mxfp8_e4m3", [1e30, 5e29, -1e30, 0], 218, "7d 75 fd 00"),  # 404 of step 32 -> 416
    ("mxfp8_e4m3", [1e-30, 5e-31, -1e-30, 0], 19, "7a 72 fa 00"),  # 324.5 -> 320
    ("mxfp8_e4m3_32x32", [NAN, 1, -2, 0], 255, "7f 7f 7f 7f"),
    ("mxfp8_e5m2", [NAN, 1, -2, 0], 255, "7f 7f 7f 7f"),
    ("mxfp8_e5m2", [INF, 1, -2, 0], 254, "7b 00 80 00"),
    ("nvfp4", [NAN, 1, -2, 0], 0x7F, "77 77"),  # E2M1 has no NaN: the scale says it
    ("nvfp4", [INF, 1, -2, 0], 0x7E, "07 08"),  # global scale 1, block scale 448
    ("nvfp4", [0, -0.0, 0, 0], 0, "80 00"),
    ("nvfp4", [1e30, 5e29, -1e30, 0], 0x7E, "57 0f"),
    ("nvfp4", [1e-30, 5e-31, -1e-30, 0], 0x7E, "57 0f"),
    ("nvfp4_16x16", [INF, 1, -2, 0], 0x7E, "07 08"),
]


@pytest.mark.parametrize("fmt, block, scale, data", SPECIAL)
def test_special_blocks(fmt: str, block: list[float], scale: float | None, data: str) -> None:
    got, stored, _ = quantize(torch.tensor([block]), Cast(fmt))
    assert bytes(got.flatten().tolist()).hex(" ") == data
    assert scale is None or stored.flatten()[0] == scale


@casts([c for c in TILED if not c.format.two_level])
def test_a_special_block_leaves_the_others_alone(cast: Cast) -> None:
    r, c = cast.format.tile
    x = matrix((2 * r, 2 * c))
    codes = quantize(x, cast)[0]
    for special in (NAN, INF, 0.0, 1e-30, 1e30):
        spoiled = x.clone()
        spoiled[0, :c] = special
        spoiled_codes = quantize(spoiled, cast)[0]
        for place, part in oracle.tiles(x.shape, cast.format.tile):
            assert torch.equal(codes[part], spoiled_codes[part]) == (place != (0, 0)), special


# --- shapes and layouts ----------------------------------------------------------------------


@casts(TILED)
@BOTH
def test_partial_tiles_are_quantized_alone(cast: Cast, col: bool) -> None:
    """Every tile, the edge ones too, is what its own elements give: no neighbour, no padding."""
    r, c = cast.format.tile
    x = matrix((r + 3, c + 5), seed=9) + 0.01
    t = x.t() if col else x
    whole = amax(x, cast, col=col) if cast.format.two_level else None
    out = quantize(x, cast, col=col, amax=whole)
    codes = codes_of(out[0], cast, t.shape[1], col)
    values = unscaled(out[0], out[1], cast, t.shape[1], col=col)
    for _, part in oracle.tiles(tuple(t.shape), cast.format.tile):
        own = whole[part[0]] if cast.row_scaled else whole
        tile = t[part].contiguous()
        data, scale, _ = quantize(tile, cast, amax=own)
        assert torch.equal(codes[part], codes_of(data, cast, tile.shape[1]))
        assert torch.equal(values[part], unscaled(data, scale, cast, tile.shape[1]))


@casts(ALL)
@BOTH
def test_stored_layout_is_contiguous(cast: Cast, col: bool) -> None:
    for part in quantize(matrix((20, 33)), cast, col=col, seed=torch.tensor([1, 2])):
        assert part is None or part.is_contiguous()


@casts(ALL)
@BOTH
def test_stored_shapes(cast: Cast, col: bool) -> None:
    fmt = cast.format
    transposed = col and not fmt.col_transposed
    for shape in ((0, 0), (0, 7), (7, 0), (1, 1), (17, 35)):
        r, c = shape[::-1] if col else shape
        kept = rup(c, 16) if cast.transforms else c
        data, scale, top = quantize(matrix(shape), cast, col=col, seed=torch.tensor([1, 2]))
        want = (r, cdiv(kept, fmt.element.per_byte if fmt.element else 1))
        assert data.shape == (want[::-1] if transposed else want)
        if fmt.tile is not None:
            want = fmt.scale_shape(r, kept)
            assert scale.shape == (want[::-1] if transposed else want)
        if fmt.two_level:
            assert top.shape == ((r,) if cast.row_scaled else (1,))
            assert top.dtype is torch.float32


@pytest.mark.parametrize("fmt", ["nvfp4", "nvfp4_16x16"])
@pytest.mark.parametrize("columns", [1, 5, 17, 33])
def test_odd_row_leaves_a_zero_high_nibble(fmt: str, columns: int) -> None:
    x = torch.full((3, columns), -6.0)
    data = quantize(x, Cast(fmt))[0]
    assert data[:, :-1].eq(0xFF).all()
    assert data[:, -1].eq(0x0F).all()


@casts(TILED)
@BOTH
def test_stored_scale_padding_is_zero(cast: Cast, col: bool) -> None:
    """As many non-zero scales as tiles (times the rows that repeat one), none beyond."""
    x = torch.full((130, 37), 3.0)
    r, c = (37, 130) if col else (130, 37)
    scale = quantize(x, cast, col=col)[1]
    tile = cast.format.scale_tile
    assert int((scale != 0).sum()) == cdiv(r, tile[0]) * cdiv(c, tile[1])


@casts(NEAREST)
def test_column_copy_is_the_row_copy_of_the_transpose(cast: Cast) -> None:
    for shape in (*SHAPES, LARGE):
        x = matrix(shape, seed=5)
        data, scale, top = quantize(x.t().contiguous(), cast)
        if not cast.format.col_transposed:
            data, scale = data.t(), scale.t()
        assert same(quantize(x, cast, col=True), (data, scale, top)), shape


@casts(SQUARE)
def test_square_tiles_give_both_copies_the_same_codes(cast: Cast) -> None:
    for shape in ((1, 1), (33, 45), LARGE):
        x = matrix(shape, seed=6)
        row, col = quantize(x, cast), quantize(x, cast, col=True)
        codes = codes_of(row[0], cast, shape[1])
        assert torch.equal(codes, codes_of(col[0], cast, shape[0], col=True).t()), shape
        a = dequantize(*row, cast, shape, torch.float32)
        assert torch.equal(a, dequantize(*col, cast, shape, torch.float32, col=True)), shape


# --- tracing and devices ---------------------------------------------------------------------

TRACED = [
    (Cast("high_precision", dtype=torch.bfloat16), True),
    (Cast("fp8_e4m3"), False),
    (Cast("fp8_e5m2_1x128", pow2=True), True),
    (Cast("fp8_e4m3_128x128"), False),
    (Cast("mxfp8_e4m3"), False),
    (Cast("mxfp8_e5m2_32x32"), True),
    (Cast("nvfp4", row_scaled=True), False),
    (RHT_STOCHASTIC, True),
    (Cast("nvfp4_16x16", error="MAE"), True),
]
TRACED_IDS = [f"{name(c)}-{'col' if d else 'row'}" for c, d in TRACED]


def traced(slow: Callable[[Cast], bool]) -> pytest.MarkDecorator:
    """All of TRACED; `slow` ones, whose symbolic sizes take long to trace, in the deep suite."""
    table = [pytest.param(c, d, marks=[pytest.mark.deep] * slow(c)) for c, d in TRACED]
    return pytest.mark.parametrize("cast, col", table, ids=TRACED_IDS)


def check_compiled(cast: Cast, col: bool, inputs: list[torch.Tensor], **options: bool) -> None:
    """Quantize, and dequantize where it is defined, as one graph for all inputs: bit for bit."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def both(x: torch.Tensor, seed: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q = quantize(x, cast, col=col, seed=seed)
        if cast.transforms:
            return q
        return *q, dequantize(*q, cast, (x.shape[0], x.shape[1]), torch.bfloat16, col=col)

    compiled = torch.compile(both, fullgraph=True, backend=counter, **options)
    seed, compilations = torch.tensor([5, 6]), set()
    for x in inputs:
        assert same(compiled(x, seed), both(x, seed))
        compilations.add(counter.frame_count)
    assert len(compilations) == 1, "a second shape compiled again"


MORE = {"fp8_e4m3", "fp8_e5m2_1x128", "mxfp8_e4m3"}  # traced with symbolic sizes, too


@traced(slow=lambda cast: cast.format_name in MORE)
def test_compiled(cast: Cast, col: bool) -> None:
    check_compiled(cast, col, [matrix((37, 45))])


@traced(slow=lambda cast: cast.format_name not in MORE)
def test_compiled_with_any_number_of_rows(cast: Cast, col: bool) -> None:
    inputs = [matrix((37, 45)), matrix((69, 45))]
    for x in inputs:
        torch._dynamo.mark_dynamic(x, 0)
    check_compiled(cast, col, inputs)


@traced(slow=lambda cast: cast.format.tile is not None)
def test_compiled_with_any_shape(cast: Cast, col: bool) -> None:
    """Several tiles and some padding; one tile and no padding are graphs of their own."""
    check_compiled(cast, col, [matrix((151, 201)), matrix((301, 331))], dynamic=True)


@pytest.mark.gpu
@casts(ALL)
@BOTH
def test_devices_agree(cast: Cast, col: bool) -> None:
    seed = torch.tensor([5, 6])
    for scale in (1.0, 1e-30, 1e30):
        x = matrix((150, 300), spread=3) * scale
        gpu = quantize(x.cuda(), cast, col=col, seed=seed.cuda())
        gpu = tuple(None if t is None else t.cpu() for t in gpu)
        assert same(gpu, quantize(x, cast, col=col, seed=seed))


def test_encode_is_what_quantize_uses() -> None:
    """The one place where a code is made: a wrong element would show here first."""
    x = matrix((4, 8))
    codes, inverse, _ = quantize(x, Cast("fp8_e4m3", pow2=True))
    assert torch.equal(codes, encode(x / inverse, E4M3))
