"""Rows cut out of quantized tensors."""

from __future__ import annotations

import pytest
import torch

from minifloat import UsageError
from minifloat.tensors.views import ValuesView

from .cases import BLOCKED, KINDS, assert_same, bits, quantized, values

# Rows that lie in one block of every format.
TALL = (256, 32)


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "delayed"])
def test_whole_blocks_of_rows_stay_quantized(kind: str) -> None:
    t = quantized(kind, *TALL)
    x = t.dequantize()
    for out, expected in (
        (t[128:], x[128:]), (t[:128], x[:128]), (t[-128:], x[-128:]),
        (t.narrow(0, 128, 128), x[128:]),
        *zip(t.chunk(2), x.chunk(2), strict=True),
        *zip(t.split([128, 128]), x.chunk(2), strict=True),
    ):  # fmt: skip
        assert type(out) is type(t), kind
        assert out.get_usages() == t.get_usages()
        assert torch.equal(out.dequantize(), expected)


@pytest.mark.parametrize("kind", ["block_1d", "block_2d", "mxfp8", "mxfp8_2d"])
def test_a_slice_equals_quantizing_the_slice(kind: str) -> None:
    assert_same(quantized(kind, *TALL)[128:], KINDS[kind]().quantize(values(*TALL)[128:]))


@pytest.mark.parametrize("kind", ["nvfp4", "nvfp4_2d", "nvfp4_rht", "current"])
@pytest.mark.parametrize("shape", [(64, 48), (4, 32, 48), (40, 33)])
def test_column_copies_are_sliced_too(kind: str, shape: tuple[int, ...]) -> None:
    t = quantized(kind, *shape)
    half = shape[0] // 2 if len(shape) > 2 else 32
    for piece, start, end in ((t[:half], 0, half), (t[half:], half, shape[0])):
        columns = piece.operand(True)
        # The same amax, so the same codes as the slice quantized under it.
        whole = t.operand(True)
        inner = values(*shape).reshape(-1, shape[-1]).shape[0] // shape[0]
        per = 2 if "nvfp4" in kind else 1
        expected = whole.data[:, start * inner // per : -(-end * inner // per)]
        assert torch.equal(columns.data[:, : expected.shape[1]], expected)
        assert (
            columns.data.shape
            == KINDS[kind]().quantize(values(*piece.shape)).operand(True).data.shape
        )


@pytest.mark.parametrize("kind", BLOCKED)
def test_a_cut_block_is_dequantized(kind: str) -> None:
    t = quantized(kind, *TALL)
    piece = t[7:23]
    assert type(piece) is ValuesView
    assert torch.equal(piece, t.dequantize()[7:23])
    assert all(type(p) is ValuesView for p in t.split(100))


@pytest.mark.parametrize("kind", ["current", "delayed", "identity"])
def test_any_rows_of_a_tensor_with_one_scale(kind: str) -> None:
    t = quantized(kind, 5, 3, 4)
    x = t.dequantize()
    for index in (slice(1, 2), slice(-2, None), slice(3, 99), slice(4, 2), 2, -1):
        piece = t[index]
        assert type(piece) is type(t)
        assert torch.equal(piece.dequantize(), x[index])
    assert [tuple(p.shape) for p in t.split(2)] == [(2, 3, 4), (2, 3, 4), (1, 3, 4)]
    flat = quantized(kind, 7)
    assert torch.equal(flat[2:5].dequantize(), flat.dequantize()[2:5])
    with pytest.raises(IndexError):
        t[5]


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_a_flat_view(kind: str) -> None:
    """They lie across the rows that the buffers are laid out for."""
    t = quantized(kind, 8, 32)
    flat, x = t.view(-1), t.dequantize().view(-1)
    for index in (slice(2, 5), slice(5, 70), slice(250, None), 37):
        assert torch.equal(flat[index] + 0, x[index])
    for piece, expected in zip(flat.split(100), x.split(100), strict=True):
        assert torch.equal(piece + 0, expected)


def test_a_slice_of_the_transpose_matches() -> None:
    t = quantized("current", 6, 3, 4)
    piece = t[2:4]
    assert tuple(piece._transpose.shape) == (4, 2, 3)
    rows = piece._data.reshape(6, 4)
    assert torch.equal(piece._transpose.reshape(4, 6), rows.t())


@pytest.mark.parametrize("kind", ["current", "mxfp8", "nvfp4_2d", "block_2d", "hybrid"])
def test_rows_refuse_values_that_the_rest_would_not_see(kind: str) -> None:
    t = quantized(kind, *TALL)
    before = bits(t)
    rows = t[:128]
    for write in (
        lambda: rows.copy_(values(128, 32)), lambda: rows.copy_(quantized(kind, 128, 32)),
        lambda: rows.quantize_(values(128, 32)), lambda: rows.detach().mul_(2),
        lambda: rows.view(2, 64, 32).zero_(), lambda: torch.nn.Parameter(rows).data.add_(1),
    ):  # fmt: skip
        with pytest.raises(UsageError, match="larger tensor"):
            write()
    assert bits(t) == before
    rows.clone().mul_(2)
    t[:].copy_(values(*TALL, seed=1))
    assert_same(t, quantized(kind, *TALL, seed=1))


def test_rows_without_a_scale_are_written_through() -> None:
    t = quantized("identity")
    t[3:5].copy_(torch.ones(2, 48))
    assert torch.equal(t.dequantize()[3:5], torch.ones(2, 48))


def test_zeros_may_be_filled_in_one_piece() -> None:
    t, src = quantized("current", 3, 8), quantized("current", 2, 8)
    zeros = t.new_zeros((3, 8))
    zeros[:2].copy_(src)
    assert torch.equal(zeros[:2].dequantize(), src.dequantize())
    assert torch.equal(zeros.dequantize()[2], torch.zeros(8))
    assert torch.equal(zeros._transpose, zeros._data.t())
    zeros[:2].copy_(src)
    with pytest.raises(UsageError, match="larger tensor"):
        zeros[2:].copy_(t[2:])


@pytest.mark.parametrize("kind", KINDS)
def test_index_assignment_requantizes(kind: str) -> None:
    t = quantized(kind)
    for index, value in ((3, 5.0), ((slice(10, 20), slice(4, 9)), torch.ones(5)), (-1, values(48))):
        x = t.dequantize()
        x[index] = value
        t[index] = value
        assert_same(t, KINDS[kind]().quantize(x))
