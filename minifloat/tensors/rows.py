"""Rows of quantized tensors: where they lie in each buffer, and which of them can be cut out.

The rows of a tensor of shape (d0, ..., K) are those of its 2-D view `[M, K]`. A format ties rows
together: only whole blocks can be taken out of a copy without changing its codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn.functional import pad

from ..formats import Cast, cdiv
from ..layout import flatten, parts

if TYPE_CHECKING:
    from .storage import QuantizedTensorStorage

__all__ = ["block_rows", "cut", "padded_scale", "stripped_scale"]


def block_rows(cast: Cast, col: bool) -> int:
    """Rows of the tensor that one block of this copy spans; 1 where any row stands alone."""
    tile = cast.format.tile
    return 1 if tile is None else tile[1 if col else 0]


def _scale_axis(cast: Cast, col: bool) -> tuple[int, int]:
    """(axis of the stored scale matrix along which the tensor's rows run, rows per entry)."""
    fmt = cast.format
    assert fmt.scale_tile is not None
    # Contraction-last, rows run along axis 0 of a row copy and axis 1 of a column copy; either
    # way of storing the transpose swaps that.
    swaps = fmt.scale_transposed ^ (col and not fmt.col_transposed)
    return (1 if col else 0) ^ swaps, fmt.scale_tile[1 if col else 0]


def _real_scale_shape(shape: Sequence[int], cast: Cast, col: bool) -> tuple[int, int]:
    """Shape of the stored scale matrix without its padding."""
    fmt = cast.format
    assert fmt.scale_tile is not None
    m, k = flatten(shape)
    r, c = (k, m) if col else (m, k)
    real = cdiv(r, fmt.scale_tile[0]), cdiv(c, fmt.scale_tile[1])
    swaps = fmt.scale_transposed ^ (col and not fmt.col_transposed)
    return (real[1], real[0]) if swaps else real


def stripped_scale(scale: Tensor, shape: Sequence[int], cast: Cast, col: bool) -> Tensor:
    """The stored scale matrix of a tensor of `shape`, contiguous, without its padding."""
    rows, cols = _real_scale_shape(shape, cast, col)
    return scale[:rows, :cols].contiguous()


def padded_scale(scale: Tensor, shape: Sequence[int], cast: Cast, col: bool) -> Tensor:
    """The inverse of `stripped_scale`: zeros fill the padding."""
    (described,) = (p for p in parts(shape, *_one(cast, col)) if p.name.endswith("_scale"))
    rows, cols = described.shape
    return pad(scale, (0, cols - scale.shape[1], 0, rows - scale.shape[0])).contiguous()


def _one(cast: Cast, col: bool) -> tuple[Cast | None, Cast | None]:
    return (None, cast) if col else (cast, None)


def cut(storage: QuantizedTensorStorage, start: int, end: int) -> dict[str, Any] | None:
    """Buffers of `storage[start:end]` along its first dim; None where a block would be cut.

    Data, and what serves the whole tensor (its scale, its amax), stays shared; block scales are
    copied where their padding has to move.
    """
    shape = tuple(storage.shape)
    m, _ = flatten(shape)
    inner = 1 if len(shape) < 2 else m // max(shape[0], 1)
    first, last = start * inner, end * inner
    size = (end - start, *shape[1:])
    out: dict[str, Any] = {}
    for buffer in storage._INNER:
        t = getattr(storage, buffer.attr)
        out[buffer.attr] = t
        if t is None or buffer.usage == "both":
            continue
        col = buffer.usage == "col"
        cast = storage._cast(col)
        block = block_rows(cast, col)
        whole = first % block == 0 and (last % block == 0 or last == m)
        if not whole or storage._with_gemm_swizzled_scales:
            return None
        if len(shape) < 2 and cast.format.tile is not None:
            return None  # the only dim is the contraction: its blocks lie across it
        kind = buffer.part[4:]
        if kind == "data":
            out[buffer.attr] = _cut_data(t, shape, cast, col, (start, end))
        elif kind == "scale":
            axis, step = _scale_axis(cast, col)
            real = stripped_scale(t, shape, cast, col)
            taken = real.narrow(axis, first // step, cdiv(last, step) - first // step)
            out[buffer.attr] = padded_scale(taken, size, cast, col)
        elif cast.row_scaled and not col:
            out[buffer.attr] = t[first:last]
    return out


def _cut_data(
    data: Tensor, shape: tuple[int, ...], cast: Cast, col: bool, span: tuple[int, int]
) -> Tensor:
    start, end = span
    if len(shape) < 2 or not (col and cast.format.col_transposed):
        return data.narrow(0, start, end - start)
    if data.dim() > 2:  # (K, d0, ...)
        return data.narrow(1, start, end - start)
    element = cast.format.element
    per = 1 if element is None else element.per_byte
    inner = flatten(shape)[0] // max(shape[0], 1)
    first, last = start * inner // per, cdiv(end * inner, per)
    if end == shape[0]:
        last = data.shape[1]  # a transformed tail chunk keeps all its outputs
    return data.narrow(1, first, last - first)
