"""A record as a function: straight Python that allocates, launches and calls.

Steps that need no Python, launches and products, go into batches: consecutive ones are one call of
`batch`. A buffer that nobody outside its batch sees is a part of one allocation, and what dies in
the middle of a batch dies at its end; both only where it is small.
"""

from __future__ import annotations

import linecache
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import batch, cublaslt
from .steps import (
    Address,
    Allocate,
    Call,
    Constant,
    Form,
    Launch,
    Piece,
    Record,
    Shared,
    bytes_of,
    dense,
    leaves,
    numel,
)

__all__ = ["Program", "Writer"]

aten = torch.ops.aten
# The same by bindings that parse arguments themselves: in a profile of Linear on an H200 a product
# took 46 us by them, and 57 as an operator.
_BOUND = {
    aten._scaled_mm.default: torch._scaled_mm, aten._scaled_mm_v2.default: torch._scaled_mm_v2,
    aten.mm.default: torch.mm, aten.addmm.default: torch.addmm, aten.sum.dim_IntList: torch.sum,
    aten.add_.Tensor: Tensor.add_, aten.copy_.default: Tensor.copy_,
}  # fmt: skip

# A build without CUDA has no such function, and no program to run.
_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
# What Inductor's code allocates by: without the dispatcher, on the current device, which is that of
# a program that runs. None where PyTorch has no such function.
_allocate: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
# Bytes that a batch may keep for longer than they are needed: it ends where more have died. With
# 8 MiB, forward and backward of 2048 tokens, 768 to 3072 features, are a batch each.
HELD = 8 << 20
LINE = 256  # bytes: where parts of an allocation start, as allocations do
MOST = batch.ADDRESSES // 2  # regions of a batch


class Program:
    """A function of tensors, in the order in which the recorder was given them."""

    __slots__ = ("__weakref__", "run", "shared", "source")

    def __init__(self, source: str, constants: dict[str, Any], shared: Iterable[Shared]) -> None:
        # What the code was like is known of its arguments' kinds, but for who shares memory: those
        # that did must again.
        self.source, self.shared = source, tuple(shared)
        own = {"empty": torch.empty_strided, "allocate": _allocate, "stream_of": _stream}
        scope = {**own, **constants}
        file = f"<minifloat program {id(self):#x}>"
        linecache.cache[file] = (len(source), None, source.splitlines(True), file)  # for tracebacks
        weakref.finalize(self, linecache.cache.pop, file, None).atexit = False
        exec(compile(source, file, "exec"), scope)
        self.run: Callable[[Any], list[Any]] = scope["program"]

    def fits(self, inputs: Sequence[Any]) -> bool:
        """Whether arguments that shared memory when this was recorded do so again, as they did."""
        for a, b, d in self.shared:
            x, y = inputs[a], inputs[b]
            if (d or x is not y) and y.data_ptr() - x.data_ptr() != d:
                return False
        return True


