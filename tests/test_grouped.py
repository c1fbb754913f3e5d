"""Grouped casts against casts of each member alone, bit for bit; offsets; bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import minifloat as mf
from minifloat import ragged

from .tensors.cases import assert_same, values
from .tensors.groups import GROUPS, assert_same_group, quantizer_of

SIZES = ([5, 0, 33, 2, 128, 17], [0, 0, 0], [1], [0, 513, 31])


# ---------------------------------------------------------------------------------- bit for bit
@pytest.mark.parametrize("kind", GROUPS)
@pytest.mark.parametrize("usage", ["both", "row", "col"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_member_alone(kind: str, usage: str, dtype: torch.dtype) -> None:
    usages = {"rowwise": usage != "col", "columnwise": usage != "row"}
    if kind == "nvfp4_rows":
        usages = {"rowwise": True, "columnwise": False}
    for sizes, columns in zip(SIZES, (40, 16, 33, 130), strict=True):
        together, alone = quantizer_of(kind, **usages), quantizer_of(kind, **usages)
        x = values(sum(sizes), columns, dtype=dtype)
        group: Any = mf.group_quantize(x, together, len(sizes), torch.tensor(sizes))
        assert group.tensor_shapes is None  # nobody asked the device
        expected = [alone.quantize(member) for member in x.split(sizes)]
        for member, other in zip(group.split_into_quantized_tensors(), expected, strict=True):
            assert_same(member, other)
        if kind == "delayed":
            assert torch.equal(together.amax, alone.amax)
        if kind != "nvfp4_rht" or usage != "col":
            plain = mf.group_dequantize(group, torch.float32)
            joined = torch.cat([e.dequantize(dtype=torch.float32) for e in expected])
            assert torch.equal(plain.dequantize(), joined)
            assert torch.equal(plain.first_dims, torch.tensor(sizes))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", GROUPS)
def test_row_copies_are_read_at_once(kind: str, device: str) -> None:
    """What a device does, which asks for no size; members of several magnitudes."""
    quantizer = quantizer_of(kind)
    for sizes, columns in zip(SIZES, (40, 16, 33, 130), strict=True):
        x = values(sum(sizes), columns, dtype=torch.bfloat16)
        for i, member in enumerate(x.split(sizes)):
            member *= 4.0 ** (i - 2)
        group: Any = mf.group_quantize(x, quantizer, len(sizes), torch.tensor(sizes))
        buffers = [group._part(f"row_{part}") for part in ("data", "scale", "amax")]
        cast = group._reader()._casts()[0]
        here = [None if b is None else b.to(device) for b in buffers]
        for given in (torch.tensor(sizes), torch.tensor(sizes, dtype=torch.int32)):
            got = ragged.rows_at_once(*here, given.to(device), cast, tuple(x.shape), torch.float32)
            want = [m.dequantize(dtype=torch.float32) for m in group.split_into_quantized_tensors()]
            assert torch.equal(got.cpu(), torch.cat(want))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", GROUPS)
def test_dequantizing_on_a_device_waits_for_nothing(kind: str) -> None:
    """Nor does it keep sizes: captured once, it reads those of the replay."""
    quantizer = quantizer_of(kind, columnwise=False).copy()
    for name in ("scale", "amax"):  # of delayed scaling
        if isinstance(getattr(quantizer, name, None), torch.Tensor):
            setattr(quantizer, name, getattr(quantizer, name).cuda())
    x = values(300, 48, dtype=torch.bfloat16).cuda()

    def quantized(sizes: list[int]) -> Any:
        return mf.group_quantize(x, quantizer, 3, torch.tensor(sizes).cuda())

    group = quantized([0, 130, 170])
    mf.group_dequantize(group, torch.float32)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        mf.group_dequantize(group, torch.float32)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = mf.group_dequantize(group, torch.float32)
    for sizes in ([1, 2, 297], [300, 0, 0], [0, 130, 170]):
        other = quantized(sizes)._buffers()
        for name, buffer in group._buffers().items():
            if buffer is not None:
                buffer.copy_(other[name])
        graph.replay()
        want = [quantizer.quantize(m).dequantize(dtype=torch.float32) for m in x.split(sizes)]
        assert torch.equal(made.rowwise_data.view(300, 48), torch.cat(want))


@pytest.mark.parametrize("sizes", [[300, 300, 300], [-5, 7, 2], [0, 0, 0]])
@pytest.mark.parametrize("kind", GROUPS)
def test_wrong_sizes_read_nothing_outside(kind: str, sizes: list[int]) -> None:
    group: Any = mf.group_quantize(values(40, 48), quantizer_of(kind), 3, torch.tensor([0, 30, 10]))
    buffers = [group._part(f"row_{part}") for part in ("data", "scale", "amax")]
    cast = group._reader()._casts()[0]
    made = ragged.rows_at_once(*buffers, torch.tensor(sizes), cast, (40, 48), torch.float32)
    assert made.shape == (40, 48)


@pytest.mark.parametrize("kind", GROUPS)
def test_equal_members(kind: str) -> None:
    x = values(4, 9, 24)
    quantizer, alone = quantizer_of(kind), quantizer_of(kind)
    for given in (x, x.reshape(36, 24)):
        group: Any = mf.group_quantize(given, quantizer, 4, None)
        assert tuple(group.shape) == (4, 9, 24) and group.first_dims is None
        for member, part in zip(group.split_into_quantized_tensors(), x, strict=True):
            assert_same(member, alone.quantize(part))


@pytest.mark.parametrize("kind", GROUPS)
def test_widths_that_vary(kind: str) -> None:
    widths, x = [8, 16, 40], values(6, 64)
    quantizer, alone = quantizer_of(kind), quantizer_of(kind)
    group: Any = mf.group_quantize(x, quantizer, 3, None, torch.tensor(widths))
    assert group.logical_shape == (6, 64)
    parts = x.reshape(-1).split([6 * w for w in widths])
    for member, part, w in zip(group.split_into_quantized_tensors(), parts, widths, strict=True):
        assert_same(member, alone.quantize(part.reshape(6, w)))


def test_stochastic_rounding_by_seed() -> None:
    x, sizes, seed = values(40, 32), [20, 0, 20], torch.tensor([7, 5])
    x[20:] = x[:20]
    quantizer = mf.NVFP4Quantizer(stochastic_rounding=True)
    group: Any = mf.group_quantize(x, quantizer, 3, sizes, seed=seed)
    members = group.split_into_quantized_tensors()
    for i, (member, part) in enumerate(zip(members, x.split(sizes), strict=True)):
        assert_same(member, quantizer.quantize(part, seed=torch.tensor([7, 5 + i])))
    assert not torch.equal(members[0]._rowwise_data, members[2]._rowwise_data)
    assert_same_group(mf.group_quantize(x, quantizer, 3, sizes, seed=seed), group)


@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4"])
def test_swizzled_scales(kind: str) -> None:
    quantizer = quantizer_of(kind)
    quantizer.optimize_for_gemm = True
    sizes, x = [130, 0, 40], values(170, 160)
    group: Any = mf.group_quantize(x, quantizer, 3, sizes)
    for member, part in zip(group.split_into_quantized_tensors(), x.split(sizes), strict=True):
        assert_same(member, quantizer.quantize(part))


@pytest.mark.parametrize("kind", ["current", "delayed", "mxfp8"])
def test_output_is_written_again(kind: str) -> None:
    quantizer = quantizer_of(kind)
    group: Any = mf.group_quantize(values(12, 16), quantizer, 3, None)
    buffers = dict(group._buffers())
    other = values(12, 16, seed=1)
    assert mf.group_quantize(other, quantizer, 3, None, output=group) is group
    assert all(group._buffers()[n] is b for n, b in buffers.items())
    assert_same_group(group, mf.group_quantize(other, quantizer, 3, None))
    before = group.clone()
    flag = torch.ones(1)
    mf.group_quantize(other * 2, quantizer, 3, None, noop_flag=flag, output=group)
    assert_same_group(group, before)


def test_output_is_written_in_the_copies_it_has() -> None:
    """Its quantizer is the caller's object, who may have changed it."""
    quantizer = quantizer_of("current")
    group: Any = mf.group_quantize(values(12, 16), quantizer, 3, None)
    other = values(12, 16, seed=1)
    expected = mf.group_quantize(other, quantizer_of("current"), 3, None)
    quantizer.set_usage(columnwise=False)
    mf.group_quantize(other, quantizer, 3, None, output=group)
    assert_same_group(group, expected)
    group.clear()
    with pytest.raises(RuntimeError, match="holds no data to write"):
        mf.group_quantize(other, quantizer, 3, None, output=group)


