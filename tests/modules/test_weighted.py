"""Parameters that come, or go, after construction."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import minifloat
from minifloat.recipe import Float8CurrentScaling

KINDS: dict[str, tuple[Any, str]] = {
    "linear": (lambda **kw: minifloat.Linear(32, 48, **kw), "bias"),
    "row": (lambda **kw: minifloat.Linear(32, 48, parallel_mode="row", **kw), "bias"),
    "norm": (lambda **kw: minifloat.LayerNormLinear(32, 48, **kw), "bias"),
    "mlp": (lambda **kw: minifloat.LayerNormMLP(32, 48, **kw), "fc2_bias"),
}


@pytest.mark.parametrize("given", [False, True], ids=["returned", "added"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_bias_that_is_given_later_is_the_layers(kind: str, given: bool) -> None:
    make, name = KINDS[kind]
    with torch.device("cpu"):
        with_one = make(return_bias=not given)
        later, x = make(bias=False, return_bias=not given), torch.randn(4, 32)
    later.load_state_dict(with_one.state_dict(), strict=False)
    for other, bias in with_one.named_parameters():
        if "bias" in other and "norm" not in other:
            setattr(later, other, nn.Parameter(torch.randn_like(bias)))
            bias.data.copy_(getattr(later, other).data)
    assert later.use_bias and later.apply_bias == given and "bias=True" in repr(later)
    found = []
    for layer in (with_one, later):
        with minifloat.autocast(recipe=Float8CurrentScaling()):
            y = layer(x)
        y = y if isinstance(y, tuple) else (y,)
        sum(part.square().sum() for part in y).backward()
        found.append((*y, getattr(layer, name).grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    setattr(later, name, None)
    assert not (later.use_bias or later.apply_bias)


def test_pytorch_folds_a_batch_norm_into_it() -> None:
    layer = minifloat.Linear(8, 16, bias=False, device="cpu").eval()
    norm = nn.BatchNorm1d(16).eval()
    nn.init.normal_(norm.bias)
    x = torch.randn(4, 8)
    folded = nn.utils.fusion.fuse_linear_bn_eval(layer, norm)
    torch.testing.assert_close(folded(x), norm(layer(x)))
