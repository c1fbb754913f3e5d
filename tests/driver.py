"""What batches run on in tests: functions of Python stand for the CUDA driver and cuBLASLt."""

from __future__ import annotations

import ctypes
import shutil
import struct
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minifloat import batch, writer
from minifloat.recorder import Recorder
from minifloat.writer import Program

__all__ = [
    "CONTEXT",
    "CUDA",
    "INT",
    "SIZE",
    "VOID",
    "Device",
    "allocate",
    "built",
    "kernel",
    "record",
    "stand_in",
]

VOID, INT, UINT, SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_size_t
CUDA = torch.device("cuda", 0)
CONTEXT = 77


def built() -> Any:
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not (shutil.which("gcc") or shutil.which("clang")) or not headers.exists():
        pytest.skip("nothing compiles C against Python here")
    return batch.build()


class Device:
    """Notes what it is asked for; in a capture, what waits for what."""

    def __init__(self, module: Any) -> None:
        self.seen: list[Any] = []
        self.context = 0
        self.status = 0
        self.parameters: list[str] = []  # types of the next launch's
        self.work: Any = None  # what the next launch does with its parameters
        self.capture: dict[int, int] = {}  # what is captured, by stream
        self.tips: dict[int, list[int]] = {}  # by stream: what its next node waits for
        self.graph: dict[int, list[int]] = {}  # what each node waits for
        self.more: dict[int, int] = {}
        self.refuses: list[int] = []  # what the next updates of dependencies return
        self.updates = 0
        self._held: Any = None
        functions = (
            ctypes.CFUNCTYPE(INT, VOID, *(UINT,) * 7, VOID, VOID, VOID)(self.launch),
            ctypes.CFUNCTYPE(INT, VOID)(self.get_context),
            ctypes.CFUNCTYPE(INT, VOID)(self.set_context),
            ctypes.CFUNCTYPE(INT, VOID, INT, VOID, SIZE)(self.set_attribute),
            ctypes.CFUNCTYPE(INT, *(VOID,) * 14, SIZE, VOID)(self.multiply),
            ctypes.CFUNCTYPE(INT, *(VOID,) * 6)(self.get_capture),
            ctypes.CFUNCTYPE(INT, VOID, ctypes.POINTER(VOID), SIZE, UINT)(self.set_dependencies),
        )
        self.functions = functions  # held: C calls them
        module.bind(*(ctypes.cast(f, VOID).value for f in functions))

    def launch(self, function: int, *rest: Any) -> int:
        *grid, shared, stream, parameters, extra = rest
        found = ctypes.cast(parameters, ctypes.POINTER(VOID))
        values = [
            struct.unpack(f"<{kind}", ctypes.string_at(found[i], struct.calcsize(kind)))[0]
            for i, kind in enumerate(self.parameters)
        ]
        self.seen.append((function, *grid, shared, stream, values))
        self.node(function, stream)
        if self.work is not None:
            self.work(*values)
        return self.status

    def get_context(self, where: int) -> int:
        ctypes.cast(where, ctypes.POINTER(VOID))[0] = self.context
        return 0

    def set_context(self, context: int) -> int:
        self.seen.append(("context", context))
        self.context = context
        return 0

    def set_attribute(self, descriptor: int, attribute: int, value: int, size: int) -> int:
        address = ctypes.cast(value, ctypes.POINTER(ctypes.c_uint64))[0]
        self.seen.append((descriptor, attribute, address, size))
        return self.status

    def multiply(self, *args: Any) -> int:
        one, zero = (ctypes.cast(args[i], ctypes.POINTER(ctypes.c_float))[0] for i in (2, 7))
        self.seen.append((*args[:2], one, *args[3:7], zero, *args[8:]))
        self.node(args[1], args[15])
        return self.status

    # ---------------------------------------------------------------------------- captures
    def node(self, name: int, stream: int) -> None:
        if stream in self.capture:
            self.graph[name] = self.tips.get(stream, [])
            self.tips[stream] = [name, *([self.more[name]] if name in self.more else [])]

    def get_capture(
        self, stream: int, status: int, capture: int, graph: int, nodes: int, count: int
    ) -> int:
        if stream not in self.capture:
            ctypes.cast(status, ctypes.POINTER(INT))[0] = 0
            return 0
        tips = self.tips.get(stream, [])
        self._held = (VOID * max(1, len(tips)))(*tips)
        ctypes.cast(status, ctypes.POINTER(INT))[0] = 1
        ctypes.cast(capture, ctypes.POINTER(ctypes.c_uint64))[0] = self.capture[stream]
        ctypes.cast(nodes, ctypes.POINTER(VOID))[0] = ctypes.addressof(self._held)
        ctypes.cast(count, ctypes.POINTER(SIZE))[0] = len(tips)
        return 0

    def set_dependencies(self, stream: int, nodes: Any, count: int, flags: int) -> int:
        self.updates += 1
        status = self.refuses.pop(0) if self.refuses else 0
        if status:
            return status
        found = [nodes[i] for i in range(count)]
        assert all(found)
        self.tips[stream] = found if flags == 1 else [*self.tips[stream], *found]
        return 0


def stand_in(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Batches run on it, as if there were a GPU."""
    module = built()
    made = Device(module)
    monkeypatch.setattr(batch, "compiled", lambda: module)
    monkeypatch.setattr(batch, "context", lambda: CONTEXT)
    monkeypatch.setattr(writer, "_stream", lambda index: 5)
    monkeypatch.setattr(writer, "_allocate", allocate)
    return made


def allocate(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype)


def kernel(name: int, *kinds: str, **metadata: Any) -> Any:
    """What Triton returns from a launch."""
    signature = {f"a{i}": kind for i, kind in enumerate(kinds)}
    own = {"num_warps": 4, "shared": 32, "num_ctas": 1, **metadata}
    return SimpleNamespace(
        function=name,
        src=SimpleNamespace(signature=signature),
        metadata=SimpleNamespace(**own),
        packed_metadata="m",
        run=None,
    )


def record(work: Any, *inputs: torch.Tensor, consume: bool = False) -> Program:
    watching = Recorder(inputs)
    with watching:
        made = work(watching)
    program = watching.program(made, CUDA, consume=consume)
    assert program is not None, watching.why
    return program
