"""Activation checkpointing: what a forward that will be repeated must find again.

A checkpointed forward runs twice: now, and inside backward, where no autocast is open any more and
delayed scales have moved on. The first run *records* what the module read of the ambient state, the
second *replays* it in the same order. The record hangs on the object that stands for the
checkpointed region in PyTorch's own checkpointing, so it lives as long as that, and no longer.
Compiled graphs need none of this: what they read is part of them.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.utils import checkpoint

__all__ = ["Entry", "Tape", "tape"]

_NAME = "_minifloat_tape"
_REENTRANT = {
    checkpoint.CheckpointFunction.forward.__code__,
    checkpoint.CheckpointFunction.backward.__code__,
}


class Entry:
    """What one module read: its plan, the plan it calibrates, delayed scales of (input, weight),
    the group of its amaxes, and whether its weight came from a workspace."""

    def __init__(self, plan: Any, calibration: Any, group: str | None) -> None:
        self.plan, self.calibration, self.group = plan, calibration, group
        self.scales: list[Any] = [None, None]
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


def tape() -> tuple[Tape | None, bool]:
    """(the tape of the checkpointed region that is running, whether to read it); (None, False)."""
    forward = torch._C._current_graph_task_id() == -1
    if forward and torch.is_grad_enabled() and _top_saved_tensors_default_hooks(True) is None:
        return None, False  # neither kind of checkpoint runs like this: 0.3 us for all others
    replays = torch._C._current_graph_task_id() != -1
    region = _region()
    if region is None:
        return None, False
    found = region.__dict__.get(_NAME)
    if found is None:
        if replays:  # a region whose first run had nothing quantized in it
            return None, False
        found = region.__dict__[_NAME] = Tape()
    return found, replays


def _region() -> Any:
    """PyTorch's object for the innermost checkpointed region, or None."""
    hooks = _top_saved_tensors_default_hooks(True)
    if hooks is not None:
        region = _non_reentrant(hooks[0])
        if region is not None:
            return region
    if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
        return None  # a reentrant checkpoint runs first without gradients, then in a backward
    return _reentrant()


def _non_reentrant(pack: Any) -> Any:
    """`frame` of torch.utils.checkpoint, of which the first run's hook and the second's know."""
    pack = getattr(pack, "_torchdynamo_orig_callable", pack)
    names = getattr(getattr(pack, "__code__", None), "co_freevars", ())
    for name in ("frame", "target_frame_ref"):
        if name in names:
            found = pack.__closure__[names.index(name)].cell_contents
            found = found() if name.endswith("_ref") else found
            if isinstance(found, checkpoint._CheckpointFrame):
                return found
    return None


def _reentrant() -> Any:
    """`ctx` of the reentrant checkpoint that is on the stack."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if frame.f_code in _REENTRANT:
            return frame.f_locals["ctx"]
        frame = frame.f_back
    return None