def test_output_is_not_written_in_another_layout() -> None:
    quantizer = quantizer_of("mxfp8")
    group: Any = mf.group_quantize(values(12, 16), quantizer, 3, None)
    before = group.clone()
    quantizer.optimize_for_gemm = True
    message = "with_gemm_swizzled_scales True since the group was made"
    with pytest.raises(ValueError, match=message):
        mf.group_quantize(values(12, 16, seed=1), quantizer, 3, None, output=group)
    with pytest.raises(ValueError, match=message):
        group.quantize([values(4, 16)] * 3)
    with pytest.raises(ValueError, match=message):
        group.zero_()
    quantizer.optimize_for_gemm = False
    assert_same_group(group, before)


@pytest.mark.parametrize("kind", GROUPS)
def test_shapes_on_the_meta_device(kind: str) -> None:
    quantizer = quantizer_of(kind)
    if kind == "delayed":
        quantizer.scale, quantizer.amax = quantizer.scale.to("meta"), quantizer.amax.to("meta")
    real: Any = mf.group_quantize(values(12, 16), quantizer_of(kind), 3, [5, 0, 7])
    x = values(12, 16).to("meta")
    group, dbias = mf.bgrad_group_quantize(
        x, quantizer, 3, torch.empty(3, dtype=int, device="meta")
    )
    for name, buffer in real._buffers().items():
        here = getattr(group, name)
        assert (
            here is None
            if buffer is None
            else (here.shape, here.dtype)
            == (
                buffer.shape,
                buffer.dtype,
            )
        )
    assert group.device == dbias.device == x.device and dbias.shape == (3, 16)
    assert group.dequantize().shape == (12, 16)


