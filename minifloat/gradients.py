"""Gradients of activations, cast as they are produced, and what goes with them in one read.

    (h, dy)  ->  dh's row and column copies, the column copy of y = activation(h), the sum of dh

bit for bit the casts of the values of `producers.activation_gradient` and `producers.activated`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import casting, library, producers
from .formats import Cast
from .inputs import check_seed, check_usage
from .layout import parts, value_parts
from .library import op as _op
from .library import traced as _traced
from .producer import Producer
from .producers import CAST, OF, Lazy
from .sums import column_sums

__all__ = ["Given", "activation_backward"]


class Given(NamedTuple):
    """What is known of scales: delayed scaling's of dh and y, and y's amax."""

    scale: Tensor | None = None
    amax: Tensor | None = None  # a running maximum that dh's joins
    act_scale: Tensor | None = None
    act_amax: Tensor | None = None
    seed: Tensor | None = None


def activation_backward(
    lazy: Lazy,
    row: Cast | None,
    col: Cast | None,
    act: Cast | None,
    given: Given,
    *,
    dbias: bool,
    as_values: bool = False,
) -> list[Tensor]:
    """The buffers of dh's `row` and `col` copies, of the column copy `act` of y, then dbias.

    `lazy` is `activation_gradient`'s. dbias is the sum of dh's rows, in its dtype. `as_values`: the
    copies are what `dispatch.fake_quantize` makes, not `dispatch.quantize`.
    """
    check_usage(row is not None, col is not None)
    check_seed(given.seed)
    p, inputs, _, dtype, _ = lazy
    if _traced():
        made: list[Tensor]
        scale, amax, *rest = given
        *made, seen = _op("activation_backward")(
            p, list(inputs), dtype, row, col, act, scale, *rest, dbias, as_values
        )
        if amax is not None:
            amax.copy_(torch.maximum(amax, seen.reshape(amax.shape)))
        return made
    name = ("activation_backward", id(p), dtype, dbias, as_values, id(act))
    arguments = (p, inputs, dtype, row, col, act, given, dbias, as_values)
    return producers._run(name, (*inputs, *given), (row, col), lambda: _backward(*arguments))


def _backward(  # noqa: PLR0913
    p: Producer,
    inputs: Sequence[Tensor | None],
    dtype: torch.dtype,
    row: Cast | None,
    col: Cast | None,
    act: Cast | None,
    given: Given,
    dbias: bool,
    as_values: bool,
) -> list[Tensor]:
    kernels = producers._kernels(inputs)
    casts = (row, col, act)
    if kernels is not None and kernels.fuses_backward(
        p, inputs, dtype, *casts, as_values=as_values
    ):
        x = inputs[0]
        assert x is not None
        out, act_out = _gradient_buffers(p, x, *casts, as_values)
        db = casting.empty(x, (x.shape[1],), dtype) if dbias else None
        kernels.backward(p, producers._rows(inputs), dtype, casts, out, act_out, db, given)
        return [*out.values(), *act_out.values(), *([] if db is None else [db])]
    scale, amax, act_scale, act_amax, seed = given
    x = producers._produce(p, inputs, dtype)
    sums = [column_sums(x, dtype)] if dbias else []
    cast = _values if as_values else _cast
    made = cast(x, row, col, seed, scale, amax)
    del x
    if act is not None:
        y = producers._produce(p.activation(), (inputs[0], *inputs[2:3]), dtype)
        made += cast(y, None, act, seed, act_scale, None, act_amax)
    return [*made, *sums]


def _gradient_buffers(
    p: Producer, x: Tensor, row: Cast | None, col: Cast | None, act: Cast | None, as_values: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Those of dh, which is as large as h, x, and those of y."""
    m, k = x.shape
    y = (m, k // 2 if p.gated else k)
    if as_values:
        of = value_parts((m, k), row, col, False), value_parts(y, None, act, False)
    else:
        of = parts((m, k), row, col), parts(y, None, act)
    return casting.buffers(x, of[0]), casting.buffers(x, of[1])


def _cast(
    x: Tensor,
    row: Cast | None,
    col: Cast | None,
    seed: Tensor | None,
    scale: Tensor | None = None,
    running: Tensor | None = None,
    known: Tensor | None = None,
) -> list[Tensor]:
    if scale is None:
        return casting.quantize(x, row, col, known, known, seed)
    cast = row if row is not None else col
    assert cast is not None
    return casting.quantize_scaled(x, scale, running, cast, row is not None, col is not None)


def _values(
    x: Tensor, row: Cast | None, col: Cast | None, seed: Tensor | None, *_: Tensor | None
) -> list[Tensor]:
    """As `_cast` is called: formats whose values are multiplied are given no scale."""
    return casting.fake_quantize(x, row, col, False, seed)


def _backward_op(  # noqa: PLR0913
    p: Producer,
    inputs: Sequence[Tensor | None],
    dtype: torch.dtype,
    row: Cast | None,
    col: Cast | None,
    act: Cast | None,
    scale: Tensor | None,
    act_scale: Tensor | None,
    act_amax: Tensor | None,
    seed: Tensor | None,
    dbias: bool,
    as_values: bool = False,
) -> list[Tensor]:
    x = inputs[0]
    assert x is not None
    seen = torch.zeros(1, dtype=torch.float32, device=x.device)
    given = Given(scale, None if scale is None else seen, act_scale, act_amax, seed)
    return [*_backward(p, inputs, dtype, row, col, act, given, dbias, as_values), seen]


def _backward_fake(  # noqa: PLR0913
    p: Producer,
    inputs: Sequence[Tensor | None],
    dtype: torch.dtype,
    row: Cast | None,
    col: Cast | None,
    act: Cast | None,
    scale: Tensor | None,
    act_scale: Tensor | None,
    act_amax: Tensor | None,
    seed: Tensor | None,
    dbias: bool,
    as_values: bool = False,
) -> list[Tensor]:
    x = inputs[0]
    assert x is not None
    out, act_out = _gradient_buffers(p, x, row, col, act, as_values)
    made = [*out.values(), *act_out.values()]
    if dbias:
        made.append(x.new_empty(x.shape[1], dtype=dtype))
    return [*made, x.new_empty(1, dtype=torch.float32)]


library.define(
    (
        (
            f"activation_backward({OF}, {CAST}? row, {CAST}? col, {CAST}? act, Tensor? scale, "
            "Tensor? act_scale, Tensor? act_amax, Tensor? seed, bool dbias, bool as_values=False) "
            "-> Tensor[]",
            _backward_op,
            _backward_fake,
        ),
    ),
    replayed=True,
)
