"""Groups of every kind of quantized tensor that can be a member, and how to compare two of them."""

from __future__ import annotations

from typing import Any

import torch

from minifloat import GroupedTensorStorage

from .cases import KINDS, assert_same, values

# A group holds one element format. Rows with scales of their own have no column copy.
GROUPS = tuple(k for k in KINDS if not k.startswith(("identity", "hybrid")))
# One for each set of buffers: one scale, live state, tiles, packed codes, transformed columns.
SOME = ("current", "delayed", "block_1d", "mxfp8", "nvfp4_rht")


def quantizer_of(kind: str, **kwargs: Any) -> Any:
    if kind == "nvfp4_rows":
        kwargs.setdefault("columnwise", False)
    return KINDS[kind](**kwargs)


def group_of(kind: str, num: int = 3, shape: tuple[int, int] = (33, 17), **kwargs: Any) -> Any:
    """(the group, its members' values): equal members; `internal=True` gives the bare storage."""
    internal, seed = kwargs.pop("internal", False), kwargs.pop("seed", 0)
    quantizer = quantizer_of(kind, **kwargs)
    quantizer.internal = internal
    tensors = [values(*shape, seed=seed + i) for i in range(num)]
    group = GroupedTensorStorage.make_grouped_tensor_with_shapes(
        num, [shape] * num, quantizer, device="cpu", dtype=torch.float32
    )
    group.quantize(tensors)
    return group, tensors


def assert_same_group(a: Any, b: Any) -> None:
    """Equal class, shape, dtype and sizes, and members with equal bits."""
    assert type(a) is type(b)
    assert tuple(a.shape) == tuple(b.shape)
    assert a.logical_shape == b.logical_shape
    assert a.fake_dtype == b.fake_dtype
    for name in ("first_dims", "last_dims", "tensor_offsets"):
        left, right = getattr(a, name), getattr(b, name)
        assert (left is None) == (right is None)
        assert left is None or torch.equal(left, right)
    ours, theirs = a.split_into_quantized_tensors(), b.split_into_quantized_tensors()
    assert len(ours) == len(theirs) == a.num_tensors
    for mine, other in zip(ours, theirs, strict=True):
        if a.quantizer is None:
            assert torch.equal(mine, other)
        else:
            assert_same(mine, other)
