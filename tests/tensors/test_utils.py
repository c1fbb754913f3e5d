"""Weights of a distributed optimizer: raw data, sharded masters, derived copies."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from minifloat.tensors import utils

from . import world
from .cases import KINDS, SQUARE, assert_same, bits, delayed, quantized, values


# ------------------------------------------------------------------------------------ raw data
@pytest.mark.parametrize("kind", SQUARE)
def test_raw_data_moves_into_a_given_buffer(kind: str) -> None:
    t = quantized(kind)
    attr = t._ATTR["row_data"]
    buffer = torch.zeros(4 * 64 * 48, dtype=torch.uint8)
    new = buffer[16 : 16 + getattr(t, attr).numel()].view(getattr(t, attr).shape)
    utils.replace_raw_data(t, new)
    assert_same(t, quantized(kind))
    assert getattr(t, attr).data_ptr() == buffer.data_ptr() + 16
    assert buffer.any()


@pytest.mark.parametrize(
    ("tensor", "complaint"),
    [
        (lambda: quantized("mxfp8"), "single data buffer"),
        (lambda: quantized("current", rowwise=False), "single data buffer"),
        (lambda: quantized("hybrid"), "one format"),
        (lambda: values(64, 48), "got Tensor"),
    ],
)
def test_raw_data_that_does_not_say_it_all(tensor: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        utils.replace_raw_data(tensor(), torch.zeros(64, 48, dtype=torch.uint8))


def test_raw_data_of_another_shape() -> None:
    t = quantized("current")
    before = bits(t)
    for new in (torch.zeros(48, 64, dtype=torch.uint8), torch.zeros(64, 48)):
        with pytest.raises(ValueError, match="new_raw_data"):
            utils.replace_raw_data(t, new)
    assert bits(t) == before


# -------------------------------------------------------------------------------- derived copies
@pytest.mark.parametrize("kind", SQUARE)
def test_column_copies_are_made_anew(kind: str) -> None:
    t, other = quantized(kind), quantized(kind, seed=1)
    for name, buffer in t._buffers().items():
        if not name.startswith(("_transpose", "_columnwise", "_amax_columnwise")):
            buffer.copy_(getattr(other, name))
    utils.post_all_gather_processing(t)
    assert_same(t, other)
    utils.clear_columnwise_cache([t])
    assert_same(t, quantized(kind, seed=1, columnwise=False))
    utils.post_all_gather_processing([t])
    assert_same(t, other)


def test_copies_that_follow_from_nothing_stay() -> None:
    t = quantized("mxfp8")
    utils.clear_columnwise_cache([t])
    utils.post_all_gather_processing([t])
    assert_same(t, quantized("mxfp8"))
    one = quantized("current", columnwise=False)
    utils.post_all_gather_processing([one])
    assert one._transpose is None  # its quantizer does not ask for it


def test_custom_objects_say_so() -> None:
    quantizer, t = KINDS["current"](), quantized("current")
    plain = torch.nn.Parameter(values(1))
    assert not any(utils.is_custom(x) for x in (None, values(1), plain, quantizer, t))
    quantizer.custom = True
    assert utils.is_custom(quantizer)
    with pytest.raises(TypeError, match="got str"):
        utils.is_custom("x")


# ------------------------------------------------------------------------------- master weights
SHARDED = (*SQUARE, "mxfp8", "nvfp4_rows_only", "nvfp4_row_scaled", "block_1d_rows", "identity")
MAKE: dict[str, Any] = {
    **KINDS,
    "nvfp4_rows_only": partial(KINDS["nvfp4"], columnwise=False),
    "nvfp4_row_scaled": partial(KINDS["nvfp4_rows"], columnwise=False),
    "block_1d_rows": partial(KINDS["block_1d"], columnwise=False),
}


@pytest.mark.parametrize("kind", SHARDED)
def test_one_owner_of_everything(kind: str) -> None:
    x = values(64, 48, seed=1)
    t = MAKE[kind]().quantize(values(64, 48))
    utils.quantize_master_weights([t], [x.view(-1)], [0], None)
    utils.post_all_gather_processing([t])
    assert_same(t, MAKE[kind]().quantize(x))


@pytest.mark.parametrize(
    ("kind", "master", "start", "complaint"),
    [
        ("current", values(48), None, "start_offsets"),
        ("current", None, 0, "start_offsets"),
        ("current", values(64 * 48), 1, "outside"),
        ("current", values(3), -1, "outside"),
        ("nvfp4_2d", values(4), 3, "cut a byte"),
        ("nvfp4_rht", values(4), 2, "columnwise copy of nvfp4"),
        ("nvfp4_4over6", values(4), 2, "4-over-6"),
        ("hybrid", values(4), 2, "one format"),
    ],
)
def test_shards_that_make_no_sense(kind: str, master: Any, start: Any, complaint: str) -> None:
    t = quantized(kind)
    before = bits(t)
    with pytest.raises(ValueError, match=complaint):
        utils.quantize_master_weights([t], [master], [start], None)
    assert bits(t) == before


def test_lists_of_unequal_length() -> None:
    with pytest.raises(ValueError, match="must agree"):
        utils.quantize_master_weights([quantized("current")], [], [], None)


def test_the_old_name() -> None:
    t, x = quantized("current"), values(64, 48, seed=1)
    with pytest.warns(DeprecationWarning, match="quantize_master_weights"):
        utils.cast_master_weights_to_fp8([t], [x], [0], None)
    assert_same(t, quantized("current", seed=1, columnwise=False))


# Cuts that respect neither rows nor blocks, and one that gives a rank nothing.
SHAPES = ((64, 48), (3, 5, 34), (160, 40))
CUTS = (1002, 0, 3300)


def check_masters(kind: str, rank: int, as_shards: bool = False, manual: bool = False) -> None:
    group = torch.distributed.group.WORLD
    weights, masters, starts, shards = [], [], [], []
    full = [values(*shape, seed=i + 10) for i, shape in enumerate(SHAPES)]
    for x, at in zip(full, CUTS, strict=True):
        weights.append(MAKE[kind]().quantize(torch.ones(x.shape)))
        flat = x.reshape(-1)
        start, end = (0, at) if rank == 0 else (at, flat.numel())
        owned = end > start
        masters.append(flat[start:end].clone() if owned else None)
        starts.append(start if owned else None)
        t = weights[-1]
        per = 2 if "nvfp4" in kind else 1
        shard = torch.zeros((end - start) // per, dtype=t._part("row_data").dtype)
        shards.append([shard, shard.clone()])
    transposes = [t._part("col_data") for t in weights]
    utils.quantize_master_weights(
        weights, masters, starts, group, shards if as_shards else None, manual
    )
    for i, (t, x, at) in enumerate(zip(weights, full, CUTS, strict=True)):
        derived = t._derivable("col")
        if derived:
            assert t._part("col_data") is (transposes[i] if manual else None)
        per = 2 if "nvfp4" in kind else 1
        copies = ["row"] if derived or not t._has("col") else ["row", "col"]
        for copy in copies:
            data = t._part(f"{copy}_data").view(-1)
            mine = slice(0, at // per) if rank == 0 else slice(at // per, None)
            kept = torch.zeros_like(data)
            kept[mine] = shards[i][copies.index(copy)] if as_shards else data[mine]
            torch.distributed.all_reduce(kept)
            data.copy_(kept)
        utils.post_all_gather_processing(t)
        assert_same(t, MAKE[kind]().quantize(x))


def check_delayed_amax(rank: int) -> None:
    quantizer = delayed()
    t = quantizer.quantize(torch.zeros(4, 4))
    x = values(4, 4)
    flat = x.view(-1)[8 * rank : 8 * rank + 8]
    utils.quantize_master_weights([t], [flat], [8 * rank], torch.distributed.group.WORLD)
    assert quantizer.amax.item() == x.abs().max()


CHECKS: world.Checks = {
    **{kind: partial(check_masters, kind) for kind in SHARDED if kind != "identity"},
    "shards": partial(check_masters, "mxfp8", as_shards=True),
    "shards_2d": partial(check_masters, "nvfp4_2d", as_shards=True),
    "manual": partial(check_masters, "block_2d", manual=True),
    "delayed_amax": check_delayed_amax,
}


@pytest.mark.parametrize("name", CHECKS)
def test_sharded_masters_equal_the_whole(name: str) -> None:
    world.passes(__name__, "CHECKS", name)
