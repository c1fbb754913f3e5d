"""A small model with everything that a conversion must not break."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(x)))


class Model(nn.Module):
    def __init__(self, width: int = 48, blocks: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.head = nn.Linear(width, 40, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Any:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


INNER = ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"]


def tokens() -> Tensor:
    return torch.randint(40, (2, 9), generator=torch.Generator().manual_seed(3))


def train(model: Any, steps: int = 2, lr: float = 0.1) -> list[Tensor]:
    """Losses of a few steps, on a fixed batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr)
    losses = []
    for _ in range(steps):
        loss = model(tokens()).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses
