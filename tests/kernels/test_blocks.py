"""Block-scaled FP8 casts against the reference: fp32 and E8M0 scales, 1-D and 2-D blocks."""

from __future__ import annotations

import pytest
import torch
from _cases import (
    BOTH,
    DEVICE,
    DIRECTED,
    DIRECTIONS,
    EMPTY,
    FEW,
    INTERPRETED,
    SMALL,
    assert_codes,
    assert_exact,
    buffer,
    filled,
    inputs,
    on_device,
    run_interpreted,
    wide,
)

from minifloat import reference
from minifloat.formats import E5M2, FORMATS, Cast, Scale
from minifloat.layout import parts

pytest.importorskip("triton")
from minifloat.kernels import blocks, fp4, fp4_amax  # noqa: E402

BLOCKS = [f.name for f in FORMATS.values() if f.tile is not None and not f.two_level]
E4M3_BLOCKS = [n for n in BLOCKS if FORMATS[n].element is not E5M2]
E5M2_BLOCKS = [n for n in BLOCKS if FORMATS[n].element is E5M2]
EMULATED = [n for n in BLOCKS if FORMATS[n].scale is Scale.E8M0]
F32 = [n for n in BLOCKS if FORMATS[n].scale is Scale.F32]


def check_cast(
    shape: tuple[int, int],
    dtype: torch.dtype,
    row: Cast | None,
    col: Cast | None,
    plain: bool = False,
) -> None:
    for x in inputs(shape, dtype, plain):
        row_data, row_scale, _ = reference.quantize(x, row) if row else (None, None, None)
        col_data, col_scale, _ = reference.quantize(x, col, col=True) if col else (None, None, None)
        if (row or col).room != (1, 0):  # type: ignore[union-attr]
            shapes = {p.name: p.shape for p in parts(shape, row, col)}
            row_data, row_scale, col_data, col_scale = (
                filled(t, shapes.get(name, ()))
                for name, t in (
                    ("row_data", row_data),
                    ("row_scale", row_scale),
                    ("col_data", col_data),
                    ("col_scale", col_scale),
                )
            )
        out = [buffer(t) for t in (row_data, row_scale, col_data, col_scale)]
        blocks.cast_blocks(
            on_device(x), row=row, col=col,
            row_data=out[0], row_scale=out[1], col_data=out[2], col_scale=out[3],
        )  # fmt: skip
        assert_exact(out[1], row_scale)
        assert_exact(out[3], col_scale)
        assert_codes(out[0], row_data)
        assert_codes(out[2], col_data)


def check_fake(
    shape: tuple[int, int],
    dtype: torch.dtype,
    row: Cast | None,
    col: Cast | None,
    keep_col: bool,
    plain: bool = False,
) -> None:
    for x in inputs(shape, dtype, plain):
        row_out = reference.fake_quantize(x, row) if row else None
        col_out = reference.fake_quantize(x, col, col=True) if col and not keep_col else None
        data, scale = reference.quantize(x, col, col=True)[:2] if col and keep_col else (None, None)
        out = [buffer(t) for t in (row_out, col_out, data, scale)]
        blocks.fake_blocks(
            on_device(x), row=row, col=col,
            row_out=out[0], col_out=out[1], col_data=out[2], col_scale=out[3],
        )  # fmt: skip
        assert_exact(out[3], scale)
        assert_codes(out[2], data)
        for actual, expected in ((out[0], row_out), (out[1], col_out)):
            if INTERPRETED and expected is not None:  # codes a binade apart
                near = torch.isclose(actual.float(), expected.float(), rtol=0.6, atol=0)
                tiny = (actual.float() - expected.float()).abs() <= expected.abs().amax() / 64
                assert bool((near | tiny).all())
            else:
                assert_exact(actual, expected)


def check_empty(shape: tuple[int, int], name: str) -> None:
    x = torch.empty(shape, device=DEVICE)
    empty = torch.empty(0, device=DEVICE)
    blocks.cast_blocks(
        x, row=Cast(name), col=Cast(name),
        row_data=empty, row_scale=empty, col_data=empty, col_scale=empty,
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(("directions", "shape", "dtype"), DIRECTED)
@pytest.mark.parametrize("name", E4M3_BLOCKS)
def test_cast(
    name: str, directions: tuple[bool, bool], shape: tuple[int, int], dtype: torch.dtype
) -> None:
    row, col = (Cast(name) if d else None for d in directions)
    check_cast(shape, dtype, row, col)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(100, 127), (256, 512)])
@pytest.mark.parametrize("directions", DIRECTIONS)
@pytest.mark.parametrize("name", E5M2_BLOCKS)
def test_cast_e5m2(name: str, directions: tuple[bool, bool], shape: tuple[int, int]) -> None:
    row, col = (Cast(name) if d else None for d in directions)
    check_cast(shape, torch.bfloat16, row, col)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 1), (17, 1), (100, 127), (129, 129), (4100, 300)])
