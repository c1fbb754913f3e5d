"""The table of fusions. Order matters: earlier rows take first."""

from __future__ import annotations

from typing import Any

import torch

from ..basic.activation import GELU, ActivationOperation, ReLU
from ..basic.bias import Bias
from ..basic.extra import AddExtraInput, MakeExtraOutput
from ..basic.grouped_linear import GroupedLinear
from ..basic.linear import BasicLinear
from ..basic.norm import NormOperation, RMSNorm
from ..basic.quantize import Quantize
from ..basic.scale import ConstantScale
from ..basic.scaled_activation import ScaledActivationOperation
from ..fuser import (
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
)
from ..table import Row, Slot, scan
from .backward import (
    BackwardActivationBias,
    BackwardActivationQuantize,
    BackwardAddRMSNorm,
    BackwardLinearAdd,
    BackwardLinearScale,
)
from .forward_linear import (
    ForwardLinearBiasActivation,
    ForwardLinearBiasAdd,
    ForwardLinearScaleAdd,
)
from .forward_quantize import ForwardActivationQuantize, ForwardNormQuantize
from .grouped_mlp import ForwardGroupedMLP
from .mlp import FusedMLP

__all__ = ["BACKWARD", "BOTH", "FORWARD"]


def _not_row(op: Any, recipe: Any) -> bool:
    return bool(op.tensor_parallel_mode != "row")


def _not_column(op: Any, recipe: Any) -> bool:
    return bool(op.tensor_parallel_mode != "column")


def _short(op: Any, recipe: Any) -> bool:
    """The epilogue of a product adds a bias of 16 bits."""
    return _not_row(op, recipe) and op.weight.dtype in (torch.float16, torch.bfloat16)


def _in_place(op: Any, recipe: Any) -> bool:
    return bool(op._in_place)


def _not_in_place(op: Any, recipe: Any) -> bool:
    return not op._in_place


def _takes_inputs(op: Any, recipe: Any) -> bool:
    return bool(op.takes_inputs(recipe))


def _takes_gradients(op: Any, recipe: Any) -> bool:
    return bool(op.takes_gradients(recipe))


def _repeats_input(op: Any, recipe: Any) -> bool:
    return bool(op.repeats_input(recipe))


def _one_dim(op: Any, recipe: Any) -> bool:
    """A norm over the dim that the next product sums over."""
    return len(op._shape) == 1


_quantizes = Slot((BasicLinear, Quantize), _takes_gradients)
_linear = Slot((BasicLinear,), _not_row)
_add = Slot((AddExtraInput,), _in_place)

BOTH: tuple[Row, ...] = (
    Row(
        FusedMLP,
        (
            Slot((BasicLinear,), _takes_gradients),
            Slot((Bias,), optional=True),
            Slot((ActivationOperation,)),
            Slot((BasicLinear,), _repeats_input),
            Slot((Bias,), optional=True),
            Slot((AddExtraInput,), _in_place, optional=True),
        ),
        quantized=True,
        fits=FusedMLP.fits,
    ),
)
FORWARD: tuple[Row, ...] = (
    Row(ForwardLinearBiasAdd, (_linear, Slot((Bias,), optional=True), _add)),
    Row(ForwardLinearBiasActivation, (Slot((BasicLinear,), _short), Slot((Bias,)))),
    Row(ForwardLinearScaleAdd, (_linear, Slot((ConstantScale,)), _add)),
    Row(
        ForwardNormQuantize,
        (Slot((NormOperation,), _one_dim),),
        after=Slot((BasicLinear,), _takes_inputs),
    ),
    Row(
        ForwardActivationQuantize,
        (Slot((ActivationOperation,)),),
        after=Slot((BasicLinear,), _takes_inputs),
    ),
    Row(
        ForwardGroupedMLP,
        (
            Slot((GroupedLinear,)),
            Slot((ScaledActivationOperation,)),
            Slot((GroupedLinear,), _repeats_input),
        ),
    ),
)
BACKWARD: tuple[Row, ...] = (
    Row(
        BackwardLinearAdd, (Slot((MakeExtraOutput,), _in_place), Slot((BasicLinear,), _not_column))
    ),
    Row(BackwardLinearScale, (Slot((BasicLinear,), _not_column), Slot((ConstantScale,)))),
    Row(
        BackwardActivationBias,
        (Slot((Bias,)), Slot((GELU, ReLU), exact=True)),
        before=_quantizes,
        quantized=True,
    ),
    Row(
        BackwardActivationQuantize,
        (Slot((Bias,), optional=True), Slot((ActivationOperation,))),
        before=_quantizes,
        quantized=True,
    ),
    Row(BackwardAddRMSNorm, (Slot((MakeExtraOutput,), _not_in_place), Slot((RMSNorm,)))),
)


def _fusion(row: Row) -> Any:
    def fuse(ops: list[Any], *, recipe: Any = None, **unused: Any) -> list[Any]:
        return scan(row, ops, recipe)

    fuse.__qualname__ = row.fused.__name__
    return fuse


for _row in BOTH:
    _row.fused.fuse_ops = staticmethod(_fusion(_row))  # type: ignore[attr-defined]
    register_forward_backward_fusion(_row.fused.fuse_ops)  # type: ignore[attr-defined]
for _row in FORWARD:
    _row.fused.fuse_forward_ops = staticmethod(_fusion(_row))  # type: ignore[attr-defined]
    register_forward_fusion(_row.fused.fuse_forward_ops)  # type: ignore[attr-defined]
for _row in BACKWARD:
    _row.fused.fuse_backward_ops = staticmethod(_fusion(_row))  # type: ignore[attr-defined]
    register_backward_fusion(_row.fused.fuse_backward_ops)  # type: ignore[attr-defined]
