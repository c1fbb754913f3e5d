"""Casts, matrices and parameters that the tests of the reference share."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from minifloat.formats import FORMATS, HADAMARD_SIGN_MASK, Cast, Scale
from minifloat.reference import unpack

# Every format, and every option that rounds to nearest without a transform.
NEAREST = [
    *(Cast(name) for name in FORMATS),
    Cast("fp8_e4m3", pow2=True),
    Cast("fp8_e5m2", eps=0.5),
    Cast("fp8_e4m3_1x128", pow2=True),
    Cast("fp8_e5m2_1x128", eps=0.5),
    Cast("fp8_e4m3_128x128", pow2=True),
    Cast("nvfp4", scale_max=256),
    Cast("nvfp4", row_scaled=True),
    Cast("nvfp4", row_scaled=True, error="MAE", scale_max=256),
    Cast("nvfp4", error="MAE"),
    Cast("nvfp4", error="MSE"),
    Cast("nvfp4", error="MAE", scale_max=256),
    Cast("nvfp4", error="MSE", scale_max=256),
    Cast("nvfp4_16x16", error="MAE"),
    Cast("nvfp4_16x16", error="MSE", scale_max=256),
]
QUANTIZED = [cast for cast in NEAREST if cast.format.element is not None]
TILED = [cast for cast in QUANTIZED if cast.format.tile is not None]
SQUARE = [cast for cast in QUANTIZED if cast.format.square]
RHT = Cast("nvfp4", hadamard=HADAMARD_SIGN_MASK)
STOCHASTIC = Cast("nvfp4", stochastic=True)
RHT_STOCHASTIC = Cast("nvfp4", hadamard=HADAMARD_SIGN_MASK, stochastic=True)
ALL = [*NEAREST, RHT, STOCHASTIC, RHT_STOCHASTIC]


def name(cast: Cast) -> str:
    """A test id: the format and the options that are not the default."""
    plain = Cast(cast.format_name)
    options = [f for f in Cast._fields[1:] if getattr(cast, f) != getattr(plain, f)]
    return "-".join((cast.format_name, *(f"{f}={getattr(cast, f)}" for f in options)))


def matrix(shape: tuple[int, int], seed: int = 0, spread: int = 6, center: int = 0) -> torch.Tensor:
    """fp32 values whose magnitudes vary over 2**(center +- spread), with zeros of both signs."""
    g = torch.Generator().manual_seed(seed)
    powers = torch.randint(center - spread, center + spread + 1, shape, generator=g)
    x = torch.ldexp(torch.randn(shape, generator=g), powers)
    kind = torch.randint(0, 20, shape, generator=g)
    return torch.where(kind == 0, 0.0, torch.where(kind == 1, -0.0, x))


@st.composite
def matrices(draw: st.DrawFn) -> torch.Tensor:
    """Random shapes (most of them partial tiles), centres and spreads."""
    shape = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    seed = draw(st.integers(0, 2**31))
    return matrix(shape, seed, draw(st.integers(0, 20)), draw(st.integers(-60, 60)))


def rows(limit: float = 2.0**100) -> st.SearchStrategy[torch.Tensor]:
    """One row of arbitrary fp32 numbers, subnormal ones too."""
    values = st.floats(-limit, limit, width=32)
    return st.lists(values, min_size=1, max_size=40).map(lambda v: torch.tensor([v]))


def casts(table: list[Cast]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("cast", table, ids=name)


BOTH = pytest.mark.parametrize("col", [False, True], ids=["row", "col"])
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def codes_of(data: torch.Tensor, cast: Cast, c: int, col: bool = False) -> torch.Tensor:
    """Stored data -> one code per element, contraction last."""
    if cast.format.element.per_byte == 2:
        return unpack(data, c)
    return data.t() if col and not cast.format.col_transposed else data


def stored_scale(
    scales: dict[tuple[int, int], float], cast: Cast, shape: tuple[int, int]
) -> np.ndarray:
    """{tile: scale} of a contraction-last matrix in the stored layout: zeros where no tile is."""
    fmt = cast.format
    if fmt.tile is None:
        return np.array([scales[0, 0]], np.float32)
    out = np.zeros(fmt.scale_shape(*shape), np.float32 if fmt.scale is Scale.F32 else np.uint8)
    for (i, j), value in scales.items():
        if fmt.scale_transposed:
            out[j, i] = value
        elif fmt.scale is Scale.F32:
            out[i, j] = value
        else:  # one stored row per row of the matrix, also for 2-D tiles
            out[i * fmt.tile[0] : min((i + 1) * fmt.tile[0], shape[0]), j] = value
    return out


def same(a: tuple[torch.Tensor | None, ...], b: tuple[torch.Tensor | None, ...]) -> bool:
    return len(a) == len(b) and all(
        p is None and q is None or torch.equal(p, q) for p, q in zip(a, b, strict=True)
    )
