"""One product, `gemm(a[M, K], b[N, K]) -> [M, N]`.

A pair of formats is *native* where PyTorch's scaled matmul takes its codes on the device at hand;
every other pair is emulated. High precision is a format like any other: its codes are its values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import library
from .alpha import is_scaled, scale_of_product, times
from .emulated import compute_dtype, emulated, partial_scales, product, values
from .formats import Cast, Operand, coded
from .native import find

__all__ = ["OPERANDS", "check", "fake", "flat", "gemm"]


def gemm(  # noqa: PLR0913  (what a product takes along)
    a: Operand,
    b: Operand,
    out_dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    fast: bool = False,
    alpha: float | None = None,
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
    there is one, else that pass; None is 1.
    """
    # No default of the function: `torch.compile(dynamic=True)` makes an input of the graph of a
    # float that it finds there, and PyTorch cannot hand that to the second layer of a graph.
    alpha = 1.0 if alpha is None else alpha
    if out is not None:
        y = gemm(a, b, out.dtype, bias=bias, fast=fast, alpha=1.0 if accumulate else alpha)
        return out.add_(y, alpha=alpha) if accumulate else out.copy_(y)
    alone = add is None and alpha == 1.0
    if not library.traced():
        check(a, b)
        if alone:
            return _gemm(a, b, out_dtype, bias, fast)
        return _joined(a, b, out_dtype, bias, fast, alpha, add, in_place)
    if not (coded(a) or coded(b)) and a.amax is None and b.amax is None:
        if alone:
            return product(a.data, b.data, out_dtype, bias)  # plain aten, which Inductor owns
        return _joined_product(a.data, b.data, out_dtype, bias, alpha, add, False)
    more = () if alone else (alpha, add)
    return library.op("gemm")(*flat(a), *flat(b), out_dtype, bias, fast, *more)  # type: ignore[no-any-return]


def check(a: Operand, b: Operand) -> None:
    if a.columns != b.columns:
        raise ValueError(
            f"contraction: a has {a.columns} columns and b has {b.columns}; they must agree"
        )


def _gemm(
    a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None, fast: bool
) -> Tensor:
    native = find(a, b)
    if native is None:
        return emulated(a, b, out_dtype, bias)
    if a.data.numel() == 0 or b.data.numel() == 0:
        return product(values(a, torch.bfloat16), values(b, torch.bfloat16), out_dtype, bias)
    return native(a, b, out_dtype, bias, fast)


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
        left = times(a, alpha)
        right = None if left is not None else times(b, alpha)
        a, b = a if left is None else left, b if right is None else right
        alpha = alpha if left is None and right is None else 1.0
    native = find(a, b) is not None
    if not native and not (partial_scales(a) and partial_scales(b)):
        dtype = compute_dtype(a, b)
        if not (is_scaled(a) or is_scaled(b)):
            pair = values(a, dtype), values(b, dtype)
            return _joined_product(*pair, out_dtype, bias, alpha, add, in_place)
        if add is not None and bias is None and alpha == 1.0:  # scaled and added in one pass
            wide = dtype if out_dtype == dtype else torch.float32
            y = product(values(a, dtype), values(b, dtype), wide, None)
            out = add if in_place else torch.empty_like(add)
            return torch.addcmul(add, y, scale_of_product(a, b), out=out)
    y = _gemm(a, b, out_dtype, bias if alpha == 1.0 else None, fast)
    return _added(y, None if alpha == 1.0 else bias, alpha, add, in_place)


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
        y = product(a, b, out_dtype, bias if alpha == 1.0 else None)
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
def flat(o: Operand) -> tuple[Any, ...]:
    return o.data, o.scale, o.amax, o.cast, o.columns, o.viewed, o.rows


def _gemm_op(*args: Any) -> Tensor:
    a, b = Operand(*args[:7]), Operand(*args[7:14])
    out_dtype, bias, fast, *more = args[14:]
    if not more:  # defaults are left out
        return _gemm(a, b, out_dtype, bias, fast)
    alpha, add = (*more, None)[:2]
    return _joined(a, b, out_dtype, bias, fast, alpha, add, False)


def fake(*args: Any) -> Tensor:
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
            fake,
        ),
    ),
    replayed=True,
)
