"""One product, `gemm(a[M, K], b[N, K]) -> [M, N]`, and the table of what multiplies which pair.

A pair of formats is *native* where PyTorch's scaled matmul takes its codes on the device at hand.
Every other pair is emulated: codes become values that hold them exactly (bf16 on CUDA, fp32
elsewhere), a high-precision product with fp32 accumulation multiplies those, and what scales whole
operands scales the product. High precision is a format like any other: its codes are its values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from . import dispatch, env, library, reference, scalars
from .formats import E4M3, Cast, Format, Operand, Scale, cdiv, rup

__all__ = ["Backend", "backend", "gemm", "is_native", "values"]

Native = Callable[[Operand, Operand, torch.dtype, Tensor | None, bool], Tensor]
HALF = (torch.bfloat16, torch.float16)


class Backend(NamedTuple):
    """What multiplies a pair of formats, and why."""

    name: str  # "native", "emulated", "cpu"
    why: str


def backend(a: Cast, b: Cast, device: torch.device) -> Backend:
    """The row of the table for casts `a` and `b` on `device`."""
    fa, fb = a.format, b.format
    if fa.element is None and fb.element is None:
        return Backend("native", "PyTorch multiplies high precision on every device")
    if device.type != "cuda":
        return Backend("cpu", "decoded operands, fp32 products: the formats' arithmetic")
    sm = f"sm_{env.capability(device)}"
    if _native(a, b, device) is not None:
        return Backend("native", f"{sm} tensor cores multiply {fa.name} by {fb.name}")
    why = f"{sm} has no tensor cores for {fa.name} by {fb.name}"
    need = _need(fa) if fa is fb else None
    return Backend("emulated", why + (f" ({need})" if need else "") + "; exact in high precision")


def _need(fmt: Format) -> str | None:
    if fmt.native is None:
        return None
    low, high = fmt.native
    return f"sm_{low}" + (f" to below sm_{high}" if high < 1 << 15 else " or later")


def is_native(cast: Cast, device: torch.device) -> bool:
    """Whether `device` has tensor cores for `cast`'s format at all. Traced code asks this."""
    capability = env.capability(device) if device.type == "cuda" else None
    return capability is not None and cast.native[0] <= capability < cast.native[1]


