"""Work for `autograd.run`, replayed: what it allocates, launches and multiplies, and nothing else.

`work.kind(tensors)` says what a program would depend on besides what these tensors are like; None,
or no such function: the work is not to be replayed. Work that is depends on the tensors and plain
values in what it is given, and its note holds no tensor. Its second call of a kind is recorded,
forward and backward each, and the next ones run the two programs: a step of `Linear` spends on the
host what its launches take, not what deciding on them does. Programs know shapes, strides, dtypes,
alignment and values; of state, only the tensors that a call names.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch.nn import Parameter

from . import env, programs
from .programs import walk
from .recorder import Recorder
from .writer import Program

__all__ = ["Note", "backward", "forward", "outdate"]


class Recorded:
    """One kind of call: forward's program, and those of backward by what autograd gives it."""

    __slots__ = ("backward", "device", "index", "note", "outputs", "program")

    def __init__(self, program: Program, outputs: int, note: Any, device: torch.device) -> None:
        self.program, self.outputs, self.note, self.device = program, outputs, note, device
        self.index = -1 if device.index is None else device.index  # as tensors tell it
        self.backward: dict[Hashable, Program | str] = {}


class Note(NamedTuple):
    """What forward tells backward: the work's own note, its kind, and the tensors of its data."""

    note: Any
    recorded: Recorded | None = None
    held: tuple[Tensor, ...] = ()
    date: int = 0  # of the tensors of its data: see `outdate`


_date = 0


def outdate() -> None:
    """Tensors that data of calls name have been replaced: backwards that are still to come find
    out which, where programs would go by the old ones."""
    global _date  # noqa: PLW0603
    _date += 1


# By kind. None: it was seen once; a string: why it is not replayable.
_KINDS: dict[Hashable, Recorded | str | None] = {}
BACKWARDS = 64  # programs of backward for one kind


def forward(work: Any, data: Any, tensors: tuple[Any, ...]) -> tuple[Any, list[Any], Note]:
    """`work.forward(data, tensors)`: (outputs, tensors to save, a note for `backward`)."""
    found = _kind(work, data, tensors)
    if found is None:
        outputs, saved, note = work.forward(data, tensors)
        return outputs, saved, Note(note)
    of, held, inputs = found
    recorded = _KINDS.get(of, "")
    if isinstance(recorded, Recorded):
        program, count = recorded.program, recorded.outputs
        if program.fits(inputs):
            made = program.run(inputs)
            out = made[0] if count < 0 else tuple(made[:count])
            return out, made[abs(count) :], Note(recorded.note, recorded, held, _date)
    elif recorded is None and programs.may_record(tensors[0].device):
        return _record(work, data, tensors, of, held, inputs)
    outputs, saved, note = work.forward(data, tensors)
    if recorded == "":
        programs.sight(_KINDS, of)
    return outputs, saved, Note(note)


def _record(
    work: Any, data: Any, tensors: tuple[Any, ...], of: Hashable, held: Any, inputs: Any
) -> tuple[Any, list[Any], Note]:
    recorder = Recorder(inputs)
    outputs, saved, note = programs.record(recorder, lambda: work.forward(data, tensors))
    flat = outputs if isinstance(outputs, tuple) else (outputs,)
    device = tensors[0].device
    program = recorder.program([*flat, *saved], device, fresh=len(flat))
    if program is None:
        _KINDS[of] = recorder.why
        return outputs, saved, Note(note)
    recorded = Recorded(program, len(flat) if isinstance(outputs, tuple) else -1, note, device)
    _KINDS[of] = recorded
    return outputs, saved, Note(note, recorded, held, _date)


def backward(
    work: Any, data: Any, note: Note, saved: list[Any], grads: tuple[Any, ...]
) -> tuple[Any, ...]:
    """`work.backward(data, note, saved, grads)`; `saved` is emptied."""
    own, recorded, held, date = note
    key: list[Any] = []
    found: list[Any] = []
    # Where tensors were replaced, or somebody wants to see operators.
    if recorded is None or date != _date or _len_torch_dispatch_stack() > 0:
        return work.backward(data, own, saved, grads)  # type: ignore[no-any-return]
    index = recorded.index
    if not env.is_current(index):
        return work.backward(data, own, saved, grads)  # type: ignore[no-any-return]
    if not walk((saved, grads), key, found, index):
        found.clear()
        return work.backward(data, own, saved, grads)  # type: ignore[no-any-return]
    known, of = recorded.backward, tuple(key)
    program = known.get(of)
    inputs = [*found, *held]
    found.clear()
    if isinstance(program, Program) and program.fits(inputs):
        saved.clear()
        return tuple(program.run(inputs))
    late = program is not None or len(known) >= BACKWARDS
    if late or not programs.may_record(recorded.device):
        del inputs
        return work.backward(data, own, saved, grads)  # type: ignore[no-any-return]
    recorder = Recorder(inputs)
    del inputs
    made = programs.record(recorder, lambda: work.backward(data, own, saved, grads))
    known[of] = recorder.program(made, recorded.device, fresh=0, consume=True) or recorder.why
    return made  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------- kinds
def _kind(
    work: Any, data: Any, tensors: tuple[Any, ...]
) -> tuple[Hashable, tuple[Tensor, ...], list[Tensor]] | None:
    """(its key, the tensors of `data`, all tensors) of a call that may be replayed, else None."""
    x = tensors[0]
    if type(x) is not Tensor and type(x) is not Parameter:
        return None
    # Callers have asked whether a graph is traced.
    if not (env.runs_kernels(x) and env.replays()) or _len_torch_dispatch_stack() > 0:
        return None
    if programs.recording() is not None:
        return None
    if torch._C._is_any_autocast_enabled() or torch._C._are_functorch_transforms_active():
        return None  # a recorder would see operators of theirs
    index = x.get_device()
    if not env.is_current(index):  # launches would go elsewhere
        return None
    kind = getattr(work, "kind", None)
    own = None if kind is None else kind(tensors)
    if own is None:
        return None
    key: list[Any] = [work, own, index, _ranks()]
    held: list[Tensor] = []
    found: list[Tensor] = []
    if not walk((data,), key, held, index) or not walk(tensors, key, found, index):
        return None
    return tuple(key), tuple(held), [*found, *held]


def _ranks() -> int:
    """How many ranks there are, with whom amaxes may be shared."""
    world: Any = torch.distributed.group.WORLD if torch.distributed.is_available() else None
    return 0 if world is None else int(world.size())
