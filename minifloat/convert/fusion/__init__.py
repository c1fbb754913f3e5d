"""Norms, linear layers and activations of a model that run as one: found, proven, and run."""

from .find import Fusion, find
from .patterns import PATTERNS, Pattern, asked

__all__ = ["PATTERNS", "Fusion", "Pattern", "asked", "find"]
