"""More than 2**31 elements: whole outputs of the kernels against the reference, piece by piece.

A piece is a band of the operand's rows (of its columns for a column copy). Given the tensor's amax,
bands are independent of each other in every format, and a stored band is a slice of the whole.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest import mock

import torch
from torch import Tensor

from minifloat import dispatch, reference
from minifloat.formats import HADAMARD, Cast, cdiv, rup
from minifloat.layout import part_names

from .checks import seed_of
from .compare import Tally, guarded
from .kinds import Kind

__all__ = ["SHAPE", "copies", "delayed", "moves"]

SHAPE = (47011, 46352)  # 2**31 + 31.5 million, rows that no tile divides
STEP = 2048  # rows of a band: a multiple of every tile and padding


def _source(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Normal numbers; the largest one comes last, where a wrapped index does not see it."""
    g = torch.Generator(device).manual_seed(11)
    x = torch.empty(shape, dtype=dtype, device=device).normal_(generator=g)
    x[-1, -1] = 100.0
    return x


def _bands(length: int, step: int) -> Iterator[tuple[int, int]]:
    for start in range(0, length, step):
        yield start, min(step, length - start)


@contextmanager
def _random_bits_from(start: int, columns: int) -> Iterator[None]:
    """The reference draws the bits of rows from `start` on, in a matrix of `columns` columns."""

    def uniform16(rows: int, width: int, seed: Tensor, stream: int) -> Tensor:
        assert width == columns
        n = torch.arange(rows * (width // 8), device=seed.device) + start * (width // 8)
        mask, zero = 2**32 - 1, torch.zeros_like(n)
        words = reference.philox(
            (n & mask, n >> 32, zero + (seed[1] & mask), zero + stream),
            (zero + (seed[0] & mask), zero + ((seed[0] >> 32) & mask)),
        )
        halves = [h for w in words for h in (w & 0xFFFF, w >> 16)]
        r = torch.stack(halves, dim=-1).reshape(rows, width)
        return (r.to(torch.float32) + 0.5) * 2.0**-16

    # The package's `quantize` is the function of that name, not the module.
    module = sys.modules[f"{reference.__name__}.quantize"]
    with mock.patch.object(module, "uniform16", uniform16):
        yield


class _Stored:
    """How bands of one direction lie in what is stored."""

    def __init__(self, cast: Cast, col: bool, shape: tuple[int, int]) -> None:
        fmt = cast.format
        self.cast, self.col = cast, col
        self.rows, self.columns = (shape[1], shape[0]) if col else shape
        as_source = col and not fmt.col_transposed
        self.data_axis = int(as_source)
        self.scale_axis = int(fmt.scale_transposed) ^ int(as_source)
        self.step = 1 if fmt.scale_tile is None else fmt.scale_tile[0]

    @property
    def prefix(self) -> str:
        return "col_" if self.col else "row_"

    def find(self, out: dict[str, Tensor], name: str) -> Tensor:
        shared = name == "scale" and self.cast.format.shares_scale
        return out[name if shared else self.prefix + name]

    def source(self, x: Tensor, start: int, n: int) -> Tensor:
        return x.narrow(int(self.col), start, n)

    def data(self, out: dict[str, Tensor], start: int, n: int) -> Tensor:
        return self.find(out, "data").narrow(self.data_axis, start, n)

    def scale(self, out: dict[str, Tensor], start: int, n: int) -> Tensor:
        """With the padding, where the band is the last one: then it belongs to the band, too."""
        fmt, t = self.cast.format, self.find(out, "scale")
        if fmt.scale_tile is None:
            return t
        count = fmt.scale_shape(n, self.columns)[int(fmt.scale_transposed)]
        return t.narrow(self.scale_axis, start // self.step, count)

    def amax(self, t: Tensor | None, start: int, n: int) -> Tensor | None:
        return t[start : start + n] if t is not None and self.cast.row_scaled else t

    def bits(self, start: int) -> AbstractContextManager[None]:
        """The random bits of a band are those of its place in the whole."""
        return _random_bits_from(start, rup(self.columns, HADAMARD))


class _Run:
    """One large tensor, the seed of its random bits, and the bands it is looked at in."""

    def __init__(
        self, kind: Kind, device: torch.device, tally: Tally, shape: tuple[int, int], step: int
    ) -> None:
        self.kind, self.tally, self.shape, self.step = kind, tally, shape, step
        self.x = _source(shape, torch.bfloat16, device)
        self.seed = seed_of(kind.row, kind.col, device)
        self.scale = torch.tensor([3.5], device=device)  # of delayed scaling
        self.label = f"large {kind.name} bf16 {shape[0]}x{shape[1]}"
        self.sides = (_Stored(kind.row, False, shape), _Stored(kind.col, True, shape))

    def compare(self, name: str, got: Tensor, want: Tensor) -> None:
        self.tally.compare(self.label, [name], [got], [want])

    def bands(self, s: _Stored) -> Iterator[tuple[int, int]]:
        return _bands(s.rows, self.step)

    def amaxes(self, s: _Stored, got: Tensor) -> None:
        seen = [reference.amax(s.source(self.x, i, n), s.cast, col=s.col) for i, n in self.bands(s)]
        want = torch.cat(seen) if s.cast.row_scaled else torch.stack(seen).amax(0)
        self.compare(s.prefix + "amax", got, want)

    def copies(self, s: _Stored, out: dict[str, Tensor], top: Tensor | None) -> None:
        """Codes and scales, from the source and the tensor's amax."""
        for i, n in self.bands(s):
            part = s.source(self.x, i, n)
            with s.bits(i):
                data, scale, _ = reference.quantize(
                    part, s.cast, col=s.col, amax=s.amax(top, i, n), seed=self.seed
                )
            assert scale is not None
            self.compare(f"{s.prefix}data band {i}", s.data(out, i, n), data)
            self.compare(f"{s.prefix}scale band {i}", s.scale(out, i, n), scale)

    def scaled(self, s: _Stored, out: dict[str, Tensor]) -> None:
        """Codes under a given scale."""
        for i, n in self.bands(s):
            part = s.source(self.x, i, n)
            data, scale, _ = reference.quantize_scaled(part, self.scale, s.cast)
            self.compare(f"{s.prefix}data band {i}", s.data(out, i, n), data.t() if s.col else data)
            self.compare(f"{s.prefix}scale band {i}", s.scale(out, i, n), scale)

    def decoded(self, s: _Stored, out: dict[str, Tensor]) -> None:
        """What the kernel decodes, from the codes it was given."""
        data, scale, amax = s.find(out, "data"), s.find(out, "scale"), out.get(s.prefix + "amax")
        dtype = torch.bfloat16
        with guarded() as guards:
            got = dispatch.dequantize(data, scale, amax, s.cast, self.shape, dtype, col=s.col)
        self.tally.intact(self.label, guards)
        for i, n in self.bands(s):
            band = (self.shape[0], n) if s.col else (n, self.shape[1])
            stored = s.data(out, i, n), s.scale(out, i, n), s.amax(amax, i, n)
            want = reference.dequantize(*stored, s.cast, band, dtype, col=s.col)
            self.compare(f"{s.prefix}values band {i}", s.source(got, i, n), want)

    def emulated(self, s: _Stored, got: Tensor, top: Tensor | None) -> None:
        """bf16 values, from the source and the tensor's amax."""
        for i, n in self.bands(s):
            with s.bits(i):
                want = reference.fake_quantize(
                    s.source(self.x, i, n),
                    s.cast,
                    col=s.col,
                    amax=s.amax(top, i, n),
                    seed=self.seed,
                )
            self.compare(f"{s.prefix}bf16 band {i}", s.source(got, i, n), want)


def copies(
    kind: Kind,
    device: torch.device,
    tally: Tally,
    *,
    emulated: bool = False,
    shape: tuple[int, int] = SHAPE,
    step: int = STEP,
) -> None:
    """Both copies of one large tensor, what they decode to, and (emulated) their bf16 values."""
    run = _Run(kind, device, tally, shape, step)
    row, col = kind.row, kind.col
    tops: list[Tensor] = []
    with guarded() as guards:
        made = dispatch.quantize(run.x, row, col, seed=run.seed)
        if row.format.two_level or row.format.shares_scale:
            tops = dispatch.amax(run.x, row, col)
    tally.cases += 1
    out = dict(zip(part_names(row, col), made, strict=True))
    for s, top in zip(run.sides, (tops[0], tops[-1]) if tops else (None, None), strict=True):
        if top is not None:
            run.amaxes(s, top)
        run.copies(s, out, top)
        if not s.cast.transforms:
            run.decoded(s, out)
        tally.finish()
    tally.intact(run.label, guards)
    del out, made, guards
    if emulated:
        tally.cases += 1
        run.label = f"{run.label} fake"
        with guarded() as guards:
            made = dispatch.fake_quantize(run.x, row, col, keep_col=False, seed=run.seed)
        tally.intact(run.label, guards)
        tops = made[2:]
        for s, got, top in zip(run.sides, made[:2], tops or (None, None), strict=True):
            run.emulated(s, got, top)
    tally.finish()


def delayed(
    kind: Kind,
    device: torch.device,
    tally: Tally,
    *,
    shape: tuple[int, int] = SHAPE,
    step: int = STEP,
) -> None:
    """Both copies of one large tensor under a given scale, and its amax."""
    run = _Run(kind, device, tally, shape, step)
    run.label = f"{run.label} delayed"
    seen = torch.zeros(1, device=device)
    with guarded() as guards:
        made = dispatch.quantize_scaled(run.x, run.scale, seen, kind.row, row=True, col=True)
    tally.cases += 1
    out = dict(zip(part_names(kind.row, kind.col), made, strict=True))
    run.amaxes(run.sides[0], seen)
    for s in run.sides:
        run.scaled(s, out)
    tally.intact(run.label, guards)
    tally.finish()


def moves(
    device: torch.device,
    tally: Tally,
    *,
    shape: tuple[int, int] = SHAPE,
    step: int = STEP,
) -> None:
    """Transpose and swizzle of one large byte matrix."""
    g = torch.Generator(device).manual_seed(12)
    x = torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=g)
    sides: dict[str, Callable[[Tensor], Tensor]] = {
        "transpose": dispatch.transpose,
        "swizzle": dispatch.swizzle,
    }
    for name, op in sides.items():
        tally.cases += 1
        label = f"large {name} {shape[0]}x{shape[1]}"
        with guarded() as guards:
            got = op(x)
        tally.intact(label, guards)
        if name == "transpose":
            for i, n in _bands(shape[1], step):
                tally.compare(label, [f"band {i}"], [got[i : i + n]], [x[:, i : i + n].t()])
        else:
            for i, n in _bands(shape[0], step):
                want = reference.swizzle(x[i : i + n])
                kept = cdiv(n, 128) * 128
                tally.compare(label, [f"band {i}"], [got[i : i + kept]], [want])
        tally.finish()
