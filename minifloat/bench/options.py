"""What can be asked of a benchmark, as a value and as arguments of the command line."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch

from .errors import BenchError

__all__ = ["Budget", "Options", "add_arguments", "from_arguments"]


@dataclass(frozen=True)
class Budget:
    """How long a case is timed: at most `iterations` rounds of all providers, or `seconds`.

    Never fewer than `least` rounds. Before, each runs `warmup` times, and on for `heat` seconds.
    """

    iterations: int
    seconds: float
    warmup: int
    heat: float
    least: int


BUDGETS = {
    ("cuda", False): Budget(100, 1.0, 3, 0.5, 10),
    ("cuda", True): Budget(30, 0.5, 3, 0.3, 10),
    ("cpu", False): Budget(20, 2.0, 1, 0.0, 5),
    ("cpu", True): Budget(5, 0.5, 0, 0.0, 3),
}


@dataclass(frozen=True)
class Options:
    """A run. None asks for what suits the device."""

    cases: tuple[str, ...] = ()
    all: bool = False
    quick: bool = False
    providers: str | None = None
    recipes: str | None = None
    device: str | None = None
    out: str = "runs/bench"
    resume: bool = False
    seconds: float | None = None
    seed: int = 0
    list: bool = False
    report: bool = False
    debug: bool = False

    def where(self) -> torch.device:
        """The device; BenchError where there is none such."""
        given = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(given)
        except RuntimeError as error:
            raise BenchError(
                f"--device {self.device}: not a device; cpu, cuda and cuda:1 are"
            ) from error
        if device.type not in ("cpu", "cuda"):
            raise BenchError(f"--device {self.device}: cpu and cuda are timed")
        count = torch.cuda.device_count()
        if device.type == "cuda" and (device.index or 0) >= count:
            raise BenchError(f"--device {self.device}: there are {count} CUDA devices here")
        if given == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
        return device

    def budget(self, device: torch.device) -> Budget:
        found = BUDGETS[device.type, self.quick]
        if self.seconds is None:
            return found
        if not self.seconds > 0:
            raise BenchError(f"--seconds {self.seconds}: must be positive")
        rounds = max(found.iterations, round(found.iterations * self.seconds / found.seconds))
        return Budget(rounds, self.seconds, found.warmup, found.heat, found.least)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    say = parser.add_argument
    say("--quick", action="store_true", help="a few cases, a minute: also on a CPU")
    say("--all", action="store_true",
        help="every case of the full list: hours; --resume goes on with it")  # fmt: skip
    say("--case", action="append", default=[], dest="cases", metavar="ID",
        help="such as linear/8192x4096x4096, or a pattern: 'mlp/*'; may be repeated")  # fmt: skip
    say("--providers", default=None, metavar="A,B,...",
        help="eager, compile, autotune, ours, ours-compile, ours-cached, torchao, te, liger"
        " (default: eager, compile, ours, and the others that are installed)")  # fmt: skip
    say("--recipes", default=None, metavar="A,B,...",
        help="of ours: delayed, current, block, mxfp8, nvfp4 (default: all)")  # fmt: skip
    say("--device", default=None, help="e.g. cpu, cuda:0 (default: the GPU if any)")
    say("--out", default="runs/bench", metavar="DIR",
        help="results, tables and plot (default: runs/bench)")  # fmt: skip
    say("--resume", action="store_true", help="leave out the cases whose results are there")
    say("--seconds", type=float, default=None, help="of timing for each case")
    say("--seed", type=int, default=0, help="of the data (default: 0)")
    say("--list", action="store_true", help="print the ids of all cases")
    say("--report", action="store_true",
        help="measure nothing: write tables and plot of the results in --out")  # fmt: skip
    say("--debug", action="store_true", help="show tracebacks of errors")


def from_arguments(args: Any) -> Options:
    given = {n: v for n, v in vars(args).items() if n != "command"}
    return Options(**{**given, "cases": tuple(given["cases"])})
