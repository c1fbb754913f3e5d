"""A decoder-only transformer of our modules: what `minifloat train` trains."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..inputs import autocast_dtype
from ..modules import LayerNormLinear, LayerNormMLP, Linear
from ..modules.norm import RMSNorm
from ..recipe import Recipe
from ..recipe.autocast import autocast
from .config import TransformerConfig
from .experts import Experts

__all__ = ["Attention", "Block", "Transformer"]

Init = Callable[[Tensor], None]
_PARTS = ("attention.qkv", "attention.out", "mlp")  # of a block, that recipes reach
_BALANCE = 0.01  # how much of the experts' imbalance the gradient is of


def _normal(std: float) -> Init:
    def init(tensor: Tensor) -> None:
        nn.init.normal_(tensor, 0.0, std)

    return init


def rotary_table(config: TransformerConfig, device: torch.device | None) -> Tensor:
    """[2, context, head_size / 2]: cosines and sines of the angle of each position and pair."""
    half = config.head_size // 2
    pairs = torch.arange(half, dtype=torch.float32, device=device)
    frequency = config.rope_base ** (-pairs / half)
    position = torch.arange(config.context, dtype=torch.float32, device=device)
    angle = torch.outer(position, frequency)
    return torch.stack((angle.cos(), angle.sin()))


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Turn the pairs (i, i + half) of each head of x [batch, heads, tokens, head_size]."""
    cos, sin = table[:, : x.shape[-2]].to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Norm, q, k and v in one product; causal grouped-query attention; output projection."""

    def __init__(
        self, config: TransformerConfig, device: torch.device | None, init: Init, out_init: Init
    ) -> None:
        super().__init__()
        self.config = config
        self.qkv = LayerNormLinear(
            config.hidden_size,
            config.qkv_size,
            eps=config.eps,
            bias=False,
            normalization="RMSNorm",
            init_method=init,
            device=device,
        )
        self.out = Linear(
            config.hidden_size,
            config.hidden_size,
            bias=False,
            init_method=out_init,
            device=device,
        )

    def forward(
        self, x: Tensor, table: Tensor, qkv_recipe: Recipe | None, out_recipe: Recipe | None
    ) -> Tensor:
        c = self.config
        batch, tokens, _ = x.shape
        with autocast(enabled=qkv_recipe is not None, recipe=qkv_recipe):
            qkv = self.qkv(x)
        heads = qkv.view(batch, tokens, -1, c.head_size).transpose(1, 2)
        q, k, v = heads.split((c.heads, c.kv_heads, c.kv_heads), dim=1)
        q, k = rotate(q, table), rotate(k, table)
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=c.kv_heads != c.heads
        )
        y = y.transpose(1, 2).reshape(batch, tokens, c.hidden_size)
        with autocast(enabled=out_recipe is not None, recipe=out_recipe):
            out: Tensor = self.out(y)
        return out


class Block(nn.Module):
    """x + attention(x), then x + mlp(x). `recipes` are those of qkv, out and mlp."""

    recipes: tuple[Recipe | None, Recipe | None, Recipe | None]

    def __init__(
        self, config: TransformerConfig, device: torch.device | None, init: Init, out_init: Init
    ) -> None:
        super().__init__()
        self.recipes = (None, None, None)
        self.attention = Attention(config, device, init, out_init)
        self.mlp: nn.Module
        if config.experts:
            self.mlp = Experts(config, device, init, out_init)
        else:
            self.mlp = LayerNormMLP(
                config.hidden_size,
                config.ffn_size,
                eps=config.eps,
                bias=False,
                normalization="RMSNorm",
                activation="swiglu",
                init_method=init,
                output_layer_init_method=out_init,
                device=device,
            )

    def forward(self, x: Tensor, table: Tensor) -> tuple[Tensor, Tensor | None]:
        """(the sum, the imbalance of its experts, None where it has none)."""
        qkv, out, mlp = self.recipes
        x = x + self.attention(x, table, qkv, out)
        if isinstance(self.mlp, Experts):
            y, imbalance = self.mlp(x, mlp)
            return x + y, imbalance
        with autocast(enabled=mlp is not None, recipe=mlp):
            y = self.mlp(x)
        return x + y, None


class Transformer(nn.Module):
    """Tokens [batch, tokens] in, logits out; with `targets`, the mean cross entropy.

    `recipes` names the recipe of each layer (`blocks.0.attention.qkv`, `.out`, `blocks.0.mlp`), or
    is one for all of them; None is high precision. Embedding, head, router and attention are always
    that. With experts, the gradient is also that of their imbalance; the value is not.
    """

    def __init__(
        self,
        config: TransformerConfig,
        recipes: Recipe | Mapping[str, Recipe | None] | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        device = torch.device(device)
        self.config = config
        init = _normal(0.02)
        out_init = _normal(0.02 / math.sqrt(2 * config.layers))
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size, device=device)
        self.blocks = nn.ModuleList(
            Block(config, device, init, out_init) for _ in range(config.layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.eps, device=device)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, device=device)
        init(self.embedding.weight)
        if config.tied:
            self.head.weight = self.embedding.weight
        else:
            init(self.head.weight)
        self.register_buffer("rotary", rotary_table(config, device), persistent=False)
        self.rotary: Tensor
        self.set_recipes(recipes)

    def recipe_names(self) -> list[str]:
        """The layers that a recipe reaches."""
        return [f"blocks.{i}.{part}" for i in range(self.config.layers) for part in _PARTS]

    def set_recipes(self, recipes: Recipe | Mapping[str, Recipe | None] | None) -> None:
        names = self.recipe_names()
        if recipes is None or isinstance(recipes, Recipe):
            recipes = dict.fromkeys(names, recipes)
        if unknown := sorted(set(recipes) - set(names)):
            raise ValueError(f"no layer is called {', '.join(unknown)}; there are {names}")
        for index, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            qkv, out, mlp = (recipes.get(f"blocks.{index}.{part}") for part in _PARTS)
            block.recipes = (qkv, out, mlp)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        if tokens.shape[1] > self.config.context:
            raise ValueError(
                f"{tokens.shape[1]} tokens are more than the context of {self.config.context}"
            )
        x = self.embedding(tokens)
        dtype = autocast_dtype(x)
        if dtype is not None:  # that of the residual stream
            x = x.to(dtype)
        uneven: list[Tensor] = []
        for block in self.blocks:
            x, imbalance = block(x, self.rotary)
            if imbalance is not None:
                uneven.append(imbalance)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        if uneven:
            extra = _BALANCE * torch.stack(uneven).mean()
            loss = loss + (extra - extra.detach())  # its gradient, and zero
        return loss
