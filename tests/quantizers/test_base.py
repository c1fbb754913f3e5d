"""Quantizers are values where they say so, freeze when a graph may hold them, refuse nonsense."""

from __future__ import annotations

import abc
import copy
import inspect
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import minifloat as mf
from minifloat import DType, Quantizer, reference
from minifloat.quantizers import adopt

from .cases import (
    CLASSES,
    E4M3,
    E5M2,
    FOUR,
    SEED,
    VALUES,
    Make,
    assert_same,
    buffers,
    delayed,
    hybrid,
    run_python,
    same,
    sample,
    snapshot,
)

values = pytest.mark.parametrize("make", VALUES.values(), ids=VALUES.keys())
classes = pytest.mark.parametrize("make", CLASSES.values(), ids=CLASSES.keys())


def quantized(q: Any, x: Tensor) -> Any:
    return q.quantize(x, seed=SEED)


class Doubler(Quantizer):
    """What a user writes: only the work."""

    def __init__(self, factor: float = 2.0) -> None:
        super().__init__(rowwise=True, columnwise=True)
        self.factor = factor

    def quantize_impl(self, tensor: Tensor) -> Tensor:  # type: ignore[override]
        return tensor * self.factor


class Unregistered(mf.MXFP8Quantizer):
    pass


# ------------------------------------------------------------------------------------- the base
def test_signature_and_attributes() -> None:
    assert str(inspect.signature(Quantizer.__init__)) == (
        "(self, *, rowwise: 'bool', columnwise: 'bool') -> 'None'"
    )
    q = Doubler()
    assert (q.rowwise_usage, q.columnwise_usage) == (True, True)
    assert (q.internal, q.optimize_for_gemm) == (False, False)
    assert type(Quantizer) is abc.ABCMeta, "a subclass may bring a metaclass of its own"


@pytest.mark.parametrize(
    "method, expected",
    [
        ("quantize", ["tensor", "out", "dtype"]),
        ("quantize_impl", ["tensor"]),
        ("multi_quantize", ["tensors"]),
        ("update_quantized", ["src", "dst", "noop_flag"]),
        ("make_empty", ["shape", "dtype", "device", "requires_grad", "pin_memory"]),
        ("inner_tensor_specs", ["shape"]),
        ("storage_metadata", ["fake_dtype"]),
        ("alloc_tensors", ["shape", "device"]),
        ("create_metadata", ["shape", "dtype", "requires_grad"]),
        ("calibrate", ["tensor"]),
        ("set_usage", ["rowwise", "columnwise"]),
        ("get_usages", []),
        ("copy", []),
        ("supports_only_rowwise_all_gather", []),
        ("is_requantization_safe", []),
        ("is_quantizable", ["inp"]),
    ],
)
def test_methods(method: str, expected: list[str]) -> None:
    parameters = [
        p for p in inspect.signature(getattr(Quantizer, method)).parameters if p != "self"
    ]
    assert [p for p in parameters if p in expected] == expected
    assert set(parameters) <= {*expected, "dtype", "seed"}


