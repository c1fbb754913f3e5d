"""`cache_weights`: when a kept weight is cast again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import minifloat
from minifloat.recipe import MXFP8BlockScaling

MX = MXFP8BlockScaling()


@pytest.mark.parametrize("kind", ["fused", "compiled", "ranks"])
def test_cache_weights_sees_the_step_of_an_optimizer_that_counts_no_writes(kind: str) -> None:
    class Receives(torch.optim.SGD):
        """As one whose other ranks take the step."""

        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                p.data.sub_(p.grad)

    with minifloat.autocast(recipe=MX):
        module, other = minifloat.Linear(32, 48, cache_weights=True), minifloat.Linear(32, 48)
        frozen = minifloat.Linear(32, 48, cache_weights=True).requires_grad_(False)
        x = torch.randn(4, 32)
        make = Receives if kind == "ranks" else torch.optim.SGD
        optimizer = make(module.parameters(), 1.0, fused=kind != "ranks")
        step = torch.compile(optimizer.step, backend="eager") if kind == "compiled" else None
        for _ in range(3):
            other.load_state_dict(module.state_dict())
            y = module(x)
            assert torch.equal(y, other(x))
            assert torch.equal(module(x), y)
            frozen(x)
            kept = frozen._cached_version, module._cached_version
            y.sum().backward()
            (step or optimizer.step)()
            frozen(x), module(x)
            assert frozen._cached_version == kept[0] and module._cached_version != kept[1]
