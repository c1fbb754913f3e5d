"""FP8 with a scale per block of 128: lines or squares."""

from __future__ import annotations

import inspect

import pytest
import torch

from minifloat import DType, Float8BlockQuantizer, reference
from minifloat.formats import Cast

from .cases import E4M3, E5M2, sample


def test_signature() -> None:
    parameters = inspect.signature(Float8BlockQuantizer).parameters
    assert parameters["fp8_dtype"].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert {
        n: p.default for n, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY
    } == {
        "rowwise": True,
        "columnwise": True,
        "amax_epsilon": 0.0,
        "force_pow_2_scales": True,
        "block_scaling_dim": 2,
    }
    q = Float8BlockQuantizer(E4M3, rowwise=True, columnwise=False)
    assert q.block_len == 128
    assert q.get_usages() == {"rowwise": True, "columnwise": False}
    assert not hasattr(q, "all_gather_usage")


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("dtype, tag", [(E4M3, "e4m3"), (E5M2, "e5m2")])
def test_quantize(dtype: DType, tag: str, pow2: bool, dim: int) -> None:
    q = Float8BlockQuantizer(
        dtype, force_pow_2_scales=pow2, block_scaling_dim=dim, amax_epsilon=0.25
    )
    x = sample(150, 260)
    x[:140, :130] /= 100  # a block whose amax is raised to epsilon
    made = q.quantize(x)
    cast = Cast(f"fp8_{tag}_{'1x128' if dim == 1 else '128x128'}", pow2=pow2, eps=0.25)
    for col, data, scale in (
        (False, made._rowwise_data, made._rowwise_scale_inv),
        (True, made._columnwise_data, made._columnwise_scale_inv),
    ):
        codes, scales, _ = reference.quantize(x, cast, col=col)
        assert torch.equal(data, codes)
        assert torch.equal(scale, scales)
    assert made._is_2D_scaled is (dim == 2)
    assert made._fp8_dtype is dtype
    if dim == 2:
        assert torch.equal(made._columnwise_data, made._rowwise_data.t())


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("shape", [(150, 260), (2, 75, 260), (128, 128), (1, 1), (7,)])
def test_shapes(shape: tuple[int, ...], dim: int) -> None:
    q = Float8BlockQuantizer(E4M3, block_scaling_dim=dim)
    made = q.quantize(sample(*shape))
    assert tuple(q.get_scale_shape(shape, False)) == tuple(made._rowwise_scale_inv.shape)
    assert tuple(q.get_scale_shape(shape, True)) == tuple(made._columnwise_scale_inv.shape)
    assert tuple(q.get_columnwise_shape(shape)) == tuple(made._columnwise_data.shape)
    assert tuple(made._rowwise_data.shape) == shape


def test_scale_shapes_are_the_contracts() -> None:
    m, k = 150, 260
    lines = Float8BlockQuantizer(E4M3, block_scaling_dim=1)
    assert tuple(lines.get_scale_shape((m, k), False)) == (3, 152)
    assert tuple(lines.get_scale_shape((m, k), True)) == (2, 260)
    squares = Float8BlockQuantizer(E4M3, block_scaling_dim=2)
    assert tuple(squares.get_scale_shape((m, k), False)) == (2, 4)
    assert tuple(squares.get_scale_shape((m, k), True)) == (3, 4)


@pytest.mark.parametrize("bad", [0, 3, "1", None])
def test_other_dims_are_refused(bad: object) -> None:
    with pytest.raises(ValueError, match=r"block_scaling_dim: got .*; allowed: 1 \(1x128\), 2"):
        Float8BlockQuantizer(E4M3, block_scaling_dim=bad)  # type: ignore[arg-type]
