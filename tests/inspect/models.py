"""Models of every kind of layer, and a step of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import minifloat
from minifloat import ops, recipe
from minifloat.recipe import zoo

BF16 = {"params_dtype": torch.bfloat16, "device": "cpu"}
RECIPES: dict[str, Callable[[], recipe.Recipe]] = {
    "delayed": recipe.DelayedScaling,
    "current": recipe.Float8CurrentScaling,
    "block": recipe.Float8BlockScaling,
    "mxfp8": recipe.MXFP8BlockScaling,
    "nvfp4": recipe.NVFP4BlockScaling,
    "custom": lambda: recipe.CustomRecipe(qfactory=zoo.mxfp8_fwd_nvfp4_bwd_factory),
    "high_override": lambda: recipe.Float8CurrentScaling(backward_override="high_precision"),
    "dequantized": lambda: recipe.MXFP8BlockScaling(backward_override="dequantized"),
}
LAYERS = ["0", "1.fc1", "1.fc2", "2", "3.1.basic_ops.0", "3.3.basic_ops.0"]


def model(**options: Any) -> nn.Sequential:
    """Linear, LayerNormMLP, LayerNormLinear, and fusible operations, 64 -> 48."""
    torch.manual_seed(1)
    dtype: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cpu"}
    return nn.Sequential(
        minifloat.Linear(64, 64, **BF16, **options),
        minifloat.LayerNormMLP(64, 96, activation="swiglu", **BF16, **options),
        minifloat.LayerNormLinear(64, 48, **BF16, **options),
        ops.Sequential(
            ops.RMSNorm(48, **dtype),
            ops.Linear(48, 80, **dtype),
            ops.GELU(),
            ops.Linear(80, 48, **dtype),
        ),
    )


def batch(rows: int = 40, width: int = 64) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(rows, width, generator=generator).to(torch.bfloat16)


class Step:
    """A forward and a backward from one state, as often as wanted."""

    def __init__(self, net: nn.Module, used: recipe.Recipe, call: Any = None, **kwargs: Any):
        self.net, self.used, self.kwargs = net, used, kwargs
        self.call = net if call is None else call
        self.buffers = {name: b.clone() for name, b in net.named_buffers()}
        self.x = batch().requires_grad_()

    def __call__(self) -> Tensor:
        """The loss."""
        self.net.zero_grad()
        self.x.grad = None
        torch.manual_seed(3)
        with minifloat.autocast(recipe=self.used):
            y = self.call(self.x, **self.kwargs)
        loss = y.float().square().mean()
        loss.backward()
        return loss.detach()

    def everything(self) -> dict[str, Tensor]:
        """All that a step computes and changes, from the state of before."""
        with torch.no_grad():
            for name, b in self.net.named_buffers():
                b.copy_(self.buffers[name])
        found = {"loss": self(), "x.grad": self.x.grad}
        for name, p in self.net.named_parameters():
            found[f"{name}.grad"] = p.grad
        found.update(self.net.named_buffers())
        return {name: t.clone() for name, t in found.items() if t is not None}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []
