"""Delayed scaling's live state: scales, amaxes and histories, as buffers of a module.

A slot is one quantized tensor of a layer: its scale is used now, its amax is recorded now, and at
the end of a step `update` turns the history of amaxes into the next scale. All of it is tensors,
written in place, so that graphs and CUDA graphs see every step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import collectives, library, reference
from ..quantizers import Float8Quantizer
from .plan import DelayedUpdate

__all__ = ["SLOTS", "DelayedState", "Slots", "update"]

FORWARD = ("input", "weight", "output")
BACKWARD = ("grad_output", "grad_input")
SLOTS = (*FORWARD, *BACKWARD)
HISTORY = 1024  # rows, until a recipe asks for another number


class Slots(NamedTuple):
    """The slots of one direction: `history[len, n]` and n scales, amaxes and largest codes."""

    history: Tensor
    scales: tuple[Tensor, ...]
    amaxes: tuple[Tensor, ...]
    limits: tuple[float, ...]


class DelayedState(nn.Module):
    """Scale, amax and history of the five slots of a linear layer.

    Its buffers are fp32 whatever a module is cast to, and are no part of a `state_dict` before the
    first delayed forward.
    """

    history_forward: Tensor
    history_backward: Tensor
    scale_input: Tensor
    scale_weight: Tensor
    amax_weight: Tensor

    def __init__(self, device: torch.device | str | None = None) -> None:
        super().__init__()
        for slot in SLOTS:
            one, zero = torch.ones(1, device=device), torch.zeros(1, device=device)
            self.register_buffer(f"scale_{slot}", one.float(), persistent=False)
            self.register_buffer(f"amax_{slot}", zero.float(), persistent=False)
        for name, slots in (("forward", FORWARD), ("backward", BACKWARD)):
            history = torch.zeros(HISTORY, len(slots), dtype=torch.float32, device=device)
            self.register_buffer(f"history_{name}", history, persistent=False)
        self.used = False

    def reset(self) -> None:
        """As new: scales 1, nothing recorded."""
        for name, buffer in self.named_buffers():
            buffer.fill_(1.0 if name.startswith("scale_") else 0.0)
        self.used = False

    def live(self, slot: str) -> tuple[Tensor, Tensor]:
        """(scale, amax) of a slot."""
        return getattr(self, f"scale_{slot}"), getattr(self, f"amax_{slot}")

    def fit(self, length: int) -> None:
        """Histories of `length` rows: shorter keeps the first ones, longer ends in zeros."""
        for name in ("history_forward", "history_backward"):
            history = getattr(self, name)
            if history.shape[0] != length:
                kept = history[:length]
                more = history.new_zeros(length - kept.shape[0], history.shape[1])
                setattr(self, name, torch.cat((kept, more)))

    def quantizer(self, slot: str, plan: Any) -> Float8Quantizer:
        """A quantizer that scales by this slot's history."""
        cast = plan.y_row if slot in FORWARD else plan.dx_row
        scale, amax = self.live(slot)
        made = Float8Quantizer(scale, amax, cast.format.element.dtype, columnwise=False)
        return made

    def forward_slots(self, limits: tuple[float, ...]) -> Slots:
        """The slots of forward; `limits` are their formats' largest codes."""
        return self._slots(self.history_forward, FORWARD, limits)

    def backward_slots(self, limits: tuple[float, ...]) -> Slots:
        return self._slots(self.history_backward, BACKWARD, limits)

    def _slots(self, history: Tensor, names: tuple[str, ...], limits: tuple[float, ...]) -> Slots:
        return Slots(
            history,
            tuple([getattr(self, f"scale_{n}") for n in names]),
            tuple([getattr(self, f"amax_{n}") for n in names]),
            limits,
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = dict(self.named_buffers())
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in self.named_buffers():
            if buffer.dtype != torch.float32:  # module.bfloat16() means the parameters
                setattr(self, name, before[name].to(buffer.device))
        return self


def update(slots: Slots, rule: DelayedUpdate, group: str | None) -> None:
    """End of a step: record the amaxes, roll the history, compute the next scales; in place.

    A slot whose amax is zero recorded nothing: it keeps its history and its scale.
    """
    with torch.no_grad():
        amaxes = torch.cat(slots.amaxes)
        if rule.reduce_amax:
            name = _world() if group is None else group
            if name is not None:
                amaxes = collectives.all_reduce(amaxes, name, "max")
        history, scale = _next(slots, amaxes, rule)
        # What a backward still holds must not look changed: it has its own copies.
        _write(slots.history, history)
        for i in range(len(slots.scales)):
            _write(slots.scales[i], scale[i : i + 1])
            _write(slots.amaxes[i], torch.zeros_like(slots.amaxes[i]))


def _next(slots: Slots, amaxes: Tensor, rule: DelayedUpdate) -> tuple[Tensor, Tensor]:
    history = torch.cat((amaxes[None], slots.history[1:]))
    algorithm = None
    if rule.scale_algo is not None:

        def algorithm(amax: Tensor, scale: Tensor, limit: Tensor) -> Tensor:
            made: Tensor = rule.scale_algo(amax, scale, limit, rule.recipe)  # type: ignore[misc]
            return made

    limits = torch.cat([amaxes.new_full((1,), limit) for limit in slots.limits])
    return reference.delayed_update(
        history,
        torch.cat(slots.scales),
        limits,
        margin=int(rule.margin),
        amax_algorithm=rule.amax_algo,
        scale_algorithm=algorithm,
    )


def _write(live: Tensor, value: Tensor) -> None:
    if library.traced():
        live.copy_(value)
    else:
        live.data.copy_(value)  # unseen by version counters


def _world() -> str | None:
    """The name of the world's group, if there is more than one process."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    if distributed.get_world_size() == 1:
        return None
    return str(distributed.group.WORLD.group_name)  # type: ignore[union-attr]
