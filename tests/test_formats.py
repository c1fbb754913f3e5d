"""Every number of a format, against the contract and against PyTorch's own dtypes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minifloat import formats as f
from minifloat.dtypes import DType
from minifloat.formats import E2M1, E4M3, E5M2, FORMATS, Cast, Scale
from minifloat.opaque import AVAILABLE, is_registered

# element, max, smallest positive value, relative half ulp
ELEMENTS = [
    (E4M3, DType.kFloat8E4M3, 8, 448.0, 2.0**-9, 2.0**-4),
    (E5M2, DType.kFloat8E5M2, 8, 57344.0, 2.0**-16, 2.0**-3),
    (E2M1, DType.kFloat4E2M1, 4, 6.0, 0.5, 2.0**-2),
]

# Stored scales of x[198, 301], CONTRACT 1.4 to 1.6: (row copy, contraction-last column copy).
# MXFP8 stores its column scales transposed: (8, 384).
SCALE_SHAPES = {
    "fp8_e4m3_1x128": ((3, 200), (2, 304)),
    "fp8_e5m2_1x128": ((3, 200), (2, 304)),
    "fp8_e4m3_128x128": ((2, 4), (3, 4)),
    "fp8_e5m2_128x128": ((2, 4), (3, 4)),
    "mxfp8_e4m3": ((256, 12), (384, 8)),
    "mxfp8_e5m2": ((256, 12), (384, 8)),
    "mxfp8_e4m3_32x32": ((256, 12), (384, 8)),
    "mxfp8_e5m2_32x32": ((256, 12), (384, 8)),
    "nvfp4": ((256, 20), (384, 16)),
    "nvfp4_16x16": ((256, 20), (384, 16)),
}

# name: (element, scale, tile, column copy transposed)
PARTS = {
    "high_precision": (None, Scale.NONE, None, True),
    "fp8_e4m3": (E4M3, Scale.F32, None, True),
    "fp8_e4m3_1x128": (E4M3, Scale.F32, (1, 128), True),
    "fp8_e4m3_128x128": (E4M3, Scale.F32, (128, 128), True),
    "mxfp8_e4m3": (E4M3, Scale.E8M0, (1, 32), False),
    "mxfp8_e4m3_32x32": (E4M3, Scale.E8M0, (32, 32), False),
    "fp8_e5m2": (E5M2, Scale.F32, None, True),
    "fp8_e5m2_1x128": (E5M2, Scale.F32, (1, 128), True),
    "fp8_e5m2_128x128": (E5M2, Scale.F32, (128, 128), True),
    "mxfp8_e5m2": (E5M2, Scale.E8M0, (1, 32), False),
    "mxfp8_e5m2_32x32": (E5M2, Scale.E8M0, (32, 32), False),
    "nvfp4": (E2M1, Scale.E4M3_F32, (1, 16), True),
    "nvfp4_16x16": (E2M1, Scale.E4M3_F32, (16, 16), True),
}


@pytest.mark.parametrize("element, dtype, bits, top, tiny, half_ulp", ELEMENTS)
def test_element_numbers(
    element: f.Element, dtype: DType, bits: int, top: float, tiny: float, half_ulp: float
) -> None:
    assert element.dtype is dtype
    assert f.ELEMENTS[dtype] is element
    assert (element.bits, element.per_byte) == (bits, 8 // bits)
    assert (element.max, element.tiny, element.half_ulp) == (top, tiny, half_ulp)


@pytest.mark.parametrize("element", [E4M3, E5M2])
def test_element_agrees_with_torch(element: f.Element) -> None:
    info = torch.finfo(element.torch_dtype)
    assert element.max == info.max
    assert element.half_ulp == info.eps / 2
    assert element.tiny == info.smallest_normal * info.eps


def test_formats_are_these() -> None:
    assert {n: (x.element, x.scale, x.tile, x.col_transposed) for n, x in FORMATS.items()} == PARTS


@pytest.mark.parametrize("name, fmt", FORMATS.items())
def test_format_is_consistent(name: str, fmt: f.Format) -> None:
    assert fmt.name == name
    tile = fmt.tile or (1, 1)
    assert fmt.square == (fmt.tile is None or tile[0] == tile[1])
    assert fmt.shares_scale == (fmt.tile is None)
    assert fmt.two_level == (fmt.element is E2M1)
    assert fmt.swizzles == (fmt.scale.dtype is torch.uint8)
    assert (fmt.scale_tile is None) == (fmt.tile is None)
    if fmt.scale_tile is not None:
        assert tile[0] % fmt.scale_tile[0] == 0
        assert tile[1] == fmt.scale_tile[1]
    with pytest.raises(dataclasses.FrozenInstanceError):
        fmt.align = 2  # type: ignore[misc]


@pytest.mark.parametrize("name, shapes", SCALE_SHAPES.items())
def test_scale_shape(name: str, shapes: tuple[tuple[int, int], tuple[int, int]]) -> None:
    assert FORMATS[name].scale_shape(198, 301) == shapes[0]
    assert FORMATS[name].scale_shape(301, 198) == shapes[1]


@pytest.mark.parametrize("name", SCALE_SHAPES)
def test_scale_shape_of_nothing(name: str) -> None:
    assert 0 in FORMATS[name].scale_shape(0, 301)
    assert 0 in FORMATS[name].scale_shape(198, 0)


@pytest.mark.parametrize("columns, kept", [(0, 0), (1, 16), (15, 16), (16, 16), (17, 32)])
def test_columns_kept(columns: int, kept: int) -> None:
    fmt = FORMATS["nvfp4"]
    assert fmt.columns(columns) == columns
    assert fmt.columns(columns, hadamard=True) == kept


def test_sign_mask_is_the_contracts() -> None:
    signs = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
    assert [-1 if f.HADAMARD_SIGN_MASK >> i & 1 else 1 for i in range(16)] == signs
    assert f.HADAMARD_SIGN_MASK < 1 << 16


def test_fp32_max() -> None:
    assert f.FP32_MAX == (2 - 2.0**-23) * 2.0**127


@given(st.integers(0, 10**6), st.integers(1, 10**4))
def test_cdiv_and_rup(a: int, b: int) -> None:
    assert (f.cdiv(a, b) - 1) * b < a <= f.cdiv(a, b) * b
    assert f.rup(a, b) == f.cdiv(a, b) * b


@pytest.mark.parametrize("fmt", [x for x in FORMATS.values() if x.element], ids=lambda x: x.name)
def test_find_format(fmt: f.Format) -> None:
    assert f.find_format(fmt.element, fmt.scale, fmt.tile) is fmt


def test_find_format_names_what_exists() -> None:
    with pytest.raises(
        ValueError, match=r"e2m1.*f32.*\(1, 128\).*formats: high_precision, .*nvfp4"
    ):
        f.find_format(E2M1, Scale.F32, (1, 128))


@pytest.mark.parametrize("name", FORMATS)
def test_cast_defaults(name: str) -> None:
    cast = Cast(name)
    assert cast.format is FORMATS[name]
    assert not cast.transforms
    values = (False, 0.0, -1, False, False, "", 448, None, (1, 0))
    assert tuple(getattr(cast, field) for field in Cast._fields[1:]) == values


@pytest.mark.parametrize("mask, transforms", [(-1, False), (0, True), (0xD7E8, True)])
def test_cast_transforms(mask: int, transforms: bool) -> None:
    assert Cast("nvfp4", hadamard=mask).transforms is transforms


@pytest.mark.parametrize(
    "fields",
    [
        {"format_name": "fp8_e4m3", "pow2": True, "eps": 1e-6},
        {"format_name": "fp8_e5m2_128x128", "pow2": True},
        {"format_name": "nvfp4", "hadamard": 0xD7E8, "stochastic": True},
        {"format_name": "nvfp4", "row_scaled": True, "error": "MSE", "scale_max": 256},
        {"format_name": "nvfp4_16x16", "error": "MAE"},
        {"format_name": "high_precision", "dtype": torch.bfloat16},
    ],
)
def test_cast_accepts(fields: dict[str, Any]) -> None:
    cast = Cast(**fields)
    assert {name: getattr(cast, name) for name in fields} == fields


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"format_name": "fp4"}, "format_name: got 'fp4'; formats: high_precision, "),
        ({"format_name": "fp8_e4m3", "eps": -1.0}, "eps"),
        ({"format_name": "fp8_e4m3", "eps": float("nan")}, "eps"),
        ({"format_name": "fp8_e4m3", "eps": float("inf")}, "eps"),
        ({"format_name": "high_precision", "pow2": True}, "pow2"),
        ({"format_name": "mxfp8_e4m3", "pow2": True}, "pow2"),
        ({"format_name": "nvfp4", "pow2": True}, "pow2"),
        ({"format_name": "mxfp8_e4m3", "hadamard": 0}, "nvfp4"),
        ({"format_name": "fp8_e4m3", "stochastic": True}, "nvfp4"),
        ({"format_name": "fp8_e4m3_1x128", "row_scaled": True}, "nvfp4"),
        ({"format_name": "mxfp8_e4m3_32x32", "error": "MAE"}, "nvfp4"),
        ({"format_name": "nvfp4", "error": "MAE", "hadamard": 0}, "4-over-6"),
        ({"format_name": "nvfp4", "error": "MAE", "stochastic": True}, "4-over-6"),
        ({"format_name": "nvfp4", "error": "RMS"}, "error: got 'RMS'"),
        ({"format_name": "nvfp4", "row_scaled": True, "hadamard": 0}, "row scaling"),
        ({"format_name": "nvfp4", "row_scaled": True, "stochastic": True}, "row scaling"),
        ({"format_name": "nvfp4_16x16", "row_scaled": True}, "row scaling"),
        ({"format_name": "nvfp4_16x16", "hadamard": 0}, "2-D tiles"),
        ({"format_name": "nvfp4_16x16", "stochastic": True}, "2-D tiles"),
        ({"format_name": "nvfp4", "scale_max": 300}, "scale_max: got 300"),
    ],
)
def test_cast_refuses(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Cast(**fields)


def test_cast_is_registered() -> None:
    assert is_registered(Cast) == AVAILABLE


@pytest.mark.skipif(not AVAILABLE, reason="this PyTorch has no opaque objects")
def test_compiled_code_reads_every_member() -> None:
    torch._dynamo.reset()
    members = (*Cast._fields, "format", "transforms", "tiled", "layout")
    cast = Cast("nvfp4", hadamard=3)
    expected = tuple(getattr(cast, member) for member in members)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def same(t: torch.Tensor, cast: Cast) -> list[torch.Tensor]:
        found = (getattr(cast, member) for member in members)
        return [t + (a == b) for a, b in zip(found, expected, strict=True)]

    assert [int(t) for t in same(torch.zeros(()), cast)] == [1] * len(members)
