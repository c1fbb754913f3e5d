"""Casts of equal matrices that are tensors of their own, as `ragged` casts them in one.

Matrices that lie back to back in one storage are read as they lie; others are copied. A graph
cannot ask where they lie, and so these casts are operators of their own there, which ask when they
run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from . import ragged
from .formats import Cast
from .inputs import autocast_dtype, check_input
from .library import define
from .library import op as _op
from .library import traced as _traced

__all__ = ["joined", "quantize", "quantize_scaled", "stacked", "whole"]


def whole(matrices: Sequence[Tensor]) -> Tensor | None:
    """`[E, N, K]`, a view of matrices that lie back to back in one storage, in order; else None."""
    first = matrices[0]
    if first.dim() != 2:
        return None
    shape, step = tuple(first.shape), first.numel()
    at, size = first.data_ptr(), step * first.element_size()
    for i, w in enumerate(matrices):
        # Addresses that follow one another inside one storage are of that storage.
        if w.data_ptr() != at + i * size or w.dtype != first.dtype:
            return None
        if tuple(w.shape) != shape or not w.is_contiguous():
            return None
    end = (first.storage_offset() + len(matrices) * step) * first.element_size()
    if step == 0 or end > first.untyped_storage().nbytes():
        return None
    with torch.no_grad():
        return first.detach().as_strided((len(matrices), *shape), (step, shape[1], 1))


def stacked(matrices: Sequence[Tensor]) -> Tensor:
    """`[E, N, K]`, without a gradient: as they lie, or a copy."""
    found = whole(matrices)
    if found is not None:
        return found
    shapes = {tuple(m.shape) for m in matrices}
    if len(shapes) > 1:
        raise ValueError(f"weights: got shapes {sorted(shapes)}; all experts must have one")
    with torch.no_grad():
        return joined(torch.stack, [m.detach() for m in matrices])


def joined(join: Callable[[list[Tensor]], Tensor], tensors: list[Tensor]) -> Tensor:
    """`join(tensors)`, by `torch.cat` or `torch.stack`, whose place in torch.autocast is to promote
    dtypes: of one that is not its own it knows no promotion, and raises."""
    if autocast_dtype(tensors[0]) is None:
        return join(tensors)
    with torch.autocast(tensors[0].device.type, enabled=False):
        return join(tensors)


def quantize(matrices: Sequence[Tensor], row: Cast | None, col: Cast | None) -> list[Tensor]:
    """`ragged.quantize` of equal members, each a tensor."""
    for one in matrices:
        check_input(one, row, col)
    front = _op("group_quantize_apart") if _traced() else _quantize
    return front(list(matrices), row, col)


def quantize_scaled(
    matrices: Sequence[Tensor],
    scales: Tensor,
    cast: Cast,
    *,
    row: bool,
    col: bool,
    seen: Tensor | None = None,
) -> list[Tensor]:
    """`ragged.quantize_scaled` of equal members, each a tensor."""
    for one in matrices:
        check_input(one, cast if row else None, cast if col else None)
    if not _traced():
        return _quantize_scaled(list(matrices), scales, cast, row, col, seen)
    made: list[Tensor] = _op("group_quantize_scaled_apart")(list(matrices), scales, cast, row, col)
    if seen is not None:
        seen.copy_(torch.maximum(seen, made[-1]))
    return made


def _flat(matrices: list[Tensor]) -> tuple[Tensor, None, int]:
    """What `ragged` takes."""
    made = stacked(matrices)
    return made.reshape(-1, made.shape[2]), None, made.shape[0]


def _fake(matrices: list[Tensor]) -> tuple[Tensor, None, int]:
    n, k = matrices[0].shape
    return matrices[0].new_empty((len(matrices) * n, k)), None, len(matrices)


def _quantize(matrices: list[Tensor], row: Cast | None, col: Cast | None) -> list[Tensor]:
    return ragged.quantize(*_flat(matrices), row, col)


def _quantize_fake(matrices: list[Tensor], row: Cast | None, col: Cast | None) -> list[Tensor]:
    return ragged.quantize(*_fake(matrices), row, col)


def _quantize_scaled(
    matrices: list[Tensor],
    scales: Tensor,
    cast: Cast,
    row: bool,
    col: bool,
    seen: Tensor | None = None,
) -> list[Tensor]:
    return ragged.quantize_scaled(*_flat(matrices), scales, cast, row=row, col=col, seen=seen)


def _quantize_scaled_fake(
    matrices: list[Tensor], scales: Tensor, cast: Cast, row: bool, col: bool
) -> list[Tensor]:
    return ragged.quantize_scaled(*_fake(matrices), scales, cast, row=row, col=col)


_CAST = f"{Cast.__module__}.{Cast.__qualname__}"
define(
    (
        (
            f"group_quantize_apart(Tensor[] matrices, {_CAST}? row, {_CAST}? col) -> Tensor[]",
            _quantize,
            _quantize_fake,
        ),
        (
            f"group_quantize_scaled_apart(Tensor[] matrices, Tensor scales, {_CAST} cast, bool row,"
            " bool col) -> Tensor[]",
            _quantize_scaled,
            _quantize_scaled_fake,
        ),
    )
)
