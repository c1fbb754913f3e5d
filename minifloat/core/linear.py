"""The quantized linear operation. The three equations of the library are in this file, once:

    fprop   y  = gemm(x.row, w.row)
    dgrad   dx = gemm(g.row, w.col)
    wgrad   dw = gemm(g.col, x.col)

Everything is a function of its arguments: `Call` says what a recipe, an autocast and a module made
of this call, and nothing here reads any of those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import dispatch, library, scalars
from ..formats import HIGH, Operand
from ..gemm import gemm
from ..operands import Live, column, operands
from ..producers import Lazy
from ..recipe.delayed import Slots, update
from ..recipe.plan import Plan
from ..sums import column_sums
from ..tensors import QuantizedTensorStorage
from ..unscaled import unscaled
from .link import Link
from .probe import G_COL, G_ROW, W_COL, W_ROW, X_COL, X_ROW, dense, precise, probed, value

__all__ = [
    "DGRAD",
    "FPROP",
    "WGRAD",
    "Call",
    "Gradient",
    "Linear",
    "Workspace",
    "cast_gradient",
    "check_rounding",
    "dequantized",
    "dgrad",
    "finish",
    "fprop",
    "input_operands",
    "probed_gradient",
    "product",
    "quantized_grad",
    "read_by_casts",
    "stand_in",
    "stored",
    "tally",
    "weight_operands",
    "wgrad",
]

Parts = tuple[Tensor | None, Tensor | None, Tensor | None]  # data, scale, amax
Workspace = tuple[Parts, Parts]  # of the row and the column operand of a weight
NONE: Parts = (None, None, None)
FPROP, DGRAD, WGRAD = range(3)


class Call(NamedTuple):
    """One call of the operation.

    `needs` says which of (x, weight, bias) want a gradient. `live` are delayed scaling's (scale,
    amax) of (x, weight, grad), `slots` its backward state. `workspace` is a weight that was cast
    before. `main_grad` receives the weight's gradient instead of autograd; `overwrite` stores it
    there instead of adding. `seed` is what stochastic rounding draws from. `save_input` keeps x as
    it is instead of its column copy. `alpha` scales the three products, and `add` joins what the
    call returns, y in forward and dx in backward, in its memory if `in_place`: see `gemm`. `hands`:
    whether who reads y, and dx, takes `Scaled`.
    """

    plan: Plan
    needs: tuple[bool, bool, bool]
    dtype: torch.dtype  # of the activations
    grad_dtype: torch.dtype  # of the weight's gradient
    features: int  # K, which packed codes do not tell
    live: tuple[Live | None, Live | None, Live | None] = (None, None, None)
    slots: Slots | None = None
    group: str | None = None
    workspace: Workspace | None = None
    main_grad: Tensor | None = None
    overwrite: bool = False
    dummy: bool | None = None  # return a stand-in for a gradient that main_grad has; True: zeros
    seed: Tensor | None = None
    save_input: bool = False
    grad_input: Any = None  # quantizes dx
    defer: Any = None  # takes the operands of wgrad, to be multiplied later
    after: Tensor | None = None  # what a graph must have before it runs forward (again)
    counts: Tensor | None = None  # how often each product ran, and in what: see `tally`
    probe: Any = None  # a `probe.Probe`: looks at operands, or has them in high precision
    alpha: float | None = None  # 1; a float would be an input of a graph: see `gemm`
    add: Tensor | None = None
    in_place: bool = False
    hands: tuple[bool, bool] = (False, False)


class Gradient(NamedTuple):
    """A gradient that its producer has cast already, by the casts of `Call.plan`."""

    row: Operand | None
    col: Operand | None
    of_bias: Tensor | None  # its sum over rows
    shape: tuple[int, int]


class Linear(Link):
    """`y = x w^T + bias` of `x[M, K]`, `weight[N, K]`, `bias[N]`.

    x may be a Lazy matrix, and the gradient a `Gradient`: their producers and this share a kernel.
    y and dx may be `Scaled`, if the call says who takes that.
    """

    params = 2

    @staticmethod
    def compute(x: Any, params: tuple[Any, ...], call: Call) -> tuple[Any, tuple[Any, ...]]:
        """(y, what backward needs)."""
        weight, bias = params
        plan, need_dw = call.plan, call.needs[1]
        if isinstance(x, Lazy) and not read_by_casts(plan, call.save_input):
            x = x.value()
        x_row, x_col = input_operands(
            x, call, need_dw and not plan.override and not call.save_input
        )
        y, kept_w = fprop(x_row, weight, bias, call)
        kept_x = NONE
        if need_dw and precise(2, call):
            kept_x = (dense(x), None, None)
        elif plan.override == "dequantized" and need_dw:
            kept_x = (x_row.data, x_row.scale, x_row.amax)
        elif need_dw and x_col is None:
            kept_x = (x, None, None)
        elif x_col is not None:
            kept_x = stored(x_col)
        return y, (*kept_x, *kept_w)

    @staticmethod
    def backward(
        grad: Any, kept: list[Any], call: Call
    ) -> tuple[Any, tuple[Tensor | None, Tensor | None]]:
        """(dx, (dweight, dbias)) of `grad[M, N]`; `kept` is emptied.

        wgrad comes first: once it is done, two of the three large operands are free.
        """
        kept_x, kept_w = kept[:3], kept[3:]
        kept.clear()
        if grad is None:
            return None, (None, None)
        m = grad.shape[0]
        g_row, g_col, db = cast_gradient(grad, call)
        dw: Tensor | None = None
        if call.needs[1]:
            x_col = _input_col(kept_x, call, m, g_col.data)
            kept_x.clear()
            dw = wgrad(g_col, x_col, call)
            del x_col
        del g_col
        dx = dgrad(g_row, kept_w, call, call.hands[1])
        finish(call)
        return dx, (dw, db)


# ------------------------------------------------------------------------------- the three products
def fprop(
    x_row: Operand, weight: Any, bias: Tensor | None, call: Call
) -> tuple[Any, tuple[Any, ...]]:
    """(y, what dgrad needs)."""
    plan, (need_dx, _, _) = call.plan, call.needs
    w_row = _weight_row(weight, call, need_dx)
    b = w_row if call.probe is None else probed(W_ROW, w_row, weight, call)
    if call.hands[0] and bias is None and not _joins(call):
        y = product(FPROP, x_row, b, call, call.dtype, unscaled)
    else:
        y = product(FPROP, x_row, b, call, call.dtype, bias=bias, **_joining(call))
    # Backward casts the weight again: by the scale of now, or from the amax that is known.
    recasts = need_dx and call.workspace is None and not plan.w_row.tiled
    w_scale = w_row.amax if recasts else None
    kept_w = call.workspace[1] if call.workspace is not None and need_dx else NONE
    return y, (*kept_w, weight if need_dx else None, w_scale)


def dgrad(g_row: Operand | None, kept_w: list[Any], call: Call, hands: bool = False) -> Any:
    """The gradient of x, or None; `kept_w` is what fprop kept.

    `hands`: who reads it takes `Scaled`.
    """
    if not call.needs[0]:
        return None
    assert g_row is not None
    w_col = _weight_col(kept_w[3], kept_w[:3], kept_w[4], g_row.data, call)
    if call.probe is not None:
        w_col = probed(W_COL, w_col, kept_w[3], call)
    if hands and call.grad_input is None and not _joins(call):
        return product(DGRAD, g_row, w_col, call, call.dtype, unscaled)
    dx = product(DGRAD, g_row, w_col, call, call.dtype, **_joining(call))
    return dx if call.grad_input is None else quantized_grad(dx, call)


def wgrad(g_col: Any, x_col: Any, call: Call, **by: Any) -> Tensor | None:
    """The weight's gradient, or None once `main_grad` has it, or where it is deferred.

    `by` is for `product`.
    """
    if call.defer is not None:
        call.defer(g_col, x_col, call._replace(defer=None, dummy=None))
        return None
    if call.alpha is not None:
        by["alpha"] = call.alpha
    out = call.main_grad
    if out is None:
        return product(WGRAD, g_col, x_col, call, call.grad_dtype, **by)  # type: ignore[no-any-return]
    add = not call.overwrite
    product(WGRAD, g_col, x_col, call, call.grad_dtype, out=out, accumulate=add, **by)
    return stand_in(out.shape, call, out.device)


def product(
    which: int,
    a: Any,
    b: Any,
    call: Call,
    dtype: torch.dtype,
    multiply: Callable[..., Any] = gemm,
    **options: Any,
) -> Any:
    """`a b^T` of one of the three, counted, and accumulated as the plan says.

    Operands of matrices are multiplied by `gemm`, or by `unscaled` for who takes `Scaled`; those of
    groups by what `core.grouped` gives.
    """
    if which == FPROP and a.cast.layout[0] is not torch.uint8:
        a = _drawn(a, call)
    a = tally(which, a, b, call)
    return multiply(a, b, out_dtype=dtype, fast=call.plan.fast[which], **options)


def _drawn(x_row: Operand, call: Call) -> Operand:
    """The input's row operand; a graph draws the seed before. Where no cast of forward reads the
    seed (the input is quantized, or stays as it is), PyTorch would draw it in backward."""
    if call.seed is None:
        return x_row
    if x_row.scale is not None:  # the smaller one to copy
        return x_row._replace(scale=scalars.tied(x_row.scale, call.seed))
    return x_row._replace(data=scalars.tied(x_row.data, call.seed))


def stand_in(shape: Any, call: Call, device: torch.device) -> Tensor | None:
    """What autograd gets in place of a gradient that `main_grad` has."""
    if call.dummy is None:
        return None
    make = torch.zeros if call.dummy else torch.empty
    return make(shape, dtype=call.grad_dtype, device=device)


def _joins(call: Call) -> bool:
    """Whether anything becomes part of the product that a call returns."""
    return call.add is not None or call.alpha is not None


def _joining(call: Call) -> dict[str, Any]:
    """What `gemm` makes part of the product that a call returns."""
    if not _joins(call):
        return {}
    return {"alpha": call.alpha, "add": call.add, "in_place": call.in_place}


def tally(which: int, a: Any, b: Any, call: Call) -> Any:
    """`a`, once its product with `b` is counted in `call.counts`, if that is there.

    Rows of it are (fprop, dgrad, wgrad); columns are products of quantized operands, those that the
    recipe leaves in high precision though it quantizes others, and those without a recipe.
    """
    if call.counts is None:
        return a
    kind = 0
    if a.cast.layout[0] is not torch.uint8 or b.cast.layout[0] is not torch.uint8:
        kind = 1 if call.plan.quantizes else 2
    return a._replace(data=scalars.tallied(a.data, call.counts, 3 * which + kind))


def finish(call: Call) -> None:
    """The end of a backward: delayed scaling's step."""
    if call.slots is not None and call.plan.update is not None:
        update(call.slots, call.plan.update, call.group)


