"""Steps on single numbers that stay on the device: a kernel where one runs, else PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import env, library, programs, reference

__all__ = ["Step", "advance", "rescale", "snapshot", "tallied", "tied"]

MANY = 64  # layers whose steps are one program


class Step(NamedTuple):
    """The end of a step of delayed scaling, for the slots of one direction of a layer.

    `limits` are the largest codes times 2**-margin; `recent` uses the last amax alone.
    """

    history: Tensor
    scales: Sequence[Tensor]
    amaxes: Sequence[Tensor]
    limits: tuple[float, ...]
    recent: bool


def advance(steps: Sequence[Step]) -> bool:
    """Take these steps in place, a launch for each, all of them by one program; False: nothing was
    done, they have no kernel.

    Programs are written for MANY of them at most, on one device each.
    """
    if library.traced():
        if not steps[0].history.is_cuda:  # the steps of the reference are as good, and inlined
            return False
        for step in steps:
            library.op("advance")(*step)
        return True
    index = steps[0].history.get_device()
    first: list[Any] = ["advance", index]
    known: list[Tensor] = []
    told = len(steps) <= MANY and programs.walk(steps, first, known, index)
    if told and programs.again(tuple(first), known) is not None:
        return True
    if not all(env.runs_kernels(step.history) for step in steps):
        return False
    work: list[tuple[Any, list[Tensor], Sequence[Step]]] = []
    for index in {step.history.get_device() for step in steps}:
        own = [step for step in steps if step.history.get_device() == index]
        for at in range(0, len(own), MANY):
            some: Sequence[Step] = own[at : at + MANY]
            key: list[Any] = ["advance", index]
            inputs: list[Tensor] = []
            if not programs.walk(some, key, inputs, index):
                return False
            work.append((tuple(key), inputs, some))
    for of, given, chosen in work:
        if programs.again(of, given) is None:
            programs.replay(of, given, partial(_launch, chosen))
    return True


def _launch(steps: Sequence[Step]) -> list[Tensor]:
    from .kernels import delayed

    for step in steps:
        delayed.step(*step)
    return []


def _advance(
    history: Tensor,
    scales: list[Tensor],
    amaxes: list[Tensor],
    limits: list[float],
    recent: bool,
) -> None:
    if advance([Step(history, scales, amaxes, tuple(limits), recent)]):
        return
    n = scales[0].shape[0]
    now, rule = torch.cat(amaxes), "most_recent" if recent else "max"
    largest = torch.cat([now.new_full((n,), limit) for limit in limits])
    rolled, next_scale = reference.delayed_update(
        torch.cat((now[None], history[1:])), torch.cat(scales), largest, amax_algorithm=rule
    )
    history.copy_(rolled)
    for i, (scale, amax) in enumerate(zip(scales, amaxes, strict=True)):
        scale.copy_(next_scale[i * n : (i + 1) * n])
        amax.zero_()


def _advance_fake(
    history: Tensor,
    scales: list[Tensor],
    amaxes: list[Tensor],
    limits: list[float],
    recent: bool,
) -> None:
    return None


def rescale(y: Tensor, a: Tensor, b: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    """`y * (a * b * factor)` in `dtype`, one rounding; y is overwritten where it can be."""
    out = y if y.dtype == dtype else torch.empty_like(y, dtype=dtype)
    if not env.runs_kernels(y) or y.numel() == 0:
        return torch.mul(y, (a * b * factor).reshape(1, 1), out=out)
    inputs = (y, out, a, b)
    of = programs.key(("rescale", factor), inputs)
    if programs.again(of, inputs) is not None:
        return out
    from .kernels import delayed

    def ordinary() -> list[Tensor]:
        delayed.rescale(y, out, a, b, factor)
        return []

    programs.replay(of, inputs, ordinary)
    return out


def snapshot(x: Tensor) -> Tensor:
    """A copy that a graph keeps for backward, which would repeat a plain `clone` of a moved `x`.

    Forward must use it as well: what backward alone uses is computed there.
    """
    return library.op("snapshot")(x) if library.traced() else x.clone()


def _snapshot(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _snapshot_fake(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def tied(x: Tensor, to: Tensor) -> Tensor:
    """`x`; a graph makes `to` where it makes this, and copies `x`."""
    return library.op("tied")(x, to) if library.traced() else x


def _tied(x: Tensor, to: Tensor) -> Tensor:
    return x.clone()


def _tied_fake(x: Tensor, to: Tensor) -> Tensor:
    return torch.empty_like(x)


def tallied(x: Tensor, counts: Tensor, index: int) -> Tensor:
    """`x`, once `counts[index]` has gone up by one; in a graph too, each time that it runs."""
    if library.traced():
        made: Tensor = library.op("tallied")(x, counts, index)
        return made
    programs.forbid("counts change behind autograd's back")
    counts.data[index] += 1
    return x


def _tallied(x: Tensor, counts: Tensor, index: int) -> Tensor:
    # No schema tells that counts change: a checkpoint would refuse to repeat it, and a backward to
    # run after another has counted. What is returned is used, so nothing is optimized away.
    counts.data[index] += 1
    return x.clone()


def _tallied_fake(x: Tensor, counts: Tensor, index: int) -> Tensor:
    return torch.empty_like(x)


library.define(
    (
        ("snapshot(Tensor x) -> Tensor", _snapshot, _snapshot_fake),
        (
            "advance(Tensor(a!) history, Tensor(b!)[] scales, Tensor(c!)[] amaxes, float[] limits, "
            "bool recent) -> ()",
            _advance,
            _advance_fake,
        ),
        ("tied(Tensor x, Tensor to) -> Tensor", _tied, _tied_fake),
        ("tallied(Tensor x, Tensor counts, int index) -> Tensor", _tallied, _tallied_fake),
    )
)
