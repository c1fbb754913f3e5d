"""Tensor-parallel layers as data, what each rank of them holds, and what they must compute."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

import minifloat
from minifloat import recipe as recipes

SIZE = 2
IN, OUT = 256, 256  # halves are whole blocks of every format
LEAD = (6, 7)  # three of the six per rank: 21 rows, no whole block of anything
UNIT = 2.0**-24  # half an fp32 ulp
Call = Callable[[Tensor], Any]
Results = dict[str, Tensor]

RECIPES: dict[str, Callable[[], recipes.Recipe | None]] = {
    "delayed": recipes.DelayedScaling,
    "current": recipes.Float8CurrentScaling,
    "block": recipes.Float8BlockScaling,
    "mxfp8": recipes.MXFP8BlockScaling,
    "nvfp4": recipes.NVFP4BlockScaling,
    "none": lambda: None,
}
# Rounding and amaxes that depend on where in a matrix, and next to what, an element stands differ
# between a shard and the whole.
PLAIN_NVFP4 = recipes.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True)


@dataclass(frozen=True)
class Case:
    """One way to split a layer over two ranks."""

    mode: str
    recipe: str
    sequence: bool = False
    bias: bool = True
    return_bias: bool = False
    dtype: torch.dtype = torch.float32
    inside: bool = False  # autocast inside what is called

    def __str__(self) -> str:
        parts = [self.mode, "sequence" if self.sequence else "", self.recipe]
        parts += ["" if self.bias else "no_bias", "return_bias" if self.return_bias else ""]
        parts += ["inside" if self.inside else "", "bf16" if self.dtype.itemsize == 2 else ""]
        return "_".join(p for p in parts if p)


# ------------------------------------------------------------------------------------------- data
@dataclass(frozen=True)
class Whole:
    """The tensors of an unsharded layer; rank 1's rows of `x` and `g` are eight times rank 0's."""

    x: Tensor
    w: Tensor
    b: Tensor
    g: Tensor


def whole(case: Case, step: int, lead: tuple[int, ...] = LEAD, equal: bool = False) -> Whole:
    """Data of a step. `equal` gives both halves of the features the same amax."""
    made = torch.Generator().manual_seed(step)
    x, g = (torch.randn(*lead, n, generator=made) for n in (IN, OUT))
    made = torch.Generator().manual_seed(1000)
    w = torch.randn(OUT, IN, generator=made) / 16
    b = torch.randn(OUT, generator=made)
    for t in (x, g):
        t[lead[0] // 2 :] *= 8.0
        if equal:
            t[-1, ..., 0] = t[-1, ..., t.shape[-1] // 2] = 50.0
    if equal:
        w[:: OUT // 2, :: IN // 2] = 0.5
    return Whole(*(t.to(case.dtype) for t in (x, w, b, g)))


def half(t: Tensor, dim: int, rank: int) -> Tensor:
    return t.chunk(SIZE, dim)[rank].clone()


def summed(t: Tensor) -> Tensor:
    """Over the ranks; of two numbers, so in any order the same."""
    made = t.clone()
    distributed.all_reduce(made)
    return made


# ------------------------------------------------------------------------------------------ layers
def make(case: Case, in_features: int, out_features: int, w: Tensor, b: Tensor, **more: Any) -> Any:
    layer = minifloat.Linear(
        in_features, out_features, bias=case.bias, params_dtype=case.dtype, **more
    )
    with torch.no_grad():
        layer.weight.copy_(w)
        if case.bias:
            layer.bias.copy_(b)
    return layer


def sharded(case: Case, data: Whole, rank: int, **more: Any) -> Any:
    """The layer of the case, with this rank's parameters."""
    column = case.mode == "column"
    options = {
        "tp_group": distributed.group.WORLD,
        "parallel_mode": case.mode,
        "sequence_parallel": case.sequence,
        "return_bias": case.return_bias,
    }
    w = half(data.w, 0 if column else 1, rank)
    b = half(data.b, 0, rank) if column else data.b
    return make(case, IN, OUT, w, b, **options, **more)


def local(case: Case, data: Whole, rank: int) -> tuple[Tensor, Tensor]:
    """This rank's input and gradient of the output."""
    x, g = data.x, data.g
    if case.mode == "column":
        return half(x, 0, rank) if case.sequence else x, half(g, -1, rank)
    return half(x, -1, rank), half(g, 0, rank) if case.sequence else g


def call_of(case: Case, layer: Any, recipe: Any) -> Call:
    """The layer as a function, with the autocast inside if the case says so."""

    def plain(x: Tensor) -> Any:
        return layer(x)

    def inside(x: Tensor) -> Any:
        with minifloat.autocast(recipe=recipe):
            return layer(x)

    return inside if case.inside and recipe is not None else plain


