"""Fusible operations: `Sequential(RMSNorm(8), Linear(8, 8), ...)` runs as one; see docs/ops.md."""

from .basic.activation import (
    GEGLU,
    GELU,
    GLU,
    QGEGLU,
    QGELU,
    ClampedSwiGLU,
    ReGLU,
    ReLU,
    SiLU,
    SReGLU,
    SReLU,
    SwiGLU,
)
from .basic.bias import Bias
from .basic.collectives import AllGather, AllReduce, ReduceScatter
from .basic.dropout import Dropout
from .basic.extra import AddExtraInput, MakeExtraOutput
from .basic.grouped_linear import GroupedLinear
from .basic.linear import BasicLinear
from .basic.norm import L2Normalization, LayerNorm, RMSNorm
from .basic.quantize import Quantize
from .basic.scale import ConstantScale
from .basic.scaled_activation import ScaledClampedQGeGLU, ScaledSReLU, ScaledSwiGLU
from .basic.shape import Identity, Reshape
from .basic_operation import BasicOperation
from .context import OperationContext
from .fused import rows as rows  # registers the built-in fusions
from .fused.backward import (
    BackwardActivationBias,
    BackwardActivationQuantize,
    BackwardAddRMSNorm,
    BackwardLinearAdd,
    BackwardLinearScale,
)
from .fused.forward_linear import (
    ForwardLinearBiasActivation,
    ForwardLinearBiasAdd,
    ForwardLinearScaleAdd,
)
from .fused.forward_quantize import ForwardActivationQuantize, ForwardNormQuantize
from .fused.grouped_mlp import ForwardGroupedMLP
from .fused.mlp import FusedMLP
from .fused_operation import FusedOperation
from .fuser import (
    OperationFuser,
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
)
from .fusible import FusibleOperation
from .linear import Linear
from .sequential import Sequential

__all__ = [
    "GEGLU",
    "GELU",
    "GLU",
    "QGEGLU",
    "QGELU",
    "AddExtraInput",
    "AllGather",
    "AllReduce",
    "BackwardActivationBias",
    "BackwardActivationQuantize",
    "BackwardAddRMSNorm",
    "BackwardLinearAdd",
    "BackwardLinearScale",
    "BasicLinear",
    "BasicOperation",
    "Bias",
    "ClampedSwiGLU",
    "ConstantScale",
    "Dropout",
    "ForwardActivationQuantize",
    "ForwardGroupedMLP",
    "ForwardLinearBiasActivation",
    "ForwardLinearBiasAdd",
    "ForwardLinearScaleAdd",
    "ForwardNormQuantize",
    "FusedMLP",
    "FusedOperation",
    "FusibleOperation",
    "GroupedLinear",
    "Identity",
    "L2Normalization",
    "LayerNorm",
    "Linear",
    "MakeExtraOutput",
    "OperationContext",
    "OperationFuser",
    "Quantize",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "ReduceScatter",
    "Reshape",
    "SReGLU",
    "SReLU",
    "ScaledClampedQGeGLU",
    "ScaledSReLU",
    "ScaledSwiGLU",
    "Sequential",
    "SiLU",
    "SwiGLU",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
]
