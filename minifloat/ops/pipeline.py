"""`Pipeline`: operations in a row as a piece of work for `autograd.run`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..tensors import QuantizedTensorStorage, prepare_for_saving, restore_from_saved
from .basic.quantize import Quantize
from .basic.shape import Identity
from .basic.values import summed
from .context import OperationContext
from .handover import Handed, Rounded
from .results import each, results
from .wiring import Key, Wiring, placed, position

__all__ = ["Call", "Pipeline"]

LEAVES_QUANTIZED = (Identity, Quantize)  # as it is


class Call(NamedTuple):
    """One call, for each basic operation of the fuser: whether it takes part in backward, its
    keyword arguments, and what its neighbours quantize for it (its input, its output's gradient;
    with a None at the end, which stands before the first one too). `first` is the first one that
    takes part in backward."""

    requires_grad: list[bool]
    kwargs: list[dict[str, Any]]
    input_takers: list[Any]
    grad_takers: list[Any]
    first: int


class Pipeline:
    """The basic operations `start` to `stop` of a fuser, as fused for forward and for backward.

    `forward_ops` and `backward_ops` are (operation, indices of its basic operations), each in the
    order in which they run. `imports` names the extra tensors that it takes after its input,
    `exports` those that it returns after its output.
    """

    hands_on = True  # for `autograd.run`: operations are anybody's

    def __init__(
        self,
        ops: list[Any],
        forward_ops: list[tuple[Any, list[int]]],
        backward_ops: list[tuple[Any, list[int]]],
        wiring: Wiring,
        start: int,
        stop: int,
    ) -> None:
        self.ops, self.wiring = ops, wiring
        self.forward_ops, self.backward_ops = forward_ops, backward_ops
        self.start, self.stop = start, stop
        inside = range(start, stop)
        # Lists, searched by ==: Dynamo cannot hash a tuple of ints in every version.
        needed = [key for i in inside for key in wiring.sources[i] if key[0] not in inside]
        self.imports: list[Key] = list(dict.fromkeys(needed))
        self.written: list[Key] = [
            key for i in inside if ops[i]._writes_extra_inputs for key in wiring.sources[i]
        ]
        later = [key for keys in wiring.sources[stop:] for key in keys]
        wanted = [*wiring.public, *later]
        self.exports: list[Key] = [k for k in wiring.used if k[0] in inside and k in wanted]

    def parameters(self) -> list[Any]:
        """The parameters, for autograd to know of."""
        return [p for i in range(self.start, self.stop) for p in self.ops[i].parameters()]

    # ------------------------------------------------------------------------------------ forward
    def forward(self, call: Call, tensors: tuple[Any, ...]) -> tuple[Any, list[Any], Any]:
        """`autograd.run`'s: tensors are the input, the imports, the parameters."""
        x = tensors[0]
        extra = dict(zip(self.imports, tensors[1 : 1 + len(self.imports)], strict=True))
        if self.written and not torch.compiler.is_compiling():
            self._protect(x, extra)
        contexts: dict[int, OperationContext] = {}
        shapes: dict[int, Any] = {}  # of what an operation reads
        for op, indices in self.forward_ops:
            x = _given(op, x)
            shapes[indices[0]] = _shape(x)
            here = [
                OperationContext(requires_grad=call.requires_grad[i], _begun=True) for i in indices
            ]
            x, made = self._run(op, indices, here, x, extra, call)
            self._keep(indices, made, extra)
            contexts.update(zip(indices, here, strict=True))
        saved: list[Any] = []
        objects: dict[int, Any] = {}
        for i, ctx in contexts.items():
            kept = ctx.to_save or ()
            flat, objects[i] = self._placed(self.ops[i], [i], prepare_for_saving, *kept)
            ctx.to_save = None
            ctx._save_range = (len(saved), len(saved) + len(flat))
            saved.extend(flat)
        x = _plain(x)
        made_here = {key: _shape(t) for key, t in extra.items() if key not in self.imports}
        note = (contexts, objects, shapes, made_here)
        if not self.exports:
            return _fresh(x, tensors, []), saved, note
        outputs: list[Any] = []
        for t in (x, *[extra[key] for key in self.exports]):
            outputs.append(_fresh(t, tensors, outputs))
        return tuple(outputs), saved, note

    def _protect(self, x: Any, extra: dict[Key, Any]) -> None:
        """Copy what is written to, where the caller gave its memory twice: operations save x."""
        for key in self.written:
            if key in extra:
                others = [x, *[t for k, t in extra.items() if k != key]]
                if any([_overlap(extra[key], t) for t in others]):  # noqa: C419
                    extra[key] = extra[key].clone()

    def _run(
        self, op: Any, indices: list[int], contexts: list[Any], x: Any, extra: Any, call: Call
    ) -> tuple[Any, Any]:
        first, last = indices[0], indices[-1]
        kwargs: dict[str, Any] = {
            # None: what the fused operation makes and reads itself.
            "basic_op_extra_inputs": [
                tuple([extra.get(key) for key in self.wiring.sources[i]]) for i in indices
            ],
            "prev_op_grad_output_quantizer": call.grad_takers[first - 1],
            "next_op_input_quantizer": call.input_takers[last + 1],
            "basic_op_kwargs": [call.kwargs[i] for i in indices],
        }
        if not op._use_split_forward:
            return self._placed(op, indices, _forward, op, contexts, x, kwargs)  # type: ignore[no-any-return]
        kwargs["requires_grad"] = [call.requires_grad[i] for i in indices]
        y, made, saved = self._placed(op, indices, _compute, op, len(indices), x, kwargs)
        self._placed(op, indices, op.fuser_forward_save_ctx, contexts, x, saved, **kwargs)
        return y, made

    def _keep(self, indices: list[int], made: Any, extra: dict[Key, Any]) -> None:
        """Extra outputs, checked and put where consumers find them."""
        counts = [len(m) for m in made]
        expected = [self.ops[i].num_extra_outputs for i in indices]
        if counts != expected:
            raise RuntimeError(
                f"{position(self.ops, indices[0])}: forward returned {counts} extra outputs for "
                f"its basic operations; they have {expected}"
            )
        for i, tensors in zip(indices, made, strict=True):
            for slot, t in enumerate(tensors):
                extra[i, slot] = t
                if t is None and self._leaves((i, slot), indices):
                    raise RuntimeError(
                        f"{position(self.ops, i)}: extra output {slot} is None, and somebody "
                        "reads it; only what a fused operation uses itself may be None"
                    )

    def _leaves(self, key: Key, indices: list[int]) -> bool:
        """Whether an extra output is read outside the operation that made it."""
        consumers = [j for j, keys in enumerate(self.wiring.sources) if key in keys]
        return key in self.wiring.public or any(j not in indices for j in consumers)

    # ----------------------------------------------------------------------------------- backward
    def backward(
        self, call: Call, note: Any, saved: list[Any], grads: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """`autograd.run`'s: the gradients of its tensors."""
        contexts, objects, shapes, of_made = note
        g = grads[0]
        extra: dict[Key, Any] = dict(zip(self.exports, grads[1:], strict=True))
        of_params: dict[int, list[Any]] = {}
        for op, indices in self.backward_ops:
            if indices[-1] < call.first:
                g = None
                break
            here = [self._restored(contexts[i], objects[i], saved) for i in indices]
            of_extra = [
                tuple([extra.get((i, slot)) for slot in range(self.ops[i].num_extra_outputs)])
                for i in indices
            ]
            g = _given(op, g)
            g, params, inputs = self._placed(op, indices, _backward, op, here, g, of_extra)
            g = summed(g, shapes.get(indices[0]))
            for i, found, sums in zip(indices, params, inputs, strict=True):
                of_params[i] = self._checked(i, found)
                if len(sums) != len(self.wiring.sources[i]):
                    raise RuntimeError(
                        f"{position(self.ops, i)}: backward returned {len(sums)} gradients for "
                        f"{len(self.wiring.sources[i])} extra inputs; one for each, None where "
                        "there is none"
                    )
                for key, grad in zip(self.wiring.sources[i], sums, strict=True):
                    extra[key] = _sum(extra.get(key), summed(grad, of_made.get(key)))
        made: list[Any] = [_plain(g), *[extra.get(key) for key in self.imports]]
        for i in range(self.start, self.stop):
            count = len(list(self.ops[i].parameters()))
            made.extend(of_params.get(i, [None] * count))
        return tuple(made)

    def _restored(self, ctx: Any, objects: Any, saved: list[Any]) -> OperationContext:
        start, stop = ctx._save_range
        tensors = saved[start:stop]
        for i in range(start, stop):
            saved[i] = None  # the operation holds it now, alone
        return ctx.for_backward(tuple(restore_from_saved(objects, tensors)))  # type: ignore[no-any-return]

    def _checked(self, i: int, found: list[Any]) -> list[Any]:
        parameters = list(self.ops[i].parameters())
        if len(found) != len(parameters):
            raise RuntimeError(
                f"{position(self.ops, i)}: backward returned {len(found)} gradients for "
                f"{len(parameters)} parameters; one for each, None where there is none"
            )
        return [g if p.requires_grad else None for g, p in zip(found, parameters, strict=True)]

    def _placed(self, op: Any, indices: list[int], method: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a method of an operation; its errors say where in the pipeline it stands."""
        return placed(self.ops, indices, method, *args, **kwargs)


def _forward(op: Any, contexts: list[Any], x: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """(output, extra outputs) of a legacy operation."""
    made = op.fuser_forward(contexts, x, **kwargs)
    y, extra = results(made, "fuser_forward", ("output", "extra outputs"))
    return _tensor(y, "fuser_forward"), each(extra, "fuser_forward", "extra outputs", len(contexts))


def _compute(op: Any, count: int, x: Any, kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
    """(output, extra outputs, tensors to save) of a split one."""
    made = op.fuser_forward_compute(x, **kwargs)
    names = ("output", "extra outputs", "tensors to save")
    y, extra, saved = results(made, "fuser_forward_compute", names)
    extra = each(extra, "fuser_forward_compute", "extra outputs", count)
    return _tensor(y, "fuser_forward_compute"), extra, saved


def _backward(op: Any, contexts: list[Any], g: Any, of_extra: list[Any]) -> tuple[Any, Any, Any]:
    """(gradient of the input, of the parameters, of the extra inputs)."""
    made = op.fuser_backward(contexts, g, basic_op_grad_extra_outputs=of_extra)
    names = ("gradient of the input", "gradients of parameters", "gradients of extra inputs")
    g, params, inputs = results(made, "fuser_backward", names)
    count = len(contexts)
    return (
        g,
        each(params, "fuser_backward", names[1], count),
        each(inputs, "fuser_backward", names[2], count),
    )


def _tensor(y: Any, method: str) -> Any:
    if isinstance(y, Tensor | QuantizedTensorStorage | Handed | Rounded):
        return y
    raise TypeError(f"{method}: returned {type(y).__name__} as its output; a tensor is needed")


def _given(op: Any, x: Any) -> Any:
    """What an operation is given of what the one before it made."""
    return x if any([op._computes_as is kind for kind in LEAVES_QUANTIZED]) else _plain(x)  # noqa: C419


def _plain(x: Any) -> Any:
    return x.values if isinstance(x, Rounded) else x


def _shape(x: Any) -> Any:
    """None: it has none, or is what a fused operation made and read itself."""
    return tuple(x.shape) if isinstance(x, Tensor | QuantizedTensorStorage) else None


def _overlap(a: Any, b: Any) -> bool:
    """Whether two tensors may share memory."""
    for t in (a, b):
        if isinstance(t, QuantizedTensorStorage) or not isinstance(t, Tensor):
            return False  # its values are made anew
    if a.untyped_storage()._cdata != b.untyped_storage()._cdata:
        return False
    (start, stop), (first, last) = _span(a), _span(b)
    return bool(start < last and first < stop)


def _span(t: Any) -> tuple[Any, Any]:
    """The bytes of its storage that it lies in: from, to."""
    start = t.storage_offset()
    reach = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    stop = start + reach + 1 if t.numel() else start
    return start * t.element_size(), stop * t.element_size()


def _fresh(t: Any, given: tuple[Any, ...], made: list[Any]) -> Any:
    """`t` as an output of its own: autograd tells outputs apart by object."""
    if any([t is other for other in (*given, *made)]):  # noqa: C419  (2.11 traces lists)
        return t.detach()
    return t


def _sum(a: Any, b: Any) -> Any:
    if a is None or b is None:
        return b if a is None else a
    return a + b
