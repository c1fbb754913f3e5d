"""`LayerNormLinear`: a norm and a linear layer, the norm made while it is cast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..core import collectives
from ..core.link import Tap
from ..parameters import default_device, default_init
from .normed import Normed
from .projection import is_quantized, refuse_unsupported, run
from .weighted import Weighted

__all__ = ["LayerNormLinear"]


class LayerNormLinear(Weighted, Normed):
    """`y = norm(x) w^T + bias`; see `docs/layers.md` for every argument.

    The parameters are `layer_norm_weight`, `layer_norm_bias`, `weight` and `bias`, all on this
    module.
    """

    weight: Any
    bias: Any

    def __init__(  # noqa: PLR0913  (the contract's signature)
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Any = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
        *,
        cache_weights: bool = False,
    ) -> None:
        nn.Module.__init__(self)
        where = f"LayerNormLinear({name})" if name else "LayerNormLinear"
        refuse_unsupported(
            where,
            ub_overlap_ag=ub_overlap_ag,
            ub_overlap_rs=ub_overlap_rs,
            ub_overlap_rs_dgrad=ub_overlap_rs_dgrad,
            ub_bulk_wgrad=ub_bulk_wgrad,
            ub_bulk_dgrad=ub_bulk_dgrad,
            ub_name=ub_name,
            symmetric_ar_type=symmetric_ar_type,
        )
        if parallel_mode == "row":
            raise NotImplementedError(
                f"{where}: parallel_mode='row': a norm needs all features of a token, and a "
                "row-parallel layer has a part of them; use 'column', or Linear"
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
            cache_weights=cache_weights,
        )
        self.return_bias = return_bias
        self.return_layernorm_output = return_layernorm_output or return_layernorm_output_gathered
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        self._init_method = default_init if init_method is None else init_method
        self._tracker = (get_rng_state_tracker, None)
        dtype = torch.get_default_dtype() if params_dtype is None else params_dtype
        self._make_norm(
            in_features, eps, normalization, zero_centered_gamma, self.sequence_parallel, dtype,
            device, where,
        )  # fmt: skip
        self._make_parameters(
            in_features, out_features, bias, dtype, parameters_split, device, where
        )

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initialise; with `defer_init` only mark the parameters. Meta parameters are made real."""
        super().reset_parameters(defer_init)
        self._reset_norm()

    def extra_repr(self) -> str:
        text = f"in_features={self.in_features}, out_features={self.out_features}"
        return text + f", bias={self.use_bias}, normalization={self.normalization}"

    def forward(
        self,
        inp: Any,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        """`inp[..., in_features] -> [..., out_features]`.

        The result is the output, then the bias with `return_bias`, then the norm's output with
        `return_layernorm_output`: a tuple if there is more than one. Arguments are `Linear`'s.
        """
        weight = self._joined_weight()
        owners = self._owners(weight)
        bias = self._bias()
        inp = self._check_input(inp, weight)
        if is_quantized(inp):
            inp = inp.dequantize()
        first = is_first_microbatch
        begun = self._begin(self._refuser(inp, weight, owners, first, fp8_output, fp8_grad))
        plan = begun.plan
        self._advise(begun, inp)
        weight = self._weight(weight, inp.dtype, begun)
        grads = torch.is_grad_enabled()
        fused = None if self.return_bias else bias
        needs_norm = self._norm_needs(inp)
        needs = (
            True in needs_norm,
            grads and weight.requires_grad,
            grads and fused is not None and fused.requires_grad,
        )
        call = self._call(begun, needs, inp, weight, owners, first, fp8_grad)
        links: tuple[Any, ...] = ()
        if call.grad_input is not None:  # the gradient of the norm's input ends the backward
            links = ((collectives.QuantizeGrad, call),)
            call = call._replace(grad_input=None, slots=None)
        if not (self._collects() or self.return_layernorm_output):
            call = call._replace(hands=(False, True))  # the norm's gradient reads dx next
        inner = self._links(call, inp.shape)
        lazy = not self.return_layernorm_output and begun.calibration is None
        links = (*links, self._norm_link(inp, plan, lazy), *self._tapped(inner))
        params = (self.layer_norm_weight, self.layer_norm_bias, weight, fused)
        y = run(links, inp, params, True in needs)
        ln_out = None
        if self.return_layernorm_output:
            y, ln_out = y
        if begun.calibration is not None:
            self._calibrate_normed(inp, weight, begun)
        if fp8_output:
            y = self._output_quantizer(begun).quantize(y)
        self._end(begun)
        extra = (*((bias,) if self.return_bias else ()), *(() if ln_out is None else (ln_out,)))
        return (y, *extra) if extra else y

    def _tapped(self, links: tuple[Any, ...]) -> tuple[Any, ...]:
        """`links` of the linear layer, the norm's output returned before or after its gather."""
        if not self.return_layernorm_output:
            return links
        at = len(links) - 1 if self.return_layernorm_output_gathered else 0
        return (*links[:at], (Tap, None), *links[at:])

    def _calibrate_normed(self, inp: Any, weight: Any, begun: Any) -> None:
        with torch.no_grad():
            op, call = self._norm_link(inp, begun.plan, False)
            x = inp.reshape(-1, inp.shape[-1])
            y, _ = op.compute(x, (self.layer_norm_weight, self.layer_norm_bias), call)
        self._calibrate(y, weight, begun)
