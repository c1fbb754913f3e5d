"""What a quantizer makes of a group of matrices: the flat buffers of a grouped tensor, by part.

The parts are those of `layout.parts`, flat, and two that groups keep besides: `row_amax` of formats
with one scale for a member, and `encode`, the scale it was multiplied by.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import ragged
from ..formats import Cast
from ..inputs import draw_seed
from ..layout import part_names, shares_scale
from ..quantizers import Quantizer

__all__ = ["allocate", "check_quantizer", "of_matrix", "of_members", "shares"]


class QuantizerError(TypeError, ValueError):
    """What is no quantizer cannot make members."""


def check_quantizer(quantizer: Any) -> None:
    """Raise for a quantizer whose results cannot be members of a group."""
    name = type(quantizer).__name__
    if not isinstance(quantizer, Quantizer):
        raise QuantizerError(f"quantizer: got {name}; a Quantizer is needed")
    if quantizer._storage_class is None:
        raise ValueError(
            f"quantizer: got {name}; one of this package that makes single quantized tensors is "
            "needed, or None and a dtype"
        )
    described = quantizer._described()
    casts = [c for _, row, col, _ in described for c in (row, col) if c is not None]
    if len(described) != 1 or described[0][0] or any(c.layout[0] is not torch.uint8 for c in casts):
        raise NotImplementedError(
            f"quantizer: got {name}; a group holds one element format and its scales: pass "
            "quantizer=None and a dtype for high precision, or keep members apart (split_quantize)"
        )
    row, col = quantizer._casts()
    if col is not None and col.row_scaled:
        raise ValueError(
            f"quantizer: {name} scales rows, which a group holds in the rowwise copy only; pass "
            "columnwise=False"
        )


def shares(quantizer: Any) -> bool:
    """Whether one scale serves a member, and both its copies."""
    return any(c is not None and shares_scale(c) for c in quantizer._casts())


def allocate(
    quantizer: Any, shapes: Sequence[Sequence[int]], device: torch.device | str
) -> dict[str, Tensor]:
    """Uninitialised buffers for members of these shapes."""
    row, col = quantizer._casts()
    made = {
        p.name: torch.empty(p.shape, dtype=p.dtype, device=device)
        for p in ragged.exact(shapes, row, col)
    }
    if shares(quantizer):
        made["row_amax"] = torch.empty(len(shapes), dtype=torch.float32, device=device)
        if not quantizer._state_written():  # it computes the scale, so there is one to keep
            made["encode"] = torch.empty(len(shapes), dtype=torch.float32, device=device)
    return made


def of_matrix(
    quantizer: Any,
    x: Tensor,
    sizes: Tensor | None,
    num: int,
    *,
    seed: Tensor | None = None,
    noop_flag: Tensor | None = None,
) -> dict[str, Tensor]:
    """Buffers of the `num` members of `x[M, K]`; sizes stay on the device."""
    row, col = _casts(quantizer)
    swizzle = quantizer.optimize_for_gemm
    if quantizer._state_written():
        cast: Any = row if row is not None else col
        scales = quantizer.scale.reshape(1).expand(num).contiguous()
        made = ragged.quantize_scaled(
            x, sizes, num, scales, cast, row=row is not None, col=col is not None
        )
    else:
        seed = _seed(quantizer, x, seed)
        made = ragged.quantize(x, sizes, num, row, col, seed=seed, swizzle=swizzle)
    return _named(quantizer, row, col, made, noop_flag)


def of_members(
    quantizer: Any,
    tensors: Sequence[Tensor],
    *,
    seed: Tensor | None = None,
    noop_flag: Tensor | None = None,
) -> dict[str, Tensor]:
    """Buffers of members that lie anywhere and may differ in both dims."""
    row, col = _casts(quantizer)
    if quantizer._state_written():
        made = _scaled_members(quantizer, tensors, row, col)
    else:
        made = ragged.quantize_members(
            tensors,
            row,
            col,
            seed=_seed(quantizer, tensors[0], seed),
            swizzle=quantizer.optimize_for_gemm,
        )
    return _named(quantizer, row, col, made, noop_flag)


def _scaled_members(
    quantizer: Any, tensors: Sequence[Tensor], row: Cast | None, col: Cast | None
) -> list[Tensor]:
    cast: Any = row if row is not None else col
    scale = quantizer.scale.reshape(1)
    each = [
        ragged.quantize_scaled(t, None, 1, scale, cast, row=row is not None, col=col is not None)
        for t in tensors
    ]
    return [torch.cat(parts) for parts in zip(*each, strict=True)]


def _casts(quantizer: Any) -> tuple[Cast | None, Cast | None]:
    if quantizer._reduces():
        raise NotImplementedError(
            f"quantizer: this {type(quantizer).__name__} reduces amaxes over processes, which a "
            "group of tensors does not do; use split_quantize"
        )
    return quantizer._casts()  # type: ignore[no-any-return]


def _seed(quantizer: Any, x: Tensor, seed: Tensor | None) -> Tensor | None:
    stochastic = any(c is not None and c.stochastic for c in quantizer._casts())
    if seed is not None or not stochastic:
        return seed
    return draw_seed(x.device)


def _named(
    quantizer: Any,
    row: Cast | None,
    col: Cast | None,
    made: list[Tensor],
    noop_flag: Tensor | None,
) -> dict[str, Tensor]:
    by_part = dict(zip(part_names(row, col), made, strict=False))
    if not shares(quantizer):
        return by_part
    live = quantizer._state_written()
    seen = by_part["row_amax"] = made[-1 if live else -2]
    if not live:
        by_part["encode"] = made[-1]
    for amax in live:
        most = seen.amax().reshape(amax.shape)
        if noop_flag is not None:
            most = torch.where(noop_flag.reshape(()) == 1, torch.zeros_like(most), most)
        amax.copy_(torch.maximum(amax, most))
    return by_part
