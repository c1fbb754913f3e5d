"""Operators of PyTorch on quantized tensors: what they read, and what they write."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import minifloat
from minifloat import QuantizedTensor

from .cases import CLASSES, KINDS, SHAPES, assert_same, bits, quantized, shares_memory, values
from .groups import assert_same_group, group_of


@pytest.mark.parametrize("kind", KINDS)
def test_any_other_operator_sees_the_values(kind: str) -> None:
    t = quantized(kind)
    x = t.dequantize()
    for fn in (
        lambda a: a + 1, lambda a: a.t() @ a, torch.sum, lambda a: torch.cat([a, a]),
        lambda a: a[3], lambda a: a[:, 5:9], lambda a: a[::2], lambda a: a.permute(1, 0),
        lambda a: torch.where(a > 0, a, -a), lambda a: torch.nn.functional.linear(a, a),
    ):  # fmt: skip
        out = fn(t)
        expected = fn(x)
        assert torch.equal(out.dequantize() if isinstance(out, QuantizedTensor) else out, expected)
    assert torch.equal(1 - t, 1 - x)
    out = torch.empty(64, 48)
    torch.add(t, t, out=out)
    assert torch.equal(out, x + x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_zero_is_in_place(kind: str, shape: tuple[int, ...]) -> None:
    t = quantized(kind, *shape)
    buffers = dict(t._buffers())
    assert t.zero_() is t
    assert_same(t, KINDS[kind]().quantize(torch.zeros(shape)))
    assert all(t._buffers()[n] is b for n, b in buffers.items())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copy_of_high_precision_requantizes(kind: str, dtype: torch.dtype) -> None:
    t, new = quantized(kind, dtype=dtype), values(64, 48, dtype=dtype, seed=1)
    buffers = dict(t._buffers())
    assert t.copy_(new) is t
    assert_same(t, quantized(kind, dtype=dtype, seed=1))
    assert all(t._buffers()[n] is b for n, b in buffers.items())
    t.copy_(torch.ones(48, dtype=dtype))
    assert_same(t, KINDS[kind]().quantize(torch.ones(64, 48, dtype=dtype)))


@pytest.mark.parametrize("kind", KINDS)
def test_copy_between_equals_copies_bits(kind: str) -> None:
    t, src = quantized(kind), quantized(kind, seed=1)
    t.copy_(src)
    assert_same(t, src)
    other = quantized(kind, seed=2)
    torch._foreach_copy_([t], [other])
    assert_same(t, other)


@pytest.mark.parametrize("kind", KINDS)
def test_copy_between_kinds_goes_through_the_values(kind: str) -> None:
    src = quantized(kind, seed=1)
    t = quantized("mxfp8_2d")
    t.copy_(src)
    assert_same(t, KINDS["mxfp8_2d"]().quantize(src.dequantize()))
    plain, ints = torch.empty(64, 48), torch.empty(64, 48, dtype=torch.int32)
    plain.copy_(src)
    ints.copy_(src)
    assert torch.equal(plain, src.dequantize())
    assert torch.equal(ints, src.dequantize().to(torch.int32))
    one = quantized(kind, columnwise=False)
    one.copy_(src)  # other usages: requantized
    assert one.get_usages()["rowwise"]


def test_a_copy_of_another_shape_is_an_error() -> None:
    t = quantized("mxfp8")
    before = bits(t)
    with pytest.raises(RuntimeError):
        t.copy_(values(64, 47))
    assert bits(t) == before


@pytest.mark.parametrize("kind", KINDS)
def test_operators_in_place_requantize(kind: str) -> None:
    t, x = quantized(kind), quantized(kind).dequantize()
    quantizer = KINDS[kind]()
    assert t.mul_(2) is t
    assert_same(t, quantizer.quantize(x * 2))
    x = t.dequantize()
    torch.add(t, 1, out=t)
    assert_same(t, quantizer.quantize(x + 1))
    x = t.dequantize()
    t += 1
    assert_same(t, quantizer.quantize(x + 1))


@pytest.mark.parametrize("kind", CLASSES)
def test_what_a_foreach_writes_is_found_by_its_schema(kind: str) -> None:
    quantizer = KINDS[kind]()
    a, b, plain = quantized(kind), quantized(kind, seed=1), values(64, 48, seed=2)
    x, y, p = a.dequantize(), b.dequantize(), plain.clone()
    grads = [quantized(kind, seed=3), values(64, 48), values(64, 48)]
    untouched = bits(grads[0])
    torch._foreach_add_([a, b, plain], grads, alpha=-0.5)
    assert_same(a, quantizer.quantize(x - 0.5 * quantized(kind, seed=3).dequantize()))
    assert_same(b, quantizer.quantize(y - 0.5 * values(64, 48)))
    assert torch.equal(plain, p - 0.5 * values(64, 48))
    assert bits(grads[0]) == untouched
    x = a.dequantize()
    torch._foreach_mul_([a], 3.0)
    assert_same(a, quantizer.quantize(x * 3))


@pytest.mark.parametrize("name", ["add", "copy", "fused"])
def test_what_a_foreach_writes_is_counted(name: str) -> None:
    """So that a backward that has saved it raises, and who keeps a cast of it casts again."""
    other = torch.ones(64, 48)
    written = [quantized("mxfp8"), values(64, 48)]
    before = [t._version for t in written]
    if name == "add":
        torch._foreach_add_(written, [other, other])
    elif name == "copy":
        torch._foreach_copy_(written, [other, other])
    else:
        step = {"lr": 0.1, "weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0}
        flags = {"nesterov": False, "maximize": False, "is_first_step": True}
        torch._fused_sgd_(written, [other, other], [], **step, **flags)
    assert all(t._version > v for t, v in zip(written, before, strict=True))


@pytest.mark.parametrize(
    "way", ["index", "quantize_", "update", "out", "storage", "detached", "flat"]
)
@pytest.mark.parametrize("kind", ["mxfp8", "hybrid"])
def test_what_is_written_past_the_operators_is_counted(kind: str, way: str) -> None:
    """Gradients were those of the new values, where PyTorch raises for a plain tensor."""
    quantizer, weight = KINDS[kind](), torch.nn.Parameter(quantized(kind))
    x, new = values(3, 48).requires_grad_(), values(64, 48, seed=1)
    y = torch.nn.functional.linear(x, weight)
    with torch.no_grad():
        if way == "index":
            weight[3] = 1.0
        elif way == "quantize_":
            weight.quantize_(new)
        elif way == "update":
            quantizer.update_quantized(new, weight)
        elif way == "out":
            quantizer.quantize(new, out=weight)
        elif way == "storage":
            weight.copy_from_storage(quantizer.quantize(new))
        elif way == "detached":
            weight.detach().copy_(new)
        else:
            weight.view(-1).quantize_(new.view(-1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("way", ["quantize", "output", "detached"])
def test_what_is_written_to_a_group_is_counted(way: str) -> None:
    weight = minifloat.as_parameter(group_of("mxfp8")[0])
    y = values(3, 33, 17, seed=3).requires_grad_() * weight
    new = values(99, 17, seed=4)
    with torch.no_grad():
        if way == "output":
            minifloat.group_quantize(new, weight.quantizer, 3, None, output=weight)
        else:
            written = weight if way == "quantize" else weight.detach()
            written.quantize(list(new.split(33)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("way", ["mul_", "copy_", "zero_", "list", "alike", "member", "view"])
@pytest.mark.parametrize("kind", ["mxfp8", "hybrid", "group"])
def test_what_operators_write_is_counted_in_the_buffers(kind: str, way: str) -> None:
    """Which is what graphs save, and layers of experts."""
    group = kind == "group"
    t = group_of("mxfp8")[0] if group else quantized(kind)
    old, new = t._buffers(), values(*t.shape, seed=2)
    before = {name: b._version for name, b in old.items() if b is not None}
    with torch.no_grad():
        if way == "mul_":
            t.mul_(2.0)
        elif way == "copy_":
            t.copy_(new)
        elif way == "zero_":
            t.zero_()
        elif way == "list":
            torch._foreach_mul_([t], 2.0)
        elif way == "alike":
            t.copy_(t.clone())
        elif way == "view":
            (t.unbind(0)[1] if group else t.view(2, 32, 48)).mul_(2.0)
        elif group:
            t.split_into_quantized_tensors()[1].copy_(new[1])
        else:
            t.detach().copy_(new)
    written = [name for name in before if name not in ("first_dims", "tensor_offsets")]
    assert written and all(old[name]._version > before[name] for name in written)


@pytest.mark.parametrize("made_in", [torch.no_grad, torch.inference_mode])
def test_operators_in_inference_mode(made_in: Any) -> None:
    """PyTorch hands them over whole there: to("cpu") dequantized, and views could not be made."""
    with made_in():
        t, group = quantized("mxfp8"), group_of("mxfp8")[0]
    x = t.dequantize()
    with torch.inference_mode():
        assert_same(t.to("cpu"), t)
        assert_same(torch.reshape(t, (16, 4, 48)), t.view(16, 4, 48))
        assert torch.equal(t.to(torch.float64).mul_(2), x.double() * 2)  # a copy is the caller's
        assert torch.equal(t.t().to(torch.float64).mul_(2), x.t().double() * 2)
        for view in (lambda a: a[3], lambda a: a.chunk(2)[1], lambda a: a.t(), lambda a: a[:32]):
            made = view(t)
            assert torch.equal(made.dequantize() if hasattr(made, "dequantize") else made, view(x))
            assert made.is_inference() == t.is_inference()
        assert_same(t.detach(), t)
        assert_same(t.expand_as(t), t)
        assert_same_group(group.to("cpu"), group)
        assert_same(next(iter(group)), group.split_into_quantized_tensors()[0])
        assert torch.equal(group.to(torch.float64), group.dequantize().double())


@pytest.mark.parametrize("kind", KINDS)
def test_the_data_of_a_parameter(kind: str) -> None:
    p, other = torch.nn.Parameter(quantized(kind)), quantized(kind, seed=1)
    p.data = other
    assert_same(p.detach(), other)
    assert shares_memory(p, other) == set(bits(other))
    p.data = values(64, 48, seed=2)
    assert_same(p.detach(), quantized(kind, seed=2))
    assert_same(p.data, quantized(kind, seed=2))
    with pytest.raises(ValueError, match="shape"):
        p.data = values(48, 64)