def test_a_user_defined_quantizer_says_only_its_work() -> None:
    q = Doubler()
    x = sample(3, 5).requires_grad_()
    y = q(x)
    assert torch.equal(y, 2 * x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert (grad == 1).all(), "the gradient passes unchanged, whatever the work is"
    assert q.multi_quantize([x, x])[1].shape == (3, 5)
    assert not q.is_requantization_safe()
    assert not q.supports_only_rowwise_all_gather()


@pytest.mark.parametrize(
    "call",
    [
        lambda q: Quantizer.quantize_impl(q, sample(2, 2)),
        lambda q: q.make_empty((2, 2), device="cpu"),
        lambda q: q.inner_tensor_specs((2, 2)),
        lambda q: q.storage_metadata(torch.float32),
        lambda q: q.alloc_tensors((2, 2), device="cpu"),
        lambda q: q.create_metadata((2, 2), dtype=torch.float32),
        lambda q: q.update_quantized(sample(2, 2), mf.MXFP8Quantizer(E4M3)(sample(2, 2))),
    ],
    ids=["quantize_impl", "make_empty", "specs", "storage_metadata", "alloc", "metadata", "update"],
)
def test_what_a_user_defined_quantizer_does_not_say(call: Any) -> None:
    with pytest.raises(NotImplementedError, match="Doubler"):
        call(Doubler())


# --------------------------------------------------------------------------------------- values
@values
def test_a_rebuilt_quantizer_is_equal_and_another_object(make: Make) -> None:
    q, twin = make(), make()
    assert q is not twin
    assert q == twin
    assert hash(q) == hash(twin)
    assert q._value_key() == twin._value_key()
    assert len({q, twin}) == 1
    assert q != "q"
    assert q != None  # noqa: E711


def test_no_two_cases_are_equal() -> None:
    made = [make() for make in VALUES.values()]
    assert len(set(made)) == len(made)
    assert len({q._value_key() for q in made}) == len(made)


@pytest.mark.parametrize(
    "make, fields",
    [
        (VALUES["current"], "dtype with_amax_reduction force_pow_2_scales amax_epsilon"),
        (VALUES["mxfp8"], "dtype with_2d_quantization"),
        (
            VALUES["block"],
            "dtype block_len amax_epsilon force_pow_2_scales block_scaling_dim",
        ),
        (
            VALUES["nvfp4"],
            "dtype with_rht with_post_rht_amax with_amax_reduction with_2d_quantization "
            "stochastic_rounding row_scaled_nvfp4 nvfp4_use_4over6 nvfp4_e4m3_max "
            "nvfp4_4over6_err_mode rht_matrix_random_sign_mask_t",
        ),
        (VALUES["identity"], "dtype"),
        (VALUES["hybrid"], "rowwise_quantizer columnwise_quantizer columnwise_source"),
    ],
)
def test_the_key_is_the_contracts(make: Make, fields: str) -> None:
    q = make()
    common = ("rowwise_usage", "columnwise_usage", "internal", "optimize_for_gemm")
    assert q._value_fields() == type(q)._value_field_names == (*common, *fields.split())
    name, items = q._value_key()
    assert name == type(q).__qualname__
    assert tuple(n for n, _ in items) == q._value_fields()
    if isinstance(q.dtype if hasattr(q, "dtype") else None, DType):
        assert dict(items)["dtype"] == int(q.dtype)
        assert type(dict(items)["dtype"]) is int


def other_value(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, DType):
        return E5M2 if value is E4M3 else E4M3
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, Quantizer):
        return mf.IdentityQuantizer()
    return {"MAE": "MSE", "original": "rowwise_dequantized", None: torch.float16}[value]


@classes
def test_every_field_counts(make: Make) -> None:
    for field in make()._value_fields():
        q, twin = make(), make()
        setattr(twin, field, other_value(getattr(twin, field)))
        assert q != twin, field
        assert hash(q) != hash(twin), field
        assert q._value_key() != twin._value_key(), field


@values
def test_set_usage_changes_key_hash_and_equality(make: Make) -> None:
    q, twin = make(), make()
    before = (twin._value_key(), hash(twin))
    twin.set_usage(columnwise=False)
    assert twin.get_usages() == {"rowwise": True, "columnwise": False}
    assert (twin._value_key(), hash(twin)) != before
    assert q != twin
    twin.set_usage(rowwise=False, columnwise=True)
    assert twin.get_usages() == {"rowwise": False, "columnwise": True}
    twin.set_usage()
    assert twin.get_usages() == {"rowwise": False, "columnwise": True}
    twin.set_usage(rowwise=True)
    assert q == twin
    assert hash(q) == before[1]


@pytest.mark.parametrize(
    "make",
    [
        Doubler,
        delayed,
        lambda: Unregistered(E4M3),
        lambda: mf.HybridQuantizer(
            rowwise_quantizer=delayed(), columnwise_quantizer=mf.MXFP8Quantizer(E4M3)
        ),
    ],
    ids=["user-defined", "delayed", "unregistered-subclass", "hybrid-of-delayed"],
)
def test_without_a_value_a_quantizer_equals_only_itself(make: Make) -> None:
    q, twin = make(), make()
    assert q._value_fields() is None
    assert q == q
    assert q != twin
    assert q != q.copy()
    assert len({q, twin}) == 2
    before = hash(q)
    q.set_usage(columnwise=False)
    q.internal = True
    assert hash(q) == before
    with pytest.raises(TypeError, match=f"{type(q).__name__} has no value"):
        q._value_key()
    with pytest.raises(TypeError, match=f"{type(q).__name__} has no value"):
        q.__fx_repr__()
    q.set_usage(columnwise=True)  # nothing was frozen by the attempt


