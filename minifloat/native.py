"""Which pairs of formats tensor cores multiply, and how PyTorch is asked to.

A row of the table is a pair of scale kinds and tiles; its function takes codes. What has no row on
a device, or not there, is emulated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from . import dispatch, env
from .alpha import alpha
from .formats import E4M3, HALF, Cast, Format, Operand, Scale, cdiv, coded, rup

__all__ = ["Backend", "Native", "backend", "find", "is_native", "native_product"]

Native = Callable[[Operand, Operand, torch.dtype, Tensor | None, bool], Tensor]


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
    if native_product(a, b, device) is not None:
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


_FOUND: dict[tuple[int, int, torch.device], Native | None] = {}


def find(a: Operand, b: Operand) -> Native | None:
    """What multiplies the codes of a and b, if they are codes and anything does; remembered."""
    if not (a.data.is_cuda and coded(a) and coded(b)):
        return None
    device = a.data.device
    key = (id(a.cast), id(b.cast), device)  # casts are interned
    if key not in _FOUND:
        _FOUND[key] = native_product(a.cast, b.cast, device)
    return _FOUND[key]


def native_product(a: Cast, b: Cast, device: torch.device) -> Native | None:
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
        scale = alpha(o)
        assert scale is not None
        scales.append([block, scale.reshape(1)])
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
