"""Formats are data: elements, scales, tiles, layouts, limits and hardware support, once.

A format says how a matrix `t[R, C]`, contraction last, is held:

    t ~ data * broadcast(scale)            (times the global scale of a two-level format)

with one amax per `tile` and one stored scale per `scale_tile`. The *column* copy of `t[M, K]` is
the same thing for its transpose: R = K, C = M. Every number that belongs to a format lives here
and nowhere else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch

from .dtypes import DType
from .opaque import Value, register

__all__ = [
    "E2M1",
    "E4M3",
    "E5M2",
    "ELEMENTS",
    "FORMATS",
    "FP32_MAX",
    "HADAMARD",
    "HADAMARD_SIGN_MASK",
    "HALF",
    "HIGH",
    "HIGH_PRECISION",
    "Cast",
    "Element",
    "Format",
    "Operand",
    "Scale",
    "cdiv",
    "coded",
    "find_format",
    "rup",
]

FP32_MAX = torch.finfo(torch.float32).max
HALF = (torch.bfloat16, torch.float16)  # dtypes of results that cuBLASLt rounds itself
HADAMARD = 16  # length of a random Hadamard transform chunk
# Bit i is set where the sign of input i is flipped before the transform:
# [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1].
HADAMARD_SIGN_MASK = 0b1101_0111_1110_1000


def cdiv(a: int, b: int) -> int:
    """ceil(a / b)."""
    return (a + b - 1) // b


def rup(a: int, b: int) -> int:
    """`a` rounded up to a multiple of `b`."""
    return cdiv(a, b) * b


@dataclass(frozen=True)
class Element:
    """A floating-point code: 1 sign bit, `exponent` bits, `mantissa` bits; |decode| <= max."""

    name: str
    dtype: DType
    torch_dtype: torch.dtype | None  # None: PyTorch has no arithmetic type for it
    exponent: int
    mantissa: int
    max: float

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def per_byte(self) -> int:
        return 8 // self.bits

    @property
    def half_ulp(self) -> float:
        """Bound on the relative rounding error of a normal number."""
        return 2.0 ** -(self.mantissa + 1)

    @property
    def tiny(self) -> float:
        """The smallest positive (subnormal) value."""
        return float(2.0 ** (2 - 2 ** (self.exponent - 1) - self.mantissa))


E4M3 = Element("e4m3", DType.kFloat8E4M3, torch.float8_e4m3fn, 4, 3, 448.0)
E5M2 = Element("e5m2", DType.kFloat8E5M2, torch.float8_e5m2, 5, 2, 57344.0)
E2M1 = Element("e2m1", DType.kFloat4E2M1, None, 2, 1, 6.0)
ELEMENTS = {e.dtype: e for e in (E4M3, E5M2, E2M1)}


class Scale(Enum):
    """How a block's scale is stored."""

    NONE = "none"  # high precision: the data is the value
    F32 = "f32"  # decode scale, 1/encode scale
    E8M0 = "e8m0"  # exponent byte, 2**(byte - 127)
    E4M3_F32 = "e4m3_f32"  # E4M3 byte per block, times one fp32 amax per tensor (or row)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self in (Scale.NONE, Scale.F32) else torch.uint8


@dataclass(frozen=True)
class Format:
    """How a contraction-last matrix is held: see the module's equation.

    `scale_pad` rounds the stored scale matrix `[R/scale_tile[0], C/scale_tile[1]]` up;
    `scale_transposed` stores it contraction-block major. `col_transposed` False stores the column
    copy (data and scale) in the orientation of the source instead of contraction-last.
    """

    name: str
    element: Element | None
    scale: Scale
    tile: tuple[int, int] | None = None  # None: the whole tensor
    scale_tile: tuple[int, int] | None = None
    scale_pad: tuple[int, int] = (1, 1)
    scale_transposed: bool = False
    col_transposed: bool = True
    align: int = 1  # the sizes native GEMMs ask for are multiples of it; minifloat pads by itself
    # Compute capabilities [low, high) whose tensor cores multiply the format; None: every device.
    native: tuple[int, int] | None = None
    swizzles: bool = False  # native GEMMs read 128x4-swizzled scales

    @property
    def two_level(self) -> bool:
        return self.scale is Scale.E4M3_F32

    @property
    def has_room(self) -> bool:
        """Whether a cast can write zeros up to what native GEMMs ask for."""
        return self.scale is Scale.F32

    @property
    def shares_scale(self) -> bool:
        """Row and column copies carry the same codes and one scale: col = row transposed."""
        return self.tile is None

    @property
    def square(self) -> bool:
        """Row and column copies carry the same codes: the tile is its own transpose."""
        return self.tile is None or self.tile[0] == self.tile[1]

    def columns(self, c: int, hadamard: bool = False) -> int:
        """Elements kept along the contraction: a Hadamard tail chunk keeps all its outputs."""
        return rup(c, HADAMARD) if hadamard else c

    def scale_shape(self, r: int, c: int) -> tuple[int, int]:
        """Stored scale matrix of a contraction-last `[r, c]` operand."""
        assert self.scale_tile is not None
        rows, cols = cdiv(r, self.scale_tile[0]), cdiv(c, self.scale_tile[1])
        if self.scale_transposed:
            return cols, rup(rows, self.scale_pad[0])
        return rup(rows, self.scale_pad[0]), rup(cols, self.scale_pad[1])


