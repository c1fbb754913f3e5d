"""Products of matrices whose rows come in groups, the groups' sizes on the device.

    rows         y[r_e]  = a[r_e] b_e^T (+ bias_e)      r_e: the rows of member e
    contraction  d_e     = a[r_e]^T c[r_e]
    sums         s_e     = sum of a[r_e] over rows

Each is one operator, whose result has a shape that no size decides. The rule is the loop over
members, each the product that `gemm` has for it: what a layer of its own would compute, bit for
bit. It reads the sizes on the host. `_native` is the table of what multiplies all members at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import library, ragged
from .formats import Cast, Operand
from .gemm import gemm
from .operands import column

__all__ = ["Grouped", "contraction", "members", "rows", "sums"]


class Grouped(NamedTuple):
    """One direction of a matrix `[M, K]` whose rows come in groups.

    Codes lie in the flat buffers of `ragged`, members back to back, each as it would be alone. Data
    that is not codes is the matrix itself.
    """

    data: Tensor
    scale: Tensor | None
    amax: Tensor | None
    cast: Cast
    shape: tuple[int, int]
    col: bool


def members(g: Grouped, sizes: Sequence[int]) -> list[Operand]:
    """What `gemm` reads of each member."""
    k = g.shape[1]
    if g.data.dtype is not torch.uint8:
        parts = torch.split(g.data, list(sizes))
        if g.col:
            return [Operand(p.t(), None, None, g.cast, len(p)) for p in parts]
        return [Operand(p, None, None, g.cast, k) for p in parts]
    prefix, casts = ("col_", (None, g.cast)) if g.col else ("row_", (g.cast, None))
    out = []
    for m, at in zip(sizes, ragged.places([(m, k) for m in sizes], *casts), strict=True):
        # One scale for the member has the name "scale", whichever copy it belongs to.
        scale_at, amax_at = at.get(f"{prefix}scale", at.get("scale")), at.get(f"{prefix}amax")
        data = at[f"{prefix}data"].of(g.data)
        scale = None if g.scale is None or scale_at is None else scale_at.of(g.scale)
        amax = None if g.amax is None or amax_at is None else amax_at.of(g.amax)
        made = column(data, scale, amax, g.cast, m) if g.col else None
        out.append(Operand(data, scale, amax, g.cast, k) if made is None else made)
    return out


# --------------------------------------------------------------------------------------- the fronts
def rows(
    a: Grouped,
    b: Grouped,
    sizes: Tensor,
    out_dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    fast: bool = False,
) -> Tensor:
    """`[M, N]`: each member of `a[M, K]` by the matrix of `b` with its index, and its `bias[e]`.

    `b` holds equal members, as many as there are sizes.
    """
    arguments = (*a, *b, sizes, out_dtype, bias, fast)
    return library.op("grouped_rows")(*arguments) if library.traced() else _rows(*arguments)


def contraction(
    a: Grouped, b: Grouped, sizes: Tensor, out_dtype: torch.dtype, *, fast: bool = False
) -> Tensor:
    """`[members, N, K]` of the column operands of `a[M, N]` and `b[M, K]`; zeros for no rows."""
    arguments = (*a, *b, sizes, out_dtype, fast)
    if library.traced():
        return library.op("grouped_contraction")(*arguments)  # type: ignore[no-any-return]
    return _contraction(*arguments)


def sums(a: Tensor, sizes: Tensor) -> Tensor:
    """`[members, K]`: each member summed over its rows."""
    return library.op("grouped_sums")(a, sizes) if library.traced() else _sums(a, sizes)


# --------------------------------------------------------------------------------------- the loops
def _host(sizes: Tensor, total: int) -> list[int]:
    """The sizes on the host: a wait for the device, if they are on one."""
    found = [int(s) for s in sizes.tolist()]
    ragged.check_sizes(found, len(found), total, "m_splits")
    return found


def _rows(*args: Any) -> Tensor:
    a, b = Grouped(*args[:6]), Grouped(*args[6:12])
    sizes, out_dtype, bias, fast = args[12:]
    if _native(a, b, out_dtype):
        return _grouped_mm_rows(a, b, sizes, bias)
    num = sizes.shape[0]
    y = _rows_fake(*args)
    at = 0
    host = _host(sizes, a.shape[0])
    pairs = zip(members(a, host), members(b, [b.shape[0] // num] * num), strict=True)
    for i, (x, w) in enumerate(pairs):
        if host[i]:
            of_bias = None if bias is None else bias[i]
            y[at : at + host[i]] = gemm(x, w, out_dtype, bias=of_bias, fast=fast)
        at += host[i]
    return y


def _rows_fake(*args: Any) -> Tensor:
    data, (m, _), (all_rows, k), of_col = args[0], args[4], args[10], args[11]
    width = k if of_col else all_rows // args[12].shape[0]
    return data.new_empty((m, width), dtype=args[13])  # type: ignore[no-any-return]


def _contraction(*args: Any) -> Tensor:
    a, b = Grouped(*args[:6]), Grouped(*args[6:12])
    sizes, out_dtype, fast = args[12:]
    if _native(a, b, out_dtype):
        made: Tensor = torch._grouped_mm(a.data.t(), b.data, offs=_ends(sizes))
        return made
    out = _contraction_fake(*args)
    host = _host(sizes, a.shape[0])
    for i, (g, x) in enumerate(zip(members(a, host), members(b, host), strict=True)):
        if host[i]:
            out[i] = gemm(g, x, out_dtype, fast=fast)
        else:
            out[i].zero_()
    return out


def _contraction_fake(*args: Any) -> Tensor:
    shape = args[12].shape[0], args[4][1], args[10][1]
    return args[0].new_empty(shape, dtype=args[13])  # type: ignore[no-any-return]


def _sums(a: Tensor, sizes: Tensor) -> Tensor:
    if a.is_cuda:
        return ragged.sums(a, sizes, sizes.shape[0])
    parts = torch.split(a, _host(sizes, a.shape[0]))
    return torch.stack([p.sum(0) for p in parts])


def _sums_fake(a: Tensor, sizes: Tensor) -> Tensor:
    return a.new_empty((sizes.shape[0], a.shape[1]))


# ------------------------------------------------------------------------------------ all at once
def _native(a: Grouped, b: Grouped, out_dtype: torch.dtype) -> bool:
    """Whether PyTorch's grouped product takes the pair: bf16 on CUDA, with rows of 16 bytes."""
    if not a.data.is_cuda or out_dtype is not torch.bfloat16:
        return False
    return all(
        o.data.dtype is torch.bfloat16
        and o.data.is_contiguous()
        and o.shape[1] % 8 == 0
        and o.shape[0] > 0
        and o.data.data_ptr() % 16 == 0
        for o in (a, b)
    )


