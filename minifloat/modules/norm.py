"""`LayerNorm` and `RMSNorm` as modules: the operations, with a module's arguments of old."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .. import ops

__all__ = ["LayerNorm", "RMSNorm"]


class _Norm(nn.Module):
    """What both take. `sequence_parallel` is noted on the parameters, for who reduces gradients."""

    sequence_parallel: bool | None

    def __init__(
        self,
        normalized_shape: int | Iterable[int] | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        where = type(self).__name__
        if (normalized_shape is None) == (hidden_size is None):
            given = "neither" if normalized_shape is None else "both"
            raise RuntimeError(
                f"{where}: got {given} of normalized_shape and hidden_size; give normalized_shape"
            )
        if hidden_size is not None:
            text = f"{where}: hidden_size is now called normalized_shape"
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            normalized_shape = hidden_size
        if params_dtype is not None:
            if kwargs.get("dtype") is not None:
                raise RuntimeError(f"{where}: got both dtype and params_dtype; give dtype")
            kwargs["dtype"] = params_dtype
        super().__init__(
            normalized_shape, eps=eps, zero_centered_gamma=zero_centered_gamma, **kwargs
        )
        self.sequence_parallel = sequence_parallel
        self._mark()

    def reset_parameters(self) -> None:
        """Initialise; meta parameters are made real."""
        super().reset_parameters()  # type: ignore[misc]
        self._mark()

    def _mark(self) -> None:
        if self.__dict__.get("sequence_parallel") is not None:
            for parameter in self.parameters(recurse=False):
                parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]


def _margin(phase: str, name: str) -> Any:
    """A property of old: `sm_margin[phase]`, which changes nothing."""

    def warn() -> None:
        text = f"{name} is deprecated: give sm_margin={{{phase!r}: ...}} at construction"
        warnings.warn(text, DeprecationWarning, stacklevel=3)

    def get(self: Any) -> int:
        warn()
        return int(self._sm_margins[phase])

    def put(self: Any, value: int) -> None:
        warn()
        self._sm_margins[phase] = value

    return property(get, put)


class LayerNorm(_Norm, ops.LayerNorm):
    """`y = (x - mean) / sqrt(var + eps) weight + bias` over the last dims."""

    fwd_ln_sm_margin = _margin("forward", "fwd_ln_sm_margin")
    bwd_ln_sm_margin = _margin("backward", "bwd_ln_sm_margin")
    inf_ln_sm_margin = _margin("inference", "inf_ln_sm_margin")


class RMSNorm(_Norm, ops.RMSNorm):
    """`y = x / sqrt(mean(x^2) + eps) weight` over the last dims."""

    fwd_rmsnorm_sm_margin = _margin("forward", "fwd_rmsnorm_sm_margin")
    bwd_rmsnorm_sm_margin = _margin("backward", "bwd_rmsnorm_sm_margin")
    inf_rmsnorm_sm_margin = _margin("inference", "inf_rmsnorm_sm_margin")