_ANY = 1 << 16  # no upper bound on the compute capability


def _fp8(element: Element) -> tuple[Format, ...]:
    e, tag = element, element.name
    return (
        Format(f"fp8_{tag}", e, Scale.F32, align=16, native=(89, _ANY)),
        Format(
            f"fp8_{tag}_1x128", e, Scale.F32, (1, 128), (1, 128), (4, 1), True,
            align=16, native=(90, 100),
        ),
        Format(
            f"fp8_{tag}_128x128", e, Scale.F32, (128, 128), (128, 128), (1, 4),
            align=16, native=(90, 100),
        ),
        Format(
            f"mxfp8_{tag}", e, Scale.E8M0, (1, 32), (1, 32), (128, 4),
            col_transposed=False, align=32, native=(100, 120), swizzles=True,
        ),
        Format(
            f"mxfp8_{tag}_32x32", e, Scale.E8M0, (32, 32), (1, 32), (128, 4),
            col_transposed=False, align=32, native=(100, 120), swizzles=True,
        ),
    )  # fmt: skip


HIGH_PRECISION = Format("high_precision", None, Scale.NONE)
FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        HIGH_PRECISION,
        *_fp8(E4M3),
        *_fp8(E5M2),
        Format(
            "nvfp4", E2M1, Scale.E4M3_F32, (1, 16), (1, 16), (128, 4),
            align=32, native=(100, _ANY), swizzles=True,
        ),
        Format(
            "nvfp4_16x16", E2M1, Scale.E4M3_F32, (16, 16), (1, 16), (128, 4),
            align=32, native=(100, _ANY), swizzles=True,
        ),
    )
}  # fmt: skip


def find_format(element: Element, scale: Scale, tile: tuple[int, int] | None) -> Format:
    """The format made of these parts; ValueError names what exists."""
    for f in FORMATS.values():
        if f.element is element and f.scale is scale and f.tile == tile:
            return f
    raise ValueError(
        f"no format has element {element.name}, scale {scale.value} and tile {tile}; "
        f"formats: {', '.join(FORMATS)}"
    )


def _layout(fmt: Format, cast: Cast) -> tuple[Any, ...]:
    """Shape rules of a cast, for `layout.parts`; see there for the names."""
    e = fmt.element
    return (
        cast.dtype if e is None else torch.uint8,
        1 if e is None else e.per_byte,
        fmt.scale_tile,
        fmt.scale_pad,
        fmt.scale_transposed,
        fmt.col_transposed,
        fmt.scale.dtype,
        fmt.two_level,
        fmt.scale is Scale.F32 and fmt.tile is None,
        cast.row_scaled,
        cast.hadamard >= 0,
        cast.room,
    )


