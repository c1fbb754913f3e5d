"""What every quantizer does: quantize, update, refuse, answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import minifloat as mf
from minifloat import reference

from .cases import (
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
    quantized,
    same,
    sample,
    snapshot,
    values,
)


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


@pytest.mark.parametrize("make", FOUR.values(), ids=FOUR.keys())
@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64, "bfloat16"])
def test_a_nominal_dtype_is_floating(make: Make, dtype: Any) -> None:
    q = make()
    with pytest.raises(TypeError, match="dtype: got .*a floating torch dtype is needed"):
        q.quantize(sample(4, 4), dtype=dtype)
    with pytest.raises(TypeError, match="dtype: got .*a floating torch dtype is needed"):
        q.make_empty((4, 4), dtype=dtype)


@pytest.mark.parametrize(
    ("flag", "error"), [(1.0, TypeError), (torch.ones(3), ValueError), (torch.ones(0), ValueError)]
)
def test_a_noop_flag_is_one_number_on_the_device(flag: Any, error: Any) -> None:
    for q in (VALUES["mxfp8"](), delayed()):
        t = q(sample(4, 8))
        state = [s.clone() for s in q._state_written()]
        before = snapshot(t)
        with pytest.raises(error, match="noop_flag: got"):
            q.update_quantized(100 * sample(4, 8), t, noop_flag=flag)
        assert same(snapshot(t), before)
        assert all(torch.equal(a, b) for a, b in zip(state, q._state_written(), strict=True))


@values
def test_what_is_no_tensor_is_no_source(make: Make) -> None:
    q = make()
    t = q.make_empty((4, 8), device="cpu")
    for bad in (None, [1.0], 3.0):
        with pytest.raises(TypeError, match="src: got"):
            q.update_quantized(bad, t)


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
    with pytest.raises(ValueError, match=r"shape: got \(\)"):
        VALUES[name]().make_empty(())


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