@pytest.mark.parametrize("directions", DIRECTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", F32[:2])
def test_room_is_filled_with_zeros(
    name: str, dtype: torch.dtype, directions: tuple[bool, bool], shape: tuple[int, int]
) -> None:
    row, col = (wide(Cast(name)) if d else None for d in directions)
    check_cast(shape, dtype, row, col)


@pytest.mark.gpu
@pytest.mark.parametrize("eps", [0.0, 1e-12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", F32)
def test_powers_of_two(name: str, dtype: torch.dtype, eps: float) -> None:
    cast = Cast(name, pow2=True, eps=eps)
    check_cast((130, 260), dtype, cast, cast)


@pytest.mark.gpu
def test_different_casts_take_two_launches() -> None:
    check_cast((100, 127), torch.bfloat16, Cast("fp8_e4m3_1x128"), Cast("mxfp8_e5m2"))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("directions", "shape", "dtype"),
    [
        *((d, *case) for d in DIRECTIONS for case in FEW),
        (BOTH, (17, 1), torch.bfloat16),
        (BOTH, (100, 127), torch.float16),
        (BOTH, (128, 4096), torch.float32),
    ],
)
@pytest.mark.parametrize("name", EMULATED[:2])
def test_fake(
    name: str, directions: tuple[bool, bool], shape: tuple[int, int], dtype: torch.dtype
) -> None:
    row, col = (Cast(name) if d else None for d in directions)
    for keep_col in (False, True):
        check_fake(shape, dtype, row, col, keep_col)


@pytest.mark.gpu
@pytest.mark.parametrize("keep_col", [False, True])
@pytest.mark.parametrize("name", EMULATED)
def test_fake_without_the_packed_copy(name: str, keep_col: bool) -> None:
    check_fake((100, 127), torch.bfloat16, Cast(name), Cast(name), keep_col)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", EMPTY)
@pytest.mark.parametrize("name", BLOCKS)
def test_empty(name: str, shape: tuple[int, int]) -> None:
    check_empty(shape, name)


def test_a_format_without_fp8_blocks_is_refused() -> None:
    for name in ("fp8_e4m3", "nvfp4"):
        with pytest.raises(ValueError, match=name):
            blocks.cast_blocks(torch.ones(2, 2), row=Cast(name), col=None)


def test_interpreted() -> None:
    run_interpreted(__file__)


@pytest.mark.parametrize(
    ("shape", "stride", "words"),
    [((128, 128), 128, True), ((128, 128), 1 << 25, True), ((128, 128), 3 << 24, False),
     ((128, 3 << 24), 3 << 24, False)],
)  # fmt: skip
def test_words_are_of_tiles_that_32_bits_span(
    shape: tuple[int, int], stride: int, words: bool
) -> None:
    x = torch.empty(1, dtype=torch.bfloat16, device="meta").as_strided(shape, (stride, 1))
    code, one = (torch.empty(1, dtype=t, device="meta") for t in (torch.uint8, torch.float32))
    launch = blocks._f32(x, Cast("fp8_e4m3_128x128"), code, one, None, None)
    assert (launch.fn is blocks.words_kernel) == words


@pytest.mark.parametrize(("start", "words"), [(0, True), (1, False), (2, True)])
def test_words_begin_where_memory_does_not(start: int, words: bool) -> None:
    """Memory of others is told by its address alone: its offset is that of a storage of its own."""
    memory = torch.empty(128 * 256 + 2, dtype=torch.bfloat16)[start : start + 128 * 256]
    x = torch.from_dlpack(memory).view(128, 256)
    assert x.storage_offset() == 0
    code, one = (torch.empty(1, dtype=t) for t in (torch.uint8, torch.float32))
    launch = blocks._f32(x, Cast("fp8_e4m3_128x128"), code, one, None, None)
    assert (launch.fn is blocks.words_kernel) == words
    launch = blocks._e8m0(x, Cast(EMULATED[0]), code, one, code, one)
    assert (launch.fn is blocks.e8m0_words_kernel) == words
    launch = fp4._launch(x, Cast("nvfp4"), None, {})
    assert launch.args["WORDS"] == words
    launch = fp4_amax._partial(x, plain=True, signs=-1)
    assert launch.args["WORDS"] == words


if __name__ == "__main__":
    for shape in SMALL:
        for name in E4M3_BLOCKS:
            check_cast(shape, torch.bfloat16, Cast(name), Cast(name), plain=True)
    for name in F32[:2]:
        check_cast((1, 17), torch.bfloat16, wide(Cast(name)), None, plain=True)
        check_cast((130, 129), torch.bfloat16, wide(Cast(name)), wide(Cast(name)), plain=True)
        check_cast((66, 71), torch.float32, None, wide(Cast(name)), plain=True)
    for name in E5M2_BLOCKS:
        check_cast((1, 17), torch.float32, Cast(name), None, plain=True)
        check_cast((17, 1), torch.float16, None, Cast(name), plain=True)
    for name in EMULATED:
        check_fake((100, 127), torch.bfloat16, Cast(name), Cast(name), keep_col=True, plain=True)
    for keep_col in (False, True):  # in words
        check_fake((128, 128), torch.bfloat16, *(Cast(EMULATED[0]),) * 2, keep_col, plain=True)
    for shape in EMPTY:
        check_empty(shape, BLOCKS[0])
