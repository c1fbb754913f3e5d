"""Code that allocates, launches and multiplies, watched once and written down as a function.

What is written down is straight Python, `Program.source`: allocate these buffers, launch these
compiled kernels on these addresses, call these operators, return these tensors. Between the first
and the last of it there is none of what decided on it. A tensor is known by its address, so that
views cost nothing: a buffer is allocated in the form in which it is used, and dies with its last
use. Code that does anything else is not replayable, and `Recorder.program` is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .pairs import paired
from .steps import (
    ALIGNED,
    Address,
    Allocate,
    Call,
    Constant,
    Form,
    Launch,
    Piece,
    Record,
    Region,
    Shared,
    bytes_of,
    dense,
)
from .writer import Program, Writer

__all__ = ["Recorder"]

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
        self.unaligned: set[str] = set()
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

    def launch(
        self, kernel: Any, programs: int, args: list[Any], of: Any = None, aside: bool = False
    ) -> None:
        """Note a launch that was made; `of` is for `pairs`, `aside` for CUDA graphs."""
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
        self.steps.append(Launch(kernel, programs, given, of, aside))

    def _allocated(self, t: Tensor) -> None:
        name = self._made(t)
        if self.replayable:
            self.steps.append(Allocate(name, _form(t)))

    def _made(self, t: Any) -> str:
        """The name of memory that is new: whatever lay there before is gone."""
        name = f"t{len(self.forms)}"
        if not isinstance(t, Tensor) or not t.numel() or not dense(_form(t)):
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
        if region.start % ALIGNED:
            self.unaligned.add(region.name)

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
        unaligned = frozenset(self.unaligned)
        record = Record(self.steps, self.forms, self.inputs, self.shared, unaligned)
        record = paired(record, device)
        return Writer(record, results, len(results[:fresh]), device, consume).program()


def _form(t: Tensor) -> Form:
    return tuple(t.shape), t.stride(), t.dtype, 0


def _region(name: str, t: Tensor) -> Region:
    start, form = t.data_ptr(), _form(t)
    return Region(name, start, start + bytes_of(form), form)
