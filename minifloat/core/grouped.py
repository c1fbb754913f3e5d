"""The three products of `core.linear`, once for all members of a group:

    fprop   y[r_e]  = x[r_e] w_e^T + b_e
    dgrad   dx[r_e] = g[r_e] w_e
    wgrad   dw_e    = g[r_e]^T x[r_e]

with `r_e` the rows of member e. Each member's rows and each weight are cast by themselves, so that
a member is computed as a layer of its own would. A `Call` is that of `core.linear`, with scales and
amaxes of each member where those have one. Sizes are a tensor, and nothing here reads it: inputs
and gradients are cast `spread`, weights are equal members.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import apart, ragged, spread
from ..formats import HIGH, Cast
from ..grouped_gemm import Grouped, contraction, rows, sums
from ..layout import part_names
from ..operands import Live, one_call
from ..quantizers import UsageError
from ..recipe.plan import Plan
from ..spread import Members
from ..tensors import GroupedTensorStorage, QuantizedTensorStorage
from . import linear
from .group_probe import probed_group
from .linear import DGRAD, FPROP, NONE, Call, Parts, Workspace, finish, product, stored
from .probe import G_COL, G_ROW, W_COL, W_ROW, X_COL, X_ROW, dense, precise

__all__ = ["GroupedLinear", "kept_input", "quantized_weights", "weight_operands", "wgrad"]

_QUANTIZED = (GroupedTensorStorage, QuantizedTensorStorage)


class GroupedLinear:
    """Work for `autograd.run` on (sizes, x[M, K], bias[E, N] or None, weight).

    The weight is one tensor `[E, N, K]`, or E quantized ones `[N, K]`. Copies of quantized ones are
    in `Call.workspace`.
    """

    @staticmethod
    def kind(tensors: tuple[Any, ...]) -> Any:
        return ()

    @staticmethod
    def forward(call: Call, tensors: tuple[Any, ...]) -> tuple[Tensor, list[Any], int]:
        sizes, x, bias, *weights = tensors
        plan, (need_dx, need_dw, _) = call.plan, call.needs
        need_col = need_dw and not plan.override and not call.save_input
        group = spread.members(sizes, x.shape[0])
        x_row, x_col = _input(x, group, call, need_col)
        w_row, kept_w = _weights(weights, group.num, call)
        if call.probe is not None:
            x_row, x_col, w_row = _probed(x_row, x_col, w_row, x, weights, sizes, call)
        by: Any = {"multiply": rows, "members": group}
        y = product(FPROP, x_row, w_row, call, call.dtype, bias=bias, **by)
        kept_x: Parts = NONE
        if need_dw and precise(2, call):
            kept_x = x, None, None
        elif plan.override == "dequantized" and need_dw:
            kept_x = x_row.data, x_row.scale, x_row.amax
        elif x_col is not None:
            kept_x = x_col.data, x_col.scale, x_col.amax
        elif need_dw:
            kept_x = x, None, None
        if not need_dx:
            return y, [*group, *kept_x], len(weights)
        whole = None
        if call.probe is not None and (precise(1, call) or not isinstance(weights[0], _QUANTIZED)):
            whole = dense(_flat(weights)).reshape(sizes.shape[0], -1, call.features)
        return y, [*group, *kept_x, *kept_w, whole], len(weights)

    @staticmethod
    def backward(
        call: Call, note: int, saved: list[Any], grads: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        kept_x, kept_w = saved[3:6], saved[6:]
        group = Members(*saved[:3])
        saved.clear()
        (grad,) = grads
        if grad is None:
            return None, None, None, *(None,) * note
        need_dx, need_dw, need_db = call.needs
        sizes, num = group.sizes, group.num
        g_row, g_col = _gradient(grad, group, call)
        if call.probe is not None:
            if g_row is not None:
                g_row = probed_group(G_ROW, g_row, grad, sizes, num, call)
            if g_col is not None:
                g_col = probed_group(G_COL, g_col, grad, sizes, num, call)
        db = sums(grad, sizes) if need_db else None
        # dgrad first: the weights' copy is the largest operand, and gone before dw is there.
        dx = None
        if need_dx:
            assert g_row is not None
            w_col = _weight_col(kept_w, num, grad.shape[1], call)
            if call.probe is not None:
                w_col = probed_group(W_COL, w_col, kept_w[3], None, num, call)
            kept_w.clear()
            by: Any = {"multiply": rows, "members": group}
            dx = product(DGRAD, g_row, w_col, call, call.dtype, **by)
            del w_col
        del g_row
        dws: tuple[Any, ...] = (None,) * note
        if need_dw:
            assert g_col is not None
            x_col = _input_col(kept_x, group, call, grad.shape[0])
            kept_x.clear()
            dw = wgrad(g_col, x_col, group, call)
            if dw is not None:
                dws = (dw,) if note == 1 else tuple(dw.unbind(0))
        finish(call)
        return None, dx, db, *dws


def wgrad(g_col: Grouped, x_col: Grouped, group: Members, call: Call) -> Any:
    """The weights' gradients `[E, N, K]`, or None once `main_grad` has them, or where deferred.

    `main_grad` is one tensor of that shape, or a tuple of one for each member; None: it has none.
    """
    if call.defer is not None:
        call.defer(g_col, x_col, group, call._replace(defer=None, dummy=None))
        return None
    by: Any = {"multiply": contraction, "members": group}
    out: Any = call.main_grad
    if not isinstance(out, tuple):
        return linear.wgrad(g_col, x_col, call, **by)
    (dtype, *_) = [one.dtype for one in out if one is not None]
    made = product(linear.WGRAD, g_col, x_col, call, dtype, **by)
    pairs = [(a, b) for a, b in zip(out, made.unbind(0), strict=True) if a is not None]
    change = torch._foreach_copy_ if call.overwrite else torch._foreach_add_
    change([a for a, _ in pairs], [b for _, b in pairs])
    return linear.stand_in(made.shape, call, made.device)


# ----------------------------------------------------------------------------------------- operands
def _probed(
    x_row: Grouped,
    x_col: Grouped | None,
    w_row: Grouped,
    x: Tensor,
    weights: list[Any],
    sizes: Tensor,
    call: Call,
) -> tuple[Grouped, Grouped | None, Grouped]:
    """Forward's operands, as the probe of `call` leaves them."""
    num = sizes.shape[0]
    x_row = probed_group(X_ROW, x_row, x, sizes, num, call)
    if x_col is not None:
        x_col = probed_group(X_COL, x_col, x, sizes, num, call)
    return x_row, x_col, probed_group(W_ROW, w_row, _flat(weights), None, num, call)


