"""Casts as they run: by a kernel where one serves, else by the reference.

The only place that chooses between the two. Whoever casts what a graph may hold goes through
`dispatch`, which checks its arguments and has the operators.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import env, reference
from .formats import Cast, rup
from .layout import Part, flatten, parts, transposed_shape, value_parts

__all__ = [
    "amax",
    "amaxes",
    "buffers",
    "choose",
    "compact",
    "dequantize",
    "empty",
    "fake_quantize",
    "matrix",
    "quantize",
    "quantize_reference",
    "quantize_scaled",
    "scaled_parts",
    "swizzle",
    "swizzled",
    "transpose",
]


def choose(cast: Cast | None, device: torch.device) -> tuple[str, str]:
    """(backend, reason) that quantizes on `device`: "triton", "emulated" (the reference), "cpu"."""
    if device.type != "cuda":
        return "cpu" if device.type == "cpu" else "emulated", "the reference runs on every device"
    if env.reference_only():
        return "emulated", "MINIFLOAT_REFERENCE=1 asks for the reference"
    if not env.triton_available():
        return "emulated", "triton is not installed; pip install triton for kernels"
    if cast is not None and cast.format.element is None:
        return "native", "a high-precision copy is a PyTorch cast"
    if not env.encodes(device):
        return "emulated", "Triton has no E4M3 before sm_89; the reference runs on the GPU"
    from .kernels import entry as kernels

    if cast is not None and not kernels.supports(cast):
        return "emulated", "no kernel for these options; the reference runs on the GPU"
    return "triton", "one kernel for row and column"


def _kernels(x: Tensor, row: Cast | None, col: Cast | None = None) -> Any:
    """The kernel package where it serves both casts on x's device in one go, else None."""
    if not (env.runs_kernels(x) and env.encodes(x.device)):
        return None
    from .kernels import entry

    served = all(c is None or entry.supports(c) for c in (row, col))
    # Kernels make both copies with one kind of scale, and transform columns alone.
    if not served or not _same_scale(row, col) or (row is not None and row.transforms):
        return None
    return entry


def _same_scale(row: Cast | None, col: Cast | None) -> bool:
    """Whether one kernel makes both copies: the same kind of scale, at the same block length."""
    if row is None or col is None:
        return True
    a, b = row.format, col.format
    return a.scale is b.scale and a.tile == b.tile and a.element is b.element


# ------------------------------------------------------------------------------------------- memory
def matrix(x: Tensor) -> Tensor:
    """`x` as `[M, K]` with unit stride along K: a view wherever its strides allow one."""
    if x.dim() != 2:
        x = x.reshape(flatten(x.shape))
    return x if x.shape[1] <= 1 or x.stride(1) == 1 else x.contiguous()


