"""Quantized tensors as inputs, outputs and parameters of `torch.compile(fullgraph=True)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from minifloat import Float8CurrentScalingQuantizer, HybridQuantizer, IdentityQuantizer

from .cases import CLASSES, E4M3, KINDS, VALUES, assert_same, bits, delayed, quantized, values

SIZE = (64, 48)


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def compiled(fn: Callable[..., Any], backend: str = "aot_eager") -> tuple[Any, Any]:
    """(the compiled function, a counter of its graphs)."""
    counter = CompileCounterWithBackend(backend)
    return torch.compile(fn, backend=counter, fullgraph=True), counter


def same_quantizer(a: Any, b: Any) -> bool:
    """Equal values, or live tensors in common."""
    return bool(a == b) if a._is_value() else a.scale is b.scale and a.amax is b.amax


# ------------------------------------------------------------------------------- bit for bit
@pytest.mark.parametrize("kind", KINDS)
def test_as_an_input(kind: str) -> None:
    fn, counter = compiled(lambda t, x: t.dequantize() @ x)
    for seed in range(3):
        t, x = quantized(kind, seed=seed), values(48, 5, seed=seed)
        assert torch.equal(fn(t, x), t.dequantize() @ x)
    assert counter.frame_count == 1  # a second tensor of the kind is no reason to compile again


def test_another_kind_compiles_again() -> None:
    fn, counter = compiled(lambda t: t.dequantize() * 2)
    fn(quantized("mxfp8"))
    fn(quantized("mxfp8_2d"))
    fn(quantized("mxfp8", columnwise=False))
    assert counter.frame_count == 3


@pytest.mark.parametrize("kind", VALUES)
def test_as_an_output(kind: str) -> None:
    quantizer = KINDS[kind]()
    fn, counter = compiled(lambda x: quantizer.quantize(x * 2))
    for seed in range(2):
        x = values(*SIZE, seed=seed)
        out = fn(x)
        assert_same(out, quantizer.quantize(x * 2))
        assert out._quantizer == quantizer
    assert counter.frame_count == 1


@pytest.mark.parametrize("kind", KINDS)
def test_in_and_out(kind: str) -> None:
    fn, counter = compiled(lambda t: (t, t.clone(), t.detach(), t.view(4, 16, 48)))
    t = quantized(kind)
    t._group_name = "shards"
    for out in fn(t):
        assert_same(out.view(*SIZE), t)
        assert same_quantizer(out._quantizer, t._quantizer)
        assert out._group_name == "shards"
    other = quantized(kind)
    assert fn(other)[1]._group_name is None
    assert counter.frame_count == 2  # the group is part of what was compiled


@pytest.mark.parametrize("columnwise", [True, False])
def test_the_transpose_is_valid_if_it_is_there(columnwise: bool) -> None:
    def change(t: Any) -> Any:
        made = t.clone()
        made.update_usage(columnwise_usage=columnwise)
        return made

    fn, _ = compiled(change)
    for given in (True, False):
        out = fn(quantized("current", columnwise=given))
        assert out._transpose_invalid is (out._transpose is None) is (not columnwise)
        assert_same(out, quantized("current", columnwise=columnwise))


@pytest.mark.parametrize("kind", KINDS)
def test_as_a_parameter(kind: str) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(quantized(kind))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x @ self.weight.dequantize().t())

    net = Net()
    fn, counter = compiled(net)
    for seed in range(2):
        x = values(5, 48, seed=seed).requires_grad_()
        out = fn(x)
        expected = net(x)
        assert torch.equal(out, expected)
        grads = [torch.autograd.grad(y.sum(), (net.weight, x)) for y in (out, expected)]
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
        assert type(grads[0][0]) is torch.Tensor
    assert counter.frame_count == 1


@pytest.mark.parametrize("kind", KINDS)
def test_writes_in_a_graph_reach_the_tensor(kind: str) -> None:
    def write(t: Any, x: torch.Tensor) -> torch.Tensor:
        t.copy_(x)
        t.mul_(2)
        return t.dequantize()

    t, expected = quantized(kind), quantized(kind)
    buffers = dict(t._buffers())
    fn, counter = compiled(write)
    for seed in range(2):
        x = values(*SIZE, seed=seed + 1)
        assert torch.equal(fn(t, x), write(expected, x))
        assert_same(t, expected)
    assert all(t._buffers()[n] is b for n, b in buffers.items())
    assert counter.frame_count == 1


def test_a_graph_updates_the_live_amax() -> None:
    quantizer = delayed()
    t = quantizer.quantize(torch.zeros(SIZE))
    fn, counter = compiled(lambda t, x: t.quantize_(x).dequantize() * 1)
    for scale in (1.0, 3.0, 2.0):
        fn(t, torch.full(SIZE, scale))
    assert quantizer.amax.item() == 3.0
    other = delayed()
    other.scale.fill_(2.0)
    out = fn(other.quantize(torch.zeros(SIZE)), torch.full(SIZE, 5.0))
    assert other.amax.item() == 5.0 and bool((out == 5.0).all())
    assert quantizer.amax.item() == 3.0
    assert counter.frame_count == 1  # live tensors are inputs: another quantizer needs no new graph


def test_a_part_with_live_state() -> None:
    def make() -> Any:
        return HybridQuantizer(
            rowwise_quantizer=delayed(), columnwise_quantizer=IdentityQuantizer()
        )

    fn, counter = compiled(lambda t, x: t.copy_(x).dequantize() * 1)
    for seed in range(2):
        quantizer = make()
        t, x = quantizer.quantize(torch.zeros(SIZE)), values(*SIZE, seed=seed)
        assert torch.equal(fn(t, x), make().quantize(x).dequantize())
        assert quantizer.rowwise_quantizer.amax.item() == x.abs().max()
    assert counter.frame_count == 1


@pytest.mark.parametrize("kind", [*CLASSES, "delayed"])
@pytest.mark.parametrize("foreach", [True, False])
def test_an_optimizer_step(kind: str, foreach: bool) -> None:
    weights = []
    for compile_it in (False, True):
        p = torch.nn.Parameter(quantized(kind))
        # Powers of two: a fused multiply-add rounds like the two operations.
        optimizer = torch.optim.SGD([p], lr=0.5, momentum=0.5, weight_decay=0.5, foreach=foreach)

        def step(optimizer: Any = optimizer) -> None:
            optimizer.step()

        run = torch.compile(step, backend="aot_eager") if compile_it else step
        for seed in range(3):
            p.grad = values(*SIZE, seed=seed)
            run()
        weights.append(p)
    assert_same(weights[0].detach(), weights[1].detach())


@pytest.mark.parametrize("kind", ["current", "mxfp8_2d"])
def test_symbolic_sizes(kind: str) -> None:
    quantizer = KINDS[kind]()

    def double(x: torch.Tensor) -> Any:
        return quantizer.quantize(x).dequantize() * 2

    counter = CompileCounterWithBackend("aot_eager")
    fn = torch.compile(double, backend=counter, fullgraph=True, dynamic=True)
    for rows in (3, 40, 65):
        assert torch.equal(fn(values(rows, 48)), double(values(rows, 48)))
    assert counter.frame_count == 1


@pytest.mark.parametrize("kind", ["current", "mxfp8", "nvfp4"])
def test_pieces_of_a_size_that_a_graph_computes(kind: str) -> None:
    def second(t: Any) -> torch.Tensor:
        return t.chunk(2)[1].dequantize() * 2

    fn = torch.compile(second, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        for rows in (64, 128, 192):
            t = KINDS[kind]().quantize(values(rows, 48))
            assert torch.equal(fn(t), second(t))


# ---------------------------------------------------------------------------------- inductor
@pytest.mark.parametrize("kind", ["current", "nvfp4_2d"])
def test_inductor(kind: str) -> None:
    quantizer = KINDS[kind]()

    def run(t: Any, x: torch.Tensor) -> Any:
        return t.dequantize() @ x, quantizer.quantize(x), t.clone()

    fn, counter = compiled(run, "inductor")
    for seed in range(2):
        t, x = quantized(kind, seed=seed), values(48, 32, seed=seed)
        product, out, same = fn(t, x)
        assert torch.allclose(product, t.dequantize() @ x, rtol=1e-5, atol=1e-5)
        assert_same(out, quantizer.quantize(x))
        assert_same(same, t)
    assert counter.frame_count == 1


# ------------------------------------------------------------------------------------- caches
def test_the_cache_key_is_everything_but_the_data() -> None:
    keys = {kind: quantized(kind)._stable_hash_for_caching() for kind in KINDS}
    assert len(set(keys.values())) == len(keys)
    for kind, key in keys.items():
        assert quantized(kind, seed=1)._stable_hash_for_caching() == key
        assert quantized(kind, 32, 48)._stable_hash_for_caching() != key
        t = quantized(kind)
        t._group_name = "shards"
        assert t._stable_hash_for_caching() != key
        assert quantized(kind).requires_grad_()._stable_hash_for_caching() != key
    one = quantized("current", columnwise=False)._stable_hash_for_caching()
    assert one != keys["current"] and "0x" not in one


def test_a_cached_graph_returns_the_quantizer_it_was_given() -> None:
    """PyTorch alone hashes an opaque object in tensor metadata by its class: a false hit."""
    from torch._inductor.utils import fresh_cache

    def with_eps(eps: float) -> Any:
        quantizer = Float8CurrentScalingQuantizer(E4M3, amax_epsilon=eps)
        return quantizer.quantize(values(*SIZE))

    def run(eps: float) -> Any:
        torch._dynamo.reset()
        return torch.compile(lambda t: t.clone(), fullgraph=True)(with_eps(eps))

    with fresh_cache(), torch._functorch.config.patch(enable_autograd_cache=True):
        for eps in (0.0, 0.5, 0.0):
            counters.clear()
            out = run(eps)
            assert out._quantizer.amax_epsilon == eps
            assert bits(out) == bits(with_eps(eps))
        assert counters["aot_autograd"]["autograd_cache_hit"] == 1


@pytest.mark.parametrize("kind", ["current", "delayed", "mxfp8"])
def test_a_graph_reads_the_fields_of_its_input(kind: str) -> None:
    t = quantized(kind)
    names = [name for name in t.__tensor_flatten__()[0] if not name.startswith("_live_")]

    def read(t: Any) -> Any:
        fields = [getattr(t, name).clone() for name in names]
        return fields, t._quantizer.columnwise_usage, int(t._fp8_dtype), t._dtype

    fields, *plain = compiled(read)[0](t)
    assert all(torch.equal(f, getattr(t, n)) for f, n in zip(fields, names, strict=True))
    assert plain == [True, int(t._fp8_dtype), t.dtype]


@pytest.mark.parametrize("kind", CLASSES)
def test_an_output_argument_in_a_graph(kind: str) -> None:
    quantizer = KINDS[kind]()

    def update(t: Any, x: torch.Tensor, flag: torch.Tensor) -> Any:
        quantizer.quantize(x, out=t)
        quantizer.update_quantized(2 * x, t, noop_flag=flag)
        return t.dequantize()

    fn, _ = compiled(update)
    for noop in (0.0, 1.0):
        x, flag = values(*SIZE, seed=1), torch.tensor([noop])
        t, expected = quantized(kind), quantized(kind)
        assert torch.equal(fn(t, x, flag), update(expected, x, flag))
        assert_same(t, expected)
