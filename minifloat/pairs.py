"""Recorded launches two by two: what does not wait for each other begins together.

    cast x, cast w, y = x w^T                     cast x and w, y = x w^T
    cast dy, dw = dy^T x, cast w, dx = dy w   ->  cast dy and w, dw = dy^T x, dx = dy w

A short launch takes most of its time to begin and to end. The later of two moves up to the earlier,
if no step between touches what it touches, and if what it makes is small: that is there for longer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from . import env
from .steps import Address, Allocate, Call, Constant, Launch, Piece, Record, bytes_of, leaves

__all__ = ["paired"]

# Bytes: what the second of two makes, and what the first makes. A launch that makes more than that
# fills the device by itself.
EARLIER, SHORT = 8 << 20, 64 << 20
# A kernel for two has the registers of the one that needs more, and some. With many more than that
# fewer programs run at a time (in partial tiles 196 for 128), unless they all do. Up to FEW there
# are enough of them.
REGISTERS, FEW = 1.4, 80
FILE = 1 << 16  # registers of a multiprocessor

Step = Allocate | Launch | Call


def paired(record: Record, device: torch.device) -> Record:
    """The same work on this device, in fewer launches where that can be."""
    steps: list[Step] = []
    alone: list[bool] = []  # whether a step is a launch that may get a partner
    for step in record.steps:
        steps.append(step)
        alone.append(isinstance(step, Launch) and step.of is not None)
        i = _partner(steps, alone, record) if alone[-1] else None
        if i is None:
            continue
        first, second = steps[i], steps[-1]
        assert isinstance(first, Launch) and isinstance(second, Launch)
        both = _beside(first, second, device)
        if both is not None:
            own = _allocated(steps, second)
            kept = [k for k in range(len(steps) - 1) if k not in own]
            at = kept.index(i)
            order = [*kept[:at], *own, *kept[at:]]
            alone = [alone[k] and k != i for k in order]
            steps = [both if k == i else steps[k] for k in order]
    return record._replace(steps=steps)


def _partner(steps: list[Step], alone: list[bool], record: Record) -> int | None:
    """The earliest launch that the last step can be launched with."""
    second = steps[-1]
    assert isinstance(second, Launch)
    touched = _whole(_touched(second), record)
    made = {steps[k].region for k in _allocated(steps, second)}  # type: ignore[union-attr]
    if _bytes(made, record) > EARLIER:
        return None
    found = None
    for i in range(len(steps) - 2, -1, -1):
        step = steps[i]
        if isinstance(step, Allocate):
            continue
        if touched & _touched(step):
            break
        if alone[i] and isinstance(step, Launch) and _alike(step, second):
            own = {s.region for s in steps if isinstance(s, Allocate)} & _touched(step)
            if _bytes(own, record) <= SHORT:
                found = i
    return found


def _whole(regions: set[str], record: Record) -> set[str]:
    """Regions, and arguments that share memory with one of them."""
    names = [(f"i{a}", f"i{b}") for a, b, _ in record.shared]
    more = {n for pair in names if regions & set(pair) for n in pair}
    return regions if more <= regions else _whole(regions | more, record)


def _alike(a: Launch, b: Launch) -> bool:
    """Whether they are kernels of one file, and both reduce a matrix or both do not."""
    of, other = a.of.fn, b.of.fn
    reduces = ("partial" in of.arg_names, "partial" in other.arg_names)
    return of.fn.__module__ == other.fn.__module__ and reduces[0] == reduces[1]


def _beside(a: Launch, b: Launch, device: torch.device) -> Launch | None:
    """Both as one; None where they are better off apart."""
    found = a.of.beside(b.of)
    if found is None:
        return None
    kernel, programs = found
    if kernel.n_spills > max(a.kernel.n_spills, b.kernel.n_spills):
        return None
    room = FILE // (kernel.n_regs * 32 * kernel.metadata.num_warps) * env.multiprocessors(device)
    many = kernel.n_regs > max(FEW, REGISTERS * max(a.kernel.n_regs, b.kernel.n_regs))
    if many and programs > room:
        return None
    args = [Constant(a.programs), *a.args, *b.args]
    return Launch(kernel, programs, args, aside=a.aside and b.aside)


def _allocated(steps: list[Step], launch: Launch) -> list[int]:
    """The steps that allocate what a launch is the first to touch."""
    own, known = _touched(launch), set[str]()
    found = []
    for k, step in enumerate(steps):
        if step is launch:
            break
        if isinstance(step, Allocate):
            if step.region in own:
                found.append(k)
        else:
            known |= _touched(step)
    return [k for k in found if steps[k].region not in known]  # type: ignore[union-attr]


def _touched(step: Step) -> set[str]:
    if isinstance(step, Allocate):
        return {step.region}
    if isinstance(step, Launch):
        return {a.region for a in step.args if isinstance(a, Address)}
    found: Iterable[Any] = (*leaves(step.args), *leaves(step.kwargs))
    return {p.region for p in found if isinstance(p, Piece)} | set(step.makes)


def _bytes(regions: set[str], record: Record) -> int:
    return sum(bytes_of(record.forms[name]) for name in regions)
