"""Backward after delayed scaling's buffers have been replaced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import minifloat
from minifloat import recipe as recipes
from minifloat.opaque import AVAILABLE

DELAYED = recipes.DelayedScaling(amax_history_len=4)
compiles = pytest.mark.skipif(not AVAILABLE, reason="this PyTorch has no opaque objects")


def layer() -> Any:
    torch.manual_seed(1)
    return minifloat.Linear(32, 48)


def data() -> Tensor:
    return torch.randn(6, 32, generator=torch.Generator().manual_seed(0))


def second_step(way: str, first: int, between: int) -> tuple[list[float], Any]:
    """What backward of `first` rows recorded, a forward of `between` having come before it."""
    module = layer()
    x = data().requires_grad_()

    def function(x: Tensor) -> Any:
        with minifloat.autocast(recipe=DELAYED.replace(amax_history_len=first)):
            return module(x)

    function = (
        torch.compile(function, backend="aot_eager", fullgraph=True)
        if way == "compiled"
        else function
    )
    function(x).backward(torch.full((6, 48), 2.0))
    y = function(x)
    with minifloat.autocast(recipe=DELAYED.replace(amax_history_len=between)):
        module(x)
    y.backward(torch.full_like(y, 3.0))
    return module.delayed.history_backward[:, 0].tolist(), module


@pytest.mark.parametrize(
    ("way", "first", "between", "expected"),
    [
        ("eager", 3, 5, [0, 2, 3, 0, 0]),
        ("eager", 5, 3, [0, 0, 3]),
        pytest.param("compiled", 3, 3, [0, 2, 3], marks=compiles),
        pytest.param("compiled", 3, 5, [0, 2, 3, 0, 0], marks=compiles),
    ],
)
def test_backward_after_a_history_of_another_length(
    way: str, first: int, between: int, expected: list[float]
) -> None:
    history, module = second_step(way, first, between)
    assert history == expected
    assert module.delayed.scale_grad_output == torch.tensor(57344.0) / 3.0


@pytest.mark.parametrize("assign", [False, True])
def test_backward_after_a_checkpoint_records_in_what_was_loaded(assign: bool) -> None:
    module, other = layer(), layer()
    for m, length in ((module, 3), (other, 5)):
        with minifloat.autocast(recipe=DELAYED.replace(amax_history_len=length)):
            y = m(data().requires_grad_())
    loaded = other.state_dict()
    with minifloat.autocast(recipe=DELAYED.replace(amax_history_len=3)):
        y = module(data().requires_grad_())
    state = {k: v for k, v in loaded.items() if k.startswith("delayed.")}
    module.load_state_dict(state, strict=False, assign=assign)
    y.sum().backward()
    assert module.delayed.history_backward[:, 0].tolist() == [0, 0, 1, 0, 0]
    assert module.delayed.scale_grad_output == 57344.0 and module.delayed.amax_grad_output == 0
