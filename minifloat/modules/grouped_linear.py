"""`GroupedLinear`: linear layers side by side, each for some of the rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .. import autograd, ragged
from ..core import grouped
from ..experts import QUANTIZED, Apart, Experts, Later, Splits, together
from ..inputs import autocast_dtype
from ..module import Begun
from ..parameters import (
    check_leaves,
    check_parameter_dtype,
    default_device,
    default_init,
    find_main_grad,
)
from ..recipe.delayed import DelayedState
from ..recipe.plan import Plan
from ..recipe.replay import unseen
from ..tensors import QuantizedTensorStorage
from .projection import Projection, refuse_unsupported

__all__ = ["GroupedLinear"]


class GroupedLinear(Experts, Projection):
    """`y[r_e] = inp[r_e] weight_e^T + bias_e`, with `r_e` the rows of expert e.

    Each expert's rows and weight are quantized by themselves: it computes what a `Linear` of its
    own would. The weights are parameters `weight0`, `weight1`, ..., or with `single_grouped_weight`
    one parameter `weight` of shape (num_gemms, out_features, in_features); biases alike. A state
    dict of either layout loads into either. See `docs/grouped.md`.
    """

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
        counts = hasattr(num_gemms, "__index__") and not isinstance(num_gemms, bool)
        if not counts or num_gemms < 1:
            raise ValueError(f"{where}: num_gemms: got {num_gemms!r}; an int >= 1 is needed")
        if use_grouped_tensor is not None and not isinstance(use_grouped_tensor, bool):
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
        self.wgrad_store: Any = Later(delay_wgrad_compute)
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
        check_parameter_dtype(dtype, where)
        self._make_parameters(dtype, device)

    def extra_repr(self) -> str:
        return (
            f"num_gemms={self.num_gemms}, in_features={self.in_features}, "
            f"out_features={self.out_features}, bias={self.use_bias}"
        )

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
        self._check_first(is_first_microbatch)
        inp = self._check_rows(inp, owners)
        if dgrad_out is not None:
            inp = self._with_buffer(inp, dgrad_out)
        shape = inp.shape
        if out is not None:
            self._check_buffer("out", out, inp, (*shape[:-1], self.out_features))
        x = inp if inp.dim() == 2 else inp.flatten(0, -2)
        sizes = self._sizes(m_splits, x.shape[0], x.device, "m_splits")
        # Quantized ones are told by their type: see `projection.is_quantized`.
        other = any([type(w) is not nn.Parameter for w in owners])  # noqa: C419  (2.11 traces lists)
        asks = self._special or other
        begun = self._begin(partial(self._refuse_experts, owners) if asks else None)
        self._advise(begun, x)
        weights = [self._read(w, x.dtype, begun.plan) for w in owners]
        if begun.calibration is not None:
            self._record(x, weights, sizes, begun)
        bias = self._bias_matrix() if self.apply_bias else None
        grads = torch.is_grad_enabled()
        needs = (
            grads and x.requires_grad,
            grads and any([w.requires_grad for w in weights]),  # noqa: C419  (2.11 traces lists)
            grads and bias is not None and bias.requires_grad,
        )
        call = self._call(begun, needs, x, weights[0], owners, is_first_microbatch)
        if isinstance(weights[0], QUANTIZED):
            call = call._replace(workspace=grouped.quantized_weights(weights, needs[0]))
        work: Any = grouped.GroupedLinear if self.single_grouped_weight else Apart
        y = _run(work, call, (sizes, x, bias, *weights), True in needs)
        self._end(begun)
        if inp.dim() != 2:
            y = y.reshape(*shape[:-1], self.out_features)
        if out is not None:
            y = out.detach().copy_(y)
        if not self.return_bias:
            return y
        given = [b.to(y.dtype) for b in self._biases()]
        return y, given[0] if self.single_grouped_bias else given

    def _workspace(
        self, weight: Any, owners: list[Any], begun: Begun, first: bool | None, need_col: bool
    ) -> Any:
        # Without a flag nothing is kept, and nothing need be put together.
        kept = first is not None
        if begun.replays:
            assert begun.entry is not None
            kept = begun.entry.workspace
        if isinstance(weight, QUANTIZED) or not kept:
            return None
        whole = weight if self.single_grouped_weight else together(owners)
        return super()._workspace(whole, owners, begun, first, need_col)

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
        self._check_alike(owners)
        return self._as_computed(inp, owners[0])

    def _refuse_experts(self, owners: list[Any], plan: Plan) -> None:
        """Raise for what a forward by `plan` would find wrong on its way."""
        if plan.w_row.layout[0] is torch.uint8:
            self._check_all_quantized(owners)
        for w in owners:
            self._check_recipe(w, plan)
            if self._into_main_grad(w):
                find_main_grad(w, self._where(), "fuse_wgrad_accumulation")
            elif self.wgrad_store.enabled:
                check_leaves([w], self._where())
        if self.save_original_input:
            self._check_saving(plan)

    def _record(self, x: Tensor, weights: list[Any], sizes: Tensor, begun: Begun) -> None:
        """Calibration: the experts' amaxes, for a recipe that scales by history."""
        plan = begun.calibration
        assert plan is not None
        if plan.update is None or begun.replays:
            return
        self.delayed.used = True
        with unseen(begun.entry is not None), torch.no_grad():
            whole = weights[0].detach() if self.single_grouped_weight else together(weights)
            w = whole.flatten(0, 1)
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

    def _with_buffer(self, inp: Tensor, buffer: Tensor) -> Tensor:
        """`inp`, whose gradient comes in `buffer`."""
        self._check_buffer("dgrad_out", buffer, inp, inp.shape)
        if torch.compiler.is_compiling():
            raise NotImplementedError(
                f"{self._where()}: dgrad_out inside torch.compile: a graph makes its own buffers; "
                "leave it out"
            )
        if not (torch.is_grad_enabled() and inp.requires_grad):
            return inp

        def fill(grad: Tensor) -> Tensor:
            buffer.detach().copy_(grad)
            return buffer  # itself: autograd would keep a tensor that nobody else has as a .grad

        through: Any = torch.ops.aten.alias(inp)  # its gradient goes on as it is
        through.register_hook(fill)
        return through  # type: ignore[no-any-return]

    def _fuses_wgrad(self) -> bool:
        return self.fuse_wgrad_accumulation

    def _main_grad(
        self, needed: bool, owners: list[Any], first: bool | None
    ) -> tuple[Any, bool, bool | None]:
        if not (self.fuse_wgrad_accumulation and needed):
            return None, False, None
        into, overwrite, dummy = self._main_grads(owners, "fuse_wgrad_accumulation")
        return into, overwrite or first is True, dummy


def _run(work: Any, call: Any, tensors: tuple[Any, ...], trains: bool) -> Any:
    """The operation, out of reach of torch.autocast, which has had its say."""
    if autocast_dtype(tensors[1]) is not None:
        device = tensors[1].device.type
        with torch.autocast(device, enabled=False), torch.set_grad_enabled(trains):
            return autograd.run(work, call, *tensors, shield=device)
    if torch.compiler.is_compiling() and not trains:
        with torch.no_grad():  # Dynamo miscounts the arguments of a Function without gradients
            return autograd.run(work, call, *tensors)
    return autograd.run(work, call, *tensors)
