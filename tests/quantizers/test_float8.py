"""One scale per tensor: delayed scaling is live and has no value, current scaling is a value."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch

import minifloat as mf
from minifloat import DType, Float8CurrentScalingQuantizer, Float8Quantizer, reference
from minifloat.formats import Cast

from .cases import E4M3, E5M2, assert_same, buffers, delayed, same, sample, snapshot

BAD_DTYPES = [DType.kFloat4E2M1, DType.kByte, torch.float32, torch.int64, "e4m3", None, 3]


def required(cls: type) -> tuple[list[str], dict[str, Any]]:
    """(positional parameters, {parameter: default}) of a constructor."""
    parameters = list(inspect.signature(cls).parameters.values())
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    return positional, {p.name: p.default for p in parameters if p.default is not p.empty}


# -------------------------------------------------------------------------------------- delayed
def test_delayed_signature() -> None:
    positional, defaults = required(Float8Quantizer)
    assert positional == ["scale", "amax", "fp8_dtype"]
    assert defaults == {"rowwise": True, "columnwise": True}


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_delayed_casts_with_the_live_scale_and_records_the_amax(dtype: DType) -> None:
    scale, amax = torch.tensor([2.0]), torch.tensor([0.25])
    q = Float8Quantizer(scale, amax, dtype)
    x = sample(6, 40)
    made = q.quantize(x)
    tag = "e4m3" if dtype is E4M3 else "e5m2"
    data, inverse, seen = reference.quantize_scaled(x, scale, Cast(f"fp8_{tag}"))
    assert torch.equal(made._data, data)
    assert torch.equal(made._transpose, data.t())
    assert torch.equal(made._scale_inv, inverse)
    assert made._fp8_dtype is dtype
    assert torch.equal(amax, seen), "the caller's tensor, in place"
    q.quantize(x / 2)
    assert torch.equal(amax, seen), "a smaller amax changes nothing"
    q.quantize(x * 2)
    assert torch.equal(amax, 2 * seen)

    scale.fill_(64.0)  # the next cast uses it
    assert torch.equal(q.quantize(x)._scale_inv, torch.tensor([1 / 64]))
    assert torch.equal(made._scale_inv, inverse), "an earlier result keeps its own"


def test_delayed_keeps_its_state_as_given() -> None:
    history = torch.zeros(4, 3)
    amax = history[0][1:2]
    q = Float8Quantizer(torch.ones(1), amax, E4M3)
    assert q.amax is amax
    q.quantize(sample(4, 4))
    assert history[0, 1] == sample(4, 4).abs().max()
    assert (history.flatten()[[0, 2, 3]] == 0).all()
    scalar = Float8Quantizer(torch.tensor(1.0), torch.tensor(0.0), E4M3)
    assert scalar.quantize(sample(4, 4))._scale_inv.shape == (1,)
    assert scalar.amax == sample(4, 4).abs().max()


def test_delayed_calibrate_overwrites_the_amax() -> None:
    q = delayed()
    q.amax.fill_(1e6)
    x = sample(4, 4)
    x[0, 0] = -9.0
    q.calibrate(x)
    assert torch.equal(q.amax, torch.tensor([9.0]))
    q.set_usage(rowwise=False)
    q.calibrate(x.requires_grad_())
    assert not q.amax.requires_grad
    assert q.columnwise_usage
    assert not q.rowwise_usage


@pytest.mark.parametrize("flag, noop", [(1.0, True), (0.0, False)])
def test_delayed_noop_leaves_the_amax_too(flag: float, noop: bool) -> None:
    q = delayed()
    x, y = sample(6, 40), 10 * sample(6, 40, seed=1)
    dst = q.quantize(x)
    before, amax = snapshot(dst), q.amax.clone()
    q.update_quantized(y, dst, noop_flag=torch.tensor([flag]))
    assert same(buffers(dst), before) is noop
    assert torch.equal(q.amax, amax) is noop
    if not noop:
        assert torch.equal(q.amax, y.abs().max().reshape(1))


def test_delayed_refusals_leave_the_amax() -> None:
    q = delayed()
    dst = q.quantize(sample(4, 8))
    q.amax.zero_()
    for bad, error in (
        (torch.zeros(4, 8, dtype=torch.int32), TypeError),
        (sample(4, 9), ValueError),
    ):
        with pytest.raises(error):
            q.update_quantized(bad, dst)
    with pytest.raises(TypeError):
        q.quantize(torch.zeros(4, 8, dtype=torch.complex64))
    q.set_usage(rowwise=False, columnwise=False)
    with pytest.raises(ValueError, match="usage"):
        q.quantize(sample(4, 8))
    assert q.amax == 0


@pytest.mark.parametrize("usages", [(True, True), (True, False), (False, True)])
def test_delayed_usages(usages: tuple[bool, bool]) -> None:
    q = delayed(rowwise=usages[0], columnwise=usages[1])
    made = q.quantize(sample(2, 3, 40))
    assert (made._data is not None, made._transpose is not None) == usages
    assert made.get_usages() == {"rowwise": usages[0], "columnwise": usages[1]}


def test_delayed_gradient_passes_and_keeps_no_graph() -> None:
    q = delayed()
    x = sample(4, 8).requires_grad_()
    q.quantize(x).dequantize().sum().backward()
    assert x.grad is not None
    assert (x.grad == 1).all()
    q.internal = True
    made = q.quantize(x)
    assert not made._scale_inv.requires_grad
    assert not q.amax.requires_grad


def test_delayed_copies() -> None:
    q = delayed()
    assert q.copy().amax is q.amax
    for twin in (copy.deepcopy(q), pickle.loads(pickle.dumps(q))):
        assert twin.amax is not q.amax
        assert torch.equal(twin.scale, q.scale)
        assert twin.dtype is E4M3
        assert_same(twin.quantize(sample(4, 8)), q.quantize(sample(4, 8)))


def test_delayed_from_data() -> None:
    q = delayed(scale=4.0)
    codes = q.quantize(sample(4, 8))._data
    for data in (codes, codes.view(torch.float8_e4m3fn)):
        made = q.create_tensor_from_data(data, fake_dtype=torch.bfloat16, requires_grad=True)
        assert made.dtype == torch.bfloat16
        assert made.requires_grad
        assert torch.equal(made._scale_inv, torch.tensor([0.25]))
        assert torch.equal(made._data, codes)
    storage = q.create_tensor_from_data(codes, internal=True)
    assert not isinstance(storage, torch.Tensor)
    assert not q.internal
    assert torch.equal(storage.dequantize(), q.quantize(sample(4, 8)).dequantize())


@pytest.mark.parametrize(
    "scale, amax, error, message",
    [
        (1.0, torch.zeros(1), TypeError, "scale: got float"),
        (torch.ones(1), None, TypeError, "amax: got NoneType"),
        (torch.ones(2), torch.zeros(1), ValueError, r"scale: got torch.float32 of shape \(2,\)"),
        (torch.ones(1), torch.zeros(0), ValueError, r"amax: got torch.float32 of shape \(0,\)"),
        (torch.ones(1).half(), torch.zeros(1), ValueError, "scale: got torch.float16"),
    ],
)
def test_delayed_refuses_other_state(scale: Any, amax: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        Float8Quantizer(scale, amax, E4M3)


# -------------------------------------------------------------------------------------- current
def test_current_signature() -> None:
    positional, defaults = required(Float8CurrentScalingQuantizer)
    assert positional == ["fp8_dtype", "device"]
    defaults.pop("device")
    assert defaults == {
        "rowwise": True,
        "columnwise": True,
        "use_existing_amax": False,
        "with_amax_reduction": False,
        "amax_reduction_group": None,
        "force_pow_2_scales": False,
        "amax_epsilon": 0.0,
        "scale": None,
        "amax": None,
    }


@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("eps", [0.0, 100.0])
@pytest.mark.parametrize("dtype, tag", [(E4M3, "e4m3"), (E5M2, "e5m2")])
def test_current(dtype: DType, tag: str, eps: float, pow2: bool) -> None:
    q = Float8CurrentScalingQuantizer(
        dtype, "cpu", force_pow_2_scales=pow2, amax_epsilon=eps, columnwise=False
    )
    x = sample(6, 40)
    made = q.quantize(x)
    data, scale, _ = reference.quantize(x, Cast(f"fp8_{tag}", pow2=pow2, eps=eps))
    assert torch.equal(made._data, data)
    assert torch.equal(made._scale_inv, scale)
    assert made._transpose is None
    q.set_usage(rowwise=False, columnwise=True)
    column = q.quantize(x)
    assert column._data is None
    assert torch.equal(column._transpose, data.t())
    assert torch.equal(column.dequantize(), made.dequantize())


def test_current_ignores_the_device_and_old_arguments() -> None:
    plain = Float8CurrentScalingQuantizer(E4M3, torch.device("cuda"))
    assert (
        plain == Float8CurrentScalingQuantizer(E4M3, "cpu") == Float8CurrentScalingQuantizer(E4M3)
    )
    for old in (
        {"use_existing_amax": True},
        {"scale": torch.ones(1)},
        {"amax": torch.ones(1)},
    ):
        with pytest.warns(DeprecationWarning, match="use_existing_amax, scale and amax"):
            assert Float8CurrentScalingQuantizer(E4M3, "cpu", **old) == plain


def test_current_from_data_leaves_the_scale_to_be_written() -> None:
    q = Float8CurrentScalingQuantizer(E4M3, "cpu")
    codes = q.quantize(sample(4, 8))._data
    made = q.create_tensor_from_data(codes, fake_dtype=torch.bfloat16)
    assert made._data is codes
    assert (made.dtype, made.shape) == (torch.bfloat16, (4, 8))
    assert (made._scale_inv.shape, made._scale_inv.dtype) == ((1,), torch.float32)
    assert not isinstance(q.create_tensor_from_data(codes, internal=True), torch.Tensor)


@pytest.mark.parametrize("cls", [Float8CurrentScalingQuantizer, delayed])
def test_columnwise_shape(cls: Any) -> None:
    q = delayed() if cls is delayed else cls(E4M3, "cpu")
    assert tuple(q.get_columnwise_shape((2, 3, 5))) == (5, 2, 3)
    assert tuple(q.get_columnwise_shape(torch.Size((3, 5)))) == (5, 3)


@pytest.mark.parametrize("dtype", [E4M3, 7, torch.float8_e4m3fn])
def test_spellings_of_a_dtype(dtype: Any) -> None:
    assert Float8CurrentScalingQuantizer(dtype, "cpu").dtype is E4M3
    assert Float8Quantizer(torch.ones(1), torch.zeros(1), dtype).dtype is E4M3
    assert mf.MXFP8Quantizer(dtype).dtype is E4M3
    assert mf.Float8BlockQuantizer(dtype, rowwise=True, columnwise=True).dtype is E4M3


@pytest.mark.parametrize("bad", BAD_DTYPES, ids=repr)
@pytest.mark.parametrize(
    "make",
    [
        lambda d: Float8CurrentScalingQuantizer(d, "cpu"),
        lambda d: Float8Quantizer(torch.ones(1), torch.zeros(1), d),
        lambda d: mf.MXFP8Quantizer(d),
        lambda d: mf.Float8BlockQuantizer(d),
    ],
    ids=["current", "delayed", "mxfp8", "block"],
)
def test_other_dtypes_are_refused(make: Any, bad: Any) -> None:
    with pytest.raises(
        TypeError, match=r"fp8_dtype: got .*; allowed: DType.kFloat8E4M3, DType.kFloat8E5M2$"
    ):
        make(bad)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_other_epsilons_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="amax_epsilon: got .*; it must be finite and >= 0"):
        Float8CurrentScalingQuantizer(E4M3, "cpu", amax_epsilon=bad)
    with pytest.raises(ValueError, match="amax_epsilon: got .*; it must be finite and >= 0"):
        mf.Float8BlockQuantizer(E4M3, amax_epsilon=bad)


def test_an_epsilon_is_a_number() -> None:
    with pytest.raises(TypeError, match="amax_epsilon: got 'x'; a number is needed"):
        Float8CurrentScalingQuantizer(E4M3, "cpu", amax_epsilon="x")  # type: ignore[arg-type]


@pytest.mark.parametrize("q", [delayed(), Float8CurrentScalingQuantizer(E4M3, "cpu")])
def test_codes_are_bytes(q: Any) -> None:
    for bad in (torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.float8_e5m2)):
        with pytest.raises(TypeError, match="data: got dtype .*; codes are torch.uint8 or"):
            q.create_tensor_from_data(bad)


def test_integral_epsilons_are_floats() -> None:
    q = Float8CurrentScalingQuantizer(E4M3, "cpu", amax_epsilon=1)
    assert type(q.amax_epsilon) is float
    assert q == Float8CurrentScalingQuantizer(E4M3, "cpu", amax_epsilon=1.0)
