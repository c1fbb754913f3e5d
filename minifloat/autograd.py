"""Everything that trains, as one `torch.autograd.Function`: the only one that computes anything.

`run` gives it a piece of work: pure functions, and what they need besides the tensors autograd
follows. `chain` is the work of modules: a link is `(operation, call)`, the operation's pure
functions and the arguments of this call. No module ever gets here from there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _get_current_graph_task_keep_graph as _keeps_graph
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch._C._dynamo import eval_frame
from torch.autograd import forward_ad

from . import replays
from .tensors.saving import joined, taken_apart

__all__ = ["chain", "later", "run"]

Link = tuple[Any, Any]
_TWICE = b"minifloat: these layers have no second derivative; use torch.nn's where one is needed"
_TRANSFORM = (
    "minifloat: these layers run inside no transform of torch.func (vmap, grad, jvp, ...) nor in "
    "forward-mode differentiation, in high precision neither; differentiate with torch.autograd, "
    "or use torch.nn's layers there"
)


def run(work: Any, data: Any, *tensors: Any, shield: str = "") -> Any:
    """`work.forward(data, tensors)`, differentiable.

    `work.forward(data, tensors) -> (outputs, tensors to save, note)`: one tensor or a tuple, a
    list, and anything. `work.backward(data, note, saved, grads) -> gradients of tensors`, a tuple;
    `saved` is a list to take from, so that a tensor dies with its last use. `work.kind` is for
    `replays`; with `work.hands_on`, outputs may be what an operator returned as it got it, or views
    of each other. `shield` is the type of the device where torch.autocast was on before the caller
    switched it off: a graph would run backward as it ran the code around.
    """
    if torch.compiler.is_compiling():
        if not torch.is_grad_enabled():
            _refuse_transforms()
            return work.forward(data, tensors)[0]
        return _Run.apply(work, data, shield, *tensors)  # type: ignore[no-untyped-call]
    _refuse_transforms()
    if forward_ad._current_level >= 0:
        _refuse_tangents(tensors)
    if not torch.is_grad_enabled():
        return replays.forward(work, data, tensors)[0]
    return _apply(work, data, shield, *tensors)


def _refuse_transforms() -> None:
    """A graph would take our gradients for zeros, and kernels know nothing of batches."""
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(_TRANSFORM)


def _refuse_tangents(tensors: tuple[Any, ...]) -> None:
    """Kernels lose what forward-mode differentiation follows, which needs no gradients on."""
    for t in tensors:
        tangent = forward_ad.unpack_dual(t).tangent if isinstance(t, Tensor) else None  # type: ignore[no-untyped-call]
        if tangent is not None:
            raise RuntimeError(_TRANSFORM)


def chain(links: tuple[Link, ...], x: Tensor, *params: Tensor | None, shield: str = "") -> Any:
    """Run the links on `x`; `params` are those of all links, in order; `shield` is `run`'s.

    The result is a tensor, or (it, what each `Tap` saw) where there are taps, or what a link that
    splits made.
    """
    return run(_Links, links, x, *params, shield=shield)


def later(work: Any, *args: Any) -> Any:
    """`work(*args)`, which a backward has left for later, as that would have run it: nothing that
    it reads is followed, and torch.autocast has no say."""
    with torch.no_grad(), torch._C._DisableAutocast():
        return work(*args)


class _Run(torch.autograd.Function):
    # A saved tensor dies with its last use in backward, which the peak of memory depends on.
    clear_saved_tensors_on_access = True

    @staticmethod
    def forward(ctx: Any, work: Any, data: Any, shield: str, *tensors: Any) -> Any:
        apart = None
        if torch.compiler.is_compiling():
            _refuse_transforms()
            outputs, saved, note = work.forward(data, tensors)
            if getattr(work, "hands_on", False):  # 2.11 loses their gradients
                many = isinstance(outputs, tuple)
                outputs = tuple([t.detach() for t in outputs]) if many else outputs.detach()
        else:
            outputs, saved, note = replays.forward(work, data, tensors)
            if _top_saved_tensors_default_hooks(True) is not None:
                saved, apart = taken_apart(saved)
        ctx.save_for_backward(*saved)
        ctx.work, ctx.data, ctx.note, ctx.shield, ctx.apart = work, data, note, shield, apart
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        if torch.compiler.is_compiling():
            return None, None, None, *_of_graph(ctx, grads)
        if torch.is_grad_enabled() or torch._C._is_any_autocast_enabled():
            return None, None, None, *_shielded(ctx, grads)
        return None, None, None, *_backward(ctx, grads)


def _of_graph(ctx: Any, grads: tuple[Any, ...]) -> tuple[Any, ...]:
    """Backward as a graph runs it: out of reach of torch.autocast, see `_shielded`."""
    work, data, note = ctx.work, ctx.data, ctx.note
    if isinstance(note, replays.Note):
        note = note.note
    if not ctx.shield:
        return work.backward(data, note, joined(ctx.saved_tensors, ctx.apart), grads)  # type: ignore[no-any-return]
    with torch.autocast(ctx.shield, enabled=False):
        return work.backward(data, note, joined(ctx.saved_tensors, ctx.apart), grads)  # type: ignore[no-any-return]


def _shielded(ctx: Any, grads: tuple[Any, ...]) -> tuple[Any, ...]:
    """`_backward` inside torch.autocast, where products of fp32 would be rounded to its dtype, and
    with create_graph: what backward computes is not itself differentiable, casts are not, and
    statistics are constants to it."""
    again = torch.is_grad_enabled()
    with torch.no_grad(), torch._C._DisableAutocast():
        made = _backward(ctx, grads)
    return _once(made) if again else made


def _backward(ctx: Any, grads: tuple[Any, ...]) -> tuple[Any, ...]:
    work, data, note = ctx.work, ctx.data, ctx.note
    if not isinstance(note, replays.Note):  # of a graph
        return work.backward(data, note, _saved(ctx), grads)  # type: ignore[no-any-return]
    return replays.backward(work, data, note, _saved(ctx), grads)


# Function.apply without what it does for function transforms.
_apply: Any = super(torch.autograd.Function, _Run).apply


def _once(grads: tuple[Any, ...]) -> tuple[Any, ...]:
    """Gradients that somebody may differentiate: then it is an error, not silence."""
    given = [g.detach().requires_grad_() if type(g) is Tensor else None for g in grads]
    error: Any = torch._C._functions.DelayedError(_TWICE, len(given))
    made = error(*given)
    pairs = zip(grads, made if isinstance(made, tuple) else (made,), strict=True)
    return tuple([g if m is None else m for g, m in pairs])


def _saved(ctx: Any) -> list[Any]:
    """The saved tensors; a graph that is retained keeps them for its next backward."""
    kept, keeps = ctx.__dict__.pop("kept", None), _keeps_graph()
    if kept is None:
        held = ctx.saved_tensors
        if not keeps:
            return joined(held, ctx.apart)
        versions = _versions(held)
    else:
        held, versions = kept
        _check_versions(held, versions)
    if keeps:
        ctx.kept = (held, versions)
    return joined(held, ctx.apart)


def _versions(held: tuple[Any, ...]) -> list[int]:
    return [-1 if t is None or t.is_inference() else t._version for t in held]


def _check_versions(held: tuple[Any, ...], versions: list[int]) -> None:
    """What PyTorch checks of a saved tensor, of one that a retained graph has kept itself."""
    for t, now, then in zip(held, _versions(held), versions, strict=True):
        if now != then:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: [{t.type()} {list(t.shape)}] is at version {now}; expected "
                f"version {then} instead. Run every backward of a retained graph before it changes"
            )


# Where a graph breaks inside the work, these run as they are: Dynamo would start a graph in each
# frame, and looks at an argument like `ctx` by reading its saved tensors, which clears them.
_OWN = (_of_graph, _shielded, _backward, _saved, joined, _versions, _check_versions)
_SKIPPED = (_Run.forward, _Run.backward, *_OWN)
for _function in (*_SKIPPED, replays.forward, replays.backward):
    eval_frame.set_code_exec_strategy(
        _function.__code__,
        eval_frame._FrameExecStrategy(
            eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
        ),
    )


class _Links:
    """Operations in a row. Matrices go through it: leading dims are folded away, and put back."""

    @staticmethod
    def kind(tensors: tuple[Any, ...]) -> Any:
        return ()

    @staticmethod
    def forward(links: tuple[Link, ...], tensors: tuple[Any, ...]) -> tuple[Any, list[Any], Any]:
        x, params = tensors[0], tensors[1:]
        lead = x.shape[:-1]
        y = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        saved: list[Any] = []
        counts = []
        taps = []
        at = 0
        for op, call in links:
            taken = op.takes(call)
            y, kept = op.compute(y, params[at : at + taken], call)
            at += taken
            saved.extend(kept)
            counts.append(len(kept))
            lead = op.leading(lead, call)
            if op.taps:
                taps.append(_unfolded(y, lead))
        if links[-1][0].splits:
            return tuple([_unfolded(part, lead) for part in y]), saved, (counts, x.shape)
        y = _unfolded(y, lead)
        return ((y, *taps) if taps else y), saved, (counts, x.shape)

    @staticmethod
    def quantizes(links: tuple[Link, ...]) -> bool:
        plans = [getattr(call, "plan", None) for _, call in links]
        return any(plan is not None and plan.quantizes for plan in plans)

    @staticmethod
    def backward(
        links: tuple[Link, ...], note: Any, saved: list[Any], grads: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        counts, shape = note
        left = list(grads[1:])
        of_params: tuple[Any, ...] = ()
        g: Any = _folded(grads[0])
        if links[-1][0].splits:
            g = [_folded(part) for part in grads]
        for (op, call), count in zip(reversed(links), reversed(counts), strict=True):
            start = len(saved) - count
            kept = saved[start:]
            del saved[start:]
            if op.taps:
                g = _sum(g, _folded(left[-1]))
                left = left[:-1]
            g, found = op.backward(g, kept, call)
            of_params = (*found, *of_params)
        if g is not None and len(shape) != 2:
            g = g.reshape(shape)
        return (g, *of_params)


def _folded(t: Any) -> Any:
    return t if t is None or t.dim() == 2 else t.reshape(-1, t.shape[-1])


def _unfolded(y: Any, lead: tuple[int, ...]) -> Any:
    if len(lead) == 1:
        return y
    y = y.reshape(*lead, y.shape[-1])
    # To autograd it is no view then, which a caller could not change in place.
    return y if torch.compiler.is_compiling() else y.detach()


def _sum(a: Any, b: Any) -> Any:
    if a is None or b is None:
        return b if a is None else a
    return a + b
