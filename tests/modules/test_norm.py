"""`LayerNorm` and `RMSNorm`: the operations with a module's arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import minifloat
from minifloat import ops

NORMS = [minifloat.LayerNorm, minifloat.RMSNorm]


def plain(norm: Any, x: torch.Tensor) -> torch.Tensor:
    weight = norm.weight + 1 if norm.zero_centered_gamma else norm.weight
    if isinstance(norm, ops.RMSNorm):
        return F.rms_norm(x, weight.shape, weight, norm.eps)
    return F.layer_norm(x, weight.shape, weight, norm.bias, norm.eps)


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("shape", [24, (4, 6)], ids=str)
@pytest.mark.parametrize("zero", [False, True])
def test_norms_agree_with_pytorch(kind: Any, shape: Any, zero: bool) -> None:
    norm = kind(shape, eps=1e-4, zero_centered_gamma=zero)
    sizes = (shape,) if isinstance(shape, int) else shape
    with torch.no_grad():
        for p in norm.parameters():
            p.add_(torch.randn_like(p) / 4)
    x = torch.randn(3, 5, *sizes, requires_grad=True)
    g = torch.randn_like(x)
    made = torch.autograd.grad(norm(x), (x, *norm.parameters()), g)
    wanted = torch.autograd.grad(plain(norm, x), (x, *norm.parameters()), g)
    torch.testing.assert_close(norm(x), plain(norm, x))
    for a, b in zip(made, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", NORMS)
def test_a_norm_is_one_graph(kind: Any) -> None:
    torch._dynamo.reset()
    norm = kind(24)
    compiled = torch.compile(norm, backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 24, requires_grad=True)
    y, z = norm(x), compiled(x)
    assert torch.equal(y, z)
    a, b = (torch.autograd.grad(t.square().sum(), (x, norm.weight)) for t in (y, z))
    assert all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


def test_arguments_of_old() -> None:
    with pytest.warns(DeprecationWarning, match="hidden_size is now called normalized_shape"):
        norm = minifloat.RMSNorm(hidden_size=8, params_dtype=torch.float64)
    assert norm.weight.shape == (8,) and norm.weight.dtype is torch.float64
    with pytest.raises(RuntimeError, match="neither of normalized_shape and hidden_size"):
        minifloat.LayerNorm()
    with pytest.raises(RuntimeError, match="both of normalized_shape and hidden_size"):
        minifloat.LayerNorm(8, hidden_size=8)
    with pytest.raises(RuntimeError, match="both dtype and params_dtype"):
        minifloat.LayerNorm(8, dtype=torch.float32, params_dtype=torch.float32)


@pytest.mark.parametrize("given", [None, False, True])
def test_parameters_tell_of_sequence_parallelism(given: bool | None) -> None:
    norm = minifloat.LayerNorm(8, sequence_parallel=given)
    norm.reset_parameters()
    assert norm.sequence_parallel is given
    for p in norm.parameters():
        assert getattr(p, "sequence_parallel", None) is given


def test_state_dicts_are_those_of_pytorch() -> None:
    norm, other = minifloat.LayerNorm(8), torch.nn.LayerNorm(8)
    other.load_state_dict(norm.state_dict())
    norm.load_state_dict(other.state_dict())


def test_meta_parameters_are_made_real() -> None:
    norm = minifloat.RMSNorm(8, device="meta")
    assert norm.weight.is_meta
    norm.reset_parameters()
    assert torch.equal(norm.weight.cpu(), torch.ones(8))


@pytest.mark.parametrize(("kind", "of"), [("LayerNorm", "ln"), ("RMSNorm", "rmsnorm")])
def test_margins_of_kernels_are_kept(kind: str, of: str) -> None:
    cls = getattr(minifloat, kind)
    layer = cls(8, sm_margin={"forward": 1, "backward": 2, "inference": 3}, device="cpu")
    for phase, expected in (("fwd", 1), ("bwd", 2), ("inf", 3)):
        name = f"{phase}_{of}_sm_margin"
        with pytest.warns(DeprecationWarning, match=name):
            assert getattr(layer, name) == expected
        with pytest.warns(DeprecationWarning, match=name):
            setattr(layer, name, 7)
    assert layer._sm_margins == dict.fromkeys(("forward", "backward", "inference"), 7)
    assert cls(8, sm_margin=4, device="cpu")._sm_margins["backward"] == 4
    for wrong in ("a", {"forward": 1}, None):
        with pytest.raises(ValueError, match=f"{kind}: sm_margin: got"):
            cls(8, sm_margin=wrong, device="cpu")
