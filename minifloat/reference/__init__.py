"""The specification: every format in plain PyTorch, on any device, traceable, for any shape.

A kernel is right when its bytes equal these functions' bytes.
"""

from .delayed import amax_from_history, delayed_update, scale_from_amax
from .dequantize import dequantize, unscaled
from .elements import decode, encode, pack, unpack
from .flip import flip
from .hadamard import hadamard, hadamard_matrix
from .matmul import matmul
from .philox import philox, uniform16
from .quantize import amax, fake_quantize, quantize, quantize_scaled
from .scales import dequantize_factor, e8m0_decode, e8m0_from_amax, e8m0_multiplier, fp8_scale
from .swizzle import swizzle, unswizzle

__all__ = [
    "amax",
    "amax_from_history",
    "decode",
    "delayed_update",
    "dequantize",
    "dequantize_factor",
    "e8m0_decode",
    "e8m0_from_amax",
    "e8m0_multiplier",
    "encode",
    "fake_quantize",
    "flip",
    "fp8_scale",
    "hadamard",
    "hadamard_matrix",
    "matmul",
    "pack",
    "philox",
    "quantize",
    "quantize_scaled",
    "scale_from_amax",
    "swizzle",
    "uniform16",
    "unpack",
    "unscaled",
    "unswizzle",
]
