"""What this device reaches in this run: copies, and a large square product of each kind.

Measured before and after everything else, by the same timer. A ceiling that moved says that the
clocks did, and that rows at the start and at the end of the run do not compare.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

import torch

from ..gemm import gemm
from ..operands import operands
from ..recipe import Recipe
from ..recipe.plan import Product, products
from .limits import COPY, product_name
from .timing import Call, Timer
from .work import dtype_name

__all__ = ["DRIFT", "Ceilings", "Copies", "drifted", "heat"]

SEED = 0
DRIFT = 0.03  # a ceiling that moves further than this between start and end spoils the comparison
SQUARE = {"cuda": 8192, "cpu": 512}  # sides of the products
COPIED = {"cuda": 2**31, "cpu": 2**24}  # bytes read, and as many written


class Copies:
    """`copy_` of any number of bytes, within two buffers that are allocated once."""

    def __init__(self, most: int, device: torch.device) -> None:
        g = torch.Generator(device).manual_seed(SEED)
        # Random bytes: copying zeros draws less power.
        self.source = torch.randint(0, 256, (most,), dtype=torch.uint8, device=device, generator=g)
        self.target = torch.empty_like(self.source)

    def call(self, size: int) -> Call:
        """Read `size` bytes and write as many."""
        source, target = self.source[:size], self.target[:size]
        return lambda: target.copy_(source)


class Ceilings:
    """The calls whose rates limit the cases: made once, measured twice."""

    def __init__(self, recipes: Iterable[Recipe], device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.size = _copied(device)
        self.calls: dict[str, Call] = {COPY: Copies(self.size, device).call(self.size)}
        n = self.side = SQUARE[device.type]
        generator = torch.Generator(device).manual_seed(SEED)
        a, b = (
            torch.empty(n, n, device=device, dtype=dtype).normal_(generator=generator)
            for _ in range(2)
        )
        self.calls[dtype_name(dtype)] = lambda: a @ b.t()
        for recipe in recipes:
            plan = recipe.plan()
            for pair, fast in zip(products(plan), plan.fast, strict=True):
                name = product_name(pair, fast, device, dtype)
                if name not in self.calls:
                    self.calls[name] = self._product(pair, fast, a, b)

    def _product(self, pair: Product, fast: bool, a: torch.Tensor, b: torch.Tensor) -> Call:
        x, w = operands(a, pair.a, None)[0], operands(b, pair.b, None)[0]
        assert x is not None and w is not None
        return lambda: gemm(x, w, self.dtype, fast=fast)

    def measure(self, timer: Timer) -> dict[str, float]:
        """Bytes per second of the copy, operations per second of the products, interleaved."""
        found = timer.time(list(self.calls.values()))
        out = {}
        for name, stats in zip(self.calls, found, strict=True):
            amount = 2 * self.size if name == COPY else 2 * self.side**3
            out[name] = 1e6 * amount / stats.median
        return out


def _copied(device: torch.device) -> int:
    """Bytes of the large copy; of a small device's memory, a part."""
    if device.type != "cuda":
        return COPIED[device.type]
    free, _ = torch.cuda.mem_get_info(device)
    return min(COPIED[device.type], free // 16)


def heat(timer: Timer, calls: Iterable[Call], seconds: float) -> None:
    """Work until the clocks have settled; a CPU does not wait for that."""
    calls = list(calls)
    end = time.perf_counter() + (seconds if timer.cuda else 0.0)
    while time.perf_counter() < end:
        for call in calls:
            call()
        timer.synchronize()


def drifted(
    before: Mapping[str, float], after: Mapping[str, float], unit: str = "GB/s"
) -> list[str]:
    """A line for each ceiling that moved by more than DRIFT."""
    return [
        f"DRIFT: {name} went from {before[name]:.0f} to {after[name]:.0f} {unit} "
        f"({100 * (after[name] / before[name] - 1):+.1f}%): repeat this run"
        for name in before
        if abs(after[name] / before[name] - 1) > DRIFT
    ]
