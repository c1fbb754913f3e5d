"""`Fp8Padding` and `Fp8Unpadding`: zero rows between splits, for code that expects them.

minifloat casts and multiplies any number of rows; nothing here needs these modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import apart, ragged
from ..formats import rup
from ..inputs import holds, known_equal
from ..recipe import get_align_size_for_quantization, get_default_recipe
from ..recipe.autocast import STATE
from ..tensors.grouped_factories import DimsError

__all__ = ["Fp8Padding", "Fp8Unpadding"]


class _Splits(torch.nn.Module):
    """`num_gemms` splits, and the multiple their rows are padded to.

    Without `align_size`, it is the one of the recipe that the first forward runs under.
    """

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        for name, given in (
            ("num_gemms", num_gemms),
            ("align_size", 1 if align_size is None else align_size),
        ):
            if not hasattr(given, "__index__") or given < 1:
                raise ValueError(f"{name}: got {given!r}; an int >= 1 is needed")
        self.num_gemms = num_gemms
        self.align_size = align_size

    def _padded(self, m_splits: Sequence[int]) -> tuple[list[int], list[int]]:
        """(the splits, the padded splits)."""
        splits = ragged.integers(m_splits, "m_splits")
        if len(splits) != self.num_gemms or not holds(min(splits) >= 0):
            raise DimsError(
                f"m_splits: got {splits}; {self.num_gemms} sizes, none negative, are needed"
            )
        if self.align_size is None:
            recipe = STATE.recipe if STATE.recipe is not None else get_default_recipe()
            self.align_size = get_align_size_for_quantization(recipe)
        return splits, [rup(m, self.align_size) for m in splits]


class Fp8Padding(_Splits):
    """`forward(inp, m_splits)` -> (each split's rows padded with zeros, the padded splits)."""

    def forward(self, inp: Tensor, m_splits: Sequence[int]) -> tuple[Tensor, Sequence[int]]:
        splits, padded = self._padded(m_splits)
        _check_rows(inp, splits)
        if known_equal(padded, splits):
            return inp, m_splits
        parts = torch.split(inp, splits)
        rows = [pad(t, (0, 0, 0, p - m)) for t, m, p in zip(parts, splits, padded, strict=True)]
        return apart.joined(torch.cat, rows), padded


class Fp8Unpadding(_Splits):
    """`forward(inp, m_splits)` -> the rows of the splits, without what `Fp8Padding` added."""

    def forward(self, inp: Tensor, m_splits: Sequence[int]) -> Tensor:
        splits, padded = self._padded(m_splits)
        _check_rows(inp, padded)
        if known_equal(padded, splits):
            return inp
        parts = torch.split(inp, padded)
        kept = [t.narrow(0, 0, m) for t, m in zip(parts, splits, strict=True)]
        return apart.joined(torch.cat, kept)


def _check_rows(inp: Any, splits: Sequence[int]) -> None:
    if not isinstance(inp, Tensor):
        raise TypeError(f"inp: got {type(inp).__name__}; a tensor is needed")
    if inp.dim() != 2 or not holds(inp.shape[0] == sum(splits)):
        raise ValueError(
            f"inp: got shape {tuple(inp.shape)}; the splits {list(splits)} need ({sum(splits)}, "
            "columns)"
        )
