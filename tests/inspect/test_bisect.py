"""`bisect` finds the layer that does the harm, and leaves everything as it was."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minifloat
from minifloat import recipe
from minifloat.inspect import GEMMS
from minifloat.recipe.factories import (
    current_scaling_factory,
    high_precision_factory,
    nvfp4_factory,
)

from .models import BF16, LAYERS, RECIPES, Step, batch, model, same

CURRENT = recipe.Float8CurrentScaling()


class Plain:
    """A step for `bisect`: forward and backward, the loss."""

    def __init__(self, net: nn.Module, used: recipe.Recipe, call: Any = None) -> None:
        self.net, self.used = net, used
        self.call = net if call is None else call
        self.x = batch().requires_grad_()

    def __call__(self) -> Tensor:
        self.x.grad = None
        with minifloat.autocast(recipe=self.used):
            loss: Tensor = self.call(self.x).float().square().mean()
        loss.backward()
        return loss.detach()


def one_bad(bad: str, others: Any = high_precision_factory) -> tuple[nn.Sequential, recipe.Recipe]:
    """Layers named a, b and c; the recipe quantizes one of them to four bits."""
    torch.manual_seed(0)
    layers = {name: minifloat.Linear(64, 64, name=name, **BF16) for name in "abc"}
    net = nn.Sequential()
    for name, layer in layers.items():
        net.add_module(name, layer)

    def factory(role: Any) -> Any:
        named = role is not None and role.name == bad
        return nvfp4_factory(role) if named else others(role)

    return net, recipe.CustomRecipe(qfactory=factory)


@pytest.mark.parametrize("metric", ("loss", "grad"))
def test_the_guilty_layer_comes_first(metric: str) -> None:
    net, used = one_bad("b")
    found = minifloat.bisect(net, Plain(net, used), metric)
    assert [e.layer for e in found.effects] == ["b"]
    assert found.skipped == ("a", "c")
    assert found.effects[0].effect == found.distance > 0 == found.effects[0].distance
    assert found.repeat == 0


def test_ranked_by_effect() -> None:
    net, used = one_bad("b", current_scaling_factory)
    found = minifloat.bisect(net, Plain(net, used), "grad")
    assert found.effects[0].layer == "b" and len(found.effects) == 3
    effects = [e.effect for e in found.effects]
    assert effects == sorted(effects, reverse=True)
    assert found.quantized == found.distance and found.high_precision == 0


@pytest.mark.parametrize("name", RECIPES)
def test_all_layers_in_high_precision_are_a_step_without_a_recipe(name: str) -> None:
    net = model()
    step = Plain(net, RECIPES[name]())
    found = minifloat.bisect(net, step, "loss")
    with minifloat.autocast(enabled=False):
        exact = net(step.x).detach().float().square().mean()
    assert found.high_precision == float(exact)
    assert {e.layer for e in found.effects} == set(LAYERS)


QUICK = ("delayed", "nvfp4", "dequantized")
SOME = [n if n in QUICK else pytest.param(n, marks=pytest.mark.deep) for n in RECIPES]


@pytest.mark.parametrize("name", SOME)
def test_single_products(name: str) -> None:
    net = model()
    found = minifloat.bisect(net, Plain(net, RECIPES[name]()), "grad", gemms=True)
    backward = () if "override" in name or name == "dequantized" else GEMMS[1:]
    assert {(e.layer, e.gemm) for e in found.effects} == {
        (layer, gemm) for layer in LAYERS for gemm in ("fprop", *backward)
    }
    by_name = {(e.layer, e.gemm): e for e in found.effects}
    assert by_name["1.fc2", "fprop"].effect != 0
    if backward:
        assert by_name["1.fc2", "wgrad"].effect > 0  # it touches nothing else
        assert by_name["0", "dgrad"].effect == 0  # nobody reads the gradient of the model's input


def test_a_product_alone_changes_its_gradient_alone() -> None:
    net = nn.Sequential(minifloat.Linear(64, 64, **BF16), minifloat.Linear(64, 64, **BF16))
    step = Plain(net, CURRENT)
    grads: list[list[Tensor]] = []

    def metric(loss: Tensor) -> Tensor:
        grads.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
        return loss

    found = minifloat.bisect(net, step, metric, gemms=True)
    assert found.metric == "metric" and found.repeat == 0
    exact, base, again, *tried = grads
    assert all(torch.equal(a, b) for a, b in zip(base, again, strict=True))
    ordered = [(layer, gemm) for layer in "01" for gemm in GEMMS]
    changed = {
        at: [not torch.equal(a, b) for a, b in zip(base, new, strict=True)]
        for at, new in zip(ordered, tried, strict=True)
    }
    # weight and bias of the first layer, weight and bias of the second
    assert changed["0", "wgrad"] == [True, False, False, False]
    assert changed["1", "wgrad"] == [False, False, True, False]
    assert changed["1", "dgrad"] == [True, True, False, False]
    assert changed["0", "dgrad"] == [False, False, False, False]
    assert not all(torch.equal(a, b) for a, b in zip(base, exact, strict=True))


def test_quantized_parameters() -> None:
    used = RECIPES["mxfp8"]()
    with minifloat.quantized_model_init(recipe=used):
        net = nn.Sequential(
            minifloat.Linear(64, 64, **BF16), minifloat.LayerNormMLP(64, 96, **BF16)
        )
    step = Plain(net, used)
    found = minifloat.bisect(net, step, "grad", gemms=True)
    assert len(found.effects) == 9 and found.distance > 0
    with pytest.warns(UserWarning, match="dequantized"), minifloat.autocast(enabled=False):
        exact = net(step.x).detach().float().square().mean()
    assert minifloat.bisect(net, step).high_precision == float(exact)


# ----------------------------------------------------------------------------- what stays as it was
@pytest.mark.parametrize("name", SOME)
def test_everything_is_restored(name: str) -> None:
    net = model()
    step = Step(net, RECIPES[name]())
    expected = step.everything()
    plain = Plain(net, RECIPES[name]())
    plain()
    before = _state(net)
    numbers = torch.get_rng_state(), random.getstate()
    minifloat.bisect(net, plain, "grad")
    same(before, _state(net))
    assert torch.equal(numbers[0], torch.get_rng_state()) and numbers[1] == random.getstate()
    assert all(getattr(m, "_probe", None) is None for m in net.modules())
    same(expected, step.everything())


def _state(net: nn.Module) -> dict[str, Tensor]:
    found = {f"{name}.grad": p.grad for name, p in net.named_parameters()}
    found.update(net.named_parameters())
    found.update(net.state_dict())
    found.update((f"buffer {name}", b) for name, b in net.named_buffers())
    return {name: t.detach().clone() for name, t in found.items() if t is not None}


def test_a_fresh_delayed_state_stays_fresh() -> None:
    net = minifloat.Linear(64, 64, **BF16)
    keys = list(net.state_dict())
    minifloat.bisect(net, Plain(net, recipe.DelayedScaling(amax_history_len=16)))
    assert list(net.state_dict()) == keys
    assert net.weight.grad is None


def test_cached_weights_and_main_grads_are_restored() -> None:
    net = minifloat.Linear(64, 64, fuse_wgrad_accumulation=True, **BF16)
    net.weight.main_grad = torch.full((64, 64), 0.5)

    def step() -> Tensor:
        with minifloat.autocast(recipe=CURRENT):
            loss: Tensor = net(batch(), is_first_microbatch=first).float().square().mean()
        loss.backward()
        return loss

    first = True
    step()
    kept, cached = net.weight.main_grad.clone(), net._cached
    assert cached is not None
    codes = cached.copies[0][0].clone()
    first = False
    found = minifloat.bisect(net, step, "grad", gemms=True)
    assert {e.gemm for e in found.effects} == {"fprop", "wgrad"} and found.distance > 0
    assert torch.equal(net.weight.main_grad, kept)
    assert net._cached is cached and torch.equal(cached.copies[0][0], codes)


def test_dropout_and_stochastic_rounding_repeat() -> None:
    net = nn.Sequential(minifloat.Linear(64, 64, **BF16), nn.Dropout(), minifloat.Linear(64, 64))
    net[2].bfloat16()
    found = minifloat.bisect(net, Plain(net, RECIPES["nvfp4"]()))
    assert found.repeat == 0
    torch.manual_seed(5)
    step = Plain(net, RECIPES["nvfp4"]())
    found = minifloat.bisect(net, step)
    assert found.quantized == float(step())  # with the random numbers that were next


def test_compiled_steps_run_eagerly() -> None:
    net = minifloat.Linear(64, 64, **BF16)

    def never(module: Any, inputs: Any) -> Any:
        raise AssertionError("compiled")

    step = Plain(net, CURRENT, torch.compile(net, fullgraph=True, backend=never))
    found = minifloat.bisect(net, step)
    assert len(found.effects) == 1 and found.distance > 0


# ------------------------------------------------------------------------------------------- report
def test_json_and_text(tmp_path: Path) -> None:
    net, used = one_bad("c")
    found = minifloat.bisect(net, Plain(net, used), gemms=True)
    found.to_json(tmp_path / "found.json")
    read = json.loads((tmp_path / "found.json").read_text(), parse_constant=pytest.fail)
    assert read["metric"] == "loss" and read["skipped"] == ["a", "b"]
    assert [e["layer"] for e in read["effects"]] == ["c"] * 3
    assert read["effects"][0]["gemm"] == "fprop" and read["effects"][0]["effect"] > 0
    lines = str(found).splitlines()
    assert lines[0].startswith("loss: ") and "two equal runs differ by 0" in lines[0]
    assert "c fprop" in lines[1] and lines[-1] == "  without a quantized product: a, b"


def test_steps_that_differ_are_told() -> None:
    net = minifloat.Linear(64, 64, **BF16)
    calls = iter(range(100))

    def step() -> float:
        with minifloat.autocast(recipe=CURRENT):
            return float(net(batch() * (1 + next(calls))).float().square().mean().detach())

    assert minifloat.bisect(net, step).repeat > 0


def test_a_loss_that_is_not_finite() -> None:
    net, used = one_bad("b")

    def step() -> float:
        with minifloat.autocast(recipe=used):
            y = net(batch())
        exact = nn.functional.linear(net.a(batch()), net.b.weight, net.b.bias)
        return 1.0 if torch.equal(y, net.c(exact)) else math.nan

    found = minifloat.bisect(net, step)
    assert math.isnan(found.quantized) and found.distance == math.inf
    assert found.effects[0].distance == 0 and found.effects[0].effect == math.inf
    assert found.as_dict()["quantized"] is None and "inf" in str(found)
    with pytest.raises(ValueError, match="nan with every layer in high precision: quantization is"):
        minifloat.bisect(net, lambda: math.nan)


# ------------------------------------------------------------------------------------------- errors
def test_bad_arguments() -> None:
    net = minifloat.Linear(64, 64, **BF16)
    step = Plain(net, CURRENT)
    with pytest.raises(TypeError, match="bisect: step: got int"):
        minifloat.bisect(net, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="metric: got 'los'; allowed: 'loss', 'grad', or a func"):
        minifloat.bisect(net, step, "los")
    with pytest.raises(ValueError, match=r"no layer.*minifloat\.convert"):
        minifloat.bisect(nn.Linear(4, 4), step)
    with pytest.raises(TypeError, match='metric="loss": step returned NoneType; one number'):
        minifloat.bisect(net, lambda: None)
    with pytest.raises(TypeError, match=r"metric: it returned shape \(2,\); one number"):
        minifloat.bisect(net, step, lambda loss: torch.zeros(2))
    with pytest.raises(ValueError, match="step left no gradients; it must call backward"):
        minifloat.bisect(net, lambda: None, "grad")
    with minifloat.inspect(net), pytest.raises(RuntimeError, match="looked at already"):
        minifloat.bisect(net, step)
    assert net._probe is None and net.weight.grad is None


def test_an_optimizer_is_stopped_before_it_steps() -> None:
    net = minifloat.Linear(64, 64, **BF16)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before, step = net.weight.detach().clone(), Plain(net, CURRENT)

    def train() -> Tensor:
        loss = step()
        optimizer.step()
        return loss

    with pytest.raises(RuntimeError, match=r"it calls SGD\.step\(\); it may run forward and back"):
        minifloat.bisect(net, train)
    assert torch.equal(net.weight, before)
    optimizer.step()  # again free

    def by_hand() -> Tensor:
        with torch.no_grad():
            net.weight.mul_(0.5)
        return step()

    with pytest.raises(RuntimeError, match="it changed the parameter 'weight'"):
        minifloat.bisect(net, by_hand)


def test_an_error_in_the_step_is_the_users() -> None:
    net = minifloat.Linear(64, 64, **BF16)
    step = Plain(net, recipe.DelayedScaling())
    step()
    before = _state(net)

    def broken() -> Tensor:
        step()
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        minifloat.bisect(net, broken)
    same(before, _state(net))
    assert net._probe is None