def _flat(weights: list[Any]) -> Any:
    """What the weights are: one tensor, or several quantized ones."""
    return weights if len(weights) > 1 else weights[0]


def _input(x: Tensor, group: Members, call: Call, need_col: bool) -> tuple[Grouped, Grouped | None]:
    plan = call.plan
    col = plan.x_col if need_col else None
    derived = plan.col_from_row[0]
    first = None if derived else col
    x_row, x_col = _cast(x, group, plan.x_row, first, call.live[0], call.seed)
    assert x_row is not None
    if col is not None and derived:
        again = _values(x_row, group, x.dtype)
        x_col = _cast(again, group, None, col, None, call.seed)[1]
    return x_row, x_col


def _input_col(kept: list[Any], group: Members, call: Call, m: int) -> Grouped:
    plan = call.plan
    data, scale, amax = kept
    shape = (m, call.features)
    made: Grouped | None
    if precise(2, call):
        made = _high(data, True)
    elif plan.override == "dequantized":
        row = Grouped(data, scale, amax, plan.x_row, shape, False, True)
        made, data = _high(_values(row, group, call.dtype), True), None
    elif plan.override:
        made = _high(data, True)
    elif call.save_input:
        made = _cast(data, group, None, plan.x_col, None, call.seed)[1]
        assert made is not None
    else:
        return Grouped(data, scale, amax, plan.x_col, shape, True, data.dtype is torch.uint8)
    if call.probe is not None:
        made = probed_group(X_COL, made, data, group.sizes, group.num, call)
    return made