# ---------------------------------------------------------------------------------------- the front
def gemm(  # noqa: PLR0913  (what a product takes along)
    a: Operand,
    b: Operand,
    out_dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    fast: bool = False,
    alpha: float = 1.0,
    add: Tensor | None = None,
    in_place: bool = False,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """`alpha a b^T + bias + add`, any sizes, zero included.

    `fast` lets FP8 tensor cores keep their short accumulator. With `out` (fp32 or bf16) the result
    is stored there, or added to it in its dtype.

    `add[M, N]` has `out_dtype`; with `in_place` its memory is the result's, but in a graph, whose
    compiler decides on memory. A product of values of `out_dtype` takes alpha and `add` on its way:
    all of it is rounded once. Any other is made first, rounded to `out_dtype` (or, emulated, before
    it is scaled), and `add` joins in one more pass. alpha joins the scale of a whole operand where
    there is one, else that pass.
    """
    if out is not None:
        y = gemm(a, b, out.dtype, bias=bias, fast=fast, alpha=1.0 if accumulate else alpha)
        return out.add_(y, alpha=alpha) if accumulate else out.copy_(y)
    alone = add is None and alpha == 1.0
    if not library.traced():
        _check(a, b)
        if alone:
            return _gemm(a, b, out_dtype, bias, fast)
        return _joined(a, b, out_dtype, bias, fast, alpha, add, in_place)
    if not (_coded(a) or _coded(b)) and a.amax is None and b.amax is None:
        if alone:
            return _product(a.data, b.data, out_dtype, bias)  # plain aten, which Inductor owns
        return _joined_product(a.data, b.data, out_dtype, bias, alpha, add, False)
    more = () if alone else (alpha, add)
    return library.op("gemm")(*_flat(a), *_flat(b), out_dtype, bias, fast, *more)  # type: ignore[no-any-return]


def _check(a: Operand, b: Operand) -> None:
    if a.columns != b.columns:
        raise ValueError(
            f"contraction: a has {a.columns} columns and b has {b.columns}; they must agree"
        )


def _gemm(
    a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None, fast: bool
) -> Tensor:
    native = _find(a, b)
    if native is None:
        return _emulated(a, b, out_dtype, bias)
    if a.data.numel() == 0 or b.data.numel() == 0:
        return _product(values(a, torch.bfloat16), values(b, torch.bfloat16), out_dtype, bias)
    return native(a, b, out_dtype, bias, fast)


_FOUND: dict[tuple[int, int, torch.device], Native | None] = {}


def _find(a: Operand, b: Operand) -> Native | None:
    """What multiplies the codes of a and b, if they are codes and anything does; remembered."""
    if not (a.data.is_cuda and _coded(a) and _coded(b)):
        return None
    device = a.data.device
    key = (id(a.cast), id(b.cast), device)  # casts are interned
    if key not in _FOUND:
        _FOUND[key] = _native(a.cast, b.cast, device)
    return _FOUND[key]


def _coded(o: Operand) -> bool:
    return o.data.dtype is torch.uint8


# ------------------------------------------------------------------------------------------- native
def _native(a: Cast, b: Cast, device: torch.device) -> Native | None:
    """The function of the table that multiplies codes of `a` and `b` on `device`, if one does."""
    fa, fb = a.format, b.format
    if device.type != "cuda" or not (is_native(a, device) and is_native(b, device)):
        return None
    e4m3 = (fa.element is E4M3, fb.element is E4M3)
    if fa.scale is Scale.F32 and not (any(e4m3) if fa.tile is None else all(e4m3)):
        return None  # cuBLASLt multiplies no E5M2 by E5M2, and none with scales per block
    if fa.scale is not fb.scale or a.row_scaled or b.row_scaled:
        return None
    return _NATIVE.get((fa.scale, fa.tile, fb.tile))


def _tensorwise(
    a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None, fast: bool
) -> Tensor:
    assert a.scale is not None and b.scale is not None
    m, n = a.height, b.height
    x, w = _padded(a, 1, 16), _padded(b, 16, 16)
    if x.shape[0] != m:
        x = x[:m]  # what it has room for is not needed, and would be in the result
    fused = bias is not None and n % 16 == 0 and out_dtype in HALF
    y = torch._scaled_mm(
        x,
        w.t(),
        scale_a=a.scale,
        scale_b=b.scale,
        bias=bias.to(out_dtype) if fused else None,  # type: ignore[union-attr]
        out_dtype=out_dtype,
        use_fast_accum=fast,
    )
    return _finish(y, m, n, None if fused else bias)


def _blockwise(
    a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None, fast: bool
) -> Tensor:
    m, n = a.height, b.height
    (x, sa), (w, sb) = _block_operand(a, 4), _block_operand(b, 16)
    dtype = out_dtype if out_dtype in HALF else torch.float32
    fused = bias is not None and w.shape[0] == n and out_dtype in HALF
    # These products always promote their partial sums: `fast` has no meaning for them.
    y = _scaled_mm_v2(x, w, [sa], [_SCALING[a.cast.format.tile]], [sb],
                      [_SCALING[b.cast.format.tile]], [], dtype,
                      bias.to(out_dtype) if fused else None)  # type: ignore[union-attr]  # fmt: skip
    return _finish(y, m, n, None if fused else bias)


def _block_operand(o: Operand, rows: int) -> tuple[Tensor, Tensor]:
    """Padded codes, and scales as cuBLASLt reads them: block-contraction major.

    Blocks need not be whole: H200, every pair, sizes of 16, 144 and 272.
    """
    fmt = o.cast.format
    assert o.scale is not None
    data = _padded(o, rows, 16)
    scale = o.scale[: fmt.scale_shape(o.height, o.columns)[0]]  # there may be a spare row
    if not fmt.scale_transposed:
        return data, scale.t()
    r = data.shape[0]
    if scale.shape[1] != r:  # stored with rows rounded to 4; zeros there, times zero codes
        scale = torch.nn.functional.pad(scale[:, : o.height], (0, r - o.height))
    return data, scale.t()


def _microscaled(
    a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None, fast: bool
) -> Tensor:
    m, n = a.height, b.height
    x, w = _padded(a, 1, 32), _padded(b, 16, 32)
    scales, recipe = [], [ScalingType.BlockWise1x32]
    for o in (a, b):
        scales.append([_swizzled(o, 32).view(torch.float8_e8m0fnu)])
    dtype = out_dtype if out_dtype in HALF else torch.float32
    swizzle = [SwizzleType.SWIZZLE_32_4_4]
    y = _scaled_mm_v2(x, w, scales[0], recipe, scales[1], recipe, swizzle, dtype)
    return _finish(y, m, n, bias)


def _two_level(
    a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None, fast: bool
) -> Tensor:
    m, n = a.height, b.height
    x, w = _padded(a, 1, 32), _padded(b, 16, 32)
    scales, recipe = [], [ScalingType.BlockWise1x16, ScalingType.TensorWise]
    for o in (a, b):
        block = _swizzled(o, 16).view(torch.float8_e4m3fn)
        alpha = _alpha(o)
        assert alpha is not None
        scales.append([block, alpha.reshape(1)])
    dtype = out_dtype if out_dtype in HALF else torch.float32
    swizzle = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]
    y = _scaled_mm_v2(x, w, scales[0], recipe, scales[1], recipe, swizzle, dtype)
    return _finish(y, m, n, bias)


