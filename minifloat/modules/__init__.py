"""Modules: parameters, and the operations they go through."""

from ..module import Module
from .checkpoint import checkpoint
from .linear import Linear
from .workspace import quantize_weight

__all__ = ["Linear", "Module", "checkpoint", "quantize_weight"]
