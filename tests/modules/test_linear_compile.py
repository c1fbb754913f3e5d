"""Every way to run a Linear is one graph, with the bits of eager."""

from __future__ import annotations

import pytest
import torch

from .cases import CASES, RECIPES, Case, Counter, compare, duplicate, function, make, train

QUICK = ("plain",)
MATRIX = [
    pytest.param(
        name, case, id=f"{name}-{case}", marks=[] if case.name in QUICK else pytest.mark.deep
    )
    for case in CASES
    for name in RECIPES
    if name in case.recipes
]


@pytest.mark.parametrize(("name", "case"), MATRIX)
def test_one_graph_with_the_bits_of_eager(name: str, case: Case) -> None:
    torch._dynamo.reset()
    recipe = RECIPES[name]()
    layer = make(case, recipe)
    other = duplicate(layer)
    expected = list(train(case, layer, recipe, function(case, layer, recipe)))
    counter = Counter()
    compiled = torch.compile(function(case, other, recipe), backend=counter, fullgraph=True)
    compare(expected, list(train(case, other, recipe, compiled)))
    states = len(set(case.microbatches)) + (
        True in case.microbatches[1:] and True in case.microbatches
    )
    assert counter.graphs <= max(states, 1)
