"""Groups: fields, factories, members, saving, writing and operators."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch

import minifloat as mf

from . import world
from .cases import assert_same, delayed, values
from .groups import GROUPS, SOME, assert_same_group, group_of, quantizer_of

Storage, Group = mf.GroupedTensorStorage, mf.GroupedTensor


def plain(num: int = 3, shape: tuple[int, ...] = (4, 5)) -> Any:
    return Storage.make_grouped_tensor_from_rowwise_data(
        num_tensors=num, tensor_shape=shape, rowwise_data=values(num, *shape)
    )


# ------------------------------------------------------------------------------------- factories
@pytest.mark.parametrize("kind", GROUPS)
@pytest.mark.parametrize(
    "shapes",
    [[(33, 17)] * 3, [(5, 16), (0, 16), (33, 16)], [(8, 5), (8, 40)], [(3, 4), (17, 33), (0, 2)]],
    ids=["equal", "rows", "columns", "both"],
)
def test_members_are_what_quantizing_each_gives(kind: str, shapes: Any) -> None:
    group: Any = Storage.make_grouped_tensor_with_shapes(
        len(shapes), shapes, quantizer_of(kind), device="cpu", dtype=torch.float32
    )
    tensors = [values(*s, seed=i) for i, s in enumerate(shapes)]
    members = group.quantize(tensors)
    alone = quantizer_of(kind)
    for made in (members, group.split_into_quantized_tensors()):
        for member, t in zip(made, tensors, strict=True):
            assert_same(member, alone.quantize(t))
    if group.columnwise_amax is None or kind != "nvfp4_rht":
        expected = [alone.quantize(t).dequantize() for t in tensors]
        together = group.dequantize()
        assert together.shape == group.shape
        if group.all_same_shape():
            assert torch.equal(together, torch.stack(expected))
        elif group.all_same_last_dim():
            assert torch.equal(together, torch.cat(expected))
        elif group.all_same_first_dim():
            assert torch.equal(together, torch.cat(expected, 1))
        else:
            assert torch.equal(together, torch.cat([e.reshape(-1) for e in expected])[None])


@pytest.mark.parametrize(
    ("shapes", "logical", "outer"),
    [
        ([(4, 8)] * 3, (12, 8), (3, 4, 8)),
        ([(4, 8), (2, 8)], (6, 8), (6, 8)),
        ([(4, 8), (4, 2)], (4, 10), (4, 10)),
        ([(4, 8), (2, 3)], (1, 38), (1, 38)),
    ],
)
def test_shapes(shapes: Any, logical: Any, outer: Any) -> None:
    n = len(shapes)
    group: Any = Storage.make_grouped_tensor_with_shapes(n, shapes, None, "cpu", torch.bfloat16)
    assert group.logical_shape == logical and tuple(group.shape) == outer
    assert group.dtype == group.fake_dtype == group.get_dtype() == torch.bfloat16
    assert [tuple(m.shape) for m in group.quantized_tensors] == shapes
    assert group.all_same_first_dim() == (len({s[0] for s in shapes}) == 1)
    assert group.all_same_last_dim() == (len({s[1] for s in shapes}) == 1)
    assert group.varying_both_dims() == (logical[0] == 1)
    again: Any = Storage.make_grouped_tensor(
        n, group.first_dims, group.last_dims, *logical, device="cpu", dtype=torch.bfloat16
    )
    assert again.tensor_shapes == group.tensor_shapes == shapes
    assert again.offsets == group.offsets
    if not group.all_same_shape():
        assert group.tensor_offsets.tolist() == group.offsets
    for ask, same in (
        (group.get_common_first_dim, group.all_same_first_dim()),
        (group.get_common_last_dim, group.all_same_last_dim()),
    ):
        if same:
            assert ask() == shapes[0][0 if ask == group.get_common_first_dim else 1]
        else:
            with pytest.raises(RuntimeError, match="differ"):
                ask()


def test_the_buffers_of_the_contract() -> None:
    def made(kind: str) -> Any:
        return group_of(kind, 3, (128, 64))[0]

    n, total = 3, 3 * 128 * 64
    current = made("current")
    assert current.scale_inv is current.columnwise_scale_inv
    for name in ("scale_inv", "amax", "scale"):
        assert getattr(current, name).shape == (n,)
    assert torch.equal(current.scale_inv, 1 / current.scale)
    assert made("delayed").amax.shape == (n,) and made("delayed").scale is None
    for kind in GROUPS:
        group = made(kind)
        assert all(b.dim() == 1 for b in group._buffers().values() if b is not None)
        packed = 2 if kind.startswith("nvfp4") else 1
        assert group.rowwise_data.numel() == total // packed
    assert made("nvfp4").amax.shape == made("nvfp4").columnwise_amax.shape == (n,)
    assert made("nvfp4_rows").amax.shape == (3 * 128,)
    assert made("mxfp8").scale_inv.dtype == torch.uint8


def test_the_quantizer_decides_the_class() -> None:
    storage, _ = group_of("mxfp8", internal=True)
    assert type(storage) is Storage and repr(storage).startswith("GroupedTensorStorage(")
    assert all(type(m) is mf.MXFP8TensorStorage for m in storage.split_into_quantized_tensors())
    group, _ = group_of("mxfp8")
    assert type(group) is Group and repr(group).startswith("GroupedTensor(")
    assert group.quantizer is not None and type(group.copy()) is Storage
    q = quantizer_of("mxfp8")
    assert Storage.make_grouped_tensor(2, None, None, 8, 4, q, device="cpu").quantizer is q
    for use in (mf.as_parameter, torch.nn.Parameter):
        with pytest.raises(RuntimeError, match="GroupedTensorStorage is no torch.Tensor.*internal"):
            use(storage)


@pytest.mark.parametrize(
    ("make", "error", "complaint"),
    [
        (lambda f: f(2, None, None, 8, 4), ValueError, "dtype: got None"),
        (lambda f: f(0, None, None, 8, 4), ValueError, "num_tensors: got 0"),
        (lambda f: f(3, None, None, 8, 4, dtype=torch.float32), ValueError, "do not divide"),
        (
            lambda f: f(2, torch.tensor([3, -1]), None, 2, 4, dtype=torch.float32),
            AssertionError,
            "rows must be >= 0",
        ),
        (lambda f: f(2, None, None, 4, 0, dtype=torch.float32), ValueError, "columns > 0"),
        (
            lambda f: f(2, torch.tensor([3, 2]), None, 4, 4, dtype=torch.float32),
            ValueError,
            "members .* make",
        ),
        (lambda f: f(2, [3, 5], None, 8, 4), TypeError, "first_dims: got list"),
        (lambda f: f(2, torch.tensor([3, 5, 0]), None, 8, 4), ValueError, r"first_dims: .*\(3,\)"),
        (lambda f: f(2, torch.tensor([3.0, 5.0]), None, 8, 4), ValueError, "torch.float32"),
        (
            lambda f: f(2, None, None, 8, 4, quantizer_of("mxfp8"), dtype=torch.int8),
            TypeError,
            "dtype: got torch.int8",
        ),
        (lambda f: f(2, None, None, 8, 4, mf.IdentityQuantizer()), NotImplementedError, "one el"),
        (lambda f: f(2, None, None, 8, 4, quantizer_of("hybrid")), NotImplementedError, "one el"),
        (lambda f: f(2, None, None, 8, 4, 7), TypeError, "a Quantizer is needed"),
        (
            lambda f: f(2, None, None, 8, 4, mf.NVFP4Quantizer(row_scaled_nvfp4=True)),
            ValueError,
            "columnwise=False",
        ),
    ],
)
def test_bad_groups(make: Any, error: Any, complaint: str) -> None:
    with pytest.raises(error, match=complaint):
        make(Storage.make_grouped_tensor)


def test_from_rowwise_data() -> None:
    data = values(3, 4, 5)
    make = Storage.make_grouped_tensor_from_rowwise_data
    group: Any = make(num_tensors=3, tensor_shape=(4, 5), rowwise_data=data)
    assert group.shape == data.shape and group.rowwise_data.data_ptr() == data.data_ptr()
    bias: Any = make(num_tensors=3, tensor_shape=(20,), rowwise_data=data)
    assert tuple(bias.shape) == (3, 20) and bias.logical_shape == (60, 1)
    assert torch.equal(bias.split_into_quantized_tensors()[1], data[1].reshape(-1))
    assert torch.equal(bias + 1, data.reshape(3, 20) + 1)
    bare = make(num_tensors=3, tensor_shape=(20,), rowwise_data=data, internal=True)
    assert type(bare) is Storage
    for bad in (
        {"rowwise_data": None},
        {"num_tensors": 0},
        {"tensor_shape": (4, 4)},
        {"tensor_shape": (1, 4, 5)},
        {"tensor_shape": (-4, -5)},
        {"dtype": torch.float16},
        {"rowwise_data": data.transpose(1, 2)},
    ):
        given = {"num_tensors": 3, "tensor_shape": (4, 5), "rowwise_data": data, **bad}
        with pytest.raises(ValueError, match=next(iter(bad))):
            make(**given)


def test_the_constructor() -> None:
    data = values(24)
    kwargs = {"num_tensors": 3, "data": data}
    group: Any = Group((12, 2), torch.float32, **kwargs)
    assert group.stride() == (8, 2, 1)
    assert Group((12, 2), torch.float32, stride=(2, 6, 1), **kwargs).stride() == (2, 6, 1)
    assert Group((12, 2), torch.float32, requires_grad=True, **kwargs).requires_grad
    with pytest.raises(TypeError, match="no argument named 'row'"):
        Group((12, 2), torch.float32, row=1, **kwargs)
    with pytest.raises(ValueError, match="shapes: got 2"):
        Group((12, 2), torch.float32, shapes=[(4, 2)] * 2, **kwargs)
    with pytest.raises(ValueError, match="members that differ, first_dims or last_dims say so"):
        Group((12, 2), torch.float32, shapes=[(2, 2), (4, 2), (6, 2)], **kwargs)  # read as equal
    with pytest.raises(ValueError, match="one dim, or two"):
        Group((12, 2), torch.float32, shapes=[(1, 4, 2)] * 3, **kwargs)
    limit = group.nvfp4_e4m3_max
    assert Group((12, 2), torch.float32, nvfp4_e4m3_max=256, **kwargs).nvfp4_e4m3_max == limit


# ----------------------------------------------------------------------------- saving and copies
@pytest.mark.parametrize("kind", SOME)
def test_save_and_restore(kind: str) -> None:
    (storage, _), (expected, _) = (group_of(kind, internal=True) for _ in range(2))
    (flat, objects) = mf.prepare_for_saving(storage, values(2))
    assert len(flat) == 11 and storage.rowwise_data is None and storage.quantized_tensors is None
    restored, _ = mf.restore_from_saved(objects, flat)
    assert restored is storage
    assert_same_group(storage, expected)
    storage.clear()
    assert not storage.has_data() and not storage.has_columnwise_data()


@pytest.mark.parametrize("kind", SOME)
@pytest.mark.parametrize("internal", [True, False])
def test_flatten(kind: str, internal: bool) -> None:
    group, _ = group_of(kind, internal=internal)
    names, ctx = group.__tensor_flatten__()
    inner = {name: getattr(group, name) for name in names}
    made = type(group).__tensor_unflatten__(inner, ctx, group.shape, (561, 17, 1))
    assert_same_group(made, group)
    assert all(made._buffers()[n] is b for n, b in group._buffers().items())


@pytest.mark.parametrize("kind", SOME)
def test_copies(kind: str) -> None:
    group, _ = group_of(kind)
    for alias in (group.detach(), group.data, torch.ops.aten.alias(group), group.view(group.shape)):
        assert alias is not group
        assert all(alias._buffers()[n] is b for n, b in group._buffers().items())
    for other in (group.clone(), copy.deepcopy(group), group.to("cpu", copy=True), _saved(group)):
        assert_same_group(other, group)
        assert other.rowwise_data.data_ptr() != group.rowwise_data.data_ptr()
    empty = torch.empty_like(group)
    assert type(empty) is Group and empty.shape == group.shape
    parameter = mf.as_parameter(group)
    assert isinstance(parameter, torch.nn.Parameter) and type(parameter) is Group
    assert isinstance(_saved(parameter), torch.nn.Parameter)
    assert isinstance(copy.deepcopy(parameter), torch.nn.Parameter)
    assert torch.equal(group.bfloat16(), group.dequantize(dtype=torch.bfloat16))
    assert group.to(torch.bfloat16).dtype == torch.bfloat16


def _saved(t: Any) -> Any:
    file = io.BytesIO()
    torch.save(t, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("kind", [*SOME, None])
def test_flat_checkpoints(kind: str | None) -> None:
    group = plain() if kind is None else group_of(kind)[0]
    tensors, metadata = mf.flatten_state_dict({"w": group})
    assert all(type(t) is torch.Tensor for t in tensors.values())
    assert_same_group(mf.unflatten_state_dict(tensors, metadata)["w"], group)


def test_ragged_copies_keep_their_sizes() -> None:
    sizes = torch.tensor([5, 0, 7])
    group: Any = mf.group_quantize(values(12, 16), quantizer_of("mxfp8"), 3, sizes)
    flat = mf.unflatten_state_dict(*mf.flatten_state_dict({"x": group}))["x"]
    for other in (group.clone(), copy.deepcopy(group), _saved(group), group.detach(), flat):
        assert_same_group(other, group)
    assert torch.equal(torch.empty_like(group).first_dims, sizes)


def test_lengths_that_vary() -> None:
    kwargs = {"num_tensors": 2, "shapes": [(3,), (5,)], "first_dims": torch.tensor([3, 5])}
    group: Any = Group((8, 1), torch.float32, data=values(8), **kwargs)
    flat = mf.unflatten_state_dict(*mf.flatten_state_dict({"x": group}))["x"]
    for other in (copy.deepcopy(group), _saved(group), group.detach(), flat):
        assert_same_group(other, group)
        assert [tuple(m.shape) for m in other.split_into_quantized_tensors()] == [(3,), (5,)]


@pytest.mark.parametrize(
    ("first", "last", "logical"),
    [
        (None, [4, 4], (3, 8)),
        ([3, 3], None, (6, 4)),
        ([3, 3], [4, 4], (1, 24)),
        ([2, 4], [4, 4], (1, 24)),
        ([3, 3], [2, 6], (1, 24)),
    ],
)
def test_sizes_that_vary_may_be_equal(first: Any, last: Any, logical: tuple[int, int]) -> None:
    dims = [None if d is None else torch.tensor(d) for d in (first, last)]
    group: Any = Storage.make_grouped_tensor(
        2, *dims, *logical, quantizer_of("mxfp8"), "cpu", torch.float32
    )
    shapes = list(zip(first or [3, 3], last or [4, 4], strict=True))
    group.quantize([values(*shape, seed=i) for i, shape in enumerate(shapes)])
    flat = mf.unflatten_state_dict(*mf.flatten_state_dict({"x": group}))["x"]
    for other in (group, group.detach(), copy.deepcopy(group), _saved(group), flat):
        assert_same_group(other, group)
        assert other.logical_shape == logical and other.tensor_shapes == shapes


def test_a_module_changes_nominal_dtype_or_values() -> None:
    net = torch.nn.Module()
    group, _ = group_of("mxfp8")
    net.weight, net.bias = mf.as_parameter(group), mf.as_parameter(plain())
    net.bfloat16()
    assert net.weight.dtype == net.bias.dtype == torch.bfloat16
    assert torch.equal(net.weight.rowwise_data, group.rowwise_data)
    assert net.bias.rowwise_data.dtype == torch.bfloat16
    state = net.state_dict()
    net.load_state_dict(state)
    assert type(state["weight"]) is Group


# ------------------------------------------------------------------------------------- operators
@pytest.mark.parametrize("kind", [*SOME, None])
def test_operators_see_stacked_values(kind: str | None) -> None:
    group = plain(3, (33, 17)) if kind is None else group_of(kind)[0]
    dense = group.dequantize()
    x = values(3, 17, 2)
    for got, expected in (
        (group + 1, dense + 1),
        (torch.bmm(group, x), torch.bmm(dense, x)),
        (group.sum(), dense.sum()),
        (group.expand_as(dense), dense),
    ):
        assert type(got) is torch.Tensor and torch.equal(got, expected)
    assert type(group.expand(group.shape)) is Group
    target = torch.empty_like(dense)
    assert torch.equal(target.copy_(group), dense)


@pytest.mark.parametrize("kind", [*SOME, None])
def test_writes_go_to_the_members(kind: str | None) -> None:
    group = plain(3, (33, 17)) if kind is None else group_of(kind)[0]
    other = plain(3, (33, 17)) if kind is None else group_of(kind)[0]
    members, buffers = group.split_into_quantized_tensors(), dict(group._buffers())
    expected = group.dequantize() * 2 + values(3, 33, 17)
    assert group.mul_(2) is group
    group.copy_(expected)
    other._write_values(expected)
    assert_same_group(group, other)
    assert all(group._buffers()[n] is b for n, b in buffers.items())
    fresh = group.split_into_quantized_tensors()
    for old, new in zip(members, fresh, strict=True):
        assert torch.equal(old, new) if kind is None else assert_same(old, new) is None
    group.zero_()
    assert not group.dequantize().any()
    group.data = other
    assert_same_group(group, other)
    torch._foreach_mul_([group], 0.0)
    assert not group.dequantize().any()


def test_values_in_the_column_buffer_alone_are_written() -> None:
    group: Any = Group((12, 5), torch.float32, num_tensors=3, columnwise_data=values(60))
    expected = group.dequantize() * 2
    group.mul_(2)
    assert torch.equal(group.dequantize(), expected)
    group.copy_(expected + 1)
    assert torch.equal(group.dequantize(), expected + 1)
    group.quantize(list(expected))
    assert torch.equal(group.dequantize(), expected)
    group.clear()
    with pytest.raises(RuntimeError, match="holds no data to write"):
        group.copy_(expected)


def test_data_brings_its_members_places() -> None:
    group, other = (
        Storage.make_grouped_tensor_with_shapes(2, shapes, None, "cpu", torch.float32)
        for shapes in ([(3, 4), (5, 4)], [(6, 4), (2, 4)])
    )
    for each in (group, other):
        each.quantize([torch.full(shape, i + 1.0) for i, shape in enumerate(each.tensor_shapes)])
    group.data = other
    assert_same_group(group, other)
    assert group.offsets == other.offsets
    wide = Storage.make_grouped_tensor_with_shapes(2, [(3, 4)] * 2, None, "cpu", torch.float32)
    wide.data = plain(2, (3, 4)).to_dtype(torch.bfloat16)
    assert wide.split_into_quantized_tensors()[0].dtype == wide.dtype == torch.float32


def test_sizes_that_the_device_knows_are_copied() -> None:
    """Whatever has been looked up of either group."""
    quantizer = quantizer_of("mxfp8")
    group: Any = mf.group_quantize(values(12, 16), quantizer, 3, [5, 0, 7])
    fresh, known = torch.empty_like(group), torch.empty_like(group)
    other: Any = mf.group_quantize(values(12, 16, seed=1), quantizer, 3, [5, 0, 7])
    group.split_into_quantized_tensors()
    assert_same_group(fresh.copy_(group), group)
    known.split_into_quantized_tensors()
    assert_same_group(known.copy_(other), other)
    exact: Any = Storage.make_grouped_tensor_with_shapes(
        3, group.tensor_shapes, quantizer, "cpu", torch.float32
    )
    exact.quantize([values(*shape, seed=2) for shape in group.tensor_shapes])
    before = exact.clone()
    with pytest.raises(NotImplementedError, match="members differ in shape"):
        exact.copy_(group)  # whose buffers have room to spare
    assert_same_group(exact, before)


def test_writes_are_found_by_name() -> None:
    """`addcmul_` and `out=` variants: the written argument is not always the first."""
    group, _ = group_of("current")
    a, b = values(3, 33, 17, seed=7), values(3, 33, 17, seed=8)
    expected = group.dequantize().addcmul_(a, b, value=0.5)
    group.addcmul_(tensor2=b, tensor1=a, value=0.5)
    other, _ = group_of("current")
    other._write_values(expected)
    assert_same_group(group, other)
    torch.add(a, b, out=group)
    other._write_values(a + b)
    assert_same_group(group, other)


def test_a_write_of_another_shape_changes_nothing() -> None:
    group, before = group_of("mxfp8")[0], group_of("mxfp8")[0]
    with pytest.raises(RuntimeError, match="Nothing was written"):
        torch.ops.aten.unsqueeze_(group, 0)
    with pytest.raises(RuntimeError):
        group.add_(values(4, 33, 17))
    with pytest.raises(RuntimeError):
        group.copy_(values(4, 33, 17))
    with pytest.raises(ValueError, match=r"tensors\[1\]: got shape"):
        group.quantize([values(33, 17), values(3, 17), values(33, 17)])
    with pytest.raises(ValueError, match="tensors: got 2"):
        group.quantize([values(33, 17)] * 2)
    assert_same_group(group, before)


def test_ragged_groups_are_written_by_member() -> None:
    group: Any = mf.group_quantize(values(12, 16), quantizer_of("mxfp8"), 3, [5, 0, 7])
    with pytest.raises(NotImplementedError, match="members differ in shape"):
        group.mul_(2)
    group.quantize([values(5, 16), values(0, 16), values(7, 16)])
    assert torch.equal((group + 0)[:5], quantizer_of("mxfp8").quantize(values(5, 16)).dequantize())


def test_the_flag_that_leaves_everything() -> None:
    quantizer = delayed()
    group: Any = Storage.make_grouped_tensor_with_shapes(
        2, [(4, 8)] * 2, quantizer, "cpu", torch.float32
    )
    ones, twos = [torch.full((4, 8), float(v)) for v in (1, 2)], [torch.full((4, 8), 2.0)] * 2
    group.quantize(ones)
    group.quantize([t * 4 for t in twos], noop_flag=torch.ones(1))
    assert torch.equal(group.dequantize(), torch.stack(ones)) and quantizer.amax.item() == 2.0
    group.quantize(twos, noop_flag=torch.zeros(1))
    assert torch.equal(group.dequantize(), torch.stack(twos))


@pytest.mark.parametrize(
    "cut",
    [
        lambda g: g.reshape(-1, 17),
        lambda g: g.flatten(),
        lambda g: g.unflatten(0, (1, 3)),
        lambda g: g.view(3, -1),
        lambda g: g.squeeze(),
        lambda g: g.unsqueeze(0),
        lambda g: g.transpose(0, 1),
        lambda g: g.permute(2, 1, 0),
        lambda g: g.movedim(0, 1),
        lambda g: g[0],
        lambda g: g[:1],
        lambda g: g.narrow(0, 0, 1),
        lambda g: g.split(1),
        lambda g: g.chunk(2),
        lambda g: torch.cat([g, g]),
        lambda g: torch.stack([g, g]),
        lambda g: g.view(7),
        # Of dequantized members these would be views into which nobody's writes go.
        lambda g: g.diagonal(),
        lambda g: g.unfold(0, 2, 1),
        lambda g: g.unbind(1),
        lambda g: g.unbind(3),
        lambda g: g.view(torch.int32),
        lambda g: g.as_strided((2, 17), (17, 1)),
    ],
)
@pytest.mark.parametrize("grad", [True, False])
def test_members_are_not_cut_up(cut: Any, grad: bool) -> None:
    group, _ = group_of("mxfp8")
    with pytest.raises(RuntimeError, match=r"split_into_quantized_tensors\(\)"):
        cut(mf.as_parameter(group) if grad else group)


@pytest.mark.parametrize("kind", SOME)
def test_values_in_a_row(kind: str) -> None:
    """Who asks by an operator gets no codes: DDP does, and copied them back as values."""
    group = group_of(kind)[0]
    expected = group.dequantize()
    for row in (torch.flatten(group), torch.reshape(group, (-1,)), group.ravel()):
        assert row.dtype == group.dtype and torch.equal(row, expected.reshape(-1))
        with pytest.raises(mf.UsageError, match="self is a view of a GroupedTensor's values"):
            row.mul_(2)  # it would be lost
    assert torch.equal(group.dequantize(), expected)


@pytest.mark.parametrize("kind", ["current", "block_1d", "mxfp8", "nvfp4"])
def test_ddp_leaves_a_group_as_it_is(kind: str) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = mf.as_parameter(group_of(kind)[0])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight).sum()

    net = Net()
    expected = net.weight.dequantize()
    with world.alone():
        y = torch.nn.parallel.DistributedDataParallel(net)(torch.tensor(2.0))
        y.backward()
    torch.testing.assert_close(net.weight.dequantize(), expected, rtol=1e-6, atol=0)
    assert net.weight.grad is not None and bool((net.weight.grad == 2).all())


@pytest.mark.parametrize("kind", SOME)
def test_members_one_by_one(kind: str) -> None:
    """A loop over a group gives its members: what is written there is written here, and has a
    gradient."""
    group = mf.as_parameter(group_of(kind)[0])
    each = list(group)
    assert [type(m) for m in each] == [type(m) for m in group.split_into_quantized_tensors()]
    sum((i + 1) * m.sum() for i, m in enumerate(each)).backward()
    assert group.grad is not None
    assert torch.equal(group.grad[:, 0, 0], torch.arange(1.0, 1 + len(each)))
    with torch.no_grad():
        for i, member in enumerate(group):
            torch.nn.init.constant_(member, float(i))
    assert torch.equal(group.dequantize()[:, 1, 2], torch.arange(float(len(each))))


def test_the_flat_view_is_the_row_buffer() -> None:
    group = mf.as_parameter(group_of("mxfp8")[0])
    for flat in (group.view(-1), group.view(group.numel())):
        assert flat.data_ptr() == group.rowwise_data.data_ptr() and flat.dim() == 1
    dense = mf.as_parameter(plain())
    (grad,) = torch.autograd.grad((dense.view(-1) * 2).sum(), dense)
    assert grad.shape == dense.shape and bool((grad == 2).all())
    columns, _ = group_of("mxfp8", rowwise=False)
    with pytest.raises(RuntimeError, match="rowwise data, which is absent"):
        columns.view(-1)


def test_training_a_parameter() -> None:
    group = mf.as_parameter(group_of("mxfp8")[0])
    optimizer = torch.optim.AdamW([group], lr=0.1)
    before = group.dequantize().detach()
    (group.dequantize() ** 2).sum().backward()
    assert type(group.grad) is torch.Tensor and group.grad.shape == group.shape
    optimizer.step()
    assert bool((group.dequantize() ** 2).sum() < (before**2).sum())
    leaf = group.expand_as(group).grad_fn.next_functions[0][0]
    assert leaf.variable is group
