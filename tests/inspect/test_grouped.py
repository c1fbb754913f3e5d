"""Layers side by side: each expert's casts, with sizes that stay on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import minifloat
from minifloat import spread
from minifloat.core.group_probe import measured_group
from minifloat.core.measure import Number, add, numbers
from minifloat.core.probe import X_COL, X_ROW
from minifloat.grouped_gemm import Grouped
from minifloat.inspect import GEMMS, OPERANDS
from minifloat.operands import operands

from .models import BF16, RECIPES, same

SIZES = [24, 0, 37, 3]
PARAMETERS = ("apart", "single", "quantized")


def layer(used: Any, parameters: str) -> Any:
    torch.manual_seed(0)
    single = parameters == "single"
    if parameters != "quantized":
        return minifloat.GroupedLinear(4, 64, 48, single_grouped_weight=single, **BF16)
    with minifloat.quantized_model_init(recipe=used):
        return minifloat.GroupedLinear(4, 64, 48, **BF16)


class Step:
    def __init__(self, net: Any, used: Any, call: Any = None) -> None:
        self.net, self.used, self.call = net, used, net if call is None else call
        self.buffers = {name: b.clone() for name, b in net.named_buffers()}
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(sum(SIZES), 64, generator=generator).to(torch.bfloat16)
        self.x = x.requires_grad_()

    def __call__(self) -> Tensor:
        self.net.zero_grad()
        self.x.grad = None
        torch.manual_seed(3)
        with minifloat.autocast(recipe=self.used):
            y = self.call(self.x, torch.tensor(SIZES))
        loss = y.float().square().mean()
        loss.backward()
        return loss.detach()

    def everything(self) -> dict[str, Tensor]:
        with torch.no_grad():
            for name, b in self.net.named_buffers():
                b.copy_(self.buffers[name])
        found = {"loss": self(), "x.grad": self.x.grad}
        found.update((name, p.grad) for name, p in self.net.named_parameters())
        return {name: t.clone() for name, t in found.items() if t is not None}


@pytest.mark.parametrize("parameters", PARAMETERS)
@pytest.mark.parametrize("name", RECIPES)
def test_nothing_changes_and_all_is_seen(name: str, parameters: str) -> None:
    used = RECIPES[name]()
    if parameters == "quantized" and (name in ("high_override", "dequantized", "custom")):
        pytest.skip("no quantized weights with this recipe")
    step = Step(layer(used, parameters), used)
    alone = step.everything()
    with minifloat.inspect(step.net) as report:
        same(alone, step.everything())
    same(alone, step.everything())
    found = report.layers[""]
    assert list(found.operands) == list(OPERANDS)
    for o in found.operands.values():
        assert o.casts == 1
        if o.operand == "weight" and parameters == "quantized":
            assert o.sqnr is None and o.amax > 0
        elif o.quantized:
            assert o.sqnr is not None and 15 < o.sqnr < 45, o
            assert o.scale_min is not None and o.scale_min > 0
    assert found.operands["input.row"].elements == sum(SIZES) * 64
    assert found.operands["weight.row"].elements == 4 * 64 * 48


@pytest.mark.parametrize("name", ("current", "block", "mxfp8", "nvfp4"))
def test_a_group_is_the_sum_of_its_members(name: str) -> None:
    plan = RECIPES[name]().plan(None, None)
    x = torch.randn(sum(SIZES), 64, dtype=torch.bfloat16)
    sizes = torch.tensor(SIZES)
    group = spread.members(sizes, len(x))
    for slot, prefix, casts in (
        (X_ROW, "row_", (plan.x_row, None)),
        (X_COL, "col_", (None, plan.x_col)),
    ):
        made = spread.quantize(x, group, *casts)
        cast = next(c for c in casts if c is not None)
        g = Grouped(
            made[f"{prefix}data"],
            made.get(f"{prefix}scale", made.get("scale")),
            made.get(f"{prefix}amax"),
            cast,
            (len(x), 64),
            slot == X_COL,
            True,
        )
        together, apart = numbers(6, x.device), numbers(6, x.device)
        assert measured_group(g, x, sizes, len(SIZES), None, together, slot) is g.data
        for member in torch.split(x, SIZES):
            if len(member):
                (o,) = [o for o in operands(member, *casts) if o is not None]
                add(o, member, None, apart, slot)
        apart[slot, Number.CASTS] = 1
        torch.testing.assert_close(together, apart, rtol=1e-12, atol=0)


def test_nothing_waits_for_a_device() -> None:
    """On the meta device nobody can read a value."""
    sizes = torch.empty(3, dtype=torch.int64, device="meta")
    into = numbers(6, torch.device("meta"))
    x = torch.empty(64, 48, dtype=torch.bfloat16, device="meta")
    for name in ("current", "block", "mxfp8", "nvfp4"):
        cast = RECIPES[name]().plan(None, None).x_col
        made = {
            p.name: torch.empty(p.shape, dtype=p.dtype, device="meta")
            for p in spread._parts(64, 48, 3, None, cast)
        }
        scale = made.get("col_scale", made.get("scale"))
        g = Grouped(made["col_data"], scale, made.get("col_amax"), cast, (64, 48), True, True)
        measured_group(g, x, sizes, 3, None, into, X_COL)


@pytest.mark.parametrize("parameters", PARAMETERS)
@pytest.mark.parametrize("name", ("delayed", "nvfp4"))
def test_bisect(name: str, parameters: str) -> None:
    used = RECIPES[name]()
    step = Step(layer(used, parameters), used)
    found = minifloat.bisect(step.net, step, "grad", gemms=True)
    by_gemm = {e.gemm: e for e in found.effects}
    assert set(by_gemm) == set(GEMMS) and found.repeat == 0
    assert by_gemm["fprop"].effect != 0 and by_gemm["wgrad"].effect > 0
    whole = minifloat.bisect(step.net, step, "grad")
    assert [e.distance for e in whole.effects] == [0.0]


@pytest.mark.deep
@pytest.mark.parametrize("name", ("delayed", "nvfp4"))
def test_compiled(name: str) -> None:
    torch._dynamo.reset()
    used = RECIPES[name]()
    net = layer(used, "single")
    step = Step(net, used, torch.compile(net, fullgraph=True, backend="aot_eager"))
    of_eager = Step(net, used)
    alone = step.everything()
    with minifloat.inspect(net) as report:
        same(alone, step.everything())
    same(alone, step.everything())
    assert {o.casts for o in report.layers[""].operands.values()} == {1}
    with minifloat.inspect(net) as eager:
        of_eager.everything()
    assert eager.layers == report.layers


def test_no_rows() -> None:
    net = layer(None, "single")
    with minifloat.inspect(net) as report, minifloat.autocast(recipe=RECIPES["nvfp4"]()):
        net(torch.zeros(0, 64, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int64))
    assert report.layers[""].operands["input.row"].elements == 0


def test_one_quantized_expert_that_is_apart() -> None:
    recipe = minifloat.recipe.Float8CurrentScaling()
    with minifloat.quantized_model_init(recipe=recipe):
        layer = minifloat.GroupedLinear(1, 32, 16, bias=False, device="cpu")
    x = torch.randn(10, 32, requires_grad=True)
    with minifloat.inspect(torch.nn.Sequential(layer)) as report:
        with minifloat.autocast(recipe=recipe):
            y = layer(x, [10])
        y.sum().backward()
    (found,) = report.layers.values()
    assert found.operands["input.row"].casts == 1
    assert found.operands["weight.row"].sqnr is None  # nobody knows what it was cast from
