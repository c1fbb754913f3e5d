"""Dequantization of every format, from the layouts the reference stores."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from _cases import DEVICE, assert_exact, buffer, inputs, on_device, run_interpreted
from torch import Tensor

from minifloat import reference
from minifloat.formats import E5M2, FORMATS, Cast
from minifloat.layout import parts

pytest.importorskip("triton")
from minifloat.kernels import dequantize  # noqa: E402

NAMES = [f.name for f in FORMATS.values() if f.element is not None]
SHAPES = [(17, 1), (100, 127), (128, 4096)]


def check(  # noqa: PLR0913  (what a test varies)
    shape: tuple[int, int],
    dtype: torch.dtype,
    cast: Cast,
    col: bool,
    plain: bool = False,
    scaled: bool = True,
) -> None:
    for x in inputs(shape, torch.float32, plain):
        data, scale, amax = reference.quantize(x, cast, col=col)
        amax = amax if scaled else None
        expected = reference.dequantize(data, scale, amax, cast, shape, dtype, col=col)
        out = buffer(expected)
        stored = [None if t is None else on_device(t.contiguous()) for t in (data, scale, amax)]
        if cast.room[0] != 1:
            described = parts(shape, None if col else cast, cast if col else None)
            stored[:2] = [among(t, p.shape) for t, p in zip(stored[:2], described, strict=True)]
        dequantize(*stored, cast, out, col=col)
        assert_exact(out, expected)


def among(t: Tensor, shape: Sequence[int]) -> Tensor:
    """`t` with garbage after it, up to a shape; of codes, without."""
    if t.dim() != 2:
        return t
    wide = buffer(torch.empty(shape, dtype=t.dtype))
    assert wide is not None
    wide[: t.shape[0], : t.shape[1]] = t
    return wide if t.dtype is torch.float32 else wide[: t.shape[0], : t.shape[1]]


def check_every_code(cast: Cast) -> None:
    """Each of the 256 bytes, under scales of every size."""
    shape = (256, 256 * cast.format.element.per_byte)
    data = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scale = torch.arange(256, dtype=torch.uint8)
    if cast.format.tile is None:
        scale = torch.tensor([0.3])
    elif cast.format.scale.dtype is torch.uint8:
        scale = scale[:, None].expand(cast.format.scale_shape(*shape)).contiguous()
    else:
        scale = torch.rand(cast.format.scale_shape(*shape))
    amax = torch.tensor([2.7]) if cast.format.two_level else None
    expected = reference.dequantize(data, scale, amax, cast, shape, torch.float32)
    out = buffer(expected)
    stored = [None if t is None else on_device(t) for t in (data, scale, amax)]
    dequantize(*stored, cast, out, col=False)
    assert_exact(out, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("col", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_bf16(name: str, shape: tuple[int, int], col: bool) -> None:
    check(shape, torch.bfloat16, Cast(name), col)


@pytest.mark.gpu
@pytest.mark.parametrize("col", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", [n for n in NAMES if FORMATS[n].element is not E5M2])
def test_other_dtypes(name: str, dtype: torch.dtype, col: bool) -> None:
    check((100, 127), dtype, Cast(name), col)


@pytest.mark.gpu
@pytest.mark.parametrize("col", [False, True])
@pytest.mark.parametrize("shape", [(17, 1), (1, 17), (100, 127)])
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e4m3_1x128", "fp8_e4m3_128x128"])
def test_room_is_not_read(name: str, shape: tuple[int, int], col: bool) -> None:
    check(shape, torch.bfloat16, Cast(name, room=(16, 0)), col)


@pytest.mark.gpu
@pytest.mark.parametrize("col", [False, True])
@pytest.mark.parametrize("scale_max", [256, 448])
def test_nvfp4_options(scale_max: int, col: bool) -> None:
    check((100, 127), torch.bfloat16, Cast("nvfp4", row_scaled=True, scale_max=scale_max), col)
    check((100, 127), torch.float32, Cast("nvfp4", error="MSE", scale_max=scale_max), col)


@pytest.mark.gpu
@pytest.mark.parametrize("col", [False, True])
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_16x16"])
def test_block_scales_alone(name: str, col: bool) -> None:
    check((100, 127), torch.float32, Cast(name), col, scaled=False)
    check((128, 256), torch.bfloat16, Cast(name, row_scaled=not col), col, scaled=False)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_every_code(name: str) -> None:
    check_every_code(Cast(name))


@pytest.mark.gpu
def test_empty() -> None:
    empty = torch.empty(0, 5, device=DEVICE)
    dequantize(empty, empty, None, Cast("fp8_e4m3"), empty, col=False)


def test_interpreted() -> None:
    run_interpreted(__file__)


if __name__ == "__main__":
    for name in NAMES:
        for col in (False, True):
            check((100, 127), torch.float32, Cast(name), col, plain=True)
            check((1, 17), torch.float32, Cast(name), col, plain=True)
    for col in (False, True):
        check((130, 70), torch.float32, Cast("nvfp4", row_scaled=True), col, plain=True)
        check((130, 70), torch.float32, Cast("nvfp4"), col, plain=True, scaled=False)
    check((64, 256), torch.bfloat16, Cast("mxfp8_e4m3"), True, plain=True)
    for name in ("fp8_e4m3", "fp8_e4m3_1x128", "fp8_e4m3_128x128"):
        check((66, 71), torch.float32, Cast(name, room=(16, 0)), True, plain=True)
        check((66, 71), torch.float32, Cast(name, room=(16, 0)), False, plain=True)