def run(case: Case, layer: Any, recipe: Any, x: Tensor, g: Tensor, call: Call) -> Results:
    """One step: output, gradients."""
    torch.manual_seed(7)
    x = x.detach().clone().requires_grad_()
    layer.zero_grad()
    outer: Any = contextlib.nullcontext()
    if recipe is not None and not case.inside:
        outer = minifloat.autocast(recipe=recipe)
    with outer:
        y = call(x)
    if isinstance(y, tuple):
        y = y[0] if y[1] is None else y[0] + y[1]
    y.backward(g)
    found = {"y": y.detach(), "dx": x.grad, "dw": layer.weight.grad}
    if layer.bias is not None:
        found["db"] = layer.bias.grad
    assert all(isinstance(t, Tensor) for t in found.values())
    return found  # type: ignore[return-value]


# ----------------------------------------------------------------------------------- expectations
def of_parts(case: Case, data: Whole, rank: int, recipe: Any, alone: Any) -> Results:
    """What the ranks' parts, each computed by a layer of its own, add up to: the same arithmetic.

    `alone` is an unsharded layer with this rank's part of the weight.
    """
    if case.mode == "column":
        whole_rows = (data.x, half(data.g, -1, rank))
        found = run(case, alone, recipe, *whole_rows, call_of(case, alone, recipe))
        dx = summed(found["dx"])
        return {**found, "dx": half(dx, 0, rank) if case.sequence else dx}
    inputs = (half(data.x, -1, rank), data.g)
    found = run(case, alone, recipe, *inputs, call_of(case, alone, recipe))
    y, g = summed(found["y"]), data.g
    if case.sequence:
        y, g = half(y, 0, rank), half(g, 0, rank)
    if case.bias:
        b = data.b.clone().requires_grad_()
        y = y + b
        y.backward(g)
        assert b.grad is not None
        found["db"] = b.grad
    return {**found, "y": y.detach()}


def alone(case: Case, data: Whole, rank: int) -> Any:
    if case.mode == "column":
        w, b = half(data.w, 0, rank), half(data.b, 0, rank)
        return make(case, IN, OUT // SIZE, w, b, return_bias=case.return_bias)
    without = Case(case.mode, case.recipe, bias=False, dtype=case.dtype)
    return make(without, IN // SIZE, OUT, half(data.w, 1, rank), data.b)


def of_whole(case: Case, found: Results, rank: int) -> Results:
    """This rank's share of an unsharded layer's results; row mode's db is the whole."""
    made = dict(found)
    if case.mode == "column":
        made |= {"y": half(found["y"], -1, rank), "dw": half(found["dw"], 0, rank)}
        if "db" in found:
            made["db"] = half(found["db"], 0, rank)
        if case.sequence:
            made["dx"] = half(found["dx"], 0, rank)
        return made
    made |= {"dx": half(found["dx"], -1, rank), "dw": half(found["dw"], 1, rank)}
    if case.sequence:
        made["y"] = half(found["y"], 0, rank)
    return made


def bounds(data: Whole) -> Results:
    """By how much two fp32 sums of the same products may differ, whole.

    A sum of n products errs by at most n half ulps of the sum of their magnitudes, here twice; no
    format more than doubles a value, so products are at most four times the plain ones. One code
    off, in one average operand, is 2**-3 / n of that sum: 2**8 times more for n = 256.
    """
    x, g = data.x.reshape(-1, IN).abs(), data.g.reshape(-1, OUT).abs()
    w, lead = data.w.abs(), data.x.shape[:-1]
    tokens = x.shape[0]
    return {
        "y": (8 * IN * UNIT * (x @ w.t() + data.b.abs())).reshape(*lead, OUT),
        "dx": (8 * OUT * UNIT * (g @ w)).reshape(*lead, IN),
        "dw": 8 * tokens * UNIT * (g.t() @ x),
        "db": 8 * tokens * UNIT * g.sum(0),
    }


def assert_equal(expected: Results, got: Results, what: object = "") -> None:
    assert expected.keys() == got.keys()
    for name, a in expected.items():
        b = got[name]
        assert a.shape == b.shape, (what, name, a.shape, b.shape)
        assert torch.equal(a, b), f"{what} {name}: {(a - b).abs().max().item()} off"


def assert_within(expected: Results, got: Results, bound: Results, what: object = "") -> None:
    assert expected.keys() == got.keys()
    for name, a in expected.items():
        b = got[name]
        assert a.shape == b.shape == bound[name].shape, (what, name, a.shape, b.shape)
        worst = ((a - b).abs() / bound[name]).max().item()
        assert worst <= 1.0, f"{what} {name}: {worst} times the bound"
