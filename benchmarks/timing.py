"""Time calls side by side: interleaved, on a cold cache, without the host's time.

On CUDA each sample is a pair of events around one call. Between samples a 256 MB write empties the
L2, outside the events. A batch of samples is enqueued behind a sleep kernel, so that the device
never waits for the host inside a pair of events; a batch whose sleep ended too early is thrown away
and repeated behind a longer one. Providers alternate sample by sample: they see the same clocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Stats", "Timer"]

FLUSH_BYTES = 256 * 10**6
BATCH = 10  # samples of each provider per batch: a few hundred launches, below the queue's limit
SLEEP_HZ = 2.0e9  # cycles of the sleep kernel per second, at most: a slower clock sleeps longer
GIVE_UP = 6  # doublings of the sleep before the host is declared too slow

Call = Callable[[], object]


@dataclass(frozen=True)
class Stats:
    """Microseconds: median, 20th and 80th percentile of `samples`, and the host's part."""

    median: float
    p20: float
    p80: float
    samples: int
    host: float

    @staticmethod
    def of(samples: Sequence[float], host: float) -> Stats:
        t = torch.tensor(sorted(samples), dtype=torch.float64)
        p20, median, p80 = torch.quantile(t, torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64))
        return Stats(float(median), float(p20), float(p80), len(samples), host)


class Timer:
    """Takes `iterations` samples of each call, or fewer where `seconds` have passed before."""

    def __init__(
        self, device: torch.device, *, iterations: int, seconds: float, warmup: int
    ) -> None:
        self.device, self.iterations, self.seconds, self.warmup = (
            device,
            iterations,
            seconds,
            warmup,
        )
        self.cuda = device.type == "cuda"
        size = FLUSH_BYTES if self.cuda else 0
        self.flush = torch.empty(size, dtype=torch.uint8, device=device)

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def time(self, calls: Sequence[Call]) -> list[Stats]:
        """Statistics of each call, in order."""
        for _ in range(self.warmup):
            for call in calls:
                call()
        self.synchronize()
        hosts = [self._host(call) for call in calls]
        batch = self._batch_cuda if self.cuda else self._batch_cpu
        samples: list[list[float]] = [[] for _ in calls]
        sleep = 2.0e-6 * BATCH * sum(hosts) + 1e-3
        end = time.perf_counter() + self.seconds
        while len(samples[0]) < self.iterations:
            sleep = batch(calls, samples, sleep)
            if len(samples[0]) >= BATCH and time.perf_counter() > end:
                break
        return [Stats.of(s, h) for s, h in zip(samples, hosts, strict=True)]

    def _host(self, call: Call, repeats: int = 20) -> float:
        """Microseconds of the host to enqueue one call (on a CPU: to run it)."""
        repeats = repeats if self.cuda else 1
        self.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        spent = time.perf_counter() - start
        self.synchronize()
        return 1e6 * spent / repeats

    def _batch_cpu(self, calls: Sequence[Call], samples: list[list[float]], sleep: float) -> float:
        for call, mine in zip(calls, samples, strict=True):
            mine.append(self._host(call))
        return sleep

    def _batch_cuda(self, calls: Sequence[Call], samples: list[list[float]], sleep: float) -> float:
        """Add BATCH samples of each call; returns the sleep that was long enough, in seconds."""
        for _ in range(GIVE_UP):
            woke = torch.cuda.Event()
            torch.cuda._sleep(int(sleep * SLEEP_HZ))
            woke.record()
            events = []
            for _ in range(BATCH):
                for call, mine in zip(calls, samples, strict=True):
                    start = torch.cuda.Event(enable_timing=True)
                    stop = torch.cuda.Event(enable_timing=True)
                    self.flush.fill_(1)
                    start.record()
                    call()
                    stop.record()
                    events.append((mine, start, stop))
            ahead = not woke.query()  # the device still slept when the host was done
            self.synchronize()
            if ahead:
                for mine, start, stop in events:
                    mine.append(1e3 * start.elapsed_time(stop))
                return sleep
            sleep *= 2
        raise RuntimeError(
            f"the host needs more than {sleep:.3f} s to enqueue {BATCH * len(calls)} calls: "
            "it waits for the device somewhere, or it is overloaded"
        )