def empty(x: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory beside x."""
    return torch.empty(shape, dtype=dtype, device=x.device)


def buffers(x: Tensor, described: list[Part]) -> dict[str, Tensor]:
    """Memory for what is described, beside x, by name."""
    return {p.name: x.new_empty(p.shape, dtype=p.dtype) for p in described}


def compact(t: Tensor, shape: Sequence[int]) -> Tensor:
    """`t` as `shape` with the strides of fresh memory, which the fake promised.

    A cast keeps those of a strided input, and a dim of 0 or 1 leaves them free.
    """
    t = t.reshape(shape)
    step, fresh = 1, []
    for d in reversed(shape):
        fresh.append(step)
        step *= max(d, 1)
    if t.stride() == tuple(reversed(fresh)):
        return t
    return t.clone(memory_format=torch.contiguous_format)


def _roomy(t: Tensor, shape: Sequence[int]) -> Tensor:
    """`t` as `shape`, with zeros in what a cast has room for."""
    if t.numel() != math.prod(shape):
        (r, c), (rows, columns) = t.shape, shape
        t = torch.nn.functional.pad(t, (0, columns - c, 0, rows - r))
    return compact(t, shape)


# ----------------------------------------------------------------------------------------- quantize
def quantize(
    x: Tensor,
    row: Cast | None,
    col: Cast | None,
    row_amax: Tensor | None,
    col_amax: Tensor | None,
    seed: Tensor | None,
    keep_amax: bool = False,
) -> list[Tensor]:
    """The buffers of `layout.parts`, and with `keep_amax` the amax that a scale came from."""
    kernels = _kernels(x, row, col)
    if kernels is None:
        if not keep_amax:
            return quantize_reference(x, row, col, row_amax, col_amax, seed)
        (seen,) = amax(x, row, col) if row_amax is None else (row_amax.clone(),)
        return [*quantize_reference(x, row, col, seen, seen, seed), seen]
    out = buffers(x, parts(x.shape, row, col))
    if keep_amax:
        out["amax"] = empty(x, (1,), torch.float32)
    kernels.quantize(matrix(x), row, col, out, row_amax, col_amax, seed)
    return list(out.values())


def quantize_reference(
    x: Tensor,
    row: Cast | None,
    col: Cast | None,
    row_amax: Tensor | None,
    col_amax: Tensor | None,
    seed: Tensor | None,
) -> list[Tensor]:
    """`quantize` in plain PyTorch."""
    x2 = x.reshape(flatten(x.shape))
    made: dict[str, Tensor] = {}
    for prefix, cast, amax_ in (("row_", row, row_amax), ("col_", col, col_amax)):
        if cast is None:
            continue
        is_col = prefix == "col_"
        if cast.format.shares_scale and amax_ is None:
            amax_ = row_amax
        data, scale, amax_out = reference.quantize(x2, cast, col=is_col, amax=amax_, seed=seed)
        made[prefix + "data"] = data
        if scale is not None:
            made["scale" if cast.format.shares_scale else prefix + "scale"] = scale
        if amax_out is not None:
            # An op must not return what it was given.
            made[prefix + "amax"] = amax_out.clone() if amax_out is amax_ else amax_out
    return [_roomy(made[p.name], p.shape) for p in parts(x.shape, row, col)]


def amax(x: Tensor, row: Cast | None, col: Cast | None) -> list[Tensor]:
    """Global amaxes of the directions present, one if they share it."""
    kernels = _kernels(x, row, col)
    x2 = matrix(x)
    if kernels is None:
        return [reference.amax(x2, c, col=is_col) for c, is_col in _directions(row, col)]
    out = amaxes(x, row, col)
    kernels.amax(x2, row, col, out)
    return out


def _directions(row: Cast | None, col: Cast | None) -> list[tuple[Cast, bool]]:
    if row is not None and col is not None and row.format.shares_scale and col.format.shares_scale:
        col = None
    return [(c, is_col) for c, is_col in ((row, False), (col, True)) if c is not None]


def amaxes(x: Tensor, row: Cast | None, col: Cast | None) -> list[Tensor]:
    """Memory for what `amax` finds."""
    m, k = flatten(x.shape)
    return [
        x.new_empty(((k if is_col else m) if c.row_scaled else 1,), dtype=torch.float32)
        for c, is_col in _directions(row, col)
    ]


# ---------------------------------------------------------------------------------- delayed scaling
def quantize_scaled(
    x: Tensor,
    scale: Tensor,
    amax: Tensor | None,
    cast: Cast,
    row: bool,
    col: bool,
    keep_scale: bool = False,
) -> list[Tensor]:
    """Copies under the given scale, then 1/scale, then with `keep_scale` the scale; `amax`, if any,
    is raised in place."""
    kernels = _kernels(x, cast)
    if kernels is not None:
        out = buffers(x, scaled_parts(x, cast, row, col))
        if keep_scale:
            out["kept"] = empty(x, (1,), torch.float32)
        kernels.quantize_scaled(matrix(x), scale, amax, cast, out)
        return list(out.values())
    data, scale_inv, seen = reference.quantize_scaled(x, scale.reshape(1), cast)
    if amax is not None:
        amax.copy_(torch.maximum(amax, seen.reshape(amax.shape)))
    shapes = {p.name: p.shape for p in scaled_parts(x, cast, row, col)}
    made = [_roomy(data, shapes["row_data"])] if row else []
    if col:
        made.append(_roomy(_transpose_reference(data), shapes["col_data"]))
    return [*made, scale_inv, *([scale.reshape(1).clone()] if keep_scale else [])]


def scaled_parts(x: Tensor, cast: Cast, row: bool, col: bool) -> list[Part]:
    """What a cast by a given scale makes, but for the scale it may keep."""
    return parts(x.shape, cast if row else None, cast if col else None)


# --------------------------------------------------------------------------------------- dequantize
def dequantize(
    data: Tensor,
    scale: Tensor | None,
    amax: Tensor | None,
    cast: Cast,
    shape: Sequence[int],
    dtype: torch.dtype,
    col: bool,
) -> Tensor:
    """Stored buffers of one direction -> the tensor of `shape` and `dtype`."""
    m, k = flatten(shape)
    element = cast.format.element
    stored = (k, m) if col and cast.format.col_transposed else (m, k)
    if element is not None and element.per_byte == 2:
        stored = (stored[0], rup(stored[1], 2) // 2)
    roomy = data.dim() == 2 and data.numel() > math.prod(stored)
    data2 = data[: stored[0], : stored[1]] if roomy else data.reshape(stored)
    kernels = _kernels(data, cast)
    if kernels is not None:
        out = empty(data, (m, k), dtype)
        kernels.dequantize(matrix(data2), scale, amax, cast, out, col=col)
    else:
        out = reference.dequantize(data2, scale, amax, cast, (m, k), dtype, col=col)
    return compact(out, shape)


# ---------------------------------------------------------------------------- transpose and swizzle
def transpose(data: Tensor) -> Tensor:
    """uint8 `(*leading, K)` -> a contiguous `(K, *leading)`."""
    if not env.runs_kernels(data):
        return _transpose_reference(data)
    from .kernels import entry as kernels

    out = empty(data, transposed_shape(data.shape), data.dtype)
    kernels.transpose(matrix(data).contiguous(), out)
    return out


def _transpose_reference(data: Tensor) -> Tensor:
    m, k = flatten(data.shape)
    out = data.reshape(m, k).t().reshape(transposed_shape(data.shape))
    # A 1-wide transpose is a view; an op must return memory of its own.
    return out.clone(memory_format=torch.contiguous_format)


def swizzle(scale: Tensor) -> Tensor:
    """Scale bytes `[R, C]` in the padded 128x4 tiles that GEMMs read."""
    if not env.runs_kernels(scale):
        return reference.swizzle(scale).clone(memory_format=torch.contiguous_format)
    from .kernels import entry as kernels

    out = swizzled(scale)
    kernels.swizzle(scale, out)
    return out


def swizzled(scale: Tensor) -> Tensor:
    """Memory for what `swizzle` makes."""
    return scale.new_empty(rup(scale.shape[0], 128), rup(scale.shape[1], 4))


# --------------------------------------------------------------------------------------- fake quant
def fake_quantize(
    x: Tensor,
    row: Cast | None,
    col: Cast | None,
    keep_col: bool,
    seed: Tensor | None,
) -> list[Tensor]:
    """The buffers of `layout.value_parts`: bf16 operands; with `keep_col`, codes of the column."""
    x2 = matrix(x)
    out = buffers(x, value_parts(x.shape, row, col, keep_col))
    names = [n for n in out if n.endswith("amax")]
    if names:
        two_level = [c if c is not None and c.format.two_level else None for c in (row, col)]
        out.update(zip(names, amax(x, *two_level), strict=True))
    kernels = _kernels(x, row, col)
    if kernels is not None:
        kernels.fake_quantize(x2, row, col, out, seed)
        return list(out.values())
    for prefix, cast in (("row", row), ("col", col)):
        if cast is None:
            continue
        is_col, known = prefix == "col", out.get(f"{prefix}_amax")
        if is_col and keep_col:
            data, scale, _ = reference.quantize(x2, cast, col=True, amax=known, seed=seed)
            assert scale is not None
            out["col_data"] = data
            out["scale" if cast.format.shares_scale else "col_scale"] = scale
        else:
            out[prefix] = reference.fake_quantize(x2, cast, col=is_col, amax=known, seed=seed)
    return [compact(t, t.shape) for t in out.values()]
