"""Progress of a run: a live bar on a terminal, of rich where it is installed; else plain lines."""

from __future__ import annotations

import sys
import time
from importlib.util import find_spec
from types import TracebackType
from typing import Any

__all__ = ["Progress"]


WIDTH = 24  # of a bar that rich does not draw


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes}:{seconds:02d}"


class Progress:
    """`with Progress(...) as p: p.step(...)`: loss, tokens/s and time left, unless `quiet`."""

    def __init__(self, name: str, steps: int, start: int, quiet: bool) -> None:
        self.name, self.steps, self.quiet = name, steps, quiet
        self.done = self.start = start
        self.bar: Any = None
        self.task: Any = None
        self.loss = float("nan")
        self.live = not quiet and sys.stdout.isatty()
        if self.live and find_spec("rich") is not None:
            from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self.bar = Bar(
                TextColumn("{task.description:>10}"),
                BarColumn(),
                TextColumn("{task.completed}/{task.total}"),
                TextColumn("loss {task.fields[loss]:.4f}"),
                TextColumn("{task.fields[speed]:,.0f} tokens/s"),
                TimeRemainingColumn(),
            )

    def __enter__(self) -> Progress:
        self.began = time.perf_counter()
        if self.bar is not None:
            self.bar.start()
            self.task = self.bar.add_task(
                self.name, total=self.steps, completed=self.start, loss=self.loss, speed=0.0
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.bar is not None:
            self.bar.stop()
        elif self.live and self.done > self.start:
            print(flush=True)  # the line stays

    def step(self, done: int, loss: float, speed: float | None) -> None:
        """`done` steps are done, the last with `loss`, at `speed` tokens/s if that is known."""
        self.done = done
        spent = time.perf_counter() - self.began
        left = spent / max(1, done - self.start) * (self.steps - done)
        if self.bar is not None:
            self.bar.update(self.task, completed=done, loss=loss, speed=speed or 0.0)
            return
        said = f"loss {loss:.4f}"
        if speed:
            said += f"  {speed:>9,.0f} tokens/s  ETA {_clock(left)}"
        if self.live:
            full = WIDTH * done // self.steps
            bar = "#" * full + "-" * (WIDTH - full)
            # Back to the start of the line, over what is there, and nothing left behind it.
            print(
                f"\r{self.name:>10} [{bar}] {done}/{self.steps}  {said}\033[K", end="", flush=True
            )
        elif not self.quiet:
            print(f"{self.name:>10}  step {done:>5}/{self.steps}  {said}", flush=True)
