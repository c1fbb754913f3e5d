"""The inverse of `quantize`, from the stored layout."""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import E4M3, Cast, Scale, cdiv
from .elements import decode, unpack
from .scales import dequantize_factor, e8m0_decode

__all__ = ["dequantize", "unscaled"]


def dequantize(
    data: Tensor,
    scale: Tensor | None,
    amax: Tensor | None,
    cast: Cast,
    shape: tuple[int, int],
    dtype: torch.dtype,
    *,
    col: bool = False,
) -> Tensor:
    """Stored operand -> `[M, K]` of `dtype`: `element * scale` in fp32, then one cast.

    Two-level formats without an amax: under their block scales alone. A Hadamard-transformed copy
    stays in the transformed domain and cannot be returned.
    """
    fmt = cast.format
    if cast.transforms:
        raise ValueError(
            "a Hadamard-transformed column copy holds transformed values; dequantize the row copy"
        )
    if fmt.scale is Scale.NONE:
        return (data.t() if col else data).to(dtype, copy=True)
    c = shape[0] if col else shape[1]
    if fmt.two_level and amax is not None:
        assert scale is not None and fmt.element is not None
        values = decode(unpack(data, c), fmt.element)
        a = amax[:, None] if cast.row_scaled else amax
        sf = _expand(scale, cast, values.shape)
        out = values * (sf * a * dequantize_factor(cast))
    else:
        out = unscaled(data, scale, cast, c, col=col)
    return (out.t() if col else out).to(dtype)


def unscaled(
    data: Tensor, scale: Tensor | None, cast: Cast, c: int, *, col: bool = False
) -> Tensor:
    """fp32 `[R, C]`, contraction last: codes times block scales, without a global amax."""
    fmt = cast.format
    assert scale is not None and fmt.element is not None
    if col and not fmt.col_transposed:
        data, scale = data.t(), scale.t()
    if fmt.element.per_byte == 2:
        data = unpack(data, c)
    values = decode(data.contiguous(), fmt.element)
    if fmt.tile is None:
        return values * scale
    return values * _expand(scale, cast, values.shape)


def _expand(scale: Tensor, cast: Cast, shape: torch.Size) -> Tensor:
    """Stored scale matrix -> one fp32 scale per element of the contraction-last `shape`."""
    fmt = cast.format
    assert fmt.scale_tile is not None
    (r, c), (rows, cols) = fmt.scale_tile, shape
    if fmt.scale_transposed:
        scale = scale.t()
    scale = scale[: cdiv(rows, r), : cdiv(cols, c)]
    if fmt.scale is not Scale.F32:
        scale = e8m0_decode(scale) if fmt.scale is Scale.E8M0 else decode(scale.contiguous(), E4M3)
    return scale.repeat_interleave(r, 0)[:rows].repeat_interleave(c, 1)[:, :cols]
