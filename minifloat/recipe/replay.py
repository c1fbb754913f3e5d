"""Activation checkpointing: what a forward that will be repeated must find again.

A checkpointed forward runs twice: now, and inside backward, where no autocast is open any more and
delayed scales have moved on. The first run *records* what the module read of the ambient state, the
second *replays* it in the same order. The record hangs on the object that stands for the
checkpointed region in PyTorch's own checkpointing, so it lives as long as that, and no longer.
Compiled graphs need none of this: what they read is part of them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.utils import checkpoint
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["Entry", "Tape", "counted", "in_first_run", "replayed", "tapes", "unseen"]

_NAME = "_minifloat_tape"
_FILE = checkpoint.__file__
_REENTRANT = (
    checkpoint.CheckpointFunction.forward.__code__,
    checkpoint.CheckpointFunction.backward.__code__,
)


class Entry:
    """What one module read: its plan, the plan it calibrates, delayed scales of (input, weight,
    output), the group of its amaxes, and whether its weight came from a workspace."""

    def __init__(self, plan: Any, calibration: Any, group: str | None) -> None:
        self.plan, self.calibration, self.group = plan, calibration, group
        self.scales: list[Any] = [None, None, None]
        self.workspace = False


class Tape:
    """What the modules of one checkpointed region read, in order; read again from the start."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.position = 0
        self.run: int | None = None  # the backward that is reading

    def record(self, entry: Entry) -> None:
        self.entries.append(entry)

    def replay(self) -> Entry:
        run = torch._C._current_graph_task_id()
        if run != self.run:
            self.run, self.position = run, 0
        entry = self.entries[self.position]
        self.position += 1
        return entry


def tapes() -> tuple[list[Tape], Tape | None]:
    """(tapes to record on, tape to read): those of the checkpointed regions that are running.

    Regions nest. From the innermost outwards, those that run for the first time record; the first
    one that is being repeated is read, and what encloses that one is of no interest. A region that
    is inside a repeated one is new to PyTorch, and records what is read.
    """
    hooks: Any = _top_saved_tensors_default_hooks(True)
    if hooks is None and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
        return [], None
    new: list[Tape] = []
    for region, repeated in _regions():
        found = region.__dict__.get(_NAME)
        if repeated:
            return new, found  # None: its first run had nothing of ours in it
        if found is None:
            found = region.__dict__[_NAME] = Tape()
        new.append(found)
    return new, None


def replayed(recipe: Any) -> Any:
    """The recipe in force, of which a record is made; in a recompute, the first run's."""
    new, old = tapes()
    if old is not None:
        return old.replay().plan
    for tape in new:
        tape.record(Entry(recipe, None, None))
    return recipe


def in_first_run() -> bool:
    """Whether a reentrant checkpoint, which has gradients off, runs what it will repeat: not where
    they were off around it, whatever its inputs would need."""
    for region, repeated in _regions():
        if repeated:
            return False
        if not isinstance(region, checkpoint._CheckpointFrame) and region.next_functions:
            return True
    return False


def unseen(hide: bool) -> Any:
    """What the first run does and the second does not, or the other way round.

    Selective checkpointing counts the operations of both, and they must agree.
    """
    return _disable_current_modes() if hide else contextlib.nullcontext()


def counted() -> bool:
    """Whether a checkpoint may be counting: a region runs while somebody looks at operations."""
    return _len_torch_dispatch_stack() > 0 and next(_regions(), None) is not None


def _regions() -> Iterator[tuple[Any, bool]]:
    """(PyTorch's object for a checkpointed region, whether it is being repeated): the stack's."""
    at: Any = sys._getframe(2)
    while at is not None:
        code = at.f_code
        if code.co_filename == _FILE:
            if code is _REENTRANT[0] or code is _REENTRANT[1]:
                yield at.f_locals["ctx"], code is _REENTRANT[1]
            elif code.co_name == "unpack_hook":
                region = at.f_locals.get("frame")
                if isinstance(region, checkpoint._CheckpointFrame):
                    yield region, True
            elif code.co_name == "checkpoint":
                inner = getattr(at.f_locals.get("gen"), "gi_frame", None)
                region = None if inner is None else inner.f_locals.get("new_frame")
                if region is not None:
                    yield region, False
        at = at.f_back
