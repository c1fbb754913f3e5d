"""The only reader of the environment and of device capability.

Nothing is read at import. Answers are cached: a process does not change its hardware.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from typing import Any

import torch

__all__ = [
    "advise",
    "capability",
    "cublaslt",
    "device_name",
    "encodes",
    "is_current",
    "multiprocessors",
    "reference_only",
    "replays",
    "runs_kernels",
    "shared_memory",
    "takes_words",
    "triton_available",
    "triton_version",
    "tunes",
]


@cache
def reference_only() -> bool:
    """MINIFLOAT_REFERENCE=1 runs the reference everywhere, kernels nowhere: for debugging."""
    return os.environ.get("MINIFLOAT_REFERENCE", "0") not in ("", "0")


@cache
def advise() -> bool:
    """MINIFLOAT_ADVISE=1 lets layers say where their shape makes them slower than bf16."""
    return os.environ.get("MINIFLOAT_ADVISE", "0") not in ("", "0")


@cache
def replays() -> bool:
    """MINIFLOAT_REPLAY=0 decides anew in every call what to launch: for debugging."""
    return os.environ.get("MINIFLOAT_REPLAY", "1") not in ("", "0")


@cache
def tunes() -> bool:
    """MINIFLOAT_TUNE=0 takes the algorithms that PyTorch does: of codes cuBLASLt's first, and what
    is no product of codes is PyTorch's."""
    return os.environ.get("MINIFLOAT_TUNE", "1") not in ("", "0")


@cache
def triton_available() -> bool:
    """Whether triton is installed; it is not imported to find out."""
    return importlib.util.find_spec("triton") is not None


def triton_version() -> str | None:
    """The installed triton's version, without importing it."""
    if not triton_available():
        return None
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("triton")
    except PackageNotFoundError:
        return "unknown"


@cache
def _capability(index: int) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


def runs_kernels(x: torch.Tensor) -> bool:
    """Whether Triton's kernels serve `x` where it is."""
    return x.is_cuda and not reference_only() and triton_available()


# A build without CUDA has no such function.
_current: Any = getattr(torch._C, "_cuda_getDevice", None)


def is_current(index: int) -> bool:
    """Whether launches go to the CUDA device of this index; -1 is the host's, which has none."""
    return index < 0 or _current is None or _current() == index


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one block of threads may ask for."""
    properties: Any = torch.cuda.get_device_properties(device)
    # Builds that do not tell have it at the least for what we run on: sm_90's.
    return int(getattr(properties, "shared_memory_per_block_optin", 227 << 10))


@cache
def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors a CUDA device has; of any other, those of an H200."""
    if device.type != "cuda":
        return 132
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def capability(device: torch.device | str) -> int | None:
    """Compute capability of a CUDA device as `10 * major + minor`; None for any other device."""
    device = torch.device(device)
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    return _capability(torch.cuda.current_device() if device.index is None else device.index)


# What torch.compiler.assume_constant_result does, without importing Dynamo: asked while tracing,
# the answer is a constant of the graph.
capability._dynamo_marked_constant = True  # type: ignore[attr-defined]


def encodes(device: torch.device) -> bool:
    """Whether Triton's kernels may make and read E4M3, which NVFP4's scales are as well: on sm_89
    and later."""
    found = capability(device)
    return found is None or found >= 89


def takes_words(device: torch.device) -> bool:
    """Whether kernels may compare two numbers in a word at once (max.u16x2), as sm_90 and later do.

    Without a CUDA device: what one of those would do.
    """
    found = capability(device)
    return found is None or found >= 90


def cublaslt() -> str | None:
    """The name under which PyTorch has loaded cuBLASLt; None for a build without CUDA."""
    version = torch.version.cuda
    return None if version is None else f"libcublasLt.so.{version.split('.')[0]}"


def device_name(device: torch.device | str) -> str:
    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