class Writer:
    """Steps into source. Regions and their views are variables; `del` ends them."""

    def __init__(
        self,
        record: Record,
        results: list[Piece | None],
        fresh: int,
        device: torch.device,
        consume: bool,
    ) -> None:
        self.record, self.results, self.fresh = record, results, fresh
        self.lines: list[str] = []
        self.constants: dict[str, Any] = {"device": device}
        self.consume = consume
        self.quick = device.type == "cuda" and _allocate is not None
        self.forms = dict(record.forms)  # in which a region's variable is
        self.views: dict[Piece, str] = {}
        self.pointers: set[str] = set()
        self.uses = self._all_uses()
        self.words = [self._words(i) for i in range(len(record.steps))]
        self.ends: set[int] = set()  # steps behind which a batch ends for the memory that died
        self.batches = self._all_batches()
        self.parts = self._all_parts()
        self.open: batch.Steps | None = None
        self.number: int | None = None  # of the batch that was opened last
        self.ended: list[str] = []  # variables that end with the batch that is open

    def program(self) -> Program:
        names = [f"i{i}" for i in range(self.record.inputs)]
        if names:
            self.lines.append(f"{', '.join(names)}, = given")
        if self.consume:
            self.lines.append("given.clear()")
            self._free(-1)
        if any(isinstance(s, Launch) for s in self.record.steps) or any(self.words):
            self.lines.append(f"stream = stream_of({self.constants['device'].index})")
        wanted = self._wanted()
        for i, step in enumerate(self.record.steps):
            for made in self._allocated(i):
                self._allocate(made, wanted.get(made, self.forms[made]))
            if self.words[i] is not None:
                self._batch(i)
            elif not isinstance(step, Allocate):
                self._flush()
                self._launch(step) if isinstance(step, Launch) else self._call(step)
            self._free(i)
        self._flush()
        values = [self._result(i, r) for i, r in enumerate(self.results)]
        self.lines.append(f"return [{', '.join(values)}]")
        body = "\n".join(f"    {line}" for line in self.lines)
        return Program(f"def program(given):\n{body}\n", self.constants, self.record.shared)

    # ------------------------------------------------------------------------------------ results
    def _result(self, i: int, piece: Piece | None) -> str:
        """An output is no view, which its owner could not change in place, and is no view's base:
        one that is saved for backward would hold the graph that holds it."""
        if piece is None:
            return "None"
        name = self._variable(piece)
        forms = {r.form for r in self.results if r is not None and r.region == piece.region}
        alone = len(forms) == 1 and name == piece.region
        return name if alone or i >= self.fresh else f"{name}.detach()"

    def _wanted(self) -> dict[str, Form]:
        """The form in which an allocation is first used as a tensor, if it is all of it."""
        steps = range(len(self.record.steps))
        made = {name: self.forms[name] for i in steps for name in self._allocated(i)}
        wanted: dict[str, Form] = {}
        for piece in self._pieces():
            form = made.get(piece.region)
            if form is None or piece.region in wanted:
                continue
            whole = piece.form[3] == 0 and dense(piece.form)
            if whole and numel(piece.form) == numel(form):
                wanted[piece.region] = piece.form
        return wanted

    def _pieces(self) -> Iterable[Piece]:
        """What is needed as a tensor."""
        for i, step in enumerate(self.record.steps):
            if isinstance(step, Call) and self.words[i] is None:
                found = (*leaves(step.args), *leaves(step.kwargs))
                yield from (p for p in found if isinstance(p, Piece))
        yield from (r for r in self.results if r is not None)

    # ------------------------------------------------------------------------------------- memory
    def _all_uses(self) -> dict[str, list[int]]:
        """The steps that need a region, in order; results are needed after all of them."""
        uses: dict[str, list[int]] = {name: [] for name in self.record.forms}
        uses |= {f"i{i}": [] for i in range(self.record.inputs)}
        for i, step in enumerate(self.record.steps):
            names: Iterable[str] = ()
            if isinstance(step, Launch):
                names = (a.region for a in step.args if isinstance(a, Address))
            elif isinstance(step, Call):
                found = (*leaves(step.args), *leaves(step.kwargs))
                names = (*(p.region for p in found if isinstance(p, Piece)), *step.makes)
            for name in names:
                uses[name].append(i)
        for piece in self.results:
            if piece is not None:
                uses[piece.region].append(len(self.record.steps))
        return uses

    def _last(self, name: str) -> int:
        return self.uses[name][-1] if self.uses[name] else -1

    def _allocated(self, i: int) -> list[str]:
        """The regions that the program allocates for step i, if anybody uses them."""
        step = self.record.steps[i]
        names: tuple[str, ...] = ()
        if isinstance(step, Allocate):
            names = (step.region,)
        elif isinstance(step, Call) and self.words[i] is not None:
            names = (*step.makes, _scratch(i))
        return [name for name in names if self.uses.get(name)]

    def _allocate(self, region: str, form: Form) -> None:
        if region in self.parts:
            return
        self.forms[region] = form
        self.lines.append(f"{region} = {self._allocation(form[0], form[1], form[2])}")

    def _allocation(self, shape: Any, strides: Any, dtype: torch.dtype) -> str:
        if self.quick:
            return f"allocate({shape}, {strides}, {self._constant(dtype)})"
        return f"empty({shape}, {strides}, dtype={self._constant(dtype)}, device=device)"

    def _free(self, i: int) -> None:
        """End what step i was the last to need; -1 is before all steps, which need no memory that
        the program makes."""
        dead = {name for name in self.uses if self._last(name) == i and name not in self.parts}
        if i < 0:
            dead = {name for name in dead if name.startswith("i")}
        if not dead:
            return
        gone = [v for p, v in self.views.items() if p.region in dead]
        self.views = {p: v for p, v in self.views.items() if p.region not in dead}
        self.ended += [*sorted(dead), *gone]
        if self.open is None or i in self.ends:
            self._flush()

    def _dying(self, i: int) -> int:
        """Bytes that die with step i; arguments die where they are consumed."""
        dead = (name for name in self.forms if self._last(name) == i)
        own = (name for name in dead if self.consume or not name.startswith("i"))
        return sum(bytes_of(self.forms[name]) for name in own)

    # ------------------------------------------------------------------------------------ batches
    def _words(self, i: int) -> tuple[int, list[Any], Any] | None:
        """(kind, words, what they point into) of step i for `batch`, None where Python makes it."""
        step = self.record.steps[i]
        if not self.quick or isinstance(step, Allocate) or batch.compiled() is None:
            return None
        if isinstance(step, Launch):
            args = [(a.region, a.offset) if isinstance(a, Address) else a.value for a in step.args]
            words = batch.launch_words(step.kernel, step.programs, args)
            kind = batch.ASIDE if step.aside else batch.LAUNCH
            return None if words is None else (kind, words, step.kernel)
        found = cublaslt.of_call(step, self.record.forms, _scratch(i), self.record.unaligned)
        if found is None:
            return None
        if found[1].scratch > 0:
            self.forms[_scratch(i)] = ((found[1].scratch,), (1,), torch.uint8, 0)
            self.uses[_scratch(i)] = [i]
        return batch.PRODUCT, *found

    def _all_batches(self) -> list[int | None]:
        """The batch of each step."""
        found: list[int | None] = []
        number, names, held = 0, set[str](), 0
        for i, step in enumerate(self.record.steps):
            words = self.words[i]
            found.append(None if words is None else number)
            if words is not None:
                names |= {w[0] for w in words[1] if isinstance(w, tuple) and len(w) == 2}
            elif isinstance(step, Allocate):
                continue
            held += self._dying(i)
            if held >= HELD:
                self.ends.add(i)
            if words is None or held >= HELD or len(names) > MOST:
                number, names, held = number + 1, set(), 0
        return found

    def _all_parts(self) -> dict[str, tuple[int, int]]:
        """(batch, offset) of regions that are parts of a batch's one allocation."""
        by_batch: dict[int, list[str]] = {}
        for i in range(len(self.record.steps)):
            for name in self._allocated(i):
                steps = self.uses[name]
                inside = {self.batches[u] if u < len(self.batches) else None for u in steps}
                (number,) = inside if len(inside) == 1 else (None,)
                if number is not None and bytes_of(self.forms[name]) < HELD:
                    by_batch.setdefault(number, []).append(name)
        parts: dict[str, tuple[int, int]] = {}
        for number, names in by_batch.items():
            at = 0
            for name in names if len(names) > 1 else ():
                parts[name] = (number, at)
                at += -(-bytes_of(self.forms[name]) // LINE) * LINE
        return parts

    def _batch(self, i: int) -> None:
        """Step i, to be made with its neighbours."""
        number, words = self.batches[i], self.words[i]
        assert words is not None
        if number != self.number:
            self._flush()
        if self.open is None:
            self.open, self.number = batch.Steps(), number
            ends = [
                at + bytes_of(self.forms[name])
                for name, (of, at) in self.parts.items()
                if of == number
            ]
            if ends:
                self.lines.append(f"part = {self._allocation((max(ends),), (1,), torch.uint8)}")
                self.lines.append("p_part = part.data_ptr()")
                self.ended.append("part")
        kind, given, owner = words
        self._constant(owner)  # a program holds what its plans point into
        self.open.add(kind, [self._placed(w) for w in given])

    def _placed(self, word: Any) -> Any:
        """A word, its region by the name of the pointer to it."""
        if not (isinstance(word, tuple) and isinstance(word[0], str)):
            return word
        region, offset = word
        if region in self.parts:
            return "p_part", self.parts[region][1] + offset
        return self._pointer(region), offset

    def _pointer(self, region: str) -> str:
        pointer = f"p_{region}"
        if pointer not in self.pointers:
            self.pointers.add(pointer)
            self.lines.append(f"{pointer} = {region}.data_ptr()")
        return pointer

    def _flush(self) -> None:
        """Make the batch that is open, and end what it was the last to need."""
        if self.open is not None:
            plan, run = self._constant(self.open.plan), self._constant(batch.compiled().run)
            names = "".join(f", {name}" for name in self.open.names)
            self.lines.append(f"{run}({plan}, {batch.context()}, stream{names})")
            self.open = None
        if self.ended:
            self.lines.append(f"del {', '.join(self.ended)}")
            self.ended = []

    # -------------------------------------------------------------------------------------- lines
    def _launch(self, step: Launch) -> None:
        given = []
        for a in step.args:
            if isinstance(a, Constant):
                given.append(self._constant(a.value))
            else:
                pointer = self._pointer(a.region)
                given.append(f"{pointer} + {a.offset}" if a.offset else pointer)
        kernel = step.kernel
        names = [self._constant(v) for v in (kernel.run, kernel.function, kernel.packed_metadata)]
        self.lines.append(
            f"{names[0]}({step.programs}, 1, 1, stream, {names[1]}, {names[2]}, None, None, None, "
            f"{', '.join(given)})"
        )

    def _call(self, step: Call) -> None:
        args = [self._expression(a) for a in step.args]
        args += [f"{k}={self._expression(v)}" for k, v in step.kwargs.items()]
        function = _BOUND.get(step.function, step.function)
        call = f"{self._constant(function)}({', '.join(args)})"
        if step.makes:
            self.lines.append(f"{', '.join(step.makes)} = {call}")
        else:
            self.lines.append(call)

    def _expression(self, value: Any) -> str:
        if isinstance(value, Piece):
            return self._variable(value)
        if isinstance(value, list):
            return f"[{', '.join(self._expression(v) for v in value)}]"
        return self._constant(value.value)

    def _variable(self, piece: Piece) -> str:
        """The variable that holds a piece: its region's, or a view's, made now."""
        region, form = piece
        base = self.forms[region]
        if base == form:
            return region
        name = self.views.get(piece)
        if name is None:
            name = self.views[piece] = f"{region}_{len(self.views)}_{len(self.lines)}"
            shape, strides, dtype, offset = form
            view = region if dtype == base[2] else f"{region}.view({self._constant(dtype)})"
            if (shape, strides, offset) != (base[0], base[1], 0):
                where = f"{region}.storage_offset() + {offset}"
                view = f"{view}.as_strided({shape}, {strides}, {where})"
            self.lines.append(f"{name} = {view}")
        return name

    def _constant(self, value: Any) -> str:
        if value is None or type(value) in (bool, int, str):  # an enum prints otherwise
            return repr(value)
        if type(value) is float:
            return repr(value) if math.isfinite(value) else f"float({str(value)!r})"
        for name, known in self.constants.items():
            if known is value:
                return name
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        return name


def _scratch(i: int) -> str:
    """The name of the memory that the product of step i needs besides."""
    return f"s{i}"