class Cast(Value):
    """What one quantization does to one direction of a tensor: a format and its options.

    The value that every quantize op takes. `hadamard` is the sign mask of the random Hadamard
    transform along the contraction, or -1 for no transform; `error` is "" or the error norm by
    which 4-over-6 chooses a block's scale; `scale_max` is the largest E4M3 block scale a two-level
    format aims at; `row_scaled` gives each row its own global amax; `dtype` is the high-precision
    dtype to cast to, or None to keep the input's.

    `room` is (pad, spare). Codes, contraction last, are followed by zeros up to multiples of `pad`
    rows and columns, and scales of single rows by zeros for as many: products read them as they
    lie. Scales end with `spare` more rows, which are never read: a graph for any number of rows has
    no buffer of one row then. (1, 0) is none: the buffers of public tensors.
    """

    format_name: str
    pow2: bool
    eps: float
    hadamard: int
    stochastic: bool
    row_scaled: bool
    error: str
    scale_max: int
    dtype: torch.dtype | None
    room: tuple[int, int]
    # Derived: the format; whether a Hadamard transform runs along the contraction; whether scales
    # belong to tiles; the shape rules as plain constants, which traced code can read; and the
    # largest code; the capabilities that multiply it, and the room that their products ask for.
    format: Format
    transforms: bool
    tiled: bool
    layout: tuple[Any, ...]
    limit: float
    native: tuple[int, int]
    pad: int
    _fields = (
        "format_name", "pow2", "eps", "hadamard", "stochastic", "row_scaled", "error",
        "scale_max", "dtype", "room",
    )  # fmt: skip
    _defaults = (False, 0.0, -1, False, False, "", int(E4M3.max), None, (1, 0))

    def _derived(self) -> dict[str, Any]:
        fmt = FORMATS.get(self.format_name)
        if fmt is None:
            raise ValueError(
                f"format_name: got {self.format_name!r}; formats: {', '.join(FORMATS)}"
            )
        self._refuse_nonsense(fmt)
        return {
            "format": fmt,
            "transforms": self.hadamard >= 0,
            "tiled": fmt.tile is not None,
            "layout": _layout(fmt, self),
            "limit": 0.0 if fmt.element is None else fmt.element.max,
            "native": fmt.native or (0, 0),
            "pad": fmt.align if fmt.has_room else 1,
        }

    def _refuse_nonsense(self, fmt: Format) -> None:
        transforms = self.hadamard >= 0
        if not (self.eps >= 0.0 and math.isfinite(self.eps)):
            raise ValueError(f"eps: got {self.eps!r}; it must be finite and >= 0")
        if (self.pow2 or self.eps) and fmt.scale is not Scale.F32:
            raise ValueError(f"pow2, eps: {fmt.name} has no fp32 scales; they belong to fp8")
        if isinstance(self.hadamard, bool) or not -1 <= self.hadamard < 1 << HADAMARD:
            raise ValueError(f"hadamard: got {self.hadamard!r}; a 16-bit sign mask, or -1 for none")
        if self.dtype is not None and fmt.element is not None:
            raise ValueError(
                f"dtype: {fmt.name} has its own element; a dtype is for high precision"
            )
        pad, spare = self.room
        if pad != 1 and not fmt.has_room:
            raise ValueError(f"room: {fmt.name} has no fp32 scales; it belongs to fp8")
        if spare and fmt.tile is None:
            raise ValueError(f"room: {fmt.name} has no rows of scales; they belong to blocks")
        if self.scale_max != E4M3.max and not fmt.two_level:
            raise ValueError(f"scale_max: {fmt.name} has no E4M3 scales; it belongs to nvfp4")
        special = transforms or self.stochastic or self.row_scaled or self.error
        if special and not fmt.two_level:
            raise ValueError(
                f"{fmt.name} takes no Hadamard transform, stochastic rounding, row scaling or "
                "4-over-6; they belong to nvfp4"
            )
        if self.error and (transforms or self.stochastic):
            raise ValueError("4-over-6 excludes the Hadamard transform and stochastic rounding")
        if self.row_scaled and (transforms or self.stochastic or fmt.square):
            raise ValueError(
                "row scaling excludes the Hadamard transform, stochastic rounding and 2-D tiles"
            )
        if (transforms or self.stochastic) and fmt.square:
            raise ValueError("2-D tiles exclude the Hadamard transform and stochastic rounding")
        if self.error not in ("", "MAE", "MSE"):
            raise ValueError(f"error: got {self.error!r}; allowed: '', 'MAE', 'MSE'")
        if self.scale_max not in (256, int(E4M3.max)):
            raise ValueError(f"scale_max: got {self.scale_max}; allowed: 256, {int(E4M3.max)}")


register(
    Cast,
    real=(
        *Cast._fields,
        "format",
        "transforms",
        "tiled",
        "layout",
        "limit",
        "native",
        "pad",
        "_key",
        "__eq__",
        "replace",
    ),
)

HIGH = Cast(HIGH_PRECISION.name)  # the cast that changes nothing


class Operand(NamedTuple):
    """One direction of a quantized matrix, as a GEMM reads it: contraction last.

    `data[R, C]` holds codes (packed two per byte along C for 4 bits), `scale` is in the format's
    stored layout, `amax` is the global amax of a two-level format. Data that is not codes (uint8)
    is values: high precision, or an emulated format's, block scales applied, `amax` not. Codes that
    were cast with room have zeros past `rows` and `columns`, and their scale is as long as they.
    """

    data: torch.Tensor
    scale: torch.Tensor | None
    amax: torch.Tensor | None
    cast: Cast
    columns: int  # logical C: packing and padding hide it
    viewed: bool = False  # data and scale are transposed views of a copy in source orientation
    rows: int | None = None  # logical R where padding hides it; None: data's

    @property
    def height(self) -> int:
        """Logical R."""
        return self.data.shape[0] if self.rows is None else self.rows

    @property
    def codes(self) -> torch.Tensor:
        """`data` without its padding."""
        if self.rows is None:
            return self.data
        per_byte = 1 if self.cast.format.element is None else self.cast.format.element.per_byte
        return self.data[: self.rows, : cdiv(self.columns, per_byte)]


def coded(o: Operand) -> bool:
    """Whether its data is codes, and not values."""
    return o.data.dtype is torch.uint8
