"""`Scaled`: a matrix whose reader multiplies it by a number.

A product of two-level operands is `number * y`, and the number is known on the device alone. Where
what reads y next is a kernel of ours, it multiplies as it reads, and the pass that would do so is
saved. It also rounds to y's dtype, as that pass would: the bits are the same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Scaled", "parts", "whole"]


class Scaled(NamedTuple):
    """`data[..., N] * number`, where `number` is fp32 and has one element."""

    data: Tensor
    number: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        return self.data.device

    def reshape(self, *shape: int) -> Scaled:
        return Scaled(self.data.reshape(*shape), self.number)

    def value(self) -> Tensor:
        """The matrix."""
        return (self.data.to(torch.float32) * self.number).to(self.data.dtype)


def parts(x: Tensor | Scaled) -> tuple[Tensor, Tensor | None]:
    """(matrix, the number that multiplies it, or None), as backward keeps them."""
    return (x.data, x.number) if isinstance(x, Scaled) else (x, None)


def whole(data: Tensor, number: Tensor | None) -> Tensor | Scaled:
    """The inverse of `parts`."""
    return data if number is None else Scaled(data, number)
