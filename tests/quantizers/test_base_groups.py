"""Amax reduction over process groups, and why no value holds one."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import minifloat as mf

from ..tensors import world
from .cases import (
    E4M3,
    VALUES,
    Doubler,
    buffers,
    same,
    sample,
)


@pytest.fixture
def group() -> Iterator[Any]:
    with world.alone():
        yield dist.new_group([0])


REDUCING = [
    lambda group: mf.Float8CurrentScalingQuantizer(
        E4M3, "cpu", with_amax_reduction=True, amax_reduction_group=group
    ),
    lambda group: mf.NVFP4Quantizer(with_amax_reduction=True, amax_reduction_group=group),
    lambda group: mf.NVFP4Quantizer(
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
    monkeypatch.setattr("minifloat.collectives.all_reduce", None)
    q.update_quantized(sample(32, 48, seed=1), dst)
    assert same(buffers(dst), buffers(q.quantize(sample(32, 48, seed=1))))


def test_reduction_without_distributed_is_none() -> None:
    q = REDUCING[0](None)
    x = sample(4, 8)
    assert not dist.is_initialized()
    assert torch.equal(q.quantize(x)._data, VALUES["current"]().quantize(x)._data)


def check_reduction(rank: int) -> None:
    whole = torch.randn(2, 32, 48, generator=torch.Generator().manual_seed(0))
    whole[1] *= 5
    x = whole[rank]
    current: Any = mf.Float8CurrentScalingQuantizer(mf.DType.kFloat8E4M3, with_amax_reduction=True)
    nvfp4: Any = mf.NVFP4Quantizer(with_amax_reduction=True)
    expected: Any = mf.Float8CurrentScalingQuantizer(mf.DType.kFloat8E4M3).quantize(whole)
    for q in (current, nvfp4):
        q.amax_reduction_group = dist.group.WORLD
    made = current.quantize(x)
    assert torch.equal(made._scale_inv, expected._scale_inv)
    assert torch.equal(made._data, expected._data[rank])
    assert torch.equal(nvfp4.quantize(x)._amax_rowwise, whole.abs().max().reshape(1))
    assert torch.equal(nvfp4.quantize(x)._amax_columnwise, whole.abs().max().reshape(1))
    # The group of the destination counts where the quantizer reduces nothing.
    plain = mf.Float8CurrentScalingQuantizer(mf.DType.kFloat8E4M3)
    dst: Any = plain.make_empty(x.shape, device="cpu")
    dst.amax_reduction_group = dist.group.WORLD
    plain.update_quantized(x, dst)
    assert torch.equal(dst._data, expected._data[rank])
    # Compiled: the group travels by name.
    current.amax_reduction_group = None
    compiled = torch.compile(lambda q, t: q.quantize(t), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(current, x)._data, expected._data[rank])


CHECKS: world.Checks = {"reduction": check_reduction}


def test_reduction_over_two_ranks() -> None:
    world.passes(__name__, "CHECKS", "reduction")
