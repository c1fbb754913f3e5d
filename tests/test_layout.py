"""The buffers of every format have the shapes and dtypes the contract gives them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minifloat import dispatch
from minifloat.formats import FORMATS, HADAMARD_SIGN_MASK, Cast, cdiv, rup
from minifloat.layout import Part, flatten, part_names, parts, shares_scale, transposed_shape

from .reference.cases import ALL, name

U8, F32 = torch.uint8, torch.float32
FP8 = ("e4m3", "e5m2")


def as_dict(described: list[Part]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {p.name: (p.shape, p.dtype) for p in described}


@pytest.mark.parametrize(
    "shape, expected",
    [
        ((), (1, 1)),
        ((7,), (1, 7)),
        ((3, 5), (3, 5)),
        ((2, 3, 5), (6, 5)),
        ((2, 0, 5), (0, 5)),
        ((4, 0), (4, 0)),
        (torch.Size((2, 3, 4, 5)), (24, 5)),
    ],
)
def test_flatten(shape: tuple[int, ...], expected: tuple[int, int]) -> None:
    assert flatten(shape) == expected


@pytest.mark.parametrize(
    "shape, expected", [((), ()), ((7,), (7,)), ((3, 5), (5, 3)), ((2, 3, 5), (5, 2, 3))]
)
def test_transposed_shape(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert transposed_shape(shape) == expected


# (M, K), written out by hand from the contract's formulas.
@pytest.mark.parametrize("tag", FP8)
def test_tensor_wide(tag: str) -> None:
    cast = Cast(f"fp8_{tag}")
    assert parts((2, 3, 40), cast, cast) == [
        Part("row_data", (2, 3, 40), U8),
        Part("col_data", (40, 2, 3), U8),
        Part("scale", (1,), F32),
    ]
    assert parts((6, 40), cast, None) == [Part("row_data", (6, 40), U8), Part("scale", (1,), F32)]
    assert parts((6, 40), None, cast) == [Part("col_data", (40, 6), U8), Part("scale", (1,), F32)]
    assert parts((), cast, cast)[0] == Part("row_data", (), U8)


@pytest.mark.parametrize("tag", FP8)
@pytest.mark.parametrize("m, k", [(256, 512), (130, 257), (1, 1), (5, 1000)])
def test_fp8_blocks(tag: str, m: int, k: int) -> None:
    lines = as_dict(parts((m, k), Cast(f"fp8_{tag}_1x128"), Cast(f"fp8_{tag}_1x128")))
    assert lines == {
        "row_data": ((m, k), U8),
        "row_scale": ((math.ceil(k / 128), math.ceil(m / 4) * 4), F32),
        "col_data": ((k, m), U8),
        "col_scale": ((math.ceil(m / 128), math.ceil(k / 4) * 4), F32),
    }
    squares = as_dict(parts((m, k), Cast(f"fp8_{tag}_128x128"), Cast(f"fp8_{tag}_128x128")))
    assert squares == {
        "row_data": ((m, k), U8),
        "row_scale": ((math.ceil(m / 128), math.ceil(math.ceil(k / 128) / 4) * 4), F32),
        "col_data": ((k, m), U8),
        "col_scale": ((math.ceil(k / 128), math.ceil(math.ceil(m / 128) / 4) * 4), F32),
    }


@pytest.mark.parametrize("tag", FP8)
@pytest.mark.parametrize("square", ["", "_32x32"])
@pytest.mark.parametrize("m, k", [(256, 512), (33, 65), (1, 1), (4096, 96)])
def test_mxfp8(tag: str, square: str, m: int, k: int) -> None:
    cast = Cast(f"mxfp8_{tag}{square}")
    assert as_dict(parts((m, k), cast, cast)) == {
        "row_data": ((m, k), U8),
        "row_scale": ((rup(m, 128), rup(cdiv(k, 32), 4)), U8),
        "col_data": ((m, k), U8),  # not transposed
        "col_scale": ((rup(cdiv(m, 32), 4), rup(k, 128)), U8),
    }


@pytest.mark.parametrize("square", ["", "_16x16"])
@pytest.mark.parametrize("m, k", [(256, 512), (33, 65), (1, 1), (16, 48)])
def test_nvfp4(square: str, m: int, k: int) -> None:
    cast = Cast(f"nvfp4{square}")
    assert as_dict(parts((m, k), cast, cast)) == {
        "row_data": ((m, cdiv(k, 2)), U8),
        "row_scale": ((rup(m, 128), rup(cdiv(k, 16), 4)), U8),
        "row_amax": ((1,), F32),
        "col_data": ((k, cdiv(m, 2)), U8),
        "col_scale": ((rup(k, 128), rup(cdiv(m, 16), 4)), U8),
        "col_amax": ((1,), F32),
    }


def test_nvfp4_row_scaled_has_an_amax_per_row_of_each_copy() -> None:
    cast = Cast("nvfp4", row_scaled=True)
    described = as_dict(parts((33, 65), cast, cast))
    assert described["row_amax"] == ((33,), F32)
    assert described["col_amax"] == ((65,), F32)


@pytest.mark.parametrize(
    "shape, data",
    [
        ((2, 4, 10), (10, 2, 2)),  # the last leading dim is even: N-D survives packing
        ((2, 3, 10), (10, 3)),  # odd: packed across it, so flattened
        ((4, 10), (10, 2)),
        ((5, 10), (10, 3)),
        ((10,), (10, 1)),
        ((0, 10), (10, 0)),
        ((3, 0, 10), (10, 3, 0)),
    ],
)
def test_nvfp4_column_data(shape: tuple[int, ...], data: tuple[int, ...]) -> None:
    assert as_dict(parts(shape, None, Cast("nvfp4")))["col_data"] == (data, U8)


@pytest.mark.parametrize("m, kept", [(16, 16), (17, 32), (1, 16), (0, 0)])
def test_a_hadamard_tail_keeps_all_its_outputs(m: int, kept: int) -> None:
    cast = Cast("nvfp4", hadamard=HADAMARD_SIGN_MASK)
    described = as_dict(parts((m, 40), None, cast))
    assert described["col_data"] == ((40, kept // 2), U8)
    assert described["col_scale"] == ((128, rup(kept // 16, 4)), U8)


def test_high_precision() -> None:
    cast = Cast("high_precision", dtype=torch.bfloat16)
    assert parts((2, 3, 5), cast, cast) == [
        Part("row_data", (2, 3, 5), torch.bfloat16),
        Part("col_data", (5, 2, 3), torch.bfloat16),
    ]


def test_each_direction_may_have_its_own_format() -> None:
    described = parts((32, 64), Cast("fp8_e4m3"), Cast("mxfp8_e5m2"))
    assert [p.name for p in described] == ["row_data", "col_data", "col_scale", "scale"]


@pytest.mark.parametrize("cast", ALL, ids=name)
def test_order_and_names(cast: Cast) -> None:
    if cast.format.element is None:
        cast = cast.replace(dtype=torch.float32)
    both = [p.name for p in parts((40, 24), cast, cast)]
    row = [p.name for p in parts((40, 24), cast, None)]
    col = [p.name for p in parts((40, 24), None, cast)]
    shared = ["scale"] if shares_scale(cast) else []
    assert [n for n in both if n != "scale"] + shared == both
    assert [n for n in row + col if n != "scale"] + shared == both
    assert row == [n for n in both if n.startswith("row_")] + shared
    for args, names in (((cast, cast), both), ((cast, None), row), ((None, cast), col)):
        assert part_names(*args) == tuple(names)
    assert parts((40, 24), None, None) == []


def test_what_shares_a_scale() -> None:
    sharing = [f for f in FORMATS if shares_scale(Cast(f))]
    assert sharing == ["fp8_e4m3", "fp8_e5m2"]


@given(
    st.lists(st.integers(0, 70), min_size=1, max_size=4).map(tuple),
    st.sampled_from([c for c in ALL if c.format.element is not None]),
)
def test_every_element_has_a_code_and_a_scale(shape: tuple[int, ...], cast: Cast) -> None:
    m, k = flatten(shape)
    element = cast.format.element
    assert element is not None
    for col in (False, True):
        described = as_dict(parts(shape, None if col else cast, cast if col else None))
        prefix = "col_" if col else "row_"
        codes = math.prod(described[prefix + "data"][0]) * element.per_byte
        assert codes >= m * k
        assert codes < m * k + (k if col else m) * 32 + 1  # packing and a Hadamard tail at most
        if cast.format.scale_tile is not None:
            rows, columns = cast.format.scale_tile
            assert math.prod(described[prefix + "scale"][0]) * rows * columns >= m * k


@pytest.mark.parametrize("m", [1, 128, 129])
def test_a_spare_row_of_scales_changes_nothing_else(m: int) -> None:
    cast = Cast("fp8_e4m3_1x128", pow2=True)
    x = torch.randn(m, 40, generator=torch.Generator().manual_seed(m))
    row, row_scale, col, col_scale = dispatch.quantize(x, cast, cast)
    made = dispatch.quantize(x, cast, cast.replace(room=(1, 1)))
    assert made[3].shape == (col_scale.shape[0] + 1, col_scale.shape[1])
    described = parts(x.shape, cast, cast.replace(room=(1, 1)))
    assert [tuple(t.shape) for t in made] == [p.shape for p in described]
    for a, b in zip((row, row_scale, col, col_scale), (*made[:3], made[3][:-1]), strict=True):
        assert torch.equal(a, b)
    back = dispatch.dequantize(made[2], made[3], None, cast, x.shape, torch.float32, col=True)
    exact = dispatch.dequantize(col, col_scale, None, cast, x.shape, torch.float32, col=True)
    assert torch.equal(back, exact)
