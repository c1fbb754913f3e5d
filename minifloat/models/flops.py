"""Floating-point operations of the reference transformer's matrix products, by formula."""

from __future__ import annotations

from typing import NamedTuple

from .config import TransformerConfig

__all__ = ["Flops", "gemm_flops"]


class Flops(NamedTuple):
    """Of one training step (forward and backward) per token."""

    layer: dict[str, int]  # of each layer that a recipe reaches, by its name in the model
    head: int
    attention: int  # q k^T and the product with v; all pairs, masked ones too
    router: int  # of all blocks

    @property
    def total(self) -> int:
        return sum(self.layer.values()) + self.head + self.attention + self.router


def gemm_flops(config: TransformerConfig) -> Flops:
    """Two operations per multiply-add, three products per layer: fprop, dgrad, wgrad."""
    hidden, ffn = config.hidden_size, config.ffn_size
    mlps = config.top_k if config.experts else 1  # that a token goes through
    layer: dict[str, int] = {}
    for index in range(config.layers):
        layer[f"blocks.{index}.attention.qkv"] = 6 * hidden * config.qkv_size
        layer[f"blocks.{index}.attention.out"] = 6 * hidden * hidden
        layer[f"blocks.{index}.mlp"] = 6 * 3 * hidden * ffn * mlps
    head = 6 * hidden * config.vocab_size
    attention = config.layers * 6 * 2 * config.context * hidden
    return Flops(layer, head, attention, config.layers * 6 * hidden * config.experts)
