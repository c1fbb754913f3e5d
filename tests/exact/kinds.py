"""The casts that are swept: every format, and every option of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from minifloat.formats import FORMATS, HADAMARD_SIGN_MASK, Cast, Scale

__all__ = ["DEQUANTIZED", "DIRECTIONS", "FAKE", "KINDS", "SCALED", "Kind", "directions"]


class Kind(NamedTuple):
    """The casts of one quantization's two directions; `full` ones are formats without options."""

    name: str
    row: Cast
    col: Cast
    full: bool = False

    @property
    def format_name(self) -> str:
        return self.row.format_name

    @property
    def costly(self) -> bool:
        """Whether its kernels take seconds to compile."""
        return self.row.format.two_level

    @property
    def stochastic(self) -> bool:
        return self.row.stochastic or self.col.stochastic


DIRECTIONS = ("row+col", "row", "col")


def directions(kind: Kind) -> dict[str, tuple[Cast | None, Cast | None]]:
    """The casts (row, col) of what can be asked for, by name."""
    casts = ((kind.row, kind.col), (kind.row, None), (None, kind.col))
    return dict(zip(DIRECTIONS, casts, strict=True))


def _formats() -> Iterator[Kind]:
    for fmt in FORMATS.values():
        if fmt.element is not None:
            yield Kind(fmt.name, Cast(fmt.name), Cast(fmt.name), full=True)


def _options() -> Iterator[Kind]:
    for cast in (
        Cast("fp8_e4m3", pow2=True),
        Cast("fp8_e5m2", eps=0.5),
        Cast("fp8_e4m3_1x128", pow2=True),
        Cast("fp8_e5m2_1x128", eps=0.5),
        Cast("fp8_e4m3_128x128", pow2=True),
        Cast("fp8_e5m2_128x128", eps=0.5, pow2=True),
        Cast("nvfp4", stochastic=True),
        Cast("nvfp4", scale_max=256),
        Cast("nvfp4", row_scaled=True),
        Cast("nvfp4", row_scaled=True, error="MAE", scale_max=256),
        Cast("nvfp4", error="MAE"),
        Cast("nvfp4", error="MSE", scale_max=256),
        Cast("nvfp4_16x16", scale_max=256),
        Cast("nvfp4_16x16", error="MAE"),
        Cast("nvfp4_16x16", error="MSE", scale_max=256),
    ):
        yield Kind(describe(cast), cast, cast)
    plain, rht = Cast("nvfp4"), Cast("nvfp4", hadamard=HADAMARD_SIGN_MASK)
    yield Kind("nvfp4 rht", plain, rht)
    yield Kind("nvfp4 rht unsigned", plain, plain.replace(hadamard=0))
    yield Kind("nvfp4 rht both", rht, rht)


def describe(cast: Cast) -> str:
    """The format and the options that are not the default."""
    plain = Cast(cast.format_name)
    names = [f for f in Cast._fields[1:] if getattr(cast, f) != getattr(plain, f)]
    values = ((n, getattr(cast, n)) for n in names)
    return " ".join((cast.format_name, *(n if v is True else f"{n}={v}" for n, v in values)))


_RANDOM = Cast("nvfp4", stochastic=True)
# What NVFP4 training uses for gradients: random bits for both copies, the transform for one.
RECIPE = Kind("nvfp4 rht+sr", _RANDOM, _RANDOM.replace(hadamard=HADAMARD_SIGN_MASK), full=True)

KINDS: tuple[Kind, ...] = (*_formats(), RECIPE, *_options())
SCALED: tuple[Kind, ...] = tuple(k for k in KINDS if k.full and k.row.format.tile is None)
FAKE: tuple[Kind, ...] = tuple(
    k for k in KINDS if k.row.format.scale in (Scale.E8M0, Scale.E4M3_F32)
)
# Codes do not remember how they were rounded: these are all there is to decode.
DEQUANTIZED: tuple[Kind, ...] = tuple(
    k
    for k in KINDS
    if not (k.stochastic or k.row.transforms or k.col.transforms or k.row.error or k.row.pow2)
    and not k.row.eps
)
