"""Steps that repeat to the bit on a GPU, where PyTorch's fastest kernels add in any order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["repeatable"]


@contextlib.contextmanager
def repeatable(on: bool) -> Iterator[None]:
    """With `on`, what runs and is compiled inside gives the same bits again, in another process
    too; without it, PyTorch's setting stays as it is.

    Attention and embeddings have slower gradients then, and Inductor tunes no sums by the clock.
    """
    if not on:
        yield
        return
    memory: Any = torch.utils.deterministic
    was = torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # nothing here reads what nobody wrote
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(was[0])
        memory.fill_uninitialized_memory = was[1]
