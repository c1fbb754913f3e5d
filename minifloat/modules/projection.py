"""`Projection`: one quantized product of a module, without its parameters.

What a weight needs besides its values is here: delayed scaling's state, its workspace, the options
of training, tensor parallelism. A forward reads the ambient state once, makes a `Call`, and hands
plain data to the core. A module that has one weight is a projection; one that has more holds more.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .. import dispatch, programs
from ..autograd import chain
from ..core import collectives
from ..core.linear import Call
from ..core.linear import Linear as LinearOp
from ..formats import Operand
from ..inputs import INPUT_DTYPES, autocast_dtype, check_whole, draw_seed
from ..module import HIGH_PLAN, Begun
from ..parameters import (
    add_gradient,
    check_leaves,
    check_one_main_grad,
    check_recipe_of,
    check_size,
    find_main_grad,
    main_grad,
    quantized_weight,
)
from ..quantizers import UsageError
from ..recipe.autocast import STATE
from ..recipe.plan import Plan
from ..recipe.replay import unseen
from ..tensors import QuantizedTensorStorage
from .advice import SETTLED, advise
from .cached import CachesWeight
from .wgrad import WeightGradStore
from .workspace import Cached, Versions

__all__ = ["ModeError", "Projection", "is_quantized", "refuse_unsupported", "run"]

MODES = (None, "column", "row")


class Chain(tuple[Any, ...]):
    """Links that many calls are given."""

    told: programs.Told | None = None


class Projection(CachesWeight):
    """`y = x w^T + bias` in the middle of a chain; `weight` is an argument of everything here.

    `owners` are the parameters that make up the weight: more than one where it is split.
    """

    in_features: int
    out_features: int

    def _setup_projection(  # noqa: PLR0913  (the options of training)
        self,
        *,
        name: str | None,
        device: torch.device,
        where: str,
        parallel_mode: str | None = None,
        sequence_parallel: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        cache_weights: bool = False,
    ) -> None:
        """Call once, after `nn.Module.__init__`."""
        if parallel_mode not in MODES:
            raise ModeError(
                f"{where}: parallel_mode: got {parallel_mode!r}; allowed: None, 'column', 'row'"
            )
        if not hasattr(tp_size, "__index__") or tp_size < 1:
            raise ValueError(f"{where}: tp_size: got {tp_size!r}; an int >= 1 is needed")
        self._setup(name, device)
        self.recipe = None  # on the instance: a graph looks for it there
        self.tp_size = tp_size if tp_group is None else _size(tp_group, f"{where}: tp_group")
        self._tp: collectives.Group | None = None
        if tp_group is not None:
            self.set_tensor_parallel_group(tp_group)
        self.parallel_mode = parallel_mode
        self.sequence_parallel = sequence_parallel and self.tp_size > 1
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.save_original_input = save_original_input
        self.cache_weights = cache_weights
        self.wgrad_store = WeightGradStore(delay_wgrad_compute)
        self._init_recipe, self._preserve = STATE.init, STATE.preserve
        self._counts: Tensor | None = None  # of the products that ran, while somebody counts
        self._probe: Any = None  # of the operands, while somebody looks
        self._cached: Cached | None = None
        self._cached_version: Versions | None = None
        self._preallocated = ""  # Plan.weight_key of a workspace held in buffers

    def _shard(self, in_features: int, out_features: int, where: str) -> None:
        """This rank's sizes of a weight."""
        column = self.tp_size if self.parallel_mode == "column" else 1
        row = self.tp_size if self.parallel_mode == "row" else 1
        for size, ways, argument in (
            (out_features, column, "out_features"),
            (in_features, row, "in_features"),
        ):
            check_size(size, where, argument)
            if size % ways:
                raise ValueError(f"{where}: {argument}={size}: tp_size={ways} does not divide it")
        self.in_features, self.out_features = in_features // row, out_features // column

    def set_tensor_parallel_group(self, group: Any) -> None:
        """The ranks over which tensor parallelism runs; None takes them away."""
        size = self.tp_size if group is None else _size(group, f"{self._where()}: group")
        if size != self.tp_size:
            raise ValueError(
                f"{self._where()}: group: got one of {size} ranks; the parameters were made for "
                f"tp_size={self.tp_size}: give it at construction"
            )
        self._tp = None if group is None else collectives.Group(str(group.group_name), size)

    @property
    def tp_group(self) -> Any:
        """The ranks over which tensor parallelism runs, or None."""
        if self._tp is None:
            return None
        found: Any = torch.distributed.distributed_c10d
        return found._resolve_process_group(self._tp.name)

    @property
    def primary_weights_in_fp8(self) -> bool:
        """Whether the weight itself is quantized."""
        return self._init_recipe is not None

    @property
    def preserve_high_precision_init_val(self) -> bool:
        """Whether a quantized weight keeps the value that it was made from."""
        return self._preserve

    @property
    def _special(self) -> bool:
        """Whether a call has more to it than its recipe: most have not, and cost less. Asked at
        each, since options may be set on a layer that is there (Megatron sets save_original_input).
        """
        return (
            self.fuse_wgrad_accumulation
            or self.save_original_input
            or self.cache_weights
            or self.wgrad_store.enabled
        )

    # ------------------------------------------------------------------------------- a forward
    def _refuser(
        self,
        inp: Any,
        weight: Any,
        owners: list[Any],
        first: bool | None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Callable[[Plan], None] | None:
        """What `_begin` asks whether this call can run; None: it can, whatever the plan.

        `inp` is None where the input is made on the way.
        """
        special = self._special or first is not None or fp8_output or fp8_grad
        if not (special or self._tp is not None or _other(weight) or _other(inp)):
            return None
        return partial(self._refuse, inp, weight, owners, first, fp8_output, fp8_grad)

    def _refuse(
        self,
        inp: Any,
        weight: Any,
        owners: list[Any],
        first: bool | None,
        fp8_output: bool,
        fp8_grad: bool,
        plan: Plan,
    ) -> None:
        """Raise for what a forward by `plan` would find wrong on its way."""
        self._check_first(first)
        if plan is not HIGH_PLAN:
            for t, argument in ((inp, "inp"), (weight, "weight")):
                if _other(t):
                    check_whole(t, f"{self._where()}: {argument}")
        if is_quantized(weight):
            check_recipe_of(weight, plan, self._where())
        if is_quantized(inp):
            self._reads_quantized_input(inp, plan, self._needs_col(weight, plan))
        if inp is not None and self._collects():
            self._check_sequence(inp.shape)
        if self._into_main_grad(weight):
            check_one_main_grad(owners, self._where())
            find_main_grad(owners[0], self._where(), "fuse_wgrad_accumulation")
        elif self.wgrad_store.enabled:
            check_leaves(owners, self._where())
        if self.save_original_input:
            self._check_saving(plan)
        if fp8_output:
            self._check_boundary(plan.output, plan.delayed[2], "fp8_output")
        if fp8_grad:
            self._check_boundary(plan.grad_input, plan.delayed[4], "fp8_grad")

    def _check_first(self, first: object) -> None:
        if first is not None and first is not True and first is not False:  # 1 would be neither
            raise TypeError(
                f"{self._where()}: is_first_microbatch: got {first!r}; True, False or None is "
                "needed"
            )

    def _weight(self, weight: Any, dtype: torch.dtype, begun: Begun) -> Any:
        """The weight as this plan reads it."""
        if is_quantized(weight):
            return self._check_quantized(weight, begun)
        if begun.plan.w_row.layout[0] is None and weight.dtype != dtype:
            return weight.to(dtype)  # torch.autocast
        return weight

    def _advise(self, begun: Begun, inp: Any) -> None:
        plan = begun.plan
        if not torch.compiler.is_compiling() and (id(plan), inp.device) not in SETTLED:
            tokens, features = inp.shape[:-1].numel(), (self.in_features, self.out_features)
            advise(self._where(), plan, tokens, *features, inp.device)

    def _plain(self, begun: Begun, first: bool | None, fp8_grad: bool) -> bool:
        """Whether a call has nothing to it but its recipe."""
        watched = self._counts is not None or self._probe is not None
        asked = first is not None or fp8_grad or begun.plan.stochastic
        return not (watched or asked or self._special)

    def _call(
        self,
        begun: Begun,
        needs: tuple[bool, bool, bool],
        inp: Any,
        weight: Any,
        owners: list[Any],
        first: bool | None,
        fp8_grad: bool = False,
    ) -> Call:
        """The operation's arguments. `inp` tells dtype and device."""
        plan = begun.plan
        slots = begun.slots if needs[0] or needs[1] else None
        sizes = (inp.dtype, weight.dtype, self.in_features)
        if self._plain(begun, first, fp8_grad):
            return Call(plan, needs, *sizes, begun.live, slots, begun.group)
        cached, live = self._workspace(weight, owners, begun, first, needs[0]), begun.live
        if cached is not None and cached.scale is not None:
            live = (live[0], (cached.scale, None), live[2])  # not that of now: what it was cast by
        return Call(
            plan,
            needs,
            *sizes,
            live,
            slots,
            begun.group,
            None if cached is None else cached.copies,
            *self._main_grad(needs[1], owners, first),
            self._seed(plan, inp, fp8_grad),
            self._saves_input(plan, inp),
            self._grad_input_quantizer(begun, fp8_grad),
            self.wgrad_store.put if self._defers(needs[1]) else None,
            counts=self._counts,
            probe=self._probe,
        )

    def _chain(
        self,
        begun: Begun,
        needs: tuple[bool, bool, bool],
        inp: Any,
        weight: Any,
        owners: list[Any],
        first: bool | None,
        fp8_grad: bool = False,
    ) -> tuple[Any, ...]:
        """`_links` of `_call`; of a plain one as it was made, and told to programs, before."""
        chains = begun.chains
        if chains is None or self._collects() or not self._plain(begun, first, fp8_grad):
            call = self._call(begun, needs, inp, weight, owners, first, fp8_grad)
            return self._links(call, inp.shape)
        index = inp.get_device()
        of = (needs, inp.dtype, weight.dtype, self.in_features, index)
        links = chains.get(of)
        if links is None:
            call = self._call(begun, needs, inp, weight, owners, first, fp8_grad)
            links = chains[of] = Chain(self._links(call, inp.shape))
            links.told = programs.tell(links, index)
        return links

    def _links(self, call: Call, shape: tuple[int, ...]) -> tuple[Any, ...]:
        """The operation, between its collectives, on an input of `shape`."""
        return self._parallel(call, shape) if self._collects() else ((LinearOp, call),)

    def _collects(self) -> bool:
        """Whether there are collectives around the operation."""
        return self._tp is not None and self._tp.size > 1 and self.parallel_mode is not None

    def _parallel(self, call: Call, shape: tuple[int, ...]) -> tuple[Any, ...]:
        assert self._tp is not None
        sequence = self.sequence_parallel
        self._check_sequence(shape)
        if self.parallel_mode == "column":
            first = collectives.Gather if sequence else collectives.Replicate
            if call.grad_input is None:
                return (first, self._tp), (LinearOp, call)
            # What is quantized is the sum over the ranks, and it ends the backward.
            inner = call._replace(grad_input=None, slots=None)
            return (collectives.QuantizeGrad, call), (first, self._tp), (LinearOp, inner)
        last = collectives.ReduceScatter if sequence else collectives.AllReduce
        return (LinearOp, call), (last, self._tp)

    def _check_sequence(self, shape: tuple[int, ...]) -> None:
        """Raise unless sequence parallelism can split what it has to."""
        if not self.sequence_parallel:
            return
        if len(shape) < 2:
            raise ValueError(
                f"{self._where()}: inp: got shape {tuple(shape)}; sequence_parallel splits "
                "the first dim of [sequence, ..., features]"
            )
        if self.parallel_mode == "row" and shape[0] % self.tp_size:
            raise ValueError(
                f"{self._where()}: inp: got shape {tuple(shape)}; sequence_parallel splits the "
                f"first dim of the output, {shape[0]}, which tp_size={self.tp_size} does not divide"
            )

    def _check_input(self, inp: Any, weight: Any) -> Any:
        if not isinstance(inp, Tensor):
            raise TypeError(f"{self._where()}: inp: got {type(inp).__name__}; a tensor is needed")
        if inp.dim() == 0 or inp.shape[-1] != self.in_features:
            raise ValueError(
                f"{self._where()}: inp: got shape {tuple(inp.shape)}; its last dim must be "
                f"in_features={self.in_features}"
            )
        if self._tp is None and self.tp_size > 1:
            raise RuntimeError(
                f"{self._where()}: tp_size={self.tp_size} without a process group; pass tp_group "
                "or call set_tensor_parallel_group(group)"
            )
        return self._as_computed(inp, weight)

    def _as_computed(self, inp: Tensor, weight: Any) -> Tensor:
        """The input in the dtype of the product; `weight` is one of the parameters."""
        if inp.device != weight.device:
            raise RuntimeError(
                f"{self._where()}: inp: it is on {inp.device}, the parameters on {weight.device}; "
                "move one of them"
            )
        mixed = autocast_dtype(inp)
        if inp.dtype != weight.dtype and mixed is None:
            raise TypeError(
                f"{self._where()}: inp: got {inp.dtype}, the parameters {weight.dtype}; convert "
                "one of them, or run under torch.autocast"
            )
        if weight.dtype not in INPUT_DTYPES and self._in_force() is not None:
            what = f"the parameters are {weight.dtype}"
            if mixed is None:
                what = f"inp: got {inp.dtype}"
            raise TypeError(
                f"{self._where()}: {what}, which no recipe quantizes; make the layer "
                "and its input fp32, bf16 or fp16, or run it outside autocast"
            )
        return inp if mixed is None else inp.to(mixed)

    def _check_quantized(self, weight: Any, begun: Begun) -> Any:
        return quantized_weight(weight, begun.plan, self._where())

    def _needs_col(self, weight: Any, plan: Plan) -> bool:
        """Whether backward multiplies the column copy of a quantized input."""
        return torch.is_grad_enabled() and weight.requires_grad and not plan.override

    def _check_quantized_input(self, inp: Any, plan: Plan, need_col: bool) -> Any:
        """A quantized input as it is, if it is cast as the recipe casts; else its values."""
        return inp if self._reads_quantized_input(inp, plan, need_col) else inp.dequantize()

    def _reads_quantized_input(self, inp: Any, plan: Plan, need_col: bool) -> bool:
        """Whether a quantized input is cast as the recipe casts."""
        # A graph cannot branch on an attribute of its input: there, swizzled scales go unnoticed.
        if not torch.compiler.is_compiling() and inp._with_gemm_swizzled_scales:
            raise UsageError(
                f"{self._where()}: inp: its scales are in GEMM order, which cannot be read back; "
                "quantize it with optimize_for_gemm=False"
            )
        if not _reads_as(self._input_operand(inp, False).cast, plan.x_row):
            return False
        return not need_col or _reads_as(self._input_operand(inp, True).cast, plan.x_col)

    def _input_operand(self, inp: Any, col: bool) -> Operand:
        if torch.compiler.is_compiling():
            return inp.operand(col)  # type: ignore[no-any-return]
        try:
            return inp.operand(col)  # type: ignore[no-any-return]
        except UsageError as error:
            raise UsageError(f"{self._where()}: inp: {error}") from None

    def _calibrate(self, inp: Tensor, weight: Tensor, begun: Begun) -> None:
        """Record amaxes for a recipe that scales by history, without quantizing."""
        plan = begun.calibration
        assert plan is not None
        if plan.update is None or begun.replays:
            return
        self.delayed.used = True
        with unseen(begun.entry is not None), torch.no_grad():
            for i, slot, x, cast in (
                (0, "input", inp, plan.x_row),
                (1, "weight", weight, plan.w_row),
            ):
                if plan.delayed[i]:
                    amax = self.delayed.live(slot)[1]
                    amax.copy_(torch.maximum(amax, dispatch.amax(x.detach(), cast, None)[0]))

    def _into_main_grad(self, weight: Any) -> bool:
        """Whether backward adds the gradient of `weight` to `main_grad`."""
        asked = self.fuse_wgrad_accumulation and weight.requires_grad
        return bool(asked and torch.is_grad_enabled())

    def _main_grad(
        self, needed: bool, owners: list[Any], first: bool | None
    ) -> tuple[Any, bool, bool | None]:
        """(main_grad, whether to overwrite it, dummy gradient: None, or whether it is zeros)."""
        if not (self.fuse_wgrad_accumulation and needed):
            return None, False, None
        found, overwrite, dummy = main_grad(owners[0], self._where(), "fuse_wgrad_accumulation")
        return found, overwrite or first is True, dummy

    def _seed(self, plan: Any, inp: Tensor, fp8_grad: bool) -> Tensor | None:
        if not plan.stochastic and not (fp8_grad and plan.dx_row.stochastic):
            return None
        return draw_seed(inp.device)

    def _check_saving(self, plan: Plan) -> None:
        if plan.delayed[0]:
            raise ValueError(
                f"{self._where()}: save_original_input with delayed scaling: the scale moved on "
                "by backward; use another recipe, or save_original_input=False"
            )

    def _saves_input(self, plan: Any, inp: Tensor) -> bool:
        if not self.save_original_input:
            return False
        self._check_saving(plan)
        if is_quantized(inp):  # its column copy is there: another cast would round it twice
            return False
        if not plan.requantizes:
            if not torch.compiler.is_compiling():
                warnings.warn(
                    f"{self._where()}: save_original_input is ignored: the quantizer is not "
                    "safe to run twice",
                    UserWarning,
                    stacklevel=3,
                )
            return False
        return True

    def _output_quantizer(self, begun: Begun) -> Any:
        made = self._boundary(begun, begun.plan.output, begun.plan.delayed[2], "output")
        # The next layer's weight gradient multiplies the column copy, whatever is frozen here.
        return made._with_usages(True, True) if torch.is_grad_enabled() else made

    def _grad_input_quantizer(self, begun: Begun, wanted: bool) -> Any:
        if not wanted:
            return None
        return self._boundary(begun, begun.plan.grad_input, begun.plan.delayed[4], "grad_input")

    def _boundary(self, begun: Begun, quantizer: Any, delayed: bool, slot: str) -> Any:
        self._check_boundary(quantizer, delayed, "fp8_output" if slot == "output" else "fp8_grad")
        return self._live(slot, begun) if delayed else quantizer

    def _check_boundary(self, quantizer: Any, delayed: bool, argument: str) -> None:
        if quantizer is None and not delayed:
            raise ValueError(
                f"{self._where()}: {argument}=True outside autocast: nothing says how to quantize; "
                "enter an autocast, or leave it out"
            )
        if delayed and torch.compiler.is_compiling():
            raise NotImplementedError(
                f"{self._where()}: {argument}=True with delayed scaling inside torch.compile: a "
                "graph cannot return a tensor whose scale is live; use current scaling"
            )

    def _defers(self, needs_wgrad: bool) -> bool:
        if not (self.wgrad_store.enabled and needs_wgrad):
            return False
        if torch.compiler.is_compiling():
            raise RuntimeError(
                f"{self._where()}: delay_wgrad_compute inside torch.compile: a graph cannot leave "
                "its gradients for later; compile without it"
            )
        return True

    # --------------------------------------------------------------------------- later wgrad
    def _backward_dw(self, owners: list[Any], rows: list[int]) -> None:
        """Compute the gradient that the oldest backward left, and store it."""
        dw = self.wgrad_store.pop(self._where())
        if dw is not None:
            for w, part in zip(owners, torch.split(dw, rows), strict=True):
                if not w.requires_grad:  # a frozen part of a split weight
                    continue
                add_gradient(w, part)
        for hook in self.wgrad_store.hooks:
            hook()


class ModeError(ValueError, AssertionError):
    """An argument outside its list of values."""


def run(links: tuple[Any, ...], inp: Any, params: tuple[Any, ...], trains: bool) -> Any:
    """The chain, as a module runs it: out of reach of torch.autocast, which has had its say."""
    if autocast_dtype(inp) is not None:  # inp is of its dtype: nothing more to cast
        off = torch.autocast(inp.device.type, enabled=False)
        with off, torch.set_grad_enabled(trains):
            return chain(links, inp, *params, shield=inp.device.type)
    if not trains and torch.compiler.is_compiling():
        with torch.no_grad():  # Dynamo miscounts the arguments of a Function without gradients
            return chain(links, inp, *params)
    return chain(links, inp, *params)


def refuse_unsupported(where: str, **given: Any) -> None:
    """Userbuffers and the like: any value but the default is an error that names it."""
    for argument, value in given.items():
        if value:
            raise NotImplementedError(
                f"{where}: {argument}={value!r}: userbuffers and symmetric memory are not "
                "supported; leave it at its default"
            )


def _size(group: Any, argument: str) -> int:
    if not hasattr(group, "group_name"):
        raise TypeError(
            f"{argument}: got {group!r}; a process group of torch.distributed is needed, or None"
        )
    return torch.distributed.get_world_size(group)


def _other(tensor: Any) -> bool:
    """Whether it is neither a plain tensor nor an ordinary parameter."""
    kind = type(tensor)
    return not (kind is Tensor or kind is Parameter or tensor is None)


def is_quantized(tensor: Any) -> bool:
    """Whether it is codes. Most are told by their type: to ask a class of opaque values runs
    Python of PyTorch's."""
    kind = type(tensor)
    plain = kind is Parameter or kind is Tensor
    return not plain and isinstance(tensor, QuantizedTensorStorage)


def _reads_as(a: Any, b: Any) -> bool:
    """Whether codes cast by `a` are read by `b`."""
    fields = ("format_name", "hadamard", "row_scaled", "scale_max")
    return all([getattr(a, f) == getattr(b, f) for f in fields])  # noqa: C419  (2.11 traces lists)
