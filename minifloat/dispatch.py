"""Fronts of casts, and the `torch.library` operators behind them.

Eager calls the implementation in `casting` directly; under `torch.compile`, or with any dispatch
mode active (FakeTensor, selective checkpointing, flop counting), a front calls an op of the
`minifloat` library that takes the `Cast` as an opaque constant. Ops are atomic: what autograd saves
across them is the quantized payload.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import casting, inductor, library, programs
from .formats import Cast
from .inputs import INPUT_DTYPES, check_input, check_seed, check_usage
from .layout import parts, transposed_shape, value_parts
from .library import op as _op
from .library import traced as _traced

__all__ = [
    "INPUT_DTYPES",
    "amax",
    "check_input",
    "check_seed",
    "check_usage",
    "dequantize",
    "fake_quantize",
    "quantize",
    "quantize_scaled",
    "swizzle",
    "transpose",
]


def _on_gpu(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_cuda


def _dtyped(cast: Cast | None, x: Tensor) -> Cast | None:
    """High precision without a dtype keeps the input's."""
    if cast is None or cast.layout[0] is not None:
        return cast
    return cast.replace(dtype=x.dtype)


# ----------------------------------------------------------------------------------------- quantize
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
    given = (x, row, col, row_amax, col_amax, seed)
    if traced:
        return _op("quantize")(*given, after, keep_amax, inductor.REVISION)  # type: ignore[no-any-return]
    inputs = (x, row_amax, col_amax, seed)
    return programs.replay(of, inputs, lambda: casting.quantize(*given, keep_amax))


def _quantize_op(  # noqa: PLR0913
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
    return casting.quantize(x, row, col, row_amax, col_amax, seed, keep_amax)


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


# --------------------------------------------------------------------------------------------- amax
def amax(x: Tensor, row: Cast | None, col: Cast | None) -> list[Tensor]:
    """The global amaxes `quantize` would compute, one per direction present (one if shared)."""
    check_input(x, row, col)
    if _traced():
        return _op("amax")(x, row, col)  # type: ignore[no-any-return]
    return casting.amax(x, row, col)


# ---------------------------------------------------------------------------------- delayed scaling
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
        return programs.replay(of, (x, scale, amax), lambda: casting.quantize_scaled(*arguments))
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
    return [*casting.quantize_scaled(x, scale, seen, cast, row, col), seen]


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
    made = [x.new_empty(p.shape, dtype=p.dtype) for p in casting.scaled_parts(x, cast, row, col)]
    return [*made, x.new_empty(1, dtype=torch.float32)]


# --------------------------------------------------------------------------------------- dequantize
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
        return casting.dequantize(data, scale, amax, cast, shape, dtype, col)
    inputs = (data, scale, amax)
    of = programs.key(("dequantize", tuple(shape), dtype, col), inputs, cast)
    made = programs.again(of, inputs)
    if made is not None:
        return made[0]  # type: ignore[no-any-return]
    arguments = (data, scale, amax, cast, shape, dtype, col)
    return programs.replay(of, inputs, lambda: [casting.dequantize(*arguments)])[0]


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


# ---------------------------------------------------------------------------- transpose and swizzle
def transpose(data: Tensor) -> Tensor:
    """uint8 `(*leading, K)` -> a contiguous `(K, *leading)`."""
    if _traced():
        return _op("transpose")(data)  # type: ignore[no-any-return]
    return casting.transpose(data)


def _transpose_fake(data: Tensor) -> Tensor:
    return data.new_empty(transposed_shape(data.shape))


def swizzle(scale: Tensor) -> Tensor:
    """Contraction-last scale bytes `[R, C]` -> the padded 128x4-tiled layout GEMMs read."""
    if _traced():
        return _op("swizzle")(scale)  # type: ignore[no-any-return]
    return casting.swizzle(scale)


# --------------------------------------------------------------------------------------- fake quant
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
    return programs.replay(
        of, (x, seed), lambda: casting.fake_quantize(x, row, col, keep_col, seed)
    )


def _fake_quantize_op(
    x: Tensor,
    row: Cast | None,
    col: Cast | None,
    keep_col: bool,
    seed: Tensor | None,
    after: Tensor | None = None,
) -> list[Tensor]:
    return casting.fake_quantize(x, row, col, keep_col, seed)


def _fake_quantize_fake(
    x: Tensor,
    row: Cast | None,
    col: Cast | None,
    keep_col: bool,
    seed: Tensor | None,
    after: Tensor | None = None,
) -> list[Tensor]:
    return list(casting.buffers(x, value_parts(x.shape, row, col, keep_col)).values())


# -------------------------------------------------------------------------------------------- ops
_CAST = f"{Cast.__module__}.{Cast.__qualname__}"
_OPS: tuple[library.Definition, ...] = (
    (
        f"quantize(Tensor x, {_CAST}? row, {_CAST}? col, Tensor? row_amax, Tensor? col_amax, "
        "Tensor? seed, Tensor? after=None, bool keep_amax=False, int revision=0) "
        "-> Tensor[]",
        _quantize_op,
        _quantize_fake,
    ),
    (f"amax(Tensor x, {_CAST}? row, {_CAST}? col) -> Tensor[]", casting.amax, casting.amaxes),
    (
        f"quantize_scaled(Tensor x, Tensor scale, {_CAST} cast, bool row, bool col, "
        "Tensor? after=None, int revision=0) -> Tensor[]",
        _quantize_scaled_op,
        _quantize_scaled_fake,
    ),
    (
        f"dequantize(Tensor data, Tensor? scale, Tensor? amax, {_CAST} cast, SymInt[] shape, "
        "ScalarType dtype, bool col) -> Tensor",
        casting.dequantize,
        _dequantize_fake,
    ),
    ("transpose(Tensor data) -> Tensor", casting.transpose, _transpose_fake),
    ("swizzle(Tensor scale) -> Tensor", casting.swizzle, casting.swizzled),
    (
        f"fake_quantize(Tensor x, {_CAST}? row, {_CAST}? col, bool keep_col, Tensor? seed, "
        "Tensor? after=None) -> Tensor[]",
        _fake_quantize_op,
        _fake_quantize_fake,
    ),
)

library.define(_OPS, replayed=True)