def _grouped_mm_rows(a: Grouped, b: Grouped, sizes: Tensor, bias: Tensor | None) -> Tensor:
    w = b.data.view(sizes.shape[0], -1, b.shape[1])  # [members, N, K]
    y: Tensor = torch._grouped_mm(a.data, w if b.col else w.transpose(1, 2), offs=_ends(sizes))
    if bias is None:
        return y
    return y.add_(torch.repeat_interleave(bias, sizes, dim=0, output_size=y.shape[0]))


def _ends(sizes: Tensor) -> Tensor:
    return torch.cumsum(sizes, 0, dtype=torch.int32)


# ------------------------------------------------------------------------------------------ the ops
_CAST = f"{Cast.__module__}.{Cast.__qualname__}"
_GROUPED = (
    "Tensor {0}, Tensor? {0}_scale, Tensor? {0}_amax, {1} {0}_cast, SymInt[] {0}_shape, "
    "bool {0}_col"
)
_PAIR = f"{_GROUPED.format('a', _CAST)}, {_GROUPED.format('b', _CAST)}"
library.define(
    (
        (
            f"grouped_rows({_PAIR}, Tensor sizes, ScalarType out_dtype, Tensor? bias, bool fast) "
            "-> Tensor",
            _rows,
            _rows_fake,
        ),
        (
            f"grouped_contraction({_PAIR}, Tensor sizes, ScalarType out_dtype, bool fast) "
            "-> Tensor",
            _contraction,
            _contraction_fake,
        ),
        ("grouped_sums(Tensor a, Tensor sizes) -> Tensor", _sums, _sums_fake),
    )
)
