"""Worker processes that survive what kernels do to them.

Each worker is a process of its own, and a thread here feeds it unit after unit. A worker whose
device is lost (a bad access poisons the process), that dies, or that does not answer is ended and
replaced, and the unit it had counts as failed.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch

from . import plan
from .plan import Result, Unit

__all__ = ["sweep"]

BIG = 3  # units at a time that take tens of gigabytes
PATIENCE = 240.0  # seconds a unit may take


def _work(pipe: Connection, device: str) -> None:
    """A worker: units in, results out, until None comes or the device is lost."""
    torch.set_num_threads(1)
    while (unit := pipe.recv()) is not None:
        try:
            pipe.send(plan.run(unit, torch.device(device)))
        except Exception:
            pipe.send(_crashed(unit, traceback.format_exc(limit=-4)))
            return
        if unit.big and device != "cpu":
            torch.cuda.empty_cache()


def _crashed(unit: Unit, why: str) -> Result:
    return Result(unit, 0, 1, 0, [f"{unit.name}: did not finish: {why}"], "?", 0.0)


class _Worker:
    """One process at a time, replaced when it is lost."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.context = mp.get_context("spawn")
        self.process: BaseProcess | None = None

    def run(self, unit: Unit) -> Result:
        if self.process is None:
            self.pipe, theirs = self.context.Pipe()
            self.process = self.context.Process(target=_work, args=(theirs, self.device))
            self.process.start()
            theirs.close()
        try:
            self.pipe.send(unit)
            if not self.pipe.poll(PATIENCE):
                raise TimeoutError(f"no answer within {PATIENCE:.0f} s")
            result: Result = self.pipe.recv()
        except (EOFError, OSError, TimeoutError) as error:
            result = _crashed(unit, repr(error))
        if result.backend == "?":
            self.stop()
        return result

    def stop(self) -> None:
        if self.process is not None:
            with contextlib.suppress(OSError):  # it may be gone already
                self.pipe.send(None)
            self.process.join(5)
            if self.process.is_alive():
                self.process.kill()
                self.process.join()
            self.pipe.close()
            self.process = None


def sweep(
    work: Sequence[Unit],
    device: str,
    workers: int,
    report: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Run all units on `workers` processes (0: in this one); results in the order they came."""
    if workers == 0:
        return [_here(unit, device, report) for unit in work]
    small, big = (queue.SimpleQueue[Unit]() for _ in range(2))
    for unit in work:
        (big if unit.big else small).put(unit)
    results: list[Result] = []
    lock = threading.Lock()

    def feed(sources: Sequence[queue.SimpleQueue[Unit]]) -> None:
        worker = _Worker(device)
        for source in sources:
            while True:
                try:
                    unit = source.get_nowait()
                except queue.Empty:
                    break
                result = worker.run(unit)
                with lock:
                    results.append(result)
                    report(result)
        worker.stop()

    # A few threads see to the big units first; they alone do, which bounds the memory in use.
    orders = [(big, small) if i < BIG else (small,) for i in range(workers)]
    threads = [threading.Thread(target=feed, args=(order,)) for order in orders]
    for thread in threads:
        thread.start()
        time.sleep(0.05)  # spread the imports
    for thread in threads:
        thread.join()
    return results


def _here(unit: Unit, device: str, report: Callable[[Result], None]) -> Result:
    result = plan.run(unit, torch.device(device))
    report(result)
    return result
