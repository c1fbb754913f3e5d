"""Triton kernels: raw tensors and numbers in, preallocated tensors out; imported where Triton is.

A kernel is right when its bytes equal `reference`'s. Launches are asynchronous, allocate at most a
few KiB, keep no state and need no cleared memory, so they work in CUDA graphs and on any stream.
The caller makes the tensors' device current.
"""

from .blocks import cast_blocks, fake_blocks
from .dequantize import dequantize
from .swizzle import swizzle
from .tensorwise import amax, cast_current, cast_scaled
from .transpose import transpose

__all__ = [
    "amax",
    "cast_blocks",
    "cast_current",
    "cast_scaled",
    "dequantize",
    "fake_blocks",
    "swizzle",
    "transpose",
]
