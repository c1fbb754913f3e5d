"""Layers that others fuse: experts' MLPs of operations, and converted gates."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minifloat
from minifloat import ops, recipe
from minifloat.inspect import GEMMS, OPERANDS

from .models import RECIPES, same

SIZES = torch.tensor([24, 0, 37, 3])


class Experts:
    """A step of two grouped operations and the scaled activation between them."""

    def __init__(self, used: recipe.Recipe) -> None:
        torch.manual_seed(0)
        dtype: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cpu"}
        self.used = used
        self.net = ops.Sequential(
            ops.GroupedLinear(4, 64, 96, **dtype),
            ops.ScaledSwiGLU(),
            ops.GroupedLinear(4, 48, 64, **dtype),
        )
        self.x = torch.randn(64, 64).to(torch.bfloat16).requires_grad_()
        self.scales = torch.rand(64).requires_grad_()

    def __call__(self) -> Tensor:
        torch.manual_seed(3)
        self.x.grad = self.scales.grad = None
        with minifloat.autocast(recipe=self.used):
            y = self.net(self.x, SIZES, self.scales, SIZES)
        loss = y.float().square().mean()
        loss.backward()
        return loss.detach()

    def everything(self) -> dict[str, Tensor]:
        self.net.zero_grad()
        found = {"loss": self(), "x": self.x.grad, "scales": self.scales.grad}
        found.update((name, p.grad) for name, p in self.net.named_parameters())
        return {name: t.clone() for name, t in found.items() if t is not None}


@pytest.mark.parametrize("name", ("current", "mxfp8", "nvfp4"))
def test_experts_as_operations(name: str) -> None:
    step = Experts(RECIPES[name]())
    alone = step.everything()
    with minifloat.inspect(step.net) as report:
        same(alone, step.everything())
    same(alone, step.everything())
    assert list(report.layers) == ["0", "2"]
    for layer in report.layers.values():
        assert list(layer.operands) == list(OPERANDS)
        assert all(o.sqnr is not None and 15 < o.sqnr < 45 for o in layer.operands.values())
    found = minifloat.bisect(step.net, step, "grad", gemms=True)
    assert {(e.layer, e.gemm) for e in found.effects} == {(n, g) for n in "02" for g in GEMMS}
    assert found.repeat == 0


class Gated(nn.Module):
    """What `convert(fuse=True)` knows as a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(64, 96, bias=False)
        self.up_proj = nn.Linear(64, 96, bias=False)
        self.down_proj = nn.Linear(96, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate = nn.functional.silu(self.gate_proj(x))
        return self.down_proj(gate * self.up_proj(x))  # type: ignore[no-any-return]


def test_a_converted_gate() -> None:
    torch.manual_seed(0)
    net = Gated().bfloat16()
    plain = copy.deepcopy(net)
    report = minifloat.convert(net, RECIPES["mxfp8"](), skip_ends=False, fuse=True)
    assert report.fused
    minifloat.convert(plain, RECIPES["mxfp8"](), skip_ends=False)
    x = torch.randn(40, 64).to(torch.bfloat16)

    def step(of: nn.Module) -> dict[str, Tensor]:
        of.zero_grad()
        loss = of(x.requires_grad_()).float().square().mean()
        loss.backward()
        return {"loss": loss.detach(), **{n: p.grad.clone() for n, p in of.named_parameters()}}

    alone = step(net)
    with minifloat.inspect(net) as seen:
        same(alone, step(net))
    with minifloat.inspect(plain) as apart:
        step(plain)
    # One product, and each layer's own part of it.
    for name, layer in seen.layers.items():
        assert list(layer.operands) == list(OPERANDS)
        for operand, told in apart.layers[name].operands.items():
            of = layer.operands[operand]
            assert (of.elements, of.casts) == (told.elements, told.casts), (name, operand)
            # The gradient of a gate by itself is rounded to bf16 on the way.
            assert of.sqnr == pytest.approx(told.sqnr, rel=1e-2), (name, operand)
            assert of.amax == pytest.approx(told.amax, rel=1e-2), (name, operand)
    found = minifloat.bisect(net, lambda: step(net)["loss"], gemms=True)
    assert {(e.layer, e.gemm) for e in found.effects} == {
        (n, g) for n in seen.layers for g in GEMMS
    }
    assert found.skipped == ()
