"""The three products of a linear layer, once for all members of a group:

    fprop   y[r_e]  = x[r_e] w_e^T + b_e
    dgrad   dx[r_e] = g[r_e] w_e
    wgrad   dw_e    = g[r_e]^T x[r_e]

with `r_e` the rows of member e. Each member's rows and each weight are cast by themselves, so that
a member is computed as a layer of its own would. A `Call` is that of `core.linear`, with scales and
amaxes of each member where those have one; `sizes` is a tensor, and nothing here reads it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import library, ragged
from ..formats import Cast
from ..grouped_gemm import Grouped, contraction, rows, sums
from ..layout import part_names
from ..operands import Live
from ..quantizers import UsageError
from ..recipe.plan import Plan
from ..tensors import GroupedTensorStorage
from .linear import NONE, Call, Parts, Workspace, finish, stored, tally

__all__ = ["GroupedLinear", "quantized_weights", "weight_operands", "wgrad"]

_HIGH = Cast("high_precision")


class GroupedLinear:
    """Work for `autograd.run` on (sizes, x[M, K], bias[E, N] or None, weight).

    The weight is one tensor `[E, N, K]`, or E quantized ones `[N, K]`. Copies of quantized ones are
    in `Call.workspace`.
    """

    @staticmethod
    def forward(call: Call, tensors: tuple[Any, ...]) -> tuple[Tensor, list[Any], int]:
        sizes, x, bias, *weights = tensors
        plan, (need_dx, need_dw, _) = call.plan, call.needs
        need_col = need_dw and not plan.override and not call.save_input
        x_row, x_col = _input(x, sizes, call, need_col)
        w_row = _weight_row(weights, call)
        a = tally(0, x_row, w_row, call)  # type: ignore[arg-type]
        y = rows(a, w_row, sizes, call.dtype, bias=bias, fast=plan.fast[0])  # type: ignore[arg-type]
        kept_x: Parts = NONE
        if plan.override == "dequantized" and need_dw:
            kept_x = x_row.data, x_row.scale, x_row.amax
        elif x_col is not None:
            kept_x = x_col.data, x_col.scale, x_col.amax
        elif need_dw:
            kept_x = x, None, None
        if not need_dx:
            return y, [sizes, *kept_x], len(weights)
        kept_w = NONE if call.workspace is None else call.workspace[1]
        # Backward casts the weight again, by the scale of now.
        live = call.live[1] if call.workspace is None or plan.override else None
        scale = None if live is None else live[0]
        if scale is not None and not library.traced():  # a graph was given a copy
            scale = scale.clone()
        dense = weights[0] if call.workspace is None or plan.override else None
        return y, [sizes, *kept_x, *kept_w, dense, scale], len(weights)

    @staticmethod
    def backward(
        call: Call, note: int, saved: list[Any], grads: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        sizes, kept_x, kept_w = saved[0], saved[1:4], saved[4:]
        saved.clear()
        (grad,) = grads
        if grad is None:
            return None, None, None, *(None,) * note
        plan, (need_dx, need_dw, need_db) = call.plan, call.needs
        g_row, g_col = _gradient(grad, sizes, call)
        db = sums(grad, sizes) if need_db else None
        dws: tuple[Any, ...] = (None,) * note
        if need_dw:
            assert g_col is not None
            x_col = _input_col(kept_x, sizes, call, grad.shape[0])
            kept_x.clear()
            dw = wgrad(g_col, x_col, sizes, call)
            del x_col
            if dw is not None:
                dws = (dw,) if note == 1 else tuple(dw.unbind(0))
        del g_col
        dx = None
        if need_dx:
            assert g_row is not None
            w_col = _weight_col(kept_w, sizes.shape[0], grad.shape[1], call)
            g = tally(1, g_row, w_col, call)  # type: ignore[arg-type]
            dx = rows(g, w_col, sizes, call.dtype, fast=plan.fast[1])  # type: ignore[arg-type]
        finish(call)
        return None, dx, db, *dws


def wgrad(g_col: Grouped, x_col: Grouped, sizes: Tensor, call: Call) -> Any:
    """The weights' gradients `[E, N, K]`, or None once `main_grad` has them, or where deferred.

    `main_grad` is one tensor of that shape, or a tuple of one for each member.
    """
    if call.defer is not None:
        call.defer(g_col, x_col, sizes, call._replace(defer=None))
        return None
    out: Any = call.main_grad
    fast = call.plan.fast[2]
    a: Any = tally(2, g_col, x_col, call)  # type: ignore[arg-type]
    if out is None:
        return contraction(a, x_col, sizes, call.grad_dtype, fast=fast)
    several = isinstance(out, tuple)
    made = contraction(a, x_col, sizes, (out[0] if several else out).dtype, fast=fast)
    for into, dw in zip(out, made.unbind(0), strict=True) if several else ((out, made),):
        if call.overwrite:
            into.copy_(dw)
        else:
            into.add_(dw)
    if call.dummy is None:
        return None
    make = torch.zeros if call.dummy else torch.empty
    return make(made.shape, dtype=call.grad_dtype, device=made.device)


# ----------------------------------------------------------------------------------------- operands
def _input(x: Tensor, sizes: Tensor, call: Call, need_col: bool) -> tuple[Grouped, Grouped | None]:
    plan, num = call.plan, sizes.shape[0]
    col = plan.x_col if need_col else None
    derived = plan.col_from_row[0]
    first = None if derived else col
    x_row, x_col = _cast(x, sizes, num, plan.x_row, first, call.live[0], call.seed)
    assert x_row is not None
    if col is not None and derived:
        again = _values(x_row, sizes, num, x.dtype)
        x_col = _cast(again, sizes, num, None, col, None, call.seed)[1]
    return x_row, x_col


def _input_col(kept: list[Any], sizes: Tensor, call: Call, m: int) -> Grouped:
    plan, num = call.plan, sizes.shape[0]
    data, scale, amax = kept
    shape = (m, call.features)
    if plan.override == "dequantized":
        row = Grouped(data, scale, amax, plan.x_row, shape, False)
        return _high(_values(row, sizes, num, call.dtype), True)
    if plan.override:
        return _high(data, True)
    if call.save_input:
        made = _cast(data, sizes, num, None, plan.x_col, None, call.seed)[1]
        assert made is not None
        return made
    return Grouped(data, scale, amax, plan.x_col, shape, True)


def _gradient(grad: Tensor, sizes: Tensor, call: Call) -> tuple[Grouped | None, Grouped | None]:
    plan, (need_dx, need_dw, _), num = call.plan, call.needs, sizes.shape[0]
    if plan.override:
        return _high(grad, False), _high(grad, True)
    row = plan.g_row if need_dx else None
    col = plan.g_col if need_dw else None
    live, seed = call.live[2], call.seed
    if row is None and col is None:
        return None, None
    if col is not None and plan.col_from_row[2]:
        first = _cast(grad, sizes, num, plan.g_row, None, live, seed)[0]
        assert first is not None
        again = _values(first, sizes, num, grad.dtype)
        return first, _cast(again, sizes, num, None, col, None, seed)[1]
    return _cast(grad, sizes, num, row, col, live, seed)


def _weight_row(weights: list[Any], call: Call) -> Grouped:
    plan, k = call.plan, call.features
    if call.workspace is not None:
        data, scale, amax = call.workspace[0]
        assert data is not None
        first = weights[0]
        m = first.shape[0] * (first.shape[1] if len(weights) == 1 else len(weights))
        return Grouped(data, scale, amax, plan.w_row, (m, k), False)
    weight = weights[0]
    made = _cast(weight.reshape(-1, k), None, weight.shape[0], plan.w_row, None, call.live[1])[0]
    assert made is not None
    return made


def _weight_col(kept: list[Any], num: int, n: int, call: Call) -> Grouped:
    """The weights' column operand: from their workspace, or cast again."""
    plan, k = call.plan, call.features
    data, scale, amax, weight, of_forward = kept
    shape = (num * n, k)
    if plan.override == "high_precision":
        return _high(weight.reshape(shape), True)
    live = None if of_forward is None else (of_forward, None)
    if plan.override:
        if call.workspace is not None:
            row: Grouped | None = _weight_row([weight], call)
        else:
            row = _cast(weight.reshape(shape), None, num, plan.w_row, None, live)[0]
        assert row is not None
        return _high(_values(row, None, num, call.dtype), True)
    if data is not None:
        return Grouped(data, scale, amax, plan.w_col, shape, True)
    weight = weight.reshape(shape)
    if plan.col_from_row[1]:
        first = _cast(weight, None, num, plan.w_row, None, live)[0]
        assert first is not None
        weight, live = _values(first, None, num, weight.dtype), None
    made = _cast(weight, None, num, None, plan.w_col, live)[1]
    assert made is not None
    return made


