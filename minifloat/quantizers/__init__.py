"""Quantizers: the public objects that say how a tensor is quantized."""

from .base import Quantizer, UsageError, adopt
from .block import Float8BlockQuantizer
from .float8 import Float8CurrentScalingQuantizer, Float8Quantizer
from .hybrid import HybridQuantizer
from .identity import IdentityQuantizer
from .mxfp8 import MXFP8Quantizer
from .nvfp4 import NVFP4Quantizer

__all__ = [
    "Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "HybridQuantizer",
    "IdentityQuantizer",
    "MXFP8Quantizer",
    "NVFP4Quantizer",
    "Quantizer",
    "UsageError",
    "adopt",
]
