"""A whole block of experts is one graph, forward and backward, with the bits of eager, whatever
tokens go where."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minifloat as mf
from minifloat import ops

from .cases import RECIPES, STATELESS, Counter, compare

E, TOP, HIDDEN, FFN, TOKENS = 4, 2, 32, 48, 11
SINGLE: dict[str, Any] = {"single_grouped_weight": True}


class Block(nn.Module):
    """Router, permutation, GroupedLinear, SwiGLU with probabilities, GroupedLinear, and back."""

    def __init__(self, fused: bool, dtype: torch.dtype, **kwargs: Any) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, E, bias=False)
        common = {"device": "cpu", **kwargs}
        if fused:
            self.experts: Any = ops.Sequential(
                ops.GroupedLinear(E, HIDDEN, 2 * FFN, dtype=dtype, **common),
                ops.ScaledSwiGLU(),
                ops.GroupedLinear(E, FFN, HIDDEN, dtype=dtype, **common),
            )
            return
        self.fc1 = mf.GroupedLinear(E, HIDDEN, 2 * FFN, params_dtype=dtype, **common)
        self.fc2 = mf.GroupedLinear(E, FFN, HIDDEN, params_dtype=dtype, **common)
        self.experts = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.softmax(self.router(x.float()), -1)
        best, chosen = scores.topk(TOP, -1)
        mask = torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True)
        probs = torch.where(mask, scores / best.sum(-1, keepdim=True), 0.0)
        rows, of_rows, row_id_map = mf.moe_permute_with_probs(x, probs, mask, len(x) * TOP)
        counts = mask.sum(0)
        if self.experts is not None:
            y = self.experts(rows, counts, of_rows, counts)
        else:
            gate, linear = self.fc1(rows, counts).chunk(2, -1)
            inner = nn.functional.silu(gate) * linear * of_rows[:, None]
            y = self.fc2(inner.to(rows.dtype), counts)
        return mf.moe_unpermute(y, row_id_map), counts


@dataclass(frozen=True)
class Case:
    """One way to run the block."""

    name: str
    fused: bool = False
    inside: bool = False  # the autocast is in the graph
    primary: bool = False
    checkpoint: bool = False
    grad: bool = True
    dtype: torch.dtype = torch.float32
    kwargs: dict[str, Any] = field(default_factory=dict)
    recipes: tuple[str, ...] = tuple(RECIPES)
    quick: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name


CASES = (
    Case("modules", kwargs=SINGLE, quick=tuple(RECIPES)),
    Case("ops", fused=True, kwargs=SINGLE, quick=("delayed",)),
    Case("modules_apart_bf16_inside", inside=True, dtype=torch.bfloat16),
    Case("ops_apart_bf16_inside", fused=True, inside=True, dtype=torch.bfloat16),
    Case("modules_primary", primary=True, kwargs={**SINGLE, "bias": False}, recipes=STATELESS),
    Case("ops_primary", fused=True, primary=True, kwargs={"bias": False}),
    Case("modules_checkpoint", checkpoint=True),
    Case("ops_checkpoint", fused=True, checkpoint=True, kwargs=SINGLE),
    Case("modules_no_grad", grad=False, dtype=torch.bfloat16, kwargs=SINGLE),
    Case("ops_no_grad", fused=True, grad=False, inside=True),
)
MATRIX = [
    pytest.param(case, name, id=f"{case}-{name}", marks=[] if name in case.quick else deep)
    for deep in (pytest.mark.deep,)
    for case in CASES
    for name in case.recipes
]


def function(case: Case, block: Any, recipe: Any) -> Callable[..., Any]:
    def plain(x: Tensor) -> Any:
        return mf.checkpoint(block, x) if case.checkpoint else block(x)

    def inside(x: Tensor) -> Any:
        with mf.autocast(recipe=recipe):
            return plain(x)

    return inside if case.inside else plain


def train(case: Case, block: Any, recipe: Any, call: Any, x: Tensor) -> list[Any]:
    """One step: results, gradients, what delayed scaling keeps, and the counts."""
    x = x.to(case.dtype).requires_grad_(case.grad)
    outer = contextlib.nullcontext() if case.inside else mf.autocast(recipe=recipe)
    torch.manual_seed(9)
    with torch.set_grad_enabled(case.grad):
        with outer:
            y, counts = call(x)
        if case.grad:
            y.backward(torch.linspace(-1, 1, y.numel()).reshape(y.shape).to(y.dtype))
    return [y, counts, x.grad, *[p.grad for p in block.parameters()], *block.buffers()]


@pytest.mark.parametrize(("case", "name"), MATRIX)
def test_one_graph_with_the_bits_of_eager(case: Case, name: str) -> None:
    torch._dynamo.reset()
    recipe = RECIPES[name]()
    torch.manual_seed(1)
    start = mf.quantized_model_init(recipe=recipe) if case.primary else contextlib.nullcontext()
    with start:
        block = Block(case.fused, case.dtype, **case.kwargs)
    other = copy.deepcopy(block)
    counter = Counter()
    compiled = torch.compile(function(case, other, recipe), backend=counter, fullgraph=True)
    seen = set()
    for seed in range(3):
        x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(seed))
        expected = train(case, block, recipe, function(case, block, recipe), x.clone())
        compare(expected, train(case, other, recipe, compiled, x.clone()))
        seen.add(tuple(expected[1].tolist()))
    assert len(seen) == 3  # tokens went elsewhere each time
    assert counter.graphs == 1


@pytest.mark.parametrize(
    "fused", [False, pytest.param(True, marks=pytest.mark.deep)], ids=["modules", "ops"]
)
def test_experts_nobody_asks_for(fused: bool) -> None:
    """Other counts, some of them zero, in the graph that was made for others."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    block = Block(fused, torch.float32, **SINGLE)
    counter = Counter()
    compiled = torch.compile(block, backend=counter, fullgraph=True)
    recipe = RECIPES["current"]()
    x = torch.randn(TOKENS, HIDDEN).abs()
    for wanted in ((0, 1), (2, 3), (0, 3)):
        with torch.no_grad():
            block.router.weight.fill_(-1.0)
            block.router.weight[list(wanted)] = 1.0
        case = Case("", grad=False)
        y, counts = train(case, block, recipe, compiled, x)[:2]
        assert counts.tolist() == [TOKENS if e in wanted else 0 for e in range(E)]
        assert torch.equal(y, train(case, block, recipe, block, x)[0])
    assert counter.graphs == 1


@pytest.mark.deep
@pytest.mark.parametrize("fused", [False, True], ids=["modules", "ops"])
def test_inductor(fused: bool) -> None:
    """Its kernels round elsewhere: near eager, not its bits."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    block = Block(fused, torch.float32, **SINGLE)
    other = copy.deepcopy(block)
    recipe, case = RECIPES["current"](), Case("")
    compiled = torch.compile(other, fullgraph=True)
    for seed in range(2):
        x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(seed))
        expected = train(case, block, recipe, block, x.clone())
        got = train(case, other, recipe, compiled, x.clone())
        assert torch.equal(expected[1], got[1])
        for a, b in zip(expected, got, strict=True):
            if a is not None and a.is_floating_point():
                assert (a - b).norm() <= 0.02 * a.norm()
