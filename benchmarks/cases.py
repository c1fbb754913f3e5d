"""What is timed: every cast of every format, as data, with the bytes it cannot avoid moving.

A case's bytes are `reads` times the source plus everything it returns, sized by `layout.parts`.
`reads` is 2 where a scale depends on the whole tensor: nothing can be rounded before the last
element has been seen. The second read may be served by a cache; the count says what is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from minifloat import dispatch
from minifloat.formats import FORMATS, HADAMARD_SIGN_MASK, Cast, Format, rup
from minifloat.layout import Part, parts, value_parts

__all__ = ["CASES", "SHAPES", "Call", "Case"]

# The first is 128 MiB in bf16, past any cache; the last fits into one and shows the launch path.
SHAPES = ((8192, 8192), (16384, 4096), (4096, 14336), (2048, 768))
SEED = (1234, 5)  # of stochastic rounding: seed, offset

Call = Callable[[], object]
Shape = tuple[int, int]
Directions = tuple[Cast | None, Cast | None]


def _size(described: list[Part]) -> int:
    return sum(torch.Size(p.shape).numel() * p.dtype.itemsize for p in described)


@dataclass(frozen=True)
class Case:
    """One row of the table. `row` and `col` are the casts of the directions it makes (or reads)."""

    op: str  # a function of `dispatch`
    name: str  # what is cast, and with which options
    row: Cast | None
    col: Cast | None
    reads: int = 1  # of the source
    keep_col: bool = False  # fake_quantize: the column copy is codes, to be saved

    @property
    def direction(self) -> str:
        of_col = "packed" if self.keep_col else "col"
        return "+".join(n for n, c in (("row", self.row), (of_col, self.col)) if c is not None)

    @property
    def id(self) -> str:
        return f"{self.op}/{self.name}/{self.direction}"

    def bytes(self, shape: Shape, dtype: torch.dtype = torch.bfloat16) -> int:
        """The fewest bytes this case moves for a source (or result) `[M, K]` of `dtype`."""
        return _BYTES[self.op](self, shape, dtype)

    def call(self, x: Tensor) -> Call:
        """The timed call for a source `x[M, K]`; what else it reads is made here, untimed."""
        return _CALLS[self.op](self, x)


# ------------------------------------------------------------------------------------------ bytes
def _source(case: Case, shape: Shape, dtype: torch.dtype) -> int:
    return case.reads * shape[0] * shape[1] * dtype.itemsize


def _bytes_quantize(case: Case, shape: Shape, dtype: torch.dtype) -> int:
    return _source(case, shape, dtype) + _size(parts(shape, case.row, case.col))


def _bytes_dequantize(case: Case, shape: Shape, dtype: torch.dtype) -> int:
    stored = parts(shape, case.row, case.col)
    return _size(stored) + shape[0] * shape[1] * dtype.itemsize


def _bytes_fake(case: Case, shape: Shape, dtype: torch.dtype) -> int:
    made = value_parts(shape, case.row, case.col, case.keep_col)
    return _source(case, shape, dtype) + _size(made)


def _bytes_transpose(case: Case, shape: Shape, dtype: torch.dtype) -> int:
    return 2 * shape[0] * shape[1]  # bytes, whatever the source was


def _bytes_swizzle(case: Case, shape: Shape, dtype: torch.dtype) -> int:
    rows, columns = parts(shape, case.row, None)[1].shape
    return rows * columns + rup(rows, 128) * rup(columns, 4)


def _bytes_amax(case: Case, shape: Shape, dtype: torch.dtype) -> int:
    directions = 1 if case.row and case.row.format.shares_scale else len(case.direction.split("+"))
    return _source(case, shape, dtype) + directions * torch.float32.itemsize


_BYTES: dict[str, Callable[[Case, Shape, torch.dtype], int]] = {
    "quantize": _bytes_quantize,
    "quantize_scaled": _bytes_quantize,
    "dequantize": _bytes_dequantize,
    "fake_quantize": _bytes_fake,
    "transpose": _bytes_transpose,
    "swizzle": _bytes_swizzle,
    "amax": _bytes_amax,
}


# ------------------------------------------------------------------------------------------ calls
def _seed(case: Case, x: Tensor) -> Tensor | None:
    stochastic = any(c is not None and c.stochastic for c in (case.row, case.col))
    return torch.tensor(SEED, dtype=torch.int64, device=x.device) if stochastic else None


def _call_quantize(case: Case, x: Tensor) -> Call:
    seed = _seed(case, x)
    return lambda: dispatch.quantize(x, case.row, case.col, seed=seed)


def _call_scaled(case: Case, x: Tensor) -> Call:
    cast = case.row or case.col
    assert cast is not None and cast.format.element is not None
    scale = (cast.format.element.max / x.abs().amax().float()).reshape(1)
    amax = torch.zeros(1, dtype=torch.float32, device=x.device)
    row, col = case.row is not None, case.col is not None
    return lambda: dispatch.quantize_scaled(x, scale, amax, cast, row=row, col=col)


def _call_dequantize(case: Case, x: Tensor) -> Call:
    cast = case.row or case.col
    assert cast is not None
    made = dispatch.quantize(x, case.row, case.col)
    named = {
        p.name.split("_")[-1]: t
        for p, t in zip(parts(x.shape, case.row, case.col), made, strict=True)
    }
    stored = (named["data"], named["scale"], named.get("amax"))
    shape, col = tuple(x.shape), case.col is not None
    return lambda: dispatch.dequantize(*stored, cast, shape, x.dtype, col=col)


def _call_fake(case: Case, x: Tensor) -> Call:
    seed = _seed(case, x)
    keep = case.keep_col
    return lambda: dispatch.fake_quantize(x, case.row, case.col, keep_col=keep, seed=seed)


def _call_transpose(case: Case, x: Tensor) -> Call:
    codes = dispatch.quantize(x, case.row, None)[0]
    return lambda: dispatch.transpose(codes)


def _call_swizzle(case: Case, x: Tensor) -> Call:
    scale = dispatch.quantize(x, case.row, None)[1]
    return lambda: dispatch.swizzle(scale)


def _call_amax(case: Case, x: Tensor) -> Call:
    return lambda: dispatch.amax(x, case.row, case.col)


_CALLS: dict[str, Callable[[Case, Tensor], Call]] = {
    "quantize": _call_quantize,
    "quantize_scaled": _call_scaled,
    "dequantize": _call_dequantize,
    "fake_quantize": _call_fake,
    "transpose": _call_transpose,
    "swizzle": _call_swizzle,
    "amax": _call_amax,
}


# ------------------------------------------------------------------------------------------ table
def _reads(fmt: Format) -> int:
    """Reads of the source a cast needs: 2 where a scale comes from the whole tensor."""
    return 2 if fmt.tile is None or fmt.two_level else 1


def _each_direction(row: Cast, col: Cast | None = None) -> Iterator[Directions]:
    """Row, column, both; the column cast is the row cast unless given."""
    col = col or row
    yield from ((row, None), (None, col), (row, col))


def _named(name: str) -> str:
    """A tensor-wide format is known by how its scale is found."""
    return f"{name} current" if FORMATS[name].tile is None else name


def _quantize() -> Iterator[Case]:
    for fmt in FORMATS.values():
        if fmt.element is None:
            continue
        for row, col in _each_direction(Cast(fmt.name)):
            yield Case("quantize", _named(fmt.name), row, col, _reads(fmt))
            if fmt.tile is None:
                yield Case("quantize_scaled", f"{fmt.name} delayed", row, col)
    # The transform belongs to the column copy alone; random bits to both.
    plain = Cast("nvfp4")
    rht = plain.replace(hadamard=HADAMARD_SIGN_MASK)
    for row, col in _each_direction(plain, rht):
        if col is not None:
            yield Case("quantize", "nvfp4 rht", row, col, 2)
    random = plain.replace(stochastic=True)
    for row, col in _each_direction(random, rht.replace(stochastic=True)):
        yield Case("quantize", "nvfp4 rht+sr", row, col, 2)


def _fake() -> Iterator[Case]:
    for name in ("mxfp8_e4m3", "mxfp8_e4m3_32x32", "nvfp4", "nvfp4_16x16"):
        reads = _reads(FORMATS[name])
        for row, col in _each_direction(Cast(name)):
            yield Case("fake_quantize", name, row, col, reads)
        yield Case("fake_quantize", name, Cast(name), Cast(name), reads, keep_col=True)
    row = Cast("nvfp4", stochastic=True)
    col = row.replace(hadamard=HADAMARD_SIGN_MASK)
    yield Case("fake_quantize", "nvfp4 rht+sr", row, col, 2, keep_col=True)


def _dequantize() -> Iterator[Case]:
    for fmt in FORMATS.values():
        if fmt.element is not None:
            cast = Cast(fmt.name)
            yield Case("dequantize", fmt.name, cast, None, 0)
            yield Case("dequantize", fmt.name, None, cast, 0)


def _others() -> Iterator[Case]:
    fp8, mxfp8, nvfp4 = Cast("fp8_e4m3"), Cast("mxfp8_e4m3"), Cast("nvfp4")
    yield Case("transpose", fp8.format_name, fp8, None, 0)
    yield Case("swizzle", mxfp8.format_name, mxfp8, None, 0)
    yield Case("swizzle", nvfp4.format_name, nvfp4, None, 0)
    yield Case("amax", fp8.format_name, fp8, None)
    yield Case("amax", "nvfp4 rht", nvfp4, nvfp4.replace(hadamard=HADAMARD_SIGN_MASK))


CASES: tuple[Case, ...] = (*_quantize(), *_fake(), *_dequantize(), *_others())
