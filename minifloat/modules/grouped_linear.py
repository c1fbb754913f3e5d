"""`GroupedLinear`: linear layers side by side, each for some of the rows."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from .. import autograd, ragged
from ..core import grouped
from ..module import Begun
from ..parameters import default_device, default_init, initialise, main_grad, quantized_parameter
from ..recipe.delayed import DelayedState
from ..tensors import GroupedTensorStorage, QuantizedTensorStorage, as_parameter
from .projection import Projection, refuse_unsupported
from .wgrad import WeightGradStore

__all__ = ["GroupedLinear"]

Splits = Sequence[int] | Tensor


class GroupedLinear(Projection):
    """`y[r_e] = inp[r_e] weight_e^T + bias_e`, with `r_e` the rows of expert e.

    Each expert's rows and weight are quantized by themselves: it computes what a `Linear` of its
    own would. The weights are parameters `weight0`, `weight1`, ..., or with `single_grouped_weight`
    one parameter `weight` of shape (num_gemms, out_features, in_features); biases alike. A state
    dict of either layout loads into either. See `docs/grouped.md`.
    """

    weight: Any
    bias: Any
    _held_format = ""  # of one quantized weight: a graph cannot ask it
    module_type = "grouped_linear"
    _weight_operands = staticmethod(grouped.weight_operands)

    def __init__(  # noqa: PLR0913  (the contract's signature)
        self,
        num_gemms: int,
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
        device: torch.device | str | None = None,
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        name: str | None = None,
        use_grouped_tensor: bool | None = None,
        *,
        single_grouped_parameter: bool = False,
    ) -> None:
        nn.Module.__init__(self)
        where = f"GroupedLinear({name})" if name else "GroupedLinear"
        refuse_unsupported(
            where, ub_overlap_rs=ub_overlap_rs, ub_overlap_ag=ub_overlap_ag, ub_name=ub_name
        )
        if num_gemms < 1:
            raise ValueError(f"{where}: num_gemms: got {num_gemms}; it must be positive")
        if use_grouped_tensor not in (None, True, False):
            raise TypeError(
                f"{where}: use_grouped_tensor: got {type(use_grouped_tensor).__name__}; a bool or "
                "None is needed"
            )
        device = default_device(device)
        self._setup_projection(
            name=name,
            device=device,
            where=where,
            parallel_mode=parallel_mode,
            sequence_parallel=sequence_parallel,
            tp_group=tp_group,
            tp_size=tp_size,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            delay_wgrad_compute=delay_wgrad_compute,
            save_original_input=save_original_input,
        )
        if self.tp_size > 1 and bias:
            raise ValueError(
                f"{where}: bias with tp_size={self.tp_size}: no collective runs here that would "
                "add it once; pass bias=False"
            )
        self.delayed = DelayedState(device, num_gemms)
        self.wgrad_store: Any = _Store(delay_wgrad_compute)
        self.num_gemms = num_gemms
        self.use_bias, self.return_bias = bias, return_bias
        self.apply_bias = bias and not return_bias
        self.single_grouped_weight = single_grouped_weight or single_grouped_parameter
        self.single_grouped_bias = single_grouped_bias and bias
        if self.single_grouped_weight and self._init_scales_by_history():
            warnings.warn(
                f"{where}: single_grouped_weight with quantized weights and delayed scaling: each "
                "expert's weight has a live scale of its own, so the weights stay apart",
                UserWarning,
                stacklevel=2,
            )
            self.single_grouped_weight = False
        self._init_method = default_init if init_method is None else init_method
        self._tracker = (get_rng_state_tracker, rng_tracker_name)
        self._shard(in_features, out_features, where)
        dtype = torch.get_default_dtype() if params_dtype is None else params_dtype
        self._make_parameters(dtype, device)

    def extra_repr(self) -> str:
        return (
            f"num_gemms={self.num_gemms}, in_features={self.in_features}, "
            f"out_features={self.out_features}, bias={self.use_bias}"
        )

    # ------------------------------------------------------------------------------ parameters
    def _make_parameters(self, dtype: torch.dtype, device: torch.device) -> None:
        n, k, num = self.out_features, self.in_features, self.num_gemms
        if self.single_grouped_weight:
            weight = torch.empty(num, n, k, dtype=dtype, device=device)
            self.register_parameter("weight", nn.Parameter(weight))
        if self.single_grouped_bias:
            bias = torch.zeros(num, n, dtype=dtype, device=device)
            self.register_parameter("bias", nn.Parameter(bias))
        for i in range(num):
            w = b = None
            if not self.single_grouped_weight:
                w = nn.Parameter(torch.empty(n, k, dtype=dtype, device=device))
            if self.use_bias and not self.single_grouped_bias:
                b = nn.Parameter(torch.zeros(n, dtype=dtype, device=device))
            self.register_parameter(f"weight{i}", w)
            self.register_parameter(f"bias{i}", b)
        self.reset_parameters(defer_init=device.type == "meta")

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initialise; with `defer_init` only mark the parameters. Meta parameters are made real."""
        if not defer_init:
            for name, parameter in list(self.named_parameters(recurse=False)):
                if parameter.is_meta:
                    real = torch.empty_like(parameter, device=default_device(None))
                    self.register_parameter(name, nn.Parameter(real, parameter.requires_grad))
            if self.delayed.scale_input.is_meta:
                self.delayed.to_empty(device=default_device(None))
            with torch.no_grad():
                owners = self._weights()
                each = list(owners[0].unbind(0)) if self.single_grouped_weight else owners
                initialise(each, self._init_method, *self._tracker, self._where())
                for b in self._biases():
                    b.zero_()
            self.delayed.reset()
            if self._init_recipe is not None:
                self._quantize_parameters()
        self._mark_parameters()

    def _init_scales_by_history(self) -> bool:
        recipe = self._init_recipe
        return recipe is not None and recipe.plan(*self._roles(recipe)).delayed[1]

    def _quantize_parameters(self) -> None:
        assert self._init_recipe is not None
        roles = self.get_quantizer_roles(fwd=True, num_quantizers=3)

        def made(i: int, w: Tensor) -> nn.Parameter:
            state: Any = self.delayed
            mine = slice(i, i + 1)  # of delayed scaling's state
            live: Any = SimpleNamespace(
                scale_weight=state.scale_weight[mine], amax_weight=state.amax_weight[mine]
            )
            recipe = self._init_recipe
            assert recipe is not None
            return quantized_parameter(w.detach(), recipe, roles, live, self._preserve)

        if not self.single_grouped_weight:
            for i, w in enumerate(self._weights()):
                self.register_parameter(f"weight{i}", made(i, w))
            return
        if self._preserve:
            raise NotImplementedError(
                f"{self._where()}: preserve_high_precision_init_val with single_grouped_weight is "
                "not there yet; leave one of them out"
            )
        values = self.weight.detach()
        one: Any = made(0, values[0])
        group: Any = GroupedTensorStorage.make_grouped_tensor_with_shapes(
            self.num_gemms,
            [(self.out_features, self.in_features)] * self.num_gemms,
            one._quantizer,
            values.device,
            values.dtype,
        )
        group.quantize(list(values.unbind(0)))
        self.register_parameter("weight", as_parameter(group))
        self._held_format = one._cast(False).format_name

    def _mark_parameters(self) -> None:
        """Attributes that Megatron-style optimizers and checkpoints look for."""
        for w in self._weights():
            w.tensor_model_parallel = True
            w.partition_dim = (1 if self.parallel_mode == "row" else 0) + (w.dim() - 2)
            w.partition_stride = 1
        for b in self._biases():
            if self.parallel_mode == "row":
                b.sequence_parallel = self.sequence_parallel
            elif self.parallel_mode == "column":
                b.tensor_model_parallel = True
                b.partition_dim, b.partition_stride = b.dim() - 1, 1

    def _weights(self) -> list[Any]:
        if self.single_grouped_weight:
            return [self.weight]
        return [getattr(self, f"weight{i}") for i in range(self.num_gemms)]

    def _biases(self) -> list[Any]:
        if not self.use_bias:
            return []
        if self.single_grouped_bias:
            return [self.bias]
        return [getattr(self, f"bias{i}") for i in range(self.num_gemms)]

    # --------------------------------------------------------------------------------- forward
    def forward(
        self,
        inp: Any,
        m_splits: Splits,
        is_first_microbatch: bool | None = None,
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
    ) -> Any:
        """`inp[..., in_features] -> [..., out_features]`, or (it, biases) with `return_bias`.

        `m_splits` are the experts' numbers of rows: a list, or an integer tensor, which stays on
        its device. `is_first_microbatch` is that of `Linear`. `out` and `dgrad_out` are buffers
        that the result and the input's gradient are written to.
        """
        owners = self._weights()
        inp = self._check_rows(inp, owners)
        if dgrad_out is not None:
            inp = self._with_buffer(inp, dgrad_out)
        shape = inp.shape
        x = inp if inp.dim() == 2 else inp.reshape(-1, self.in_features)
        sizes = self._sizes(m_splits, x.shape[0], x.device)
        begun = self._begin()
        self._advise(begun, x)
        weights, whole = self._stacked(owners, x.dtype, begun)
        if begun.calibration is not None:
            self._record(x, whole, sizes, begun)
        biases = self._biases()
        bias = None
        if self.apply_bias:
            bias = biases[0] if self.single_grouped_bias else torch.stack(biases)
        grads = torch.is_grad_enabled()
        needs = (
            grads and x.requires_grad,
            grads and any([w.requires_grad for w in weights]),  # noqa: C419  (2.11 traces lists)
            grads and bias is not None and bias.requires_grad,
        )
        call = self._call(begun, needs, x, whole, owners, is_first_microbatch)
        if isinstance(whole, _QUANTIZED):
            if begun.plan.override:
                raise NotImplementedError(
                    f"{self._where()}: backward_override={begun.plan.override!r} with quantized "
                    "weights; leave one of them out"
                )
            copies = grouped.quantized_weights(weights, needs[0])
            call = call._replace(workspace=copies)
        y = _run(call, (sizes, x, bias, *weights), True in needs)
        self._end(begun)
        if inp.dim() != 2:
            y = y.reshape(*shape[:-1], self.out_features)
        if out is not None:
            self._check_buffer("out", out, y)
            y = out.detach().copy_(y)
        if not self.return_bias:
            return y
        given = [b.to(y.dtype) for b in biases]
        return y, given[0] if self.single_grouped_bias else given

    def _stacked(
        self, owners: list[Any], dtype: torch.dtype, begun: Begun
    ) -> tuple[list[Any], Any]:
        """(the weights as the operation takes them, one that tells what they are)."""
        if isinstance(owners[0], GroupedTensorStorage):
            held: Any = self._grouped_weight(owners[0], begun)
            return [held], held
        weights = [self._weight(w, dtype, begun) for w in owners]
        if isinstance(weights[0], QuantizedTensorStorage):
            return weights, weights[0]
        whole = weights[0] if self.single_grouped_weight else torch.stack(weights)
        return [whole], whole

    def _grouped_weight(self, weight: Any, begun: Begun) -> Any:
        """One quantized parameter as this plan reads it."""
        plan = begun.plan
        if plan.w_row.layout[0] is not torch.uint8:
            if not torch.compiler.is_compiling():
                warnings.warn(
                    f"{self._where()}: a quantized weight outside autocast is dequantized",
                    UserWarning,
                    stacklevel=4,
                )
            return weight.dequantize()
        if self._held_format != plan.w_row.format_name:
            raise RuntimeError(
                f"Recipe mismatch for '{self._where()}': the weight was quantized as "
                f"{self._held_format}, and {plan.name} multiplies {plan.w_row.format_name}; use "
                "the recipe of quantized_model_init"
            )
        return weight

    def _workspace(self, weight: Any, *rest: Any) -> Any:
        return None if isinstance(weight, _QUANTIZED) else super()._workspace(weight, *rest)

    def _check_rows(self, inp: Any, owners: list[Any]) -> Any:
        if isinstance(inp, QuantizedTensorStorage) or not isinstance(inp, Tensor):
            raise TypeError(
                f"{self._where()}: inp: got {type(inp).__name__}; a plain tensor is needed"
            )
        if inp.dim() < 2 or inp.shape[-1] != self.in_features:
            raise ValueError(
                f"{self._where()}: inp: got shape {tuple(inp.shape)}; [rows, "
                f"in_features={self.in_features}] is needed"
            )
        dtypes = {p.dtype for p in (*owners, *self._biases())}
        if len(dtypes) > 1:
            raise TypeError(
                f"{self._where()}: the parameters have dtypes {sorted(map(str, dtypes))}; all "
                "experts must have one"
            )
        if torch.is_autocast_enabled(inp.device.type):
            return inp.to(torch.get_autocast_dtype(inp.device.type))
        if inp.dtype != owners[0].dtype:
            raise TypeError(
                f"{self._where()}: inp: got {inp.dtype}, the parameters {owners[0].dtype}; convert "
                "one of them, or run under torch.autocast"
            )
        return inp

    def _sizes(self, given: Any, rows: int, device: torch.device) -> Tensor:
        """int64 on `device`. What the host knows is checked; nothing waits for the device."""
        num, name = self.num_gemms, f"{self._where()}: m_splits"
        if not isinstance(given, Tensor):
            found = list(given)
            ragged.check_sizes(found, num, rows, name)
            return torch.tensor(found, dtype=torch.int64, device=device)
        if given.dtype not in _INTEGERS or tuple(given.shape) != (num,):
            raise ValueError(
                f"{name}: got {given.dtype} of shape {tuple(given.shape)}; integers of shape "
                f"({num},) are needed, one for each expert"
            )
        if given.device.type == "cpu" and not torch.compiler.is_compiling():
            ragged.check_sizes(given.tolist(), num, rows, name)
        return given.to(device, torch.int64)

    def _record(self, x: Tensor, weight: Any, sizes: Tensor, begun: Begun) -> None:
        """Calibration: the experts' amaxes, for a recipe that scales by history."""
        plan = begun.calibration
        assert plan is not None
        if plan.update is None or begun.replays:
            return
        self.delayed.used = True
        w = weight.detach().reshape(-1, self.in_features)
        with torch.no_grad():
            for i, slot, t, of, cast in (
                (0, "input", x.detach(), sizes, plan.x_row),
                (1, "weight", w, None, plan.w_row),
            ):
                if plan.delayed[i]:
                    scale, amax = self.delayed.live(slot)
                    made = ragged.quantize_scaled(
                        t, of, self.num_gemms, scale, cast, row=True, col=False
                    )
                    amax.copy_(torch.maximum(amax, made[-1]))

    def _check_buffer(self, name: str, buffer: Tensor, like: Tensor) -> None:
        if (buffer.shape, buffer.dtype, buffer.requires_grad) != (like.shape, like.dtype, False):
            raise ValueError(
                f"{self._where()}: {name}: got {buffer.dtype} of shape {tuple(buffer.shape)}, "
                f"requires_grad={buffer.requires_grad}; {like.dtype} of shape {tuple(like.shape)}, "
                "without a gradient, is needed"
            )

    def _with_buffer(self, inp: Tensor, buffer: Tensor) -> Tensor:
        """`inp`, whose gradient comes in `buffer`."""
        self._check_buffer("dgrad_out", buffer, inp)
        if torch.compiler.is_compiling():
            raise NotImplementedError(
                f"{self._where()}: dgrad_out inside torch.compile: a graph makes its own buffers; "
                "leave it out"
            )
        if not (torch.is_grad_enabled() and inp.requires_grad):
            return inp
        through: Any = inp.view_as(inp)
        through.register_hook(lambda grad: buffer.detach().copy_(grad))
        return through  # type: ignore[no-any-return]

    def _main_grad(
        self, weight: Any, owners: list[Any], first: bool | None
    ) -> tuple[Any, bool, bool | None]:
        if not self.fuse_wgrad_accumulation or not weight.requires_grad:
            return None, False, None
        found = [main_grad(w, self._where(), "fuse_wgrad_accumulation") for w in owners]
        _, overwrite, dummy = found[0]
        if any([f[1:] != found[0][1:] for f in found]):  # noqa: C419
            raise ValueError(
                f"{self._where()}: fuse_wgrad_accumulation: the experts' weights differ in "
                "overwrite_main_grad, grad_added_to_main_grad or zero_out_wgrad; make them agree"
            )
        into = found[0][0] if self.single_grouped_weight else tuple([f[0] for f in found])
        return into, overwrite or first is True, dummy

    # ----------------------------------------------------------------------------- later wgrad
    def need_backward_dw(self) -> bool:
        """Whether `backward_dw` has anything to do with this module."""
        return bool(self.wgrad_store.enabled)

    def backward_dw(self) -> None:
        """Compute the gradients that the oldest backward left, if any, and store them."""
        if not self.wgrad_store.enabled or not self.wgrad_store.queue:
            return
        dw = self.wgrad_store.pop(self._where())
        if dw is not None:
            owners = self._weights()
            parts = (dw,) if self.single_grouped_weight else dw.unbind(0)
            for w, part in zip(owners, parts, strict=True):
                w.grad = part if w.grad is None else w.grad + part
        for hook in self.wgrad_store.hooks:
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], Any]) -> None:
        """`hook()` runs after each `backward_dw`."""
        self.wgrad_store.hooks.append(hook)

    # ------------------------------------------------------------------------------ state dict
    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        state = dict(state_dict)
        layouts = [("weight", self.single_grouped_weight)]
        if self.use_bias:
            layouts.append(("bias", self.single_grouped_bias))
        for kind, single in layouts:
            whole = f"{prefix}{kind}"
            each = [f"{prefix}{kind}{i}" for i in range(self.num_gemms)]
            self._convert(state, whole, each, single)
        super()._load_from_state_dict(state, prefix, *rest)

    def _convert(self, state: dict[str, Any], whole: str, each: list[str], single: bool) -> None:
        """Entries of the other layout into those of this one; redundant ones are dropped."""
        if single:
            if whole not in state and all(name in state for name in each):
                state[whole] = torch.stack([_dense(state[name]) for name in each])
            if whole in state:
                for name in each:
                    state.pop(name, None)
                if state[whole].dim() == 3 and self.single_grouped_bias and whole.endswith("bias"):
                    state[whole] = state[whole].squeeze(1)
            return
        held = state.pop(whole, None)
        if held is None or all(name in state for name in each):
            return
        if held.shape[0] != self.num_gemms:
            state[whole] = held  # reported as unexpected
            return
        held = _dense(held)
        held = held.squeeze(1) if held.dim() == 3 and whole.endswith("bias") else held
        for name, member in zip(each, held.unbind(0), strict=True):
            state.setdefault(name, member)


_QUANTIZED = (QuantizedTensorStorage, GroupedTensorStorage)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class _Store(WeightGradStore):
    """As its parent, of products over groups."""

    def __init__(self, enabled: bool) -> None:
        super().__init__(enabled)
        self.queue: deque[Any] = deque()

    def put(self, *work: Any) -> None:
        self.queue.append(work)

    def pop(self, where: str) -> Any:
        return grouped.wgrad(*self.queue.popleft())


def _dense(t: Any) -> Any:
    """The values of an entry of a state dict."""
    return t.dequantize() if isinstance(t, _QUANTIZED) else t


def _run(call: Any, tensors: tuple[Any, ...], trains: bool) -> Any:
    """The operation, out of reach of torch.autocast, which has had its say."""
    device = tensors[1].device.type
    if torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False), torch.set_grad_enabled(trains):
            return autograd.run(grouped.GroupedLinear, call, *tensors)
    if torch.compiler.is_compiling() and not trains:
        with torch.no_grad():  # Dynamo miscounts the arguments of a Function without gradients
            return autograd.run(grouped.GroupedLinear, call, *tensors)
    return autograd.run(grouped.GroupedLinear, call, *tensors)
