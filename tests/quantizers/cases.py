"""Quantizers, comparisons and subprocesses that the tests of quantizers share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import minifloat as mf
from minifloat import DType, Quantizer

E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2
Make = Callable[[], Any]


def hybrid(**options: Any) -> mf.HybridQuantizer:
    return mf.HybridQuantizer(
        rowwise_quantizer=mf.MXFP8Quantizer(E4M3),
        columnwise_quantizer=mf.NVFP4Quantizer(),
        **options,
    )


# Every class that is a value, with its options.
VALUES: dict[str, Make] = {
    "current": lambda: mf.Float8CurrentScalingQuantizer(E4M3, "cpu"),
    "current-e5m2-pow2": lambda: mf.Float8CurrentScalingQuantizer(
        E5M2, "cpu", force_pow_2_scales=True, amax_epsilon=0.5
    ),
    "block": lambda: mf.Float8BlockQuantizer(E4M3),
    "block-1d": lambda: mf.Float8BlockQuantizer(
        E5M2, block_scaling_dim=1, force_pow_2_scales=False
    ),
    "mxfp8": lambda: mf.MXFP8Quantizer(E4M3),
    "mxfp8-2d": lambda: mf.MXFP8Quantizer(E5M2, with_2d_quantization=True),
    "nvfp4": lambda: mf.NVFP4Quantizer(),
    "nvfp4-2d": lambda: mf.NVFP4Quantizer(with_2d_quantization=True),
    "nvfp4-rht": lambda: mf.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True),
    "nvfp4-sr": lambda: mf.NVFP4Quantizer(stochastic_rounding=True),
    "nvfp4-row-scaled": lambda: mf.NVFP4Quantizer(row_scaled_nvfp4=True),
    "nvfp4-4over6": lambda: mf.NVFP4Quantizer(
        nvfp4_use_4over6=True, nvfp4_e4m3_max=256, nvfp4_4over6_err_mode="MSE"
    ),
    "identity": lambda: mf.IdentityQuantizer(),
    "identity-bf16": lambda: mf.IdentityQuantizer(dtype=torch.bfloat16),
    "hybrid": hybrid,
    "hybrid-dequantized": lambda: hybrid(columnwise_source="rowwise_dequantized"),
}
# One per class.
CLASSES = {k: VALUES[k] for k in ("current", "block", "mxfp8", "nvfp4", "identity", "hybrid")}
FOUR = {k: VALUES[k] for k in ("current", "block", "mxfp8", "nvfp4")}
SEED = torch.tensor([11, 13])


def delayed(scale: float = 2.0, **options: Any) -> mf.Float8Quantizer:
    return mf.Float8Quantizer(torch.tensor([scale]), torch.zeros(1), E4M3, **options)


def sample(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def buffers(t: Any) -> dict[str, Tensor]:
    """The inner tensors of a quantized tensor or storage, without its quantizer's live ones."""
    names, _ = t.__tensor_flatten__()
    return {n: getattr(t, n) for n in names if not n.startswith("_live_")}


def snapshot(t: Any) -> dict[str, Tensor]:
    return {n: b.clone() for n, b in buffers(t).items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Bit for bit; NaN equals itself."""
    return list(a) == list(b) and all(
        (a[n].shape, a[n].dtype) == (b[n].shape, b[n].dtype)
        and torch.equal(a[n].contiguous().view(torch.uint8), b[n].contiguous().view(torch.uint8))
        for n in a
    )


def assert_same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    assert tuple(a.shape) == tuple(b.shape)
    assert a._dtype == b._dtype
    assert same(buffers(a), buffers(b))


def run_python(code: str, **env: str) -> str:
    """What a fresh interpreter prints."""
    root = Path(mf.__file__).parents[1]
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root), **env},
        timeout=240,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


values = pytest.mark.parametrize("make", VALUES.values(), ids=VALUES.keys())
classes = pytest.mark.parametrize("make", CLASSES.values(), ids=CLASSES.keys())


def quantized(q: Any, x: Tensor) -> Any:
    return q.quantize(x, seed=SEED)


class Doubler(Quantizer):
    """What a user writes: only the work."""

    def __init__(self, factor: float = 2.0) -> None:
        super().__init__(rowwise=True, columnwise=True)
        self.factor = factor

    def quantize_impl(self, tensor: Tensor) -> Tensor:  # type: ignore[override]
        return tensor * self.factor


class Unregistered(mf.MXFP8Quantizer):
    pass
