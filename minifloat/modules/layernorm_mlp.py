"""`LayerNormMLP`: a norm, a linear layer, an activation, a linear layer.

The activation is never in memory in high precision: what fc2 multiplies is made of fc1's output
while it is cast, and made again in backward, together with the gradient that fc1 multiplies.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..core.activation import ActivatedCall, ActivatedLinear, Activation, ActivationCall, fusable
from ..core.linear import Call, Linear
from ..core.link import Tap
from ..core.recompute import Recomputed, RecomputedCall, RecomputedPair
from ..module import Module
from ..parameters import (
    check_size,
    default_device,
    default_init,
    initialise,
    make_writable,
    quantized_parameter,
)
from ..producer import activation as activation_of
from ..recipe import Recipe
from ..recipe.delayed import DelayedState
from ..recipe.plan import Plan
from ..recipe.roles import QuantizerRole
from ..tensors import QuantizedTensorStorage
from .normed import Normed
from .projection import Projection, refuse_unsupported, run

__all__ = ["LayerNormMLP"]

Refuser = Callable[[Plan], None]


class _Part(Projection):
    """fc1 or fc2: everything of it but the parameters, which the MLP has."""

    def __init__(self, sizes: tuple[int, int], where: str, **options: Any) -> None:
        nn.Module.__init__(self)
        self._owner = where
        self._setup_projection(where=where, **options)
        self._shard(*sizes, where)

    def _where(self) -> str:
        return f"{self._owner}: {(self.name or '').rsplit('.', 1)[-1]}"


class LayerNormMLP(Module, Normed):
    """`y = act(norm(x) w1^T + b1) w2^T + b2`; see `docs/layers.md` for every argument.

    The parameters are `layer_norm_weight`, `layer_norm_bias`, `fc1_weight`, `fc1_bias`,
    `fc2_weight` and `fc2_bias`, all on this module; `fc1` and `fc2` hold what else the two layers
    keep. With `checkpoint` the norm, fc1 and the activation are computed again in backward, which
    keeps the input alone.
    """

    fc1_weight: Any
    fc1_bias: Any
    fc2_weight: Any
    fc2_bias: Any

    def __init__(  # noqa: PLR0913  (the contract's signature)
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        return_bias: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        activation_params: dict[str, Any] | None = None,
        output_layer_init_method: Callable[[Tensor], Any] | None = None,
        fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        set_parallel_mode: bool = False,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        ub_overlap_ag: bool = False,
        name: str | None = None,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        checkpoint: bool = False,
        *,
        cache_weights: bool = False,
    ) -> None:
        nn.Module.__init__(self)
        where = f"LayerNormMLP({name})" if name else "LayerNormMLP"
        refuse_unsupported(
            where,
            ub_overlap_ag=ub_overlap_ag,
            ub_overlap_rs=ub_overlap_rs,
            ub_overlap_rs_dgrad=ub_overlap_rs_dgrad,
            ub_bulk_dgrad=ub_bulk_dgrad,
            ub_bulk_wgrad=ub_bulk_wgrad,
            symmetric_ar_type=symmetric_ar_type,
        )
        check_size(hidden_size, where, "hidden_size")
        check_size(ffn_hidden_size, where, "ffn_hidden_size")
        self.name = name
        self.activation, self.checkpoint = activation, checkpoint
        self._act = _activation(activation, activation_params, where)
        self.return_bias = return_bias
        self.return_layernorm_output = return_layernorm_output or return_layernorm_output_gathered
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        self.set_parallel_mode = set_parallel_mode
        device = default_device(device)
        dtype = torch.get_default_dtype() if params_dtype is None else params_dtype
        wide = 2 * ffn_hidden_size if self._act.gated else ffn_hidden_size
        self.fc1, self.fc2 = (
            _Part(
                sizes,
                where,
                name=f"{name}.{part}" if name else part,
                device=device,
                parallel_mode=mode if set_parallel_mode else None,
                sequence_parallel=sequence_parallel,
                tp_group=tp_group,
                tp_size=tp_size,
                fuse_wgrad_accumulation=fuse_wgrad_accumulation,
                delay_wgrad_compute=delay_wgrad_compute,
                cache_weights=cache_weights,
            )
            for part, mode, sizes in (
                ("fc1", "column", (hidden_size, wide)),
                ("fc2", "row", (ffn_hidden_size, hidden_size)),
            )
        )
        # What one part hands to the other is of the other's role.
        self.fc1._output_role = QuantizerRole("linear", "input", self.fc2.name or "")
        self.fc2._grad_input_role = QuantizerRole("linear", "grad_output", self.fc1.name or "")
        self.hidden_size, self.ffn_hidden_size = hidden_size, ffn_hidden_size
        self.tp_size = self.fc1.tp_size
        self.sequence_parallel = self.fc1.sequence_parallel and set_parallel_mode
        first = default_init if init_method is None else init_method
        last = first if output_layer_init_method is None else output_layer_init_method
        self._init_methods = (first, last)
        self._tracker = get_rng_state_tracker
        self._wgrad_hooks: list[Callable[[], Any]] = []
        self._make_norm(
            hidden_size, eps, normalization, zero_centered_gamma, self.sequence_parallel, dtype,
            device, where,
        )  # fmt: skip
        for part, of in self._parts():
            shape = (of.out_features, of.in_features)
            weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
            self.register_parameter(f"{part}_weight", weight)
            vector = torch.zeros(of.out_features, dtype=dtype, device=device)
            self.register_parameter(f"{part}_bias", nn.Parameter(vector) if bias else None)
        self.reset_parameters(defer_init=device.type == "meta")
        if cache_weights:
            for part, of in self._parts():
                of._preallocate(getattr(self, f"{part}_weight"))

    def _parts(self) -> tuple[tuple[str, _Part], tuple[str, _Part]]:
        return ("fc1", self.fc1), ("fc2", self.fc2)

    # ------------------------------------------------------------------------------ parameters
    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initialise; with `defer_init` only mark the parameters. Meta parameters are made real."""
        if not defer_init:
            make_writable(self, self.fc1._init_recipe is not None)
            for (part, of), method in zip(self._parts(), self._init_methods, strict=True):
                self._initialise(part, of, method)
        self._reset_norm()
        for part, of in self._parts():
            row = of.parallel_mode == "row"
            w, b = getattr(self, f"{part}_weight"), getattr(self, f"{part}_bias")
            w.tensor_model_parallel = True
            w.partition_dim, w.partition_stride = int(row), 1
            if of.wgrad_store.enabled:
                w.skip_backward_post_hook = True
            if b is not None and row:
                b.sequence_parallel = self.sequence_parallel
            elif b is not None and of.parallel_mode == "column":
                b.tensor_model_parallel = True
                b.partition_dim, b.partition_stride = 0, 1

    def _initialise(self, part: str, of: _Part, method: Callable[[Tensor], Any]) -> None:
        of.delayed.materialise(default_device(None))
        weight, bias = getattr(self, f"{part}_weight"), getattr(self, f"{part}_bias")
        initialise([weight], method, self._tracker, None, self._where())
        if bias is not None:
            with torch.no_grad():
                bias.zero_()
        of.delayed.reset()
        if of._init_recipe is not None:
            roles = of.get_quantizer_roles(fwd=True, num_quantizers=3)
            made = quantized_parameter(weight, of._init_recipe, roles, of.delayed, of._preserve)
            self.register_parameter(f"{part}_weight", made)

    @property
    def use_bias(self) -> bool:
        """Whether there is a bias of fc2: one may be given, or taken away, later."""
        return self.fc2_bias is not None

    @property
    def apply_bias(self) -> bool:
        """Whether the output has it."""
        return self.use_bias and not self.return_bias

    @property
    def recipe(self) -> Recipe | None:
        """Of both layers, where no autocast is active."""
        return self.fc1.recipe

    @recipe.setter
    def recipe(self, recipe: Recipe | None) -> None:
        for _, of in self._parts():
            of.recipe = recipe

    @property
    def primary_weights_in_fp8(self) -> bool:
        """Whether the weights themselves are quantized."""
        return self.fc1.primary_weights_in_fp8

    def set_tensor_parallel_group(self, group: Any) -> None:
        """The ranks over which tensor parallelism runs; None takes them away."""
        for _, of in self._parts():
            of.set_tensor_parallel_group(group)

    def get_quantizer_roles(
        self, *, fwd: bool, num_quantizers: int
    ) -> list[QuantizerRole | None] | None:
        """Those of fc1, then those of fc2."""
        half = num_quantizers // 2
        found = [of.get_quantizer_roles(fwd=fwd, num_quantizers=half) for _, of in self._parts()]
        return [role for roles in found for role in roles or ()]

    @property
    def output_quantizer_role(self) -> QuantizerRole | None:
        """Who consumes the output; None: nobody in particular."""
        return self.fc2.output_quantizer_role

    @output_quantizer_role.setter
    def output_quantizer_role(self, role: QuantizerRole | None) -> None:
        self.fc2.output_quantizer_role = role

    @property
    def grad_input_quantizer_role(self) -> QuantizerRole | None:
        """Who consumes the gradient of the input."""
        return self.fc1.grad_input_quantizer_role

    @grad_input_quantizer_role.setter
    def grad_input_quantizer_role(self, role: QuantizerRole | None) -> None:
        self.fc1.grad_input_quantizer_role = role

    def extra_repr(self) -> str:
        text = f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}"
        text += f", bias={self.use_bias}, activation={self.activation}"
        return text + f", normalization={self.normalization}"

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        for _, of in self._parts():
            of._cached, of._cached_version = None, None  # it is not moved along
        return super()._apply(fn, recurse)

    def _scaled_weights(self) -> list[tuple[Any, DelayedState, None]]:
        return [(getattr(self, f"{part}_weight"), of.delayed, None) for part, of in self._parts()]

    # ------------------------------------------------------------------------------- forward
    def forward(self, inp: Any, is_first_microbatch: bool | None = None) -> Any:
        """`inp[..., hidden_size] -> [..., hidden_size]`.

        The result is the output, then the bias of fc2 with `return_bias`, then the norm's output
        with `return_layernorm_output`: a tuple if there is more than one. `is_first_microbatch` is
        `Linear`'s, for both weights.
        """
        fc1, fc2 = self.fc1, self.fc2
        w1, w2 = self.fc1_weight, self.fc2_weight
        b1, b2 = self.fc1_bias, self.fc2_bias
        inp = self._check(inp, w1)
        refuse1 = fc1._refuser(inp, w1, [w1], is_first_microbatch)
        refuse2 = fc2._refuser(None, w2, [w2], is_first_microbatch)
        # What fc2 refuses, before fc1 has begun.
        begun1 = fc1._begin(refuse1 if refuse2 is None else partial(_refuse, refuse1, refuse2, fc2))
        begun2 = fc2._begin(refuse2)
        fc1._advise(begun1, inp)
        fc2._advise(begun2, inp)
        weight1 = fc1._weight(w1, inp.dtype, begun1)
        weight2 = fc2._weight(w2, inp.dtype, begun2)
        row = fc2.parallel_mode == "row" and fc2.tp_size > 1
        fused2 = None if self.return_bias or row else b2
        grads = torch.is_grad_enabled()
        needs_norm = self._norm_needs(inp)
        needs1 = (
            True in needs_norm,
            grads and weight1.requires_grad,
            grads and b1 is not None and b1.requires_grad,
        )
        needs2 = (
            True in needs1,
            grads and weight2.requires_grad,
            grads and fused2 is not None and fused2.requires_grad,
        )
        call1 = fc1._call(begun1, needs1, inp, weight1, [w1], is_first_microbatch)
        call2 = fc2._call(begun2, needs2, inp, weight2, [w2], is_first_microbatch)
        lazy = not self.return_layernorm_output
        norm = self._norm_link(inp, begun1.plan, lazy)
        links = self._chain(norm, call1, call2, inp)
        params = (self.layer_norm_weight, self.layer_norm_bias, weight1, b1, weight2, fused2)
        if begun1.calibration is not None or begun2.calibration is not None:
            self._calibrate(inp, norm, call1, (weight1, b1, weight2), (begun1, begun2))
        y = run(links, inp, params, True in needs2)
        fc1._end(begun1)
        fc2._end(begun2)
        ln_out = None
        if self.return_layernorm_output:
            y, ln_out = y
        if row and b2 is not None and not self.return_bias:
            y = y + b2
        extra = (*((b2,) if self.return_bias else ()), *(() if ln_out is None else (ln_out,)))
        return (y, *extra) if extra else y

    def _chain(self, norm: Any, call1: Call, call2: Call, inp: Any) -> tuple[Any, ...]:
        # The activation, its gradient and the norm's multiply by what a product leaves to them.
        normed = not (self.fc1._collects() or self.return_layernorm_output)
        call1 = call1._replace(hands=(True, normed))
        call2 = call2._replace(hands=(False, True))
        first = self.fc1._links(call1, inp.shape)
        second = self.fc2._links(call2, self._gathered(inp.shape))
        after = second[1:]  # a collective
        links: tuple[Any, ...] = (norm, *first)
        last: Any = None
        if fusable(call1, call2):
            last = (ActivatedLinear, ActivatedCall(self._act, call1, call2))
        else:
            links = (*links, (Activation, ActivationCall(self._act, call2.dtype)), second[0])
        shown: tuple[Any, ...] = ()
        op: Any = Recomputed
        if self.return_layernorm_output:  # it exists anyway: what follows is computed again
            at = len(first) if self.return_layernorm_output_gathered else 1
            shown, links, op = (*links[:at], (Tap, None)), links[at:], RecomputedPair
        if self.checkpoint:
            return (*shown, (op, RecomputedCall(links, last)), *after)
        return (*shown, *links, *(() if last is None else (last,)), *after)

    def _gathered(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of what fc1 multiplies: the rows of all ranks, if they share a sequence."""
        return (shape[0] * self.tp_size, *shape[1:]) if self.sequence_parallel else shape

    def _check(self, inp: Any, weight: Any) -> Any:
        if not isinstance(inp, Tensor):
            raise TypeError(f"{self._where()}: inp: got {type(inp).__name__}; a tensor is needed")
        if inp.dim() == 0 or inp.shape[-1] != self.hidden_size:
            raise ValueError(
                f"{self._where()}: inp: got shape {tuple(inp.shape)}; its last dim must be "
                f"hidden_size={self.hidden_size}"
            )
        inp = self.fc1._check_input(inp, weight)
        return inp.dequantize() if isinstance(inp, QuantizedTensorStorage) else inp

    def _calibrate(
        self, inp: Any, norm: Any, call1: Call, params: tuple[Any, ...], begun: tuple[Any, Any]
    ) -> None:
        """Record what the two layers would quantize, for a recipe that scales by history."""
        weight1, b1, weight2 = params
        op, call = norm
        silent = call1._replace(needs=(False,) * 3, counts=None, probe=None)
        links = (op, call._replace(lazy=False)), (Tap, None), (Linear, silent)
        first = (self.layer_norm_weight, self.layer_norm_bias, weight1, b1)
        with torch.no_grad():
            h, y = run(links, inp, first, False)
            h = h.reshape(-1, h.shape[-1])
            act, _ = Activation.compute(h, (), ActivationCall(self._act, inp.dtype))
            self.fc1._calibrate(y, weight1, begun[0])
            self.fc2._calibrate(act.value(), weight2, begun[1])

    # --------------------------------------------------------------------------- later wgrad
    def need_backward_dw(self) -> bool:
        """Whether `backward_dw` has anything to do with this module."""
        return any(
            of.wgrad_store.expects([getattr(self, f"{part}_weight")]) for part, of in self._parts()
        )

    def backward_dw(self) -> None:
        """Compute the weights' gradients that the oldest backward left: fc2's, then fc1's."""
        if not self.need_backward_dw():
            return
        # A frozen weight leaves none; where none is left, fc2 says that there was no backward.
        left = [part for part, of in self._parts() if of.wgrad_store.queue] or ["fc2"]
        for part, of in reversed(self._parts()):
            if part in left:
                of._backward_dw([getattr(self, f"{part}_weight")], [of.out_features])
        for hook in self._wgrad_hooks:
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], Any]) -> None:
        """`hook()` runs after each `backward_dw`."""
        self._wgrad_hooks.append(hook)


def _refuse(first: Refuser | None, second: Refuser, fc2: Projection, plan: Plan) -> None:
    """Raise for what fc1, which `plan` is of, or fc2 would find wrong on its way."""
    if first is not None:
        first(plan)
    second(fc2._plan_of(fc2._in_force()))


def _activation(name: str, params: dict[str, Any] | None, where: str) -> Any:
    try:
        return activation_of(name, **(params or {}))
    except (TypeError, ValueError) as error:
        given = f"activation={name!r}" + (f", activation_params={params!r}" if params else "")
        raise type(error)(f"{where}: {given}: {error}") from None
