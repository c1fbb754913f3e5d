"""Collectives over the first dim as functional operators: eager runs them, graphs hold them.

A group is its name. Results are new tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["all_gather", "all_reduce", "reduce_scatter"]


def all_reduce(x: Tensor, group: str, op: str = "sum") -> Tensor:
    """`op` of x over the group."""
    functional = torch.ops._c10d_functional
    return functional.wait_tensor(functional.all_reduce(x.contiguous(), op, group))  # type: ignore[no-any-return]


def all_gather(x: Tensor, group: str, size: int) -> Tensor:
    """The ranks' x, one below the other."""
    functional = torch.ops._c10d_functional
    made = functional.all_gather_into_tensor(x.contiguous(), size, group)
    return functional.wait_tensor(made)  # type: ignore[no-any-return]


def reduce_scatter(x: Tensor, group: str, size: int) -> Tensor:
    """This rank's rows of the sum of x over the group."""
    functional = torch.ops._c10d_functional
    made = functional.reduce_scatter_tensor(x.contiguous(), "sum", size, group)
    return functional.wait_tensor(made)  # type: ignore[no-any-return]
