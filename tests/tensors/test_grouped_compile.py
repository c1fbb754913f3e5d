"""Grouped tensors as inputs, parameters and outputs of `torch.compile(fullgraph=True)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import minifloat as mf

from .cases import values
from .groups import GROUPS, SOME, assert_same_group, group_of, quantizer_of

EVERY = [pytest.param(k, id=k, marks=() if k in SOME else pytest.mark.deep) for k in GROUPS]


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def compiled(fn: Callable[..., Any], backend: str = "aot_eager", **kwargs: Any) -> tuple[Any, Any]:
    """(the compiled function, a counter of its graphs)."""
    counter = CompileCounterWithBackend(backend)
    return torch.compile(fn, backend=counter, fullgraph=True, **kwargs), counter


@pytest.mark.parametrize("kind", EVERY)
def test_as_an_input(kind: str) -> None:
    fn, counter = compiled(lambda t, x: torch.bmm(t.dequantize(), x))
    for seed in range(2):
        group, _ = group_of(kind, seed=seed)
        x = values(3, 17, 5, seed=seed)
        assert torch.equal(fn(group, x), torch.bmm(group.dequantize(), x))
    assert counter.frame_count == 1


@pytest.mark.parametrize("kind", EVERY)
def test_in_and_out(kind: str) -> None:
    fn, counter = compiled(lambda t: (t, t.clone(), t.detach()))
    group, _ = group_of(kind)
    for out in fn(group):
        assert_same_group(out, group)
    assert counter.frame_count == 1


def test_high_precision() -> None:
    data = values(3, 4, 5)
    group = mf.GroupedTensorStorage.make_grouped_tensor_from_rowwise_data(
        num_tensors=3, tensor_shape=(4, 5), rowwise_data=data
    )
    fn, _ = compiled(lambda t: (t.clone(), t + 1))
    clone, more = fn(group)
    assert_same_group(clone, group)
    assert torch.equal(more, data + 1)


class Experts(torch.nn.Module):
    def __init__(self, group: Any) -> None:
        super().__init__()
        self.weight = mf.as_parameter(group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.bmm(x, self.weight.dequantize().transpose(1, 2)))


@pytest.mark.parametrize("kind", SOME)
def test_as_a_parameter(kind: str) -> None:
    net = Experts(group_of(kind)[0])
    fn, counter = compiled(net)
    for seed in range(2):
        x = values(3, 5, 17, seed=seed).requires_grad_()
        out, expected = fn(x), net(x)
        assert torch.equal(out, expected)
        grads = [torch.autograd.grad(y.sum(), (net.weight, x)) for y in (out, expected)]
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
        assert type(grads[0][0]) is torch.Tensor
    assert counter.frame_count == 1


@pytest.mark.parametrize(("kind", "foreach"), [*((k, False) for k in SOME), ("mxfp8", True)])
def test_an_optimizer_step(kind: str, foreach: bool) -> None:
    """Every buffer stays where it was. (PyTorch's optimizers break the graph once, by design.)"""
    weights = []
    for compile_it in (False, True):
        net = Experts(group_of(kind)[0])
        buffers = dict(net.weight._buffers())
        # Powers of two: a fused multiply-add rounds like the two operations.
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.5, foreach=foreach)

        def step(optimizer: Any = optimizer) -> None:
            optimizer.step()

        run = torch.compile(step, backend="aot_eager") if compile_it else step
        for seed in range(3):
            net.weight.grad = values(3, 33, 17, seed=seed)
            run()
        assert all(net.weight._buffers()[name] is b for name, b in buffers.items())
        weights.append(net.weight)
    assert_same_group(weights[0].detach(), weights[1].detach())


@pytest.mark.parametrize("kind", SOME)
def test_a_training_step_is_one_graph(kind: str) -> None:
    def step(weight: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.bmm(x, weight.dequantize().transpose(1, 2)).square().sum()
        (grad,) = torch.autograd.grad(y, weight)
        with torch.no_grad():
            weight.sub_(grad, alpha=0.5)
        return y.detach()

    weights = [mf.as_parameter(group_of(kind)[0]) for _ in range(2)]
    x = values(3, 5, 17)
    for _ in range(2):
        y = torch.bmm(x, weights[0].dequantize().transpose(1, 2)).square().sum()
        (grad,) = torch.autograd.grad(y, weights[0])

        def write(weight: Any, grad: torch.Tensor) -> None:
            weight.sub_(grad, alpha=0.5)

        update, counter = compiled(write)
        with torch.no_grad():
            update(weights[0], grad)
        assert counter.frame_count == 1
        step(weights[1], x)
        assert_same_group(weights[0].detach(), weights[1].detach())


@pytest.mark.parametrize("kind", SOME)
def test_writes_in_a_graph_reach_the_group(kind: str) -> None:
    def write(t: Any, x: torch.Tensor) -> torch.Tensor:
        t.copy_(x)
        t.mul_(2)
        return t.dequantize()

    (group, _), (expected, _) = group_of(kind), group_of(kind)
    fn, counter = compiled(write)
    for seed in range(2):
        x = values(3, 33, 17, seed=seed + 5)
        assert torch.equal(fn(group, x), write(expected, x))
        assert_same_group(group, expected)
    assert counter.frame_count == 1


# A live quantizer is no constant: in a graph, modules hand its tensors to `ragged` themselves.
@pytest.mark.parametrize("kind", [k for k in EVERY if k.id != "delayed"])
def test_quantized_in_a_graph(kind: str) -> None:
    """Other counts per member need no new graph; other totals need one, with symbolic sizes."""
    quantizer, plain = quantizer_of(kind), quantizer_of(kind)
    fn, counter = compiled(
        lambda x, sizes: mf.group_quantize(x * 2, quantizer, 4, sizes), dynamic=None
    )
    graphs = []
    for sizes in ([5, 0, 33, 2], [0, 40, 0, 0], [7, 7, 0, 26], [1, 2, 3, 4], [30, 0, 30, 1]):
        x = values(sum(sizes), 24)
        out = fn(x, torch.tensor(sizes))
        assert_same_group(out, mf.group_quantize(x * 2, plain, 4, torch.tensor(sizes)))
        graphs.append(counter.frame_count)
    assert graphs[0] == graphs[2] and graphs[-1] <= 2


@pytest.mark.parametrize("kind", SOME)
def test_ragged_inputs(kind: str) -> None:
    quantizer = quantizer_of(kind)
    fn, counter = compiled(lambda t: mf.group_dequantize(t).rowwise_data * 2)
    for sizes in ([5, 0, 33, 2], [0, 40, 0, 0]):
        group = mf.group_quantize(values(40, 24), quantizer, 4, torch.tensor(sizes))
        assert torch.equal(fn(group), mf.group_dequantize(group).rowwise_data * 2)
    assert counter.frame_count == 1


def test_inductor() -> None:
    quantizer = quantizer_of("mxfp8")
    sizes, x = torch.tensor([5, 0, 33, 2]), values(40, 24)

    def through(x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        group = mf.group_quantize(x, quantizer, 4, sizes)
        return mf.group_dequantize(group).rowwise_data.view(40, 24) + 1

    fn = torch.compile(through, fullgraph=True)
    assert torch.equal(fn(x, sizes), through(x, sizes))


def test_the_cache_key_is_everything_but_the_data() -> None:
    keys = [group_of("mxfp8", seed=s)[0]._stable_hash_for_caching() for s in (0, 5)]
    assert keys[0] == keys[1]
    assert keys[0] != group_of("mxfp8", num=4)[0]._stable_hash_for_caching()