def test_a_subclass_differs_from_its_base() -> None:
    assert mf.MXFP8Quantizer(E4M3) != Unregistered(E4M3)
    assert Unregistered(E4M3) != mf.MXFP8Quantizer(E4M3)


def test_value_fields_is_the_hook() -> None:
    class Named(Doubler):
        def _value_fields(self) -> tuple[str, ...]:
            return ("factor",)

    assert Named(2.0) == Named(2.0)
    assert hash(Named(2.0)) == hash(Named(2.0))
    assert Named(2.0) != Named(3.0)
    assert Named(2.0) != Doubler(2.0)


# --------------------------------------------------------------------------------------- frozen
@values
def test_hash_and_equality_do_not_freeze(make: Make) -> None:
    q = make()
    hash(q)
    assert q == make()
    assert {q: 1}[make()] == 1
    repr(q)
    q.set_usage(columnwise=False)
    q.internal = True


@values
def test_fx_repr_freezes_and_copy_thaws(make: Make) -> None:
    q = make()
    q.__fx_repr__()
    for change in (
        lambda: q.set_usage(columnwise=False),
        lambda: q.set_usage(rowwise=True),
        *(lambda f=f: setattr(q, f, getattr(q, f)) for f in q._value_fields()),
    ):
        with pytest.raises(RuntimeError, match=rf"{type(q).__name__}\..*copy\(\)"):
            change()
    assert q == make()
    q.set_usage()  # changes nothing
    q.note = "not part of the value"
    again = q.copy()
    assert again == q
    assert again is not q
    again.set_usage(columnwise=False)
    again.internal = True
    assert again != q
    assert q == make()
    assert_same(quantized(q, sample(20, 48)), quantized(make(), sample(20, 48)))


def test_a_frozen_hybrid_freezes_its_parts() -> None:
    q = hybrid()
    q.__fx_repr__()
    for part in (q.rowwise_quantizer, q.columnwise_quantizer):
        with pytest.raises(RuntimeError, match=r"copy\(\)"):
            part.set_usage(rowwise=False)
    again = q.copy()
    again.rowwise_quantizer.optimize_for_gemm = True
    assert again != q


@values
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, lambda q: pickle.loads(pickle.dumps(q)), lambda q: q.copy()],
    ids=["copy", "deepcopy", "pickle", "method"],
)
def test_copies_are_equal_distinct_and_may_change(make: Make, frozen: bool, duplicate: Any) -> None:
    q = make()
    q.set_usage(columnwise=False)
    q.optimize_for_gemm = True
    if frozen:
        q.__fx_repr__()
    twin = duplicate(q)
    assert twin == q
    assert twin is not q
    assert type(twin) is type(q)
    for field in q._value_fields():
        assert type(getattr(twin, field)) is type(getattr(q, field))
    twin.set_usage(columnwise=True)
    assert twin != q


def test_copy_shares_live_state() -> None:
    q = delayed()
    q.internal = q.optimize_for_gemm = True
    twin = q.copy()
    assert twin.scale is q.scale
    assert twin.amax is q.amax
    assert twin.internal
    assert twin.optimize_for_gemm
    deep = copy.deepcopy(q)
    assert deep.scale is not q.scale
    assert torch.equal(deep.scale, q.scale)
    assert deep.dtype is E4M3


def test_adopt() -> None:
    q = mf.MXFP8Quantizer(E4M3)
    assert adopt(None) is None
    assert adopt(q) is not q
    assert adopt(q) == q
    q.__fx_repr__()
    assert adopt(q) is q
    assert adopt(q.copy()) is not q


@values
def test_repr_names_class_and_fields(make: Make) -> None:
    q = make()
    text = repr(q)
    assert text.startswith(f"{type(q).__name__}(rowwise_usage=True, columnwise_usage=True, ")
    assert all(f"{field}=" in text for field in q._value_fields())
    assert "factor=2.0" in repr(Doubler())


# ------------------------------------------------------------------------------------- quantize
@values
def test_quantize_call_multi_and_out(make: Make) -> None:
    q, x = make(), sample(20, 48)
    expected = quantized(q, x)
    assert expected.dtype == torch.float32
    assert expected.shape == x.shape
    assert expected._quantizer == q
    assert expected._quantizer is not q
    assert_same(q(x, seed=SEED), expected)
    torch.manual_seed(3)
    first, second = q.multi_quantize([x, 2 * x])
    torch.manual_seed(3)
    assert_same(q.quantize(x), first)
    assert_same(q.quantize(2 * x), second)
    out = q.make_empty(x.shape, device="cpu")
    assert q.quantize(x, out=out, seed=SEED) is out
    assert_same(out, expected)


