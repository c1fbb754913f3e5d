"""Inputs and comparisons for kernel tests.

A test file's checks run twice: on the GPU, bit for bit, and (run as a script by `run_interpreted`)
in Triton's interpreter on the CPU, for the indexing. The interpreter's cast to FP8 rounds wrongly,
so codes may be off a little there; everything else is exact in both.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from minifloat.formats import Cast

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
ROOT = Path(__file__).resolve().parents[2]
GARBAGE = 0xA5

SHAPES = [(1, 1), (1, 17), (17, 1), (100, 127), (129, 129), (128, 4096), (4096, 300), (100, 128)]
BOTH = (True, True)
DIRECTIONS = [(True, False), (False, True), BOTH]
# Every class of shapes, dtype and direction compiles a kernel anew, for a second or so: the other
# dtypes, and one direction alone, see one shape of partial and one of whole tiles.
CASES = [
    *((shape, torch.bfloat16) for shape in SHAPES),
    *((shape, torch.float16) for shape in ((100, 127), (128, 4096))),
    *((shape, torch.float32) for shape in ((100, 127), (128, 4096))),
]
FEW = [((100, 127), torch.bfloat16), ((128, 4096), torch.bfloat16)]
DIRECTED = [
    *((BOTH, shape, dtype) for shape, dtype in CASES),
    *((one, shape, dtype) for one in DIRECTIONS[:2] for shape, dtype in FEW),
]
STRIDED = (100, 127)  # the shape that also comes with strided rows
EMPTY = [(0, 0), (0, 5), (5, 0)]
SMALL = [(1, 17), (17, 1), (130, 129), (128, 256)]  # for the interpreter


def inputs(shape: tuple[int, int], dtype: torch.dtype, plain: bool = False) -> Iterator[Tensor]:
    """Matrices on the CPU: many binades, zero blocks, strided rows, extremes, Inf and NaN.

    `plain`: without extremes, for the interpreter, which is slow and casts those wrongly.
    """
    g = torch.Generator().manual_seed(shape[0] * 1009 + shape[1])
    normal = torch.randn(shape, generator=g)
    wide = normal * torch.exp2(torch.randint(-12, 12, shape, generator=g).float())
    wide[: shape[0] // 2, : shape[1] // 2] = 0  # blocks of zeros
    if plain or shape == STRIDED:
        odd = torch.full((shape[0], shape[1] + 3), torch.nan).to(dtype)
        odd[:, 1 : shape[1] + 1] = wide.to(dtype)
        yield odd[:, 1 : shape[1] + 1]
    if plain:
        if shape[0] % 128 == shape[1] % 128 == 0:
            yield wide.to(dtype)  # whole tiles with aligned rows: kernels of words take those
        return
    if shape == STRIDED:
        wider = torch.full((shape[0], 256), torch.nan).to(dtype)
        wider[:, : shape[1]] = normal.to(dtype)
        yield wider[:, : shape[1]]
    yield wide.to(dtype)
    yield normal.to(dtype)
    yield torch.zeros(shape, dtype=dtype)
    largest = torch.finfo(dtype).max
    for size in (1e30, 1e-30, torch.finfo(dtype).tiny / 8):  # the last is subnormal
        yield (normal * size).clamp(-largest, largest).to(dtype)
    for bad in ([torch.inf], [-torch.inf], [torch.nan], [torch.inf, torch.nan]):
        x = normal.to(dtype)
        flat = x.view(-1)
        for i, value in enumerate(bad):
            flat[(7 * i + flat.numel() // 3) % flat.numel()] = value
        yield x
        if bad == [torch.nan]:
            yield -x  # a NaN with its sign bit set


def on_device(x: Tensor) -> Tensor:
    """`x` on the device under test, strides kept."""
    out = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=DEVICE)
    return out.copy_(x)


def buffer(like: Tensor | None) -> Tensor | None:
    """Garbage of the shape and dtype of what a kernel must write."""
    if like is None:
        return None
    raw = torch.full((like.numel() * like.element_size(),), GARBAGE, dtype=torch.uint8)
    return raw.view(like.dtype).reshape(like.shape).to(DEVICE)


def wide(cast: Cast | None) -> Cast | None:
    """`cast` with the room that products ask for."""
    return None if cast is None else cast.replace(room=(cast.pad, 0))


def filled(t: Tensor | None, shape: Sequence[int]) -> Tensor | None:
    """`t` with zeros up to `shape`: what a cast with room writes."""
    if t is None or t.dim() != 2:
        return t
    return torch.nn.functional.pad(t, (0, shape[1] - t.shape[1], 0, shape[0] - t.shape[0]))


def assert_codes(actual: Tensor | None, expected: Tensor | None) -> None:
    """Equal FP8 codes; in the interpreter at most a binade apart: its rounding loses carries."""
    assert (actual is None) == (expected is None)
    if actual is None or expected is None:
        return
    actual = actual.cpu()
    if not INTERPRETED:
        assert torch.equal(actual, expected), _where(actual, expected)
        return
    apart = (actual.int() - expected.int()).abs()
    close = apart <= 8
    assert bool(close.all()), _where(actual * ~close, expected * ~close)


def assert_exact(actual: Tensor | None, expected: Tensor | None) -> None:
    """Equal bytes; one NaN is as good as another."""
    assert (actual is None) == (expected is None)
    if actual is None or expected is None:
        return
    actual = actual.cpu()
    assert actual.dtype is expected.dtype and actual.shape == expected.shape
    # Not contiguous(): that leaves the odd strides of a one-column matrix alone.
    fresh = (t.clone(memory_format=torch.contiguous_format) for t in (actual, expected))
    a, e = (t.view(torch.uint8).reshape(*t.shape, -1) for t in fresh)
    same = (a == e).all(-1)
    if expected.is_floating_point():
        same |= actual.isnan() & expected.isnan()
    assert bool(same.all()), _where(actual, expected)


def _where(actual: Tensor, expected: Tensor) -> str:
    bad = ((actual != expected) & ~((actual != actual) & (expected != expected))).nonzero()
    at = [tuple(i.tolist()) for i in bad[:4]]
    pairs = [(i, actual[i].item(), expected[i].item()) for i in at]
    return f"{len(bad)} of {actual.numel()} differ; (index, actual, expected): {pairs}"


def run_interpreted(file: str) -> None:
    """Run a test file as a script in Triton's interpreter, which must be chosen before import."""
    import triton

    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
        pytest.skip("with NumPy 2, the interpreter of Triton 3.6 cannot loop over an argument")
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, file], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
