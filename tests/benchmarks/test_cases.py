"""The byte formulas of the benchmark's cases against the sizes of real tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.cases import CASES, SHAPES, Case
from minifloat import dispatch
from minifloat.formats import FORMATS
from minifloat.layout import parts

BY_ID = {case.id: case for case in CASES}
MIB = 2**20


def size(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def inputs_of(case: Case, x: Tensor) -> list[Tensor]:
    """What a case reads."""
    if case.op == "dequantize":
        return dispatch.quantize(x, case.row, case.col)
    if case.op in ("transpose", "swizzle"):
        made = dispatch.quantize(x, case.row, None)
        return [made[0 if case.op == "transpose" else 1]]
    return [x] * case.reads


@pytest.mark.parametrize("shape", [(96, 160), (33, 50)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_bytes_are_what_tensors_hold(
    case: Case, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    x = torch.randn(shape).to(dtype)
    made = case.call(x)()
    outputs = list(made) if isinstance(made, list | tuple) else [made]
    assert case.bytes(shape, dtype) == size(*inputs_of(case, x)) + size(*outputs)


@pytest.mark.parametrize(
    ("id", "mib"),
    [
        # 64 Mi elements: 2 bytes read (twice where the scale needs the whole tensor), then codes,
        # and scales of 4 bytes per 128, 1 byte per 32, or 1 byte per 16.
        ("quantize_scaled/fp8_e4m3 delayed/row+col", 128 + 2 * 64),
        ("quantize/fp8_e4m3 current/row+col", 2 * 128 + 2 * 64),
        ("quantize/fp8_e4m3_1x128/row+col", 128 + 2 * (64 + 2)),
        ("quantize/mxfp8_e4m3/row+col", 128 + 2 * (64 + 2)),
        ("quantize/mxfp8_e4m3_32x32/row", 128 + 64 + 2),
        ("quantize/nvfp4/row+col", 2 * 128 + 2 * (32 + 4)),
        ("fake_quantize/mxfp8_e4m3/row+packed", 128 + 128 + 64 + 2),
        ("dequantize/nvfp4/row", 32 + 4 + 128),
        ("transpose/fp8_e4m3/row", 2 * 64),
        ("swizzle/mxfp8_e4m3/row", 2 * 2),
        ("amax/fp8_e4m3/row", 128),
    ],
)
def test_bytes_by_hand(id: str, mib: int) -> None:
    moved = BY_ID[id].bytes(SHAPES[0])
    assert 0 <= moved - mib * MIB < 64  # a few scalars


def test_every_format_is_timed_in_every_direction() -> None:
    for fmt in FORMATS.values():
        if fmt.element is None:
            continue
        casts = {(c.op, c.direction) for c in CASES if fmt in _formats(c) and not _options(c)}
        for direction in ("row", "col", "row+col"):
            assert ("quantize", direction) in casts
        assert {("dequantize", "row"), ("dequantize", "col")} <= casts
        if fmt.tile is None:
            assert ("quantize_scaled", "row+col") in casts


def _formats(case: Case) -> list[object]:
    return [c.format for c in (case.row, case.col) if c is not None]


def _options(case: Case) -> bool:
    return any(c.transforms or c.stochastic for c in (case.row, case.col) if c is not None)


def test_two_reads_where_a_scale_needs_the_whole_tensor() -> None:
    for case in CASES:
        if case.op in ("quantize", "fake_quantize"):
            fmt = (case.row or case.col).format  # type: ignore[union-attr]
            assert case.reads == (2 if fmt.tile is None or fmt.two_level else 1), case.id


def test_names_and_shapes() -> None:
    assert len(BY_ID) == len(CASES)
    assert SHAPES[0][0] * SHAPES[0][1] * 2 == 128 * MIB
    for case in CASES:
        assert case.id.split("/") == [case.op, case.name, case.direction]
        for cast in (case.row, case.col):
            if cast is not None:
                assert len(parts((8, 8), cast, None)) >= 2
