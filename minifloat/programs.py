"""Programs: what a cast allocates and launches, recorded once and replayed.

The first call for a kind of input runs the ordinary code under a recorder; the next ones allocate
the same buffers and launch the same compiled kernels with other addresses. That is most of the
host's work spared: a Triton launch through its JIT function binds and hashes every argument anew.
A program is valid for its key: the operation, shapes, strides, dtypes, casts and alignment. Code
that does anything but allocate, view and launch is not replayable, and is run as it is every time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from . import env

__all__ = ["Program", "Recorder", "Step", "find", "key", "key_of", "recording", "replay"]

aten = torch.ops.aten
_ALLOCATE = {aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default,
             aten.new_empty.default}  # fmt: skip
_VIEW = {
    aten.view.default, aten.view.dtype, aten._unsafe_view.default, aten.t.default,
    aten.detach.default, aten.alias.default, aten.transpose.int, aten.unsqueeze.default,
    aten.slice.Tensor, aten.select.int, aten.as_strided.default, aten.expand.default,
}  # fmt: skip

# A build without CUDA has no such function, and no program to run.
_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_local = threading.local()


Buffer = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides, dtype


class Step(NamedTuple):
    """One launch: the compiled kernel, its grid, and its arguments with holes for addresses."""

    run: Any
    function: Any
    metadata: Any
    programs: int
    args: list[Any]
    holes: tuple[tuple[int, int, int], ...]  # position, tensor, byte offset


class Program:
    """Buffers to allocate, launches to make, and which buffers are the result."""

    __slots__ = ("buffers", "device", "outputs", "steps")

    def __init__(
        self,
        device: torch.device,
        buffers: list[Buffer],
        steps: list[Step],
        outputs: list[int],
    ) -> None:
        self.device, self.buffers, self.steps, self.outputs = device, buffers, steps, outputs

    def __call__(self, inputs: Sequence[Tensor | None]) -> list[Tensor]:
        device = self.device
        # empty_strided takes half the host's time that empty does.
        made = [
            torch.empty_strided(shape, strides, dtype=dtype, device=device)
            for shape, strides, dtype in self.buffers
        ]
        pointers = [None if t is None else t.data_ptr() for t in inputs]
        pointers += [t.data_ptr() for t in made]
        stream = _stream(device.index)
        for run, function, metadata, programs, template, holes in self.steps:
            args = template.copy()
            for position, tensor, offset in holes:
                args[position] = pointers[tensor] + offset  # type: ignore[operator]
            run(programs, 1, 1, stream, function, metadata, None, None, None, *args)
        return [made[i] for i in self.outputs]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches code that casts; `program` is None if it did more than a program can."""

    def __init__(self, inputs: Sequence[Tensor | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known: list[Tensor | None] = list(inputs)
        self.inputs = len(self.known)
        self.steps: list[Step] = []
        self.replayable = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in _ALLOCATE and made.is_contiguous():
            self.known.append(made)
        elif func not in _VIEW:
            self.replayable = False
        return made

    def launch(self, kernel: Any, programs: int, args: list[Any]) -> None:
        """Note a launch that was made."""
        holes = []
        for i, value in enumerate(args):
            if isinstance(value, Tensor):
                found = self._find(value)
                if found is None:
                    self.replayable = False
                    return
                holes.append((i, *found))
                args[i] = 0
        step = Step(
            kernel.run, kernel.function, kernel.packed_metadata, programs, args, tuple(holes)
        )
        self.steps.append(step)

    def _find(self, tensor: Tensor) -> tuple[int, int] | None:
        """(which known tensor, byte offset into it) `tensor` starts at.

        The tensor that starts there, if one does: two inputs may be views of one storage, whose
        distance is another one in the next call. Else the one whose elements are around it.
        """
        address = tensor.data_ptr()
        inside = None
        for i, known in enumerate(self.known):
            if known is None or not known.numel():
                continue
            offset = address - known.data_ptr()
            if offset == 0:
                return i, 0
            if inside is None and 0 < offset < _extent(known):
                inside = i, offset
        return inside

    def program(self, made: Sequence[Tensor], device: torch.device) -> Program | None:
        if not self.replayable:
            return None
        allocated = [t for t in self.known[self.inputs :] if t is not None]
        outputs = []
        for t in made:
            same = [i for i, known in enumerate(allocated) if _same(known, t)]
            if not same or same[0] in outputs:
                return None
            outputs.append(same[0])
        buffers = [(tuple(t.shape), t.stride(), t.dtype) for t in allocated]
        return Program(device, buffers, self.steps, outputs)


def _extent(t: Tensor) -> int:
    """Bytes from the first element of `t` to behind the last."""
    last = sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
    return (last + 1) * t.element_size()


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two objects are one tensor: a dispatch mode sees other objects than its program."""
    return (a.data_ptr(), a.shape, a.dtype) == (b.data_ptr(), b.shape, b.dtype)


def recording() -> Recorder | None:
    """The recorder that watches this thread."""
    return getattr(_local, "recorder", None)


# Recorded programs by key. They hold code and shapes, no memory.
_PROGRAMS: dict[Hashable, Program | None] = {}
LIMIT = 4096


def key(name: Hashable, x: Tensor, row: Any, col: Any, *others: Tensor | None) -> Hashable:
    """What a program depends on. Casts are interned, so their ids stand for them."""
    return (
        name, id(row), id(col), x.shape, x.stride(), x.dtype, x.device.index,
        x.data_ptr() & 15, *[None if t is None else t.data_ptr() & 15 for t in others],
    )  # fmt: skip


def key_of(name: Hashable, tensors: Sequence[Tensor | None], *casts: Any) -> Hashable:
    """`key` where every tensor has a shape of its own; the first is there, and tells the device."""
    x = tensors[0]
    assert x is not None
    each = [
        None if t is None else (t.shape, t.stride(), t.dtype, t.data_ptr() & 15) for t in tensors
    ]
    return (name, x.device.index, *map(id, casts), *each)


def find(of: Hashable) -> Program | None:
    return _PROGRAMS.get(of)


def replay(
    of: Hashable, inputs: Sequence[Tensor | None], ordinary: Callable[[], list[Tensor]]
) -> list[Tensor]:
    """`ordinary()`, recorded if it was not before and kernels run here."""
    x = inputs[0]
    assert x is not None
    if not env.runs_kernels(x) or of in _PROGRAMS or recording() is not None:
        return ordinary()
    recorder = Recorder(inputs)
    _local.recorder = recorder
    try:
        with recorder:
            made = ordinary()
    finally:
        _local.recorder = None
    if len(_PROGRAMS) >= LIMIT:  # shapes without end: start over
        _PROGRAMS.clear()
    _PROGRAMS[of] = recorder.program(made, x.device)
    return made
