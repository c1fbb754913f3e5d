"""Where the host's time of an eager step goes, stage by stage.

    python -m benchmarks.host                      # needs a GPU: steps are replayed there
    python -m benchmarks.host --filter delayed --one-thread --json out.json
    python -m benchmarks.host --device cpu         # a smoke test: nothing is replayed

A step is that of `benchmarks.linear` at its small shapes, timed as its column `host` is. Stages are
functions of the library, each under a watch that reads the clock twice; those inside another are a
part of it. `hop` is what passes from the call of backward to ours, and from there to the caller:
autograd runs a GPU's backward in a thread of its own, unless `--one-thread`. The column `function`
is an `autograd.Function` that does nothing but hand out memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from minifloat import autograd, batch, replays, scalars
from minifloat.recipe import autocast
from minifloat.writer import Program

from .linear import CPU, RECIPES, SMALL, Layer, Shape, layer

__all__ = ["STAGES", "Watch", "main", "measure"]

STAGES = (
    "step",
    "forward",
    "forward: function",
    "forward: replay",
    "forward: program",
    "forward: batches",
    "forward: end of autocast",
    "forward: scales",
    "backward",
    "backward: hop",
    "backward: replay",
    "backward: program",
    "backward: batches",
)
ITERATIONS = 30
ROUNDS = 3
WARM = 5  # steps before the watch: sighted, recorded, tried


class Watch:
    """Microseconds of each stage, a sample for each step."""

    def __init__(self) -> None:
        self.samples: dict[str, list[float]] = defaultdict(list)
        self.now: dict[str, float] = defaultdict(float)
        self.half = "forward"
        self.called = 0.0  # when backward was
        self.returned = 0.0  # when ours last did

    def timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, what it takes added to this stage of the half that runs."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.now[f"{self.half}: {stage}"] += time.perf_counter() - begin

        return watched

    def inside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What autograd calls in backward."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            self.now["backward: hop"] += time.perf_counter() - self.called
            try:
                return function(*args, **kwargs)
            finally:
                self.returned = time.perf_counter()

        return watched

    def step(self, one: Layer) -> None:
        """A step under the watch."""
        self.now.clear()
        self.half = "forward"
        begin = time.perf_counter()
        y = one.forward()
        self.half, self.called = "backward", time.perf_counter()
        self.returned = self.called
        y.backward(one.grad)
        end = time.perf_counter()
        self.now["forward"] = self.called - begin
        self.now["backward"] = end - self.called
        self.now["step"] = end - begin
        if self.returned > self.called:
            self.now["backward: hop"] += end - self.returned
        one.clear()
        for stage, seconds in self.now.items():
            self.samples[stage].append(1e6 * seconds)

    @contextmanager
    def on(self) -> Iterator[None]:
        """The library's stages under this watch, and the programs that it has recorded."""
        with ExitStack() as stack:
            for of, name, watched in self._functions():
                stack.enter_context(patch.object(of, name, watched))
            for program in recorded():
                scope = program.run.__globals__  # its constants
                own = {k: self.timed("batches", v) for k, v in scope.items() if is_batches(v)}
                stack.enter_context(patch.dict(scope, own))
                stack.enter_context(
                    patch.object(program, "run", self.timed("program", program.run))
                )
            yield

    def _functions(self) -> list[tuple[Any, str, Any]]:
        run = autograd._Run
        return [
            (autograd, "_apply", self.timed("function", autograd._apply)),
            (replays, "forward", self.timed("replay", replays.forward)),
            (replays, "backward", self.timed("replay", replays.backward)),
            (scalars, "advance", self.timed("scales", scalars.advance)),
            (autocast, "settle", self.timed("end of autocast", autocast.settle)),
            (run, "backward", staticmethod(self.inside(run.backward))),
        ]


def recorded() -> list[Program]:
    """The programs of layers that have been recorded."""
    kinds = [k for k in replays._KINDS.values() if isinstance(k, replays.Recorded)]
    found = [p for k in kinds for p in (k.program, *k.backward.values())]
    return [p for p in found if isinstance(p, Program)]  # the rest say why they are none


def is_batches(value: Any) -> bool:
    compiled = batch.compiled()
    return compiled is not None and value == compiled.run


class Empty(torch.autograd.Function):
    """Memory, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.x = x.detach()
        return torch.empty_like(y)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.empty_like(ctx.x), None


class Function(Layer):
    """A layer that is the empty function."""

    def forward(self) -> torch.Tensor:
        return Empty.apply(self.x, self.grad)  # type: ignore[no-any-return, no-untyped-call]


def measure(one: Layer, iterations: int) -> dict[str, float]:
    """{stage: median microseconds of the host}; a stage that never ran is not there."""
    for _ in range(WARM):
        one.step()
    watch = Watch()
    with watch.on():
        for _ in range(iterations):
            if one.x.is_cuda:
                torch.cuda.synchronize()  # the queue is never full
            watch.step(one)
    return {stage: statistics.median(found) for stage, found in watch.samples.items()}


def compare(shape: Shape, names: list[str], device: torch.device, count: int) -> dict[str, Any]:
    """{provider: the medians of ROUNDS of `measure`}. All take turns: who comes first in a process
    finds the host's clocks and caches as nobody does later."""
    plain = layer(shape, "nn.Linear", device)
    layers = {"nn.Linear": plain, "function": Function(plain.module, plain.x, plain.grad, None)}
    layers |= {name: layer(shape, name, device) for name in names}
    rounds = [{name: measure(one, count) for name, one in layers.items()} for _ in range(ROUNDS)]
    return {name: medians([found[name] for found in rounds]) for name in layers}


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Of each stage, in the rounds in which it ran."""
    stages = dict.fromkeys(stage for found in rounds for stage in found)
    return {s: statistics.median([found[s] for found in rounds if s in found]) for s in stages}


def table(found: dict[str, dict[str, float]]) -> str:
    """A line for each stage, a column for each provider."""
    lines = [f"{'us':26}" + "".join(f"{name:>11}" for name in found)]
    for stage in STAGES:
        cells = [row.get(stage) for row in found.values()]
        if any(cells):
            text = "".join(f"{'' if c is None else f'{c:.1f}':>11}" for c in cells)
            lines.append(f"{stage:26}{text}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--filter", default="", help="recipes whose name contains this")
    parser.add_argument("--iterations", type=int, default=ITERATIONS)
    parser.add_argument("--one-thread", action="store_true", help="backward in the caller's thread")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    if args.one_thread:
        torch.autograd.set_multithreading_enabled(False)
    device = torch.device(args.device)
    names = [name for name in RECIPES if args.filter in name]
    results = []
    for shape in CPU if device.type == "cpu" else SMALL:
        found = compare(shape, names, device, args.iterations)
        print("x".join(map(str, shape)), table(found), sep="\n", flush=True)
        results.append({"shape": shape, "stages": found})
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
