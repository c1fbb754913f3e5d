"""Delayed scaling's live state: scales, amaxes and histories, as buffers of a module.

A slot is one quantized tensor of a layer: its scale is used now, its amax is recorded now, and at
the end of a step `update` turns the history of amaxes into the next scale. All of it is tensors,
written in place, so that graphs and CUDA graphs see every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import collectives, library, programs, reference, replays, scalars
from ..quantizers import Float8Quantizer
from .plan import DelayedUpdate, Plan

__all__ = ["SLOTS", "DelayedState", "Slots", "update", "update_all"]

FORWARD = ("input", "weight", "output")
BACKWARD = ("grad_output", "grad_input")
SLOTS = (*FORWARD, *BACKWARD)
# Buffers of the slots of a direction: scales, amaxes.
Names = tuple[tuple[str, ...], tuple[str, ...]]
_FORWARD: Names = (tuple(f"scale_{s}" for s in FORWARD), tuple(f"amax_{s}" for s in FORWARD))
_BACKWARD: Names = (tuple(f"scale_{s}" for s in BACKWARD), tuple(f"amax_{s}" for s in BACKWARD))
_LIVE = {s: (f"scale_{s}", f"amax_{s}") for s in SLOTS}
HISTORY = 1024  # rows, until a recipe asks for another number


class Slots(NamedTuple):
    """The slots of one direction: n scales, amaxes and largest codes, and `history[len, all]`.

    A slot has one scale, or one for each member of a group.
    """

    history: Tensor
    scales: tuple[Tensor, ...]
    amaxes: tuple[Tensor, ...]
    limits: tuple[float, ...]


class _Live(tuple[Any, ...]):
    """(scale, amax), or None, of (input, weight, grad_output)."""

    told: programs.Told | None = None


class _Backward(Slots):
    told: programs.Told | None = None
    home: dict[str, Any] | None = None  # the buffers that these were: of those of now, see `_now`


class _Forward(Slots):
    step: scalars.Step | None = None  # that ends one of forward; None: a function may decide


class _Step(scalars.Step):
    told: programs.Told | None = None


class Held(NamedTuple):
    """What eager calls by a plan are given of a state: made, and told to `programs`, once."""

    plan: Plan
    buffers: tuple[Tensor, ...]
    device: int  # of theirs
    live: tuple[Any, Any, Any]
    backward: Slots
    forward: Slots

    def fits(self, buffers: Iterable[Any]) -> bool:
        """Whether these are the buffers, and where they were: `fully_shard` moves them in place."""
        here = self.buffers[0].get_device() == self.device
        return here and all(map(is_, self.buffers, buffers))


class DelayedState(nn.Module):
    """Scale, amax and history of the five slots of a linear layer, or of `members` of them.

    Its buffers are fp32 whatever a module is cast to, and are no part of a `state_dict` before the
    first delayed forward; one without them loads, and changes nothing here.
    """

    history_forward: Tensor
    history_backward: Tensor
    scale_input: Tensor
    scale_weight: Tensor
    amax_weight: Tensor

    def __init__(self, device: torch.device | str | None = None, members: int = 1) -> None:
        super().__init__()
        for slot in SLOTS:
            one, zero = torch.ones(members, device=device), torch.zeros(members, device=device)
            self.register_buffer(f"scale_{slot}", one.float(), persistent=False)
            self.register_buffer(f"amax_{slot}", zero.float(), persistent=False)
        for name, slots in (("forward", FORWARD), ("backward", BACKWARD)):
            columns = len(slots) * members
            history = torch.zeros(HISTORY, columns, dtype=torch.float32, device=device)
            self.register_buffer(f"history_{name}", history, persistent=False)
        self.used = False
        self._held: Held | None = None

    def reset(self) -> None:
        """As new: scales 1, nothing recorded."""
        for name, buffer in self.named_buffers():
            buffer.fill_(1.0 if name.startswith("scale_") else 0.0)
        self.used = False

    def live(self, slot: str) -> tuple[Tensor, Tensor]:
        """(scale, amax) of a slot."""
        held: Any = self._buffers
        scale, amax = _LIVE[slot]
        return held[scale], held[amax]

    def held(self, plan: Plan) -> Held:
        """What an eager call by `plan` is given, the same objects as long as nothing changed."""
        held = self._held
        if held is None or held.plan is not plan or not held.fits(self._buffers.values()):
            held = self._hold(plan)
            self.__dict__["_held"] = held  # not by nn.Module's, which looks for tensors
        return held

    def _hold(self, plan: Plan) -> Held:
        assert plan.update is not None
        buffers = tuple(self.buffers())
        at = buffers[0].get_device()
        x, w, g = plan.delayed[0], plan.delayed[1], plan.delayed[3]
        of = zip(("input", "weight", "grad_output"), (x, w, g), strict=True)
        live = _told(_Live([self.live(slot) if delayed else None for slot, delayed in of]), at)
        backward = _told(self.backward_slots(plan.backward_limits), at)
        forward = _Forward(*self.forward_slots(plan.forward_limits))
        step = _plain(forward, plan.update)
        forward.step = None if step is None else _told(_Step(*step), at)
        return Held(plan, buffers, at, live, backward, forward)

    def ending(self, limits: tuple[float, ...], rule: DelayedUpdate) -> Slots:
        """The slots of forward, at the end of a step outside of graphs."""
        held = self._held
        if held is None or held.plan.update is not rule or held.plan.forward_limits != limits:
            return self.forward_slots(limits)
        return held.forward if held.fits(self._buffers.values()) else self.forward_slots(limits)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_held": None}

    def fit(self, length: int) -> None:
        """Histories of `length` rows: shorter keeps the first ones, longer ends in zeros."""
        with torch.inference_mode(False):  # the buffers outlive an evaluation
            for name in ("history_forward", "history_backward"):
                history = getattr(self, name)
                if self.used and history.shape[0] > length:
                    # In its memory, to which a graph's backward may be still to come.
                    self._replace(name, history[:length].data)
                elif history.shape[0] != length:
                    kept = history[:length]
                    more = history.new_zeros(length - kept.shape[0], history.shape[1])
                    self._replace(name, torch.cat((kept, more)))

    def _replace(self, name: str, value: Tensor) -> None:
        """Another tensor for a buffer. A backward that is still to come has the old one."""
        setattr(self, name, value)
        replays.outdate()  # its program would write there

    def quantizer(self, slot: str, plan: Any) -> Float8Quantizer:
        """A quantizer that scales by this slot's history."""
        casts = (plan.x_row, plan.w_row, plan.y_row, plan.g_row, plan.dx_row)
        cast = casts[SLOTS.index(slot)]
        scale, amax = self.live(slot)
        made = Float8Quantizer(scale, amax, cast.format.element.dtype, columnwise=False)
        return made

    def adopt(self, weight: Any, member: int | None = None) -> None:
        """Have a weight that is quantized by history go by this state: one that moved along with
        its module, or came out of a checkpoint, has a scale and an amax of its own."""
        quantizer = getattr(weight, "_quantizer", None)
        if not isinstance(quantizer, Float8Quantizer) or quantizer.scale is self.scale_weight:
            return
        scale, amax = self.live("weight")
        if member is not None:
            scale, amax = scale[member : member + 1], amax[member : member + 1]
        if quantizer.amax.device == amax.device:
            with torch.inference_mode():  # where buffers of either kind are written
                amax.copy_(torch.maximum(amax, quantizer.amax.reshape(amax.shape)))
        made = quantizer.copy()
        made.scale, made.amax = scale, amax
        weight._keep(made)

    def forward_slots(self, limits: tuple[float, ...]) -> Slots:
        """The slots of forward; `limits` are their formats' largest codes."""
        return self._slots(self._buffers["history_forward"], _FORWARD, limits)

    def backward_slots(self, limits: tuple[float, ...]) -> Slots:
        slots = self._slots(self._buffers["history_backward"], _BACKWARD, limits)
        if torch.compiler.is_compiling():  # a graph has its tensors
            return slots
        made = _Backward(*slots)
        made.home = self._buffers
        return made

    def _slots(self, history: Any, names: Names, limits: tuple[float, ...]) -> Slots:
        held: Any = self._buffers  # less of the host's time than attributes
        scales = tuple([held[n] for n in names[0]])
        return Slots(history, scales, tuple([held[n] for n in names[1]]), limits)

    def ran(self) -> bool:
        """Whether there was a delayed forward: what backward repeats of a graph leaves a history,
        and cannot set `used`."""
        if self.used or library.traced() or self.scale_input.is_meta:  # the latter hold no values
            return self.used
        return bool(self.history_forward.any())

    # ----------------------------------------------------------------------------- state dict
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self.ran():
            for name, buffer in self.named_buffers():
                destination[prefix + name] = buffer if keep_vars else buffer.detach()

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        given = {k[len(prefix) :]: v for k, v in state_dict.items() if k.startswith(prefix)}
        if not given:
            return
        buffers = dict(self.named_buffers())
        if strict:
            missing_keys.extend(prefix + name for name in buffers if name not in given)
            unexpected_keys.extend(prefix + name for name in given if name not in buffers)
        found = {name: given[name] for name in buffers if name in given}
        wrong = [
            f"{prefix}{name}: the checkpoint has shape {tuple(value.shape)}, the module "
            f"{tuple(buffers[name].shape)}"
            for name, value in found.items()
            if not _fits(value, buffers[name], name)
        ]
        error_msgs.extend(wrong)
        if wrong:
            return
        assign = local_metadata.get("assign_to_params_buffers", False)
        with torch.no_grad():
            for name, value in found.items():
                held = buffers[name]
                # What is converted is a copy: in the buffer that a quantized weight may go by.
                fits = value.shape == held.shape and value.device == held.device
                if assign and not (fits and value.dtype != torch.float32):
                    self._replace(name, value.to(torch.float32))
                elif value.shape != held.shape:
                    with torch.inference_mode(False):
                        self._replace(name, value.to(held, copy=True))
                else:
                    held.copy_(value)
        self.used = True

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = dict(self.named_buffers())
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        replays.outdate()  # as in `_replace`
        for name, buffer in self.named_buffers():
            if buffer.dtype != torch.float32:  # module.bfloat16() means the parameters
                setattr(self, name, before[name].to(buffer.device))
        if before["scale_input"].is_meta and not self.scale_input.is_meta:
            self.reset()  # what had no values has those of the start, whatever the memory holds
        return self

    def materialise(self, device: torch.device) -> None:
        """Be on `device` if this was on the meta device so far."""
        if self.scale_input.is_meta and device.type != "meta":
            self.to_empty(device=device)


