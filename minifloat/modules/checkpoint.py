"""`checkpoint`: activation checkpointing that repeats forward bit for bit."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils import checkpoint as _torch

from ..recipe.autocast import STATE

__all__ = ["checkpoint"]

_OWN = ("context_fn", "debug", "determinism_check", "early_stop", "preserve_rng_state")


def checkpoint(
    function: Any,
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Any = None,
    tp_group: Any = None,
    use_reentrant: bool = False,
    **kwargs: Any,
) -> Any:
    """`torch.utils.checkpoint.checkpoint`, with an eye on the recipe.

    Our modules find in a recompute what they read in forward: the recipe, and delayed scaling's
    scales. Compiled code inside reads the recipe anew, which is put back for it. Under
    `torch.compile` this tells PyTorch to repeat what is inside an autograd.Function (2.11 would
    not) and to keep delayed scaling's scales of now.
    """
    if distribute_saved_activations or get_rng_state_tracker is not None or tp_group is not None:
        raise NotImplementedError(
            "checkpoint: distribute_saved_activations, get_rng_state_tracker and tp_group are not "
            "supported; leave them at their defaults"
        )
    if use_reentrant:  # PyTorch's takes no keywords of the function
        own = {k: kwargs.pop(k) for k in _OWN if k in kwargs}
        function, kwargs = functools.partial(function, **kwargs) if kwargs else function, own
    if not torch.compiler.is_compiling():
        function = _again_as_now(function)
        return _torch.checkpoint(function, *args, use_reentrant=use_reentrant, **kwargs)
    if use_reentrant or "context_fn" in kwargs:
        return _torch.checkpoint(function, *args, use_reentrant=use_reentrant, **kwargs)
    if not torch.is_grad_enabled():  # nothing is repeated
        return function(*args, **{k: v for k, v in kwargs.items() if k not in _OWN})
    outer, STATE.checkpointed = STATE.checkpointed, True
    try:
        return _torch.checkpoint(
            function, *args, use_reentrant=False, context_fn=_recompute_all, **kwargs
        )
    finally:
        STATE.checkpointed = outer


def _again_as_now(function: Any) -> Any:
    """`function`, which backward runs in the autocast of now: a graph inside it has no record."""
    now = (STATE.recipe, STATE.calibration, STATE.group, STATE.depth)

    def run(*args: Any, **kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() == -1:
            return function(*args, **kwargs)
        outer = (STATE.recipe, STATE.calibration, STATE.group, STATE.depth)
        STATE.recipe, STATE.calibration, STATE.group, STATE.depth = now
        try:
            return function(*args, **kwargs)
        finally:
            STATE.recipe, STATE.calibration, STATE.group, STATE.depth = outer

    return run


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    """Repeat everything but the copies of what moves on between forward and backward."""
    if op is torch.ops.minifloat.snapshot.default:
        return _torch.CheckpointPolicy.MUST_SAVE
    return _torch.CheckpointPolicy.PREFER_RECOMPUTE


def _recompute_all() -> Any:
    return _torch.create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
