"""Quantized tensors and their storages."""

import torch as _torch

from ..dtypes import DType as _DType
from ..dynamo.quantizer_opaque import _rebuild_quantizer
from ..quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from .blockwise import Float8BlockwiseQTensor, Float8BlockwiseQTensorStorage
from .flat import flatten_state_dict, unflatten_state_dict
from .float8 import Float8Tensor, Float8TensorStorage
from .grouped import GroupedTensor, as_parameter
from .grouped_storage import GroupedTensorStorage
from .hybrid import HybridQuantizedTensor, HybridQuantizedTensorStorage
from .identity import IdentityTensor, IdentityTensorStorage
from .kept import Template as _Template
from .mxfp8 import MXFP8Tensor, MXFP8TensorStorage
from .nominal import keep_quantized_parameters as _keep_quantized_parameters
from .nvfp4 import NVFP4Tensor, NVFP4TensorStorage
from .saving import prepare_for_saving, restore_from_func_ctx, restore_from_saved
from .storage import QuantizedTensorStorage
from .tensor import QuantizedTensor
from .wrapper import rebuild_tensor as _rebuild_tensor

__all__ = [
    "Float8BlockwiseQTensor",
    "Float8BlockwiseQTensorStorage",
    "Float8Tensor",
    "Float8TensorStorage",
    "GroupedTensor",
    "GroupedTensorStorage",
    "HybridQuantizedTensor",
    "HybridQuantizedTensorStorage",
    "IdentityTensor",
    "IdentityTensorStorage",
    "MXFP8Tensor",
    "MXFP8TensorStorage",
    "NVFP4Tensor",
    "NVFP4TensorStorage",
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "as_parameter",
    "flatten_state_dict",
    "prepare_for_saving",
    "restore_from_func_ctx",
    "restore_from_saved",
    "unflatten_state_dict",
]

# What `torch.load(weights_only=True)` may rebuild: our classes, their enum, and two functions.
_torch.serialization.add_safe_globals(
    [
        _DType,
        _Template,
        _rebuild_quantizer,
        _rebuild_tensor,
        Float8BlockQuantizer,
        Float8BlockwiseQTensor,
        Float8BlockwiseQTensorStorage,
        Float8CurrentScalingQuantizer,
        Float8Quantizer,
        Float8Tensor,
        Float8TensorStorage,
        GroupedTensor,
        GroupedTensorStorage,
        HybridQuantizedTensor,
        HybridQuantizedTensorStorage,
        HybridQuantizer,
        IdentityQuantizer,
        IdentityTensor,
        IdentityTensorStorage,
        MXFP8Quantizer,
        MXFP8Tensor,
        MXFP8TensorStorage,
        NVFP4Quantizer,
        NVFP4Tensor,
        NVFP4TensorStorage,
    ]
)

_keep_quantized_parameters()
