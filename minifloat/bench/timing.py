"""Timing on a GPU: events around each call, with the host and the cache kept out.

A sample is a pair of CUDA events around one call. Before each, a write larger than the L2 empties
it, outside the events. A batch of samples is enqueued behind a sleep kernel, so that the device
never waits for the host inside a pair of events; a batch whose sleep ended too early is thrown away
and repeated behind a longer one. Providers alternate sample by sample: they see the same clocks.

A call that waits for the device itself cannot be enqueued ahead. It is found out beforehand, taken
out of the batch and timed right after it, and its statistics say so: they include the host.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["BATCH", "Call", "Stats", "Timer"]

FLUSH_BYTES = 256 * 10**6
BATCH = 10  # samples of each provider per batch: a few hundred launches, below the queue's limit
SLEEP_HZ = 2.0e9  # cycles of the sleep kernel per second, at most: a slower clock sleeps longer
GIVE_UP = 6  # doublings of the sleep before the host is declared too slow
PROBE = 0.05  # seconds of sleep to find out whether a call waits for the device
HOST_REPEATS = 20  # calls to take the host's time from, at most
HOST_SECONDS = 0.05  # and about as long

CUDA: Any = torch.cuda  # much of it is untyped
Call = Callable[[], object]


@dataclass(frozen=True)
class Stats:
    """Microseconds: median, 20th and 80th percentile of `samples`, and the host's part.

    `waits`: the host waits for the device inside the call, so the samples include the host.
    """

    median: float
    p20: float
    p80: float
    samples: int
    host: float
    waits: bool = False

    @staticmethod
    def of(samples: Sequence[float], host: float, waits: bool = False) -> Stats:
        t = torch.tensor(sorted(samples), dtype=torch.float64)
        p20, median, p80 = torch.quantile(t, torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64))
        return Stats(float(median), float(p20), float(p80), len(samples), host, waits)


class Timer:
    """Takes `iterations` samples of each call, or fewer where `seconds` have passed before.

    Every call runs `warmup` times first, then on for `heat` seconds. `batch` samples of each are
    enqueued together. With `strict`, a host that waits for the device is an error.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        iterations: int,
        seconds: float,
        warmup: int,
        heat: float = 0.0,
        batch: int = BATCH,
        least: int = BATCH,
        strict: bool = True,
    ) -> None:
        self.device, self.iterations, self.seconds, self.warmup = (
            device,
            iterations,
            seconds,
            warmup,
        )
        self.heat, self.batch, self.least, self.strict = heat, batch, least, strict
        self.cuda = device.type == "cuda"
        size = FLUSH_BYTES if self.cuda else 0
        self.flush = torch.empty(size, dtype=torch.uint8, device=device)

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def time(self, calls: Sequence[Call]) -> list[Stats]:
        """Statistics of each call, in order."""
        collects = gc.isenabled()
        gc.disable()  # a collection in the middle of a batch takes longer than its sleep
        try:
            return self._time(calls)
        finally:
            if collects:
                gc.enable()

    def _time(self, calls: Sequence[Call]) -> list[Stats]:
        self._warm(calls)
        hosts = [self._host(call) for call in calls]
        waits = [not self.strict and self.waits(c, h) for c, h in zip(calls, hosts, strict=True)]
        samples: list[list[float]] = [[] for _ in calls]
        ahead = [i for i, w in enumerate(waits) if not w]
        behind = [i for i, w in enumerate(waits) if w]
        batch = self._batch_cuda if self.cuda else self._batch_cpu
        sleep = 2.0e-6 * self.batch * sum(hosts[i] for i in ahead) + 1e-3
        end = time.perf_counter() + self.seconds
        while len(samples[0]) < self.iterations:
            if ahead:
                sleep = batch([calls[i] for i in ahead], [samples[i] for i in ahead], sleep)
            for i in behind:
                self._waiting(calls[i], samples[i])
            if len(samples[0]) >= self.least and time.perf_counter() > end:
                break
        late = self.cuda and sleep < 0  # the host never came ahead, though no call waits
        return [Stats.of(s, h, w or late) for s, h, w in zip(samples, hosts, waits, strict=True)]

    def _warm(self, calls: Sequence[Call]) -> None:
        for _ in range(self.warmup):
            for call in calls:
                call()
        self.synchronize()
        end = time.perf_counter() + self.heat
        while time.perf_counter() < end:
            for call in calls:
                call()
            self.synchronize()

    def waits(self, call: Call, host: float) -> bool:
        """Whether the host waits for the device inside the call; asked twice, for it may hiccup."""
        return self.cuda and self._waits(call, host) and self._waits(call, host)

    def _waits(self, call: Call, host: float) -> bool:
        self.synchronize()
        woke = CUDA.Event()
        CUDA._sleep(int(max(PROBE, 4e-6 * host) * SLEEP_HZ))
        woke.record()
        call()
        done = woke.query()
        self.synchronize()
        return bool(done)

    def _host(self, call: Call) -> float:
        """Microseconds of the host to enqueue one call (on a CPU: to run it)."""
        self.synchronize()
        repeats = 1
        if self.cuda:
            begin = time.perf_counter()
            call()
            self.synchronize()
            once = time.perf_counter() - begin
            repeats = max(2, min(HOST_REPEATS, int(HOST_SECONDS / max(once, 1e-9))))
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

    def _sample(self, call: Call) -> tuple[Any, Any]:
        start = CUDA.Event(enable_timing=True)
        stop = CUDA.Event(enable_timing=True)
        self.flush.fill_(1)
        start.record()
        call()
        stop.record()
        return start, stop

    def _waiting(self, call: Call, samples: list[float]) -> None:
        """Samples of a call that cannot be enqueued ahead: from an idle device, host included."""
        for _ in range(self.batch):
            self.synchronize()
            start, stop = self._sample(call)
            self.synchronize()
            samples.append(1e3 * start.elapsed_time(stop))

    def _batch_cuda(self, calls: Sequence[Call], samples: list[list[float]], sleep: float) -> float:
        """Add `batch` samples of each call; returns the sleep that was long enough, in seconds.

        Without `strict`, a negative one says that none is, and samples include the host.
        """
        if sleep < 0:
            for call, mine in zip(calls, samples, strict=True):
                self._waiting(call, mine)
            return sleep
        for _ in range(GIVE_UP):
            woke = CUDA.Event()
            CUDA._sleep(int(sleep * SLEEP_HZ))
            woke.record()
            events = []
            for _ in range(self.batch):
                for call, mine in zip(calls, samples, strict=True):
                    events.append((mine, *self._sample(call)))
            ahead = not woke.query()  # the device still slept when the host was done
            self.synchronize()
            if ahead:
                for mine, start, stop in events:
                    mine.append(1e3 * start.elapsed_time(stop))
                return sleep
            sleep *= 2
        if not self.strict:
            return self._batch_cuda(calls, samples, -1.0)
        raise RuntimeError(
            f"the host needs more than {sleep:.3f} s to enqueue {self.batch * len(calls)} calls: "
            "it waits for the device somewhere, or it is overloaded"
        )