def kept_input(x: Tensor, sizes: Tensor, scale: Tensor | None, call: Call) -> Parts:
    """What forward keeps of its input for backward, from an `x` that was made again: the column
    copy, by `scale` where scaling is delayed; with an override, the input itself."""
    x = x.to(call.dtype)
    if call.plan.override:
        return x, None, None
    live = None if scale is None else (scale, None)
    group = spread.members(sizes, x.shape[0])
    col = _cast(x, group, None, call.plan.x_col, live, call.seed)[1]
    assert col is not None
    return col[:3]


def _gradient(grad: Tensor, group: Members, call: Call) -> tuple[Grouped | None, Grouped | None]:
    plan, (need_dx, need_dw, _) = call.plan, call.needs
    if plan.override:
        return _high(grad, False), _high(grad, True)
    row = plan.g_row if need_dx else None
    col = plan.g_col if need_dw else None
    live, seed = call.live[2], call.seed
    if row is None and col is None:
        return None, None
    if col is not None and plan.col_from_row[2]:
        first = _cast(grad, group, plan.g_row, None, live, seed)[0]
        assert first is not None
        again = _values(first, group, grad.dtype)
        return first, _cast(again, group, None, col, None, seed)[1]
    return _cast(grad, group, row, col, live, seed)


def _weights(weights: list[Any], num: int, call: Call) -> tuple[Grouped, Parts]:
    """The row operand of the weights, and what backward makes their column operand of.

    Both copies are made at once, and the column copy is kept, a byte for each element: a weight is
    most of what a step of experts reads (a second cast at 64 x (512, 2048 -> 2048) was a tenth of
    the step).
    """
    plan, first = call.plan, weights[0]
    copies = call.workspace
    if copies is None:
        col = call.needs[0] and not plan.override
        copies = weight_operands(first, plan, call.live[1], col)
    data, scale, amax = copies[0]
    assert data is not None
    m = num * first.shape[-2]
    row = Grouped(data, scale, amax, plan.w_row, (m, call.features), False)
    if not call.needs[0]:
        return row, NONE
    if not plan.override:
        return row, copies[1]
    if plan.override == "high_precision" and not isinstance(first, _QUANTIZED):
        return row, (first.reshape(m, call.features), None, None)
    return row, copies[0]


def _weight_col(kept: list[Any], num: int, n: int, call: Call) -> Grouped:
    """The weights' column operand."""
    plan = call.plan
    data, scale, amax = kept[:3]
    shape = (num * n, call.features)
    if not plan.override:
        return Grouped(data, scale, amax, plan.w_col, shape, True)
    if plan.override == "high_precision":
        return _high(data, True)  # as it is: torch.autocast has no say in what a Linear reads here
    return _high(
        _values(Grouped(data, scale, amax, plan.w_row, shape, False), num, call.dtype), True
    )


