"""Matrices to quantize: shapes, memory layouts and values that kernels get wrong.

Everything is made from a fixed seed. A label names what a tensor is, for the report.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from minifloat.formats import E2M1, E4M3, Cast

__all__ = [
    "BROAD",
    "DTYPES",
    "NARROW",
    "PAIRS",
    "RING",
    "WHOLE",
    "Input",
    "layouts",
    "matrix",
    "shaped",
    "specials",
]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZES = (1, 17, 100, 127, 129, 4096)
# Triton compiles a kernel anew for sizes that are 1, multiples of 16, or neither: the pairs need
# nine versions of each. (144, 272) is one more: multiples of 16 that whole tiles do not cover.
PAIRS = (*((m, k) for m in SIZES for k in SIZES), (144, 272))
# Every size in both places, and the largest with itself.
RING = (*zip(SIZES, (*SIZES[1:], SIZES[0]), strict=True), (4096, 4096))
BROAD = ((129, 100), (4096, 129), (100, 4096), (4096, 4096))  # four of the versions
WHOLE = ((129, 100), (4096, 4096))  # two: partial and whole tiles
NARROW = ((129, 100), (17, 123))  # one
PLACE = (129, 100)  # where values and layouts are varied: partial tiles both ways


class Input(NamedTuple):
    """A tensor to be: what it is, and how to make it."""

    label: str
    make: Callable[[torch.dtype, torch.device], Tensor]


@lru_cache(maxsize=256)
def matrix(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int = 0
) -> Tensor:
    """Values whose magnitudes vary over 2**+-6, with zeros of both signs. Not to be written to."""
    g = torch.Generator(device).manual_seed(seed + 31 * sum(shape))
    powers = torch.randint(-6, 7, shape, generator=g, device=device)
    x = torch.ldexp(torch.randn(shape, generator=g, device=device), powers)
    kind = torch.randint(0, 20, shape, generator=g, device=device)
    x = torch.where(kind == 0, 0.0, torch.where(kind == 1, -0.0, x))
    return x.to(dtype)


def shaped(shapes: tuple[tuple[int, int], ...]) -> Iterator[Input]:
    """Contiguous matrices."""
    for m, k in shapes:
        yield Input(f"{m}x{k}", lambda dt, dev, s=(m, k): matrix(s, dt, dev))


# ---------------------------------------------------------------------------------------- layouts
def layouts(tiled: bool, *, every: bool) -> Iterator[Input]:
    """The same kind of values behind strides, offsets and other numbers of dimensions.

    `every`: those too that need a version of the kernel of their own.
    """
    m, k = PLACE
    ways: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
        "strided rows": ((m, k + 13), lambda t: t[:, :k]),
        "every other row": ((2 * m, k), lambda t: t[::2]),
        "transposed": ((k, m), lambda t: t.t()),
        "every other column": ((m, 2 * k), lambda t: t[:, ::2]),
        "3-D": ((3, 43, k), lambda t: t),
        "3-D, even": ((3, 44, k), lambda t: t),
        "3-D, permuted": ((43, 3, k), lambda t: t.transpose(0, 1)),
        "4-D, strided": ((2, 3, 21, k + 13), lambda t: t[..., :k]),
        "no rows": ((0, k), lambda t: t),
        "no columns": ((m, 0), lambda t: t),
    }
    if every:
        ways |= {
            "strided rows, aligned": ((m, 256), lambda t: t[:, :k]),
            "misaligned": ((m, k + 1), lambda t: t[:, 1:]),
            "one column": ((m, k), lambda t: t[:, 3:4]),
            "expanded rows": ((1, k), lambda t: t.expand(m, k)),
            "1-D": ((k,), lambda t: t),
        }
    if every and not tiled:
        ways["0-D"] = ((), lambda t: t)
    for label, (shape, view) in ways.items():
        yield Input(label, lambda dt, dev, s=shape, v=view: v(matrix(s, dt, dev)))


# --------------------------------------------------------------------------------------- specials
def specials(cast: Cast) -> Iterator[Input]:
    """NaN, infinities, zeros, the very large and small, and numbers halfway between two codes."""
    for label, value in {
        "zeros": 0.0,
        "negative zeros": -0.0,
        "all 1e-30": 1e-30,
        "all 1e30": 1e30,
        "all NaN": math.nan,
        "all Inf": math.inf,
        "all -Inf": -math.inf,
    }.items():
        yield Input(label, lambda dt, dev, v=value: torch.full(PLACE, v, device=dev).to(dt))
    yield Input("all subnormal", _subnormal)
    yield Input("all largest", _largest)
    for label, value in {"one NaN": math.nan, "one -NaN": -math.nan, "one Inf": math.inf}.items():
        yield Input(label, lambda dt, dev, v=value: _one(v, dt, dev))
    yield Input("blocks of specials", lambda dt, dev: _blocks(dt, dev, finite=False))
    yield Input("blocks of extremes", lambda dt, dev: _blocks(dt, dev, finite=True))
    yield Input("ties", lambda dt, dev: _ties(cast, dt, dev))


def _subnormal(dtype: torch.dtype, device: torch.device) -> Tensor:
    tiny = torch.finfo(dtype).smallest_normal
    return (matrix(PLACE, torch.float32, device).sign() * tiny * 0.375).to(dtype)


def _largest(dtype: torch.dtype, device: torch.device) -> Tensor:
    return (matrix(PLACE, torch.float32, device).sign() * torch.finfo(dtype).max).to(dtype)


def _one(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    x = matrix(PLACE, dtype, device).clone()
    x[70, 41] = value
    return x


def _blocks(dtype: torch.dtype, device: torch.device, *, finite: bool) -> Tensor:
    """Special values alone, and in blocks of 16 rows by 16 columns that are nothing else."""
    info = torch.finfo(dtype)
    values = [0.0, -0.0, 1e-30, -1e-30, info.smallest_normal / 4, -info.smallest_normal / 2]
    values += [info.max, -info.max, info.tiny] if dtype is torch.float16 else [1e30, -1e30, 1e-38]
    if not finite:
        values += [math.nan, math.inf, -math.inf, -math.nan]
    x = matrix(PLACE, dtype, device).clone()
    for i, value in enumerate(values):
        x[(i * 7) % 64, (i * 11) % 48] = value  # alone
        row, column = 64 + 16 * (i // 6), 16 * (i % 6)
        x[row : row + 16, column : column + 16] = value
    return x


def _ties(cast: Cast, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Scales that are powers of two, and values on and halfway between the codes they lead to."""
    g = torch.Generator(device).manual_seed(7)
    m, k = PLACE
    tile = torch.randint(-2, 3, (m // 16 + 1, k // 16 + 1), generator=g, device=device)
    power = tile.repeat_interleave(16, 0)[:m].repeat_interleave(16, 1)[:, :k]
    if cast.format.two_level:
        # A block with amax 6 * 2**j has the scale 2**j if the tensor's amax is 6 * scale_max.
        x = torch.randint(-24, 25, PLACE, generator=g, device=device) / 4.0
        x[::16, ::16] = x[15::16, ::16] = E2M1.max
        x = torch.ldexp(x, power)
        x[0, 0] = E2M1.max * cast.scale_max
        return x.to(dtype)
    # 7 * 2**8 divides the largest E4M3 and E5M2 numbers, 7 * 2**6 and 7 * 2**13, exactly.
    x = torch.randint(-127, 128, PLACE, generator=g, device=device).float()
    x = torch.ldexp(x, torch.randint(-12, 4, PLACE, generator=g, device=device))
    x[::16, ::16] = 4 * E4M3.max
    return x.to(dtype)