def quantized_grad(dx: Tensor, call: Call) -> Any:
    """dx as the recipe's grad_input quantizer makes it; a graph returns its values."""
    # Random bits that follow from forward's seed, and are not those that rounded dy.
    seed = call.seed + 1 if call.seed is not None and call.plan.dx_row.stochastic else None
    if not library.traced():
        given = {} if seed is None else {"seed": seed}  # a user's quantizer need not know it
        return call.grad_input.quantize(dx, **given)
    row = operands(dx, call.plan.dx_row, None, seed=seed, keep_row=True)[0]
    assert row is not None
    return dequantized(row, dx.shape, dx.dtype)


# ----------------------------------------------------------------------------------------- operands
def read_by_casts(plan: Plan, saves_input: bool) -> bool:
    """Whether the input is read by casts alone, so that it need not exist."""
    again = saves_input or plan.override == "high_precision" or plan.col_from_row[0]
    return plan.x_row.layout[0] is torch.uint8 and not again


def input_operands(x: Any, call: Call, need_col: bool) -> tuple[Operand, Operand | None]:
    row, col = _input_operands(x, call, need_col)
    if call.probe is None:
        return row, col
    x = value(x)
    return probed(X_ROW, row, x, call), None if col is None else probed(X_COL, col, x, call)


