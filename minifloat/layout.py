"""Shapes of what a quantization makes: one description for allocation, fakes, specs and kernels.

Everything here is traced with symbolic sizes, so it reads a cast's shape rules as plain constants
(`Cast.layout`) and computes with `cdiv` and `rup` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .formats import HADAMARD, Cast, cdiv, rup

__all__ = [
    "Part",
    "flatten",
    "pad",
    "part_names",
    "parts",
    "shares_scale",
    "transposed_shape",
    "value_parts",
]


class Part(NamedTuple):
    """One output buffer: `row_data`, `row_scale`, `row_amax`, the same of `col_`, or `scale`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def flatten(shape: Sequence[int]) -> tuple[int, int]:
    """(M, K) of the 2-D view: M is the product of the leading dims."""
    if len(shape) == 0:
        return 1, 1
    m = 1
    for d in shape[:-1]:
        m = m * d
    return m, shape[-1]


def transposed_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """(K, *leading)."""
    return (*shape[-1:], *shape[:-1])


def parts(shape: Sequence[int], row: Cast | None, col: Cast | None) -> list[Part]:
    """The buffers of a quantized tensor of `shape`, in the order every layer uses.

    Row before column; data, scale, amax. Formats with one scale for the tensor end in `scale`.
    """
    out: list[Part] = []
    shared = False
    for prefix, cast in (("row_", row), ("col_", col)):
        if cast is None:
            continue
        is_col = prefix == "col_"
        out.append(Part(prefix + "data", _data_shape(shape, cast, is_col), cast.layout[0]))
        _, _, scale_tile, _, _, _, scale_dtype, two_level, shares, row_scaled, *_ = cast.layout
        shared = shared or shares
        if scale_tile is not None:
            out.append(Part(prefix + "scale", _scale_shape(shape, cast, is_col), scale_dtype))
        if two_level:
            m, k = flatten(shape)
            rows = k if is_col else m
            out.append(Part(prefix + "amax", (rows if row_scaled else 1,), torch.float32))
    if shared:
        out.append(Part("scale", (1,), torch.float32))
    return out


def value_parts(
    shape: Sequence[int], row: Cast | None, col: Cast | None, keep_col: bool
) -> list[Part]:
    """The buffers of a tensor of `shape` in a format that is emulated: bf16 values, then amaxes.

    Values, `row` and `col`, lie as the source does. `keep_col`: the column copy is that of `parts`.
    """
    m, k = flatten(shape)
    out: list[Part] = []
    if row is not None:
        out.append(Part("row", (m, _kept(k, row)), torch.bfloat16))
    if col is not None and keep_col:
        out += [p for p in parts((m, k), None, col) if p.name != "col_amax"]
    elif col is not None:
        out.append(Part("col", (_kept(m, col), k), torch.bfloat16))
    return out + [p for p in parts((m, k), row, col) if p.name.endswith("amax")]


def _kept(c: int, cast: Cast) -> int:
    """Elements along the contraction: a Hadamard tail chunk keeps all its outputs."""
    return rup(c, HADAMARD) if cast.layout[10] else c


def shares_scale(cast: Cast) -> bool:
    """Whether one scale serves the tensor, and both its copies."""
    return bool(cast.layout[8])


def pad(cast: Cast, *sizes: int) -> int:
    """The multiple up to which a cast of a matrix of these sizes writes zeros; 1: none."""
    multiple: int = cast.room[0]
    return 1 if all(n % multiple == 0 for n in sizes) else multiple


def part_names(row: Cast | None, col: Cast | None) -> tuple[str, ...]:
    """Names of `parts`, which do not depend on the shape."""
    return tuple(p.name for p in parts((1, 1), row, col))


def _scale_shape(shape: Sequence[int], cast: Cast, col: bool) -> tuple[int, int]:
    _, _, scale_tile, (pad_r, pad_c), scale_transposed, col_transposed, *_, room = cast.layout
    m, k = flatten(shape)
    r, c = (k, m) if col else (m, k)
    if scale_tile[0] == 1:
        r = rup(r, room[0])
    rows, cols = cdiv(r, scale_tile[0]), cdiv(c, scale_tile[1])
    stored = (cols, rup(rows, pad_r)) if scale_transposed else (rup(rows, pad_r), rup(cols, pad_c))
    first, second = (stored[1], stored[0]) if col and not col_transposed else stored
    return first + room[1], second


def _data_shape(shape: Sequence[int], cast: Cast, col: bool) -> tuple[int, ...]:
    _, per_byte, _, _, _, col_transposed, _, _, _, _, transforms, room = cast.layout
    if room[0] != 1:
        m, k = [rup(n, room[0]) for n in flatten(shape)]
        return (k, m) if col else (m, k)
    if col and not col_transposed:
        return tuple(shape)
    oriented = transposed_shape(shape) if col else tuple(shape)
    if per_byte == 1:
        return oriented
    # Packed along the flattened contraction. The N-D shape of a column copy survives where exact.
    m, k = flatten(shape)
    c = m if col else k
    kept = rup(c, HADAMARD) if transforms else c
    if not col:
        return (*oriented[:-1], cdiv(kept, 2))
    if len(shape) > 2 and not transforms and shape[-2] % 2 == 0:
        return (*oriented[:-1], oriented[-1] // 2)
    return (k, cdiv(kept, 2))
