"""Operations over two ranks, on gloo."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from minifloat import ops
from minifloat import recipe as recipes
from minifloat.ops import OperationFuser

from ..tensors import world
from .cases import Counter, assert_same, step

GIVEN = torch.Generator().manual_seed(0)
X = torch.randn(2, 6, 32, generator=GIVEN)  # of each rank
W = torch.randn(64, 32, generator=GIVEN)
B = torch.randn(64, generator=GIVEN)
G = torch.randn(2, 6, 64, generator=GIVEN)


def run(op: Any, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = op(x)
    y.backward(g)
    assert x.grad is not None
    return y.detach(), x.grad


def check_gather(rank: int) -> None:
    g = torch.randn(12, 32, generator=torch.Generator().manual_seed(rank))
    other = torch.randn(12, 32, generator=torch.Generator().manual_seed(1 - rank))
    y, dx = run(ops.AllGather(), X[rank], g)
    assert torch.equal(y, X.reshape(12, 32))
    torch.testing.assert_close(dx, (g + other)[6 * rank : 6 * rank + 6])


def check_scatter(rank: int) -> None:
    g = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(5))
    y, dx = run(ops.ReduceScatter(), X[rank], g[rank])
    torch.testing.assert_close(y, X.sum(0)[3 * rank : 3 * rank + 3])
    assert torch.equal(dx, g.reshape(6, 32))
    with pytest.raises(ValueError, match=r"ReduceScatter \(op 0 of 1\): input: got shape \(5,"):
        ops.ReduceScatter()(X[0, :5])


def check_reduce(rank: int) -> None:
    for flag in (True, False):
        y, dx = run(ops.AllReduce(reduce_in_backward=flag), X[rank], X[0])
        torch.testing.assert_close(y, X.sum(0))
        assert torch.equal(dx, X[0])


def check_alone(rank: int) -> None:
    groups = [distributed.new_group([r]) for r in range(2)]
    for cls in (ops.AllGather, ops.AllReduce, ops.ReduceScatter):
        y, dx = run(cls(groups[rank]), X[0], X[1])
        assert torch.equal(y, X[0]) and torch.equal(dx, X[1])


def linear(mode: str, sequence: bool, rank: int) -> ops.Linear:
    made = ops.Linear(32, 64, tensor_parallel_mode=mode, sequence_parallel=sequence)
    with torch.no_grad():
        if mode == "column":
            made.weight.copy_(W.chunk(2)[rank])
            made.bias.copy_(B.chunk(2)[rank])
        else:
            made.weight.copy_(W.chunk(2, 1)[rank])
            made.bias.copy_(B)
    return made


def check_linear(mode: str, sequence: bool, rank: int) -> None:
    """Against the whole layer, in high precision."""
    whole_x, whole_g = X.reshape(12, 32), G.reshape(12, 64)
    x = whole_x.clone().requires_grad_()
    w, b = W.clone().requires_grad_(), B.clone().requires_grad_()
    y = x @ w.t() + b
    y.backward(whole_g)
    assert x.grad is not None and w.grad is not None and b.grad is not None
    rows = slice(6 * rank, 6 * rank + 6) if sequence else slice(None)
    columns = lambda t: t.chunk(2, -1)[rank]  # noqa: E731
    if mode == "column":
        given = whole_x[rows], columns(whole_g)
        expected = columns(y), x.grad[rows], w.grad.chunk(2)[rank], columns(b.grad)
    else:
        given = columns(whole_x), whole_g[rows]
        expected = y[rows], columns(x.grad), w.grad.chunk(2, 1)[rank], whole_g[rows].sum(0)
    layer = linear(mode, sequence, rank)
    if mode == "row":  # who sums gradients over ranks has to know that they are of a part
        assert layer.bias.sequence_parallel == sequence
    found = *run(layer, *given), layer.weight.grad, layer.bias.grad
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a.detach(), rtol=1e-5, atol=1e-4)  # sums of up to 64


def mlp(rank: int, sequence: bool, bias: bool = True) -> ops.Sequential:
    torch.manual_seed(rank)
    column = {"tensor_parallel_mode": "column", "sequence_parallel": sequence, "bias": bias}
    row = {"tensor_parallel_mode": "row", "sequence_parallel": sequence, "bias": bias}
    return ops.Sequential(
        ops.RMSNorm(32),
        ops.Linear(32, 128, **column),  # type: ignore[arg-type]
        ops.SwiGLU(),
        ops.Linear(64, 32, **row),  # type: ignore[arg-type]
    )


def check_fused(sequence: bool, rank: int) -> None:
    """An MLP whose parts are on all ranks has the bits of its operations by themselves."""
    fusions = OperationFuser.forward_backward_fusion_functions
    kept = list(fusions)
    for recipe in (recipes.DelayedScaling(), recipes.Float8CurrentScaling()):
        made = []
        for fused in (True, False):
            fusions[:] = kept if fused else []
            model = mlp(rank, sequence, bias=False)
            x = torch.randn(6, 32, generator=torch.Generator().manual_seed(rank))
            made.append([*step(model, model, x, recipe), *step(model, model, x, recipe)])
            there = [type(op) for op, _ in model._module_groups[0]._forward_ops]
            assert (ops.FusedMLP in there) == fused
        fusions[:] = kept
        assert_same(*made)


def check_compiled(sequence: bool, rank: int) -> None:
    torch._dynamo.reset()
    model, other = mlp(rank, sequence), mlp(rank, sequence)
    counter = Counter()
    compiled = torch.compile(other, backend=counter, fullgraph=True)
    for recipe in (recipes.DelayedScaling(), recipes.MXFP8BlockScaling()):
        for seed in range(2):
            x = torch.randn(6, 32, generator=torch.Generator().manual_seed(seed + rank))
            assert_same(step(model, model, x, recipe), step(other, compiled, x, recipe))
    assert counter.graphs == 2


CHECKS: world.Checks = {
    "gather": check_gather,
    "scatter": check_scatter,
    "reduce": check_reduce,
    "alone": check_alone,
    "fused": functools.partial(check_fused, False),
    "fused_sequence": functools.partial(check_fused, True),
    **{
        f"{mode}{'_sequence' if s else ''}": functools.partial(check_linear, mode, s)
        for mode in ("column", "row")
        for s in (False, True)
    },
}
DEEP: world.Checks = {
    "compiled": functools.partial(check_compiled, False),
    "compiled_sequence": functools.partial(check_compiled, True),
}


@pytest.mark.parametrize("name", CHECKS)
def test_two_ranks(name: str) -> None:
    world.passes(__name__, "CHECKS", name)


@pytest.mark.deep
@pytest.mark.parametrize("name", DEEP)
def test_two_ranks_compiled(name: str) -> None:
    world.passes(__name__, "DEEP", name)