def _input_operands(x: Any, call: Call, need_col: bool) -> tuple[Operand, Operand | None]:
    plan = call.plan
    col = plan.x_col if need_col else None
    if isinstance(x, QuantizedTensorStorage):
        return _drawn(x.operand(False), call), (x.operand(True) if need_col else None)
    row_operand, col_operand = operands(
        x,
        plan.x_row,
        None if plan.col_from_row[0] else col,
        live=call.live[0],
        seed=call.seed,
        keep_col=True,
        keep_row=plan.override == "dequantized" or plan.col_from_row[0],
        after=call.after,
    )
    assert row_operand is not None
    if col is not None and plan.col_from_row[0]:
        again = dequantized(row_operand, x.shape, x.dtype)
        col_operand = operands(again, None, col, seed=call.seed, keep_col=True)[1]
    return row_operand, col_operand


def _input_col(kept: list[Any], call: Call, m: int, after: Tensor) -> Operand:
    plan = call.plan
    x, scale, amax = kept
    made: Operand | None
    if precise(2, call):
        made = _high(x.t())
    elif plan.override == "dequantized":
        k = call.features
        row = Operand(x, scale, amax, plan.x_row, k)
        made, x = _high(dequantized(row, (m, k), call.dtype).t()), None
    elif plan.override:
        made = _high(x.t())
    elif call.save_input:
        made = operands(x, None, plan.x_col, seed=call.seed, after=after)[1]
        assert made is not None
    else:
        return column(x, scale, amax, plan.x_col, m, call.features)
    return made if call.probe is None else probed(X_COL, made, x, call)


