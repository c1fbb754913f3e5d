"""`Module`: what every quantized module shares.

A forward begins with `_begin`, which reads the ambient state once and returns all that the
operations need of it; nothing below a module reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from . import extra_state, library, scalars
from .formats import HIGH
from .operands import Live
from .recipe.autocast import STATE, counts, note, repeated, settle
from .recipe.base import Recipe, check_recipe
from .recipe.delayed import BACKWARD, FORWARD, DelayedState, Slots, update
from .recipe.plan import Plan
from .recipe.replay import Entry, counted, replayed, tapes, unseen
from .recipe.roles import QuantizerRole
from .tensors import QuantizedTensorStorage

__all__ = ["HIGH_PLAN", "Begun", "Module"]

HIGH_PLAN = Plan(
    *(HIGH,) * 6, (False,) * 3, (False,) * 3, "", (False,) * 5, None, None, None, HIGH, HIGH,
    True, "high precision",
)  # fmt: skip

Lives = tuple[Live | None, Live | None, Live | None]
NOT_LIVE: Lives = (None, None, None)
RoleKeys = tuple[tuple[str, str, str] | None, ...] | None


class Begun(NamedTuple):
    """What one forward captured: its plan, delayed scaling's tensors, and its record.

    `chains` is for what eager calls that capture the same make of it, once; None where each is its
    own.
    """

    plan: Plan
    live: Lives
    slots: Slots | None
    group: str | None
    calibration: Plan | None
    entry: Entry | None
    replays: bool
    chains: dict[Any, Any] | None = None


class Module(nn.Module):
    """Base of our modules, and of a user's own that take part in recipes.

    `get_quantizer_roles` says what each quantized tensor is, and `quantizers` are those that the
    recipe in force has for these roles; `delayed` is delayed scaling's state. `name` is that of
    roles and messages, `device` where the state lives.
    """

    module_type = "linear"
    delayed: DelayedState
    recipe: Recipe | None = None  # in force where no autocast is

    def __init__(self, name: str | None = None, device: torch.device | str | None = None) -> None:
        super().__init__()
        self._setup(name, device)

    def _setup(self, name: str | None, device: torch.device | str | None) -> None:
        """Call once, after `nn.Module.__init__`."""
        self.name = name
        self._output_role: QuantizerRole | None = None
        self._grad_input_role: QuantizerRole | None = None
        self._role_keys: tuple[RoleKeys, RoleKeys] | None = None
        self._has_own_roles = type(self).get_quantizer_roles is not Module.get_quantizer_roles
        self._anonymous = _anonymous(self.module_type)
        self._last_begun: Begun | None = None
        self.delayed = DelayedState(device)

    # --------------------------------------------------------------------------------- roles
    def get_quantizer_roles(
        self, *, fwd: bool, num_quantizers: int
    ) -> list[QuantizerRole | None] | None:
        """Roles of (input, weight, output), or of (grad_output, grad_input); None: by position."""
        name = self.name or ""
        kinds = ("input", "weight") if fwd else ("grad_output",)
        roles: list[QuantizerRole | None] = [
            QuantizerRole(self.module_type, kind, name) for kind in kinds
        ]
        return [*roles, self._output_role if fwd else self._grad_input_role]

    @property
    def output_quantizer_role(self) -> QuantizerRole | None:
        """Who consumes the output; None: nobody in particular."""
        return self._output_role

    @output_quantizer_role.setter
    def output_quantizer_role(self, role: QuantizerRole | None) -> None:
        self._output_role = role
        self._role_keys = None
        self._has_own_roles = True

    @property
    def grad_input_quantizer_role(self) -> QuantizerRole | None:
        """Who consumes the gradient of the input."""
        return self._grad_input_role

    @grad_input_quantizer_role.setter
    def grad_input_quantizer_role(self, role: QuantizerRole | None) -> None:
        self._grad_input_role = role
        self._role_keys = None
        self._has_own_roles = True

    def _roles(self, recipe: Recipe) -> tuple[RoleKeys, RoleKeys]:
        # Built-in recipes do not ask for names, on which compiled layers would be told apart.
        if not recipe.custom() and not self._has_own_roles:
            return self._anonymous
        # A graph that read the cache would be traced again once it is filled.
        traced = torch.compiler.is_compiling()
        if not traced and self._role_keys is not None:
            return self._role_keys
        keys = (
            _keys(self.get_quantizer_roles(fwd=True, num_quantizers=3)),
            _keys(self.get_quantizer_roles(fwd=False, num_quantizers=2)),
        )
        if not traced:
            self._role_keys = keys
        return keys

    @property
    def quantizers(self) -> dict[str, list[Any]]:
        """Of the slots of `get_quantizer_roles`: {"scaling_fwd": [...], "scaling_bwd": [...]}.

        What a forward of one's own asks, in compiled code too; empty lists where no recipe is in
        force. A slot that scales by history has a quantizer on this module's state; eager only.
        The outermost autocast updates forward's on leaving, the next forward that asks backward's.
        """
        recipe = self._in_force()
        if not torch.compiler.is_compiling():
            recipe = replayed(recipe)
        if recipe is None:
            return {"scaling_fwd": [], "scaling_bwd": []}
        forward, backward = recipe.quantizers(*self._roles(recipe))
        if None in forward or None in backward:
            return self._live_quantizers(recipe, forward, backward)
        return {"scaling_fwd": list(forward), "scaling_bwd": list(backward)}

    def _in_force(self) -> Recipe | None:
        """An autocast's recipe, if there is an autocast: it comes before what a layer says."""
        return STATE.recipe if STATE.depth else self.recipe

    def _plan_of(self, recipe: Recipe | None) -> Plan:
        return HIGH_PLAN if recipe is None else recipe.plan(*self._roles(recipe))

    def _live_quantizers(self, recipe: Recipe, *made: tuple[Any, ...]) -> dict[str, list[Any]]:
        if torch.compiler.is_compiling():
            raise NotImplementedError(
                f"{self._where()}: quantizers with delayed scaling inside torch.compile: a graph "
                "cannot hold a scale that is live; use current scaling"
            )
        if (len(made[0]), len(made[1])) != (len(FORWARD), len(BACKWARD)):
            raise NotImplementedError(
                f"{self._where()}: quantizers with delayed scaling: its state has the slots of a "
                f"linear layer, {FORWARD} and {BACKWARD}; return as many roles, or use a recipe "
                "without it"
            )
        begun = self._begin()  # and the note for autocast
        self._end(begun)
        if not begun.replays and counts():
            # No backward of ours ends with this step: what the last one recorded counts from here.
            rule = begun.plan.update
            assert rule is not None
            with unseen(begun.entry is not None):
                update(self.delayed.backward_slots(begun.plan.backward_limits), rule, begun.group)
        found = []
        for slots, of in zip((FORWARD, BACKWARD), made, strict=True):
            pairs = zip(slots, of, strict=True)
            found.append(
                [
                    self._live(s, begun)._with_usages(True, True) if q is None else q
                    for s, q in pairs
                ]
            )
        return {"scaling_fwd": found[0], "scaling_bwd": found[1]}

    def _live(self, slot: str, begun: Begun) -> Any:
        """A quantizer by a slot's live scale; of what a recompute casts again by forward's, which
        has recorded the amax."""
        made = self.delayed.quantizer(slot, begun.plan)
        entry = begun.entry
        if entry is None or slot in BACKWARD:
            return made
        at = FORWARD.index(slot)
        with unseen(True):
            if begun.replays:
                made.scale, made.amax = entry.scales[at], made.amax.clone()
            elif entry.scales[at] is None:
                entry.scales[at] = made.scale.clone()
        return made

    # ------------------------------------------------------------------------- start of forward
    def _begin(self, refuse: Callable[[Plan], None] | None = None) -> Begun:
        """Read the ambient state, once; in a recompute, what the first run read.

        `refuse` raises where a call does not go with the plan, before anything has changed.
        """
        compiling = torch.compiler.is_compiling()
        new, old = ([], None) if compiling else tapes()
        entry: Entry | None = None
        replays = old is not None
        if old is not None:
            entry = old.replay()
            plan, calibration, group = entry.plan, entry.calibration, entry.group
        else:
            recipe, other, group = STATE.recipe, STATE.calibration, STATE.group
            if STATE.depth == 0:  # an autocast, if there is one, comes before what a layer says
                own: Any = self.recipe
                if own is not None and not isinstance(own, Recipe):
                    check_recipe(own, f"{self._where()}: recipe")
                recipe = own
            roles = (None, None) if recipe is None else self._roles(recipe)
            plan = HIGH_PLAN if recipe is None else recipe.plan(*roles)
            calibration = None if other is None else other.plan(*self._roles(other))
            if refuse is not None:
                refuse(plan)
            if new:
                entry = Entry(plan, calibration, group)
        if entry is not None:
            for found in new:
                found.record(entry)
        alone = entry is None and not (compiling or library.watched())
        if plan.update is None:
            if alone:
                return self._known(plan, NOT_LIVE, None, group, calibration)
            return Begun(plan, NOT_LIVE, None, group, calibration, entry, replays)
        state: Any = self._modules["delayed"]
        if not replays:
            self._fit(state, plan.update.history_len)
            if not repeated():  # whose graph changes no objects: see DelayedState.ran
                state.__dict__["used"] = True
                if STATE.depth:  # else `_end` ends the step of this layer alone
                    note(state, plan, recipe, roles)
        if alone:
            held = state.held(plan)
            slots = held.backward if torch.is_grad_enabled() else None
            return self._known(plan, held.live, slots, group, calibration)
        live = self._lives(plan, entry, replays)
        slots = state.backward_slots(plan.backward_limits) if torch.is_grad_enabled() else None
        return Begun(plan, live, slots, group, calibration, entry, replays)

    def _lives(self, plan: Plan, entry: Entry | None, replays: bool) -> Lives:
        """Delayed scaling's tensors of a call that is recorded, repeated, or seen by a graph."""
        state = self.delayed
        x: Live | None = state.live("input") if plan.delayed[0] else None
        w: Live | None = state.live("weight") if plan.delayed[1] else None
        g = state.live("grad_output") if plan.delayed[3] else None
        if replays:
            assert entry is not None
            # Forward's scales; its amaxes are recorded already.
            x = None if entry.scales[0] is None else (entry.scales[0], None)
            w = None if entry.scales[1] is None else (entry.scales[1], None)
        elif entry is not None:
            with unseen(True):
                entry.scales = [None if s is None else s[0].clone() for s in (x, w, None)]
        elif library.traced():
            if torch.is_grad_enabled() and torch.compiler.is_compiling() and _partitions_again():
                raise NotImplementedError(f"{self._where()}: {_AGAIN}")
            # The scales move on before backward, where a graph would read them again.
            w = None if w is None else (scalars.snapshot(w[0]), w[1])
            if STATE.checkpointed:
                x = None if x is None else (scalars.snapshot(x[0]), x[1])
        return x, w, g

    def _known(
        self, plan: Plan, live: Lives, slots: Slots | None, group: str | None, calibration: Any
    ) -> Begun:
        """What an eager call captured: the last one's, if that captured the same."""
        begun = self._last_begun
        if (
            begun is None
            or begun.plan is not plan
            or begun.live is not live
            or begun.slots is not slots
            or begun.group != group
            or begun.calibration is not calibration
        ):
            begun = Begun(plan, live, slots, group, calibration, None, False, {})
            self.__dict__["_last_begun"] = begun  # not by nn.Module's, which looks for tensors
        return begun

    def _fit(self, state: DelayedState, length: int) -> None:
        """Histories of the recipe's length; a graph uses the first rows of longer ones."""
        held: Any = state._buffers["history_forward"]
        if held.shape[0] == length:
            return
        if not torch.compiler.is_compiling():
            with unseen(counted()):
                state.fit(length)
        elif held.shape[0] < length:
            raise RuntimeError(
                f"{self._where()}: amax_history_len={length}, and the module holds "
                f"{held.shape[0]} rows, which a graph cannot make more; call "
                f"module.delayed.fit({length}) before compiling"
            )

    def _end(self, begun: Begun) -> None:
        """Close a forward that no autocast closes, or inside a compiled checkpoint, where no note
        may leave the graph. Of this layer alone: others may run in other threads."""
        if begun.plan.update is None or not (repeated() or STATE.depth == 0):
            return
        if torch.compiler.is_compiling() or not begun.replays:
            settle((self.delayed, begun.plan.forward_limits, begun.plan.update, begun.group, None))

    # ------------------------------------------------------------------------------ state dict
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Inside an autocast that scales by history, with that state, of a module that has not run
        too: `torch.distributed.checkpoint` reads into what a state dict names, and no more."""
        recipe = STATE.recipe if STATE.depth else None
        state: Any = self._modules.get("delayed")  # a module of several products has it in them
        if recipe is not None and state is not None and not state.used:
            roles = self._roles(recipe)
            made = recipe.quantizers(*roles)
            linear = (len(made[0]), len(made[1])) == (len(FORWARD), len(BACKWARD))
            if linear and None in (*made[0], *made[1]):
                rule = recipe.plan(*roles).update
                assert rule is not None
                state.fit(rule.history_len)
                state.used = True
        super()._save_to_state_dict(destination, prefix, keep_vars)

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
        key = prefix + extra_state.SUFFIX
        if key in state_dict:
            refused = extra_state.refusal(state_dict[key])
            if refused:
                error_msgs.append(f"{key}: {refused}")
                return
            state_dict = {k: v for k, v in state_dict.items() if k != key}
        if any(isinstance(p, QuantizedTensorStorage) for p in self.parameters(recurse=False)):
            # Values that are quantized on the way in are so by the checkpoint's scale.
            self._load_scales(state_dict, prefix, local_metadata)
        super()._load_from_state_dict(
            state_dict,
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )
        # Parameters that were assigned left the meta device; checkpoints need not have this state.
        real = [p.device for p in self.parameters(recurse=False) if not p.is_meta]
        for held in self.modules() if real else ():
            if isinstance(held, DelayedState):
                held.materialise(real[0])
        if local_metadata.get("assign_to_params_buffers", False):
            self._load_scales(state_dict, prefix, local_metadata)  # to link what is to stay
            self._link()

    def _load_scales(self, state_dict: Any, prefix: str, local_metadata: Any) -> None:
        """Load delayed scaling's state, which PyTorch does after the parameters."""
        for name, held in self.named_modules():
            if isinstance(held, DelayedState):
                held._load_from_state_dict(
                    state_dict, f"{prefix}{name}.", local_metadata, False, [], [], []
                )

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        held = {name: dict(vars(p)) for name, p in self._parameters.items() if p is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, attributes in held.items():  # those of a quantized parameter are left behind
            now = vars(self._parameters[name])
            now.update({k: v for k, v in attributes.items() if k not in now})
        self._link()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_last_begun": None}

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._link()  # a pickle has one member's scale beside those of all

    def _link(self) -> None:
        """Quantized weights go by delayed scaling's state, wherever either has come from."""
        for weight, state, member in self._scaled_weights():
            if isinstance(weight, QuantizedTensorStorage):
                state.adopt(weight, member)

    def _scaled_weights(self) -> Iterable[tuple[Any, DelayedState, int | None]]:
        """(weight, the state that its scale is in, which member of it that is)."""
        state: Any = self._modules.get("delayed")
        return [(p, state, None) for p in self.parameters(recurse=False)]

    def _where(self) -> str:
        """How messages call this module."""
        return f"{type(self).__name__}({self.name})" if self.name else type(self).__name__


_AGAIN = (
    "delayed scaling inside torch.compile with torch._functorch.config.activation_memory_budget "
    "below 1 or aggressive_recomputation: backward would cast again what forward cast, by scales "
    "that have moved on; leave them at their defaults and use minifloat.checkpoint, or a recipe "
    "without history"
)


def _partitions_again() -> bool:
    """Whether PyTorch may split a graph so that backward repeats any operator of forward."""
    config: Any = torch._functorch.config
    allowed = not config.ban_recompute_not_in_allowlist or config.aggressive_recomputation
    return bool(allowed or config.activation_memory_budget < 1)


# Asked while tracing, the answer is a constant: see `env.capability`.
_partitions_again._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _anonymous(module_type: str) -> tuple[RoleKeys, RoleKeys]:
    """Roles without names, boundary slots without consumers."""
    kinds = ("input", "weight"), ("grad_output",)
    forward, backward = ((*((module_type, kind, "") for kind in of), None) for of in kinds)
    return forward, backward


def _keys(roles: list[QuantizerRole | None] | None) -> RoleKeys:
    """Roles as plain strings, which traced code can hand to a recipe."""
    if roles is None:
        return None
    return tuple([None if r is None else (r.module_type, r.tensor_type, r.name) for r in roles])
