"""From casts of what is produced to the kernels that serve them, by the data of their formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import env
from ..formats import Cast
from ..producer import Producer
from . import activation_grad, gradient_e8m0, produce, produce_e8m0
from .produce import quantize_scaled
from .produce_e8m0 import has_blocks

__all__ = [
    "backward",
    "fuses",
    "fuses_backward",
    "quantize",
    "quantize_scaled",
    "value",
    "values",
]

Inputs = Sequence[Tensor | None]


def value(p: Producer, inputs: Inputs, out: Tensor) -> None:
    """`out` = what `p` produces, in its dtype."""
    (activation_grad if p.differentiates else produce).value(p, inputs, out)


def fuses(
    p: Producer,
    inputs: Inputs,
    dtype: torch.dtype,
    row: Cast | None,
    col: Cast | None,
    *,
    as_values: bool = False,
) -> bool:
    """Whether `quantize`, or `values`, makes these copies of what `p` produces in `dtype`."""
    cast = row if row is not None else col
    if cast is None or p.differentiates or _has_numbers(p, inputs) or not _encodes(inputs):
        return False
    if has_blocks(cast):
        return produce_e8m0.fuses(p, inputs, dtype, row, col)
    return not as_values and produce.fuses(p, inputs, dtype, row, col)


def _encodes(inputs: Inputs) -> bool:
    return all(x is None or env.encodes(x.device) for x in inputs)


def _has_numbers(p: Producer, inputs: Inputs) -> bool:
    """Whether what is read is multiplied by a number: kernels of values alone do that.

    Products that leave a number are of formats that no kernel here casts to. A recipe that casts
    the activation of one to another format has it made, then cast: bytes are those of a pass that
    multiplies.
    """
    return not p.normalizes and len(inputs) > (2 if p.differentiates else 1)


def quantize(
    p: Producer,
    inputs: Inputs,
    dtype: torch.dtype,
    row: Cast | None,
    col: Cast | None,
    out: dict[str, Tensor],
    known: Tensor | None,
) -> None:
    """Codes into `out`, the buffers of `layout.parts` by name; `known` is the amax, if it is."""
    cast = row if row is not None else col
    assert cast is not None
    if has_blocks(cast):
        produce_e8m0.quantize(p, inputs, row, col, out)
    else:
        produce.quantize(p, inputs, dtype, row, col, out, known)


def values(
    p: Producer, inputs: Inputs, row: Cast | None, col: Cast | None, out: dict[str, Tensor]
) -> None:
    """bf16 values into `row` and `col` of `out`, or the column's codes into `layout.parts`'s."""
    produce_e8m0.quantize(p, inputs, row, col, out)


def fuses_backward(
    p: Producer,
    inputs: Inputs,
    dtype: torch.dtype,
    row: Cast | None,
    col: Cast | None,
    act: Cast | None,
    *,
    as_values: bool = False,
) -> bool:
    """Whether `backward` makes these copies: of dh's row and column, and of y's column."""
    cast = row if row is not None else col
    assert cast is not None
    if _has_numbers(p, inputs) or not _encodes(inputs):
        return False
    if has_blocks(cast):
        return gradient_e8m0.fuses_backward(p, inputs, dtype, row, col, act)
    return not as_values and activation_grad.fuses_backward(p, inputs, dtype, row, col, act)


def backward(
    p: Producer,
    inputs: Inputs,
    dtype: torch.dtype,
    casts: tuple[Cast | None, Cast | None, Cast | None],
    out: dict[str, Tensor],
    act_out: dict[str, Tensor],
    db: Tensor | None,
    given: Any,
) -> None:
    """Everything into `out` (dh), `act_out` (y) and `db`; `given` is `gradients.Given`.

    Buffers named as `layout.parts` has them are for codes; `row` and `col`, for values.
    """
    cast = casts[0] if casts[0] is not None else casts[1]
    assert cast is not None
    if has_blocks(cast):
        gradient_e8m0.backward(p, inputs, casts, out, act_out, db)
    else:
        activation_grad.backward(p, inputs, dtype, casts, out, act_out, db, given)