def cast_gradient(grad: Any, call: Call, **casts: Any) -> tuple[Any, Any, Tensor | None]:
    """(row operand, column operand, gradient of the bias), those that are needed.

    `casts` is for `operands`.
    """
    row, col, db = _cast_gradient(grad, call, **casts)
    if call.probe is None or isinstance(grad, Gradient):  # whoever made one has shown it
        return row, col, db
    return *probed_gradient(row, col, grad, call), db


def probed_gradient(row: Any, col: Any, grad: Any, call: Call) -> tuple[Any, Any]:
    """The operands of `grad`, those that there are, as the probe of `call` leaves them."""
    grad = value(grad)
    return (
        None if row is None else probed(G_ROW, row, grad, call),
        None if col is None else probed(G_COL, col, grad, call),
    )


def _cast_gradient(grad: Any, call: Call, **casts: Any) -> tuple[Any, Any, Tensor | None]:
    plan, (need_dx, need_dw, need_db) = call.plan, call.needs
    if isinstance(grad, Gradient):
        return grad.row, grad.col, grad.of_bias if need_db else None
    db = column_sums(grad) if need_db else None
    if plan.override:
        return _high(grad), _high(grad.t()), db
    row = plan.g_row if need_dx else None
    col = plan.g_col if need_dw else None
    if row is None and col is None:
        return None, None, db
    if col is not None and plan.col_from_row[2]:
        live, seed = call.live[2], call.seed
        first = operands(grad, plan.g_row, None, live=live, seed=seed, keep_row=True)[0]
        assert first is not None
        again = dequantized(first, grad.shape, grad.dtype)
        return first, operands(again, None, col, seed=seed)[1], db
    return *operands(grad, row, col, live=call.live[2], seed=call.seed, **casts), db