@values
def test_nominal_dtype(make: Make) -> None:
    q, x = make(), sample(20, 48)
    assert quantized(q, x.bfloat16()).dtype == torch.bfloat16
    made = q.quantize(x, dtype=torch.bfloat16, seed=SEED)
    assert made.dtype == torch.bfloat16
    assert same(buffers(made), buffers(quantized(q, x)))


@values
@pytest.mark.parametrize(
    "usages", [(True, True), (True, False), (False, True)], ids=["both", "row", "col"]
)
def test_internal_gives_the_same_buffers_as_a_storage(
    make: Make, usages: tuple[bool, bool]
) -> None:
    q, x = make(), sample(20, 48)
    q.set_usage(rowwise=usages[0], columnwise=usages[1])
    tensor = quantized(q, x)
    assert isinstance(tensor, Tensor)
    assert isinstance(tensor, q._tensor_class)
    q.internal = True
    storage = quantized(q, x)
    assert not isinstance(storage, Tensor)
    assert isinstance(storage, q._storage_class)
    assert same(buffers(storage), buffers(tensor))
    if not isinstance(q, mf.IdentityQuantizer):  # one buffer serves both copies
        assert storage.get_usages() == q.get_usages()


@values
def test_each_copy_is_the_same_alone(make: Make) -> None:
    q, x = make(), sample(20, 48)
    both = buffers(quantized(q, x))
    for usages in ({"columnwise": False}, {"rowwise": False}):
        one = make()
        one.set_usage(**usages)
        for name, buffer in buffers(quantized(one, x)).items():
            assert torch.equal(buffer, both[name])


@values
def test_gradient_passes_unchanged(make: Make) -> None:
    q = make()
    x = sample(20, 48).requires_grad_()
    y = quantized(q, x)
    assert y.requires_grad
    y.dequantize().backward(sample(20, 48, seed=1))
    assert x.grad is not None
    assert torch.equal(x.grad, sample(20, 48, seed=1))


@values
def test_no_graph_is_kept_outside_autograd(make: Make) -> None:
    q = make()
    x = sample(20, 48).requires_grad_()
    with torch.no_grad():
        assert not quantized(q, x).requires_grad
    assert not any(b.requires_grad for b in buffers(quantized(q, x)).values())
    q.internal = True
    assert not any(b.requires_grad for b in buffers(quantized(q, x)).values())


@pytest.mark.parametrize("make", [VALUES["nvfp4-sr"]])
def test_stochastic_rounding_repeats_with_its_seed(make: Make) -> None:
    q, x = make(), sample(64, 64)
    first = q.quantize(x, seed=torch.tensor([1, 2]))
    assert_same(q.quantize(x, seed=torch.tensor([1, 2])), first)
    assert_same(make().quantize(x, seed=torch.tensor([1, 2])), first)
    for other in ([1, 3], [2, 2]):
        assert not same(buffers(q.quantize(x, seed=torch.tensor(other))), buffers(first))
    torch.manual_seed(5)
    drawn = [snapshot(q.quantize(x)) for _ in range(2)]
    assert not same(*drawn), "each call draws anew"
    torch.manual_seed(5)
    assert all(same(buffers(q.quantize(x)), before) for before in drawn)


def test_a_refused_input_does_not_move_the_generator() -> None:
    q = VALUES["nvfp4-sr"]()
    before = torch.get_rng_state()
    with pytest.raises(TypeError):
        q.quantize(torch.zeros(4, 16, dtype=torch.int32))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("make", [VALUES["mxfp8"], VALUES["mxfp8-2d"], VALUES["nvfp4"]])
def test_optimize_for_gemm_swizzles_scales(make: Make) -> None:
    q, x = make(), sample(130, 260)
    plain = buffers(q.quantize(x))
    q.optimize_for_gemm = True
    made = q.quantize(x)
    assert made._with_gemm_swizzled_scales
    for name, buffer in buffers(made).items():
        expected = plain[name]
        if name == "_rowwise_scale_inv":
            expected = reference.swizzle(expected)
        if name == "_columnwise_scale_inv":
            last = expected.t() if isinstance(q, mf.MXFP8Quantizer) else expected
            expected = reference.swizzle(last).reshape(expected.shape)
        assert torch.equal(buffer, expected)


