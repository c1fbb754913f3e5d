"""minifloat: train transformers in 8 and 4 bits with PyTorch. See README.md."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import dynamo, recipe, reference
from ._version import __version__
from .convert import convert
from .dtypes import DType, TE_DType, TE_DType_To_Torch
from .modules import (
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    Module,
    checkpoint,
    quantize_weight,
)
from .quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
    UsageError,
)
from .recipe import (
    DelayedScalingRequest,
    QuantizerRequest,
    QuantizerRole,
    get_default_recipe,
    get_device_compute_capability,
    is_bf16_available,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
)
from .recipe.autocast import autocast, fp8_autocast, fp8_model_init, quantized_model_init
from .tensors import (
    Float8BlockwiseQTensor,
    Float8BlockwiseQTensorStorage,
    Float8Tensor,
    Float8TensorStorage,
    GroupedTensor,
    GroupedTensorStorage,
    HybridQuantizedTensor,
    HybridQuantizedTensorStorage,
    IdentityTensor,
    IdentityTensorStorage,
    MXFP8Tensor,
    MXFP8TensorStorage,
    NVFP4Tensor,
    NVFP4TensorStorage,
    QuantizedTensor,
    QuantizedTensorStorage,
    as_parameter,
    flatten_state_dict,
    prepare_for_saving,
    restore_from_func_ctx,
    restore_from_saved,
    unflatten_state_dict,
)

if TYPE_CHECKING:
    from . import constants, ops
    from .glu import deinterleave_glu_tensor, interleave_glu_tensor
    from .grouped import (
        bgrad_group_quantize,
        bgrad_quantize,
        group_dequantize,
        group_quantize,
        multi_tensor_quantize,
        split_quantize,
        splits_to_offsets,
        splits_to_offsets_multi,
    )
    from .inspect import bisect, inspect
    from .memory import memory_report
    from .modules.grouped_linear import GroupedLinear
    from .modules.norm import LayerNorm, RMSNorm
    from .modules.padding import Fp8Padding, Fp8Unpadding
    from .permutation import (
        moe_permute,
        moe_permute_and_pad_with_probs,
        moe_permute_with_probs,
        moe_sort_chunks_by_index,
        moe_sort_chunks_by_index_with_probs,
        moe_unpermute,
    )
    from .proof import assert_quantized

__all__ = [
    "DType",
    "DelayedScalingRequest",
    "Float8BlockQuantizer",
    "Float8BlockwiseQTensor",
    "Float8BlockwiseQTensorStorage",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8Tensor",
    "Float8TensorStorage",
    "Fp8Padding",
    "Fp8Unpadding",
    "GroupedLinear",
    "GroupedTensor",
    "GroupedTensorStorage",
    "HybridQuantizedTensor",
    "HybridQuantizedTensorStorage",
    "HybridQuantizer",
    "IdentityQuantizer",
    "IdentityTensor",
    "IdentityTensorStorage",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MXFP8Quantizer",
    "MXFP8Tensor",
    "MXFP8TensorStorage",
    "Module",
    "NVFP4Quantizer",
    "NVFP4Tensor",
    "NVFP4TensorStorage",
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "Quantizer",
    "QuantizerRequest",
    "QuantizerRole",
    "RMSNorm",
    "TE_DType",
    "TE_DType_To_Torch",
    "UsageError",
    "__version__",
    "as_parameter",
    "assert_quantized",
    "autocast",
    "bgrad_group_quantize",
    "bgrad_quantize",
    "bisect",
    "checkpoint",
    "constants",
    "convert",
    "deinterleave_glu_tensor",
    "dynamo",
    "flatten_state_dict",
    "fp8_autocast",
    "fp8_model_init",
    "get_default_recipe",
    "get_device_compute_capability",
    "group_dequantize",
    "group_quantize",
    "inspect",
    "interleave_glu_tensor",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "memory_report",
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
    "multi_tensor_quantize",
    "ops",
    "prepare_for_saving",
    "quantize_weight",
    "quantized_model_init",
    "recipe",
    "reference",
    "restore_from_func_ctx",
    "restore_from_saved",
    "split_quantize",
    "splits_to_offsets",
    "splits_to_offsets_multi",
    "unflatten_state_dict",
]

# Loaded when they are first asked for: an import must stay under 0.3 s.
_LATER = {
    "constants": ("constants",),
    "glu": ("deinterleave_glu_tensor", "interleave_glu_tensor"),
    "ops": ("ops",),
    "grouped": (
        "bgrad_group_quantize",
        "bgrad_quantize",
        "group_dequantize",
        "group_quantize",
        "multi_tensor_quantize",
        "split_quantize",
        "splits_to_offsets",
        "splits_to_offsets_multi",
    ),
    "inspect": ("bisect", "inspect"),
    "memory": ("memory_report",),
    "modules.grouped_linear": ("GroupedLinear",),
    "modules.norm": ("LayerNorm", "RMSNorm"),
    "modules.padding": ("Fp8Padding", "Fp8Unpadding"),
    "permutation": (
        "moe_permute",
        "moe_permute_and_pad_with_probs",
        "moe_permute_with_probs",
        "moe_sort_chunks_by_index",
        "moe_sort_chunks_by_index_with_probs",
        "moe_unpermute",
    ),
    "proof": ("assert_quantized",),
}


def __getattr__(name: str) -> Any:
    for home, names in _LATER.items():
        if name in names:
            module = importlib.import_module(f"{__name__}.{home}")
            found = module if name == home else getattr(module, name)
            globals()[name] = found
            return found
    told = ""
    if not name.startswith("_") and name != "absent":  # which is asked while it is imported
        absent = importlib.import_module(f"{__name__}.absent").ABSENT
        told = f": {absent[name]} (docs/migration.md)" if name in absent else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{told}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
