"""Quantizers as constants of PyTorch graphs, and data-free descriptions of tensors."""

from .quantizer_opaque import is_value_opaque_quantizer, register_value_opaque_quantizer
from .tensor_spec import TensorSpec, to_tensor_spec

__all__ = [
    "TensorSpec",
    "is_value_opaque_quantizer",
    "register_value_opaque_quantizer",
    "to_tensor_spec",
]
