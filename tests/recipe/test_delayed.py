"""What eager calls are given of delayed scaling's state: the same objects, until it changes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import minifloat
from minifloat import programs
from minifloat.recipe import DelayedScaling
from minifloat.recipe.delayed import DelayedState
from minifloat.recipe.plan import Plan

RECIPE = DelayedScaling(amax_history_len=4)


def made() -> tuple[DelayedState, Plan]:
    layer = minifloat.Linear(16, 16, device="cpu")
    layer.delayed.fit(4)
    return layer.delayed, RECIPE.plan(*layer._roles(RECIPE))


def held_by(value: Any) -> list[int]:
    key: list[Any] = []
    found: list[Any] = []
    assert programs.walk(value, key, found, -1)
    return [id(t) for t in found]


def test_calls_are_given_the_same_and_keys_tell_the_tensors_of_now() -> None:
    state, plan = made()
    held = state.held(plan)
    assert state.held(plan) is held
    assert state.ending(plan.forward_limits, plan.update) is held.forward  # type: ignore[arg-type]
    live = tuple(state.live(slot) for slot in ("input", "weight", "grad_output"))
    backward = state.backward_slots(plan.backward_limits)
    assert held.live == live and held.backward == backward
    assert held_by((held.live,)) == held_by(live)
    assert held_by([held.backward, held.forward.step]) == held_by(  # type: ignore[attr-defined]
        [backward, (state.history_forward, held.forward.scales, held.forward.amaxes)]
    )


def moved_in_place(state: DelayedState) -> None:
    """As `fully_shard` moves buffers that were made elsewhere: they are the same objects."""
    assert state._held is not None
    state._held = state._held._replace(device=state._held.device + 1)


CHANGES: dict[str, Callable[[DelayedState], Any]] = {
    "fit": lambda state: state.fit(8),
    "assigned": lambda state: state.load_state_dict(
        {k: v.clone() for k, v in state.named_buffers()}, assign=True
    ),
    "converted": lambda state: state.to_empty(device="cpu"),
    "one": lambda state: setattr(state, "amax_output", torch.zeros(1)),
    "in place": moved_in_place,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_state_that_changed_gives_what_it_has_now(change: str) -> None:
    state, plan = made()
    assert plan.update is not None
    before = state.held(plan)
    CHANGES[change](state)
    assert state.ending(plan.forward_limits, plan.update) is not before.forward
    assert state.held(plan) is not before
    now = state.held(plan)
    assert all(a is b for a, b in zip(now.buffers, state.buffers(), strict=True))
    assert now.live[0][0] is state.scale_input
    assert now.backward.history is state.history_backward
    assert now.forward.amaxes[2] is state.amax_output  # type: ignore[attr-defined]


def test_another_rule_ends_a_step_by_its_own() -> None:
    state, plan = made()
    other = DelayedScaling(amax_history_len=4, margin=2, amax_compute_algo="most_recent")
    rule = other.plan(*minifloat.Linear(16, 16, device="cpu")._roles(other))
    held = state.held(plan)
    assert rule.update is not None
    found = state.ending(rule.forward_limits, rule.update)
    assert found is not held.forward and getattr(found, "step", None) is None
    assert state.held(rule).forward.step.recent  # type: ignore[attr-defined]


def test_what_is_held_is_no_part_of_copies() -> None:
    state, plan = made()
    state.held(plan)
    for other in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert other._held is None and other.held(plan).live[0][0] is other.scale_input


def test_layers_that_are_alike_have_one_key() -> None:
    keys = []
    for state, plan in (made(), made()):
        key: list[Any] = []
        assert programs.walk(tuple(state.held(plan)[3:5]), key, [], -1)
        keys.append(tuple(key))
    assert keys[0] == keys[1] and hash(keys[0]) == hash(keys[1])