@pytest.mark.parametrize("make", [VALUES["current"], VALUES["block"], VALUES["block-1d"]])
def test_optimize_for_gemm_changes_no_fp32_scale(make: Make) -> None:
    q, x = make(), sample(130, 260)
    plain = buffers(q.quantize(x))
    q.optimize_for_gemm = True
    assert same(buffers(q.quantize(x)), plain)


# --------------------------------------------------------------------------------------- update
@values
@pytest.mark.parametrize("internal", [False, True])
def test_update_equals_a_fresh_result(make: Make, internal: bool) -> None:
    q = make()
    q.internal = internal
    x, y = sample(20, 48), 3 * sample(20, 48, seed=1)
    dst = quantized(q, x)
    before = buffers(dst)
    assert q.update_quantized(y, dst, seed=SEED) is dst
    assert_same(dst, quantized(q, y))
    assert all(buffers(dst)[n] is b for n, b in before.items()), "in place"
    q.update_quantized(y.t().contiguous().t(), dst, seed=SEED)
    assert_same(dst, quantized(q, y))


@pytest.mark.parametrize("make", FOUR.values(), ids=FOUR.keys())
def test_update_writes_the_copies_that_are_there(make: Make) -> None:
    x, y = sample(20, 48), sample(20, 48, seed=1)
    rows = make()
    rows.set_usage(columnwise=False)
    dst = rows.quantize(x)
    make().update_quantized(y, dst)
    assert_same(dst, rows.quantize(y))


@values
def test_noop_flag(make: Make) -> None:
    q = make()
    x, y = sample(20, 48), sample(20, 48, seed=1)
    dst = quantized(q, x)
    before = snapshot(dst)
    q.update_quantized(y, dst, noop_flag=torch.ones(1), seed=SEED)
    assert same(buffers(dst), before)
    q.update_quantized(y, dst, noop_flag=torch.zeros(1), seed=SEED)
    assert_same(dst, quantized(q, y))


@values
def test_update_refuses_and_changes_nothing(make: Make) -> None:
    q = make()
    x = sample(20, 48)
    dst = quantized(q, x)
    before = snapshot(dst)
    foreign = mf.MXFP8Quantizer(E4M3) if not isinstance(q, mf.MXFP8Quantizer) else VALUES["block"]()
    for src, target, error, message in (
        (sample(20, 47), dst, ValueError, r"src: got shape \(20, 47\); dst has \(20, 48\)"),
        (sample(960), dst, ValueError, r"src: got shape \(960,\); dst has \(20, 48\)"),
        (x.to(torch.int32), dst, TypeError, "tensor: got .*int32"),
        (x.to(torch.complex64), dst, TypeError, "tensor: got .*complex64"),
        (x, x.clone(), ValueError, f"dst: got Tensor; {type(q).__name__} updates"),
        (x, None, ValueError, "dst: got NoneType"),
        (x, foreign.quantize(x), ValueError, "dst: got .*Tensor"),
    ):
        with pytest.raises(error, match=message):
            q.update_quantized(src, target)
        assert same(buffers(dst), before)


NV = mf.NVFP4Quantizer


