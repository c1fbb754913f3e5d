"""Run a call twice, by kernels and by the reference, and count the bytes that differ.

Outputs are allocated inside guard bands, and everything is poisoned first: a byte that a kernel did
not write, or wrote where it must not, differs. Counts stay on the device until a unit of work ends,
so that a sweep waits for the device a few times and not a hundred thousand times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from minifloat import env

__all__ = ["Case", "Tally", "different", "guarded", "reference_only"]

GUARD = 256  # bytes on either side; keeps the alignment that PyTorch's allocator gives
POISON = 0xA5
DETAILS = 3  # mismatching cases of a unit that are looked at closely

Call = Callable[[], Sequence[Tensor]]


@contextmanager
def reference_only() -> Iterator[None]:
    """The reference serves every call, whatever the device."""
    with mock.patch.object(env, "reference_only", lambda: True):
        yield


class Case(NamedTuple):
    """One comparison: what it is, the names of what `call` returns, and the call."""

    label: str
    names: Sequence[str]
    call: Call
    want: Call | None = None  # None: `call` itself, by the reference

    def expected(self) -> Sequence[Tensor]:
        if self.want is not None:
            return self.want()
        with reference_only():
            return self.call()


class Guards:
    """Buffers handed out, and the bands around them."""

    def __init__(self) -> None:
        self.buffers: list[tuple[Tensor, int]] = []

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        buffer = torch.full((size + 2 * GUARD,), POISON, dtype=torch.uint8, device=device)
        self.buffers.append((buffer, size))
        return buffer[GUARD : GUARD + size].view(dtype).view(tuple(shape))

    def broken(self) -> Tensor | None:
        """How many bytes of the bands were written to; None where there are none."""
        bands = []
        for buffer, size in self.buffers:
            bands += [buffer[:GUARD], buffer[GUARD + size :]]
        return (torch.cat(bands) != POISON).sum() if bands else None


@contextmanager
def guarded() -> Iterator[Guards]:
    """`torch.empty` and `Tensor.new_empty` give poisoned memory between guard bands."""
    guards = Guards()
    empty, new_empty = torch.empty, Tensor.new_empty

    def by_empty(*args: Any, **kwargs: Any) -> Tensor:
        like = empty(*args, **{**kwargs, "device": "meta"})
        device = torch.device(kwargs.get("device") or "cpu")
        return guards.allocate(like.shape, like.dtype, device)

    def by_new_empty(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        like = new_empty(self, *args, **{**kwargs, "device": "meta"})
        device = torch.device(kwargs.get("device") or self.device)
        return guards.allocate(like.shape, like.dtype, device)

    with (
        mock.patch.object(torch, "empty", by_empty),
        mock.patch.object(Tensor, "new_empty", by_new_empty),
    ):
        yield guards


def different(got: Tensor, want: Tensor) -> Tensor:
    """Where two tensors of one shape and dtype differ in their bits; any NaN equals any other."""
    if not got.dtype.is_floating_point:
        return got != want
    bits = {2: torch.int16, 4: torch.int32}[got.dtype.itemsize]
    differ = got.contiguous().view(bits) != want.contiguous().view(bits)
    # IEEE 754 leaves the payload of a computed NaN open, and devices differ in it.
    return differ & ~(got.isnan() & want.isnan())


class _Count(NamedTuple):
    label: str  # of the case
    what: str  # a buffer's name, or what else is counted
    count: Tensor
    case: Case | None  # how to look closely


@dataclass
class Tally:
    """What a unit of work found: cases, those that failed, and a line about each of the first."""

    cases: int = 0
    failed: int = 0
    elements: int = 0  # that differ
    messages: list[str] = field(default_factory=list)
    _pending: list[_Count] = field(default_factory=list, repr=False)

    def fail(self, message: str) -> None:
        self.failed += 1
        self.messages.append(message)

    def add(self, case: Case) -> None:
        """Run and compare one case."""
        self.cases += 1
        try:
            self._compare(case)
        except Exception as error:
            if not _is_survivable(error):
                raise
            self.fail(f"{case.label}: {type(error).__name__}: {error}")

    def _compare(self, case: Case) -> None:
        with guarded() as guards:
            got = case.call()
        self.compare(case.label, case.names, got, case.expected(), case)
        self.intact(case.label, guards)

    def intact(self, label: str, guards: Guards) -> None:
        """Count the bytes that a call wrote outside of its outputs."""
        broken = guards.broken()
        if broken is not None:
            self._pending.append(_Count(label, "outside its outputs", broken, None))

    def compare(
        self,
        label: str,
        names: Sequence[str],
        got: Sequence[Tensor],
        want: Sequence[Tensor],
        case: Case | None = None,
    ) -> None:
        """Count, buffer by buffer; the counts are looked at by `finish`."""
        if not len(names) == len(got) == len(want):
            self.fail(f"{label}: {len(got)} outputs, {len(want)} expected: {', '.join(names)}")
            return
        for name, a, b in zip(names, got, want, strict=True):
            b = b.to(a.device)
            if a.shape != b.shape or a.dtype != b.dtype:
                self.fail(f"{label} {name}: {_kind(a)}, expected {_kind(b)}")
            elif a.numel() > 0:
                self._pending.append(_Count(label, name, different(a, b).sum(), case))

    def finish(self) -> Tally:
        """Wait for the device, and turn counts into failures."""
        if self._pending:
            counts = torch.stack([p.count for p in self._pending]).tolist()
            wrong = [(p, count) for p, count in zip(self._pending, counts, strict=True) if count]
            self._pending.clear()
            self.failed += len({p.label for p, _ in wrong})
            self.elements += sum(count for _, count in wrong)
            self.messages += [f"{p.label} {p.what}: {count} differ" for p, count in wrong]
            closely = [p for p, _ in wrong if p.case is not None]
            self.messages += [_first(p.case, p.what) for p in closely[:DETAILS]]
        return self


def _is_survivable(error: Exception) -> bool:
    """Whether the device can go on: after a bad access every later call of the process fails."""
    lost = getattr(torch, "AcceleratorError", ())
    return not isinstance(error, lost) and "CUDA" not in str(error)


def _kind(t: Tensor) -> str:
    return f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}"


def _first(case: Case, name: str) -> str:
    """The first difference of a case that failed, by running it again."""
    got, want = case.call(), case.expected()
    i = list(case.names).index(name)
    label = f"{case.label} {name}"
    where = different(got[i], want[i].to(got[i].device)).nonzero()
    if len(where) == 0:
        return f"{label}: equal when repeated: a race, or memory nobody wrote"
    at = tuple(where[0].tolist())
    return f"{label}: first at {list(at)}: {got[i][at].item()!r}, expected {want[i][at].item()!r}"
