"""The reference model of tests, docs, benchmarks and `minifloat train`."""

from .config import PRESETS, TransformerConfig
from .experts import Experts
from .flops import Flops, gemm_flops
from .transformer import Attention, Block, Transformer

__all__ = [
    "PRESETS",
    "Attention",
    "Block",
    "Experts",
    "Flops",
    "Transformer",
    "TransformerConfig",
    "gemm_flops",
]