@pytest.mark.parametrize(
    "q, other, name",
    [
        (VALUES["current"](), mf.Float8CurrentScalingQuantizer(E5M2, "cpu"), "fp8_dtype"),
        (VALUES["block"](), mf.Float8BlockQuantizer(E4M3, block_scaling_dim=1), "is_2D_scaled"),
        (VALUES["block"](), mf.Float8BlockQuantizer(E5M2), "fp8_dtype"),
        (VALUES["mxfp8"](), mf.MXFP8Quantizer(E5M2), "fp8_dtype"),
        (VALUES["nvfp4"](), NV(row_scaled_nvfp4=True), "row_scaled_nvfp4"),
        (VALUES["nvfp4"](), VALUES["nvfp4-4over6"](), "nvfp4_use_4over6"),
        (VALUES["nvfp4"](), VALUES["nvfp4-rht"](), "Hadamard"),
        (VALUES["nvfp4-rht"](), VALUES["nvfp4"](), "Hadamard"),
        (
            hybrid(),
            mf.HybridQuantizer(
                rowwise_quantizer=mf.MXFP8Quantizer(E5M2), columnwise_quantizer=NV()
            ),
            "fp8_dtype",
        ),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_update_refuses_what_is_stored_in_another_way(q: Any, other: Any, name: str) -> None:
    dst = q.quantize(sample(20, 48))
    before = snapshot(dst)
    with pytest.raises(ValueError, match=f"dst: its .*{name}"):
        other.update_quantized(sample(20, 48, seed=1), dst)
    assert same(buffers(dst), before)


def test_update_refuses_swizzled_scales_for_plain_ones() -> None:
    q = mf.MXFP8Quantizer(E4M3)
    dst = q.quantize(sample(20, 48))
    q.optimize_for_gemm = True
    with pytest.raises(ValueError, match="dst: its with_gemm_swizzled_scales is False"):
        q.update_quantized(sample(20, 48), dst)


def test_update_may_differ_in_what_a_reader_does_not_see() -> None:
    x = sample(64, 64)
    dst = mf.MXFP8Quantizer(E4M3).quantize(x)
    square = mf.MXFP8Quantizer(E4M3, with_2d_quantization=True)
    square.update_quantized(x, dst)
    assert same(buffers(dst), buffers(square.quantize(x)))
    assert torch.equal(dst.dequantize(), square.quantize(x).dequantize())


@values
def test_update_keeps_no_graph(make: Make) -> None:
    q = make()
    x = sample(20, 48).requires_grad_()
    dst = quantized(q, x.detach())
    q.update_quantized(2 * x, dst)
    assert not any(b.requires_grad for b in buffers(dst).values())


# ------------------------------------------------------------------------------------ bad input
@values
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64], ids=str)
def test_integers_and_complex_are_refused(make: Make, dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"tensor: got .*{dtype}.*(allowed|needed)"):
        make().quantize(torch.zeros(32, 32).to(dtype))


@values
def test_what_is_no_tensor_is_refused(make: Make) -> None:
    for bad in ([1.0, 2.0], None, 3.0):
        with pytest.raises(TypeError, match=f"tensor: got {type(bad).__name__}"):
            make().quantize(bad)


@values
def test_no_usage_is_refused(make: Make) -> None:
    q = make()
    q.set_usage(rowwise=False, columnwise=False)
    with pytest.raises(ValueError, match="usage: neither rowwise nor columnwise"):
        q.quantize(sample(32, 32))


@pytest.mark.parametrize(
    "name", [n for n in VALUES if n.split("-")[0] not in ("current", "identity")]
)
def test_a_scalar_has_no_blocks(name: str) -> None:
    with pytest.raises(ValueError, match="tensor: got a 0-d tensor"):
        VALUES[name]().quantize(torch.tensor(1.0))


@pytest.mark.parametrize("name", ["current", "identity"])
def test_a_scalar_has_a_scale(name: str) -> None:
    made = VALUES[name]().quantize(torch.tensor(3.0))
    assert made.shape == ()
    assert made.dequantize() == 3.0


@values
@pytest.mark.parametrize(
    "shape", [(0, 32), (32, 0), (0,), (1, 1), (1,), (17,), (2, 3, 5), (3, 0, 4)]
)
def test_any_shape(make: Make, shape: tuple[int, ...]) -> None:
    q = make()
    x = sample(*shape)
    made = quantized(q, x)
    assert made.shape == shape
    assert made.dequantize().shape == shape
    assert_same(quantized(q, x), made)
    empty = q.make_empty(shape, device="cpu")
    assert {n: (b.shape, b.dtype) for n, b in buffers(empty).items()} == {
        n: (b.shape, b.dtype) for n, b in buffers(made).items()
    }


# -------------------------------------------------------------------------------------- answers
@pytest.mark.parametrize(
    "make, safe, rowwise_gather",
    [
        (delayed, False, True),
        (VALUES["current"], True, True),
        (VALUES["block"], True, False),
        (VALUES["mxfp8"], True, False),
        (VALUES["nvfp4"], True, False),
        (VALUES["nvfp4-sr"], False, False),
        (VALUES["identity"], True, False),
        (VALUES["hybrid"], True, True),  # its columnwise part is NVFP4
        (
            lambda: mf.HybridQuantizer(
                rowwise_quantizer=mf.MXFP8Quantizer(E4M3),
                columnwise_quantizer=mf.MXFP8Quantizer(E5M2),
            ),
            True,
            False,
        ),
        (
            lambda: mf.HybridQuantizer(
                rowwise_quantizer=mf.Float8CurrentScalingQuantizer(E4M3, "cpu"),
                columnwise_quantizer=NV(stochastic_rounding=True),
            ),
            False,
            True,
        ),
    ],
)
def test_answers(make: Make, safe: bool, rowwise_gather: bool) -> None:
    q = make()
    assert q.is_requantization_safe() is safe
    assert q.supports_only_rowwise_all_gather() is rowwise_gather
    q.calibrate(sample(4, 4))


