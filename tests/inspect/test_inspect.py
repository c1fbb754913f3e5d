"""`inspect` sees every cast of a step, eager and compiled, and changes nothing of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import minifloat
from minifloat import recipe
from minifloat.inspect import OPERANDS, LayerStatistics

from .models import BF16, LAYERS, RECIPES, Step, batch, model, same

CURRENT = recipe.Float8CurrentScaling()
FORWARD, BACKWARD = OPERANDS[:2], OPERANDS[2:]


def formats(layer: LayerStatistics) -> tuple[str, ...]:
    return tuple(layer.operands[name].format for name in OPERANDS)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_and_layer(name: str) -> None:
    step = Step(model(), RECIPES[name]())
    alone = step.everything()
    with minifloat.inspect(step.net) as report:
        watched = step.everything()
    same(alone, watched)
    same(alone, step.everything())
    layers = report.layers
    assert list(layers) == LAYERS
    for layer in layers.values():
        assert list(layer.operands) == list(OPERANDS)
        assert list(layer.gemms) == ["fprop", "dgrad", "wgrad"]
        for o in layer.operands.values():
            assert o.casts == 1 and o.nonfinite == 0 and o.amax > 0
            if o.quantized:
                assert o.sqnr is not None and 15 < o.sqnr < 45, (layer.name, o)
                assert o.scale_min is not None and o.scale_max is not None
                assert o.saturation is not None and o.saturation < 0.02
    assert layers["0"].operands["input.row"].elements == 40 * 64
    assert layers["1.fc1"].operands["weight.col"].elements == 64 * 192
    assert layers["1.fc2"].operands["grad_output.row"].amax > 0
    assert layers["2"].kind == "LayerNormLinear" and layers["1.fc1"].out_features == 192


def test_the_formats_are_those_of_the_recipe() -> None:
    def seen(name: str) -> tuple[str, ...]:
        step = Step(model(), RECIPES[name]())
        with minifloat.inspect(step.net) as report:
            step()
        (found,) = {formats(layer) for layer in report.layers.values()}
        return found

    e4m3, e5m2, high = "fp8_e4m3", "fp8_e5m2", "high_precision"
    assert seen("delayed") == (e4m3, e4m3, e5m2, e4m3, e5m2, e4m3)
    assert seen("high_override") == (e4m3, e4m3, high, high, high, high)
    mx, nv = "mxfp8_e4m3", "nvfp4"
    assert seen("custom") == (mx, mx, nv, "nvfp4_16x16", nv, nv)
    lines, square = "fp8_e4m3_1x128", "fp8_e4m3_128x128"
    assert seen("block") == (lines, square, lines, square, lines, lines)


def test_a_producer_that_casts_is_compared_with_what_it_produces() -> None:
    net = minifloat.LayerNormMLP(64, 96, activation="srelu", **BF16)
    step = Step(net, CURRENT)
    with minifloat.inspect(net) as report:
        step()
    with torch.no_grad():  # in high precision, and rounded once, as the producers do
        normed = nn.functional.layer_norm(step.x.float(), (64,)).to(torch.bfloat16)
        h = nn.functional.linear(normed, net.fc1_weight, net.fc1_bias)
        active = h.float().relu().square().to(torch.bfloat16)
    operands = report.layers["fc1"].operands
    assert operands["input.row"].amax == pytest.approx(normed.abs().max().item(), rel=0.01)
    assert operands["input.row"].amax == operands["input.col"].amax
    operands = report.layers["fc2"].operands
    assert operands["input.row"].amax == pytest.approx(active.abs().max().item(), rel=0.1)
    assert operands["input.row"].amax == operands["input.col"].amax
    assert operands["input.row"].sqnr == operands["input.col"].sqnr  # one scale, the same codes


def test_outliers_show() -> None:
    net = nn.Sequential(*[minifloat.Linear(64, 64, **BF16) for _ in range(3)])
    with torch.no_grad():
        net[2].weight[0, 0] = 3e4
    with minifloat.inspect(net) as report, minifloat.autocast(recipe=CURRENT):
        net(batch())
    name, worst = report.worst(1, by="underflow")[0]
    assert name == "2" and worst.operand == "weight"
    assert worst.underflow is not None and worst.underflow > 0.5
    assert report.layers["0"].operands["weight.row"].underflow == 0
    # In blocks, an outlier costs its block alone.
    with minifloat.inspect(net) as blocks, minifloat.autocast(recipe=recipe.MXFP8BlockScaling()):
        net(batch())
    assert blocks.layers["2"].operands["weight.row"].underflow < 0.1  # type: ignore[operator]


def test_saturation_shows_where_delayed_scales_lag() -> None:
    net = minifloat.Linear(64, 64, **BF16)
    used = recipe.DelayedScaling()
    x = batch()
    for factor in (1.0, 8.0):
        with minifloat.inspect(net) as report, minifloat.autocast(recipe=used):
            net(x * factor)
    lagging = report.layers[""].operands["input.row"]
    assert lagging.saturation is not None and lagging.saturation > 0.5
    assert lagging.sqnr is not None and lagging.sqnr < 10


# ------------------------------------------------------------------------------ ways to run a layer
def test_microbatches_and_cached_weights() -> None:
    step = Step(model(cache_weights=True), RECIPES["current"](), is_first_microbatch=None)
    step.call = lambda x, is_first_microbatch: step.net(x)
    same(step.everything(), _inspected(step)[0])
    net = minifloat.Linear(64, 48, **BF16)
    for name in ("current", "delayed", "nvfp4"):
        with minifloat.inspect(net) as report, minifloat.autocast(recipe=RECIPES[name]()):
            for first in (True, False, False):
                net(batch().requires_grad_(), is_first_microbatch=first).sum().backward()
        operands = report.layers[""].operands
        assert {o.casts for o in operands.values() if o.operand != "grad_output"} == {3}
        for copy in ("row", "col"):
            sqnr = operands[f"weight.{copy}"].sqnr
            assert sqnr is not None and 15 < sqnr < 45, (name, copy)


def _inspected(step: Step) -> tuple[Any, Any]:
    with minifloat.inspect(step.net) as report:
        return step.everything(), report


@pytest.mark.parametrize("name", ("delayed", "current", "block", "mxfp8", "nvfp4"))
def test_quantized_parameters(name: str) -> None:
    used = RECIPES[name]()
    torch.manual_seed(0)
    with minifloat.quantized_model_init(recipe=used, preserve_high_precision_init_val=True):
        net = nn.Sequential(
            minifloat.Linear(64, 64, **BF16), minifloat.LayerNormMLP(64, 96, **BF16)
        )
    step = Step(net, used)
    alone = step.everything()
    watched, report = _inspected(step)
    same(alone, watched)
    for layer in report.layers.values():
        weight = layer.operands["weight.row"]
        assert (weight.sqnr, weight.underflow, weight.saturation) == (None, None, None)
        assert weight.amax > 0 and weight.scale_max is not None and weight.quantized
        assert layer.operands["input.row"].sqnr is not None
        assert layer.gemms["fprop"].sqnr is None and layer.gemms["wgrad"].sqnr is not None
    names = ("0.weight", "1.fc1_weight", "1.fc2_weight")
    parameters = dict(net.named_parameters())
    masters = {n: parameters[n].get_high_precision_init_val() for n in names}  # type: ignore[attr-defined]
    with minifloat.inspect(net, masters=masters) as report:
        same(alone, step.everything())
    for layer in report.layers.values():
        for copy in ("row", "col"):
            sqnr = layer.operands[f"weight.{copy}"].sqnr
            assert sqnr is not None and 15 < sqnr < 45


def test_quantized_input() -> None:
    net = minifloat.Linear(64, 48, **BF16)
    x = minifloat.MXFP8Quantizer(minifloat.DType.kFloat8E4M3)(batch())
    with minifloat.inspect(net) as report, minifloat.autocast(recipe=RECIPES["mxfp8"]()):
        net(x).sum().backward()
    operands = report.layers[""].operands
    assert operands["input.row"].sqnr is None and operands["input.row"].amax > 1
    assert operands["weight.row"].sqnr is not None


@pytest.mark.parametrize(
    "options",
    (
        {"save_original_input": True},
        {"fuse_wgrad_accumulation": True},
        {"delay_wgrad_compute": True},
        {"bias": False},
    ),
    ids=lambda o: next(iter(o)),
)
def test_options_of_a_layer(options: dict[str, bool]) -> None:
    net = minifloat.Linear(64, 48, **BF16, **options)
    net.weight.main_grad = torch.zeros(48, 64)
    step = Step(net, RECIPES["mxfp8"]())

    def run() -> dict[str, Any]:
        net.weight.main_grad.zero_()
        found = step.everything()
        net.backward_dw()
        grad = net.weight.grad
        found["dw"] = net.weight.main_grad.clone() if grad is None else grad.clone()
        return found

    alone = run()
    with minifloat.inspect(net) as report:
        same(alone, run())
    assert list(report.layers[""].operands) == list(OPERANDS)


@pytest.mark.parametrize("name", ("delayed", "mxfp8", "nvfp4"))
def test_recomputed_layers(name: str) -> None:
    for net in (
        minifloat.LayerNormMLP(64, 96, checkpoint=True, **BF16),
        minifloat.LayerNormMLP(64, 96, **BF16),
    ):
        step = Step(net, RECIPES[name]())
        if not net.checkpoint:
            step.call = lambda x, net=net: minifloat.checkpoint(net, x)
        alone = step.everything()
        watched, report = _inspected(step)
        same(alone, watched)
        assert report.layers["fc1"].operands["input.row"].casts == 2  # and again in backward
        assert report.layers["fc2"].sqnr is not None


def test_evaluation_and_layers_that_do_not_run() -> None:
    net = model()
    with minifloat.inspect(net) as report, torch.no_grad(), minifloat.autocast(recipe=CURRENT):
        net[0](batch())
    assert list(report.layers["0"].operands) == list(FORWARD)
    assert report.layers["2"].operands == {} and report.layers["2"].sqnr is None
    with minifloat.inspect(net) as report:
        net(batch().requires_grad_()).sum().backward()  # no autocast
    for layer in report.layers.values():
        assert set(formats(layer)) == {"high_precision"}
        assert layer.sqnr == math.inf


def test_frozen_layers() -> None:
    net = minifloat.Linear(64, 48, **BF16).requires_grad_(False)
    with minifloat.inspect(net) as report, minifloat.autocast(recipe=CURRENT):
        net(batch().requires_grad_()).sum().backward()
    found = ["input.row", "weight.row", "grad_output.row", "weight.col"]
    assert list(report.layers[""].operands) == found


def test_accumulated_over_steps_and_read_in_between() -> None:
    step = Step(minifloat.Linear(64, 48, **BF16), CURRENT)
    with minifloat.inspect(step.net) as report:
        step()
        first = report.layers[""].operands["input.row"]
        step()
    second = report.layers[""].operands["input.row"]
    assert (first.casts, second.casts) == (1, 2)
    assert second.sqnr == pytest.approx(first.sqnr) and second.elements == 2 * first.elements
    step()
    assert report.layers[""].operands["input.row"] == second


# ----------------------------------------------------------------------------------------- compiled
def test_compiled_before_and_after() -> None:
    small = nn.Sequential(minifloat.Linear(64, 64, **BF16), minifloat.LayerNormMLP(64, 96, **BF16))
    _compiled_before_and_after(small, RECIPES["delayed"]())


@pytest.mark.deep
@pytest.mark.parametrize("name", RECIPES)
def test_every_layer_compiled_before_and_after(name: str) -> None:
    _compiled_before_and_after(model(), RECIPES[name]())


def _compiled_before_and_after(net: nn.Module, used: recipe.Recipe) -> None:
    """One more graph for the inspected step; leaving restores the first one."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    step = Step(net, used, torch.compile(net, fullgraph=True, backend=counter))
    eager = Step(net, used)
    alone = step.everything()
    assert counter.frame_count == 1
    watched, report = _inspected(step)
    same(alone, watched)
    assert counter.frame_count == 2
    same(alone, step.everything())
    _, again = _inspected(step)  # the graph that measures is kept as well
    assert counter.frame_count == 2
    _, of_eager = _inspected(eager)
    for layer, other, third in zip(
        report.layers.values(), of_eager.layers.values(), again.layers.values(), strict=True
    ):
        assert list(layer.operands) == list(OPERANDS)
        assert layer == third == other


