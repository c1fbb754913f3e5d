"""`BasicLinear`: the quantized linear operation, without a bias."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ...core import collectives
from ...core.linear import Call, Gradient, Linear, fprop, stored
from ...inputs import draw_seed
from ...parameters import (
    check_recipe_of,
    check_size,
    default_device,
    main_grad,
    make_writable,
    quantized_parameter,
    quantized_weight,
)
from ...recipe.autocast import STATE
from ...recipe.plan import Plan
from ...tensors import QuantizedTensorStorage
from ..context import OperationContext
from ..group import group_of
from ..handover import GradientTaker, Handed, InputTaker, takes_gradients, takes_inputs
from ..quantized_operation import QuantizedOperation
from . import functional
from .values import folded, plain

__all__ = ["BasicLinear"]

TP_MODES = (None, "column", "row")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class BasicLinear(QuantizedOperation):
    """`y = x w^T` of `x[..., in_features]` and `weight[out_features, in_features]`.

    It computes with `core.linear`, as `minifloat.Linear` does; made inside `quantized_model_init`,
    it holds a quantized weight, as that does. Tensor-parallel, it has this rank's
    columns ("column") or rows ("row") of the weight, and communicates as `sequence_parallel` says.
    """

    forward_keywords = ()
    _slot_counts = {"forward": 2, "backward": 1}

    def __init__(  # noqa: PLR0913  (the contract's signature)
        self,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: Any = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        userbuffers_options: dict[str, Any] | None = None,
    ) -> None:
        if userbuffers_options is not None:
            raise NotImplementedError(
                f"BasicLinear: userbuffers_options={userbuffers_options!r}: userbuffers are not "
                "supported; leave it out"
            )
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if dtype not in DTYPES:
            raise ValueError(f"BasicLinear: dtype: got {dtype}; allowed: {DTYPES}")
        if tensor_parallel_mode not in TP_MODES:
            raise ValueError(
                f"BasicLinear: tensor_parallel_mode: got {tensor_parallel_mode!r}; allowed: None, "
                "'column', 'row'"
            )
        device = default_device(device)
        super().__init__(device)
        self._init_recipe, self._preserve = STATE.init, STATE.preserve
        self._probe: Any = None  # while somebody looks at the operands
        self._counts: torch.Tensor | None = None  # of the products that ran, while somebody counts
        tp = None if tensor_parallel_mode is None else group_of(tensor_parallel_group)
        self._tp = tp
        self.tensor_parallel_mode = tensor_parallel_mode if tp is not None else None
        self.tensor_parallel_group = tensor_parallel_group
        self.tensor_parallel_size = 1 if tp is None else tp.size
        self.sequence_parallel = sequence_parallel and tp is not None
        self.in_features, self.out_features = in_features, out_features
        column = self.tensor_parallel_size if tensor_parallel_mode == "column" else 1
        row = self.tensor_parallel_size if tensor_parallel_mode == "row" else 1
        for size, ways, argument in (
            (out_features, column, "out_features"),
            (in_features, row, "in_features"),
        ):
            check_size(size, "BasicLinear", argument)
            if size % ways:
                raise ValueError(
                    f"BasicLinear: {argument}={size}: the {ways} ranks of the group do not divide "
                    "it"
                )
        self.local_in_features, self.local_out_features = in_features // row, out_features // column
        self._rng_state_tracker_function = rng_state_tracker_function
        self._accumulate_into_main_grad = accumulate_into_main_grad
        shape = (self.local_out_features, self.local_in_features)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        if device.type != "meta":
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Kaiming-uniform as in `nn.Linear`; a meta weight is made real."""
        if self.weight.is_meta:
            self.delayed.materialise(default_device(None))
        make_writable(self, self._init_recipe is not None)
        tracker = self._rng_state_tracker_function
        if tracker is None:
            nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5.0))
        else:
            with tracker().fork():
                nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5.0))
        self.delayed.reset()
        if self._init_recipe is not None:
            roles = self.get_quantizer_roles(fwd=True, num_quantizers=3)
            self.weight = quantized_parameter(
                self.weight, self._init_recipe, roles, self.delayed, self._preserve
            )

    @property
    def primary_weights_in_fp8(self) -> bool:
        """Whether the weight itself is quantized."""
        return self._init_recipe is not None

    # ------------------------------------------------------------------------------ before a call
    def begin(
        self,
        *,
        requires_grad: bool,
        input_requires_grad: bool,
        autocast_dtype: torch.dtype | None,
    ) -> dict[str, Any]:
        if self.weight.is_meta:
            self.reset_parameters()
        weight = self.weight
        coded = isinstance(weight, QuantizedTensorStorage)
        begun = self._begin(self._refuse if coded else None)
        needs = (
            requires_grad and input_requires_grad,
            requires_grad and weight.requires_grad,
            False,
        )
        seed = None
        if begun.plan.stochastic:
            seed = draw_seed(weight.device)
        into: tuple[Any, bool, bool | None] = (None, False, None)
        if self._accumulate_into_main_grad and needs[1]:
            into = main_grad(weight, type(self).__name__, "accumulate_into_main_grad")
        call = Call(
            begun.plan,
            needs,
            weight.dtype if autocast_dtype is None else autocast_dtype,
            weight.dtype,
            self.local_in_features,
            begun.live,
            begun.slots if needs[0] or needs[1] else None,
            begun.group,
            None,
            *into,
            seed,
            counts=self._counts,
            probe=self._probe,
        )
        return {"begun": begun, "call": call}

    def _refuse(self, plan: Plan) -> None:
        """Raise for a plan that multiplies no such weight, before anything is cast for it."""
        check_recipe_of(self.weight, plan, self._where())

    def takes_inputs(self, recipe: Any) -> bool:
        """Whether the previous operation may hand it quantized operands."""
        return recipe is not None and self._takes_input(recipe.plan(*self._roles(recipe)))

    def repeats_input(self, recipe: Any) -> bool:
        """Whether backward can make the quantized input again, from what it was computed of."""
        if recipe is None or self.tensor_parallel_mode is not None:
            return False
        plan = recipe.plan(*self._roles(recipe))
        return self._takes_input(plan) and not plan.x_col.stochastic

    def takes_gradients(self, recipe: Any) -> bool:
        """Whether the next operation may hand it a quantized gradient."""
        return recipe is not None and self._takes_grad(recipe.plan(*self._roles(recipe)))

    def _takes_input(self, plan: Any) -> bool:
        gathers = self.tensor_parallel_mode == "column" and self.sequence_parallel
        return takes_inputs(plan) and not gathers

    def _takes_grad(self, plan: Any) -> bool:
        return takes_gradients(plan) and self.tensor_parallel_mode != "row"

    def _input_taker(self, after: Any, **kwargs: Any) -> Any:
        call = kwargs["call"]
        return InputTaker(call) if self._takes_input(call.plan) else None

    def _grad_taker(self, before: Any, **kwargs: Any) -> Any:
        call = kwargs["call"]
        return GradientTaker(call) if self._takes_grad(call.plan) else None

    # ------------------------------------------------------------------------------------- a call
    def op_forward_compute(self, input_: Any, **kwargs: Any) -> tuple[Any, Any]:
        return self.multiply(input_, None, self._given(input_, kwargs)["call"])

    def op_forward_save_ctx(
        self, ctx: OperationContext, input_: Any, tensors_to_save: Any, **kwargs: Any
    ) -> None:
        ctx.call = self._given(input_, kwargs)["call"]
        ctx.lead = input_.lead if isinstance(input_, Handed) else tuple(input_.shape[:-1])
        ctx.save_for_backward(*tensors_to_save)

    def op_backward(self, ctx: OperationContext, grad_output: Any) -> tuple[Any, Iterable[Any]]:
        return self.differentiate(ctx, grad_output, ctx.call)

    def differentiate(
        self, ctx: OperationContext, grad_output: Any, call: Call
    ) -> tuple[Any, Iterable[Any]]:
        """(gradient of the input, of the parameter); `call` is the context's, or made of it."""
        assert ctx.saved_tensors is not None
        if isinstance(grad_output, Gradient):
            g: Any = grad_output
        else:
            g = folded(plain(grad_output).to(call.dtype))
        g, (dw, _) = self._unlinked(g, list(ctx.saved_tensors), call)
        if g is not None:
            g = g.reshape(*ctx.lead, g.shape[-1])
        return g, (dw,)

    def multiply(self, input_: Any, bias: Any, call: Call) -> tuple[Any, Any]:
        """(`x w^T + bias`, and what `call` adds, tensors to save)."""
        weight = self.weight_of(call)
        if isinstance(input_, Handed):
            return self._of_operands(input_, weight, bias, call)
        x = plain(input_)
        if x.dim() == 0 or x.shape[-1] != self.local_in_features:
            raise ValueError(
                f"input: got shape {tuple(x.shape)}; its last dim must be in_features="
                f"{self.local_in_features}"
            )
        lead = tuple(x.shape[:-1])
        # Sizes are asked of the input: 2.11 loses a static size of what a graph made on the way.
        y: Any = folded(x).to(call.dtype)
        saved: tuple[Any, ...] = ()
        for link, argument in self._links(call, lead):
            params = (weight, bias) if link is Linear else ()
            y, kept = link.compute(y, params, argument)
            saved = (*saved, *kept)
            lead = link.leading(lead, argument)
        return y.reshape(*lead, y.shape[-1]), saved

    def weight_of(self, call: Call) -> Any:
        """The weight as the call's plan reads it."""
        weight: Any = self.weight
        if isinstance(weight, QuantizedTensorStorage):
            weight = quantized_weight(weight, call.plan, self._where())
        if call.plan.w_row.layout[0] is None and weight.dtype != call.dtype:
            return weight.to(call.dtype)
        return weight

    def output_shape(self, input_: Any) -> tuple[int, ...]:
        """Of this rank's part of `x w^T`."""
        lead = input_.lead if isinstance(input_, Handed) else tuple(input_.shape[:-1])
        if self._tp is not None:
            for link, argument in self._links(None, lead):
                lead = link.leading(lead, argument)
        return (*lead, self.local_out_features)

    def _of_operands(self, handed: Handed, weight: Any, bias: Any, call: Call) -> tuple[Any, Any]:
        y, kept_w = fprop(handed.row, weight, bias, call)
        lead = handed.lead
        kept_x = (None, None, None) if handed.col is None else stored(handed.col)
        if self._tp is not None:
            for link, argument in self._links(call, lead)[1:]:
                if link is not Linear:
                    y, _ = link.compute(y, (), argument)
                    lead = link.leading(lead, argument)
        return y.reshape(*lead, y.shape[-1]), (*kept_x, *kept_w)

    def _unlinked(self, g: Any, saved: list[Any], call: Call) -> tuple[Any, Any]:
        found: Any = (None, None)
        for link, argument in reversed(self._links(call, None)):
            if link is Linear:
                g, found = link.backward(g, saved, argument)
            else:
                g, _ = link.backward(g, [], argument)
        return g, found

    def _links(self, call: Any, lead: Any) -> list[tuple[Any, Any]]:
        """The linear operation between its collectives; `lead` are the input's dims, if known."""
        tp, mode = self._tp, self.tensor_parallel_mode
        if tp is None or mode is None:
            return [(Linear, call)]
        sequence = self.sequence_parallel
        if mode == "column":
            return [(collectives.Gather if sequence else collectives.Replicate, tp), (Linear, call)]
        if sequence and lead is not None and (not lead or lead[0] % tp.size):
            raise ValueError(
                f"input: got leading dims {tuple(lead)}; sequence_parallel splits the first one, "
                f"which the {tp.size} ranks do not divide"
            )
        last = collectives.ReduceScatter if sequence else collectives.AllReduce
        return [(Linear, call), (last, tp)]

    # The operation without its module; names and arguments are Transformer Engine's.
    _functional_forward = staticmethod(functional.forward)
    _functional_backward = staticmethod(functional.backward)

    def extra_repr(self) -> str:
        text = f"in_features={self.local_in_features}, out_features={self.local_out_features}"
        mode = self.tensor_parallel_mode
        return text if mode is None else f"{text}, tensor_parallel_mode={mode!r}"
