"""What every test runs under: poisoned memory, fixed seeds, Hypothesis profiles, GPU skips."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import numpy
import pytest
import torch

from minifloat import writer

hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, max_examples=40)
hypothesis.settings.register_profile("deep", deadline=None, max_examples=500, print_blob=True)
hypothesis.settings.load_profile("ci")

if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


GARBAGE = 0xA5
ALLOCATORS = [
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
]
if writer._allocate is not None:
    ALLOCATORS.append((writer, "_allocate"))  # that of programs


def poison(tensor: torch.Tensor) -> None:
    """Fill fresh memory with what a computation cannot mistake for a result."""
    with torch.no_grad():
        data = tensor.data  # leaves the version counter of `tensor` alone
        if tensor.is_floating_point() and tensor.dtype.itemsize > 1 or tensor.is_complex():
            data.fill_(float("nan"))
        elif tensor.dtype is torch.bool:
            data.fill_(True)
        else:
            memory = torch.tensor([], dtype=torch.uint8, device=tensor.device)
            memory.set_(data.untyped_storage())
            # 0xFF is NaN in every one-byte floating-point type that has one.
            memory.fill_(0xFF if tensor.is_floating_point() else GARBAGE)


def is_observed() -> bool:
    """Whether a fill would count as an operation of the program: under a dispatch mode (FakeTensor,
    tracing, selective checkpointing) or a function transform (vmap, grad)."""
    modes = torch._C._len_torch_dispatch_stack() > 0
    return modes or torch._C._functorch.peek_interpreter_stack() is not None


def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(allocate)
    def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = allocate(*args, **kwargs)
        if torch.compiler.is_compiling() or is_observed():
            return tensor
        plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        if plain and not tensor.is_meta and kwargs.get("out") is None:
            poison(tensor)
        return tensor

    return wrapper


@pytest.fixture(autouse=True, scope="session")
def poisoned_memory() -> Iterator[None]:
    """Uninitialised memory holds NaN (floats) or 0xA5 bytes: reading it shows, on every run.

    For the whole session, since compiled code guards on what `torch.empty` is.
    """
    originals = [getattr(owner, name) for owner, name in ALLOCATORS]
    for (owner, name), original in zip(ALLOCATORS, originals, strict=True):
        setattr(owner, name, poisoned(original))
    yield
    for (owner, name), original in zip(ALLOCATORS, originals, strict=True):
        setattr(owner, name, original)
