"""The `minifloat` operator library: how a front reaches an operator, and how one is defined.

A front calls its implementation directly in eager mode. Under `torch.compile`, or with a dispatch
mode active (FakeTensor, selective checkpointing, flop counting), it calls the operator, which is
atomic: what autograd saves across it is what it returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack

from . import opaque, programs

__all__ = ["Definition", "define", "op", "traced", "watched"]

# A schema, what implements it, and its fake.
Definition = tuple[str, Callable[..., Any], Callable[..., Any]]

_LIBRARY = torch.library.Library("minifloat", "FRAGMENT")  # type: ignore[no-untyped-call]


def traced() -> bool:
    """Whether a call is to be seen as an operator: 0.15 us."""
    return opaque.AVAILABLE and (torch.compiler.is_compiling() or watched())


def watched() -> bool:
    """Whether, in eager mode, somebody wants to see operators."""
    return _len_torch_dispatch_stack() > 0 and not programs.alone()


def define(definitions: tuple[Definition, ...], *, replayed: bool = False) -> None:
    """Raw definitions: `torch.library.custom_op` costs 8 us a call, these 1.5.

    `replayed`: what a call does depends on its arguments alone, and changes none but those that the
    schema says; so that graphs may run it as a recorded program.
    """
    if not opaque.AVAILABLE:  # a schema can only name a registered class
        return
    for schema, implementation, fake in definitions:
        name = schema.split("(", 1)[0]
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
        run = _without_gradients(_replayed(name, implementation) if replayed else implementation)
        _LIBRARY.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"minifloat::{name}", fake, lib=_LIBRARY)


def _replayed(name: str, implementation: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            return implementation(*args, **kwargs)
        return programs.operator(name, implementation, args)

    return run


def _without_gradients(run: Callable[..., Any]) -> Callable[..., Any]:
    """An operator has none, and what it is made of is not to find some: a graph of `torch.export`
    runs it in whatever mode its caller is in."""

    def closed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        with torch.no_grad():
            return run(*args, **kwargs)

    return closed


def op(name: str) -> Any:
    return getattr(torch.ops.minifloat, name).default