def test_an_internal_quantizer_gives_a_storage() -> None:
    quantizer = quantizer_of("mxfp8")
    quantizer.internal = True
    group = mf.group_quantize(values(12, 16), quantizer, 3, [5, 0, 7])
    assert type(group) is mf.GroupedTensorStorage
    assert type(mf.group_dequantize(group)) is mf.GroupedTensorStorage


def test_sizes_are_not_read_to_make_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a kernel in `ragged.kernels`, no size is ever asked for."""

    class Fused:
        @staticmethod
        def quantize(x: Any, sizes: Any, num: int, *rest: Any) -> None:
            for buffer in rest[-1]:
                buffer.zero_()

    monkeypatch.setattr(ragged, "kernels", lambda *_: Fused)
    monkeypatch.setattr(torch.Tensor, "tolist", None)
    monkeypatch.setattr(torch.Tensor, "item", None)
    group = mf.group_quantize(values(12, 16), quantizer_of("mxfp8"), 3, torch.tensor([5, 0, 7]))
    assert not group.rowwise_data.any()  # type: ignore[union-attr]


# ----------------------------------------------------------------------------------- bias, splits
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bias_gradients(dtype: torch.dtype) -> None:
    sizes, x = [5, 0, 7], values(12, 16, dtype=dtype)
    quantizer = quantizer_of("mxfp8")
    for dims, members in ((torch.tensor(sizes), x.split(sizes)), (None, x.split(4))):
        group, dbias = mf.bgrad_group_quantize(x, quantizer, 3, dims)
        assert_same_group(group, mf.group_quantize(x, quantizer, 3, dims))
        assert dbias.dtype == dtype and dbias.shape == (3, 16)
        for row, member in zip(dbias, members, strict=True):
            exact = member.double().sum(0)
            # fp32 sums of at most 7 rows, rounded once.
            slack = 7 * 2.0**-24 * member.double().abs().sum(0)
            unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-24
            assert bool(((row.double() - exact).abs() <= unit * exact.abs() + slack).all())
    total, quantized = mf.bgrad_quantize(input=x, quantizer=quantizer)
    assert_same(quantized, quantizer.quantize(x))
    torch.testing.assert_close(total, x.float().sum(0).to(dtype))


@pytest.mark.parametrize("shape", [(12, 0), (3, 4, 0), (0, 16), (3, 0, 16)])
def test_bias_gradients_of_nothing(shape: tuple[int, ...]) -> None:
    quantizer, x = quantizer_of("current"), values(*shape)
    group, dbias = mf.bgrad_group_quantize(x, quantizer, 3, None)
    assert group.numel() == 0
    assert dbias.shape == (3, shape[-1]) and not dbias.any()
    total, _ = mf.bgrad_quantize(x, quantizer)
    assert total.shape == shape[-1:] and not total.any()


def test_split_quantize() -> None:
    sizes, x = [5, 0, 7], values(12, 16)
    kinds = ("current", "mxfp8", "hybrid")
    out = mf.split_quantize(x, sizes, [quantizer_of(k) for k in kinds])
    for made, kind, part in zip(out, kinds, x.split(sizes), strict=True):
        assert_same(made, quantizer_of(kind).quantize(part))
    again = mf.multi_tensor_quantize(list(x.split(sizes)), [quantizer_of(k) for k in kinds])
    for made, other in zip(again, out, strict=True):
        assert_same(made, other)


def test_a_bad_tensor_among_others_changes_nothing() -> None:
    quantizer = quantizer_of("delayed")
    before = quantizer.amax.clone()
    with pytest.raises(TypeError, match="torch.float64"):
        mf.multi_tensor_quantize([values(4, 8), values(4, 8).double()], [quantizer] * 2)
    assert torch.equal(quantizer.amax, before)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets(dtype: torch.dtype) -> None:
    sizes = torch.tensor([3, 0, 5], dtype=dtype)
    offsets = mf.splits_to_offsets(sizes, 4)
    assert offsets.tolist() == [0, 12, 12, 32] and offsets.dtype == torch.int64
    for bulk in (False, True):
        splits, outputs = mf.splits_to_offsets_multi(
            sizes,
            "cpu",
            strides=(1, 4, 2),
            include_leading_zero=(False, True, True),
            dtypes=(torch.int32, torch.int64, torch.int32),
            bulk_allocate=bulk,
        )
        assert splits.dtype == torch.int64 and splits.tolist() == [3, 0, 5]
        assert [o.tolist() for o in outputs] == [[3, 3, 8], [0, 12, 12, 32], [0, 6, 6, 16]]
        assert [o.dtype for o in outputs] == [torch.int32, torch.int64, torch.int32]
        assert all(o.data_ptr() % 16 == 0 for o in outputs)
        if bulk:
            assert len({o.untyped_storage().data_ptr() for o in outputs}) == 1


# -------------------------------------------------------------------------------------- bad input
X = torch.ones(12, 16)


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda q: mf.group_quantize(X, q, 3, [5, 7]), "got 2 sizes; there are 3 members"),
        (lambda q: mf.group_quantize(X, q, 3, torch.tensor([5, 7])), "got 2 sizes"),
        (lambda q: mf.group_quantize(X, q, 2, [-1, 13]), "negative"),
        (lambda q: mf.group_quantize(X, q, 2, torch.tensor([-1, 13])), "negative"),
        (lambda q: mf.group_quantize(X, q, 2, [5, 6]), "11 rows together; the matrix has 12"),
        (lambda q: mf.group_quantize(X, q, 2, torch.tensor([5, 8])), "the matrix has 12"),
        (lambda q: mf.group_quantize(X, q, 5, None), "do not divide"),
        (lambda q: mf.group_quantize(X, q, 2, torch.ones(2)), "int32 or int64"),
        (lambda q: mf.group_quantize(X, "fp8", 2, None), "a Quantizer is needed"),
        (lambda q: mf.group_quantize(X.long(), q, 2, None), "got dtype"),
        (lambda q: mf.group_quantize(X[0], q, 2, None), "a matrix"),
        (lambda q: mf.group_quantize(X, q, 2, None, [8, 7]), "elements"),
        (lambda q: mf.group_quantize(X, q, 2, None, noop_flag=torch.ones(1)), "pass output="),
        (lambda q: mf.group_quantize(X, q, 2, None, output=X), "a grouped tensor is needed"),
        (
            lambda q: mf.group_quantize(
                X, q, 2, None, output=mf.group_quantize(X, q.copy(), 2, None)
            ),
            "another object",
        ),
        (
            lambda q: mf.group_quantize(X, q, 2, None, output=mf.group_quantize(X, q, 3, None)),
            "3 members",
        ),
        (lambda q: mf.group_quantize(X, q, 0, None), "num_tensors: got 0; an int >= 1"),
        (lambda q: mf.group_quantize(X, q, 1.5, None), "num_tensors: got 1.5; an int >= 1"),
        (lambda q: mf.group_quantize(X, q, 2, [5.5, 6.5]), r"first_dims: got \[5.5, 6.5\]; .* int"),
        (lambda q: mf.group_quantize(X, q, 2, None, [8.0, 8.0]), r"last_dims: got .* integers"),
        (lambda q: mf.split_quantize(X, [5.5, 6.5], [q, q]), "split_sections: got .* integers"),
        (
            lambda q: mf.group_quantize(
                X, q, 2, None, output=mf.group_quantize(X, q, 2, None), noop_flag=torch.ones(2)
            ),
            r"noop_flag: got shape \(2,\)",
        ),
        (
            lambda q: mf.group_quantize(X, q, 2, None).quantize([X[:6]] * 2, torch.ones(2)),
            r"noop_flag: got shape \(2,\)",
        ),
        (lambda q: mf.group_dequantize(X), "a grouped tensor is needed"),
        (lambda q: mf.group_dequantize(mf.group_quantize(X, q, 2, None), torch.int8), "floating"),
        (lambda q: mf.group_dequantize(mf.group_quantize(X, q, 2, None), "bf16"), "floating"),
        (lambda q: mf.split_quantize(X, [5, 7], [q]), "quantizer_list: got 1"),
        (lambda q: mf.split_quantize(X, [5, 5], [q, q]), "split_sections"),
        (lambda q: mf.multi_tensor_quantize([X], [None]), r"quantizers\[0\]"),
        (lambda q: mf.splits_to_offsets(torch.ones(2), 1), "first_dims"),
        (
            lambda q: mf.splits_to_offsets_multi(
                torch.ones(2).int(), "cpu", strides=(1,), include_leading_zero=(), dtypes=()
            ),
            "one of each per output",
        ),
    ],
)
def test_errors_name_the_rule(call: Any, complaint: str) -> None:
    with pytest.raises((ValueError, TypeError), match=complaint):
        call(quantizer_of("mxfp8"))


def test_no_quantizer_is_an_error_of_type_and_value() -> None:
    for error in (TypeError, ValueError):
        with pytest.raises(error, match="quantizer: got object; a Quantizer is needed"):
            mf.GroupedTensor.make_grouped_tensor(2, None, None, 4, 4, object(), "cpu")


def test_an_amax_that_a_group_shares_is_refused() -> None:
    quantizer = mf.Float8CurrentScalingQuantizer(mf.DType.kFloat8E4M3, with_amax_reduction=True)
    with pytest.raises(NotImplementedError, match="split_quantize"):
        mf.group_quantize(X, quantizer, 2, None)
