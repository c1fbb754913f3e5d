"""Padding modules: zeros between splits, and away again."""

from __future__ import annotations

import pytest
import torch

import minifloat as mf
from minifloat.recipe import Float8CurrentScaling, MXFP8BlockScaling


def test_there_and_back() -> None:
    x, splits = torch.randn(12, 3, requires_grad=True), [5, 0, 7]
    padded, sizes = mf.Fp8Padding(3, 4)(x, splits)
    assert sizes == [8, 0, 8]
    for block, part in zip(padded.split(sizes), x.split(splits), strict=True):
        assert torch.equal(block[: len(part)], part) and not block[len(part) :].any()
    out = mf.Fp8Unpadding(3, 4)(padded, splits)
    assert torch.equal(out, x)
    (grad,) = torch.autograd.grad((out * 2).sum(), x)
    assert bool((grad == 2).all())


def test_splits_of_a_tensor() -> None:
    x, splits = torch.randn(12, 3), torch.tensor([5, 0, 7])
    padded, sizes = mf.Fp8Padding(3, 4)(x, splits)
    assert sizes == [8, 0, 8] and all(type(m) is int for m in sizes)
    assert torch.equal(mf.Fp8Unpadding(3, 4)(padded, splits), x)


def test_nothing_to_pad_is_the_same_object() -> None:
    x, splits = torch.randn(12, 3), [4, 8]
    padded, sizes = mf.Fp8Padding(2, 4)(x, splits)
    assert padded is x and sizes is splits
    assert mf.Fp8Unpadding(2, 4)(x, splits) is x


def test_the_recipe_of_the_first_forward_stays() -> None:
    layer = mf.Fp8Padding(1)
    with mf.autocast(recipe=MXFP8BlockScaling()):
        assert layer(torch.randn(3, 2), [3])[1] == [32]
    with mf.autocast(recipe=Float8CurrentScaling()):
        assert layer(torch.randn(3, 2), [3])[1] == [32]
        assert mf.Fp8Padding(1)(torch.randn(3, 2), [3])[1] == [16]


def test_one_graph() -> None:
    pads, unpads = mf.Fp8Padding(2, 8), mf.Fp8Unpadding(2, 8)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def through(x: torch.Tensor) -> torch.Tensor:
        padded, _ = pads(x, [5, 2])
        return unpads(padded * 2, [5, 2])

    x = torch.randn(7, 3)
    assert torch.equal(through(x), x * 2)


def test_splits_that_a_graph_reads() -> None:
    pads, unpads = mf.Fp8Padding(2, 8), mf.Fp8Unpadding(2, 8)

    def through(x: torch.Tensor) -> torch.Tensor:
        first = int((x.detach()[:, 0] > 0).sum().item())
        splits = [first, x.shape[0] - first]
        padded, _ = pads(x, splits)
        return unpads(padded * padded, splits)

    def permuted(x: torch.Tensor) -> torch.Tensor:
        first = x.detach()[:, :1] > 0
        mask = torch.cat([first, ~first], 1)
        probs = torch.ones(mask.shape)
        rows, _, ids, offsets, _ = mf.moe_permute_and_pad_with_probs(x, probs, mask, mask.sum(0), 8)
        return mf.moe_unpermute(rows * rows, ids, pad_offsets=offsets)

    for fn in (through, permuted):
        compiled = torch.compile(fn, backend="aot_eager", fullgraph=True)
        with torch._dynamo.config.patch(capture_scalar_outputs=True):
            for rows, first in ((7, 5), (16, 8), (9, 0), (8, 8)):
                x = torch.randn(rows, 3)
                x[:, 0] = torch.where(torch.arange(rows) < first, 1.0, -1.0)
                expected, got = x.clone().requires_grad_(), x.clone().requires_grad_()
                y, z = fn(expected), compiled(got)
                y.sum().backward()
                z.sum().backward()
                assert torch.equal(y, z)
                assert expected.grad is not None and got.grad is not None
                assert torch.equal(expected.grad, got.grad)


@pytest.mark.parametrize("splits", [[5], [5, -1], [5, 6]])
def test_bad_splits(splits: list[int]) -> None:
    with pytest.raises(ValueError, match="splits"):
        mf.Fp8Padding(2, 4)(torch.randn(12, 3), splits)


def test_bad_input() -> None:
    """Half a row is no row."""
    pads, x = mf.Fp8Padding(2, 4), torch.randn(12, 3)
    for splits in ([5.5, 6.5], None, torch.tensor([5.0, 7.0])):
        with pytest.raises(TypeError, match="m_splits: got .* integers"):
            pads(x, splits)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="inp: got list"):
        pads([1.0], [5, 7])
    for name, given in (("num_gemms", {"num_gemms": 1.5}), ("align_size", {"align_size": 0})):
        with pytest.raises(ValueError, match=f"{name}: got .* an int >= 1"):
            mf.Fp8Padding(**{"num_gemms": 2, **given})
    with pytest.raises(ValueError, match="align_size: got 1.5"):
        mf.Fp8Padding(2, 1.5)  # type: ignore[arg-type]
