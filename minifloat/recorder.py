"""Code that allocates, launches and multiplies, watched once and written down as a function.

What is written down is straight Python, `Program.source`: allocate these buffers, launch these
compiled kernels on these addresses, call these operators, return these tensors. Between the first
and the last of it there is none of what decided on it. A tensor is known by its address, so that
views cost nothing: a buffer is allocated in the form in which it is used, and dies with its last
use. Code that does anything else is not replayable, and `Recorder.program` is None.
"""

from __future__ import annotations

import linecache
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from . import env

__all__ = ["Program", "Recorder"]

aten = torch.ops.aten
_ALLOCATE = {aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default,
             aten.new_empty.default, aten.new_empty_strided.default}  # fmt: skip
_VIEW = {
    aten.view.default, aten.view.dtype, aten._unsafe_view.default, aten.t.default,
    aten.detach.default, aten.alias.default, aten.transpose.int, aten.permute.default,
    aten.unsqueeze.default, aten.squeeze.dim, aten.slice.Tensor, aten.select.int,
    aten.as_strided.default, aten.expand.default, aten.unbind.int, aten.split.Tensor,
    aten._reshape_alias.default,
}  # fmt: skip
# Operators that depend on their arguments alone. What draws random numbers, moves data between
# devices or talks to other ranks is not here.
_CALL = {
    aten._scaled_mm.default, aten.mm.default, aten.mm.dtype, aten.mm.out, aten.addmm.default,
    aten.addmm.out, aten.sum.dim_IntList, aten.add.Tensor, aten.add_.Tensor, aten.mul.Tensor,
    aten.mul_.Tensor, aten.mul.out, aten.addcmul.out, aten.addcmul_.default, aten.copy_.default,
    aten.clone.default, aten.constant_pad_nd.default, aten.fill_.Scalar, aten.zero_.default,
    aten.full_like.default, aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default,
    aten.bmm.default, aten._grouped_mm.default, aten._scaled_mm_v2.default, aten._to_copy.default,
    aten._foreach_add_.List, aten._foreach_copy_.default, aten.segment_reduce.default,
    aten.stack.default, aten.cat.default, aten.arange.default, aten.arange.start,
    aten.clamp.default, aten.sub.Tensor, aten.searchsorted.Tensor, aten.index.Tensor,
    aten.index_copy_.default,
}  # fmt: skip
_MASKS = (torch.bool, torch.uint8)  # an index of these makes a result of a size that they decide
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

Shared = tuple[int, int, int]  # two arguments, and how many bytes the second starts after the first
Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, int]  # shape, strides, dtype, offset


class Region(NamedTuple):
    """Memory that came into being at once: an argument, an allocation, an operator's result."""

    name: str
    start: int
    end: int
    form: Form  # as it was made; the offset is 0


class Piece(NamedTuple):
    """A tensor as code will name it: where it lies, and in which form."""

    region: str
    form: Form


class Address(NamedTuple):
    region: str
    offset: int  # bytes


class Constant(NamedTuple):
    value: Any


class Allocate(NamedTuple):
    region: str
    form: Form


class Launch(NamedTuple):
    kernel: Any
    programs: int
    args: list[Address | Constant]


