"""`BasicLinear` as functions of tensors and quantizers, for operators of one's own.

    forward    out = alpha x w^T + bias + beta out         (out, what backward needs of x, of w)
    backward   dx = alpha g w + beta dx,  dw = alpha g^T x + beta dw

Nothing here reads a recipe or an autocast, or is recorded by autograd: the caller's operator is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core import collectives
from ...formats import HIGH, Operand
from ...gemm import gemm
from ...tensors import QuantizedTensorStorage
from ..group import group_of
from .values import folded, plain

__all__ = ["backward", "forward"]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@torch.no_grad()
def forward(  # noqa: PLR0913  (the contract's signature)
    input: Any,  # noqa: A002
    weight: Any,
    *,
    alpha: float = 1.0,
    bias: Tensor | None = None,
    device: Any = None,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    beta: float | None = None,
    accumulate_into_out: bool = False,
    tensor_parallel_mode: str | None = None,
    tensor_parallel_group: Any = None,
    sequence_parallel: bool = False,
    with_quantized_compute: bool = False,
    backward_override: str | None = None,
    input_quantizer: Any = None,
    weight_quantizer: Any = None,
    output_quantizer: Any = None,
    input_requires_grad: bool = True,
    weight_requires_grad: bool = True,
) -> tuple[Any, Any, Any]:
    """(output, the input as wgrad takes it, the weight as dgrad takes it); None: not needed.

    With quantized compute tensors that are not quantized are, by their quantizers; without, those
    that are get dequantized.
    """
    dtype = _dtype(dtype, out, input, weight)
    if input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"input, weight: got shapes {tuple(input.shape)} and {tuple(weight.shape)}; their last "
            "dims must agree"
        )
    before, after = _links(tensor_parallel_mode, tensor_parallel_group, sequence_parallel)
    x, lead = input, tuple(input.shape[:-1])
    if before is not None:
        x, _ = before[0].compute(folded(plain(x)), (), before[1])
        lead = before[0].leading(lead, before[1])
    column = weight_requires_grad and backward_override is None
    w_column = input_requires_grad and backward_override is None
    on, kept_x, kept_w = with_quantized_compute, x, weight
    x = _prepared(x, input_quantizer, on, "input", dtype, True, column)
    w = _prepared(weight, weight_quantizer, on, "weight", dtype, True, w_column)
    y = gemm(_row(x), _row(w), dtype, bias=bias, alpha=alpha)
    if after is not None:
        y, _ = after[0].compute(y, (), after[1])
        lead = after[0].leading(lead, after[1])
    y = _stored(y.reshape(*lead, y.shape[-1]), out, accumulate_into_out, beta)
    if output_quantizer is not None and with_quantized_compute:
        y = output_quantizer.quantize(y)
    if backward_override != "high_precision":
        kept_x, kept_w = x, w
    return y, kept_x if weight_requires_grad else None, kept_w if input_requires_grad else None


@torch.no_grad()
def backward(  # noqa: PLR0913  (the contract's signature)
    grad_output: Any,
    input: Any,  # noqa: A002
    weight: Any,
    *,
    grad_input_alpha: float | None = None,
    grad_input_beta: float | None = None,
    input_requires_grad: bool = True,
    weight_requires_grad: bool = True,
    device: Any = None,
    dtype: torch.dtype | None = None,
    grad_weight: Tensor | None = None,
    grad_weight_alpha: float | None = None,
    grad_weight_beta: float | None = None,
    accumulate_into_grad_weight: bool = False,
    grad_input: Tensor | None = None,
    accumulate_into_grad_input: bool = False,
    tensor_parallel_mode: str | None = None,
    tensor_parallel_group: Any = None,
    sequence_parallel: bool = False,
    with_quantized_compute: bool = False,
    input_quantizer: Any = None,
    weight_quantizer: Any = None,
    grad_output_quantizer: Any = None,
    grad_input_quantizer: Any = None,
) -> tuple[Any, Tensor | None]:
    """(gradient of the input, of the weight); `input` and `weight` are what `forward` returned."""
    for tensor, needed, name in (
        (input, weight_requires_grad, "input"),
        (weight, input_requires_grad, "weight"),
    ):
        if needed and tensor is None:
            raise ValueError(f"{name}: got None; it is needed for the gradient of the other one")
    dtype = _dtype(dtype, grad_input, grad_output)
    before, after = _links(tensor_parallel_mode, tensor_parallel_group, sequence_parallel)
    lead = tuple(grad_output.shape[:-1])
    g: Any = grad_output
    if after is not None:
        g, _ = after[0].backward(folded(plain(g)), (), after[1])
        lead = None if after[0] is collectives.ReduceScatter else lead  # type: ignore[assignment]
    on = with_quantized_compute
    needs = (input_requires_grad, weight_requires_grad)
    g = _prepared(g, grad_output_quantizer, on, "grad_output", dtype, *needs)
    dx: Any = None
    if input_requires_grad:
        w = _prepared(weight, weight_quantizer, on, "weight", dtype, False, True)
        dx = gemm(_row(g), _column(w), dtype, alpha=_or(grad_input_alpha, 1.0))
        if before is not None:
            dx, _ = before[0].backward(dx, (), before[1])
            lead = None if before[0] is collectives.Gather else lead  # type: ignore[assignment]
        dims = _lead(lead, grad_output, dx.shape[0])
        dx = _stored(
            dx.reshape(*dims, dx.shape[-1]), grad_input, accumulate_into_grad_input, grad_input_beta
        )
        if grad_input_quantizer is not None and on:
            dx = grad_input_quantizer.quantize(dx)
    dw = None
    if weight_requires_grad:
        x = _prepared(input, input_quantizer, on, "input", dtype, False, True)
        made = dtype if grad_weight is None else grad_weight.dtype
        dw = gemm(_column(g), _column(x), made, alpha=_or(grad_weight_alpha, 1.0))
        dw = _stored(dw, grad_weight, accumulate_into_grad_weight, grad_weight_beta)
    return dx, dw


# ------------------------------------------------------------------------------------------ tensors
def _dtype(dtype: torch.dtype | None, *tensors: Any) -> torch.dtype:
    """The dtype asked for, else that of the first tensor there is."""
    if dtype is None:
        dtype = next(t.dtype for t in tensors if t is not None)
    if dtype not in DTYPES:
        raise ValueError(f"dtype: got {dtype}; allowed: {', '.join(map(str, DTYPES))}")
    return dtype


def _prepared(
    t: Any, quantizer: Any, on: bool, name: str, dtype: torch.dtype, row: bool, column: bool
) -> Any:
    """`t` as products take it: quantized, with these copies, or a matrix of `dtype`."""
    if not on:
        return folded(plain(t)).to(dtype)
    if isinstance(t, QuantizedTensorStorage):
        return t
    if quantizer is None:
        raise ValueError(
            f"{name}_quantizer: got None; quantized compute needs it for {name}, which is not "
            "quantized"
        )
    made = quantizer.copy()
    made.set_usage(rowwise=row, columnwise=column)
    return made.quantize(folded(t).to(dtype))


def _row(t: Any) -> Operand:
    if isinstance(t, QuantizedTensorStorage):
        return t.operand(False)
    return Operand(t, None, None, HIGH, t.shape[1])


def _column(t: Any) -> Operand:
    if isinstance(t, QuantizedTensorStorage):
        return t.operand(True)
    return Operand(t.t(), None, None, HIGH, t.shape[0])


def _stored(y: Tensor, out: Tensor | None, accumulate: bool, beta: float | None) -> Tensor:
    """`y`, in `out` if there is one; accumulated: `y + beta out`, where beta is 1 unless given."""
    if out is None:
        if accumulate:
            raise ValueError("out: got None, and the result is to be accumulated there; give it")
        return y
    if out.shape != y.shape:
        raise ValueError(f"out: got shape {tuple(out.shape)}; the result has {tuple(y.shape)}")
    if not accumulate:
        return out.copy_(y)
    factor = _or(beta, 1.0)
    return (out if factor == 1.0 else out.mul_(factor)).add_(y)


def _or(value: float | None, default: float) -> float:
    return default if value is None else float(value)


# ------------------------------------------------------------------------------------------ ranks
def _links(mode: str | None, process_group: Any, sequence: bool) -> tuple[Any, Any]:
    """(what runs before the product, what runs after it), each with its group, or None."""
    if mode not in (None, "column", "row"):
        raise ValueError(f"tensor_parallel_mode: got {mode!r}; allowed: None, 'column', 'row'")
    group = None if mode is None else group_of(process_group)
    if group is None:
        return None, None
    if mode == "column":
        return (collectives.Gather if sequence else collectives.Replicate, group), None
    return None, (collectives.ReduceScatter if sequence else collectives.AllReduce, group)


def _lead(lead: Any, grad_output: Any, rows: int) -> tuple[int, ...]:
    """Leading dims of the input's gradient: the output's, the first as long as ranks made it."""
    if lead is not None:
        return tuple(lead)
    inner = grad_output.shape[1:-1]
    return (rows // max(inner.numel(), 1), *inner)
