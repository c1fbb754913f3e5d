"""NVFP4 casts and amaxes against the reference, bit for bit, on the GPU and in the interpreter.

The kernels round in arithmetic of their own, so even the interpreter's bits are the reference's.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from _cases import (
    DEVICE,
    EMPTY,
    assert_exact,
    buffer,
    inputs,
    on_device,
    run_interpreted,
)
from torch import Tensor

from minifloat import reference
from minifloat.formats import HADAMARD_SIGN_MASK, Cast

pytest.importorskip("triton")
from minifloat.kernels import fp4  # noqa: E402

SEED = torch.tensor([0x1234_5678_9ABC_DEF0, 0x1_0000_0007], dtype=torch.int64)
PLAIN = Cast("nvfp4")
TILES = Cast("nvfp4_16x16")
HADAMARD = PLAIN.replace(hadamard=HADAMARD_SIGN_MASK)
STOCHASTIC = PLAIN.replace(stochastic=True)
SCALED = PLAIN.replace(row_scaled=True)
MAE, MSE = PLAIN.replace(error="MAE", scale_max=256), PLAIN.replace(error="MSE")

MAIN: dict[str, tuple[Cast | None, Cast | None]] = {
    "plain": (PLAIN, PLAIN),
    "hadamard": (PLAIN, HADAMARD),
    "stochastic": (STOCHASTIC, HADAMARD.replace(stochastic=True)),
    "tiles": (TILES, TILES),
}
OTHERS: dict[str, tuple[Cast | None, Cast | None]] = {
    "row": (PLAIN, None),
    "col": (None, PLAIN),
    "no signs": (None, PLAIN.replace(hadamard=0, scale_max=256)),
    "stochastic row": (STOCHASTIC, None),
    "stochastic col": (None, STOCHASTIC),
    "scale_max": (PLAIN.replace(scale_max=256), PLAIN),
    "tiles row": (TILES, None),
    "tiles col": (None, TILES.replace(scale_max=256)),
    "mixed": (PLAIN, TILES),
    "scaled": (SCALED, SCALED),
    "scaled row": (SCALED, HADAMARD),
    "mae": (MAE, MAE),
    "mse": (MSE, MSE),
    "scaled mae": (MAE.replace(row_scaled=True), MAE.replace(row_scaled=True)),
    "tiles mae": (TILES.replace(error="MAE"), TILES.replace(error="MAE")),
    "tiles mse": (TILES.replace(error="MSE"), TILES.replace(error="MSE")),
}
PAIRS = {**MAIN, **OTHERS}
SHAPES = [
    *((1, 1), (1, 17), (17, 1), (16, 16), (100, 127), (129, 129), (300, 4096)),
    *((128, 256), (256, 384)),  # whole tiles
]
FEW = [(100, 127), (128, 256)]  # partial and whole tiles


def fp4_inputs(shape: tuple[int, int], dtype: torch.dtype, plain: bool) -> Iterator[Tensor]:
    """Those of every kernel, and quotients that fall on ties; `plain`: with all that is odd."""
    yield from inputs(shape, dtype, plain)
    g = torch.Generator().manual_seed(7)
    ties = torch.randint(-12, 13, shape, generator=g) / 4
    if plain:
        odd = [torch.nan, -torch.nan, torch.inf, -torch.inf, 1e30, -1e-30, 0.0, -0.0]
        at = torch.randperm(shape[0] * shape[1], generator=g)[: len(odd)]
        ties.view(-1)[at] = torch.tensor(odd)[: len(at)]
    yield ties.to(dtype)
    # Near the largest number, where half of a multiplier is not exact.
    yield (ties * (torch.finfo(dtype).max / 4)).to(dtype)


def amaxes(x: Tensor, row: Cast | None, col: Cast | None) -> tuple[Tensor | None, Tensor | None]:
    return (
        reference.amax(x, row) if row else None,
        reference.amax(x, col, col=True) if col else None,
    )


def to_device(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.to(DEVICE)


def check_cast(
    shape: tuple[int, int],
    dtype: torch.dtype,
    row: Cast | None,
    col: Cast | None,
    plain: bool = False,
    seed: Tensor = SEED,
) -> None:
    for x in fp4_inputs(shape, dtype, plain):
        row_amax, col_amax = amaxes(x, row, col)
        r = reference.quantize(x, row, amax=row_amax, seed=seed) if row else (None, None)
        c = reference.quantize(x, col, col=True, amax=col_amax, seed=seed) if col else (None, None)
        out = [buffer(t) for t in (r[0], r[1], c[0], c[1])]
        fp4.cast_fp4(
            on_device(x), row=row, col=col, seed=seed.to(DEVICE),
            row_data=out[0], row_scale=out[1], row_amax=to_device(row_amax),
            col_data=out[2], col_scale=out[3], col_amax=to_device(col_amax),
        )  # fmt: skip
        for actual, expected in zip(out, (r[0], r[1], c[0], c[1]), strict=True):
            assert_exact(actual, expected)


def check_fake(
    shape: tuple[int, int],
    dtype: torch.dtype,
    row: Cast | None,
    col: Cast | None,
    keep_col: bool = True,
    plain: bool = False,
) -> None:
    for x in fp4_inputs(shape, dtype, plain):
        row_amax, col_amax = amaxes(x, row, col)
        row_out = reference.fake_quantize(x, row, amax=row_amax, seed=SEED) if row else None
        col_out, data, scale = None, None, None
        if col and keep_col:
            data, scale, _ = reference.quantize(x, col, col=True, amax=col_amax, seed=SEED)
        elif col:
            col_out = reference.fake_quantize(x, col, col=True, amax=col_amax, seed=SEED)
        out = [buffer(t) for t in (row_out, col_out, data, scale)]
        fp4.fake_fp4(
            on_device(x), row=row, col=col, seed=SEED.to(DEVICE),
            row_amax=to_device(row_amax), col_amax=to_device(col_amax),
            row_out=out[0], col_out=out[1], col_data=out[2], col_scale=out[3],
        )  # fmt: skip
        for actual, expected in zip(out, (row_out, col_out, data, scale), strict=True):
            assert_exact(actual, expected)


def check_amax(
    shape: tuple[int, int],
    dtype: torch.dtype,
    row: Cast | None,
    col: Cast | None,
    plain: bool = False,
) -> None:
    for x in fp4_inputs(shape, dtype, plain):
        expected = amaxes(x, row, col)
        out = [buffer(t) for t in expected]
        fp4.amax_fp4(on_device(x), row=row, col=col, row_amax=out[0], col_amax=out[1])
        assert_exact(out[0], expected[0])
        assert_exact(out[1], expected[1])


def check_empty(shape: tuple[int, int], row: Cast, col: Cast) -> None:
    x = torch.empty(shape, device=DEVICE)
    expected = amaxes(x.cpu(), row, col)
    row_amax, col_amax = (buffer(t) for t in expected)
    fp4.amax_fp4(x, row=row, col=col, row_amax=row_amax, col_amax=col_amax)
    for actual, wanted in zip((row_amax, col_amax), expected, strict=True):
        if wanted is not None and wanted.numel() > 0:
            assert_exact(actual, wanted)
    empty = torch.empty(0, dtype=torch.uint8, device=DEVICE)
    fp4.cast_fp4(
        x, row=row, col=col, row_data=empty, row_scale=empty, row_amax=row_amax,
        col_data=empty, col_scale=empty, col_amax=col_amax, seed=SEED.to(DEVICE),
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pair", MAIN)
def test_cast(pair: str, shape: tuple[int, int]) -> None:
    check_cast(shape, torch.bfloat16, *PAIRS[pair])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", FEW)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("pair", MAIN)
def test_cast_of_other_dtypes(pair: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    check_cast(shape, dtype, *PAIRS[pair])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", FEW)
@pytest.mark.parametrize("pair", OTHERS)
def test_cast_with_other_options(pair: str, shape: tuple[int, int]) -> None:
    check_cast(shape, torch.bfloat16, *PAIRS[pair])


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [(0, 0), (-1, -1), (2**40 + 5, 2**33)])
def test_seeds(seed: tuple[int, int]) -> None:
    check_cast((100, 127), torch.bfloat16, *MAIN["stochastic"], seed=torch.tensor(seed))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*FEW, (17, 1), (300, 4096)])
@pytest.mark.parametrize("pair", MAIN)
def test_fake(pair: str, shape: tuple[int, int]) -> None:
    for keep_col in (False, True):
        check_fake(shape, torch.bfloat16, *PAIRS[pair], keep_col)


@pytest.mark.gpu
@pytest.mark.parametrize("pair", OTHERS)
def test_fake_with_other_options(pair: str) -> None:
    for keep_col in (False, True):
        check_fake((100, 127), torch.bfloat16, *PAIRS[pair], keep_col)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_fake_of_other_dtypes(dtype: torch.dtype) -> None:
    check_fake((100, 127), dtype, *MAIN["stochastic"], keep_col=False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [*SHAPES, (5000, 700)])
@pytest.mark.parametrize("pair", ["plain", "hadamard", "row", "no signs", "scaled", "scaled row"])
def test_amax(pair: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    check_amax(shape, dtype, *PAIRS[pair])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", EMPTY)
@pytest.mark.parametrize("pair", ["plain", "stochastic", "scaled"])
def test_empty(pair: str, shape: tuple[int, int]) -> None:
    row, col = PAIRS[pair]
    assert row is not None and col is not None
    check_empty(shape, row, col)


@pytest.mark.gpu
def test_a_graph_repeats_amax_and_cast() -> None:
    row, col = MAIN["stochastic"]
    assert row is not None and col is not None
    x = torch.randn(256, 512, device=DEVICE, dtype=torch.bfloat16)
    seed = SEED.to(DEVICE)
    data, scale, amax = (buffer(t) for t in reference.quantize(x.cpu(), col, col=True, seed=SEED))
    row_amax = torch.empty(1, device=DEVICE)

    def run() -> None:
        fp4.amax_fp4(x, row=row, col=col, row_amax=row_amax, col_amax=amax)
        fp4.cast_fp4(x, row=None, col=col, col_data=data, col_scale=scale, col_amax=amax, seed=seed)

    run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    x.copy_(torch.randn(256, 512))
    seed.add_(1)
    graph.replay()
    expected = reference.quantize(x.cpu(), col, col=True, seed=SEED + 1)
    for actual, wanted in zip((data, scale, amax), expected, strict=True):
        assert_exact(actual, wanted)


def test_a_transformed_row_copy_is_refused() -> None:
    x = torch.ones(16, 16)
    with pytest.raises(ValueError, match="column copies"):
        fp4.amax_fp4(x, row=HADAMARD, col=None, row_amax=None, col_amax=None)
    with pytest.raises(ValueError, match="column copies"):
        fp4.cast_fp4(x, row=HADAMARD, col=None)


def test_supports_nvfp4_alone() -> None:
    assert all(fp4.supports(cast) for pair in PAIRS.values() for cast in pair if cast)
    assert not fp4.supports(Cast("mxfp8_e4m3"))


def test_interpreted() -> None:
    run_interpreted(__file__)


if __name__ == "__main__":
    # Fewer, larger steps: the interpreter counts them.
    fp4.CONFIGS["light"] = fp4.CONFIGS["heavy"]
    check_cast((100, 127), torch.bfloat16, *PAIRS["stochastic"], plain=True)
    check_cast((128, 128), torch.bfloat16, *PAIRS["hadamard"], plain=True)
    check_cast((17, 1), torch.float16, *PAIRS["tiles"], plain=True)
    check_cast((1, 17), torch.float32, *PAIRS["mse"], plain=True)
    check_fake((19, 40), torch.float32, *PAIRS["hadamard"], plain=True)
    check_amax((130, 70), torch.float32, *PAIRS["hadamard"], plain=True)
    check_amax((17, 70), torch.bfloat16, *PAIRS["scaled"], plain=True)
    for shape in EMPTY:
        check_empty(shape, SCALED, SCALED)
        check_empty(shape, PLAIN, HADAMARD)
