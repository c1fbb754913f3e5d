"""`Linear`: an `nn.Linear` that trains by a recipe."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import dispatch
from ..autograd import chain
from ..core import collectives
from ..core.linear import Call
from ..core.linear import Linear as LinearOp
from ..module import Begun
from ..recipe.autocast import STATE
from ..tensors import QuantizedTensorStorage
from .advice import SETTLED, advise
from .cached import CachesWeight
from .parameters import default_device, default_init, initialise, quantized_parameter, splits
from .wgrad import WeightGradStore
from .workspace import Cached

__all__ = ["Linear"]

MODES = (None, "column", "row")


class Linear(CachesWeight, nn.Linear):
    """`y = x w^T + bias`, quantized by the recipe of the autocast it runs in.

    A drop-in for `nn.Linear`: the same parameters under the same names, and a state dict that loads
    either way. See `docs/linear.md` for every argument.
    """

    def __init__(  # noqa: PLR0913  (the contract's signature)
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Any = None,
        device: torch.device | str | None = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
        *,
        cache_weights: bool = False,
    ) -> None:
        nn.Module.__init__(self)
        where = f"Linear({name})" if name else "Linear"
        for argument, value in (
            ("ub_overlap_ag", ub_overlap_ag),
            ("ub_overlap_rs", ub_overlap_rs),
            ("ub_overlap_rs_dgrad", ub_overlap_rs_dgrad),
            ("ub_bulk_dgrad", ub_bulk_dgrad),
            ("ub_bulk_wgrad", ub_bulk_wgrad),
            ("ub_name", ub_name),
            ("symmetric_ar_type", symmetric_ar_type),
        ):
            if value:
                raise NotImplementedError(
                    f"{where}: {argument}={value!r}: userbuffers and symmetric memory are not "
                    "supported; leave it at its default"
                )
        if parallel_mode not in MODES:
            raise _ModeError(
                f"{where}: parallel_mode: got {parallel_mode!r}; allowed: None, 'column', 'row'"
            )
        device = default_device(device)
        params_dtype = torch.get_default_dtype() if params_dtype is None else params_dtype
        self._setup(name, device)
        self.tp_size = tp_size if tp_group is None else torch.distributed.get_world_size(tp_group)
        self._tp: collectives.Group | None = None
        if tp_group is not None:
            self.set_tensor_parallel_group(tp_group)
        self.parallel_mode = parallel_mode
        self.sequence_parallel = sequence_parallel and self.tp_size > 1
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.return_bias = return_bias
        self.save_original_input = save_original_input
        self.cache_weights = cache_weights
        self.wgrad_store = WeightGradStore(delay_wgrad_compute)
        self._init_method = default_init if init_method is None else init_method
        self._tracker = (get_rng_state_tracker, rng_tracker_name)
        self._init_recipe, self._preserve = STATE.init, STATE.preserve
        # Whether a call has more to it than its recipe: most have not, and cost less.
        self._special = (
            fuse_wgrad_accumulation or delay_wgrad_compute or save_original_input or cache_weights
        )
        self._cached: Cached | None = None
        self._cached_version: tuple[tuple[int, int], ...] = ()
        self._preallocated = ""  # Plan.weight_key of a workspace held in buffers
        self._make_parameters(
            in_features, out_features, bias, params_dtype, parameters_split, device, where
        )

    def _make_parameters(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        dtype: torch.dtype,
        parameters_split: Any,
        device: torch.device,
        where: str,
    ) -> None:
        column = self.tp_size if self.parallel_mode == "column" else 1
        row = self.tp_size if self.parallel_mode == "row" else 1
        for size, ways, argument in (
            (out_features, column, "out_features"),
            (in_features, row, "in_features"),
        ):
            if size % ways:
                raise ValueError(f"{where}: {argument}={size}: tp_size={ways} does not divide it")
        self.in_features, self.out_features = in_features // row, out_features // column
        self.use_bias = bias
        self.apply_bias = bias and not self.return_bias
        self._splits = splits(parameters_split, out_features, column, where)
        if len(self._splits) > 1 and device.type == "meta":
            raise _ModeError(
                f"{where}: parameters_split on the meta device: the parts share one buffer, which "
                "must exist; construct it on a real device"
            )
        if len(self._splits) > 1 and self._init_recipe is not None:
            raise RuntimeError(
                f"{where}: parameters_split inside quantized_model_init: the parts of a quantized "
                "weight cannot be split; construct it outside, or without parameters_split"
            )
        if len(self._splits) > 1 and self.fuse_wgrad_accumulation:
            raise ValueError(
                f"{where}: fuse_wgrad_accumulation with parameters_split: one product cannot be "
                "added to the main_grad of several parameters; leave one of them out"
            )
        weight = torch.empty(self.out_features, self.in_features, dtype=dtype, device=device)
        vector = torch.zeros(self.out_features, dtype=dtype, device=device)
        rows = list(self._splits.values())
        for prefix, part in zip(self._splits, torch.split(weight, rows), strict=True):
            self.register_parameter(f"{prefix}weight", nn.Parameter(part))
        for prefix, part in zip(self._splits, torch.split(vector, rows), strict=True):
            self.register_parameter(f"{prefix}bias", nn.Parameter(part) if bias else None)
        if "" not in self._splits:
            self.__dict__.pop("weight", None)
        self.reset_parameters(defer_init=device.type == "meta")
        if self.cache_weights and "" in self._splits:
            self._preallocate()

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initialise; with `defer_init` only mark the parameters. Meta parameters are made real."""
        if "_splits" not in self.__dict__:
            return  # nn.Linear's constructor, which is not ours
        weights = self._weights()
        if not defer_init:
            for name, parameter in list(self.named_parameters(recurse=False)):
                if parameter.is_meta:
                    real = torch.empty_like(parameter, device=default_device(None))
                    made = nn.Parameter(real, parameter.requires_grad)
                    self.register_parameter(name, made)
            if self.delayed.scale_input.is_meta:
                self.delayed.to_empty(device=default_device(None))
            weights = self._weights()
            initialise(weights, self._init_method, *self._tracker, self._where())
            with torch.no_grad():
                for b in self._biases():
                    b.zero_()
            self.delayed.reset()
            if self._init_recipe is not None:
                self._quantize_parameter()
        self._mark_parameters()

    def _quantize_parameter(self) -> None:
        assert self._init_recipe is not None
        roles = self.get_quantizer_roles(fwd=True, num_quantizers=3)
        (prefix,) = self._splits
        self.register_parameter(
            f"{prefix}weight",
            quantized_parameter(
                self._weights()[0].detach(), self._init_recipe, roles, self.delayed, self._preserve
            ),
        )

    def _mark_parameters(self) -> None:
        """Attributes that Megatron-style optimizers and checkpoints look for."""
        for w in self._weights():
            w.tensor_model_parallel = True
            w.partition_dim = 1 if self.parallel_mode == "row" else 0
            w.partition_stride = 1
        for b in self._biases():
            if self.parallel_mode == "row":
                b.sequence_parallel = self.sequence_parallel
            elif self.parallel_mode == "column":
                b.tensor_model_parallel = True
                b.partition_dim, b.partition_stride = 0, 1

    def _weights(self) -> list[Any]:
        return [getattr(self, f"{prefix}weight") for prefix in self._splits]

    def _biases(self) -> list[Any]:
        found = [getattr(self, f"{prefix}bias") for prefix in self._splits]
        return [b for b in found if b is not None]

    def set_tensor_parallel_group(self, group: Any) -> None:
        """The ranks over which tensor parallelism runs; None takes them away."""
        size = self.tp_size if group is None else torch.distributed.get_world_size(group)
        if size != self.tp_size:
            raise ValueError(
                f"{self._where()}: group: got one of {size} ranks; the parameters were made for "
                f"tp_size={self.tp_size}: give it at construction"
            )
        self._tp = None if group is None else collectives.Group(str(group.group_name), size)

    @property
    def primary_weights_in_fp8(self) -> bool:
        """Whether the weight itself is quantized."""
        return self._init_recipe is not None

    def extra_repr(self) -> str:
        text = f"in_features={self.in_features}, out_features={self.out_features}"
        return text + f", bias={self.use_bias}"

    # ------------------------------------------------------------------------------- forward
    def forward(
        self,
        inp: Any,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        """`inp[..., in_features] -> [..., out_features]`, or (output, bias) with `return_bias`.

        `is_first_microbatch` True casts the weight and keeps it, False uses what was kept, None
        casts it anew. `fp8_output` returns a quantized tensor, `fp8_grad` quantizes the gradient of
        the input.
        """
        weight: Any = self.weight if "" in self._splits else _joined(self._weights())
        bias = self._bias()
        inp = self._check_input(inp, weight)
        begun = self._begin()
        plan = begun.plan
        if not torch.compiler.is_compiling() and (id(plan), inp.device) not in SETTLED:
            tokens, features = inp.shape[:-1].numel(), (self.in_features, self.out_features)
            advise(self._where(), plan, tokens, *features, inp.device)
        if isinstance(weight, QuantizedTensorStorage):
            weight = self._check_quantized(weight, begun)
        elif plan.w_row.layout[0] is None and weight.dtype != inp.dtype:
            weight = weight.to(inp.dtype)  # torch.autocast
        if isinstance(inp, QuantizedTensorStorage):
            need_col = torch.is_grad_enabled() and weight.requires_grad and not plan.override
            inp = self._check_quantized_input(inp, plan, need_col)
        if begun.calibration is not None:
            self._calibrate(inp, weight, begun)
        grads = torch.is_grad_enabled()
        row = self.parallel_mode == "row"
        fused = bias if self.apply_bias and not row else None
        needs = (
            grads and inp.requires_grad,
            grads and weight.requires_grad,
            grads and fused is not None and fused.requires_grad,
        )
        slots = begun.slots if needs[0] or needs[1] else None
        sizes = (inp.dtype, weight.dtype, self.in_features)
        common = (plan, needs, *sizes, begun.live, slots, begun.group)
        if self._special or is_first_microbatch is not None or fp8_grad or plan.stochastic:
            call = Call(
                *common,
                self._workspace(weight, begun, is_first_microbatch, needs[0]),
                *self._main_grad(weight, is_first_microbatch),
                self._seed(plan, inp),
                self._saves_input(plan),
                self._grad_input_quantizer(plan, fp8_grad),
                self.wgrad_store.put if self._defers(needs[1]) else None,
            )
        else:
            call = Call(*common)
        links: tuple[Any, ...] = ((LinearOp, call),)
        if self._tp is not None and self._tp.size > 1 and self.parallel_mode is not None:
            links = self._parallel(call, inp)
        elif self.tp_size > 1 and self.parallel_mode is not None:
            raise RuntimeError(
                f"{self._where()}: tp_size={self.tp_size} without a process group; pass tp_group "
                "or call set_tensor_parallel_group(group)"
            )
        y: Any
        if torch.is_autocast_enabled(inp.device.type):  # inp is of its dtype: nothing more to cast
            off = torch.autocast(inp.device.type, enabled=False)
            with off, torch.set_grad_enabled(True in needs):
                y = chain(links, inp, weight, fused)
        elif torch.compiler.is_compiling() and True not in needs:
            with torch.no_grad():  # Dynamo miscounts the arguments of a Function without gradients
                y = chain(links, inp, weight, fused)
        else:
            y = chain(links, inp, weight, fused)
        self._end(begun)
        if self.apply_bias and row and bias is not None:
            y = y + bias
        if fp8_output:
            y = self._output_quantizer(plan, y.requires_grad).quantize(y)
        return (y, bias) if self.return_bias else y

    def _bias(self) -> Any:
        if not self.use_bias:
            return None
        return self.bias if "" in self._splits else _joined(self._biases())

    def _parallel(self, call: Call, inp: Any) -> tuple[Any, ...]:
        """The operation between its collectives."""
        assert self._tp is not None
        sequence, size = self.sequence_parallel, self._tp.size
        if sequence and inp.dim() < 2:
            raise ValueError(
                f"{self._where()}: inp: got shape {tuple(inp.shape)}; sequence_parallel splits "
                "the first dim of [sequence, ..., features]"
            )
        if self.parallel_mode == "column":
            first = collectives.Gather if sequence else collectives.Replicate
            if call.grad_input is None:
                return (first, self._tp), (LinearOp, call)
            # What is quantized is the sum over the ranks, and it ends the backward.
            inner = call._replace(grad_input=None, slots=None)
            return (collectives.QuantizeGrad, call), (first, self._tp), (LinearOp, inner)
        if sequence and inp.shape[0] % size:
            raise ValueError(
                f"{self._where()}: inp: got shape {tuple(inp.shape)}; sequence_parallel splits "
                f"the first dim of the output, {inp.shape[0]}, which tp_size={size} does not divide"
            )
        last = collectives.ReduceScatter if sequence else collectives.AllReduce
        return (LinearOp, call), (last, self._tp)

    def _check_input(self, inp: Any, weight: Any) -> Any:
        if not isinstance(inp, Tensor):
            raise TypeError(f"{self._where()}: inp: got {type(inp).__name__}; a tensor is needed")
        if inp.dim() == 0 or inp.shape[-1] != self.in_features:
            raise ValueError(
                f"{self._where()}: inp: got shape {tuple(inp.shape)}; its last dim must be "
                f"in_features={self.in_features}"
            )
        if torch.is_autocast_enabled(inp.device.type):
            return inp.to(torch.get_autocast_dtype(inp.device.type))
        if inp.dtype != weight.dtype:
            raise TypeError(
                f"{self._where()}: inp: got {inp.dtype}, the parameters {weight.dtype}; convert "
                "one of them, or run under torch.autocast"
            )
        return inp

    def _check_quantized(self, weight: Any, begun: Begun) -> Any:
        plan = begun.plan
        if plan.w_row.layout[0] is not torch.uint8:
            if not torch.compiler.is_compiling():
                warnings.warn(
                    f"{self._where()}: a quantized weight outside autocast is dequantized",
                    UserWarning,
                    stacklevel=3,
                )
            return weight.dequantize()
        if weight._cast(False).format_name != plan.w_row.format_name:
            raise RuntimeError(
                f"Recipe mismatch for '{self._where()}': the weight was quantized as "
                f"{weight._cast(False).format_name}, and {plan.name} multiplies "
                f"{plan.w_row.format_name}; use the recipe of quantized_model_init"
            )
        return weight

    def _check_quantized_input(self, inp: Any, plan: Any, need_col: bool) -> Any:
        """A quantized input as it is, if it is cast as the recipe casts; else its values."""
        if not torch.compiler.is_compiling() and inp._with_gemm_swizzled_scales:
            return inp.dequantize()  # a UsageError that says so
        if not _reads_as(inp.operand(False).cast, plan.x_row):
            return inp.dequantize()
        if need_col and not _reads_as(inp.operand(True).cast, plan.x_col):
            return inp.dequantize()
        return inp

    def _calibrate(self, inp: Tensor, weight: Tensor, begun: Begun) -> None:
        """Record amaxes for a recipe that scales by history, without quantizing."""
        plan = begun.calibration
        assert plan is not None
        if plan.update is None or begun.replays:
            return
        self.delayed.used = True
        with torch.no_grad():
            for i, slot, x, cast in (
                (0, "input", inp, plan.x_row),
                (1, "weight", weight, plan.w_row),
            ):
                if plan.delayed[i]:
                    amax = self.delayed.live(slot)[1]
                    amax.copy_(torch.maximum(amax, dispatch.amax(x.detach(), cast, None)[0]))

    # ------------------------------------------------------------------ parts of a forward
    def _main_grad(self, weight: Any, first: bool | None) -> tuple[Any, bool, bool | None]:
        """(main_grad, whether to overwrite it, dummy gradient: None, or whether it is zeros)."""
        if not self.fuse_wgrad_accumulation or not weight.requires_grad:
            return None, False, None
        weight = self._weights()[0]
        main_grad = (
            weight.get_main_grad()
            if hasattr(weight, "__fsdp_param__")
            else getattr(weight, "main_grad", None)
        )
        if main_grad is None:
            raise RuntimeError(
                f"{self._where()}: fuse_wgrad_accumulation without weight.main_grad; set it to an "
                "fp32 or bf16 tensor of the weight's shape"
            )
        dummy = None
        if hasattr(weight, "grad_added_to_main_grad"):
            weight.grad_added_to_main_grad = True
            dummy = bool(getattr(weight, "zero_out_wgrad", False))
        overwrite = first is True or bool(getattr(weight, "overwrite_main_grad", False))
        return main_grad, overwrite, dummy

    def _seed(self, plan: Any, inp: Tensor) -> Tensor | None:
        if not plan.stochastic:
            return None
        return torch.randint(0, 2**62, (2,), dtype=torch.int64, device=inp.device)

    def _saves_input(self, plan: Any) -> bool:
        if not self.save_original_input:
            return False
        if plan.delayed[0]:
            raise ValueError(
                f"{self._where()}: save_original_input with delayed scaling: the scale moved on "
                "by backward; use another recipe, or save_original_input=False"
            )
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

    def _output_quantizer(self, plan: Any, trains: bool) -> Any:
        made = self._boundary(plan, plan.output, plan.delayed[2], "output", "fp8_output")
        # The next layer's weight gradient multiplies the column copy.
        return made._with_usages(True, True) if trains else made

    def _grad_input_quantizer(self, plan: Any, wanted: bool) -> Any:
        if not wanted:
            return None
        return self._boundary(plan, plan.grad_input, plan.delayed[4], "grad_input", "fp8_grad")

    def _boundary(self, plan: Any, quantizer: Any, delayed: bool, slot: str, argument: str) -> Any:
        if quantizer is None and not delayed:
            raise ValueError(
                f"{self._where()}: {argument}=True outside autocast: nothing says how to quantize; "
                "enter an autocast, or leave it out"
            )
        if not delayed:
            return quantizer
        if torch.compiler.is_compiling():
            raise NotImplementedError(
                f"{self._where()}: {argument}=True with delayed scaling inside torch.compile: a "
                "graph cannot return a tensor whose scale is live; use current scaling"
            )
        return self.delayed.quantizer(slot, plan)

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
    def need_backward_dw(self) -> bool:
        """Whether `backward_dw` has anything to do with this module."""
        return self.wgrad_store.enabled

    def backward_dw(self) -> None:
        """Compute the weight's gradient that the oldest backward left, and store it."""
        if not self.need_backward_dw():
            return
        dw = self.wgrad_store.pop(self._where())
        if dw is not None:
            at = 0
            for w, rows in zip(self._weights(), self._splits.values(), strict=True):
                part = dw[at : at + rows].to(w.dtype)
                w.grad = part if w.grad is None else w.grad + part
                at += rows
        for hook in self.wgrad_store.hooks:
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], Any]) -> None:
        """`hook()` runs after each `backward_dw`."""
        self.wgrad_store.hooks.append(hook)


class _ModeError(ValueError, AssertionError):
    """An argument outside its list of values."""


def _joined(parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _reads_as(a: Any, b: Any) -> bool:
    """Whether codes cast by `a` are read by `b`."""
    fields = ("format_name", "hadamard", "row_scaled", "scale_max")
    return all([getattr(a, f) == getattr(b, f) for f in fields])  # noqa: C419  (2.11 traces lists)
