"""The only place that chooses between kernel and reference, and that defines `torch.library` ops.

Every function here is a front: eager calls the implementation directly; under `torch.compile`, or
with any dispatch mode active (FakeTensor, selective checkpointing, flop counting), it calls an op
of the `minifloat` library that takes the `Cast` as an opaque constant. Ops are atomic: what
autograd saves across them is the quantized payload.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import env, inductor, library, programs, reference
from .formats import Cast, rup
from .inputs import INPUT_DTYPES, check_input, check_seed, check_usage
from .layout import Part, flatten, parts, transposed_shape, value_parts
from .library import op as _op
from .library import traced as _traced

__all__ = [
    "INPUT_DTYPES",
    "amax",
    "check_input",
    "check_seed",
    "check_usage",
    "choose",
    "dequantize",
    "fake_quantize",
    "matrix",
    "quantize",
    "quantize_scaled",
    "swizzle",
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
    from .kernels import entry as kernels

    if cast is not None and not kernels.supports(cast):
        return "emulated", "no kernel for these options; the reference runs on the GPU"
    return "triton", "one kernel for row and column"


def _kernels(x: Tensor, row: Cast | None, col: Cast | None = None) -> Any:
    """The kernel package where it serves both casts on x's device in one go, else None."""
    if not env.runs_kernels(x):
        return None
    from .kernels import entry

    served = all(c is None or entry.supports(c) for c in (row, col))
    # Kernels make both copies with one kind of scale, and transform columns alone.
    if not served or not _same_scale(row, col) or (row is not None and row.transforms):
        return None
    return entry