def test_inside_a_compiled_checkpoint() -> None:
    torch._dynamo.reset()
    net = minifloat.Linear(64, 48, **BF16)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(x: torch.Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False)

    step = Step(net, CURRENT, call)
    alone = step.everything()
    watched, report = _inspected(step)
    same(alone, watched)
    # Forward, and again in backward; PyTorch 2.11 keeps what it should compute again.
    assert report.layers[""].operands["input.row"].casts in (1, 2)
    assert list(report.layers[""].operands) == list(OPERANDS)


@pytest.mark.deep
def test_compiled_by_inductor() -> None:
    torch._dynamo.reset()
    net = nn.Sequential(minifloat.LayerNormMLP(64, 96, **BF16), nn.GELU())
    step = Step(net, CURRENT, torch.compile(net, fullgraph=True))
    alone = step.everything()
    watched, report = _inspected(step)
    same(alone, watched)
    assert {o.casts for o in report.layers["0.fc1"].operands.values()} == {1}
    same(alone, step.everything())


def test_a_compiled_module_has_its_own_names() -> None:
    torch._dynamo.reset()
    net = torch.compile(minifloat.Linear(64, 48, **BF16), backend="aot_eager")
    with minifloat.inspect(net) as report, minifloat.autocast(recipe=CURRENT):
        net(batch()).sum().backward()
    assert list(report.layers) == [""]
    outer = nn.Sequential(net)
    with minifloat.inspect(outer) as report:
        pass
    assert list(report.layers) == ["0"]


