"""Products of values: what codes stand for, multiplied in high precision with fp32 sums.

Values hold their codes exactly (bf16 on CUDA, fp32 elsewhere), block scales applied; what scales
whole operands scales the product. Scales that no bf16 absorbs are applied block by block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import dispatch, reference, scalars
from .alpha import is_scaled, number, scale_of_product
from .formats import HALF, Operand, Scale, cdiv, coded

__all__ = ["compute_dtype", "emulated", "partial_scales", "product", "values"]


def emulated(a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    if partial_scales(a) and partial_scales(b):
        return _by_blocks(a, b, out_dtype, bias)
    dtype = compute_dtype(a, b)
    if not (is_scaled(a) or is_scaled(b)):
        return product(values(a, dtype), values(b, dtype), out_dtype, bias)
    # One rounding to bf16 before the scale keeps the error under twice the plain product's; a
    # wider result is scaled in fp32.
    wide = dtype if out_dtype == dtype else torch.float32
    y = product(values(a, dtype), values(b, dtype), wide, None)
    numbers = [number(o) for o in (a, b)]
    if all(n is not None for n in numbers):
        (sa, fa), (sb, fb) = numbers  # type: ignore[misc]
        out = scalars.rescale(y, sa, sb, fa * fb, out_dtype)
    else:
        out = y if wide == out_dtype else torch.empty_like(y, dtype=out_dtype)
        torch.mul(y, scale_of_product(a, b), out=out)
    return out if bias is None else out.add_(bias)


def partial_scales(o: Operand) -> bool:
    """Scales that no bf16 absorbs: the partial product of each block takes them."""
    fmt = o.cast.format
    return coded(o) and fmt.scale is Scale.F32 and fmt.tile is not None and not o.cast.pow2


def compute_dtype(a: Operand, b: Operand) -> torch.dtype:
    """bf16 holds every format's values exactly; CPUs multiply fp32 faster."""
    if a.data.device.type != "cuda":
        pair = {a.data.dtype, b.data.dtype}
        return pair.pop() if len(pair) == 1 and torch.uint8 not in pair else torch.float32
    plain = [o.data.dtype for o in (a, b) if not coded(o)]
    if any(d is not torch.bfloat16 for d in plain):
        return plain[0] if len(set(plain)) == 1 and len(plain) == 2 else torch.float32
    return torch.bfloat16


def values(o: Operand, dtype: torch.dtype) -> Tensor:
    """Contraction-last values, block scales applied, without what multiplies the product."""
    if not coded(o):
        return o.data.to(dtype)
    fmt = o.cast.format
    assert fmt.element is not None
    if fmt.tile is None:
        return _codes(o).to(dtype)
    if o.data.device.type != "cuda":
        data, scale = (o.data.t(), o.scale.t()) if o.viewed else (o.codes, o.scale)  # type: ignore[union-attr]
        return reference.unscaled(data, scale, o.cast, o.columns, col=o.viewed).to(dtype)
    cast = o.cast.replace(hadamard=-1)  # values stay in the transformed domain
    data, scale = (o.data.t(), o.scale.t()) if o.viewed else (o.data, o.scale)  # type: ignore[union-attr]
    r = o.height
    shape = (o.columns, r) if o.viewed else (r, o.columns)
    made = dispatch.dequantize(data, scale, None, cast, shape, dtype, col=o.viewed)
    return made.t() if o.viewed else made


def _codes(o: Operand) -> Tensor:
    """8-bit codes as PyTorch types them."""
    element = o.cast.format.element
    assert element is not None and element.torch_dtype is not None
    return o.codes.view(element.torch_dtype)


def _by_blocks(a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """`y += (partial * scale_1d) * scale_other` over blocks of the contraction, in fp32."""
    fa, fb = a.cast.format, b.cast.format
    if fa.square and fb.square:
        raise ValueError(
            f"no GEMM multiplies {fa.name} by {fb.name}: one operand must have 1-D blocks"
        )
    assert fa.tile is not None
    dtype = torch.bfloat16 if a.data.device.type == "cuda" else torch.float32
    va = _codes(a).to(dtype)
    vb = _codes(b).to(dtype)
    sa, sb = _row_scales(a), _row_scales(b)
    y = torch.zeros(va.shape[0], vb.shape[0], dtype=torch.float32, device=va.device)
    for i in range(cdiv(a.columns, fa.tile[1])):
        block = slice(i * fa.tile[1], (i + 1) * fa.tile[1])
        partial = product(va[:, block], vb[:, block], torch.float32, None)
        first, second = sa[:, i, None], sb[None, :, i]
        if fa.square:
            first, second = second, first
        y.addcmul_(partial.mul_(first), second)
    if bias is not None:
        y.add_(bias)
    return y.to(out_dtype)


def _row_scales(o: Operand) -> Tensor:
    """fp32 `[R, contraction blocks]`."""
    fmt = o.cast.format
    assert o.scale is not None and fmt.scale_tile is not None
    s = o.scale.t() if fmt.scale_transposed else o.scale
    return s.repeat_interleave(fmt.scale_tile[0], 0)[: o.height]


def product(a: Tensor, b: Tensor, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """`a b^T + bias` of two high-precision matrices of one dtype, accumulated in fp32."""
    if a.dtype != b.dtype:
        wide = torch.promote_types(a.dtype, b.dtype)
        a, b = a.to(wide), b.to(wide)
    if a.is_cuda and a.dtype in HALF and out_dtype != a.dtype:
        y = torch.mm(a, b.t(), out_dtype=torch.float32)  # one rounding, to `out_dtype`
        return (y if bias is None else y + bias).to(out_dtype)
    if a.dtype in HALF and out_dtype is torch.float32:
        a, b = a.float(), b.float()  # or the product would be rounded on its way
    if bias is not None and a.dtype == out_dtype:
        return torch.addmm(bias.to(a.dtype), a, b.t())
    y = torch.mm(a, b.t())
    # A conversion to its own dtype is the same tensor, and to a graph of PyTorch 2.11 two results
    # that are one: the gradient of the second is lost.
    y = y if y.dtype == out_dtype else y.to(out_dtype)
    return y if bias is None else y + bias.to(out_dtype)
