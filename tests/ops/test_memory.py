"""What a `Sequential` of operations keeps between forward and backward: a module's bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import minifloat
from minifloat import ops

from ..modules.layers import RECIPES
from ..modules.test_layers_memory import FFN, HIDDEN, NAMES, SCALES, kept_of, kept_of_graph

BF16 = torch.bfloat16


def operations(kind: str, bias: bool) -> ops.Sequential:
    norm, how = ops.RMSNorm(HIDDEN, dtype=BF16), {"bias": bias, "dtype": BF16}
    if kind == "LayerNormLinear":
        return ops.Sequential(norm, ops.Linear(HIDDEN, FFN, **how))
    return ops.Sequential(
        norm, ops.Linear(HIDDEN, 2 * FFN, **how), ops.SwiGLU(), ops.Linear(FFN, HIDDEN, **how)
    )


def module(kind: str, bias: bool) -> Any:
    more = {"activation": "swiglu"} if kind == "LayerNormMLP" else {}
    return getattr(minifloat, kind)(
        HIDDEN, FFN, normalization="RMSNorm", bias=bias, params_dtype=BF16, **more
    )


def given() -> Tensor:
    return torch.randn(66, HIDDEN, dtype=BF16, requires_grad=True)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("kind", ["LayerNormLinear", "LayerNormMLP"])
@pytest.mark.parametrize("name", NAMES)
def test_eager(name: str, kind: str, bias: bool) -> None:
    recipe = RECIPES[name]()
    kept = []
    for made in (operations(kind, bias), module(kind, bias)):
        found, y = kept_of(made, given(), recipe)
        kept.append(found)
        y.sum().backward()
    assert kept[0] == kept[1]


COMPILED = [
    pytest.param(name, kind, id=f"{name}-{kind}",
                 marks=[] if (name, kind) == ("current", "LayerNormMLP") else pytest.mark.deep)
    for name in NAMES for kind in ("LayerNormLinear", "LayerNormMLP")
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), COMPILED)
def test_compiled(name: str, kind: str) -> None:
    recipe = RECIPES[name]()
    kept = [kept_of_graph(m, given(), recipe) for m in (operations(kind, True), module(kind, True))]
    assert abs(kept[0] - kept[1]) <= SCALES


def test_an_activation_by_itself_keeps_its_column_copy() -> None:
    """What the fusion saves: without it the second product's input is kept as well."""
    recipe = RECIPES["current"]()
    model = operations("LayerNormMLP", False)
    fused, _ = kept_of(model, given(), recipe)
    apart = ops.Sequential(*list(model)[:3], ops.Identity(), model[3])
    kept, _ = kept_of(apart, given(), recipe)
    assert 66 * FFN <= kept - fused <= 66 * FFN + SCALES
