"""`matmul(a[M, K], b[N, K]) -> [M, N]`: the arithmetic of every pair of formats, in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import Operand, Scale, cdiv, rup
from .dequantize import unscaled
from .elements import decode
from .scales import dequantize_factor

__all__ = ["matmul"]


def matmul(
    a: Operand,
    b: Operand,
    out_dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    accumulate: Tensor | None = None,
) -> Tensor:
    """`a b^T`, both contraction last. Bias is added in fp32; accumulation follows the cast.

    Tensor-wide scales and global amaxes multiply the product; block scales multiply the elements
    (exact for E8M0 and E4M3 scales), except for 128-blocks with fp32 scales, whose partial products
    are scaled: `y = fma(partial * scale_1d, scale_other, y)` per block of the contraction.
    """
    if a.columns != b.columns:
        raise ValueError(
            f"contraction: a has {a.columns} columns and b has {b.columns}; they must agree"
        )
    if _scales_partials(a) and _scales_partials(b):
        y = _block_matmul(a, b)
    else:
        y = (_values(a) @ _values(b).t()) * (_alpha(a) * _alpha(b).t())
    if bias is not None:
        y = y + bias.to(torch.float32)
    y = y.to(out_dtype)
    return y if accumulate is None else accumulate + y.to(accumulate.dtype)


def _scales_partials(o: Operand) -> bool:
    return o.cast.format.scale is Scale.F32 and o.cast.format.tile is not None


def _values(o: Operand) -> Tensor:
    """fp32 elements with their block scales, without what multiplies the whole product."""
    fmt = o.cast.format
    if fmt.scale is Scale.NONE:
        return o.data.to(torch.float32)
    if fmt.tile is None:
        assert fmt.element is not None
        return decode(o.codes, fmt.element)
    return unscaled(o.codes, o.scale, o.cast, o.columns)


def _alpha(o: Operand) -> Tensor:
    """What multiplies the product: shape (1, 1), or (R, 1) when row-scaled."""
    fmt = o.cast.format
    if fmt.two_level:
        assert o.amax is not None
        return (o.amax * dequantize_factor(o.cast)).reshape(-1, 1)
    if fmt.tile is None and o.scale is not None:
        return o.scale.reshape(1, 1)
    return torch.ones(1, 1, device=o.data.device)


def _block_matmul(a: Operand, b: Operand) -> Tensor:
    fa, fb = a.cast.format, b.cast.format
    if fa.square and fb.square:
        raise ValueError(
            f"no GEMM multiplies {fa.name} by {fb.name}: one operand must have 1-D blocks"
        )
    assert fa.element is not None and fb.element is not None
    av, bv = decode(a.codes, fa.element), decode(b.codes, fb.element)
    m, n, k = av.shape[0], bv.shape[0], a.columns
    step = 128 if fa.tile is None else fa.tile[1]
    sa, sb = _row_scales(a, m), _row_scales(b, n)
    y = torch.zeros(m, n, device=av.device)
    for i in range(cdiv(k, step)):
        partial = av[:, i * step : (i + 1) * step] @ bv[:, i * step : (i + 1) * step].t()
        va, vb = sa[:, i, None], sb[None, :, i]
        first, second = (vb, va) if fa.square else (va, vb)
        y = _fma(partial * first, second, y)
    return y


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """`a * b + c` of fp32 numbers with one rounding.

    fp64 holds the product exactly; its sum with c is rounded to odd, which keeps what the second
    rounding, to fp32, has to know.
    """
    p, z = a.double() * b.double(), c.double()
    total = p + z
    t = total - p
    lost = (p - (total - t)) + (z - t)  # what the sum dropped, exactly
    bits = total.view(torch.int64)
    odd = torch.where((lost > 0) == (total > 0), bits + 1, bits - 1)
    inexact = (lost != 0) & (bits & 1 == 0) & total.isfinite()
    return torch.where(inexact, odd, bits).view(torch.float64).float()


def _row_scales(o: Operand, rows: int) -> Tensor:
    """fp32 `[R, contraction blocks]` of a 128-block operand."""
    fmt = o.cast.format
    assert o.scale is not None and fmt.scale_tile is not None
    s = o.scale.t() if fmt.scale_transposed else o.scale
    r, c = fmt.scale_tile
    return s[: cdiv(rows, r), : cdiv(rup(o.columns, c), c)].repeat_interleave(r, 0)[:rows]
