"""The numbers of one operand, against a few lines of arithmetic on the reference's casts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from minifloat import dispatch, reference
from minifloat.core.measure import Number, measured, numbers
from minifloat.core.probe import W_COL, X_COL, X_ROW
from minifloat.formats import HADAMARD_SIGN_MASK, HIGH, Cast, Operand
from minifloat.inspect.statistics import OperandStatistics, operand_statistics
from minifloat.operands import operands

CASTS = [
    Cast("fp8_e4m3"),
    Cast("fp8_e5m2"),
    Cast("fp8_e4m3_1x128", pow2=True),
    Cast("fp8_e4m3_128x128"),
    Cast("mxfp8_e4m3"),
    Cast("mxfp8_e4m3_32x32"),
    Cast("nvfp4"),
    Cast("nvfp4_16x16"),
    Cast("nvfp4", row_scaled=True),
    Cast("nvfp4", hadamard=HADAMARD_SIGN_MASK),
]


def seen(o: Operand, source: Tensor | None, slot: int = X_ROW) -> OperandStatistics:
    into = numbers(6, o.data.device)
    assert measured(o, source, None, into, slot) is o.data
    found = operand_statistics(slot, into[slot].tolist())
    assert found is not None
    return found


def operand(x: Tensor, cast: Cast, col: bool) -> Any:
    row, column = operands(x, None if col else cast, cast if col else None)
    return column if col else row


def wide(rows: int = 50, columns: int = 70) -> Tensor:
    """Magnitudes that no format holds at once, and zeros."""
    x = torch.randn(rows, columns) * torch.logspace(-6, 2, columns)
    x[3] = 0
    return x.to(torch.bfloat16)


@pytest.mark.parametrize("col", (False, True), ids=("row", "col"))
@pytest.mark.parametrize("cast", CASTS, ids=str)
def test_against_the_reference(cast: Cast, col: bool) -> None:
    if (col and cast.row_scaled) or (not col and cast.transforms):
        pytest.skip("no recipe casts this way")
    x = wide()
    got = seen(operand(x, cast, col), x, X_COL if col else X_ROW)
    source = (x.t() if col else x).double()
    data, scale, amax = reference.quantize(x, cast, col=col)
    if cast.transforms:
        source = reference.hadamard(source.float(), cast.hadamard).double()
        values = reference.unscaled(data, scale, cast, source.shape[1], col=col).double()
        values = values * (amax * reference.dequantize_factor(cast)).double()
    else:
        made = reference.dequantize(data, scale, amax, cast, (50, 70), torch.float32, col=col)
        values = (made.t() if col else made).double()
    noise = (values - source).square().sum()
    expected = 10 * math.log10(source.square().sum() / noise)
    assert got.sqnr == pytest.approx(expected, rel=1e-5)
    lost = (source != 0) & (values == 0)
    assert got.underflow == int(lost.sum()) / int((source != 0).sum())
    assert got.amax == pytest.approx(float(source.abs().max()), rel=1e-6)
    if not cast.format.two_level:  # the scale of a block is rounded, to zero at the worst
        assert got.saturation == 0
    assert (got.elements, got.casts) == (source.numel(), 1)
    assert got.format == cast.format_name
    assert got.scale_min is not None and got.scale_max is not None
    assert 0 <= got.scale_min <= got.scale_max  # a small block's E4M3 scale may be zero
    element = cast.format.element
    assert element is not None
    assert got.scale_max * element.max == pytest.approx(got.amax, rel=1.0)
    one = cast.format.tile in (None, (128, 128))
    assert one == (got.scale_min == got.scale_max)


@pytest.mark.parametrize("cast", CASTS[:-1], ids=str)
def test_a_scale_that_fits_clips_nothing(cast: Cast) -> None:
    x = torch.randn(64, 128)
    assert seen(operand(x, cast, False), x).saturation == 0


def test_scales_of_blocks() -> None:
    x = torch.full((2, 64), 6.0)
    x[0, :32], x[1, 32:] = 3.5, 0.0
    got = seen(operand(x, Cast("mxfp8_e4m3"), False), x)
    # 3.5 = 448 / 128 and 6 needs 2**-6; the block of zeros has no scale that means anything.
    assert (got.scale_min, got.scale_max) == (2.0**-7, 2.0**-6)


def test_two_level_scales_have_both_levels() -> None:
    x = torch.zeros(2, 32)
    x[0, :16], x[1, 16:] = 6.0, 3.0
    got = seen(operand(x, Cast("nvfp4"), False), x)
    assert got.scale_max == pytest.approx(1.0) and got.scale_min == pytest.approx(0.5)
    assert got.sqnr == math.inf or got.sqnr > 100


def test_saturation_is_clipping_beyond_half_a_step() -> None:
    cast, scale = Cast("fp8_e4m3"), torch.ones(1)
    # The largest code is 448, its step 32: 464 is the last value that rounds to it.
    x = torch.tensor([[1.0, 448.0, 460.0, 470.0, -9999.0, 0.0, 0.0, 2.0**-20]])
    o = operands(x, cast, None, live=(scale, None))[0]
    assert o is not None
    got = seen(o, x)
    assert got.saturation == 2 / 8
    assert got.underflow == 1 / 6  # of those that were not zero
    assert got.amax == 9999


def test_what_is_not_finite_is_counted_apart() -> None:
    x = torch.tensor([[1.0, math.inf, math.nan, 2.0]])
    o = operands(x, Cast("fp8_e4m3"), None, live=(torch.ones(1), None))[0]
    assert o is not None
    got = seen(o, x)
    assert got.nonfinite == 2 and got.amax == 2 and got.sqnr == math.inf
    assert (got.scale_min, got.scale_max) == (1.0, 1.0)


def test_what_is_not_finite_at_all_is_not_known() -> None:
    """It is not exact: there is nothing that the operand could be compared with."""
    x = torch.full((2, 32), math.nan)
    got = seen(operand(x, Cast("nvfp4"), False), x)
    assert got.nonfinite == 64
    assert (got.sqnr, got.underflow, got.saturation) == (None, None, None)


def test_small_gradients_do_not_leave_the_sums() -> None:
    x = torch.randn(8, 32) * 1e-30  # squares of it are zero in fp32
    got = seen(operand(x, Cast("fp8_e5m2"), False), x)
    assert got.sqnr is not None and 20 < got.sqnr < 40


def test_high_precision_has_no_scales() -> None:
    x = torch.randn(4, 8)
    got = seen(Operand(x, None, None, HIGH, 8), x)
    assert (got.sqnr, got.underflow, got.scale_min, got.quantized) == (math.inf, 0.0, None, False)
    rounded = Cast("high_precision", dtype=torch.bfloat16)
    got = seen(operand(x, rounded, False), x)
    assert got.sqnr is not None and 45 < got.sqnr < 65


def test_without_a_source() -> None:
    x = wide()
    got = seen(operand(x, Cast("mxfp8_e4m3"), True), None, W_COL)
    assert (got.sqnr, got.underflow, got.saturation) == (None, None, None)
    assert got.amax > 0 and got.scale_max is not None


@pytest.mark.parametrize("col", (False, True), ids=("row", "col"))
@pytest.mark.parametrize("name", ("mxfp8_e4m3", "nvfp4"))
def test_values_of_an_emulated_format(name: str, col: bool) -> None:
    """What a device without tensor cores for a format multiplies: bf16 values, no codes."""
    x, cast = wide(32, 64), Cast(name)
    made = dispatch.fake_quantize(x, None if col else cast, cast if col else None, keep_col=False)
    amax = made[1] if len(made) > 1 else None
    data = made[0].t() if col else made[0]
    got = seen(Operand(data, None, amax, cast, data.shape[1]), x, X_COL if col else X_ROW)
    expected = seen(operand(x, cast, col), x, X_COL if col else X_ROW)
    assert got == expected


def test_casts_add_up() -> None:
    into = numbers(6, torch.device("cpu"))
    x, y = torch.randn(8, 32), 1e-3 * torch.randn(4, 32)
    for t in (x, y):
        measured(operand(t, Cast("fp8_e4m3"), False), t, None, into, X_ROW)
    row = into[X_ROW]
    assert row[Number.CASTS] == 2 and row[Number.ELEMENTS] == 12 * 32
    assert row[Number.AMAX] == x.abs().max()
    assert row[Number.SCALE_MAX] > 100 * row[Number.SCALE_MIN]
    assert into[W_COL, Number.CASTS] == 0


def test_nothing_to_measure() -> None:
    x = torch.zeros(0, 32)
    got = seen(operand(x, Cast("fp8_e4m3"), False), x)
    assert (got.elements, got.scale_min) == (0, None)