_SCALING: dict[Any, ScalingType] = {
    (1, 128): ScalingType.BlockWise1x128,
    (128, 128): ScalingType.BlockWise128x128,
}
_NATIVE: dict[tuple[Scale, Any, Any], Native] = {
    (Scale.F32, None, None): _tensorwise,
    (Scale.F32, (1, 128), (1, 128)): _blockwise,
    (Scale.F32, (1, 128), (128, 128)): _blockwise,
    (Scale.F32, (128, 128), (1, 128)): _blockwise,
    **{(Scale.E8M0, a, b): _microscaled for a in ((1, 32), (32, 32)) for b in ((1, 32), (32, 32))},
    **{
        (Scale.E4M3_F32, a, b): _two_level for a in ((1, 16), (16, 16)) for b in ((1, 16), (16, 16))
    },
}


def _scaled_mm_v2(  # noqa: PLR0913  (PyTorch's own)
    x: Tensor,
    w: Tensor,
    scale_a: list[Tensor],
    recipe_a: list[ScalingType],
    scale_b: list[Tensor],
    recipe_b: list[ScalingType],
    swizzle: list[SwizzleType],
    dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """`F.scaled_mm`, less 2.5 us of argument handling."""
    order = [s.value for s in swizzle]
    return torch._scaled_mm_v2(
        x, w.t(), scale_a, [r.value for r in recipe_a], order,
        scale_b, [r.value for r in recipe_b], order, bias, dtype, [], False,
    )  # fmt: skip


def _padded(o: Operand, rows: int, columns: int) -> Tensor:
    """Codes of `o`, as PyTorch types them, followed by zeros up to multiples of these.

    A cast with room has made them so, and rows to spare. Public tensors are copied.
    """
    element = o.cast.format.element
    assert element is not None
    data = o.data if not o.viewed else dispatch.transpose(o.data.t())
    c = rup(o.columns, columns) // element.per_byte
    if data.shape[1] != c or data.shape[0] % rows:
        codes = o.codes if not o.viewed else data
        r = rup(codes.shape[0], rows)
        data = torch.nn.functional.pad(codes, (0, c - codes.shape[1], 0, r - codes.shape[0]))
    return data.view(element.torch_dtype or torch.float4_e2m1fn_x2)


def _swizzled(o: Operand, block: int) -> Tensor:
    """Scale bytes in 128x4 tiles, the valid ones followed by zeros."""
    assert o.scale is not None
    return dispatch.swizzle(o.scale[: o.height, : cdiv(o.columns, block)])


def _finish(y: Tensor, m: int, n: int, bias: Tensor | None) -> Tensor:
    if y.shape[1] != n:
        y = y[:m, :n].contiguous()
    elif y.shape[0] != m:
        y = y[:m].detach()  # no view, which its owner could not change in place
    return y if bias is None else y.add_(bias)


# ----------------------------------------------------------------------------------------- emulated
def _emulated(a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    if _partial_scales(a) and _partial_scales(b):
        return _by_blocks(a, b, out_dtype, bias)
    dtype = _compute_dtype(a, b)
    if not (_is_scaled(a) or _is_scaled(b)):
        return _product(values(a, dtype), values(b, dtype), out_dtype, bias)
    # One rounding to bf16 before the scale keeps the error under twice the plain product's; a
    # wider result is scaled in fp32.
    wide = dtype if out_dtype == dtype else torch.float32
    y = _product(values(a, dtype), values(b, dtype), wide, None)
    numbers = [_number(o) for o in (a, b)]
    if all(n is not None for n in numbers):
        (sa, fa), (sb, fb) = numbers  # type: ignore[misc]
        out = scalars.rescale(y, sa, sb, fa * fb, out_dtype)
    else:
        out = y if wide == out_dtype else torch.empty_like(y, dtype=out_dtype)
        torch.mul(y, _scale_of_product(a, b), out=out)
    return out if bias is None else out.add_(bias)


def _number(o: Operand) -> tuple[Tensor, float] | None:
    """(tensor of one element, factor) whose product scales all of the product, if that is so."""
    fmt = o.cast.format
    if fmt.two_level and not o.cast.row_scaled:
        assert o.amax is not None
        return o.amax, reference.dequantize_factor(o.cast)
    if fmt.tile is None and fmt.element is not None and o.scale is not None:
        return o.scale, 1.0
    return None


def _scale_of_product(a: Operand, b: Operand) -> Tensor:
    """fp32 `[M or 1, N or 1]`."""
    sa, sb = _alpha(a), _alpha(b)
    if sa is None or sb is None:
        one = sb.t() if sa is None else sa  # type: ignore[union-attr]
        return one
    return sa * sb.t()


def _partial_scales(o: Operand) -> bool:
    """Scales that no bf16 absorbs: the partial product of each block takes them."""
    fmt = o.cast.format
    return _coded(o) and fmt.scale is Scale.F32 and fmt.tile is not None and not o.cast.pow2


def _compute_dtype(a: Operand, b: Operand) -> torch.dtype:
    """bf16 holds every format's values exactly; CPUs multiply fp32 faster."""
    if a.data.device.type != "cuda":
        pair = {a.data.dtype, b.data.dtype}
        return pair.pop() if len(pair) == 1 and torch.uint8 not in pair else torch.float32
    plain = [o.data.dtype for o in (a, b) if not _coded(o)]
    if any(d is not torch.bfloat16 for d in plain):
        return plain[0] if len(set(plain)) == 1 and len(plain) == 2 else torch.float32
    return torch.bfloat16


def values(o: Operand, dtype: torch.dtype) -> Tensor:
    """Contraction-last values, block scales applied, without what multiplies the product."""
    if not _coded(o):
        return o.data.to(dtype)
    fmt = o.cast.format
    assert fmt.element is not None
    if fmt.tile is None:
        return _codes(o).to(dtype)
    if o.data.device.type != "cuda":
        data, scale = (o.data.t(), o.scale.t()) if o.viewed else (o.codes, o.scale)  # type: ignore[union-attr]
        return reference.unscaled(data, scale, o.cast, o.columns, col=o.viewed).to(dtype)
    cast = o.cast.replace(hadamard=-1)  # values stay in the transformed domain
    amax = None if o.amax is None else _unit(o)
    data, scale = (o.data.t(), o.scale.t()) if o.viewed else (o.data, o.scale)  # type: ignore[union-attr]
    r = o.height
    shape = (o.columns, r) if o.viewed else (r, o.columns)
    made = dispatch.dequantize(data, scale, amax, cast, shape, dtype, col=o.viewed)
    return made.t() if o.viewed else made


def _codes(o: Operand) -> Tensor:
    """8-bit codes as PyTorch types them."""
    element = o.cast.format.element
    assert element is not None and element.torch_dtype is not None
    return o.codes.view(element.torch_dtype)


def _unit(o: Operand) -> Tensor:
    """The amax whose global scale is one: dequantizing with it applies block scales alone."""
    assert o.amax is not None and o.cast.format.element is not None
    return torch.full_like(o.amax, o.cast.format.element.max * o.cast.scale_max)


def _is_scaled(o: Operand) -> bool:
    """Whether `_alpha` of it is a tensor."""
    fmt = o.cast.format
    whole = fmt.tile is None and fmt.element is not None and o.scale is not None
    return fmt.two_level or whole


def _alpha(o: Operand) -> Tensor | None:
    """What multiplies the product: `[1, 1]`, or `[R, 1]` where each row has its own; None: 1."""
    fmt = o.cast.format
    if fmt.two_level:
        assert o.amax is not None
        return (o.amax * reference.dequantize_factor(o.cast)).reshape(-1, 1)
    if fmt.tile is None and fmt.element is not None and o.scale is not None:
        return o.scale.reshape(1, 1)
    return None


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
        partial = _product(va[:, block], vb[:, block], torch.float32, None)
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


def _product(a: Tensor, b: Tensor, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
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


# ------------------------------------------------------------------------------------------- joined
def _joined(
    a: Operand,
    b: Operand,
    out_dtype: torch.dtype,
    bias: Tensor | None,
    fast: bool,
    alpha: float,
    add: Tensor | None,
    in_place: bool,
) -> Tensor:
    """`alpha a b^T + bias + add`, in as few passes as the backend of the product allows."""
    if alpha != 1.0:
        left = _times(a, alpha)
        right = None if left is not None else _times(b, alpha)
        a, b = a if left is None else left, b if right is None else right
        alpha = alpha if left is None and right is None else 1.0
    native = _find(a, b) is not None
    if not native and not (_partial_scales(a) and _partial_scales(b)):
        dtype = _compute_dtype(a, b)
        if not (_is_scaled(a) or _is_scaled(b)):
            pair = values(a, dtype), values(b, dtype)
            return _joined_product(*pair, out_dtype, bias, alpha, add, in_place)
        if add is not None and bias is None and alpha == 1.0:  # scaled and added in one pass
            wide = dtype if out_dtype == dtype else torch.float32
            y = _product(values(a, dtype), values(b, dtype), wide, None)
            out = add if in_place else torch.empty_like(add)
            return torch.addcmul(add, y, _scale_of_product(a, b), out=out)
    y = _gemm(a, b, out_dtype, bias if alpha == 1.0 else None, fast)
    return _added(y, None if alpha == 1.0 else bias, alpha, add, in_place)


def _times(o: Operand, alpha: float) -> Operand | None:
    """`o` whose values are alpha times as large, if a number of the whole operand says so."""
    fmt = o.cast.format
    if fmt.two_level:
        assert o.amax is not None
        return o._replace(amax=o.amax * alpha)
    if fmt.tile is None and fmt.element is not None and o.scale is not None:
        return o._replace(scale=o.scale * alpha)
    return None


def _joined_product(
    a: Tensor,
    b: Tensor,
    out_dtype: torch.dtype,
    bias: Tensor | None,
    alpha: float,
    add: Tensor | None,
    in_place: bool,
) -> Tensor:
    """`_joined` of two high-precision matrices: a product of one dtype takes what it can along."""
    if bias is not None or not a.dtype == b.dtype == out_dtype:
        y = _product(a, b, out_dtype, bias if alpha == 1.0 else None)
        return _added(y, None if alpha == 1.0 else bias, alpha, add, in_place)
    if add is None:
        return torch.addmm(a.new_zeros(()), a, b.t(), beta=0, alpha=alpha)
    if in_place:
        return torch.addmm(add, a, b.t(), alpha=alpha, out=add)
    return torch.addmm(add, a, b.t(), alpha=alpha)


def _added(
    y: Tensor, bias: Tensor | None, alpha: float, add: Tensor | None, in_place: bool
) -> Tensor:
    """`alpha y + bias + add` in y's dtype; y is ours."""
    if bias is not None:
        y, alpha = torch.add(bias, y, alpha=alpha).to(y.dtype), 1.0
    if add is None:
        return y if alpha == 1.0 else y.mul_(alpha)
    if in_place:
        return add.add_(y, alpha=alpha)
    return torch.add(add, y, alpha=alpha)


# ------------------------------------------------------------------------------------------- the op
def _flat(o: Operand) -> tuple[Any, ...]:
    return o.data, o.scale, o.amax, o.cast, o.columns, o.viewed, o.rows


def _gemm_op(*args: Any) -> Tensor:
    a, b = Operand(*args[:7]), Operand(*args[7:14])
    out_dtype, bias, fast, *more = args[14:]
    if not more:  # defaults are left out
        return _gemm(a, b, out_dtype, bias, fast)
    alpha, add = (*more, None)[:2]
    return _joined(a, b, out_dtype, bias, fast, alpha, add, False)


def _gemm_fake(*args: Any) -> Tensor:
    a, b, out_dtype = Operand(*args[:7]), Operand(*args[7:14]), args[14]
    return a.data.new_empty((a.height, b.height), dtype=out_dtype)


_CAST = f"{Cast.__module__}.{Cast.__qualname__}"
_OPERAND = (
    "Tensor {0}, Tensor? {0}_scale, Tensor? {0}_amax, {1} {0}_cast, SymInt {0}_columns, "
    "bool {0}_viewed, SymInt? {0}_rows"
)
OPERANDS = f"{_OPERAND.format('a', _CAST)}, {_OPERAND.format('b', _CAST)}"
library.define(
    (
        (
            f"gemm({OPERANDS}, "
            "ScalarType out_dtype, Tensor? bias, bool fast, float alpha=1.0, Tensor? add=None) "
            "-> Tensor",
            _gemm_op,
            _gemm_fake,
        ),
    ),
    replayed=True,
)
