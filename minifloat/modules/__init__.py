"""Modules: parameters, and the operations they go through."""

from ..module import Module
from .checkpoint import checkpoint
from .layernorm_linear import LayerNormLinear
from .layernorm_mlp import LayerNormMLP
from .linear import Linear
from .workspace import quantize_weight

__all__ = [
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "Module",
    "checkpoint",
    "quantize_weight",
]