def weight_operands(weight: Tensor, plan: Plan, live: Live | None, col: bool) -> Workspace:
    """Both copies of weights `[E, N, K]` as a workspace keeps them."""
    num, n, k = weight.shape
    of_col = plan.w_col if col and not plan.col_from_row[1] else None
    row, made = _cast(weight.reshape(num * n, k), None, num, plan.w_row, of_col, live)
    assert row is not None
    if col and plan.col_from_row[1]:
        again = _values(row, None, num, weight.dtype)
        made = _cast(again, None, num, None, plan.w_col, None)[1]
    return row[:3], NONE if made is None else made[:3]


def quantized_weights(weights: list[Any], col: bool) -> Workspace:
    """The copies of quantized weights, side by side: those of a group are so already."""
    held = weights[0]
    if isinstance(held, GroupedTensorStorage):
        return _parts(held, "row_"), _parts(held, "col_") if col else NONE
    return _side_by_side(weights, False), _side_by_side(weights, True) if col else NONE


def _parts(group: Any, prefix: str) -> Parts:
    data = group._part(f"{prefix}data")
    if data is None:
        raise UsageError(
            "weight: the group has no columnwise copy, which the gradient of the input needs; make "
            "it with gradients enabled"
        )
    return data, group._part(f"{prefix}scale"), group._part(f"{prefix}amax")


