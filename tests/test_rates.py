"""What the gradient of experts' weights multiplies, and why: a choice that asks for no sizes."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import minifloat as mf
from minifloat import env, ops, rates, spread
from minifloat import recipe as recipes
from minifloat.formats import Cast
from minifloat.grouped_gemm import Grouped, _matrix, contraction
from minifloat.rates import Rates, break_even, choose

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
BLOCK = Cast("fp8_e4m3_1x128", pow2=True)
TENSOR = Cast("fp8_e4m3")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "capability", lambda device: 90)


def time(cast: Cast, n: int, k: int, values: bool) -> float:
    """Of a row on the device that `hopper` is, written out once more."""
    r = rates.RATES[90]
    if not values:
        return 2 * n * k / (r.split if cast.format.tile is None else r.blocks)
    return 2 * n * k / r.values + (3 + 4 / 128) * (n + k) / r.copy


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("n", [128, 2048, 4096, 5120, 8192, 16384])
@pytest.mark.parametrize("k", [128, 2048, 4096, 7168, 28672])
def test_the_faster_one_is_chosen(n: int, k: int) -> None:
    saves = time(BLOCK, n, k, True) * (1 + rates.MARGIN) < time(BLOCK, n, k, False)
    assert choose(BLOCK, BLOCK, n, k, CUDA).name == ("values" if saves else "codes")
    assert choose(TENSOR, TENSOR, n, k, CUDA).name == "codes"  # 780 TFLOP/s for 741


@pytest.mark.usefixtures("hopper")
def test_both_are_chosen_somewhere() -> None:
    limit = break_even(BLOCK, CUDA)
    assert limit is not None and 500 < limit < 4000
    assert break_even(TENSOR, CUDA) == break_even(TENSOR, CUDA, fast=True) == math.inf
    names = {choose(BLOCK, BLOCK, n, n, CUDA).name for n in (1024, 8192)}
    assert names == {"codes", "values"}


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("pair", "options", "name", "why"),
    [
        ((BLOCK, BLOCK), {}, "values", "4096 > 8"),
        ((BLOCK, BLOCK), {"into": True}, "codes", "makes a new bf16 result"),
        ((BLOCK, BLOCK), {"out_dtype": torch.float32}, "codes", "makes a new bf16 result"),
        ((BLOCK.replace(pow2=False),) * 2, {}, "codes", "not powers of two"),
        ((TENSOR, Cast("fp8_e5m2")), {"fast": True}, "codes", "never"),
        ((Cast("mxfp8_e4m3"),) * 2, {}, "values", "no kernel multiplies the codes of mxfp8"),
        ((Cast("nvfp4"),) * 2, {}, "values", "no kernel multiplies the codes of nvfp4"),
        ((Cast("high_precision"),) * 2, {}, "values", "high precision"),
        ((BLOCK, TENSOR), {}, "values", "no kernel"),
    ],
)
def test_reasons(pair: tuple[Cast, Cast], options: dict[str, Any], name: str, why: str) -> None:
    found = choose(*pair, 8192, 8192, CUDA, **options)
    assert found.name == name and why in found.why


def test_where_nobody_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "capability", lambda device: 120)
    assert choose(BLOCK, BLOCK, 8192, 8192, CUDA) == ("codes", "nobody has measured sm_120")
    assert choose(BLOCK, BLOCK, 8192, 8192, CPU).name == "codes"


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("n", [8190, 8196])
def test_widths_that_pytorch_does_not_take(n: int) -> None:
    assert choose(BLOCK, BLOCK, n, 8192, CUDA).name == "codes"
    assert choose(BLOCK, BLOCK, 8192, n, CUDA).name == "codes"


# ---------------------------------------------------------------------------------------- numerics
def coded(x: torch.Tensor, group: spread.Members, cast: Cast) -> Grouped:
    made = spread.quantize(x, group, None, cast)
    scale = made.get("col_scale", made.get("scale"))
    return Grouped(made["col_data"], scale, None, cast, (x.shape[0], x.shape[1]), True, True)


@pytest.mark.parametrize("name", ["fp8_e4m3_1x128", "fp8_e4m3_128x128"])
def test_bf16_holds_the_values(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(300, 136) * torch.logspace(-30, 30, 300)[:, None]
    group = spread.members(torch.tensor([7, 0, 280, 13]), 300)
    g = coded(x, group, Cast(name, pow2=True))
    held = _matrix(g, False).data
    assert held.dtype is torch.bfloat16
    codes = _matrix(g, True)
    assert codes.blocks is not None
    scale = codes.blocks.repeat_interleave(128, 0)[: held.shape[1], : held.shape[0]].t()
    exact = codes.data.double() * scale.double()
    end = int(group.table[-1, 3])
    assert torch.equal(held.double()[:, :end], exact[:, :end])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp8_e4m3_1x128", "fp8_e4m3"])
def test_either_gives_the_same_gradient(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is told that one is faster, then the other; empty members are zero in both."""
    split = [0, 130, 1, 0, 257, 64, 16]
    torch.manual_seed(0)
    g, x = (torch.randn(sum(split), d, device="cuda", dtype=torch.bfloat16) for d in (256, 384))
    group = spread.members(torch.tensor(split, device="cuda"), sum(split))
    cast = Cast(name, pow2=True)
    pair = coded(g, group, cast), coded(x, group, cast)
    capability = env.capability("cuda") or 0
    found = {}
    for what, speed in (("codes", 1e9), ("values", 1e15)):
        device = Rates(1e12, 1e12, 1e12, speed, 1e18)
        monkeypatch.setitem(rates.RATES, capability, device)
        assert choose(cast, cast, 256, 384, g.device).name == what
        torch.cuda.set_sync_debug_mode("error")
        try:
            found[what] = contraction(*pair, group, torch.bfloat16)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for i, m in enumerate(split):
        a, b = found["codes"][i].double(), found["values"][i].double()
        assert a.isfinite().all() and b.isfinite().all()
        assert (not a.any() and not b.any()) if m == 0 else (a - b).norm() < 2**-8 * a.norm()


