"""A mixture of experts of our modules: router, permutation, two grouped products."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .. import ops
from ..modules.grouped_linear import GroupedLinear
from ..modules.norm import RMSNorm
from ..permutation import moe_permute_with_probs, moe_unpermute
from ..recipe import Recipe
from ..recipe.autocast import autocast
from .config import TransformerConfig

__all__ = ["Experts"]

Init = Callable[[Tensor], None]


class Experts(nn.Module):
    """Norm, then for each token the weighted sum of the `top_k` SwiGLU MLPs it scores highest.

    The router is in fp32, its weights of a token sum to 1. No token is dropped, and nothing depends
    on what the device holds: the number of rows is tokens * top_k.
    """

    def __init__(
        self, config: TransformerConfig, device: torch.device | None, init: Init, out_init: Init
    ) -> None:
        super().__init__()
        count, hidden, ffn = config.experts, config.hidden_size, config.ffn_size
        self.top_k = config.top_k
        self.norm = RMSNorm(hidden, eps=config.eps, device=device)
        self.router = nn.Linear(hidden, count, bias=False, device=device)
        init(self.router.weight)
        self.fc1 = GroupedLinear(
            count, hidden, 2 * ffn, bias=False, init_method=init, device=device,
            single_grouped_weight=True,
        )  # fmt: skip
        self.activation = ops.ScaledSwiGLU()
        self.fc2 = GroupedLinear(
            count, ffn, hidden, bias=False, init_method=out_init, device=device,
            single_grouped_weight=True,
        )  # fmt: skip

    def forward(self, x: Tensor, recipe: Recipe | None) -> tuple[Tensor, Tensor]:
        """(the sum for each token of x [batch, tokens, hidden], how unevenly experts are used).

        The second is the share of the tokens that an expert got times its mean score, summed and
        times the number of experts: 1 where all are used alike, more where they are not.
        """
        h: Tensor = self.norm(x).flatten(0, 1)
        tokens, experts = h.shape[0], self.router.out_features
        with torch.autocast(h.device.type, enabled=False):
            scores = torch.softmax(self.router(h.float()), dim=-1)
        best, chosen = scores.topk(self.top_k, dim=-1)
        mask = torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True)
        probs = torch.where(mask, scores / best.sum(-1, keepdim=True), 0.0)
        rows, weights, row_id_map = moe_permute_with_probs(h, probs, mask, tokens * self.top_k)
        counts = mask.sum(0)
        with autocast(enabled=recipe is not None, recipe=recipe):
            inner = self.activation(self.fc1(rows, counts), weights)
            rows = self.fc2(inner, counts)
        y = moe_unpermute(rows, row_id_map).view(x.shape)
        shares = counts.float() / (tokens * self.top_k)
        return y, experts * (shares * scores.mean(0)).sum()
