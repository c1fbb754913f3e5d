"""`python -m benchmarks.produced`: casts of what norms and activations produce, beside `copy_`.

A case is timed for an output y `[M, K]` (h is `[M, 2 K]`). Its bytes are what it must read, twice
where a scale needs the whole tensor first, and what it returns.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from minifloat import norms, producers
from minifloat.bench.timing import Call, Timer
from minifloat.formats import Cast
from minifloat.gradients import Given, activation_backward
from minifloat.layout import parts, value_parts
from minifloat.producer import activation

from .run import run

__all__ = ["CASES", "SHAPES", "Produced"]

SHAPES = ((16384, 14336), (16384, 4096), (4096, 4096))
E4M3, E5M2, BLOCKS = Cast("fp8_e4m3"), Cast("fp8_e5m2"), Cast("fp8_e4m3_1x128", pow2=True)
MX = Cast("mxfp8_e4m3")
SWIGLU = activation("swiglu")
Shape = tuple[int, int]


@dataclass(frozen=True)
class Produced:
    """One row of the table: `reads` elements of 2 bytes, and `writes`, per element of y."""

    op: str
    name: str
    direction: str
    reads: int
    writes: Callable[[Shape], int]
    make: Callable[[Tensor], Call]

    @property
    def id(self) -> str:
        return f"{self.op}/{self.name}/{self.direction}"

    def bytes(self, shape: Shape, dtype: torch.dtype = torch.bfloat16) -> int:
        return self.reads * shape[0] * shape[1] * dtype.itemsize + self.writes(shape)

    def call(self, x: Tensor) -> Call:
        return self.make(x)


def _codes(shape: Shape, row: Cast | None, col: Cast | None) -> int:
    return sum(torch.Size(p.shape).numel() * p.dtype.itemsize for p in parts(shape, row, col))


def _values(shape: Shape, row: Cast | None, col: Cast | None, keep: bool = False) -> int:
    described = value_parts(shape, row, col, keep)
    return sum(torch.Size(p.shape).numel() * p.dtype.itemsize for p in described)


def _normal(x: Tensor, columns: int) -> Tensor:
    g = torch.Generator(x.device).manual_seed(1)
    return torch.randn(x.shape[0], columns, device=x.device, generator=g).to(x.dtype)


def _scale(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.full((1,), 50.0, device=x.device), torch.zeros(1, device=x.device)


def _swiglu(x: Tensor) -> producers.Lazy:
    return producers.activated(_normal(x, 2 * x.shape[1]), SWIGLU)


def _rms_norm(x: Tensor) -> producers.Lazy:
    _, rstd = norms.norm_stats(x, 1e-5, rms=True)
    return producers.normalized(x, None, rstd, _normal(x, x.shape[1])[0])


def _value(lazy: Callable[[Tensor], producers.Lazy]) -> Callable[..., Call]:
    return lambda x: lazy(x).value


def _scaled(lazy: Callable[[Tensor], producers.Lazy], row: bool, col: bool) -> Callable[..., Call]:
    def make(x: Tensor) -> Call:
        made, (scale, amax) = lazy(x), _scale(x)
        return lambda: producers.quantize_scaled(made, scale, amax, E4M3, row=row, col=col)

    return make


def _quantized(
    lazy: Callable[[Tensor], producers.Lazy], row: Cast | None, col: Cast | None, known: bool
) -> Callable[..., Call]:
    def make(x: Tensor) -> Call:
        made, amax = lazy(x), torch.full((1,), 9.0, device=x.device) if known else None
        return lambda: producers.quantize(made, row, col, row_amax=amax, col_amax=amax)

    return make


def _emulated(
    lazy: Callable[[Tensor], producers.Lazy], row: Cast | None, col: Cast | None, keep: bool
) -> Callable[..., Call]:
    def make(x: Tensor) -> Call:
        made = lazy(x)
        return lambda: producers.fake_quantize(made, row, col, keep_col=keep)

    return make


def _forward() -> Iterator[Produced]:
    for op, lazy, reads in (("swiglu", _swiglu, 2), ("rmsnorm", _rms_norm, 1)):
        yield Produced(op, "value", "bf16", reads, lambda s: 2 * s[0] * s[1], _value(lazy))
        for direction in ("row", "col", "row+col"):
            row, col = "row" in direction, "col" in direction
            for name, cast in (
                ("delayed", E4M3), ("current", E4M3), ("1x128", BLOCKS), ("mxfp8", MX),
            ):  # fmt: skip
                r, c = cast if row else None, cast if col else None
                known = name == "current" and op == "rmsnorm"  # the statistics bring the amax
                twice = 2 if name == "current" and not known else 1
                make = _quantized(lazy, r, c, known)
                if name == "delayed":
                    make = _scaled(lazy, row, col)
                writes = lambda s, r=r, c=c: _codes(s, r, c)  # noqa: E731
                yield Produced(op, name, direction, twice * reads, writes, make)
            for keep in (False, True) if row and col else (False,):
                r, c = MX if row else None, MX if col else None
                writes = lambda s, r=r, c=c, keep=keep: _values(s, r, c, keep)  # noqa: E731
                name = "mxfp8 values" + ", codes" * keep
                yield Produced(op, name, direction, reads, writes, _emulated(lazy, r, c, keep))


def _backward(name: str, act: bool, sums: bool) -> Produced:
    row, y = {"1x128": (BLOCKS, BLOCKS), "mxfp8": (MX, MX), "mxfp8 values": (MX, MX)}.get(
        name, (E5M2, E4M3)
    )
    as_values = "values" in name

    def writes(s: Shape) -> int:
        size = _values if as_values else _codes
        bias = 4 * s[1] if sums else 0
        return size((s[0], 2 * s[1]), row, row) + act * size(s, None, y) + bias

    def make(x: Tensor) -> Call:
        lazy = producers.activation_gradient(_normal(x, 2 * x.shape[1]), x, SWIGLU)
        scale, amax = _scale(x)
        given = Given(act_amax=torch.full((1,), 9.0, device=x.device))
        if name == "delayed":
            given = Given(scale, amax, scale)
        cast = y if act else None
        return lambda: activation_backward(
            lazy, row, row, cast, given, dbias=sums, as_values=as_values
        )

    direction = "row+col" + "+act" * act + "+dbias" * sums
    return Produced("dswiglu", name, direction, 6 if name == "current" else 3, writes, make)


def _norms() -> Iterator[Produced]:
    def stats(x: Tensor) -> Call:
        return lambda: norms.norm_stats(x, 1e-5, rms=True)

    def amax(x: Tensor) -> Call:
        gamma = _normal(x, x.shape[1])[0]
        return lambda: norms.norm_stats_amax(x, 1e-5, gamma, None, rms=True)

    def backward(add: bool) -> Callable[[Tensor], Call]:
        def make(x: Tensor) -> Call:
            dy, gamma = _normal(x, x.shape[1]), _normal(x, x.shape[1])[0]
            _, rstd = norms.norm_stats(x, 1e-5, rms=True)
            other = dy.clone() if add else None
            return lambda: norms.norm_backward(dy, x, None, rstd, gamma, add=other)

        return make

    yield Produced("rmsnorm", "stats", "rows", 1, lambda s: 4 * s[0], stats)
    yield Produced("rmsnorm", "stats+amax", "rows", 1, lambda s: 4 * s[0], amax)
    yield Produced("rmsnorm", "backward", "dx", 2, lambda s: 2 * s[0] * s[1], backward(False))
    yield Produced("rmsnorm", "backward", "dx+add", 3, lambda s: 2 * s[0] * s[1], backward(True))


CASES: tuple[Produced, ...] = (
    *_forward(),
    *(
        _backward(name, act, sums)
        for name in ("delayed", "current", "1x128", "mxfp8", "mxfp8 values")
        for act, sums in ((False, False), (True, False), (True, True))
    ),
    *_norms(),
)


def main(argv: list[str] | None = None) -> int:
    """0 when every case ran."""
    p = argparse.ArgumentParser(prog="python -m benchmarks.produced", description=__doc__)
    p.add_argument("--filter", default="", help="words of a case's id, e.g. 'swiglu row+col'")
    p.add_argument("--json", type=Path, metavar="PATH", help="write every number here")
    p.add_argument("--quick", action="store_true", help="the first shape, no single directions")
    p.add_argument("--device", default="cuda", help="cpu times the reference: a smoke test")
    args = p.parse_args(argv)
    device = torch.device(args.device)
    cases = [c for c in CASES if all(word in c.id for word in args.filter.split())]
    if args.quick:
        cases = [c for c in cases if c.direction not in ("row", "col")]
    cuda = device.type == "cuda"
    shapes = list(SHAPES[:1] if args.quick else SHAPES) if cuda else [(96, 128)]
    timer = Timer(device, iterations=100 if cuda else 2, seconds=0.5, warmup=10 if cuda else 1)
    result = run(cases, shapes, timer, large=2**31 if cuda else 2**16)  # type: ignore[arg-type]
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 1 if any("error" in row for row in result["rows"]) else 0


if __name__ == "__main__":
    raise SystemExit(main())
