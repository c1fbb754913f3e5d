"""A chain of operations as one `torch.autograd.Function`: the only one that computes anything.

A link is `(operation, call)`: the operation's pure functions and the arguments of this call.
Tensors that autograd follows are arguments of the Function; everything else is in the calls. No
module ever gets here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _get_current_graph_task_keep_graph as _keeps_graph

__all__ = ["chain"]

Link = tuple[Any, Any]


def chain(links: tuple[Link, ...], x: Tensor, *params: Tensor | None) -> Tensor:
    """Run the links on `x`; `params` are those of all links, in order."""
    if not torch.is_grad_enabled():
        return _run(links, x, params)[0]
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return _Chain.apply(links, x, *params)  # type: ignore[no-any-return,no-untyped-call]
    return _apply(links, x, *params)  # type: ignore[no-any-return]


def _run(
    links: tuple[Link, ...], x: Any, params: tuple[Any, ...]
) -> tuple[Tensor, list[Any], list[int]]:
    """(output, tensors to save, how many of them each link has)."""
    lead = x.shape[:-1]
    y = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    saved: list[Any] = []
    counts = []
    at = 0
    for op, call in links:
        y, kept = op.compute(y, params[at : at + op.params], call)
        at += op.params
        saved.extend(kept)
        counts.append(len(kept))
        lead = op.leading(lead, call) if hasattr(op, "leading") else lead
    if len(lead) != 1:
        y = y.reshape(*lead, y.shape[-1])
    return y, saved, counts


class _Chain(torch.autograd.Function):
    # A saved tensor dies with its last use in backward, which the peak of memory depends on.
    clear_saved_tensors_on_access = True

    @staticmethod
    def forward(ctx: Any, links: tuple[Link, ...], x: Any, *params: Any) -> Tensor:
        y, saved, counts = _run(links, x, params)
        ctx.save_for_backward(*saved)
        ctx.links = links
        ctx.counts = counts
        ctx.shape = x.shape
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        saved = _saved(ctx)
        grads: tuple[Any, ...] = ()
        g: Any = grad if grad.dim() == 2 else grad.reshape(-1, grad.shape[-1])
        for (op, call), count in zip(reversed(ctx.links), reversed(ctx.counts), strict=True):
            start = len(saved) - count
            kept = saved[start:]
            del saved[start:]
            g, of_params = op.backward(g, kept, call)
            grads = (*of_params, *grads)
        if g is not None and len(ctx.shape) != 2:
            g = g.reshape(ctx.shape)
        return None, g, *grads


# Function.apply without what it does for function transforms.
_apply: Any = super(torch.autograd.Function, _Chain).apply


def _saved(ctx: Any) -> list[Any]:
    """The saved tensors; a graph that is retained keeps them for its next backward."""
    if torch.compiler.is_compiling():
        return list(ctx.saved_tensors)
    held = ctx.__dict__.pop("held", None)
    if held is None:
        held = ctx.saved_tensors
    if _keeps_graph():
        ctx.held = held
    return list(held)
