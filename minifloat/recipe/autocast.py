"""`autocast`: which recipe is in force, and the end of delayed scaling's step.

The ambient state is one plain object. A module reads it once per forward and captures what it read;
backward and recompute read none of it. Modules that scale by history leave a note of their run in
`STATE.ran`, a linked list `(state, limits, rule, group, earlier)`: a compiled graph adds a link
without looking at what is there, so no guard depends on who ran before. The outermost exit updates
them. (A link holds plain constants: PyTorch 2.11 cannot hand a value that it made to the outside.
Functions are none: a rule with those is named by its recipe and the layer's roles.)
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from .available import get_default_recipe
from .base import Recipe, Roles, check_recipe
from .delayed import DelayedState, update, update_all
from .plan import DelayedUpdate, Plan
from .replay import counted, in_first_run, unseen

__all__ = [
    "STATE",
    "autocast",
    "counts",
    "fp8_autocast",
    "fp8_model_init",
    "note",
    "quantized_model_init",
    "repeated",
    "settle",
]

# The third is a DelayedUpdate, or a tuple that a graph made for one.
Ran = tuple[DelayedState, tuple[float, ...], Any, Any, Any]


class _State:
    """What is in force now. `recipe` is None where nothing is quantized."""

    __slots__ = (
        "calibration",
        "checkpointed",
        "depth",
        "group",
        "init",
        "links",
        "preserve",
        "ran",
        "recipe",
    )

    def __init__(self) -> None:
        self.recipe: Recipe | None = None
        self.calibration: Recipe | None = None  # record amaxes for it, in high precision
        self.group: str | None = None  # over which amaxes are reduced; None: the world
        self.depth = 0
        self.checkpointed = False  # a graph is being traced that backward will repeat
        self.ran: Ran | None = None
        self.links = 0  # that eager code added since `ran` was thinned out
        self.init: Recipe | None = None  # parameters are made quantized for it
        self.preserve = False


STATE = _State()
_LINKS = 4096  # after which `ran` is thinned out: no work to speak of, and less than a megabyte


def repeated() -> bool:
    """Whether what is traced is a part of a graph that backward will repeat. Where a graph breaks
    in such a part, eager code runs it, and PyTorch's checkpoint repeats that."""
    return STATE.checkpointed and torch.compiler.is_compiling()


def note(state: DelayedState, plan: Plan, recipe: Any, roles: tuple[Roles, Roles]) -> None:
    """A module that scales by history ran `plan`, which `recipe` makes of `roles`."""
    rule: Any = plan.update
    found = rule
    if torch.compiler.is_compiling():
        found = (recipe, *roles)
        if rule.scale_algo is None and isinstance(rule.amax_algo, str):
            found = (rule.margin, rule.history_len, rule.amax_algo, None, rule.reduce_amax, None)
    STATE.ran = (state, plan.forward_limits, found, STATE.group, STATE.ran)
    if not torch.compiler.is_compiling():
        STATE.links += 1
        if STATE.links >= _LINKS:
            STATE.links, STATE.ran = 0, _thinned(STATE.ran)


def _thinned(ran: Ran | None) -> Ran | None:
    """The last note of each module, in order: an autocast that stays open, as a server's does,
    would collect one for every forward."""
    last: dict[int, Ran] = {}
    while ran is not None:
        last.setdefault(id(ran[0]), ran)
        ran = ran[4]
    for link in reversed(last.values()):
        ran = (*link[:4], ran)
    return ran


def group_name(group: Any) -> str | None:
    """Graphs hold the names of process groups."""
    if group is None:
        return None
    if not hasattr(group, "group_name"):
        raise TypeError(
            f"amax_reduction_group: got {type(group).__name__}; a process group of "
            "torch.distributed is needed, or None for the world"
        )
    return str(group.group_name)


def _check(where: str, enabled: Any, recipe: Any) -> None:
    if isinstance(enabled, Recipe):
        raise TypeError(
            f"enabled: got a recipe; {where}'s first argument is whether: write recipe="
        )
    if recipe is not None:
        check_recipe(recipe, "recipe")


