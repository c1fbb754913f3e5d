"""Steps of a layer in CUDA graphs, and what they leave, to compare with eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import minifloat
from minifloat import recipe as recipes
from minifloat.recipe.delayed import DelayedState

from .cases import RECIPES

EVERY = {
    **RECIPES,
    "nvfp4-nearest": lambda: recipes.NVFP4BlockScaling(disable_stochastic_rounding=True),
}


def copies(layer: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Everything a step leaves, by name, safe from the next one."""
    assert x.grad is not None
    found = {"output": y.detach(), "input.grad": x.grad}
    found |= {f"{name}.grad": p.grad for name, p in layer.named_parameters()}
    found |= dict(layer.named_buffers())
    return {name: t.clone() for name, t in found.items()}


def same(expected: dict[str, Tensor], got: dict[str, Tensor], close: tuple[str, ...] = ()) -> None:
    """Bit for bit; those in `close`, sums that Inductor orders anew, to two roundings of bf16."""
    assert list(expected) == list(got)
    for name, a in expected.items():
        b = got[name]
        assert a.shape == b.shape and a.dtype == b.dtype, name
        if name in close:
            assert (a - b).abs().max() <= 2**-7 * a.abs().max(), name
        else:
            off = (a.float() - b.float()).abs().max().item()
            assert torch.equal(a, b), f"{name}: {off} off"


class Captured:
    """Forward and backward of a layer in a CUDA graph, the autocast inside.

    `sample(seed)` is the input of a step, `g` the gradient of every output.
    """

    def __init__(
        self, layer: Any, sample: Callable[[int], Tensor], g: Tensor, recipe: Any, **forward: Any
    ) -> None:
        self.layer, self.recipe, self.forward = layer, recipe, forward
        self.sample, self.g = sample, g
        self.x = sample(0).requires_grad_()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.clear()
                self.run()
        torch.cuda.current_stream().wait_stream(side)
        self.clear()
        for state in layer.modules():
            if isinstance(state, DelayedState):
                state.reset()  # of what the warm-up recorded
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.y = self.run()
        # A replay writes the gradients that the capture made.
        self.grads = [self.x.grad, *(p.grad for p in layer.parameters())]

    def clear(self) -> None:
        self.layer.zero_grad(set_to_none=True)
        self.x.grad = None

    def run(self) -> Tensor:
        with minifloat.autocast(recipe=self.recipe):
            y = self.layer(self.x, **self.forward)
        y.backward(self.g)
        return y.detach()  # type: ignore[no-any-return]

    def replay(self, seed: int) -> dict[str, Tensor]:
        with torch.no_grad():
            self.x.copy_(self.sample(seed))
        torch.manual_seed(seed)
        for t, grad in zip((self.x, *self.layer.parameters()), self.grads, strict=True):
            t.grad = grad
        self.graph.replay()
        return copies(self.layer, self.x, self.y)
