"""Modules of a user's own: their quantizers under delayed scaling, and their state dicts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minifloat
from minifloat import recipe as recipes

DELAYED = recipes.DelayedScaling(amax_history_len=4)


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Any, backward: Any) -> Any:
        ctx.quantizer = backward
        return forward.quantize(x).dequantize()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.quantizer.quantize(grads[0]).dequantize(), None, None


class Rounds(minifloat.Module):
    """Rounds what passes, in both directions."""

    def forward(self, x: Tensor) -> Tensor:
        found = self.quantizers
        made = _Round.apply(x, found["scaling_fwd"][0], found["scaling_bwd"][0])  # type: ignore[no-untyped-call]
        return made  # type: ignore[no-any-return]


class Slots(minifloat.Module):
    """Has another number of slots than a linear layer."""

    def __init__(self, count: int) -> None:
        super().__init__(name="mine")
        self.count, self.gain = count, nn.Parameter(torch.ones(()))

    def get_quantizer_roles(self, *, fwd: bool, num_quantizers: int) -> list[Any]:
        kind = "input" if fwd else "grad_output"
        return [minifloat.QuantizerRole("mine", kind, "") for _ in range(self.count)]


@pytest.mark.parametrize("own", [False, True])
def test_scales_of_gradients_move_on(own: bool) -> None:
    """They stayed at 1, where small gradients round to zero. Without an autocast all did."""
    module = Rounds()
    module.recipe = DELAYED if own else None
    for i in range(3):
        x = torch.full((2, 16), 3.0, requires_grad=True)
        with minifloat.autocast(enabled=True, recipe=DELAYED) if not own else torch.enable_grad():
            y = module(x)
        y.backward(torch.full_like(y, 1e-6))
        assert x.grad is not None
        assert torch.equal(x.grad, torch.full_like(x, 1e-6)) is (i > 0), i
    assert module.delayed.scale_input == torch.tensor(448.0) / 3
    assert module.delayed.scale_grad_output == torch.tensor(57344.0) / torch.tensor(1e-6)


def test_an_evaluation_moves_no_scale_of_gradients() -> None:
    module = Rounds()
    x = torch.ones(2, 16, requires_grad=True)
    with minifloat.autocast(recipe=DELAYED):
        y = module(x)
    y.sum().backward()
    with torch.no_grad(), minifloat.autocast(recipe=DELAYED):
        module(x)
    assert module.delayed.scale_grad_output == 1 and module.delayed.amax_grad_output == 1


@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("recipe", [recipes.MXFP8BlockScaling(), DELAYED])
def test_a_state_dict_inside_an_autocast(count: int, recipe: Any) -> None:
    with minifloat.autocast(recipe=recipe):
        assert list(Slots(count).state_dict()) == ["gain"]


def test_delayed_scaling_has_the_slots_of_a_linear_layer() -> None:
    with (
        minifloat.autocast(recipe=DELAYED),
        pytest.raises(NotImplementedError, match=r"Slots\(mine\).*slots of a linear layer"),
    ):
        _ = Slots(1).quantizers
