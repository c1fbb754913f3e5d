"""What is measured of a step besides its time on the device: host, wall, graph, memory."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["Steps", "capture", "device_time", "host_time", "memory", "wall_time"]

CUDA: Any = torch.cuda  # much of it is untyped
# Seconds a step runs before it is timed, and for which it is timed at least. Power sets the clocks,
# not at once: those of a training run are what a step comes to.
WARM = 0.4
LEAST = 0.2
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
    took = _settled(step, iterations)
    if took > 0:
        iterations = max(iterations, math.ceil(LEAST / took))
    CUDA._sleep(int(2e6))
    start.record()
    for _ in range(iterations):
        step()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * float(start.elapsed_time(end)) / iterations


def _settled(step: Callable[[], Any], batch: int) -> float:
    """Seconds of a step, once it has run for WARM seconds and set its own clocks.

    The device has a batch to do whenever the host waits: it does not rest.
    """
    done = [CUDA.Event(), CUDA.Event()]
    begin, steps, spent = time.perf_counter(), 0, 0.0
    while spent < WARM:
        for _ in range(batch):
            step()
        steps += batch
        done[0].record()
        done[1].synchronize()  # of the batch before; at once, where there is none
        done.reverse()
        spent = time.perf_counter() - begin
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / steps if steps else 0.0


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