def _side_by_side(weights: list[Any], col: bool) -> Parts:
    found = [w.operand(col) for w in weights]
    parts = [stored(o) if col else (o.data, o.scale, o.amax) for o in found]
    if found[0].data.dtype is not torch.uint8:
        return torch.cat([p[0] for p in parts]), None, None  # type: ignore[misc]
    made = [
        None if parts[0][i] is None else torch.cat([p[i].reshape(-1) for p in parts])  # type: ignore[union-attr]
        for i in range(3)
    ]
    return made[0], made[1], made[2]


# -------------------------------------------------------------------------------------------- casts
def _cast(
    x: Tensor,
    sizes: Tensor | None,
    num: int,
    row: Cast | None,
    col: Cast | None,
    live: Live | None,
    seed: Tensor | None = None,
) -> tuple[Grouped | None, Grouped | None]:
    """(row, column) operands of `x[M, K]`; None stays None. `live` casts with given scales."""
    if live is not None:
        return _scaled(x, sizes, num, row, col, live)
    if row is not None and col is not None and not _together(row, col):
        return (
            _cast(x, sizes, num, row, None, None, seed)[0],
            _cast(x, sizes, num, None, col, None, seed)[1],
        )
    cast = row if row is not None else col
    assert cast is not None
    m, k = x.shape
    if cast.layout[0] is not torch.uint8:
        x = x if cast.dtype is None else x.to(cast.dtype)
        return (
            None if row is None else Grouped(x, None, None, row, (m, k), False),
            None if col is None else Grouped(x, None, None, col, (m, k), True),
        )
    made = ragged.quantize(x, sizes, num, row, col, seed=seed)
    found = dict(zip(part_names(row, col), made, strict=False))
    shared = found.get("scale")
    out: list[Grouped | None] = []
    for prefix, one in (("row_", row), ("col_", col)):
        if one is None:
            out.append(None)
            continue
        scale = found.get(f"{prefix}scale", shared)
        amax = found.get(f"{prefix}amax")
        out.append(Grouped(found[f"{prefix}data"], scale, amax, one, (m, k), prefix == "col_"))
    return out[0], out[1]


def _scaled(
    x: Tensor,
    sizes: Tensor | None,
    num: int,
    row: Cast | None,
    col: Cast | None,
    live: Live,
) -> tuple[Grouped | None, Grouped | None]:
    cast = row if row is not None else col
    assert cast is not None
    scale, amax = live
    made = ragged.quantize_scaled(
        x, sizes, num, scale, cast, row=row is not None, col=col is not None
    )
    if amax is not None:
        amax.copy_(torch.maximum(amax, made[-1]))
    shape = (x.shape[0], x.shape[1])
    return (
        None if row is None else Grouped(made[0], made[-2], None, row, shape, False),
        None if col is None else Grouped(made[-3], made[-2], None, col, shape, True),
    )


def _together(row: Cast, col: Cast) -> bool:
    """Whether one call makes both copies: the formats agree up to what a direction may add."""
    return row.format_name == col.format_name and row.layout[0] is not None


def _values(g: Grouped, sizes: Tensor | None, num: int, dtype: torch.dtype) -> Tensor:
    """The values of a row operand."""
    if g.data.dtype is not torch.uint8:
        return g.data.to(dtype)
    return ragged.dequantize((g.data, g.scale, g.amax), sizes, num, g.cast, g.shape, dtype)


def _high(x: Tensor, col: bool) -> Grouped:
    return Grouped(x, None, None, _HIGH, (x.shape[0], x.shape[1]), col)
