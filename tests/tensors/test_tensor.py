"""Quantized tensors under PyTorch: operators, views, copies, moves, parameters, optimizers."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import numpy
import pytest
import torch

from minifloat import MXFP8Tensor, QuantizedTensor, UsageError

from .cases import (
    BLOCKED,
    CLASSES,
    KINDS,
    SHAPES,
    SQUARE,
    VALUES,
    assert_same,
    bits,
    quantized,
    shares_memory,
    values,
)


# -------------------------------------------------------------------------------- construction
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_a_tensor_of_its_nominal_dtype(kind: str, shape: tuple[int, ...]) -> None:
    t = quantized(kind, *shape, dtype=torch.bfloat16)
    assert isinstance(t, torch.Tensor) and isinstance(t, QuantizedTensor)
    assert (tuple(t.shape), t.dtype, t.device) == (shape, torch.bfloat16, torch.device("cpu"))
    assert t.is_contiguous() and t.contiguous() is t
    assert t.numel() == values(*shape).numel() and t.dim() == len(shape)
    assert "bfloat16" in repr(t) and type(t).__name__ in str(t)
    assert t.untyped_storage().size() == 0


@pytest.mark.parametrize("kind", CLASSES)
def test_the_constructor(kind: str) -> None:
    t = quantized(kind)
    kwargs = t.get_metadata()
    made = type(t)((64, 48), torch.float32, requires_grad=True, **kwargs)
    assert_same(made, t)
    assert made.requires_grad and made.device == t.device
    del kwargs["fake_dtype"]
    assert_same(type(t)((64, 48), torch.float32, **kwargs), t)
    with pytest.raises(ValueError, match="fake_dtype: got torch.float16"):
        type(t)((64, 48), torch.float32, fake_dtype=torch.float16, **kwargs)
    with pytest.raises(TypeError, match="'colour'"):
        type(t)((64, 48), torch.float32, colour=1, **kwargs)


@pytest.mark.parametrize("kind", ["current", "block_2d", "mxfp8", "nvfp4"])
def test_bad_input_is_named(kind: str) -> None:
    quantizer = KINDS[kind]()
    for dtype in (torch.int32, torch.complex64, torch.float64, torch.bool):
        with pytest.raises(TypeError, match=str(dtype)):
            quantizer.quantize(torch.ones(4, 4).to(dtype))
    if kind != "current":
        with pytest.raises(ValueError, match="0-d"):
            quantizer.quantize(torch.tensor(1.0))


# ---------------------------------------------------------------------------- values and dtypes
@pytest.mark.parametrize("kind", KINDS)
def test_casts_of_a_tensor_are_plain(kind: str) -> None:
    t = quantized(kind)
    for out, dtype in (
        (t.float(), torch.float32), (t.half(), torch.float16), (t.bfloat16(), torch.bfloat16),
        (t.to(torch.bfloat16), torch.bfloat16), (t.to(torch.float64), torch.float64),
    ):  # fmt: skip
        assert type(out) is torch.Tensor and out.dtype == dtype
        assert torch.equal(out, t.dequantize(dtype=dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_the_nominal_dtype_changes_without_the_data(kind: str) -> None:
    t = quantized(kind)
    made = t.to_dtype(torch.bfloat16)
    assert type(made) is type(t) and made.dtype == made._dtype == torch.bfloat16
    assert bits(made) == bits(t) and shares_memory(made, t)
    like = type(t).make_like(t, dtype=torch.float16, requires_grad=True)
    assert like.dtype == torch.float16 and like.requires_grad
    assert not type(t).make_like(like).requires_grad


# ------------------------------------------------------------------------------ copies and moves
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_clone_shares_nothing(kind: str, shape: tuple[int, ...]) -> None:
    t = quantized(kind, *shape)
    made = t.clone()
    assert_same(made, t)
    made.zero_()
    assert_same(t, quantized(kind, *shape))
    assert bool((made.dequantize() == 0).all())


@pytest.mark.parametrize("kind", KINDS)
def test_detach_shares_everything(kind: str) -> None:
    t = quantized(kind).requires_grad_()
    for made in (
        t.detach(),
        t.data,
        torch.ops.aten.detach(t),
        t[:],
        t.as_strided((64, 48), (48, 1)),
    ):
        assert_same(made, t)
        assert not made.requires_grad or made.grad_fn is not None
        assert shares_memory(made, t) == set(bits(t))


@pytest.mark.parametrize("kind", KINDS)
def test_shared_memory_is_that_of_the_buffers(kind: str) -> None:
    t, same = quantized(kind), quantized(kind)
    assert not t.is_shared()
    assert t.share_memory_() is t and t.is_shared()
    assert all(getattr(t, name).is_shared() for name in t.__tensor_flatten__()[0])
    assert_same(t, same)


@pytest.mark.parametrize("kind", KINDS)
def test_no_memory_is_handed_out(kind: str) -> None:
    """It was the address 0."""
    for read in (torch.from_dlpack, numpy.from_dlpack):
        with pytest.raises(BufferError, match="no memory that others could read; dequantize"):
            read(quantized(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_deepcopy(kind: str) -> None:
    p = torch.nn.Parameter(quantized(kind))
    made, again = copy.deepcopy([p, p])
    assert made is again
    assert isinstance(made, torch.nn.Parameter) and made.requires_grad
    assert_same(made, p)
    assert not shares_memory(made, p)
    assert made._quantizer is not p._quantizer
    assert not copy.deepcopy(p.detach()).requires_grad


def test_a_deep_copy_has_live_tensors_of_its_own() -> None:
    quantizer = KINDS["delayed"]()
    t = quantizer.quantize(values(4, 4))
    made, amax = copy.deepcopy([t, quantizer.amax])
    made.copy_(torch.full((4, 4), 100.0))
    assert amax.item() == 100.0 > quantizer.amax.item()
    assert made._quantizer.amax is amax


@pytest.mark.parametrize("kind", KINDS)
def test_moving_to_where_it_is(kind: str) -> None:
    t = quantized(kind)
    assert_same(t.cpu(), t)
    assert t.to("cpu") is t
    moved = t.to("cpu", copy=True)
    assert_same(moved, t)
    assert not shares_memory(moved, t)
    assert not t.is_pinned()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.gpu
def test_moves_between_devices_keep_the_bits(kind: str, dtype: torch.dtype) -> None:
    t = quantized(kind, 40, 72, dtype=dtype)
    there = t.cuda()
    assert there.device.type == "cuda" and type(there) is type(t)
    assert bits(there) == bits(t)
    assert_same(there.cpu(), t)
    assert_same(t.pin_memory(), t)
    assert t.pin_memory().is_pinned()
    assert torch.equal(there.dequantize().cpu(), t.dequantize())
    # And so does work done there.
    for fn in (
        lambda t: t.mul_(2), lambda t: t.copy_(values(40, 72, dtype=dtype, seed=1).to(t.device)),
        lambda t: t.zero_(), lambda t: t.view(-1).clone().view(40, 72), lambda t: t[:32].clone(),
    ):  # fmt: skip
        here, made = fn(t), fn(there)
        if isinstance(here, QuantizedTensor):
            assert_same(made.cpu(), here)
        else:
            assert torch.equal(made.cpu(), here)


@pytest.mark.parametrize("kind", SQUARE)
@pytest.mark.parametrize("shape", [(64, 48), (33, 17), (5, 4, 33)])
@pytest.mark.gpu
def test_column_copies_derived_on_the_gpu(kind: str, shape: tuple[int, ...]) -> None:
    t = quantized(kind, *shape, columnwise=False).cuda()
    t.update_usage(columnwise_usage=True)
    assert_same(t.cpu(), quantized(kind, *shape))
    t.update_usage(rowwise_usage=False)
    assert torch.equal(t.dequantize().cpu(), quantized(kind, *shape, rowwise=False).dequantize())


@pytest.mark.parametrize("kind", KINDS)
def test_new_tensors(kind: str) -> None:
    t = quantized(kind, columnwise=False)
    like, new = torch.empty_like(t), t.new_empty((96, 32))
    assert {n: b[:2] for n, b in bits(like).items()} == {n: b[:2] for n, b in bits(t).items()}
    assert type(new) is type(t) and tuple(new.shape) == (96, 32)
    assert new.get_usages() == t.get_usages()
    assert new._quantizer is not t._quantizer
    zeros = t.new_zeros((96, 32))
    assert type(zeros) is type(t)
    assert_same(zeros, KINDS[kind](columnwise=False).quantize(torch.zeros(96, 32)))
    assert type(torch.empty_like(t, dtype=torch.int8)) is torch.Tensor
    assert type(t.new_zeros((2, 2), dtype=torch.bfloat16)) is torch.Tensor
    t._quantizer = None
    with pytest.raises(RuntimeError, match="quantizer"):
        t.new_empty((2, 2))


# --------------------------------------------------------------------------------------- views
@pytest.mark.parametrize("kind", KINDS)
def test_views_that_stay_quantized(kind: str) -> None:
    t = quantized(kind, 4, 8, 32)
    for v in (
        t.view(32, 32),
        t.view((-1, 32)),
        t.reshape(32, -1),
        t.reshape((2, 16, 32)),
        t.view(-1),
    ):
        assert type(v) is type(t)
        assert torch.equal(v.dequantize(), t.dequantize().view(v.shape))
        assert shares_memory(v, t)
    back = t.view(-1).view(4, 8, 32)
    assert torch.equal(back.dequantize(), t.dequantize())
    assert_same(t.view(-1).clone(), t.view(-1))


@pytest.mark.parametrize("kind", BLOCKED)
def test_a_view_across_blocks_is_of_the_values(kind: str) -> None:
    t = quantized(kind, 32, 32)
    with pytest.warns(UserWarning, match="dequantize"):
        v = t.view(16, 64)
    assert not isinstance(v, QuantizedTensor)
    assert torch.equal(v, t.dequantize().view(16, 64))
    for fn in (lambda: t.reshape(16, 64), lambda: torch.ops.aten.view(t, [16, 64])):
        with pytest.raises((ValueError, RuntimeError), match="keep the last dim"):
            fn()


@pytest.mark.parametrize("kind", ["current", "delayed"])
def test_any_view_of_a_tensor_with_one_scale(kind: str) -> None:
    t = quantized(kind, 32, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        v = t.view(16, 64)
    assert v._transpose is None
    assert torch.equal(v.dequantize(), t.dequantize().view(16, 64))


@pytest.mark.parametrize("kind", KINDS)
def test_views_are_differentiable(kind: str) -> None:
    p = torch.nn.Parameter(quantized(kind, 4, 8, 32))
    (p.view(32, 32).dequantize() * 2).sum().backward()
    assert type(p.grad) is torch.Tensor
    assert torch.equal(p.grad, torch.full((4, 8, 32), 2.0))


@pytest.mark.parametrize("kind", KINDS)
def test_view_as_bytes_is_of_the_values(kind: str) -> None:
    t = quantized(kind)
    assert torch.equal(t.view(torch.int32), t.dequantize().view(torch.int32))


# ----------------------------------------------------------------------------- autograd, modules
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_pass_unchanged(kind: str) -> None:
    x = values(32, 32).requires_grad_()
    t = KINDS[kind]().quantize(x)
    assert isinstance(t, QuantizedTensor) and t.requires_grad and t.grad_fn is not None
    (t.dequantize(dtype=torch.bfloat16) * 2).sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32
    assert torch.equal(x.grad, torch.full((32, 32), 2.0))


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_gets_a_plain_gradient(kind: str) -> None:
    p = torch.nn.Parameter(quantized(kind))
    assert isinstance(p, torch.nn.Parameter) and isinstance(p, QuantizedTensor) and p.is_leaf
    x = values(5, 48)
    torch.nn.functional.linear(x, p).sum().backward()
    assert type(p.grad) is torch.Tensor
    assert torch.allclose(p.grad, x.sum(0).expand(64, 48))
    with pytest.raises(RuntimeError, match="leaf"):
        p.mul_(2)


def test_the_accumulator_of_a_parameter_can_be_reached() -> None:
    p = torch.nn.Parameter(quantized("current"))
    node = p.expand_as(p).grad_fn.next_functions[0][0]
    assert node.variable is p
    assert torch.equal(p.expand_as(torch.ones(2, 64, 48))[1], p.dequantize())


class Net(torch.nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(quantized(kind))
        self.bias = torch.nn.Parameter(torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight.dequantize(), self.bias)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_optimizers_requantize(kind: str, foreach: bool, name: str) -> None:
    net = Net(kind)
    quantizer = net.weight._quantizer
    make: Any = getattr(torch.optim, name)
    options = {"momentum": 0.9} if name == "SGD" else {}
    optimizer = make(net.parameters(), lr=0.1, foreach=foreach, **options)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = net(values(16, 48)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert type(net.weight) is type(quantized(kind)) and net.weight._quantizer is quantizer
    assert losses[-1] < losses[0]
    for state in optimizer.state.values():
        assert all(type(v) is torch.Tensor for v in state.values() if isinstance(v, torch.Tensor))


def test_one_step_of_sgd_is_exact() -> None:
    net = Net("mxfp8_2d")
    x = net.weight.dequantize().detach()
    net(values(16, 48)).sum().backward()
    grad = net.weight.grad.clone()
    torch.optim.SGD(net.parameters(), lr=0.5).step()
    assert_same(net.weight.detach(), KINDS["mxfp8_2d"]().quantize(x - 0.5 * grad))


@pytest.mark.parametrize("kind", CLASSES)
def test_modules_keep_quantized_parameters(kind: str) -> None:
    net = Net(kind)
    weight = net.weight
    for convert, dtype in (
        ("half", torch.float16),
        ("bfloat16", torch.bfloat16),
        ("float", torch.float32),
    ):
        assert getattr(net, convert)() is net
        assert net.weight.dtype == net.bias.dtype == dtype
        assert net.weight is weight and isinstance(net.weight, QuantizedTensor)
        assert bits(net.weight) == bits(quantized(kind))
        assert net.weight.requires_grad
    for to in ((torch.bfloat16,), ("cpu", torch.float16), (torch.empty(0),)):
        assert net.to(*to) is net
        dtype = to[-1].dtype if isinstance(to[-1], torch.Tensor) else to[-1]
        assert net.weight.dtype == net.bias.dtype == dtype
        assert isinstance(net.weight, QuantizedTensor)
        assert bits(net.weight) == bits(quantized(kind))
    net.to("cpu")
    assert isinstance(net.weight, QuantizedTensor)
    with pytest.raises(TypeError, match="floating point"):
        net.to(torch.int8)
    plain = torch.nn.Linear(2, 2).half()
    assert plain.weight.dtype == torch.float16


@pytest.mark.parametrize("kind", CLASSES)
def test_state_dicts_load_in_place(kind: str) -> None:
    net, other = Net(kind), Net(kind)
    with torch.no_grad():
        net.weight.mul_(2)
    buffers = dict(other.weight._buffers())
    other.load_state_dict(net.state_dict())
    assert_same(other.weight, net.weight)
    assert all(other.weight._buffers()[n] is b for n, b in buffers.items())
    plain = {"weight": values(64, 48, seed=3), "bias": torch.ones(64)}
    other.load_state_dict(plain)
    assert_same(other.weight.detach(), quantized(kind, seed=3))


# ------------------------------------------------------------------------------------- pickling
def loaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(64, 48), (3, 5, 17), (0, 16)])
def test_torch_save_without_arbitrary_code(kind: str, shape: tuple[int, ...]) -> None:
    t = quantized(kind, *shape)
    made = loaded(t)
    assert_same(made, t)
    assert type(made._quantizer) is type(t._quantizer)
    if kind in VALUES:
        assert made._quantizer == t._quantizer
    else:
        assert torch.equal(made._quantizer.scale, t._quantizer.scale)
    p = loaded(torch.nn.Parameter(t, requires_grad=False))
    assert isinstance(p, torch.nn.Parameter) and not p.requires_grad
    assert_same(made.copy_(values(*shape, seed=1)), quantized(kind, *shape, seed=1))


def test_a_flat_view_is_saved_as_it_is() -> None:
    for kind in ("mxfp8", "hybrid"):
        flat = quantized(kind, 4, 8, 32).view(-1)
        made = loaded(flat)
        assert_same(made, flat)
        assert torch.equal(made.view(32, 32).dequantize(), flat.dequantize().view(32, 32))


def test_live_tensors_of_a_shared_quantizer_stay_shared() -> None:
    quantizer = KINDS["delayed"]()
    a, b = loaded([quantizer.quantize(values(4, 4)), quantizer.quantize(values(4, 4))])
    assert a._quantizer.scale.data_ptr() == b._quantizer.scale.data_ptr()


def test_the_group_is_not_saved() -> None:
    t = quantized("current")
    t._group_name = "shards"
    assert loaded(t)._group_name is None
    assert copy.deepcopy(t)._group_name == "shards"


def test_a_tensor_without_data() -> None:
    t = quantized("mxfp8")
    t.clear()
    made = loaded(t)
    assert isinstance(made, MXFP8Tensor) and not bits(made)
    with pytest.raises(UsageError, match="no data"):
        made.dequantize()
