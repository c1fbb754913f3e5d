"""What is measured of a step besides its time on the device: host, wall, graph, memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["Steps", "capture", "device_time", "host_time", "memory", "wall_time"]

CUDA: Any = torch.cuda  # much of it is untyped
WARM = 0.1  # seconds
CAPTURED = 10  # steps in a graph


class Steps(Protocol):
    """What the measurements need of a step."""

    grad: Tensor

    def forward(self) -> Tensor: ...

    def step(self) -> None: ...

    def clear(self) -> None: ...


def device_time(step: Callable[[], Any], iterations: int) -> float:
    """Microseconds a step takes on the device, back to back, the host running ahead."""
    start, end = (CUDA.Event(enable_timing=True) for _ in range(2))
    # Clocks depend on the power of what ran before: let this step set its own.
    until = time.perf_counter() + WARM
    while time.perf_counter() < until:
        for _ in range(4):
            step()
        torch.cuda.synchronize()
    CUDA._sleep(int(2e6))
    start.record()
    for _ in range(iterations):
        step()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * float(start.elapsed_time(end)) / iterations


def host_time(step: Callable[[], Any], iterations: int) -> float:
    """Microseconds of the host to enqueue a step: the median, the queue never full."""
    samples = []
    for _ in range(iterations):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        samples.append(1e6 * (time.perf_counter() - begin))
    torch.cuda.synchronize()
    return statistics.median(samples)


def wall_time(step: Callable[[], Any], iterations: int) -> float:
    """Microseconds of a step in a loop that nothing interrupts, host and device together."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(iterations):
        step()
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - begin) / iterations


def capture(step: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of `CAPTURED` steps."""
    stream = CUDA.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with CUDA.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph: torch.cuda.CUDAGraph = CUDA.CUDAGraph()
    with CUDA.graph(graph):
        for _ in range(CAPTURED):
            step()
    return graph


def memory(one: Steps) -> tuple[int, int]:
    """(peak bytes of a step beyond what is there before it, bytes kept from forward to backward).

    The output is not counted as kept: the caller owns it.
    """
    one.step()
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = one.forward()
    kept = torch.cuda.memory_allocated() - base - y.numel() * y.element_size()
    y.backward(one.grad)  # type: ignore[no-untyped-call]
    del y
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - base
    one.clear()
    return peak, kept
