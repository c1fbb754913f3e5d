"""Quantizers are values where they say so, freeze when a graph may hold them, refuse nonsense."""

from __future__ import annotations

import abc
import copy
import inspect
import pickle
from typing import Any

import pytest
import torch

import minifloat as mf
from minifloat import DType, Quantizer
from minifloat.quantizers import adopt

from .cases import (
    E4M3,
    E5M2,
    VALUES,
    Doubler,
    Make,
    Unregistered,
    assert_same,
    classes,
    delayed,
    hybrid,
    quantized,
    sample,
    values,
)


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
