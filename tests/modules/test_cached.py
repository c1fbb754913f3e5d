"""`cache_weights`: when a kept weight is cast again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import minifloat
from minifloat.recipe import CustomRecipe, MXFP8BlockScaling

MX = MXFP8BlockScaling()


def _high_dgrad(role: Any) -> Any:
    """MXFP8, but that the gradient of the input multiplies the weight itself."""
    made = minifloat.MXFP8Quantizer(minifloat.DType.kFloat8E4M3)
    if role is None or role.tensor_type != "weight":
        return made
    return minifloat.HybridQuantizer(
        rowwise_quantizer=made, columnwise_quantizer=minifloat.IdentityQuantizer()
    )


HIGH_DGRAD = CustomRecipe(qfactory=_high_dgrad)


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


@pytest.mark.parametrize("cache", [False, True])
def test_a_copy_in_high_precision_is_not_the_weight(cache: bool) -> None:
    with minifloat.autocast(recipe=HIGH_DGRAD):
        module = minifloat.Linear(32, 48, bias=False, cache_weights=cache)
        x, weight = torch.randn(4, 32, requires_grad=True), module.weight
        then, version = weight.detach().clone(), weight._version
        first, second = (None, None) if cache else (True, False)
        (
            module(x, is_first_microbatch=first) + module(x, is_first_microbatch=second)
        ).sum().backward()
        assert weight._version == version
        with torch.no_grad():
            weight.mul_(2)
        x.grad = None
        module(x, is_first_microbatch=second).sum().backward()
    used = weight.detach() if cache else then  # False: what was kept
    torch.testing.assert_close(x.grad, used.sum(0).expand(4, 32))


def test_a_kept_weight_of_experts_is_not_the_weight() -> None:
    with minifloat.autocast(recipe=HIGH_DGRAD):
        module = minifloat.GroupedLinear(2, 32, 48, bias=False, single_grouped_weight=True)
        x, version = torch.randn(4, 32), module.weight._version
        for first in (True, False, True):
            module(x, [1, 3], is_first_microbatch=first)
    assert module.weight._version == version


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("moved", [False, True])
def test_false_before_any_true_casts(cache: bool, moved: bool) -> None:
    """Not what was in the weight when the layer was made, which a checkpoint has replaced."""
    with minifloat.autocast(recipe=MX):
        module, other = minifloat.Linear(32, 48, cache_weights=cache), minifloat.Linear(32, 48)
        x = torch.randn(4, 32)
        if moved:
            module(x, is_first_microbatch=True)
            module.to_empty(device=module.weight.device)
        module.load_state_dict(other.state_dict())
        assert torch.equal(module(x, is_first_microbatch=False), other(x))
        with torch.no_grad():
            module.weight.mul_(2)
        assert torch.equal(module(x, is_first_microbatch=False), other(x))  # what was kept
