"""Two quantizers, one per direction."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import minifloat as mf
from minifloat import HybridQuantizer

from .cases import E4M3, E5M2, buffers, delayed, hybrid, same, sample, snapshot


def make(row: Any, col: Any, **options: Any) -> HybridQuantizer:
    return HybridQuantizer(rowwise_quantizer=row, columnwise_quantizer=col, **options)


def pinned(q: Any, *, rowwise: bool) -> Any:
    q = q.copy()
    q.set_usage(rowwise=rowwise, columnwise=not rowwise)
    q.internal = True
    return q


PAIRS = {
    "mxfp8+nvfp4": lambda: (mf.MXFP8Quantizer(E4M3), mf.NVFP4Quantizer()),
    "current+current": lambda: (
        mf.Float8CurrentScalingQuantizer(E4M3, "cpu"),
        mf.Float8CurrentScalingQuantizer(E5M2, "cpu"),
    ),
    "nvfp4+identity": lambda: (
        mf.NVFP4Quantizer(row_scaled_nvfp4=True),
        mf.IdentityQuantizer(dtype=torch.bfloat16),
    ),
    "identity+block": lambda: (mf.IdentityQuantizer(), mf.Float8BlockQuantizer(E4M3)),
    "mxfp8+rht": lambda: (
        mf.MXFP8Quantizer(E4M3),
        mf.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True),
    ),
}
pairs = pytest.mark.parametrize("parts", PAIRS.values(), ids=PAIRS.keys())


def test_signature() -> None:
    parameters = inspect.signature(HybridQuantizer).parameters
    assert list(parameters) == ["rowwise_quantizer", "columnwise_quantizer", "columnwise_source"]
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters.values())
    assert parameters["columnwise_source"].default == "original"


@pairs
def test_each_part_makes_its_direction(parts: Any) -> None:
    row, col = parts()
    x = sample(33, 48)
    made = make(row, col).quantize(x)
    assert isinstance(made, mf.HybridQuantizedTensor)
    rows, columns = pinned(row, rowwise=True), pinned(col, rowwise=False)
    assert same(buffers(made.rowwise_sub_storage), buffers(rows.quantize(x)))
    assert same(buffers(made.columnwise_sub_storage), buffers(columns.quantize(x)))
    assert torch.equal(made.dequantize(), rows.quantize(x).dequantize())


@pytest.mark.parametrize("name", [n for n in PAIRS if n != "identity+block"])
def test_columnwise_from_the_dequantized_row(name: str) -> None:
    row, col = PAIRS[name]()
    x = sample(33, 48)
    made = make(row, col, columnwise_source="rowwise_dequantized").quantize(x)
    rounded = pinned(row, rowwise=True).quantize(x).dequantize()
    assert not torch.equal(rounded, x)
    columns = pinned(col, rowwise=False)
    assert same(buffers(made.columnwise_sub_storage), buffers(columns.quantize(rounded)))
    alone = make(row, col, columnwise_source="rowwise_dequantized")
    alone.set_usage(rowwise=False)
    made_alone = alone.quantize(x)
    assert made_alone.rowwise_sub_storage is None
    assert same(buffers(made_alone.columnwise_sub_storage), buffers(made.columnwise_sub_storage))


def test_parts_are_pinned_copies() -> None:
    row, col = mf.MXFP8Quantizer(E4M3), mf.NVFP4Quantizer()
    q = make(row, col)
    assert row.get_usages() == col.get_usages() == {"rowwise": True, "columnwise": True}
    assert q.rowwise_quantizer.get_usages() == {"rowwise": True, "columnwise": False}
    assert q.columnwise_quantizer.get_usages() == {"rowwise": False, "columnwise": True}
    assert q.get_usages() == {"rowwise": True, "columnwise": True}
    row.set_usage(rowwise=False)
    assert q.rowwise_quantizer.rowwise_usage
    frozen = mf.MXFP8Quantizer(E4M3)
    frozen.__fx_repr__()
    assert make(frozen, mf.NVFP4Quantizer()) == hybrid()


@pytest.mark.parametrize(
    "usages, present",
    [((True, False), ["row"]), ((False, True), ["col"]), ((True, True), ["row", "col"])],
)
def test_usages(usages: tuple[bool, bool], present: list[str]) -> None:
    q = hybrid()
    q.set_usage(rowwise=usages[0], columnwise=usages[1])
    made = q.quantize(sample(33, 48))
    assert made.get_usages() == {"rowwise": usages[0], "columnwise": usages[1]}
    assert (made.rowwise_sub_storage is not None) is ("row" in present)
    assert (made.columnwise_sub_storage is not None) is ("col" in present)
    names = list(q.inner_tensor_specs((33, 48)))
    assert names == list(buffers(made))
    assert {n[1:4] for n in names} == set(present)


def test_value_semantics_follow_the_parts() -> None:
    assert hybrid() == hybrid()
    assert hybrid() != hybrid(columnwise_source="rowwise_dequantized")
    assert hybrid() != make(mf.MXFP8Quantizer(E5M2), mf.NVFP4Quantizer())
    assert hybrid() != make(mf.MXFP8Quantizer(E4M3), mf.NVFP4Quantizer(with_2d_quantization=True))
    live = make(delayed(), mf.MXFP8Quantizer(E4M3))
    assert live._value_fields() is None
    q = hybrid()
    q.rowwise_quantizer.with_2d_quantization = True
    assert q != hybrid()


def test_delayed_parts_stay_live() -> None:
    part = delayed()
    q = make(part, mf.MXFP8Quantizer(E4M3))
    x = sample(4, 32)
    dst = q.quantize(x)
    assert torch.equal(part.amax, x.abs().max().reshape(1))
    assert q.copy().rowwise_quantizer.amax is part.amax
    part.amax.zero_()
    q.calibrate(2 * x)
    assert torch.equal(part.amax, 2 * x.abs().max().reshape(1))

    before = snapshot(dst)
    q.update_quantized(100 * x, dst, noop_flag=torch.ones(1))
    assert same(buffers(dst), before)
    assert torch.equal(part.amax, 2 * x.abs().max().reshape(1))
    part.amax.zero_()
    with pytest.raises(ValueError, match="0-d"):
        q.quantize(torch.tensor(3.0))
    assert part.amax == 0, "refused before anything is written"


def test_swizzled_rows_cannot_be_read_back_for_the_columns() -> None:
    row = mf.MXFP8Quantizer(E4M3)
    row.optimize_for_gemm = True
    q = make(row, mf.NVFP4Quantizer(), columnwise_source="rowwise_dequantized")
    with pytest.raises(ValueError, match="columnwise_source: .*optimize_for_gemm"):
        q.quantize(sample(32, 48))
    swizzled = make(row, mf.NVFP4Quantizer()).quantize(sample(32, 48))
    assert swizzled.rowwise_sub_storage._with_gemm_swizzled_scales


def test_is_quantizable_asks_the_parts_in_use() -> None:
    q = make(mf.IdentityQuantizer(), mf.MXFP8Quantizer(E4M3))
    double = sample(4, 4).double()
    assert not q.is_quantizable(double)
    q.set_usage(columnwise=False)
    assert q.is_quantizable(double)
    assert torch.equal(q.quantize(double).dequantize(), double)


def test_requantization_safe_asks_the_parts_in_use() -> None:
    stochastic = mf.NVFP4Quantizer(stochastic_rounding=True)
    q = make(stochastic, mf.MXFP8Quantizer(E4M3))
    assert not q.is_requantization_safe()
    q.set_usage(rowwise=False)
    assert q.is_requantization_safe()
    derived = make(stochastic, mf.MXFP8Quantizer(E4M3), columnwise_source="rowwise_dequantized")
    derived.set_usage(rowwise=False)
    assert not derived.is_requantization_safe(), "the columns are made from the rows"


def test_refusals() -> None:
    q = mf.MXFP8Quantizer(E4M3)
    with pytest.raises(ValueError, match="columnwise_quantizer: the same object"):
        make(q, q)
    make(q, q.copy())
    for name, parts in (("rowwise", (object(), q)), ("columnwise", (q, "nvfp4"))):
        with pytest.raises(TypeError, match=f"{name}_quantizer: got .*a Quantizer is needed"):
            make(*parts)
    with pytest.raises(ValueError, match="columnwise_source: got 'rows'; allowed: 'original'"):
        make(q, mf.NVFP4Quantizer(), columnwise_source="rows")