def _fits(value: Tensor, buffer: Tensor, name: str) -> bool:
    """Whether a checkpoint's tensor is that of a buffer: histories may have any length."""
    free = 1 if name.startswith("history_") else 0
    return value.dim() == buffer.dim() and value.shape[free:] == buffer.shape[free:]


def update(slots: Slots, rule: DelayedUpdate, group: str | None) -> None:
    """End of a step: record the amaxes, roll the history, compute the next scales; in place.

    A slot whose amax is zero recorded nothing: it keeps its history and its scale.
    """
    if isinstance(slots, _Backward):
        slots = _now(slots)
    shared = _shared(rule, group, _world())
    step = _plain(slots, rule)
    if shared is None and step is not None and scalars.advance([step]):
        return
    programs.forbid("a function of the recipe's may decide, and scales change unseen by autograd")
    with torch.no_grad():
        slots = _within(slots, rule)
        amaxes = torch.cat(slots.amaxes)
        if shared is not None:
            amaxes = collectives.all_reduce(amaxes, shared, "max")
        _continue(slots, amaxes, rule)


def update_all(steps: list[tuple[Slots, DelayedUpdate, str | None]]) -> None:
    """`update` of many, outside of graphs: one collective for each group, on each device of those
    that share it, and one program for all that have a kernel."""
    world = _world()
    if world is not None or any(group is not None for *_, group in steps):
        _reduce_all([(slots, _shared(rule, group, world)) for slots, rule, group in steps])
    plain: list[scalars.Step] = []
    rest: list[tuple[Slots, DelayedUpdate]] = []
    for slots, rule, _ in steps:
        step = _plain(slots, rule)
        if step is None:
            rest.append((slots, rule))
        else:
            plain.append(step)
    if plain and not scalars.advance(plain):
        rest = [(slots, rule) for slots, rule, _ in steps]
    for slots, rule in rest:
        slots = _within(slots, rule)
        with torch.no_grad():
            _continue(slots, torch.cat(slots.amaxes), rule)