# NVFP4 answers as the contract says; its values are not idempotent.
@pytest.mark.parametrize("name", [n for n in VALUES if not n.startswith("nvfp4")])
def test_requantization_safe_means_what_it_says(name: str) -> None:
    q = VALUES[name]()
    assert q.is_requantization_safe()
    x = q.quantize(sample(40, 72)).dequantize()
    # An fp32 scale comes back up to its rounding.
    torch.testing.assert_close(q.quantize(x).dequantize(), x, rtol=1e-6, atol=0)


@values
def test_anything_floating_is_quantizable(make: Make) -> None:
    q = make()
    assert q.is_quantizable(sample(3, 5))
    assert q.is_quantizable(sample(7).bfloat16())
    assert not q.is_quantizable(torch.zeros(32, 32, dtype=torch.int32))


# ------------------------------------------------------------------------------- process groups
@pytest.fixture
def group(tmp_path: Path) -> Iterator[Any]:
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        yield dist.new_group([0])
    finally:
        dist.destroy_process_group()


REDUCING = [
    lambda group: mf.Float8CurrentScalingQuantizer(
        E4M3, "cpu", with_amax_reduction=True, amax_reduction_group=group
    ),
    lambda group: NV(with_amax_reduction=True, amax_reduction_group=group),
    lambda group: NV(
        with_amax_reduction=True,
        amax_reduction_group=group,
        with_rht=True,
        with_post_rht_amax=True,
    ),
]
reducing = pytest.mark.parametrize("make", REDUCING, ids=["current", "nvfp4", "nvfp4-rht"])


@reducing
def test_a_group_is_no_part_of_the_value(make: Any, group: Any) -> None:
    q, without = make(group), make(None)
    assert q.amax_reduction_group is group
    assert "amax_reduction_group" not in q._value_fields()
    for duplicate in (copy.deepcopy, copy.copy, lambda q: pickle.loads(pickle.dumps(q))):
        twin = duplicate(q)
        assert twin.amax_reduction_group is None
        assert twin == without
    assert q.copy().amax_reduction_group is group


@reducing
@pytest.mark.parametrize("attribute", ["amax_reduction_group", "_hidden", "anything"])
def test_a_live_group_in_any_attribute_is_refused(make: Any, group: Any, attribute: str) -> None:
    q = make(None)
    setattr(q, attribute, group)
    message = rf"{type(q).__name__}\.{attribute} holds a live ProcessGroup"
    for ask in (
        lambda: hash(q),
        lambda: q == make(None),
        lambda: make(None) == q,
        lambda: q.__fx_repr__(),
        lambda: q._value_key(),
    ):
        with pytest.raises(TypeError, match=message):
            ask()
    assert q == q
    assert q != 1
    assert q != mf.MXFP8Quantizer(E4M3)
    setattr(q, attribute, None)
    assert q == make(None)
    q.set_usage(columnwise=False)  # a refused print did not freeze


def test_a_live_group_in_a_part_is_refused(group: Any) -> None:
    q = mf.HybridQuantizer(
        rowwise_quantizer=REDUCING[0](group), columnwise_quantizer=mf.MXFP8Quantizer(E4M3)
    )
    for ask in (lambda: hash(q), lambda: q.__fx_repr__()):
        with pytest.raises(TypeError, match="CurrentScalingQuantizer.amax_reduction_group holds"):
            ask()


def test_identity_quantizers_may_hold_a_group(group: Any) -> None:
    q = Doubler()
    q.group = group
    assert hash(q) == hash(q)
    assert q != Doubler()