# ----------------------------------------------------------------------------------------- visible
RECIPES: dict[str, tuple[Any, str, str]] = {
    "block": (recipes.Float8BlockScaling, "values", "codes"),
    "current": (recipes.Float8CurrentScaling, "codes", "codes"),
    "mxfp8": (recipes.MXFP8BlockScaling, "values", "values"),
}


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_tells(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, large, small = RECIPES[recipe]
    for size, name in ((8192, large), (128, small)):
        layer = mf.GroupedLinear(2, size, size, device="meta", params_dtype=torch.bfloat16)
        op = ops.GroupedLinear(2, size, size, device="meta", dtype=torch.bfloat16)
        for one in (layer, op):
            weight = SimpleNamespace(device=CUDA, dtype=torch.bfloat16)
            monkeypatch.setattr(one, "_weights", lambda weight=weight: [weight])
            assert one.wgrad_choice(make()).name == name
            with mf.autocast(recipe=make()):
                assert one.wgrad_choice() == one.wgrad_choice(make())


def test_a_layer_without_a_recipe_and_one_on_a_cpu() -> None:
    layer = mf.GroupedLinear(2, 64, 64, device="cpu")
    assert layer.wgrad_choice().why == "an operand is in high precision"
    assert "on cpu" in layer.wgrad_choice(recipes.Float8BlockScaling()).why


@pytest.mark.usefixtures("hopper")
def test_a_layer_that_adds_to_main_grad(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipes.Float8BlockScaling()
    for single, dtype, name in (
        (True, torch.bfloat16, "codes"),
        (False, torch.float32, "codes"),
        (False, torch.bfloat16, "values"),
    ):
        layer = mf.GroupedLinear(
            2, 8192, 8192, device="meta", params_dtype=torch.bfloat16,
            fuse_wgrad_accumulation=True, single_grouped_weight=single,
        )  # fmt: skip
        grad = SimpleNamespace(dtype=dtype)
        weight = SimpleNamespace(device=CUDA, dtype=torch.bfloat16, main_grad=grad)
        monkeypatch.setattr(layer, "_weights", lambda weight=weight: [weight])
        assert layer.wgrad_choice(recipe).name == name