# ----------------------------------------------------------------------------------- no waiting
def test_nothing_waits_for_a_device() -> None:
    """On the meta device nobody can read a value: what asks for one raises."""
    from minifloat.core.measure import measured, numbers
    from minifloat.operands import operands

    into = numbers(6, torch.device("meta"))
    x = torch.empty(64, 48, dtype=torch.bfloat16, device="meta")
    with pytest.raises((RuntimeError, NotImplementedError)):
        into.tolist()
    for name in ("current", "block", "mxfp8", "nvfp4"):
        plan = RECIPES[name]().plan(None, None)
        seed = torch.empty(2, dtype=torch.int64, device="meta")
        for slot, row, col in ((0, plan.x_row, None), (5, None, plan.x_col), (4, None, plan.g_col)):
            made = operands(x, row, col, seed=seed)
            (o,) = [o for o in made if o is not None]
            measured(o, x, seed, into, slot)


@pytest.mark.gpu
@pytest.mark.parametrize("name", RECIPES)
def test_on_a_gpu_nothing_waits_and_no_bit_changes(name: str) -> None:
    net = model().cuda()
    step = Step(net, RECIPES[name]())
    step.x = step.x.detach().cuda().requires_grad_()
    _inspected(step)  # kernels are built
    alone = step.everything()
    with minifloat.inspect(net) as report:
        step.net.zero_grad()
        torch.cuda.set_sync_debug_mode("error")
        try:
            watched = step.everything()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    same(alone, watched)
    assert list(report.layers["0"].operands) == list(OPERANDS)


