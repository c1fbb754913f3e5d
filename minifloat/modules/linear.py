"""`Linear`: an `nn.Linear` that trains by a recipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..parameters import default_device, default_init
from .projection import is_quantized, refuse_unsupported, run
from .weighted import Weighted

__all__ = ["Linear"]


class Linear(Weighted, nn.Linear):
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
        refuse_unsupported(
            where,
            ub_overlap_ag=ub_overlap_ag,
            ub_overlap_rs=ub_overlap_rs,
            ub_overlap_rs_dgrad=ub_overlap_rs_dgrad,
            ub_bulk_dgrad=ub_bulk_dgrad,
            ub_bulk_wgrad=ub_bulk_wgrad,
            ub_name=ub_name,
            symmetric_ar_type=symmetric_ar_type,
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
            cache_weights=cache_weights,
        )
        self.return_bias = return_bias
        self._init_method = default_init if init_method is None else init_method
        self._tracker = (get_rng_state_tracker, rng_tracker_name)
        dtype = torch.get_default_dtype() if params_dtype is None else params_dtype
        self._make_parameters(
            in_features, out_features, bias, dtype, parameters_split, device, where
        )

    @classmethod
    def adopt(cls, module: nn.Linear, name: str | None = None) -> None:
        """Make a Linear of an `nn.Linear`: the same object, parameters, hooks and attributes."""
        device = module.weight.device
        module.__class__ = cls
        assert isinstance(module, cls)
        out = module.out_features
        module._setup_projection(name=name, device=device, where="Linear")
        module._init_recipe, module._preserve = None, False
        module.return_bias = False
        module._init_method, module._tracker = default_init, (None, None)
        module._splits = {"": out}

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
        weight = self._joined_weight()
        owners = self._owners(weight)
        bias = self._bias()
        inp = self._check_input(inp, weight)
        first = is_first_microbatch
        begun = self._begin(self._refuser(inp, weight, owners, first, fp8_output, fp8_grad))
        plan = begun.plan
        self._advise(begun, inp)
        weight = self._weight(weight, inp.dtype, begun)
        if is_quantized(inp):
            inp = self._check_quantized_input(inp, plan, self._needs_col(weight, plan))
        if begun.calibration is not None:
            self._calibrate(inp, weight, begun)
        grads = torch.is_grad_enabled()
        row = self.parallel_mode == "row"
        fused = None if self.return_bias or row else bias
        needs = (
            grads and inp.requires_grad,
            grads and weight.requires_grad,
            grads and fused is not None and fused.requires_grad,
        )
        links = self._chain(begun, needs, inp, weight, owners, first, fp8_grad)
        y = run(links, inp, (weight, fused), True in needs)
        if row and bias is not None and not self.return_bias:
            y = y + bias
        if fp8_output:
            y = self._output_quantizer(begun).quantize(y)
        self._end(begun)
        return (y, bias) if self.return_bias else y
