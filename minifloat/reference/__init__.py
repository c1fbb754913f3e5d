"""The specification: every format in plain PyTorch, on any device, traceable, for any shape.

So are the norms and activations whose outputs are cast as they are computed.

A kernel is right when its bytes equal these functions' bytes.
"""

from .activation import FUNCTIONS, activate, activate_gradient
from .delayed import amax_from_history, delayed_update, scale_from_amax
from .dequantize import dequantize, unscaled
from .elements import decode, encode, pack, unpack
from .flip import flip
from .hadamard import hadamard, hadamard_matrix
from .matmul import matmul
from .norm import l2_norm, l2_norm_backward, norm, norm_backward, norm_stats
from .philox import philox, uniform16
from .quantize import amax, fake_quantize, quantize, quantize_scaled
from .scales import dequantize_factor, e8m0_decode, e8m0_from_amax, e8m0_multiplier, fp8_scale
from .swizzle import swizzle, unswizzle

__all__ = [
    "FUNCTIONS",
    "activate",
    "activate_gradient",
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
    "l2_norm",
    "l2_norm_backward",
    "matmul",
    "norm",
    "norm_backward",
    "norm_stats",
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