class Call(NamedTuple):
    function: Any
    args: Any  # trees of Piece, Constant
    kwargs: dict[str, Any]
    makes: tuple[str, ...]  # regions; () where it returns what it was given


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
        return not self.shared or all(
            inputs[b].data_ptr() - inputs[a].data_ptr() == d for a, b, d in self.shared
        )


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches code while it runs. It holds no tensor, so that memory dies as it would."""

    def __init__(self, inputs: Sequence[Tensor | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.why = ""  # not
        self.steps: list[Allocate | Launch | Call] = []
        self.regions: list[Region] = []  # that are there now
        self.forms: dict[str, Form] = {}  # of all that ever were
        self.inputs = len(inputs)
        self.shared: set[Shared] = set()
        self.device = next((t.device for t in inputs if t is not None), None)
        seen: dict[int, int] = {}
        for i, t in enumerate(inputs):
            if t is None or not t.numel():
                continue
            region = _region(f"i{i}", t)
            first = seen.setdefault(region.start, i)
            if first != i:
                self.shared.add((first, i, 0))
            self._add(region)

    @property
    def replayable(self) -> bool:
        return not self.why

    def refuse(self, why: str) -> None:
        """What runs is not to be replayed."""
        self.why = self.why or why

    # --------------------------------------------------------------------------------- watching
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _VIEW or not self.replayable:
            return func(*args, **kwargs)
        if func in _ALLOCATE:
            made = func(*args, **kwargs)
            self._allocated(made)
            return made
        if func is aten.promote_types.default:  # of dtypes
            return func(*args, **kwargs)
        if func not in _CALL:
            if func._can_decompose():  # whole where autograd does not take it apart: inference
                with self:
                    return func.decompose(*args, **kwargs)
            self.refuse(f"{func} is not known to depend on its arguments alone")
            return func(*args, **kwargs)
        if func is aten.index.Tensor and any(i is not None and i.dtype in _MASKS for i in args[1]):
            self.refuse("the size of a result depends on a mask")
        given = [self._tree(a) for a in args]
        named = {k: self._tree(v) for k, v in kwargs.items()}
        made = func(*args, **kwargs)
        makes: tuple[str, ...] = ()
        returns = func._schema.returns
        if returns and not any(r.alias_info for r in returns):
            makes = tuple([self._made(t) for t in (made if isinstance(made, tuple) else (made,))])
        if self.replayable:
            self.steps.append(Call(func, given, named, makes))
        return made

    def launch(self, kernel: Any, programs: int, args: list[Any]) -> None:
        """Note a launch that was made."""
        if kernel is None:
            self.refuse("Triton's interpreter launches nothing")
            return
        given: list[Address | Constant] = []
        for value in args:
            if isinstance(value, Tensor):
                found = self._find(value)
                if found is None:
                    self.refuse(f"a launch reads a tensor of unknown origin, {_form(value)}")
                    return
                given.append(Address(*found))
            else:
                given.append(Constant(value))
        self.steps.append(Launch(kernel, programs, given))

    def _allocated(self, t: Tensor) -> None:
        name = self._made(t)
        if self.replayable:
            self.steps.append(Allocate(name, _form(t)))

    def _made(self, t: Any) -> str:
        """The name of memory that is new: whatever lay there before is gone."""
        name = f"t{len(self.forms)}"
        if not isinstance(t, Tensor) or not t.numel() or not _dense(_form(t)):
            self.refuse("a result is empty, or has gaps")
            return name
        if t.device != self.device:  # values that the code may read, and decide by
            self.refuse(f"a result is on {t.device}, not on {self.device}")
            return name
        new = _region(name, t)
        self.regions = [r for r in self.regions if r.end <= new.start or new.end <= r.start]
        self._add(new)
        return name

    def _add(self, region: Region) -> None:
        self.regions.append(region)
        self.forms[region.name] = region.form

    def _tree(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            found = self._piece(value)
            if found is None:
                self.refuse(f"an operator reads a tensor of unknown origin, {_form(value)}")
            return found
        if isinstance(value, list | tuple):
            return [self._tree(v) for v in value]
        return Constant(value)

    def _piece(self, t: Tensor) -> Piece | None:
        found = self._find(t)
        if found is None:
            return None
        name, offset = found
        # A dtype of another width would count its offsets and strides otherwise.
        size = t.element_size()
        if size != self.forms[name][2].itemsize or offset % size:
            return None
        return Piece(name, (tuple(t.shape), t.stride(), t.dtype, offset // size))

    def _find(self, t: Tensor) -> tuple[str, int] | None:
        """(region, byte offset) at which `t` starts.

        The region that starts there, if one does: two arguments may be views of one storage, whose
        distance is another one in the next call. It must be the same where one starts between the
        other's elements, which may be meant. Else the only place whose elements are around it.
        """
        if not t.numel():
            return None
        address = t.data_ptr()
        around = [r for r in self.regions if r.start <= address < r.end]
        exact = next((r for r in around if r.start == address), None)
        if exact is None:
            if len({r.start for r in around}) != 1:
                return None
            return around[0].name, address - around[0].start
        for r in around:
            if r.start != address:  # what is made lies in nothing else: both are arguments
                self.shared.add((int(r.name[1:]), int(exact.name[1:]), address - r.start))
        return exact.name, 0

    # ----------------------------------------------------------------------------- writing down
    def program(
        self,
        made: Sequence[Any],
        device: torch.device,
        *,
        fresh: int | None = None,
        consume: bool = False,
    ) -> Program | None:
        """What ran, which made `made`: tensors of its own or of its arguments, and None.

        The first `fresh` of them, all by default, must be its own, and each another one. With
        `consume` the function empties the list of arguments that it gets, so that they die with
        their last use.
        """
        results: list[Piece | None] = []
        for t in made:
            plain = type(t) is Tensor or type(t) is torch.nn.Parameter
            piece = self._piece(t) if plain else None
            if piece is None and t is not None:
                self.refuse("a result is no tensor that was seen to be made")
            results.append(piece)
        own = [r.region for r in results[:fresh] if r is not None]
        if len(set(own)) != len(own) or any(name.startswith("i") for name in own):
            self.refuse("two results are one, or one is an argument")
        if not self.replayable:
            return None
        return _Writer(self, results, len(results[:fresh]), device, consume).program()


def _form(t: Tensor) -> Form:
    return tuple(t.shape), t.stride(), t.dtype, 0


def _region(name: str, t: Tensor) -> Region:
    start = t.data_ptr()
    last = sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
    return Region(name, start, start + (last + 1) * t.element_size(), _form(t))


def _dense(form: Form) -> bool:
    """Whether elements lie side by side, in whatever order."""
    step = 1
    for stride, n in sorted(zip(form[1], form[0], strict=True)):
        if n != 1:
            if stride != step:
                return False
            step *= n
    return True


def _leaves(tree: Any) -> Iterable[Any]:
    if isinstance(tree, list):
        for value in tree:
            yield from _leaves(value)
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _leaves(value)
    else:
        yield tree


class _Writer:
    """Steps into source. Regions and their views are variables; `del` ends them."""

    def __init__(
        self,
        recorder: Recorder,
        results: list[Piece | None],
        fresh: int,
        device: torch.device,
        consume: bool,
    ) -> None:
        self.recorder, self.results, self.fresh = recorder, results, fresh
        self.lines: list[str] = []
        self.constants: dict[str, Any] = {"device": device}
        self.consume = consume
        self.quick = device.type == "cuda" and _allocate is not None
        self.forms = dict(recorder.forms)  # in which a region's variable is
        self.views: dict[Piece, str] = {}
        self.pointers: set[str] = set()
        self.last = self._last_uses()

    def program(self) -> Program:
        names = [f"i{i}" for i in range(self.recorder.inputs)]
        if names:
            self.lines.append(f"{', '.join(names)}, = given")
        if self.consume:
            self.lines.append("given.clear()")
            self._free(-1)
        if any(isinstance(s, Launch) for s in self.recorder.steps):
            self.lines.append(f"stream = stream_of({self.constants['device'].index})")
        wanted = self._wanted()
        for i, step in enumerate(self.recorder.steps):
            if isinstance(step, Allocate):
                form = wanted.get(step.region, step.form)
                self.forms[step.region] = form
                shape, strides, dtype = *form[:2], self._constant(form[2])
                call = f"empty({shape}, {strides}, dtype={dtype}, device=device)"
                if self.quick:
                    call = f"allocate({shape}, {strides}, {dtype})"
                self.lines.append(f"{step.region} = {call}")
            elif isinstance(step, Launch):
                self._launch(step)
            else:
                self._call(step)
            self._free(i)
        values = [self._result(i, r) for i, r in enumerate(self.results)]
        self.lines.append(f"return [{', '.join(values)}]")
        body = "\n".join(f"    {line}" for line in self.lines)
        return Program(f"def program(given):\n{body}\n", self.constants, self.recorder.shared)

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
        made = {s.region: s.form for s in self.recorder.steps if isinstance(s, Allocate)}
        wanted: dict[str, Form] = {}
        for piece in self._pieces():
            form = made.get(piece.region)
            if form is None or piece.region in wanted:
                continue
            whole = piece.form[3] == 0 and _dense(piece.form)
            if whole and _numel(piece.form) == _numel(form):
                wanted[piece.region] = piece.form
        return wanted

    def _pieces(self) -> Iterable[Piece]:
        for step in self.recorder.steps:
            if isinstance(step, Call):
                found = (*_leaves(step.args), *_leaves(step.kwargs))
                yield from (p for p in found if isinstance(p, Piece))
        yield from (r for r in self.results if r is not None)

    def _last_uses(self) -> dict[str, int]:
        """The step after which a region is not needed, -1 for no step; results are for good."""
        last = {f"i{i}": -1 for i in range(self.recorder.inputs)}
        for i, step in enumerate(self.recorder.steps):
            if isinstance(step, Allocate):
                last[step.region] = i
            elif isinstance(step, Launch):
                last.update((a.region, i) for a in step.args if isinstance(a, Address))
            else:
                found = (*_leaves(step.args), *_leaves(step.kwargs))
                last.update((p.region, i) for p in found if isinstance(p, Piece))
                last.update((name, i) for name in step.makes)
        for piece in self.results:
            if piece is not None:
                last[piece.region] = len(self.recorder.steps)
        return last

    def _free(self, i: int) -> None:
        dead = {name for name, at in self.last.items() if at == i}
        gone = [v for p, v in self.views.items() if p.region in dead]
        if dead:
            self.views = {p: v for p, v in self.views.items() if p.region not in dead}
            self.lines.append(f"del {', '.join([*sorted(dead), *gone])}")

    def _launch(self, step: Launch) -> None:
        given = []
        for a in step.args:
            if isinstance(a, Constant):
                given.append(self._constant(a.value))
                continue
            pointer = f"p_{a.region}"
            if pointer not in self.pointers:
                self.pointers.add(pointer)
                self.lines.append(f"{pointer} = {a.region}.data_ptr()")
            given.append(f"{pointer} + {a.offset}" if a.offset else pointer)
        kernel = step.kernel
        run, hooks, args = kernel.run, "None, None, None", ", ".join(given)
        function, metadata = map(self._constant, (kernel.function, kernel.packed_metadata))
        if _is_plain(run):
            # Past the launcher's Python, which looks for scratch memory and finds none to make.
            flags = f"{run.launch_cooperative_grid!r}, {run.launch_pdl!r}, None, None"
            run, function = run.launch, f"{function}, {flags}"
        self.lines.append(
            f"{self._constant(run)}({step.programs}, 1, 1, stream, {function}, {metadata}, "
            f"{hooks}, {args})"
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


def _is_plain(run: Any) -> bool:
    """Whether a launcher is one of Triton 3.6 without scratch memory, whose inner call is known."""
    if not (env.triton_version() or "").startswith("3.6."):
        return False
    scratch = (getattr(run, f"{kind}_scratch_size", None) for kind in ("global", "profile"))
    return hasattr(run, "launch") and tuple(scratch) == (0, 0)


def _numel(form: Form) -> int:
    return int(torch.Size(form[0]).numel())
