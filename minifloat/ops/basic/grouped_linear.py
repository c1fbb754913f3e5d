"""`GroupedLinear`: linear layers side by side, each for some of the rows, as one operation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ... import scalars
from ...core import grouped
from ...core.linear import Call
from ...experts import QUANTIZED, Experts, Later, as_operands, watched
from ...grouped_gemm import sums
from ...inputs import draw_seed
from ...parameters import default_device
from ...producer import Producer
from ...quantizers import Float8Quantizer
from ...recipe import Recipe, RecipeState
from ...recipe.autocast import STATE
from ...recipe.delayed import DelayedState
from ...recipe.roles import QuantizerRole
from ..quantized_operation import SLOTS, QuantizedOperation
from .linear import DTYPES
from .scaled_activation import scaled
from .values import folded, plain

__all__ = ["Again", "GroupedLinear"]


class Again(NamedTuple):
    """An input that backward makes again: the activation of `h`, its rows times `scales`."""

    h: Tensor
    scales: Tensor
    producer: Producer


class Saved(NamedTuple):
    """What a call saves; the last `held` tensors are what `core.grouped` keeps. Among those its
    input has the places `at` to `at + 2`, which are empty where backward makes it again, by
    `producer`."""

    tensors: tuple[Any, ...] = ()
    held: int = 0
    producer: Producer | None = None
    at: int = 0


class GroupedLinear(Experts, QuantizedOperation):
    """`y[r_e] = x[r_e] weight_e^T + bias_e`, with `r_e` the rows of group e.

    The first extra input, `split_sizes`, is an integer tensor: each group's number of rows. With
    `scale_bias` a second one, `scales`, has a number for each row that its bias is multiplied by.
    Parameters are those of `minifloat.GroupedLinear`, and it computes the same.
    """

    forward_keywords = ("output", "grad_input")
    module_type = "grouped_linear"
    _slot_counts = {"forward": 2, "backward": 1}  # for each group

    def __init__(  # noqa: PLR0913  (the contract's signature)
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        delay_wgrad_compute: bool = False,
        scale_bias: bool = False,
    ) -> None:
        self.num_extra_inputs = 2 if scale_bias and bias else 1
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if dtype not in DTYPES:
            raise ValueError(f"GroupedLinear: dtype: got {dtype}; allowed: {DTYPES}")
        for name, value in (
            ("num_groups", num_groups),
            ("in_features", in_features),
            ("out_features", out_features),
        ):
            if isinstance(value, bool) or not hasattr(value, "__index__") or value < 1:
                raise ValueError(f"GroupedLinear: {name}: got {value!r}; an int >= 1 is needed")
        device = default_device(device)
        super().__init__(device)
        self._probe: Any = None  # while somebody looks at the operands
        self._counts: Tensor | None = None  # of the products that ran, while somebody counts
        self.delayed = DelayedState(device, num_groups)
        self.num_groups = self.num_gemms = num_groups
        self.in_features, self.out_features = in_features, out_features
        self.use_bias = bias
        self.single_grouped_weight = single_grouped_weight
        self.single_grouped_bias = single_grouped_bias and bias
        self.wgrad_store: Any = Later(delay_wgrad_compute)
        self._scale_bias = scale_bias and bias
        self._accumulate_into_main_grad = accumulate_into_main_grad
        self._init_recipe, self._preserve = STATE.init, STATE.preserve
        if single_grouped_weight and self._init_scales_by_history():
            raise RuntimeError(
                "GroupedLinear: single_grouped_weight inside quantized_model_init with delayed "
                "scaling: each group's weight has a live scale of its own; leave one of them out"
            )
        self._init_method = _uniform
        self._tracker = (rng_state_tracker_function, None)
        self._make_parameters(dtype, device)

    def extra_repr(self) -> str:
        return (
            f"num_groups={self.num_groups}, in_features={self.in_features}, "
            f"out_features={self.out_features}, bias={self.use_bias}"
        )

    def _order(self) -> list[tuple[str, int]]:
        return [(kind, i) for kind in ("weight", "bias") for i in range(self.num_groups)]

    # ---------------------------------------------------------------------------------- quantizers
    def num_quantizers(self, mode: str) -> int:
        return super().num_quantizers(mode) * self.num_groups

    def get_quantizer_roles(
        self, mode: str | None = None, *, fwd: bool = True, num_quantizers: int | None = None
    ) -> list[QuantizerRole | None] | None:
        """Roles of the quantizers of a mode, group by group; with `num_quantizers`, of one layer's
        slots."""
        made = super().get_quantizer_roles(mode, fwd=fwd, num_quantizers=num_quantizers)
        return made if num_quantizers is not None or made is None else made * self.num_groups

    def _made(self, mode: str, recipe: Recipe) -> list[Any]:
        """(input, weight) of each group, or its grad_output."""
        out: list[Any] = []
        roles = super().get_quantizer_roles(mode)
        for i in range(self.num_groups):
            state = RecipeState.create(
                recipe,
                mode=mode,
                num_quantizers=self._slot_counts[mode],
                device=self.delayed.scale_input.device,
                roles=roles,
            )
            made = state.make_quantizers()
            for slot, quantizer, delayed in zip(
                SLOTS[mode], made, (*state.delayed_slots, False), strict=False
            ):
                if delayed and isinstance(quantizer, Float8Quantizer):
                    scale, amax = self.delayed.live(slot)
                    quantizer.scale, quantizer.amax = scale[i : i + 1], amax[i : i + 1]
            out += made
        return out

    def _input_taker(self, after: Any, **kwargs: Any) -> Any:
        return None  # a quantizer of a whole tensor makes no groups

    def _grad_taker(self, before: Any, **kwargs: Any) -> Any:
        return None

    # ------------------------------------------------------------------------------ before a call
    def begin(
        self,
        *,
        requires_grad: bool,
        input_requires_grad: bool,
        autocast_dtype: torch.dtype | None,
    ) -> dict[str, Any]:
        if self._weights()[0].is_meta:
            self.reset_parameters()
        owners = self._weights()
        self._check_alike(owners)
        begun = self._begin()
        trains = [w.requires_grad for w in owners]
        of_bias = [b.requires_grad for b in self._biases()]
        needs = (
            requires_grad and input_requires_grad,
            requires_grad and True in trains,
            requires_grad and True in of_bias and not self._scale_bias,
        )
        seed = None
        if begun.plan.stochastic:
            seed = draw_seed(owners[0].device)
        into: tuple[Any, bool, bool | None] = (None, False, None)
        if self._accumulate_into_main_grad and needs[1]:
            into = self._main_grads(owners, "accumulate_into_main_grad")
        dtype = owners[0].dtype if autocast_dtype is None else autocast_dtype
        copies = None
        if begun.plan.w_row.layout[0] is torch.uint8:
            self._check_all_quantized(owners)
        if isinstance(owners[0], QUANTIZED) and begun.plan.w_row.layout[0] is torch.uint8:
            read = [self._read(w, dtype, begun.plan) for w in owners]
            copies = grouped.quantized_weights(read, needs[0])
        call = Call(
            begun.plan,
            needs,
            dtype,
            owners[0].dtype,
            self.in_features,
            begun.live,
            begun.slots if needs[0] or needs[1] else None,
            begun.group,
            copies,
            *into,
            seed,
            defer=self.wgrad_store.put if self._defers(needs[1]) else None,
            counts=self._counts,
            probe=self._probe,
        )
        return {"begun": begun, "call": call}

    def _fuses_wgrad(self) -> bool:
        return self._accumulate_into_main_grad

    def _defers(self, needs_wgrad: bool) -> bool:
        if not (self.wgrad_store.enabled and needs_wgrad):
            return False
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "GroupedLinear: delay_wgrad_compute inside torch.compile: a graph cannot leave its "
                "gradients for later; compile without it"
            )
        return True

    # ------------------------------------------------------------------------------------- a call
    def fuser_forward_compute(
        self, input_: Any, **fwd_kwargs: Any
    ) -> tuple[Any, Iterable[Iterable[Any]], Any]:
        y, saved = self.multiply(input_, None, fwd_kwargs)
        return y, [()], saved

    def multiply(self, input_: Any, again: Again | None, fwd_kwargs: Any) -> tuple[Any, Saved]:
        """(output, what to save); with `again`, what makes the input is saved instead of it."""
        kwargs = fwd_kwargs["basic_op_kwargs"][0]
        call, extra = kwargs["call"], fwd_kwargs["basic_op_extra_inputs"][0]
        x = self._rows(input_, call)
        sizes = self._sizes(extra[0], x.shape[0], x.device, "split_sizes")
        factors = self._factors(extra[1], x.shape[0]) if self._scale_bias else None
        bias = self._bias_matrix()
        if again is not None and not (call.needs[1] and call.probe is None):
            again = None
        if again is not None:
            call = _forgetful(call)
        fused = bias if factors is None else None
        weights, call = self._together(call)
        y, kept, _ = grouped.GroupedLinear.forward(call, (sizes, x, fused, *weights))
        if factors is not None:
            y = y + (bias[_owners(sizes, y.shape[0])] * factors[:, None]).to(y.dtype)
        y = y.reshape(*input_.shape[:-1], self.out_features)
        out = kwargs.get("output")
        if out is not None:
            self._check_buffer("output", _eager(out, "output"), y, y.shape)
            y = out.detach().copy_(y)
        if not fwd_kwargs["requires_grad"][0]:
            return y, Saved()
        made: tuple[Any, Any, Any] = (None, None, None)
        at = 0
        if again is not None:
            at = [i for i, t in enumerate(kept) if t is x][0]
            kept = [*kept[:at], None, *kept[at + 1 :]]
            live = call.live[0]
            made = (again.h, again.scales, None if live is None else live[0])
        of_bias = None if factors is None else bias
        more = [] if self.single_grouped_weight else watched(self._weights(), kept)
        saved = (*made, factors, of_bias, sizes, *more, *kept)
        return y, Saved(saved, len(kept), None if again is None else again.producer, at)

    def _rows(self, input_: Any, call: Call) -> Tensor:
        x: Tensor = plain(input_).to(call.dtype)
        if x.dim() < 2 or x.shape[-1] != self.in_features:
            raise ValueError(
                f"input: got shape {tuple(x.shape)}; [rows, in_features={self.in_features}] is "
                "needed"
            )
        return folded(x)

    def _factors(self, given: Tensor, rows: int) -> Tensor:
        if given.numel() != rows or not given.is_floating_point():
            raise ValueError(
                f"scales: got {given.dtype} of shape {tuple(given.shape)}; a floating-point number "
                f"for each of the {rows} rows is needed"
            )
        return given.reshape(-1)

    def _together(self, call: Call) -> tuple[list[Any], Call]:
        """The weights as `core.grouped` takes them, and the call."""
        owners = self._weights()
        if call.workspace is None:
            owners = [self._read(w, call.dtype, call.plan) for w in owners]
        return (owners, call) if self.single_grouped_weight else as_operands(owners, call)

    def fuser_forward_save_ctx(
        self, basic_op_ctxs: list[Any], input_: Any, tensors_to_save: Saved, **fwd_kwargs: Any
    ) -> None:
        ctx = basic_op_ctxs[0]
        kwargs = fwd_kwargs["basic_op_kwargs"][0]
        extra = fwd_kwargs["basic_op_extra_inputs"][0]
        ctx.call = kwargs["call"]
        ctx.held, ctx.producer, ctx.at = tensors_to_save[1:]
        ctx.shape = tuple(input_.shape)
        ctx.scaled = self._scale_bias and self._differentiates(1, extra[1])
        ctx.of_scales = tuple(extra[1].shape) if self._scale_bias else None
        ctx.buffer = kwargs.get("grad_input")
        ctx.save_for_backward(*tensors_to_save.tensors)

    # ----------------------------------------------------------------------------------- backward
    def fuser_backward(
        self, basic_op_ctxs: list[Any], grad_output: Any, *, basic_op_grad_extra_outputs: list[Any]
    ) -> tuple[Any, Iterable[Iterable[Any]], Iterable[Iterable[Any]]]:
        ctx = basic_op_ctxs[0]
        call = ctx.call
        h, by, scale, factors, bias, sizes = ctx.saved_tensors[:6]
        kept = list(ctx.saved_tensors[len(ctx.saved_tensors) - ctx.held :])
        g = folded(plain(grad_output).to(call.dtype))
        db = of_factors = None
        if factors is not None:
            db = sums((g * factors[:, None]).to(g.dtype), sizes)
            if ctx.scaled:
                rows = bias[_owners(sizes, g.shape[0])]
                of_factors = (g.float() * rows.float()).sum(1).to(factors.dtype)
                of_factors = of_factors.reshape(ctx.of_scales)
        if ctx.producer is not None:
            made = grouped.kept_input(scaled(h, by, ctx.producer), sizes, scale, call)
            kept = [*kept[: ctx.at], *made, *kept[ctx.at + 3 :]]
        del h
        _, dx, of_bias, dw = grouped.GroupedLinear.backward(call, 1, kept, (g,))
        if dx is not None:
            dx = dx.reshape(ctx.shape)
            if ctx.buffer is not None:
                self._check_buffer("grad_input", _eager(ctx.buffer, "grad_input"), dx, dx.shape)
                ctx.buffer.detach().copy_(dx)
                dx = ctx.buffer  # itself: a tensor that nobody else has would be kept as a .grad
        grads = self._grads(dw, of_bias if db is None else db)
        return dx, [grads], [(None, of_factors) if self._scale_bias else (None,)]

    def _grads(self, dw: Any, db: Any) -> list[Any]:
        """The parameters' gradients, in their order."""
        made: dict[str, Any] = {}
        for kind, whole in (("weight", dw), ("bias", db)):
            if whole is not None:
                made[kind] = whole
                made |= {f"{kind}{i}": part for i, part in enumerate(whole.unbind(0))}
        return [
            None if made.get(name) is None else made[name].to(p.dtype)
            for name, p in self.named_parameters(recurse=False)
        ]

    def repeats_input(self, recipe: Recipe | None) -> bool:
        """Whether backward can cast its input as forward did, from the input made again."""
        plan = self._plan_of(recipe)
        if plan.override == "dequantized" or plan.col_from_row[0]:
            return False
        return bool(plan.delayed[0] or plan.requantizes) and not plan.x_col.stochastic


def _uniform(weight: Tensor) -> Tensor:
    return nn.init.kaiming_uniform_(weight, a=math.sqrt(5.0))


def _owners(sizes: Tensor, rows: int) -> Tensor:
    """The group of each row."""
    row = torch.arange(rows, device=sizes.device)
    found = torch.searchsorted(torch.cumsum(sizes, 0), row, right=True)
    return found.clamp(max=sizes.shape[0] - 1)


def _forgetful(call: Call) -> Call:
    """The call, which keeps of its input at most the input itself, and a scale that stays."""
    x = call.live[0]
    if x is not None and call.needs[1]:
        call = call._replace(live=((scalars.snapshot(x[0]), x[1]), *call.live[1:]))
    return call._replace(save_input=True)


def _eager(buffer: Tensor, name: str) -> Tensor:
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            f"{name}: a caller's buffer inside torch.compile: a graph makes its own; leave it out"
        )
    return buffer