@pytest.mark.gpu
def test_in_cuda_graphs_of_inductor() -> None:
    torch._dynamo.reset()
    net = minifloat.LayerNormMLP(64, 96, **BF16).cuda()
    step = Step(net, CURRENT, torch.compile(net, fullgraph=True, mode="reduce-overhead"))
    step.x = step.x.detach().cuda().requires_grad_()
    for _ in range(3):
        step()
    with minifloat.inspect(net) as report:
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            step()
    assert {o.casts for o in report.layers["fc1"].operands.values()} == {4}


# ------------------------------------------------------------------------------------------- errors
def test_bad_arguments() -> None:
    net = model()
    with pytest.raises(TypeError, match="inspect: model: got str"), minifloat.inspect("net"):
        pass
    with (
        pytest.raises(ValueError, match=r"no layer.*minifloat\.convert"),
        minifloat.inspect(nn.Linear(4, 4)),
    ):
        pass
    with (
        pytest.raises(ValueError, match=r"'0\.bia' is not.*0\.weight, 1\.fc1_weight"),
        minifloat.inspect(net, masters={"0.bia": torch.zeros(1)}),
    ):
        pass
    with (
        pytest.raises(ValueError, match=r"masters\['0\.weight'\]: got \(1,\).*\(64, 64\)"),
        minifloat.inspect(net, masters={"0.weight": torch.zeros(1)}),
    ):
        pass
    assert all(layer._probe is None for layer in (net[0], net[1].fc1, net[2]))


def test_not_twice_at_once_and_errors_leave_nothing() -> None:
    net = model()
    with (
        pytest.raises(RuntimeError, match="layer '0' is being looked at already"),
        minifloat.inspect(net),
        minifloat.inspect(net),
    ):
        pass
    assert net[0]._probe is None
    with pytest.raises(OSError, match="disk"), minifloat.inspect(net):
        raise OSError("disk")
    assert net[0]._probe is None and net[3][1].basic_ops[0]._probe is None
    with minifloat.inspect(net):
        pass


def test_counted_and_inspected_at_once() -> None:
    net = nn.Sequential(minifloat.Linear(64, 48, **BF16))
    minifloat.convert(net, CURRENT, skip_ends=False)
    with minifloat.inspect(net) as report:
        minifloat.assert_quantized(net, lambda: net(batch().requires_grad_()).sum().backward())
    assert list(report.layers["0"].operands) == list(OPERANDS)


def test_the_package_is_the_function() -> None:
    import importlib
    import sys

    package = importlib.import_module("minifloat.inspect")
    assert minifloat.inspect is package is sys.modules["minifloat.inspect"]
    assert callable(package)