def _weight_row(weight: Any, call: Call, keep_amax: bool = False) -> Operand:
    plan = call.plan
    if isinstance(weight, QuantizedTensorStorage):
        return weight.operand(False)
    if call.workspace is not None:
        data, scale, amax = call.workspace[0]
        assert data is not None
        n, k = weight.shape
        return Operand(data, scale, amax, plan.w_row, k, False, n)
    check_rounding(plan)
    keep_amax = keep_amax and plan.w_row == plan.w_col and not plan.w_row.tiled
    made = operands(
        weight,
        plan.w_row,
        None,
        live=call.live[1],
        keep_amax=keep_amax,
        keep_row=plan.override == "dequantized",
        after=call.after,
    )[0]
    assert made is not None
    return made


def _weight_col(
    weight: Any, kept: list[Any], scale: Tensor | None, after: Tensor, call: Call
) -> Operand:
    """The weight's column operand: from its workspace, or cast again once the gradient is there."""
    plan = call.plan
    if plan.override == "high_precision":
        return _high(weight.t())
    delayed = plan.delayed[1]
    live = (scale, None) if delayed and scale is not None else None
    if plan.override:
        if live is not None:  # forward's scale: that of now has moved on
            call = call._replace(live=(None, live, None))
        row = _weight_row(weight, call)
        return _high(dequantized(row, tuple(weight.shape), call.dtype).t())
    if isinstance(weight, QuantizedTensorStorage):
        return weight.operand(True)
    if kept[0] is not None:
        return column(kept[0], kept[1], kept[2], plan.w_col, *weight.shape)
    if plan.col_from_row[1]:
        first = operands(weight, plan.w_row, None, live=live, keep_row=True, after=after)[0]
        assert first is not None
        weight = dequantized(first, tuple(weight.shape), weight.dtype)
    amax = None if delayed or plan.col_from_row[1] else scale
    made = operands(weight, None, plan.w_col, live=live, amax=amax, after=after)[1]
    assert made is not None
    return made


def check_rounding(plan: Plan) -> None:
    """Raise for random bits in what is cast more than once."""
    if plan.w_row.stochastic or plan.w_col.stochastic:
        raise ValueError(
            f"{plan.name}, slot weight: stochastic rounding of a weight that a layer casts: each "
            "cast of it, backward's too, would have other bits; round it to nearest, or make it "
            "quantized (quantized_model_init), which rounds where it is written"
        )


def weight_operands(weight: Tensor, plan: Plan, live: Live | None, col: bool) -> Workspace:
    """Both copies of a weight as a workspace keeps them."""
    check_rounding(plan)
    from_row = col and plan.col_from_row[1]
    row, made = operands(
        weight,
        plan.w_row,
        plan.w_col if col and not from_row else None,
        live=live,
        keep_col=True,
        keep_row=plan.override == "dequantized" or from_row,  # it is decoded again
    )
    assert row is not None
    if from_row:
        again = dequantized(row, tuple(weight.shape), weight.dtype)
        made = operands(again, None, plan.w_col, keep_col=True)[1]
    return (row.data, row.scale, row.amax), NONE if made is None else stored(made)


def stored(o: Operand) -> Parts:
    """What `column` makes the column operand `o` of: its parts, as they lie in memory."""
    scale = o.scale.t() if o.viewed and o.scale is not None else o.scale
    viewed = o.viewed or o.data.dtype is not torch.uint8
    return o.data.t() if viewed else o.data, scale, o.amax


def _high(x: Tensor) -> Operand:
    return Operand(x, None, None, HIGH, x.shape[1])


def dequantized(o: Operand, shape: Any, dtype: torch.dtype) -> Tensor:
    if o.data.dtype is not torch.uint8:
        if o.amax is None:
            return o.data.to(dtype)
        raise ValueError("an emulated two-level operand keeps its codes to be dequantized")
    return dispatch.dequantize(o.data, o.scale, o.amax, o.cast, shape, dtype)
