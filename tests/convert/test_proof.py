"""`assert_quantized` counts what ran, in eager and in compiled code, and fails by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import minifloat
from minifloat import ops, recipe

from .models import INNER, Model, tokens, train

CURRENT = recipe.Float8CurrentScaling()


def converted(used: recipe.Recipe = CURRENT, blocks: int = 2) -> Model:
    model = Model(blocks=blocks)
    minifloat.convert(model, used)
    return model


def counted(model: Any, times: int = 1, run: Any = None) -> minifloat.proof.QuantizedReport:
    def step() -> float:
        forward = model if run is None else run
        loss = sum(forward(tokens()).square().mean() for _ in range(times))
        loss.backward()
        return float(loss.detach())

    return minifloat.assert_quantized(model, step)


def test_each_product_is_counted() -> None:
    report = counted(converted(), times=2)
    assert list(report.layers) == INNER
    assert {layer.quantized for layer in report.layers.values()} == {(2, 2, 2)}
    assert report.total == 24
    assert isinstance(report.result, float)
    assert str(report) == "24 quantized products ran, in 4 of 4 layers"


def test_counting_changes_nothing_and_leaves_nothing() -> None:
    a, b = converted(), converted()
    b.load_state_dict(a.state_dict())
    keys = list(a.state_dict())
    assert train(a, steps=1) == minifloat.assert_quantized(b, lambda: train(b, steps=1)).result
    assert list(b.state_dict()) == keys
    assert all(m._counts is None for m in b.modules() if isinstance(m, minifloat.Linear))


@pytest.mark.parametrize("used", (CURRENT, recipe.DelayedScaling()), ids=("current", "delayed"))
def test_compiled(used: recipe.Recipe) -> None:
    torch._dynamo.reset()
    model = converted(used, blocks=1)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    train(compiled, steps=1)
    report = counted(compiled, times=2)  # two forwards, then both backwards
    assert list(report.layers) == INNER[:2]
    assert {layer.quantized for layer in report.layers.values()} == {(2, 2, 2)}
    assert counter.frame_count == 2  # one graph that counts
    train(compiled, steps=1)
    assert counter.frame_count == 2  # and the first one again


def test_inside_a_compiled_checkpoint() -> None:
    model = converted()
    block = model.blocks[0]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(x: torch.Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)

    x = torch.randn(5, 48, requires_grad=True)
    report = minifloat.assert_quantized(block, lambda: run(x).sum().backward())
    # Forward, and again in backward; PyTorch 2.11 keeps what it should compute again.
    assert report.layers["up"].quantized in ((2, 1, 1), (1, 1, 1))


def test_a_recipe_may_ask_for_high_precision() -> None:
    report = counted(converted(CURRENT.replace(backward_override="high_precision")))
    layer = report.layers["blocks.0.up"]
    assert (layer.quantized, layer.by_recipe, layer.high) == ((1, 0, 0), (0, 1, 1), (0, 0, 0))


def test_main_grad_and_frozen_layers() -> None:
    layer = minifloat.Linear(32, 48, fuse_wgrad_accumulation=True, device="cpu")
    layer.weight.main_grad = torch.zeros(48, 32)
    frozen = minifloat.Linear(48, 32, device="cpu").requires_grad_(False)
    model = nn.Sequential(layer, frozen)
    minifloat.convert(model, CURRENT, skip_ends=False)
    x = torch.randn(6, 32)
    report = minifloat.assert_quantized(model, lambda: model(x).sum().backward())
    assert report.layers["0"].quantized == (1, 0, 1)
    assert report.layers["1"].quantized == (1, 1, 0)


# --------------------------------------------------------------------------------------- failures
def test_high_precision_fails_by_name() -> None:
    model = converted()
    model.blocks[1].up.recipe = None
    with pytest.raises(AssertionError, match=r"(?s)9 quantized.*blocks\.1\.up: ran in high prec"):
        counted(model)
    with minifloat.autocast(enabled=False), pytest.raises(AssertionError, match="in 0 of 4 layers"):
        counted(model)


def test_high_precision_fails_compiled() -> None:
    model = converted(blocks=1)
    model.blocks[0].up.recipe = None
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with pytest.raises(AssertionError, match=r"blocks\.0\.up: ran in high precision: 1 fprop"):
        counted(model, run=compiled)


def test_half_of_the_calls_in_high_precision() -> None:
    layer = minifloat.Linear(32, 32, device="cpu")
    x = torch.randn(4, 32)

    def step() -> None:
        layer(x)
        with minifloat.autocast():
            layer(x)

    with pytest.raises(AssertionError, match=r"high precision: 1 fprop \(and 1 quantized\)"):
        minifloat.assert_quantized(layer, step)


def test_a_layer_that_did_not_run() -> None:
    model = converted()
    model.blocks[1].forward = lambda x: x
    with pytest.raises(AssertionError, match=r"(?s)blocks\.1\.down: did not run.*was not called"):
        counted(model)


def test_a_model_without_layers_of_ours() -> None:
    with pytest.raises(AssertionError, match=r"call minifloat\.convert"):
        counted(Model())


def test_an_error_in_the_step_is_the_users() -> None:
    model = converted()

    def step() -> None:
        model(tokens())
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        minifloat.assert_quantized(model, step)
    assert model.blocks[0].up._counts is None
    with pytest.raises(TypeError, match="step: got float"):
        minifloat.assert_quantized(model, 1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="model: got str"):
        minifloat.assert_quantized("model", step)  # type: ignore[arg-type]


def test_a_model_that_is_a_layer_has_a_name_too() -> None:
    with pytest.raises(AssertionError, match=r"\(model\): did not run"):
        minifloat.assert_quantized(minifloat.Linear(8, 8, device="cpu"), lambda: None)


def test_not_twice_at_once() -> None:
    model = converted()
    with pytest.raises(RuntimeError, match="counted already"):
        minifloat.assert_quantized(model, lambda: counted(model))
    counted(model)


@pytest.mark.parametrize("single", [False, True], ids=["apart", "single"])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.deep)])
def test_experts(single: bool, compiled: bool) -> None:
    """A product of all experts is one."""
    torch._dynamo.reset()
    model = nn.ModuleDict(
        {"experts": minifloat.GroupedLinear(3, 32, 48, device="cpu", single_grouped_weight=single)}
    )
    call: Any = model["experts"]
    if compiled:
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    x = torch.randn(20, 32)

    def step(used: recipe.Recipe | None = CURRENT) -> None:
        for sizes in ([4, 0, 16], [20, 0, 0]):
            with minifloat.autocast(enabled=used is not None, recipe=used):
                y = call(x.clone().requires_grad_(), torch.tensor(sizes))
            y.sum().backward()

    report = minifloat.assert_quantized(model, step)
    assert report.layers["experts"].quantized == (2, 2, 2) and report.total == 6
    override = recipe.Float8CurrentScaling(backward_override="high_precision")
    found = minifloat.assert_quantized(model, lambda: step(override)).layers["experts"]
    assert (found.quantized, found.by_recipe) == ((2, 0, 0), (0, 2, 2))
    with pytest.raises(AssertionError, match="experts: ran in high precision: 2 fprop, 2 dgrad"):
        minifloat.assert_quantized(model, lambda: step(None))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.deep)])
def test_operations(compiled: bool) -> None:
    """Fused or not: linear operations by their names in the sequence, experts at once."""
    torch._dynamo.reset()
    sizes = torch.tensor([4, 0, 16])
    model = ops.Sequential(
        ops.LayerNorm(32, device="cpu"),
        ops.Linear(32, 64, device="cpu"),
        ops.GELU(),
        ops.Linear(64, 32, bias=False, device="cpu"),
        ops.GroupedLinear(3, 32, 64, device="cpu"),
        ops.ScaledSwiGLU(),
        ops.GroupedLinear(3, 32, 16, device="cpu", single_grouped_weight=True),
    )
    call: Any = model
    if compiled:
        call = torch.compile(model, backend="aot_eager", fullgraph=True)
    x, scales = torch.randn(20, 32), torch.rand(20)

    def step(used: recipe.Recipe | None = CURRENT) -> None:
        with minifloat.autocast(enabled=used is not None, recipe=used):
            call(x.clone().requires_grad_(), sizes, scales, sizes).sum().backward()

    layers = minifloat.assert_quantized(model, step).layers
    assert list(layers) == ["1.basic_ops.0", "3.basic_ops.0", "4", "6"]
    assert all(layer.quantized == (1, 1, 1) for layer in layers.values())
    with pytest.raises(AssertionError, match="6: ran in high precision: 1 fprop, 1 dgrad, 1 wgrad"):
        minifloat.assert_quantized(model, lambda: step(None))
