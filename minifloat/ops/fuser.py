"""`OperationFuser`: runs operations in a row as one, fusing those that a table says can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..autograd import run
from ..inputs import autocast_dtype
from ..recipe.autocast import STATE
from ..recipe.replay import replayed
from .basic_operation import BasicOperation
from .fused_operation import FusedOperation
from .fusible import FusibleOperation
from .pipeline import Call, Pipeline
from .wiring import CALLER, Key, Wiring, placed, position, wire

__all__ = [
    "OperationFuser",
    "check_keywords",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
]

Fusion = Callable[..., list[FusibleOperation]]
# Keyword arguments of forwards that are a fuser's to give.
FUSERS = ("requires_grad", "prev_op_grad_output_quantizer", "next_op_input_quantizer")
Plan = list[tuple[FusibleOperation, list[int]]]


class OperationFuser:
    """Operations in a row, in the order in which they run; fused operations count as their parts.

    A call is one node of autograd's graph. It fuses first what holds for both directions, then the
    result for forward and, by itself, for backward; `_forward_ops` and `_backward_ops` are
    (operation, indices of its basic operations), each in the order in which they run. A graph of
    `torch.compile` decides while it is traced, and holds the outcome.
    """

    forward_backward_fusion_functions: ClassVar[list[Fusion]] = []
    forward_fusion_functions: ClassVar[list[Fusion]] = []
    backward_fusion_functions: ClassVar[list[Fusion]] = []

    _wiring: Wiring | None

    def __init__(self, ops: Sequence[FusibleOperation]) -> None:
        self._set(ops)
        if not torch.compiler.is_compiling():
            self._get_wiring()

    @classmethod
    def later(cls, ops: Sequence[FusibleOperation]) -> OperationFuser:
        """A fuser that looks at its operations' channels when it is first called."""
        made = cls.__new__(cls)
        made._set(ops)
        return made

    def _set(self, ops: Sequence[FusibleOperation]) -> None:
        self._basic_ops: list[Any] = _expanded(ops)
        if not self._basic_ops:
            raise ValueError("OperationFuser: ops: got none; a pipeline has at least one operation")
        for op in self._basic_ops:
            if not isinstance(op, BasicOperation):
                raise TypeError(
                    f"OperationFuser: ops: got {type(op).__name__}; a BasicOperation or a "
                    "FusedOperation is needed"
                )
        self._wiring = None
        self._key: Any = None
        self._made: Pipeline | None = None
        self._has_legacy = not all([op._use_split_forward for op in self._basic_ops])  # noqa: C419
        self._forward_ops: Plan = []
        self._backward_ops: Plan = []
        # Hooks that nobody overrides need no memory of whether they ran.
        default = FusibleOperation.pre_first_fuser_forward
        self._first_hooks = [
            op for op in self._basic_ops if type(op).pre_first_fuser_forward is not default
        ]

    def __getstate__(self) -> dict[str, Any]:
        """A copy fuses anew: of fusions, which are functions, nothing can be pickled."""
        return {
            **self.__dict__, "_key": None, "_made": None, "_forward_ops": [], "_backward_ops": []
        }  # fmt: skip

    @property
    def num_extra_inputs(self) -> int:
        """Those that the caller gives: extra inputs that no channel feeds."""
        return self._get_wiring().inputs

    def _get_wiring(self) -> Wiring:
        if torch.compiler.is_compiling():  # a graph guards on channels, not on what eager stored
            return wire(self._basic_ops)
        if self._wiring is None:
            self._wiring = wire(self._basic_ops)
            for i, op in enumerate(self._basic_ops):
                op._captured = position(self._basic_ops, i)
        return self._wiring

    # ------------------------------------------------------------------------------------- a call
    def __call__(
        self,
        input: Any,  # noqa: A002
        *extra_inputs: Any,
        basic_op_kwargs: list[dict[str, Any]] | None = None,
    ) -> Any:
        """The output, or (it, extra outputs for the caller...)."""
        wiring = self._get_wiring()
        ops = self._basic_ops
        if not isinstance(input, Tensor):
            raise TypeError(
                f"{position(ops, 0)}: input: got {type(input).__name__}; a tensor is needed"
            )
        if len(extra_inputs) != wiring.inputs:
            raise ValueError(
                f"OperationFuser: extra_inputs: got {len(extra_inputs)}, {wiring.inputs} are "
                f"needed: {'; '.join(self._wants(wiring)) or 'no operation takes any'}"
            )
        for k, t in enumerate(extra_inputs):
            if not isinstance(t, Tensor):
                got = "None" if t is None else type(t).__name__
                wanted = self._wants(wiring)[k]
                raise TypeError(f"{wanted}: got {got}; a tensor is needed")
        if basic_op_kwargs is None:
            basic_op_kwargs = [{} for _ in ops]
        if len(basic_op_kwargs) != len(ops):
            raise ValueError(
                f"OperationFuser: basic_op_kwargs: got {len(basic_op_kwargs)} for {len(ops)} basic "
                "operations; a dict for each"
            )
        if any(basic_op_kwargs):
            for i, given in enumerate(basic_op_kwargs):
                check_keywords(ops[i], given, position(ops, i))
        extra = {(CALLER, k): t for k, t in enumerate(extra_inputs)}
        x = self._run_ranges(self._ranges(), input, extra, basic_op_kwargs)
        if not wiring.public:
            return x
        return (x, *[extra[key] for key in wiring.public])

    def _run_ranges(
        self, ranges: list[tuple[int, int]], x: Any, extra: dict[Key, Any], kwargs: Any
    ) -> Any:
        """One range after the other. Not by a loop: a graph that breaks in one is lost."""
        x = self._run_range(*ranges[0], x, extra, kwargs)
        return x if len(ranges) == 1 else self._run_ranges(ranges[1:], x, extra, kwargs)

    def _ranges(self) -> list[tuple[int, int]]:
        """What runs as one node: everything, but in a graph, which may break inside a legacy
        operation, such an operation by itself."""
        n = len(self._basic_ops)
        if not torch.compiler.is_compiling() or not self._has_legacy:
            return [(0, n)]
        forward, _ = self._fuse(STATE.recipe, 0, n)
        cuts = [0]
        for op, indices in forward:
            if not op._use_split_forward:
                cuts += [i for i in (indices[0], indices[-1] + 1) if i != cuts[-1]]
        cuts += [] if cuts[-1] == n else [n]
        return [(a, b) for a, b in zip(cuts[:-1], cuts[1:], strict=True)]

    def _run_range(
        self,
        start: int,
        stop: int,
        x: Any,
        extra: dict[Key, Any],
        basic_op_kwargs: list[dict[str, Any]],
    ) -> Any:
        """Run some of the operations; their extra outputs join `extra`."""
        wiring = self._get_wiring()
        recipe = _recipe()
        first = self._first_requiring_backward(start, stop, x, extra, wiring)
        self._prepare(recipe, start, stop, first < stop)
        call = self._begin(start, stop, x, basic_op_kwargs, first)
        pipeline = self._pipeline(recipe, first, start, stop, wiring)
        tensors = (x, *[extra[key] for key in pipeline.imports], *pipeline.parameters())
        if torch.compiler.is_compiling():
            tensors = _distinct(tensors)
            _settle_width(x, pipeline.parameters())
        device = x.device.type
        if autocast_dtype(x) is not None:  # begin() has read it
            with torch.autocast(device, enabled=False):
                made = _run(pipeline, call, tensors, device)
        else:
            made = _run(pipeline, call, tensors)
        if pipeline.exports:
            made, more = made[0], made[1:]
            extra.update(zip(pipeline.exports, more, strict=True))
        for op, kwargs in zip(self._basic_ops[start:stop], call.kwargs[start:stop], strict=True):
            op.end(**kwargs)
        return made

    def _wants(self, wiring: Wiring) -> list[str]:
        """Who takes the extra inputs of the caller."""
        return [
            f"{position(self._basic_ops, i)}, extra input {slot}"
            for i, keys in enumerate(wiring.sources)
            for slot, key in enumerate(keys)
            if key[0] == CALLER
        ]

    def _first_requiring_backward(
        self, start: int, stop: int, x: Any, extra: dict[Key, Any], wiring: Wiring
    ) -> int:
        """The first operation that takes part in backward; `stop`: none does."""
        if not torch.is_grad_enabled():
            return stop
        if x.requires_grad:
            return start
        for i in range(start, stop):
            given = [extra[key] for key in wiring.sources[i] if key[0] < start]
            tensors = (*self._basic_ops[i].parameters(), *given)
            if any([t.requires_grad for t in tensors]):  # noqa: C419  (2.11 traces lists)
                return i
        return stop

    def _prepare(self, recipe: Any, start: int, stop: int, requires_grad: bool) -> None:
        ops = self._basic_ops[start:stop]
        for i, op in enumerate(ops):
            if "parametrizations" in op._modules or _computes(op):
                raise NotImplementedError(
                    f"{position(self._basic_ops, start + i)}: it has parametrizations "
                    "(torch.nn.utils.parametrize, prune, weight_norm or spectral_norm), through "
                    "which an operation passes no gradient; remove them, or use the module of "
                    "minifloat"
                )
        if not torch.compiler.is_compiling():
            for op in ops:
                if op._recipe is not recipe:  # another fuser may have run it since
                    op.reset_recipe_state(recipe=recipe)
        if self._first_hooks:
            for op in self._first_hooks:
                op.pre_first_fuser_forward()
            self._first_hooks = []
        for op in ops:
            op.pre_fuser_forward(requires_grad=requires_grad)

    def _begin(
        self, start: int, stop: int, x: Any, given: list[dict[str, Any]], first: int
    ) -> Call:
        ops = self._basic_ops
        dtype = autocast_dtype(x)
        requires = [start <= first <= i < stop for i in range(len(ops))]
        reaches = torch.is_grad_enabled() and x.requires_grad  # whether the input needs a gradient
        kwargs: list[dict[str, Any]] = [{} for _ in ops]
        for i in range(start, stop):
            begun = placed(
                ops,
                [i],
                ops[i].begin,
                requires_grad=requires[i],
                input_requires_grad=reaches,
                autocast_dtype=dtype,
            )
            kwargs[i] = {**given[i], **begun}
            reaches = reaches or requires[i]
        inputs: list[Any] = [None for _ in range(len(ops) + 1)]
        grads: list[Any] = [None for _ in range(len(ops) + 1)]
        for i in reversed(range(start, stop)):
            inputs[i] = ops[i]._input_taker(inputs[i + 1], **kwargs[i])
        for i in range(start, stop):
            grads[i] = ops[i]._grad_taker(grads[i - 1], **kwargs[i])
        return Call(requires, kwargs, inputs, grads, first)

    # ------------------------------------------------------------------------------------- fusing
    def _pipeline(self, recipe: Any, first: int, start: int, stop: int, wiring: Wiring) -> Pipeline:
        if torch.compiler.is_compiling():  # a stored outcome would be a guard, and change
            return Pipeline(self._basic_ops, *self._fuse(recipe, start, stop), wiring, start, stop)
        key = (
            recipe,
            first,
            *self.forward_backward_fusion_functions,
            None,
            *self.forward_fusion_functions,
            None,
            *self.backward_fusion_functions,
        )
        if key != self._key or self._made is None:
            self._forward_ops, self._backward_ops = self._fuse(recipe, start, stop)
            self._made = Pipeline(
                self._basic_ops, self._forward_ops, self._backward_ops, wiring, start, stop
            )
            self._key = key
        return self._made

    def _fuse(self, recipe: Any, start: int, stop: int) -> tuple[Plan, Plan]:
        """(forward, backward) operations."""
        ops = self._basic_ops[start:stop]
        both = self._apply(self.forward_backward_fusion_functions, ops, recipe, start)
        forward = self._apply(self.forward_fusion_functions, both, recipe, start)
        backward = self._apply(self.backward_fusion_functions, both, recipe, start)
        return _indexed(forward, start), list(reversed(_indexed(backward, start)))

    def _apply(self, functions: list[Fusion], ops: list[Any], recipe: Any, start: int) -> list[Any]:
        basic = _expanded(ops)
        for function in functions:
            made = function(list(ops), recipe=recipe)
            if not isinstance(made, list | tuple):
                raise TypeError(
                    f"fusion {_name(function)}: returned {type(made).__name__}; a list of "
                    "operations is needed"
                )
            self._check(basic, _expanded(made), function, start)
            ops = made
        return ops

    def _check(self, ops: list[Any], made: list[Any], function: Any, start: int) -> None:
        name = _name(function)
        for i, op in enumerate(ops):
            if i < len(made) and made[i] is op:
                continue
            kept = any([m is op for m in made])  # noqa: C419
            where = position(self._basic_ops, start + i)
            raise RuntimeError(
                f"fusion {name}: {'moved' if kept else 'dropped'} {where}; a fusion returns the "
                "same basic operations in the same order"
            )
        if len(made) != len(ops):
            raise RuntimeError(
                f"fusion {name}: added {type(made[len(ops)]).__name__} after the last of "
                f"{len(ops)} operations; a fusion returns the same basic operations"
            )


