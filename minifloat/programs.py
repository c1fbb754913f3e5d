"""Programs: what a cast allocates and launches, recorded once and replayed.

The second call for a kind of input runs the ordinary code under a recorder; the next ones allocate
the same buffers and launch the same compiled kernels with other addresses. That is most of the
host's work spared: a Triton launch through its JIT function binds and hashes every argument anew.
A program is valid for its key: the operation, shapes, strides, dtypes, casts and alignment. Code
that does anything but allocate, view, launch and multiply is not replayable, and is run as it is
every time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor
from torch._C import _len_torch_dispatch_stack

from . import env
from .recorder import Program, Recorder

__all__ = ["again", "alone", "forbid", "key", "record", "recording", "replay"]

_local = threading.local()


def recording() -> Recorder | None:
    """The recorder that watches this thread."""
    return getattr(_local, "recorder", None)


def forbid(why: str) -> None:
    """What runs now is not to be replayed."""
    recorder = recording()
    if recorder is not None:
        recorder.refuse(why)


def alone() -> bool:
    """Whether a recorder is all that watches: nobody wants to see operators."""
    return recording() is not None and _len_torch_dispatch_stack() == 1


def record(recorder: Recorder, ordinary: Callable[[], Any]) -> Any:
    """`ordinary()`, watched."""
    _local.recorder = recorder
    try:
        with recorder:
            return ordinary()
    finally:
        _local.recorder = None


# Recorded programs by key; None: it was seen once, a string: why it is not replayable. A shape that
# never comes again is not worth a recording. Programs hold code and shapes, no memory.
_PROGRAMS: dict[Hashable, Program | str | None] = {}
LIMIT = 4096


def key(name: Hashable, tensors: Sequence[Tensor | None], *casts: Any) -> Hashable:
    """What a program depends on. Casts are interned, so their ids stand for them.

    Arguments of one key pass the same checks: what is replayed checks nothing.
    """
    each = [
        None if t is None else (t.shape, t.stride(), t.dtype, t.get_device(), t.data_ptr() & 15)
        for t in tensors
    ]
    return (name, *map(id, casts), *each)


def again(of: Hashable, inputs: Sequence[Tensor | None]) -> list[Any] | None:
    """What the program of a key makes, if there is one, nobody records now, and it launches where
    its first input is."""
    program = _PROGRAMS.get(of)
    if not isinstance(program, Program) or recording() is not None or not program.fits(inputs):
        return None
    return program.run(inputs) if env.is_current(inputs[0].get_device()) else None  # type: ignore[union-attr]


def replay(
    of: Hashable, inputs: Sequence[Tensor | None], ordinary: Callable[[], list[Tensor]]
) -> list[Tensor]:
    """`ordinary()`, recorded if it is the second time and kernels run here."""
    x = inputs[0]
    assert x is not None
    if not (env.replays() and env.runs_kernels(x)) or recording() is not None:
        return ordinary()
    if not env.is_current(x.get_device()):
        return ordinary()
    known = _PROGRAMS.get(of, "")
    made: list[Tensor]
    if known is not None:
        made = ordinary()
        if known == "":  # else not replayable, or not with these
            if len(_PROGRAMS) >= LIMIT:  # shapes without end: start over
                _PROGRAMS.clear()
            _PROGRAMS[of] = None
        return made
    recorder = Recorder(inputs)
    made = record(recorder, ordinary)
    _PROGRAMS[of] = recorder.program(made, x.device) or recorder.why
    return made