class autocast:  # noqa: N801  (the contract's name)
    """Quantize the layers that run inside by `recipe`; see `minifloat.recipe`.

    Contexts nest: the inner one replaces the outer one's settings, and leaving restores them, on an
    error too. `enabled=False` runs in high precision; with `calibrating=True` amaxes are recorded
    meanwhile. `recipe=None` is the default recipe. Scales by history are updated on leaving the
    outermost context, their amaxes reduced over `amax_reduction_group`.
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: Any = None,
        _graph: bool = False,
    ) -> None:
        _check("autocast", enabled, recipe)
        self.enabled = enabled
        self.calibrating = calibrating
        self.recipe = recipe
        self.group = group_name(amax_reduction_group)
        self._outer: tuple[Any, ...] | None = None

    def __enter__(self) -> None:
        if self._outer is not None:
            raise RuntimeError(
                "autocast: this object is active already; make another one to nest it"
            )
        self._outer = (STATE.recipe, STATE.calibration, STATE.group)
        recipe = self.recipe if self.recipe is not None else get_default_recipe()
        STATE.recipe = recipe if self.enabled else None
        STATE.calibration = recipe if self.calibrating and not self.enabled else None
        STATE.group = self.group
        STATE.depth += 1

    def __exit__(self, *error: object) -> None:
        assert self._outer is not None
        STATE.recipe, STATE.calibration, STATE.group = self._outer
        self._outer = None
        STATE.depth -= 1
        if STATE.depth == 0:
            ran, STATE.ran = STATE.ran, None
            settle(ran)


def settle(ran: Ran | None) -> None:
    """Update the scales of what ran: the end of the outermost autocast, or of a layer without."""
    if torch.compiler.is_compiling():
        if torch.is_grad_enabled():
            _update_traced(ran)
    elif ran is not None and not _in_backward() and counts():
        with unseen(counted()):  # a recompute ends no step
            _update(ran)


def counts() -> bool:
    """Whether what ran is a step of training. A reentrant checkpoint runs it without gradients."""
    return torch.is_grad_enabled() or in_first_run()


def _in_backward() -> bool:
    """Whether a backward is running: a context that is entered there is entered to recompute."""
    return torch._C._current_graph_task_id() != -1


def _update_traced(ran: Ran | None) -> None:
    done: list[DelayedState] = []
    while ran is not None:
        state, limits, rule, group, ran = ran
        if not any(state is other for other in done):
            done.append(state)
            update(state.forward_slots(limits), _rule(rule), group)


def _update(ran: Ran | None) -> None:
    seen: set[int] = set()
    steps = []
    while ran is not None:
        state, limits, rule, group, ran = ran
        if id(state) not in seen:
            seen.add(id(state))
            rule = _rule(rule)
            steps.append((state.ending(limits, rule), rule, group))
    update_all(steps)


def _rule(found: Any) -> DelayedUpdate:
    """What `note` left of a plan's `update`."""
    if isinstance(found, tuple):
        found = DelayedUpdate(*found) if len(found) == 6 else found[0].plan(*found[1:]).update
    assert isinstance(found, DelayedUpdate)
    return found


# ----------------------------------------------------------------------------- parameters at birth
class quantized_model_init:  # noqa: N801  (the contract's name)
    """Modules made inside keep their weights quantized by `recipe`.

    With `preserve_high_precision_init_val` each keeps the value it was quantized from, on the CPU:
    `get_high_precision_init_val()`, `clear_high_precision_init_val()`.
    """

    def __init__(
        self,
        enabled: bool = True,
        recipe: Recipe | None = None,
        preserve_high_precision_init_val: bool = False,
    ) -> None:
        _check("quantized_model_init", enabled, recipe)
        self.enabled = enabled
        self.recipe = recipe
        self.preserve = preserve_high_precision_init_val
        self._outer: list[tuple[Any, ...]] = []

    def __enter__(self) -> None:
        self._outer.append((STATE.init, STATE.preserve))
        recipe = self.recipe if self.recipe is not None else get_default_recipe()
        STATE.init = recipe if self.enabled else None
        STATE.preserve = self.preserve

    def __exit__(self, *error: object) -> None:
        STATE.init, STATE.preserve = self._outer.pop()


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> autocast:
    """Deprecated: `autocast`."""
    if not torch.compiler.is_compiling():  # a graph has nobody to tell
        warnings.warn("fp8_autocast is now called autocast", DeprecationWarning, stacklevel=2)
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)


def fp8_model_init(
    enabled: bool = True,
    recipe: Recipe | None = None,
    preserve_high_precision_init_val: bool = False,
) -> quantized_model_init:
    """Deprecated: `quantized_model_init`."""
    warnings.warn(
        "fp8_model_init is now called quantized_model_init", DeprecationWarning, stacklevel=2
    )
    return quantized_model_init(enabled, recipe, preserve_high_precision_init_val)
