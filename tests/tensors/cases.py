"""Every kind of quantized tensor, and how to compare two of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from minifloat import (
    DType,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)

E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2


def delayed(**kwargs: Any) -> Float8Quantizer:
    return Float8Quantizer(torch.full((1,), 16.0), torch.zeros(1), E4M3, **kwargs)


def hybrid(rowwise: bool = True, columnwise: bool = True, **kwargs: Any) -> HybridQuantizer:
    quantizer = HybridQuantizer(
        rowwise_quantizer=MXFP8Quantizer(E4M3),
        columnwise_quantizer=Float8CurrentScalingQuantizer(E5M2),
        **kwargs,
    )
    quantizer.set_usage(rowwise=rowwise, columnwise=columnwise)
    return quantizer


KINDS: dict[str, Callable[..., Any]] = {
    "current": lambda **k: Float8CurrentScalingQuantizer(E4M3, **k),
    "delayed": delayed,
    "block_1d": lambda **k: Float8BlockQuantizer(E4M3, block_scaling_dim=1, **k),
    "block_2d": lambda **k: Float8BlockQuantizer(E4M3, force_pow_2_scales=False, **k),
    "mxfp8": lambda **k: MXFP8Quantizer(E5M2, **k),
    "mxfp8_2d": lambda **k: MXFP8Quantizer(E4M3, with_2d_quantization=True, **k),
    "nvfp4": lambda **k: NVFP4Quantizer(**k),
    "nvfp4_2d": lambda **k: NVFP4Quantizer(with_2d_quantization=True, **k),
    "nvfp4_rht": lambda **k: NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, **k),
    "nvfp4_rows": lambda **k: NVFP4Quantizer(row_scaled_nvfp4=True, **k),
    "nvfp4_4over6": lambda **k: NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_e4m3_max=256, **k),
    "identity": lambda **k: IdentityQuantizer(**k),
    "identity_bf16": lambda **k: IdentityQuantizer(dtype=torch.bfloat16, **k),
    "hybrid": hybrid,
    "hybrid_dequantized": lambda **k: hybrid(columnwise_source="rowwise_dequantized", **k),
}
# One tile serves both directions: a column copy follows from the row copy.
SQUARE = ("current", "delayed", "block_2d", "mxfp8_2d", "nvfp4_2d")
VALUES = tuple(kind for kind in KINDS if kind != "delayed")
# One of each class.
CLASSES = ("current", "block_2d", "mxfp8", "nvfp4_2d", "identity", "hybrid")
BLOCKED = ("block_1d", "block_2d", "mxfp8", "mxfp8_2d", "nvfp4", "nvfp4_2d", "nvfp4_rht")
SHAPES = ((64, 48), (33, 17), (5, 4, 33), (7,), (1, 1), (0, 16), (16, 0))


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Values over several binades, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    scale = torch.randn(shape, generator=generator).exp2()
    return (x * scale).to(dtype)


def quantized(kind: str, *shape: int, **kwargs: Any) -> Any:
    """A tensor of this kind; `internal=True` gives the bare storage."""
    internal = kwargs.pop("internal", False)
    seed = kwargs.pop("seed", 0)
    dtype = kwargs.pop("dtype", torch.float32)
    quantizer = KINDS[kind](**kwargs)
    quantizer.internal = internal
    return quantizer.quantize(values(*(shape or (64, 48)), seed=seed, dtype=dtype))


def raw(t: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor: NaNs and signed zeros compare as they are."""
    return t.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def bits(t: Any) -> dict[str, tuple[tuple[int, ...], torch.dtype, bytes]]:
    """Everything a quantized tensor holds, by attribute."""
    held = {name: b for name, b in t._buffers().items() if b is not None}
    return {n: (tuple(b.shape), b.dtype, raw(b).numpy().tobytes()) for n, b in held.items()}


def assert_same(a: Any, b: Any) -> None:
    """Equal class, shape, dtype, plain fields and bits."""
    assert type(a) is type(b)
    assert tuple(a.shape) == tuple(b.shape)
    assert a._dtype == b._dtype
    assert a._plain_kwargs() == b._plain_kwargs()
    left, right = bits(a), bits(b)
    assert list(left) == list(right)
    for name in left:
        assert left[name] == right[name], name


def shares_memory(a: Any, b: Any) -> set[str]:
    """Attributes whose buffers the two tensors share."""
    left, right = a._buffers(), b._buffers()
    return {
        n
        for n, t in left.items()
        if t is not None
        and right.get(n) is not None
        and t.untyped_storage().data_ptr() == right[n].untyped_storage().data_ptr()
    }