def weight_operands(
    weight: Tensor | list[Tensor], plan: Plan, live: Live | None, col: bool
) -> Workspace:
    """Both copies of weights `[E, N, K]`, or E weights `[N, K]`, as a workspace keeps them."""
    linear.check_rounding(plan)
    of_col = plan.w_col if col and not plan.col_from_row[1] else None
    flat = weight.flatten(0, 1) if isinstance(weight, Tensor) else weight
    num = len(weight)
    row, made = _cast(flat, num, plan.w_row, of_col, live)
    assert row is not None
    if col and plan.col_from_row[1]:
        again = _values(row, num, weight[0].dtype)
        made = _cast(again, num, None, plan.w_col, None)[1]
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
    x: Tensor | list[Tensor],
    group: Members | int,
    row: Cast | None,
    col: Cast | None,
    live: Live | None,
    seed: Tensor | None = None,
) -> tuple[Grouped | None, Grouped | None]:
    """(row, column) operands of `x[M, K]`; None stays None. `live` casts with given scales.

    `group` are the members of x, spread in the result; or how many equal ones it has, which may be
    tensors of their own if they are to be codes.
    """
    if row is not None and col is not None and live is None and not one_call(row, col):
        return (
            _cast(x, group, row, None, None, seed)[0],
            _cast(x, group, None, col, None, seed)[1],
        )
    cast = row if row is not None else col
    assert cast is not None
    m, k = x.shape if isinstance(x, Tensor) else (len(x) * x[0].shape[0], x[0].shape[1])
    if cast.layout[0] is not torch.uint8:
        assert isinstance(x, Tensor)
        x = x if cast.dtype is None else x.to(cast.dtype)
        return (
            None if row is None else Grouped(x, None, None, row, (m, k), False),
            None if col is None else Grouped(x, None, None, col, (m, k), True),
        )
    found = _parts_of(x, group, row, col, live, seed)
    shared = found.get("scale")
    spreads = not isinstance(group, int)
    out: list[Grouped | None] = []
    for prefix, one in (("row_", row), ("col_", col)):
        if one is None:
            out.append(None)
            continue
        scale = found.get(f"{prefix}scale", shared)
        amax = found.get(f"{prefix}amax")
        data = found[f"{prefix}data"]
        out.append(Grouped(data, scale, amax, one, (m, k), prefix == "col_", spreads))
    return out[0], out[1]


def _parts_of(
    x: Tensor | list[Tensor],
    group: Members | int,
    row: Cast | None,
    col: Cast | None,
    live: Live | None,
    seed: Tensor | None,
) -> dict[str, Tensor]:
    """The buffers of a cast by the names of `layout.parts`."""
    if not isinstance(x, Tensor):
        return _parts_apart(x, row, col, live)
    if live is None:
        if not isinstance(group, int):
            return spread.quantize(x, group, row, col, seed=seed)
        made = ragged.quantize(x, None, group, row, col, seed=seed)
        return dict(zip(part_names(row, col), made, strict=False))
    cast = row if row is not None else col
    assert cast is not None
    scale, seen = live
    directions = {"row": row is not None, "col": col is not None}
    if isinstance(group, int):
        made = ragged.quantize_scaled(x, None, group, scale, cast, **directions, seen=seen)
        return dict(zip(part_names(row, col), made, strict=False))
    return spread.quantize_scaled(x, group, scale, cast, **directions, seen=seen)


def _parts_apart(
    matrices: list[Tensor], row: Cast | None, col: Cast | None, live: Live | None
) -> dict[str, Tensor]:
    if live is None:
        made = apart.quantize(matrices, row, col)
    else:
        cast = row if row is not None else col
        assert cast is not None
        directions = {"row": row is not None, "col": col is not None}
        made = apart.quantize_scaled(matrices, live[0], cast, **directions, seen=live[1])
    return dict(zip(part_names(row, col), made, strict=False))


def _values(g: Grouped, group: Members | int, dtype: torch.dtype) -> Tensor:
    """The values of a row operand."""
    if g.data.dtype is not torch.uint8:
        return g.data.to(dtype)
    if isinstance(group, int):
        return ragged.dequantize((g.data, g.scale, g.amax), None, group, g.cast, g.shape, dtype)
    return spread.dequantize(g.data, g.scale, g.amax, group, g.cast, g.shape, dtype)


def _high(x: Tensor, col: bool) -> Grouped:
    return Grouped(x, None, None, HIGH, (x.shape[0], x.shape[1]), col)
