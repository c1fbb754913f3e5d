"""Batches: launches and products of a recorded program, made by one call of compiled C.

Python and a dispatcher around each of them are most of what the host does for a small layer: H200,
a launch 4.8 us and a product by PyTorch 14 to 24. `batch.c` is compiled where it is first needed,
by what compiles Triton's own launchers; where nothing does, programs do without.

The same C tells what arguments are like, in less time than `programs` does.

A plan is 64-bit words; `batch.c` says which. Where it refers to memory, a word is given here as
`(name, offset)`, of which the plan knows the order alone, or as `(number,)`.
"""

from __future__ import annotations

import ctypes
import struct
from functools import cache
from pathlib import Path
from typing import Any

from . import env

__all__ = ["Steps", "build", "compiled", "context", "launch_words", "state"]

LAUNCH, PRODUCT, ASIDE = range(3)  # as in batch.c
PARAMETERS, ADDRESSES = 64, 256
# Versions of Triton whose kernels end with two addresses of scratch memory.
KNOWN = ("3.6.", "3.7.")
# What a kernel may ask of its launch besides.
SPECIAL = ("launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size")


class Steps:
    """The words of a plan that is being written, and the names whose addresses it takes."""

    def __init__(self) -> None:
        self.words: list[int] = []
        self.names: dict[str, int] = {}
        self.count = 0

    def add(self, kind: int, words: list[Any]) -> None:
        """One step: numbers, and references to memory."""
        self.count += 1
        self.words.append(kind)
        for w in words:
            if isinstance(w, tuple) and isinstance(w[0], str):
                self.words += (self.names.setdefault(w[0], len(self.names)), w[1])
            elif isinstance(w, tuple):
                self.words += (-1, w[0])
            else:
                self.words.append(w)

    @property
    def plan(self) -> bytes:
        return struct.pack(f"<{len(self.words) + 1}q", self.count, *map(_signed, self.words))


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


def launch_words(kernel: Any, programs: int, args: list[Any]) -> list[Any] | None:
    """The words of a launch of a kernel that Triton compiled; None: only Triton can launch it.

    `args` are all of the function's: numbers, None, or (name, offset).
    """
    metadata, signature = getattr(kernel, "metadata", None), _signature(kernel)
    if metadata is None or signature is None or len(signature) != len(args):
        return None
    if getattr(metadata, "num_ctas", 1) != 1 or any(getattr(metadata, s, 0) for s in SPECIAL):
        return None
    if programs < 1:  # nothing is launched
        return None
    values = []
    for kind, arg in zip(signature, args, strict=True):
        if kind == "constexpr":
            continue
        value = _encoded(kind, arg)
        if value is None:
            return None
        values.append(value)
    if len(values) > PARAMETERS:
        return None
    threads = 32 * metadata.num_warps
    return [kernel.function, programs, threads, metadata.shared, len(values), *values]


def _signature(kernel: Any) -> list[Any] | None:
    found = getattr(getattr(kernel, "src", None), "signature", None)
    return None if found is None else list(found.values())


def _encoded(kind: Any, arg: Any) -> tuple[Any, ...] | None:
    """A reference: to memory, or to the bits of a number of this type."""
    if isinstance(arg, tuple):
        return arg if isinstance(kind, str) and kind.startswith("*") else None
    if kind == "fp32" and isinstance(arg, int | float):
        return (struct.unpack("<I", struct.pack("<f", arg))[0],)
    if kind in ("i32", "i64") and type(arg) is int:
        return (arg,)
    return None


@cache
def build() -> Any:
    """The compiled `batch.c`; an error says why there is none."""
    from triton.runtime.build import compile_module_from_src

    source = (Path(__file__).parent / "batch.c").read_text(encoding="utf-8")
    return compile_module_from_src(src=source, name="minifloat_batch")


def compiled() -> Any:
    """`batch.c`, compiled and bound to this process's CUDA; None: programs do without."""
    return _bound()[0]


def state() -> str:
    """Whether there are batches, for `minifloat doctor`."""
    return _bound()[1]


@cache
def _bound() -> tuple[Any, str]:
    version = env.triton_version()
    if not (version or "").startswith(KNOWN):
        return None, f"none: Triton {version} is none of those whose launches are known"
    driver, product = _library("libcuda.so.1"), _library(env.cublaslt())
    if driver is None or product is None:
        return None, "none: no CUDA"
    try:
        made = build()
    except Exception as error:
        # No compiler, no headers, a cache that cannot be written: programs are as right without.
        return None, f"none: {type(error).__name__}: {error}"
    functions = (
        driver.cuLaunchKernel,
        driver.cuCtxGetCurrent,
        driver.cuCtxSetCurrent,
        product.cublasLtMatmulDescSetAttribute,
        product.cublasLtMatmul,
    )
    # Both as they were before CUDA 12.3, where edges carry no data.
    captures = ("cuStreamGetCaptureInfo_v2", "cuStreamUpdateCaptureDependencies")
    given = (*functions, *(getattr(driver, name, None) for name in captures))
    made.bind(*(0 if f is None else ctypes.cast(f, ctypes.c_void_p).value for f in given))
    return made, "launches and products of a recorded step in one call"


def _library(name: str | None) -> Any:
    if name is None:
        return None
    try:
        return ctypes.CDLL(name)  # PyTorch has loaded it: this is the same
    except OSError:
        return None


def context() -> int:
    """The CUDA context of this thread, in which a device's kernels have run."""
    found = ctypes.c_void_p()
    _library("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(found))
    return found.value or 0
