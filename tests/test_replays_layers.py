"""Whole layers, recorded and replayed without a GPU: the reference's operators count as pure."""

from __future__ import annotations

import copy
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import minifloat
from minifloat import opaque, programs, recorder, replays
from minifloat.writer import Program

from .modules.cases import RECIPES

SHAPE = (2, 8, 64)
LAYERS: dict[str, Any] = {
    "tap": lambda: minifloat.LayerNormLinear(64, 48, return_layernorm_output=True, device="cpu"),
    "mlp": lambda: minifloat.LayerNormMLP(
        64, 48, normalization="RMSNorm", activation="swiglu", device="cpu"
    ),
    "mlp_again": lambda: minifloat.LayerNormMLP(64, 48, checkpoint=True, device="cpu"),
}
CASES = [("tap", "none"), ("mlp_again", "current"), *[("mlp", name) for name in RECIPES]]


class Pure:
    """Operators but those that read values or draw random numbers."""

    def __contains__(self, func: Any) -> bool:
        if func is torch.ops.aten._local_scalar_dense.default or func.namespace != "aten":
            return False
        return torch.Tag.nondeterministic_seeded not in func.tags


@pytest.fixture(autouse=True)
def _recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are recorded as where kernels run, which do not."""
    yes = SimpleNamespace(
        runs_kernels=lambda x: True, replays=lambda: True, is_current=lambda index: True
    )
    monkeypatch.setattr(replays, "env", yes)
    monkeypatch.setattr(replays, "_KINDS", {})
    monkeypatch.setattr(recorder, "_CALL", Pure())


def forward(layer: Any, recipe: Any, x: Tensor) -> tuple[Tensor, ...]:
    with minifloat.autocast(enabled=recipe is not None, recipe=recipe):
        made = layer(x)
    return made if isinstance(made, tuple) else (made,)


def steps(layer: Any, recipe: Any, run: Any = None) -> list[Tensor]:
    seen: list[Tensor] = []
    for i in range(4):
        torch.manual_seed(i)
        layer.zero_grad(set_to_none=True)
        x = torch.randn(SHAPE, requires_grad=True)
        outputs = forward(layer if run is None else run, recipe, x)
        loss = sum([(y * torch.randn_like(y)).sum() for y in outputs])
        loss.backward()
        made = [*outputs, x.grad, *[p.grad for p in layer.parameters()], *layer.buffers()]
        seen += [t.detach().clone() for t in made if t is not None]
        with torch.no_grad():
            for p in layer.parameters():
                p.mul_(1.125)
    return seen


def make(kind: str, name: str) -> tuple[Any, Any]:
    torch.manual_seed(7)
    return LAYERS[kind](), None if name == "none" else RECIPES[name]()


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_replayed_steps_are_the_ordinary_ones_bit_for_bit(
    kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, recipe = make(kind, name)
    other = copy.deepcopy(layer)
    with monkeypatch.context() as patch:
        patch.setattr(replays, "_kind", lambda *given: None)
        expected = steps(other, recipe)
    found = steps(layer, recipe)
    assert len(found) == len(expected)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(a, b), i
    (recorded,) = replays._KINDS.values()
    assert isinstance(recorded, replays.Recorded)
    (backward,) = recorded.backward.values()
    # Without a kernel, delayed scaling's step is made of the recipe's own functions.
    assert isinstance(backward, str if name == "delayed" else Program)


@pytest.mark.parametrize(("kind", "name"), [("tap", "none"), ("tap", "current")])
def test_a_graph_without_a_backward_is_freed(kind: str, name: str) -> None:
    layer, recipe = make(kind, name)

    class Mark:
        pass

    for _ in range(4):
        outputs = forward(layer, recipe, torch.randn(SHAPE))
        node = outputs[0].grad_fn
        assert node is not None
        node.metadata["mark"] = Mark()
        gone = weakref.ref(node.metadata["mark"])
        del outputs, node
        gc.collect()
        assert gone() is None


def test_an_output_that_is_saved_must_not_be_changed() -> None:
    layer, recipe = make("tap", "none")
    for _ in range(4):
        y, tap = forward(layer, recipe, torch.randn(SHAPE))
        tap.mul_(2)
        with pytest.raises(RuntimeError, match="inplace"):
            y.sum().backward()


@pytest.mark.skipif(not opaque.AVAILABLE, reason="needs PyTorch's opaque objects")
@pytest.mark.parametrize("name", ["delayed", "block"])
def test_operators_of_a_compiled_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph runs its operators as recorded programs, with the bits of eager."""
    recipe = RECIPES[name]()
    torch.manual_seed(0)
    layer = LAYERS["mlp"]()
    other = copy.deepcopy(layer)
    expected = steps(other, recipe)
    monkeypatch.setattr(programs, "env", replays.env)
    monkeypatch.setattr(programs, "_OPERATORS", {})
    torch._dynamo.reset()
    fast = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for a, b in zip(steps(layer, recipe, fast), expected, strict=True):
        assert torch.equal(a, b)
    known = list(programs._OPERATORS.values())
    assert known and sum(isinstance(k, tuple) for k in known) > len(known) // 2, known