def _computes(op: Any) -> bool:
    """Whether a hook makes what was a parameter, of `<name>_orig` or of `<name>_g` and `<name>_v`,
    as torch.nn.utils' do that are older than its parametrizations."""
    if len(op._forward_pre_hooks) == 0:
        return False
    for name in op._parameters:
        stem, _, end = name.rpartition("_")
        if end in {"orig", "g"} and stem in op.__dict__:
            return True
    return False


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__


def _distinct(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """The tensors, of which one that comes twice is a view the second time: Dynamo follows no
    Function that gets one object as two arguments."""
    made: list[Any] = []
    for i, t in enumerate(tensors):
        again = any([t is other for other in tensors[:i]])  # noqa: C419  (2.11 traces lists)
        made.append(t.view_as(t) if again else t)
    return tuple(made)


def _settle_width(x: Any, parameters: list[Any]) -> None:
    """Make a constant of x's width where it is a parameter's: compiled with `dynamic=True` it is
    none yet, and 2.11 loses a size that only turns out to be one inside a Function."""
    if x.dim() > 0:
        any([x.shape[-1] == p.shape[-1] for p in parameters if p.dim() > 0])  # noqa: C419


def _run(pipeline: Pipeline, call: Call, tensors: tuple[Any, ...], shield: str = "") -> Any:
    if not torch.is_grad_enabled():
        made = run(pipeline, call, *tensors)
        # PyTorch lets a view of a leaf require gradients even then.
        return tuple([t.detach() for t in made]) if pipeline.exports else made.detach()
    if torch.compiler.is_compiling() and call.first >= pipeline.stop:
        with torch.no_grad():  # Dynamo miscounts the arguments of a Function without gradients
            return run(pipeline, call, *tensors)
    return run(pipeline, call, *tensors, shield=shield)


def _recipe() -> Any:
    """The recipe in force; in a recompute, the first run's, so that the same operations fuse."""
    return STATE.recipe if torch.compiler.is_compiling() else replayed(STATE.recipe)


def check_keywords(op: Any, given: Any, where: str) -> None:
    """Raise unless the forward of a basic operation takes the keyword arguments `given`."""
    if not isinstance(given, dict):
        raise TypeError(
            f"{where}: keyword arguments: got {type(given).__name__}; a dict of them is needed"
        )
    takes = op.forward_keywords
    for name in given:
        if name in FUSERS or (takes is not None and name not in takes):
            all_but = f"any but {', '.join(FUSERS)}"
            raise TypeError(
                f"{where}: keyword argument {name!r}: its forward takes "
                f"{all_but if takes is None else ', '.join(takes) or 'none'} from a caller"
            )


def _expanded(ops: Sequence[FusibleOperation]) -> list[Any]:
    """The basic operations that these are made of."""
    made: list[Any] = []
    for op in ops:
        if isinstance(op, FusedOperation):
            made.extend(op.basic_ops)
        else:
            made.append(op)
    return made


def _indexed(ops: list[Any], start: int) -> Plan:
    made: Plan = []
    at = start
    for op in ops:
        count = len(op.basic_ops) if isinstance(op, FusedOperation) else 1
        made.append((op, list(range(at, at + count))))
        at += count
    return made


# -------------------------------------------------------------------------------------- registering
def register_forward_fusion(func: Fusion, prepend: bool = False) -> None:
    """`func(ops, *, recipe) -> ops` joins the fusions of forward, as the last or the first."""
    _register(OperationFuser.forward_fusion_functions, func, prepend)


def register_backward_fusion(func: Fusion, prepend: bool = False) -> None:
    """`func(ops, *, recipe) -> ops` joins the fusions of backward; ops are in forward's order."""
    _register(OperationFuser.backward_fusion_functions, func, prepend)


def register_forward_backward_fusion(func: Fusion, prepend: bool = False) -> None:
    """`func(ops, *, recipe) -> ops` joins the fusions that hold for both directions."""
    _register(OperationFuser.forward_backward_fusion_functions, func, prepend)


def _register(functions: list[Fusion], func: Fusion, prepend: bool) -> None:
    if not callable(func):
        raise TypeError(f"func: got {func!r}; a function of (ops, *, recipe) is needed")
    functions.insert(0 if prepend else len(functions), func)