def _on_gpu(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_cuda


def matrix(x: Tensor) -> Tensor:
    """`x` as `[M, K]` with unit stride along K: a view wherever its strides allow one."""
    if x.dim() != 2:
        x = x.reshape(flatten(x.shape))
    return x if x.shape[1] <= 1 or x.stride(1) == 1 else x.contiguous()


def _dtyped(cast: Cast | None, x: Tensor) -> Cast | None:
    """High precision without a dtype keeps the input's."""
    if cast is None or cast.layout[0] is not None:
        return cast
    return cast.replace(dtype=x.dtype)


def _empty(x: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=x.device)


def _buffers(x: Tensor, described: list[Part]) -> dict[str, Tensor]:
    return {p.name: x.new_empty(p.shape, dtype=p.dtype) for p in described}


def _compact(t: Tensor, shape: Sequence[int]) -> Tensor:
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


# --------------------------------------------------------------------------------------- quantize
def quantize(
    x: Tensor,
    row: Cast | None,
    col: Cast | None,
    *,
    row_amax: Tensor | None = None,
    col_amax: Tensor | None = None,
    seed: Tensor | None = None,
    after: Tensor | None = None,
    keep_amax: bool = False,
) -> list[Tensor]:
    """The buffers `layout.parts(x.shape, row, col)` describes, from one read of `x`.

    `row_amax` / `col_amax` are global amaxes known already (a tensor-wide format reads `row_amax`).
    A graph runs this once `after` is there: what backward casts anew stays out of forward.
    `keep_amax` adds the amax that a tensor-wide scale came from, for a cast to come.
    """
    traced, of = _traced(), None
    if not traced and _on_gpu(x):
        name = "quantize_amax" if keep_amax else "quantize"
        inputs = (x, row_amax, col_amax, seed)
        of = programs.key(name, inputs, row, col)
        made = programs.again(of, inputs)
        if made is not None:
            return made
    check_input(x, row, col)
    check_seed(seed)
    row, col = _dtyped(row, x), _dtyped(col, x)
    arguments = (x, row, col, row_amax, col_amax, seed, after, keep_amax)
    if traced:
        return _op("quantize")(*arguments, inductor.REVISION)  # type: ignore[no-any-return]
    return programs.replay(of, (x, row_amax, col_amax, seed), lambda: _quantize(*arguments))


def _quantize(  # noqa: PLR0913  (the operator's)
    x: Tensor,
    row: Cast | None,
    col: Cast | None,
    row_amax: Tensor | None,
    col_amax: Tensor | None,
    seed: Tensor | None,
    after: Tensor | None = None,
    keep_amax: bool = False,
    revision: int = 0,
) -> list[Tensor]:
    described = parts(x.shape, row, col)
    kernels = _kernels(x, row, col)
    if kernels is None:
        if not keep_amax:
            return _quantize_reference(x, row, col, row_amax, col_amax, seed)
        (seen,) = _amax(x, row, col) if row_amax is None else (row_amax.clone(),)
        return [*_quantize_reference(x, row, col, seen, seen, seed), seen]
    out = {p.name: _empty(x, p.shape, p.dtype) for p in described}
    if keep_amax:
        out["amax"] = _empty(x, (1,), torch.float32)
    kernels.quantize(matrix(x), row, col, out, row_amax, col_amax, seed)
    return list(out.values())


def _same_scale(row: Cast | None, col: Cast | None) -> bool:
    """Whether one kernel makes both copies: the same kind of scale, at the same block length."""
    if row is None or col is None:
        return True
    a, b = row.format, col.format
    return a.scale is b.scale and a.tile == b.tile and a.element is b.element


def _quantize_reference(
    x: Tensor,
    row: Cast | None,
    col: Cast | None,
    row_amax: Tensor | None,
    col_amax: Tensor | None,
    seed: Tensor | None,
) -> list[Tensor]:
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


def _roomy(t: Tensor, shape: Sequence[int]) -> Tensor:
    """`t` as `shape`, with zeros in what a cast has room for."""
    if t.numel() != math.prod(shape):
        (r, c), (rows, columns) = t.shape, shape
        t = torch.nn.functional.pad(t, (0, columns - c, 0, rows - r))
    return _compact(t, shape)


def _quantize_fake(  # noqa: PLR0913
    x: Tensor,
    row: Cast | None,
    col: Cast | None,
    row_amax: Tensor | None,
    col_amax: Tensor | None,
    seed: Tensor | None,
    after: Tensor | None = None,
    keep_amax: bool = False,
    revision: int = 0,
) -> list[Tensor]:
    inductor.register()
    made = [x.new_empty(p.shape, dtype=p.dtype) for p in parts(x.shape, row, col)]
    return [*made, x.new_empty(1, dtype=torch.float32)] if keep_amax else made


# ------------------------------------------------------------------------------------------- amax
def amax(x: Tensor, row: Cast | None, col: Cast | None) -> list[Tensor]:
    """The global amaxes `quantize` would compute, one per direction present (one if shared)."""
    check_input(x, row, col)
    if _traced():
        return _op("amax")(x, row, col)  # type: ignore[no-any-return]
    return _amax(x, row, col)


def _directions(row: Cast | None, col: Cast | None) -> list[tuple[Cast, bool]]:
    if row is not None and col is not None and row.format.shares_scale and col.format.shares_scale:
        col = None
    return [(c, is_col) for c, is_col in ((row, False), (col, True)) if c is not None]


def _amax(x: Tensor, row: Cast | None, col: Cast | None) -> list[Tensor]:
    kernels = _kernels(x, row, col)
    x2 = matrix(x)
    if kernels is None:
        return [reference.amax(x2, c, col=is_col) for c, is_col in _directions(row, col)]
    out = _amax_fake(x, row, col)
    kernels.amax(x2, row, col, out)
    return out


def _amax_fake(x: Tensor, row: Cast | None, col: Cast | None) -> list[Tensor]:
    m, k = flatten(x.shape)
    return [
        x.new_empty(((k if is_col else m) if c.row_scaled else 1,), dtype=torch.float32)
        for c, is_col in _directions(row, col)
    ]


# -------------------------------------------------------------------------------- delayed scaling
def quantize_scaled(
    x: Tensor,
    scale: Tensor,
    amax: Tensor | None,
    cast: Cast,
    *,
    row: bool,
    col: bool,
    keep_scale: bool = False,
    after: Tensor | None = None,
) -> list[Tensor]:
    """Cast with a given scale; `amax`, if given, becomes `max(amax, |x|)` in place.

    Returns the row copy and the transposed copy, those asked for, then 1/scale, then a copy of the
    scale if `keep_scale` says that it will be needed after it moved on.
    """
    if not _traced():
        of = None
        if _on_gpu(x):
            of = programs.key(("scaled", row, col, keep_scale), (x, scale, amax), cast)
            again = programs.again(of, (x, scale, amax))
            if again is not None:
                return again
        check_input(x, cast if row else None, cast if col else None)
        arguments = (x, scale, amax, cast, row, col, keep_scale)
        return programs.replay(of, (x, scale, amax), lambda: _quantize_scaled(*arguments))
    check_input(x, cast if row else None, cast if col else None)
    # A pure op, and the update beside it: aten that Inductor fuses and AOT functionalizes.
    made: list[Tensor]
    *made, seen = _op("quantize_scaled")(x, scale, cast, row, col, after, inductor.REVISION)
    if amax is not None:
        amax.copy_(torch.maximum(amax, seen.reshape(amax.shape)))
    return [*made, scale] if keep_scale else made  # a graph was given a copy: see scalars.snapshot


def _quantize_scaled_op(
    x: Tensor,
    scale: Tensor,
    cast: Cast,
    row: bool,
    col: bool,
    after: Tensor | None = None,
    revision: int = 0,
) -> list[Tensor]:
    seen = torch.zeros(1, dtype=torch.float32, device=x.device)
    return [*_quantize_scaled(x, scale, seen, cast, row, col), seen]


def _quantize_scaled(
    x: Tensor,
    scale: Tensor,
    amax: Tensor | None,
    cast: Cast,
    row: bool,
    col: bool,
    keep_scale: bool = False,
) -> list[Tensor]:
    kernels = _kernels(x, cast)
    if kernels is not None:
        out = {p.name: _empty(x, p.shape, p.dtype) for p in _scaled_parts(x, cast, row, col)}
        if keep_scale:
            out["kept"] = _empty(x, (1,), torch.float32)
        kernels.quantize_scaled(matrix(x), scale, amax, cast, out)
        return list(out.values())
    data, scale_inv, seen = reference.quantize_scaled(x, scale.reshape(1), cast)
    if amax is not None:
        amax.copy_(torch.maximum(amax, seen.reshape(amax.shape)))
    shapes = {p.name: p.shape for p in _scaled_parts(x, cast, row, col)}
    made = [_roomy(data, shapes["row_data"])] if row else []
    if col:
        made.append(_roomy(_transpose_reference(data), shapes["col_data"]))
    return [*made, scale_inv, *([scale.reshape(1).clone()] if keep_scale else [])]


def _scaled_parts(x: Tensor, cast: Cast, row: bool, col: bool) -> list[Any]:
    return parts(x.shape, cast if row else None, cast if col else None)


def _quantize_scaled_fake(
    x: Tensor,
    scale: Tensor,
    cast: Cast,
    row: bool,
    col: bool,
    after: Tensor | None = None,
    revision: int = 0,
) -> list[Tensor]:
    inductor.register()
    made = [x.new_empty(p.shape, dtype=p.dtype) for p in _scaled_parts(x, cast, row, col)]
    return [*made, x.new_empty(1, dtype=torch.float32)]


# ------------------------------------------------------------------------------------- dequantize
def dequantize(
    data: Tensor,
    scale: Tensor | None,
    amax: Tensor | None,
    cast: Cast,
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    col: bool = False,
) -> Tensor:
    """Stored buffers of one direction -> the tensor of `shape` and `dtype`."""
    if cast.transforms:
        raise ValueError(
            "columnwise: a Hadamard-transformed copy holds transformed values and cannot be "
            "dequantized; keep the rowwise copy"
        )
    if _traced():
        return _op("dequantize")(data, scale, amax, cast, list(shape), dtype, col)  # type: ignore[no-any-return]
    if not _on_gpu(data):
        return _dequantize(data, scale, amax, cast, shape, dtype, col)
    inputs = (data, scale, amax)
    of = programs.key(("dequantize", tuple(shape), dtype, col), inputs, cast)
    made = programs.again(of, inputs)
    if made is not None:
        return made[0]  # type: ignore[no-any-return]
    arguments = (data, scale, amax, cast, shape, dtype, col)
    return programs.replay(of, inputs, lambda: [_dequantize(*arguments)])[0]


def _dequantize(
    data: Tensor,
    scale: Tensor | None,
    amax: Tensor | None,
    cast: Cast,
    shape: Sequence[int],
    dtype: torch.dtype,
    col: bool,
) -> Tensor:
    m, k = flatten(shape)
    element = cast.format.element
    stored = (k, m) if col and cast.format.col_transposed else (m, k)
    if element is not None and element.per_byte == 2:
        stored = (stored[0], rup(stored[1], 2) // 2)
    roomy = data.dim() == 2 and data.numel() > math.prod(stored)
    data2 = data[: stored[0], : stored[1]] if roomy else data.reshape(stored)
    kernels = _kernels(data, cast)
    if kernels is not None:
        out = _empty(data, (m, k), dtype)
        kernels.dequantize(matrix(data2), scale, amax, cast, out, col=col)
    else:
        out = reference.dequantize(data2, scale, amax, cast, (m, k), dtype, col=col)
    return _compact(out, shape)


def _dequantize_fake(
    data: Tensor,
    scale: Tensor | None,
    amax: Tensor | None,
    cast: Cast,
    shape: Sequence[int],
    dtype: torch.dtype,
    col: bool,
) -> Tensor:
    return data.new_empty(shape, dtype=dtype)


# -------------------------------------------------------------------------- transpose and swizzle
def transpose(data: Tensor) -> Tensor:
    """uint8 `(*leading, K)` -> a contiguous `(K, *leading)`."""
    if _traced():
        return _op("transpose")(data)  # type: ignore[no-any-return]
    return _transpose(data)


def _transpose(data: Tensor) -> Tensor:
    if not env.runs_kernels(data):
        return _transpose_reference(data)
    from .kernels import entry as kernels

    out = _empty(data, transposed_shape(data.shape), data.dtype)
    kernels.transpose(matrix(data).contiguous(), out)
    return out


def _transpose_reference(data: Tensor) -> Tensor:
    m, k = flatten(data.shape)
    out = data.reshape(m, k).t().reshape(transposed_shape(data.shape))
    # A 1-wide transpose is a view; an op must return memory of its own.
    return out.clone(memory_format=torch.contiguous_format)


def _transpose_fake(data: Tensor) -> Tensor:
    return data.new_empty(transposed_shape(data.shape))


def swizzle(scale: Tensor) -> Tensor:
    """Contraction-last scale bytes `[R, C]` -> the padded 128x4-tiled layout GEMMs read."""
    if _traced():
        return _op("swizzle")(scale)  # type: ignore[no-any-return]
    return _swizzle(scale)


def _swizzle(scale: Tensor) -> Tensor:
    if not env.runs_kernels(scale):
        return reference.swizzle(scale).clone(memory_format=torch.contiguous_format)
    from .kernels import entry as kernels

    out = _swizzle_fake(scale)
    kernels.swizzle(scale, out)
    return out


def _swizzle_fake(scale: Tensor) -> Tensor:
    return scale.new_empty(rup(scale.shape[0], 128), rup(scale.shape[1], 4))


# ------------------------------------------------------------------------------------- fake quant
def fake_quantize(
    x: Tensor,
    row: Cast | None,
    col: Cast | None,
    *,
    keep_col: bool,
    seed: Tensor | None = None,
    after: Tensor | None = None,
) -> list[Tensor]:
    """bf16 operands of an emulated format, the buffers of `layout.value_parts`, from one read of x.

    With `keep_col` the column copy is one to be saved: codes.
    """
    traced, of = _traced(), None
    if not traced and _on_gpu(x):
        of = programs.key(("values", keep_col), (x, seed), row, col)
        made = programs.again(of, (x, seed))
        if made is not None:
            return made
    check_input(x, row, col)
    check_seed(seed)
    if any(c is not None and c.layout[0] is not torch.uint8 for c in (row, col)):
        raise ValueError("row, col: high precision has no codes to emulate; cast x instead")
    if traced:
        return _op("fake_quantize")(x, row, col, keep_col, seed, after)  # type: ignore[no-any-return]
    return programs.replay(of, (x, seed), lambda: _fake_quantize(x, row, col, keep_col, seed))


def _fake_quantize(
    x: Tensor,
    row: Cast | None,
    col: Cast | None,
    keep_col: bool,
    seed: Tensor | None,
    after: Tensor | None = None,
) -> list[Tensor]:
    x2 = matrix(x)
    out = _buffers(x, value_parts(x.shape, row, col, keep_col))
    names = [n for n in out if n.endswith("amax")]
    if names:
        two_level = [c if c is not None and c.format.two_level else None for c in (row, col)]
        out.update(zip(names, _amax(x, *two_level), strict=True))
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
    return [_compact(t, t.shape) for t in out.values()]


def _fake_quantize_fake(
    x: Tensor,
    row: Cast | None,
    col: Cast | None,
    keep_col: bool,
    seed: Tensor | None,
    after: Tensor | None = None,
) -> list[Tensor]:
    return list(_buffers(x, value_parts(x.shape, row, col, keep_col)).values())


# -------------------------------------------------------------------------------------------- ops
_CAST = f"{Cast.__module__}.{Cast.__qualname__}"
_OPS: tuple[library.Definition, ...] = (
    (
        f"quantize(Tensor x, {_CAST}? row, {_CAST}? col, Tensor? row_amax, Tensor? col_amax, "
        "Tensor? seed, Tensor? after=None, bool keep_amax=False, int revision=0) "
        "-> Tensor[]",
        _quantize,
        _quantize_fake,
    ),
    (f"amax(Tensor x, {_CAST}? row, {_CAST}? col) -> Tensor[]", _amax, _amax_fake),
    (
        f"quantize_scaled(Tensor x, Tensor scale, {_CAST} cast, bool row, bool col, "
        "Tensor? after=None, int revision=0) -> Tensor[]",
        _quantize_scaled_op,
        _quantize_scaled_fake,
    ),
    (
        f"dequantize(Tensor data, Tensor? scale, Tensor? amax, {_CAST} cast, SymInt[] shape, "
        "ScalarType dtype, bool col) -> Tensor",
        _dequantize,
        _dequantize_fake,
    ),
    ("transpose(Tensor data) -> Tensor", _transpose, _transpose_fake),
    ("swizzle(Tensor scale) -> Tensor", _swizzle, _swizzle_fake),
    (
        f"fake_quantize(Tensor x, {_CAST}? row, {_CAST}? col, bool keep_col, Tensor? seed, "
        "Tensor? after=None) -> Tensor[]",
        _fake_quantize,
        _fake_quantize_fake,
    ),
)

library.define(_OPS, replayed=True)