def _reduce_all(steps: list[tuple[Slots, str | None]]) -> None:
    """Reduce the amaxes of those that share them with a group."""
    together: dict[Any, list[Tensor]] = {}  # in the order of the steps, which ranks have in common
    for slots, shared in steps:
        if shared is not None:
            together.setdefault((shared, slots.history.device), []).extend(slots.amaxes)
    for (name, _), amaxes in together.items():
        _reduce(amaxes, name)


def _reduce(amaxes: list[Tensor], group: str) -> None:
    """Amaxes of many layers on one device, by one collective."""
    with torch.no_grad():
        reduced = collectives.all_reduce(torch.cat(amaxes), group, "max")
        parts = torch.split(reduced, [a.shape[0] for a in amaxes])
        for amax, part in zip(amaxes, parts, strict=True):
            _write(amax, part)


def _told(made: Any, device: int) -> Any:
    """A tuple that many calls are given, with what it tells; None where no program could be."""
    made.told = programs.tell(made, device)
    return made


def _now(slots: _Backward) -> Slots:
    """The slots of backward in the buffers of now: since forward there may have been a history of
    another length, or a checkpoint. What this backward recorded goes along."""
    home = slots.home
    if home is None:
        return slots
    names = ("history_backward", *_BACKWARD[0], *_BACKWARD[1])
    held = (slots.history, *slots.scales, *slots.amaxes)
    if all(map(is_, held, map(home.__getitem__, names))):
        return slots
    scales, amaxes = (tuple([home[n] for n in of]) for of in _BACKWARD)
    with torch.no_grad():
        for old, amax in zip(slots.amaxes, amaxes, strict=True):
            if old is not amax:
                _write(amax, torch.maximum(amax, old.to(amax.device)))
                _write(old, torch.zeros_like(old))
    return Slots(home["history_backward"], scales, amaxes, slots.limits)


