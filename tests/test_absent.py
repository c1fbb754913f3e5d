"""Names of Transformer Engine's that are not here: the error says what to use."""

from __future__ import annotations

import pytest

import minifloat
from minifloat.absent import ABSENT

# What `transformer_engine.pytorch` exports, less its quantizers and tensors.
PUBLIC = """
Linear LayerNormLinear LayerNormMLP LayerNorm RMSNorm GroupedLinear Fp8Padding Fp8Unpadding
initialize_ub destroy_ub UserBufferQuantizationMode DotProductAttention FusedMLAQUpProjRopeQuant
MultiheadAttention InferenceParams RotaryPositionEmbedding TransformerLayer moe_permute
moe_permute_with_probs moe_permute_and_pad_with_probs moe_unpermute moe_sort_chunks_by_index
moe_sort_chunks_by_index_with_probs fp8_autocast fp8_model_init autocast quantized_model_init
is_fp8_available is_mxfp8_available is_fp8_block_scaling_available is_nvfp4_available
get_default_recipe QuantizerRole QuantizerRequest DelayedScalingRequest get_cudnn_version
get_device_compute_capability is_bf16_available deinterleave_glu_tensor interleave_glu_tensor
make_graphed_callables checkpoint CudaRNGStatesTracker get_cpu_offload_context mark_not_offload
ManualOffloadSynchronizer ops optimizers onnx_export parallel_cross_entropy CusolverMpCtx
newton_schulz QuantizedTensorStorage QuantizedTensor Quantizer prepare_for_saving
restore_from_saved restore_from_func_ctx DType constants
"""


@pytest.mark.parametrize("name", PUBLIC.split())
def test_a_public_name_is_here_or_says_what_to_use(name: str) -> None:
    assert hasattr(minifloat, name) != (name in ABSENT)


@pytest.mark.parametrize("name", ABSENT)
def test_the_error_says_what_to_use(name: str) -> None:
    """It said that there is no such attribute, and nothing else."""
    assert not hasattr(minifloat, name) and getattr(minifloat, name, 1) == 1
    with pytest.raises(AttributeError, match=f"has no attribute '{name}': .*docs/migration.md"):
        getattr(minifloat, name)


def test_other_names_say_nothing_more() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Lineer'$"):
        _ = minifloat.Lineer  # type: ignore[attr-defined]
