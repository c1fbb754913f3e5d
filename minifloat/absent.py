"""Transformer Engine's public names that are not here, and what to use: errors say it."""

from __future__ import annotations

__all__ = ["ABSENT"]

_ATTENTION = "use torch.nn.functional.scaled_dot_product_attention between Linear layers"
_BLOCK = f"build the block of LayerNormLinear, Linear and LayerNormMLP; {_ATTENTION}"
_GRAPHS = "use torch.cuda.graph, or torch.compile(mode='reduce-overhead'), as they are"
_NO_STATE = "no state is global: a layer has `quantizers` and `delayed`, autocast says the rest"
_OFFLOAD = "use torch.autograd.graph.save_on_cpu, or FSDP2's CPUOffloadPolicy"
_USERBUFFERS = "there are no userbuffers: collectives are torch.distributed's"
_TOP = "everything public is in `minifloat` itself, recipes are in `minifloat.recipe`"
_OTHERS = "it is no part of low precision; use PyTorch's"

ABSENT = {
    "CudaRNGStatesTracker": "pass any tracker with fork(name), such as Megatron's",
    "CusolverMpCtx": _OTHERS,
    "DotProductAttention": _ATTENTION,
    "FP8GlobalState": _NO_STATE,
    "FP8GlobalStateManager": _NO_STATE,
    "FusedMLAQUpProjRopeQuant": _BLOCK,
    "InferenceParams": _ATTENTION,
    "ManualOffloadSynchronizer": _OFFLOAD,
    "MultiheadAttention": _BLOCK,
    "RotaryPositionEmbedding": _OTHERS,
    "TransformerLayer": _BLOCK,
    "UserBufferQuantizationMode": _USERBUFFERS,
    "attention": _ATTENTION,
    "common": _TOP,
    "cpu_offload": _OFFLOAD,
    "cross_entropy": "use torch.nn.functional.cross_entropy",
    "custom_recipes": "the factories are in `minifloat.recipe`",
    "destroy_ub": _USERBUFFERS,
    "float8_tensor": _TOP,
    "fp8": _TOP,
    "get_cpu_offload_context": _OFFLOAD,
    "get_cudnn_version": "cuDNN is not used; torch.backends.cudnn.version() is PyTorch's",
    "graph": _GRAPHS,
    "initialize_ub": _USERBUFFERS,
    "jit": "use torch.compile",
    "make_graphed_callables": _GRAPHS,
    "mark_not_offload": _OFFLOAD,
    "newton_schulz": _OTHERS,
    "onnx_export": "use torch.export, inside autocast(enabled=False) to write a file",
    "optimizers": "use any of torch.optim's",
    "parallel_cross_entropy": "use torch.nn.functional.cross_entropy",
    "pytorch": _TOP,
    "quantization": _TOP,
    "tensor": _TOP,
}
