"""Sums over the rows of a matrix: the gradient of a bias."""

from __future__ import annotations

import torch
from torch import Tensor

from . import env, library, programs
from .casting import matrix

__all__ = ["column_sums"]


def column_sums(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`x[M, K]` summed over M in fp32 (a wider x in its own dtype), rounded once, to `dtype`: x's
    unless given."""
    dtype = x.dtype if dtype is None else dtype
    if library.traced():
        return library.op("column_sums")(x, dtype)  # type: ignore[no-any-return]
    if not _has_kernel(x):
        return _column_sums(x, dtype)
    of = programs.key(("column_sums", dtype), (x,))
    made = programs.again(of, (x,))
    return (made or programs.replay(of, (x,), lambda: [_column_sums(x, dtype)]))[0]


def _has_kernel(x: Tensor) -> bool:
    return env.runs_kernels(x) and x.numel() > 0 and x.element_size() <= 4


def _column_sums(x: Tensor, dtype: torch.dtype) -> Tensor:
    if not _has_kernel(x):
        wide = torch.promote_types(x.dtype, torch.float32)
        return x.sum(0, dtype=wide).to(dtype)
    from .kernels import sums

    out = torch.empty(x.shape[1], dtype=dtype, device=x.device)
    sums.column_sums(matrix(x), out)
    return out


def _column_sums_fake(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape[1:], dtype=dtype)


library.define(
    (("column_sums(Tensor x, ScalarType dtype) -> Tensor", _column_sums, _column_sums_fake),),
    replayed=True,
)
