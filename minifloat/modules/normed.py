"""`Normed`: the parameters of a norm inside a module, and its link."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from ..core.norm import Norm, NormCall
from ..inputs import INPUT_DTYPES
from ..parameters import check_eps, check_size
from ..recipe.plan import Plan
from .projection import ModeError

__all__ = ["Normed"]

NORMS = ("LayerNorm", "RMSNorm")


class Normed(nn.Module):
    """`layer_norm_weight` and, for LayerNorm, `layer_norm_bias`: names on the module itself."""

    eps: float
    normalization: str
    zero_centered_gamma: bool
    layer_norm_weight: nn.Parameter
    layer_norm_bias: nn.Parameter | None
    _where: Any  # how messages call the module

    def _make_norm(
        self,
        size: int,
        eps: float,
        normalization: str,
        zero_centered_gamma: bool,
        sequence_parallel: bool,
        dtype: torch.dtype,
        device: torch.device,
        where: str,
    ) -> None:
        if normalization not in NORMS:
            raise ModeError(
                f"{where}: normalization: got {normalization!r}; allowed: 'LayerNorm', 'RMSNorm'"
            )
        check_size(size, where, "in_features")
        check_eps(eps, where)
        self.eps, self.normalization = eps, normalization
        self.zero_centered_gamma = zero_centered_gamma
        self._norm_sequence_parallel = sequence_parallel
        gamma = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.register_parameter("layer_norm_weight", gamma)
        beta = None
        if normalization == "LayerNorm":
            beta = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.register_parameter("layer_norm_bias", beta)

    def reset_layer_norm_parameters(self) -> None:
        """Deprecated: `reset_parameters` does this too."""
        text = "reset_layer_norm_parameters is deprecated: reset_parameters does this too"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        self._reset_norm()

    def _reset_norm(self) -> None:
        """gamma is 1 (0 if it is zero-centred), beta 0."""
        with torch.no_grad():
            for p, value in (
                (self.layer_norm_weight, 0.0 if self.zero_centered_gamma else 1.0),
                (self.layer_norm_bias, 0.0),
            ):
                if p is not None:
                    if not p.is_meta:
                        p.fill_(value)
                    p.sequence_parallel = self._norm_sequence_parallel  # type: ignore[attr-defined]

    def _norm_needs(self, inp: Any) -> tuple[bool, bool, bool]:
        """Which of (x, gamma, beta) want a gradient."""
        grads = torch.is_grad_enabled()
        beta = self.layer_norm_bias
        return (
            grads and inp.requires_grad,
            grads and self.layer_norm_weight.requires_grad,
            grads and beta is not None and beta.requires_grad,
        )

    def _norm_link(self, inp: Any, plan: Plan, lazy: bool) -> tuple[Any, NormCall]:
        """The norm in front of an operation that runs `plan`, fused with its cast if `lazy`."""
        if inp.dtype not in INPUT_DTYPES:
            raise TypeError(
                f"{self._where()}: inp: got {inp.dtype}; statistics of norms are fp32: make the "
                "layer and its input fp32, bf16 or fp16"
            )
        call = NormCall(
            self.eps,
            self.normalization == "RMSNorm",
            self.zero_centered_gamma,
            self._norm_needs(inp),
            inp.dtype,
            lazy,
            lazy and plan.input_amax,
        )
        return Norm, call
