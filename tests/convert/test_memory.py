"""`memory_report` says what autograd really holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import minifloat
from minifloat import recipe

from .models import INNER, Model

RECIPES = (
    recipe.DelayedScaling(),
    recipe.Float8CurrentScaling(),
    recipe.Float8BlockScaling(),
    recipe.MXFP8BlockScaling(),
    recipe.NVFP4BlockScaling(),
    recipe.Float8CurrentScaling(backward_override="high_precision"),
)
TOKENS = 256


def held(module: Any, used: recipe.Recipe | None, width: int, *rest: Any) -> float:
    """Bytes per token that a real forward keeps."""
    own = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    sizes: dict[int, int] = {}
    kept = []  # what is not alive could be at the address of another

    def keep(t: torch.Tensor) -> torch.Tensor:
        kept.append(t)
        if t.untyped_storage().data_ptr() not in own:
            sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    x = torch.randn(TOKENS, width, dtype=torch.bfloat16, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t)
    with minifloat.autocast(used is not None, recipe=used), hooks:
        module(x, *rest)
    return sum(sizes.values()) / TOKENS


@pytest.mark.parametrize("used", RECIPES, ids=lambda r: r.__class__.__name__)
@pytest.mark.parametrize("kind", ("Linear", "LayerNormLinear", "LayerNormMLP"))
def test_it_is_what_a_forward_keeps(kind: str, used: recipe.Recipe) -> None:
    module = getattr(minifloat, kind)(64, 128, params_dtype=torch.bfloat16, device="cpu")
    (layer,) = minifloat.memory_report(module, used, tokens=TOKENS).layers
    assert layer.kept_before == pytest.approx(held(module, None, 64), abs=0.2)
    assert layer.kept_after == pytest.approx(held(module, used, 64), abs=0.2)


@pytest.mark.parametrize("used", RECIPES, ids=lambda r: r.__class__.__name__)
def test_operations(used: recipe.Recipe) -> None:
    """They were left out: a model of operations had no bytes at all."""
    from minifloat import ops

    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cpu"}
    model = ops.Sequential(ops.LayerNorm(64, **options), ops.Linear(64, 128, **options))
    (layer,) = minifloat.memory_report(model, used, tokens=TOKENS).layers
    assert (layer.name, layer.kind) == ("1.basic_ops.0", "BasicLinear")
    module = minifloat.Linear(64, 128, bias=False, params_dtype=torch.bfloat16, device="cpu")
    (same,) = minifloat.memory_report(module, used, tokens=TOKENS).layers
    assert (layer.kept_before, layer.kept_after) == (same.kept_before, same.kept_after)
    for scaled in (False, True):
        experts = ops.Sequential(ops.GroupedLinear(4, 64, 128, scale_bias=scaled, **options))
        (layer,) = minifloat.memory_report(experts, used, tokens=TOKENS).layers
        sizes = torch.tensor([TOKENS, 0, 0, 0])
        scales = (torch.ones(TOKENS, dtype=torch.bfloat16),) if scaled else ()
        rest = (sizes, *scales)
        assert layer.kept_before == pytest.approx(held(experts, None, 64, *rest), abs=0.5)
        assert layer.kept_after == pytest.approx(held(experts, used, 64, *rest), abs=0.5)


@pytest.mark.parametrize("used", RECIPES, ids=lambda r: r.__class__.__name__)
@pytest.mark.parametrize("single", [False, True], ids=["apart", "single"])
def test_experts(single: bool, used: recipe.Recipe) -> None:
    module = minifloat.GroupedLinear(
        4, 64, 128, params_dtype=torch.bfloat16, device="cpu", single_grouped_weight=single
    )
    before = dict(module.__dict__), list(module.parameters())
    (layer,) = minifloat.memory_report(module, used, tokens=TOKENS).layers
    assert module.__dict__ == before[0]
    assert all(a is b for a, b in zip(module.parameters(), before[1], strict=True))
    splits = [100, 0, 56, 100]
    assert layer.parameters == 4 * 128 * 65
    assert layer.kept_before == pytest.approx(held(module, None, 64, splits), abs=0.2)
    assert layer.kept_after == pytest.approx(held(module, used, 64, splits), abs=0.2)


@pytest.mark.parametrize("single", [False, True], ids=["apart", "single"])
def test_quantized_experts(single: bool) -> None:
    used = recipe.MXFP8BlockScaling()
    with minifloat.quantized_model_init(recipe=used):
        module = minifloat.GroupedLinear(
            4, 64, 128, params_dtype=torch.bfloat16, device="cpu", single_grouped_weight=single
        )
    (layer,) = minifloat.memory_report(module, used, tokens=TOKENS).layers
    codes, scales, bias = 2 * 4 * 64 * 128, 2 * 4 * 128 * 4, 2 * 4 * 128
    state = sum(b.numel() * b.element_size() for b in module.buffers())
    assert layer.bytes_after == codes + scales + bias + state


def test_before_conversion_and_after() -> None:
    model = Model().to(torch.bfloat16)
    used = recipe.Float8CurrentScaling()
    report = minifloat.memory_report(model, used)
    assert [layer.name for layer in report.layers] == [*INNER, "head"]
    first = report.layers[0]
    assert (first.kept_before, first.kept_after) == (96, pytest.approx(48, abs=0.01))
    assert report.per_parameter == (2, 2)
    assert {type(m) for m in model.modules()} & {minifloat.Linear} == set()

    minifloat.convert(model, used)
    again = minifloat.memory_report(torch.compile(model), recipe.MXFP8BlockScaling())
    assert [layer.recipe for layer in again.layers] == ["Float8CurrentScaling"] * 4 + [""]
    assert [layer.name for layer in again.layers] == [*INNER, "head"]
    assert again.layers[0].kept_after == first.kept_after
    assert again.layers[-1].kept_after == again.layers[-1].kept_before
    assert "total" in str(again)


def test_quantized_parameters_and_copies() -> None:
    used = recipe.MXFP8BlockScaling()
    with minifloat.quantized_model_init(recipe=used):
        layer = minifloat.Linear(64, 128, bias=False, params_dtype=torch.bfloat16, device="cpu")
    (found,) = minifloat.memory_report(layer, used).layers
    state = sum(b.nbytes for b in layer.buffers())
    assert found.bytes_before == 64 * 128 * 2
    assert 2 * 64 * 128 <= found.bytes_after - state < 2.5 * 64 * 128  # both copies, and scales


def test_frozen_layers_keep_nothing() -> None:
    layer = nn.Linear(64, 128).requires_grad_(False)
    (found,) = minifloat.memory_report(layer, recipe.Float8CurrentScaling()).layers
    assert found.kept_before == 0
    assert found.kept_after == pytest.approx(0, abs=0.01)


def test_nothing_is_run_and_nothing_changes() -> None:
    seen = []
    layer = minifloat.Linear(32, 32, device="cpu")
    layer.register_forward_hook(lambda *args: seen.append(args))
    state = {name: b.clone() for name, b in layer.named_buffers()}
    minifloat.memory_report(layer, recipe.DelayedScaling(amax_history_len=8))
    assert seen == []
    assert not layer.delayed.used
    for name, b in layer.named_buffers():
        assert torch.equal(b, state[name])


def test_a_lazy_layer_has_no_size_yet() -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 4))
    assert [layer.name for layer in minifloat.memory_report(model).layers] == ["1"]
    model(torch.randn(2, 16))
    assert [layer.name for layer in minifloat.memory_report(model).layers] == ["0", "1"]


def test_a_wrong_recipe() -> None:
    with pytest.raises(TypeError, match="recipe: got 'fp8'"):
        minifloat.memory_report(Model(), "fp8")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="model: got str"):
        minifloat.memory_report("model")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tokens: got 0"):
        minifloat.memory_report(Model(), tokens=0)
