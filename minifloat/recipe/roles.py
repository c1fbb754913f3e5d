"""Roles say what a slot of a module holds; a factory may answer with a request for a quantizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .types import Format

__all__ = ["DelayedScalingRequest", "QuantizerRequest", "QuantizerRole"]


@dataclass(frozen=True)
class QuantizerRole:
    """The tensor that a slot quantizes.

    `module_type` ("linear", "grouped_linear", "dpa") is the kind of module, `tensor_type` ("input",
    "weight", "output", "grad_output", "grad_input", ...) the tensor, `name` the module's name.
    """

    module_type: str = ""
    tensor_type: str = ""
    name: str = ""

    def __str__(self) -> str:
        fields = ("module_type", "tensor_type", "name")
        given = [f"{f}={getattr(self, f)}" for f in fields if getattr(self, f)]
        return "|".join(given) or "QuantizerRole()"


@dataclass(frozen=True)
class QuantizerRequest:
    """What a factory returns where a quantizer needs state that it cannot make itself."""


@dataclass(frozen=True)
class DelayedScalingRequest(QuantizerRequest):
    """Delayed scaling for this slot; fields as DelayedScaling has them.

    All requests of a layer must be equal: they share one update.
    """

    fp8_format: Format = Format.HYBRID
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[..., Any] = "max"
    scaling_factor_compute_algo: Callable[..., Any] | None = None
    reduce_amax: bool = True