def _within(slots: Slots, rule: DelayedUpdate) -> Slots:
    """The slots with as much history as the rule asks for: a graph cannot shorten it, see `fit`."""
    if slots.history.shape[0] <= rule.history_len:
        return slots
    return slots._replace(history=slots.history[: rule.history_len])


def _shared(rule: DelayedUpdate, group: str | None, world: str | None) -> str | None:
    """The group over which amaxes are reduced; None: over nobody."""
    if not rule.reduce_amax:
        return None
    return world if group is None else group


def _plain(slots: Slots, rule: DelayedUpdate) -> scalars.Step | None:
    """The step as a kernel takes it; None: a function of the recipe's has a part in it."""
    if isinstance(slots, _Forward) and slots.step is not None:
        return slots.step
    slots = _within(slots, rule)
    algorithm = rule.amax_algo
    if rule.scale_algo is not None or not isinstance(algorithm, str):
        return None
    limits = slots.limits
    if rule.margin != 0:
        limits = tuple([limit * 2.0**-rule.margin for limit in limits])
    return scalars.Step(
        slots.history, slots.scales, slots.amaxes, limits, algorithm == "most_recent"
    )


def _continue(slots: Slots, amaxes: Tensor, rule: DelayedUpdate) -> None:
    """The step after these amaxes, by the reference."""
    history, scale = _next(slots, amaxes, rule)
    # What a backward still holds must not look changed: it has its own copies.
    _write(slots.history, history)
    members = slots.scales[0].shape[0]
    for i in range(len(slots.scales)):
        _write(slots.scales[i], scale[i * members : (i + 1) * members])
        _write(slots.amaxes[i], torch.zeros_like(slots.amaxes[i]))


def _next(slots: Slots, amaxes: Tensor, rule: DelayedUpdate) -> tuple[Tensor, Tensor]:
    history = torch.cat((amaxes[None], slots.history[1:]))
    algorithm = None
    if rule.scale_algo is not None:

        def algorithm(amax: Tensor, scale: Tensor, limit: Tensor) -> Tensor:
            made: Tensor = rule.scale_algo(amax, scale, limit, rule.recipe)  # type: ignore[misc]
            return made

    members = slots.scales[0].shape[0]
    limits = torch.cat([amaxes.new_full((members,), limit) for limit in slots.limits])
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
