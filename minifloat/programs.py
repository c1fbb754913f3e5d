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

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch.nn import Parameter

from . import batch, env
from .opaque import Value
from .recorder import Recorder
from .writer import Program

__all__ = [
    "Told",
    "again",
    "alone",
    "forbid",
    "key",
    "may_record",
    "operator",
    "record",
    "recording",
    "replay",
    "sight",
    "tell",
    "walk",
]

_AS_IS = frozenset({int, bool, float, str, type(None), torch.dtype, torch.device, type})
_PLAIN, _TENSOR, _SEVERAL, _INTERNED, _FOREIGN, _TOLD = range(6)  # as in batch.c
_PARTS: dict[type, int] = {}  # `_part` of the types that were seen
# What `walk` found: one object for equal keys, the tensors, and the index of their device.
Told = tuple[object, tuple[Tensor, ...], int]


class _Local(threading.local):
    recorder: Recorder | None = None  # of the class: to ask for what is not there takes longer


_local = _Local()


def recording() -> Recorder | None:
    """The recorder that watches this thread."""
    return _local.recorder


def may_record(device: torch.device) -> bool:
    """Whether a program may be written now. Not while a stream is captured: what a product is asked
    of cuBLASLt may take memory, and trials would be captured as well."""
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


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
# What stands for a key that was told: hashed as one object, not item by item.
_TELLING: dict[Hashable, object] = {}


def sight(table: dict[Hashable, Any], of: Hashable) -> None:
    """Note that `of` was seen once; a table of shapes without end starts over."""
    if len(table) >= LIMIT:
        table.clear()
    table[of] = None


def key(name: Hashable, tensors: Sequence[Tensor | None], *casts: Any) -> Hashable:
    """What a program depends on. Casts are interned, so their ids stand for them.

    Arguments of one key pass the same checks: what is replayed checks nothing.
    """
    each = [
        None if t is None else (t.shape, t.stride(), t.dtype, t.get_device(), t.data_ptr() & 15)
        for t in tensors
    ]
    return (name, *map(id, casts), *each)


def walk(value: Any, key: list[Any], found: list[Tensor], index: int) -> bool:
    """Append what `value` is made of: its tensors, and all a program depends on besides. False: of
    something that no key tells, or that is not on the device of this index."""
    compiled = batch.compiled()
    if compiled is None:
        return _walk(value, key, found, index)
    return compiled.walk(_PARTS, _part, value, key, found, index)  # type: ignore[no-any-return]


def _walk(value: Any, key: list[Any], found: list[Tensor], index: int) -> bool:
    for v in value:
        kind = type(v)
        part = _PARTS.get(kind)
        if part is None:
            part = _PARTS[kind] = _part(kind)
        if part == _TOLD and v.told is None:
            part = _SEVERAL
        if part == _PLAIN:
            key.append(v)
        elif part == _TENSOR:
            if v.get_device() != index:
                return False
            try:
                key += (v.shape, v.stride(), v.dtype, v.data_ptr() & 15)
            except RuntimeError:  # one without memory of its own: sparse, nested, or of a transform
                return False
            found.append(v)
        elif part == _SEVERAL:
            key += (kind, len(v))
            if not _walk(v, key, found, index):
                return False
        elif part == _INTERNED:
            key.append(id(v))
        elif part == _TOLD:
            told, tensors, where = v.told
            if where != index:
                return False
            key.append(told)
            found += tensors
        else:
            return False
    return True


def tell(value: Any, index: int) -> Told | None:
    """What `walk` finds in a tuple, for its attribute `told`, and then it is not walked again: for
    one that many calls are given, by who sees to it that its tensors stay as they are. None: no key
    tells it."""
    key: list[Any] = []
    found: list[Tensor] = []
    if not walk(value, key, found, index):
        return None
    if len(_TELLING) >= LIMIT:
        _TELLING.clear()
    return _TELLING.setdefault(tuple(key), object()), tuple(found), index


def _part(kind: type) -> int:
    """What objects of this type are to a key."""
    if hasattr(kind, "told"):
        return _TOLD
    if kind in _AS_IS:
        return _PLAIN
    if kind is Tensor or kind is Parameter:
        return _TENSOR
    if issubclass(kind, tuple | list):
        return _SEVERAL
    return _INTERNED if issubclass(kind, Value) else _FOREIGN


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
    if known is not None or not may_record(x.device):
        made = ordinary()
        if known == "":  # else not replayable, or not with these, or not now
            sight(_PROGRAMS, of)
        return made
    recorder = Recorder(inputs)
    made = record(recorder, ordinary)
    _PROGRAMS[of] = recorder.program(made, x.device) or recorder.why
    return made


# Those of operators, each with whether it makes one tensor, several or none.
_OPERATORS: dict[Hashable, tuple[Program, type] | str | None] = {}


def operator(name: str, implementation: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """`implementation(*args)`, as a graph calls it: replayed as casts are in eager."""
    flat = (t for a in args for t in (a if isinstance(a, list) else (a,)))
    x = next((t for t in flat if isinstance(t, Tensor)), None)
    if x is None or not (env.runs_kernels(x) and env.replays()) or recording() is not None:
        return implementation(*args)
    index = x.get_device()
    parts: list[Any] = [name, index]
    inputs: list[Tensor] = []
    foreign = torch._C._is_any_autocast_enabled() or _len_torch_dispatch_stack() > 0
    if foreign or not env.is_current(index) or not walk(args, parts, inputs, index):
        return implementation(*args)
    of = tuple(parts)
    known = _OPERATORS.get(of, "")
    if isinstance(known, tuple) and known[0].fits(inputs):
        made = known[0].run(inputs)
        return made if known[1] is list else made[0] if made else None
    if known is not None or not may_record(x.device):
        made = implementation(*args)
        if known == "":
            sight(_OPERATORS, of)
        return made
    recorder = Recorder(inputs)
    made = record(recorder, lambda: implementation(*args))
    results = made if isinstance(made, list) else [] if made is None else [made]
    program = recorder.program(results, x.device)
    _OPERATORS[of] = recorder.why if program is None else (program, type(made))
    return made