@reducing
def test_reduction_over_one_rank_changes_nothing(make: Any, group: Any) -> None:
    x = sample(32, 48)
    plain = make(None)
    plain.with_amax_reduction = False
    for q in (make(group), make(None)):  # without a group: the world
        made = q.quantize(x)
        assert same(buffers(made), buffers(plain.quantize(x)))
        kept = made._quantizer
        assert not kept.with_amax_reduction, "what is quantized into the result later is its own"
        assert kept.amax_reduction_group is None
        assert q.with_amax_reduction
        for usages in ({"columnwise": False}, {"rowwise": False}):
            one, expected = q.copy(), plain.copy()
            one.set_usage(**usages)
            expected.set_usage(**usages)
            assert same(buffers(one.quantize(x)), buffers(expected.quantize(x)))


@reducing
def test_an_empty_tensor_holds_the_group_beside_the_value(make: Any, group: Any) -> None:
    q = make(group)
    made = q.make_empty((32, 48), device="cpu")
    assert made.amax_reduction_group is group
    assert made._quantizer == make(None)
    q.update_quantized(sample(32, 48), made)
    assert same(buffers(made), buffers(q.quantize(sample(32, 48))))


def test_a_hybrid_result_holds_no_group(group: Any) -> None:
    q = mf.HybridQuantizer(
        rowwise_quantizer=REDUCING[0](group), columnwise_quantizer=REDUCING[1](group)
    )
    kept = q.quantize(sample(32, 48))._quantizer
    for part in (kept.rowwise_quantizer, kept.columnwise_quantizer):
        assert not part.with_amax_reduction
        assert part.amax_reduction_group is None
    hash(kept)


@pytest.mark.parametrize("name", ["mxfp8", "block", "identity"])
def test_blocks_have_nothing_to_reduce(
    name: str, group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = VALUES[name]()
    dst = q.quantize(sample(32, 48))
    dst.amax_reduction_group = group
    monkeypatch.setattr("minifloat.quantizers.base._reduced", None)
    q.update_quantized(sample(32, 48, seed=1), dst)
    assert same(buffers(dst), buffers(q.quantize(sample(32, 48, seed=1))))


def test_reduction_without_distributed_is_none() -> None:
    q = REDUCING[0](None)
    x = sample(4, 8)
    assert not dist.is_initialized()
    assert torch.equal(q.quantize(x)._data, VALUES["current"]().quantize(x)._data)


TWO_RANKS = """
import sys, torch, torch.distributed as dist, multiprocessing
import minifloat as mf

def work(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    whole = torch.randn(2, 32, 48, generator=torch.Generator().manual_seed(0))
    whole[1] *= 5
    x = whole[rank]
    current = mf.Float8CurrentScalingQuantizer(mf.DType.kFloat8E4M3, with_amax_reduction=True)
    nvfp4 = mf.NVFP4Quantizer(with_amax_reduction=True)
    expected = mf.Float8CurrentScalingQuantizer(mf.DType.kFloat8E4M3).quantize(whole)
    for q in (current, nvfp4):
        q.amax_reduction_group = dist.group.WORLD
    made = current.quantize(x)
    assert torch.equal(made._scale_inv, expected._scale_inv)
    assert torch.equal(made._data, expected._data[rank])
    assert torch.equal(nvfp4.quantize(x)._amax_rowwise, whole.abs().max().reshape(1))
    assert torch.equal(nvfp4.quantize(x)._amax_columnwise, whole.abs().max().reshape(1))
    # The group of the destination counts where the quantizer reduces nothing.
    plain = mf.Float8CurrentScalingQuantizer(mf.DType.kFloat8E4M3)
    dst = plain.make_empty(x.shape, device="cpu")
    dst.amax_reduction_group = dist.group.WORLD
    plain.update_quantized(x, dst)
    assert torch.equal(dst._data, expected._data[rank])
    # Compiled: the group travels by name.
    current.amax_reduction_group = None
    compiled = torch.compile(lambda q, t: q.quantize(t), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(current, x)._data, expected._data[rank])
    dist.destroy_process_group()
    print("rank", rank, "done", flush=True)

context = multiprocessing.get_context("fork")
ranks = [context.Process(target=work, args=(r, sys.argv[1])) for r in range(2)]
[r.start() for r in ranks]
[r.join() for r in ranks]
assert [r.exitcode for r in ranks] == [0, 0]
"""


def test_reduction_over_two_ranks(tmp_path: Path) -> None:
    code = TWO_RANKS.replace("sys.argv[1]", repr(str(tmp_path / "store")))
    assert run_python(code).count("done") == 2
