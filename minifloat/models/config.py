"""Sizes of the reference transformer, as a value, and presets of them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PRESETS", "TransformerConfig"]


@dataclass(frozen=True)
class TransformerConfig:
    """A decoder-only transformer: RMSNorm, rotary embeddings, grouped-query attention, SwiGLU.

    `ffn_size` is the width of one half of the gated MLP. `kv_heads` divides `heads`: that many
    heads share a key and a value. `tied` heads multiply by the embedding. With `experts`, the MLP
    of a block is that many of that width, of which each token takes `top_k`.
    """

    layers: int = 2
    hidden_size: int = 128
    heads: int = 4
    kv_heads: int = 2
    ffn_size: int = 384
    context: int = 128
    vocab_size: int = 256
    tied: bool = False
    experts: int = 0
    top_k: int = 2
    rope_base: float = 10000.0
    eps: float = 1e-5

    def __post_init__(self) -> None:
        sizes = ("layers", "hidden_size", "heads", "kv_heads", "ffn_size", "context", "vocab_size")
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.hidden_size % self.heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of heads={self.heads}"
            )
        if self.head_size % 2:
            raise ValueError(
                f"rotary embeddings turn pairs: hidden_size / heads = {self.head_size} must be even"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.experts < 0:
            raise ValueError(f"experts={self.experts}: must not be negative; 0 is a plain MLP")
        if self.experts and not 1 <= self.top_k <= self.experts:
            raise ValueError(
                f"top_k={self.top_k}: a token takes at least 1 and at most all of"
                f" experts={self.experts}"
            )

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.heads

    @property
    def qkv_size(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_size


PRESETS: dict[str, TransformerConfig] = {
    "tiny": TransformerConfig(),
    "smoke": TransformerConfig(
        layers=1, hidden_size=32, heads=2, kv_heads=1, ffn_size=64, context=32
    ),
    "gpt2": TransformerConfig(
        layers=12, hidden_size=768, heads=12, kv_heads=12, ffn_size=2048, context=1024
    ),
    "1b": TransformerConfig(
        layers=16, hidden_size=2048, heads=32, kv_heads=8, ffn_size=8192, context=2048
    ),
}
