"""Scale bytes `[R, C]` -> the 128x4-tiled layout that block-scaled tensor cores read."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from .variant import Config, Launch, Variant

__all__ = ["swizzle", "variants"]

CONFIG = Config(128, 64, 4)  # 16 tiles of 512 bytes; to be measured


@triton.jit
def swizzle_kernel(scale, out, R, C, stride_r, stride_c, T: tl.constexpr):
    """T tiles of 128x4, zero past [R, C): byte `16a + 4b + j` of a tile is element (32b + a, j)."""
    n_t = tl.cdiv(C, 4)
    n_p = tl.cdiv(n_t, T)
    i_r = (tl.program_id(0) // n_p).to(tl.int64)
    i_t = (tl.program_id(0) % n_p).to(tl.int64) * T
    o = tl.arange(0, T * 512)
    o_r = i_r * 128 + (o % 16 // 4) * 32 + o % 512 // 16
    o_c = i_t * 4 + o // 512 * 4 + o % 4
    m_in = (o_r < R) & (o_c < C)
    b_s = tl.load(scale + o_r * stride_r + o_c * stride_c, mask=m_in, other=0)  # [512 T]
    tl.store(out + (i_r * n_t + i_t) * 512 + o, b_s, mask=i_t + o // 512 < n_t)


def swizzle(scale: Tensor, out: Tensor) -> None:
    """uint8 `scale[R, C]`, any strides -> contiguous `out[R up to 128, C up to 4]`."""
    if scale.numel() > 0:
        _swizzle(scale, out).run()


def _swizzle(scale: Tensor, out: Tensor, config: Config = CONFIG) -> Launch:
    r, c = scale.shape
    args = {
        "scale": scale, "out": out, "R": r, "C": c,
        "stride_r": scale.stride(0), "stride_c": scale.stride(1), "T": config.k // 4,
    }  # fmt: skip
    return Launch(swizzle_kernel, config.tiles(r, c), args, config)


def variants() -> Iterator[Variant]:
    """Contraction-last scales, their transposed views, and shapes that need padding."""
    for r, c in ((4096, 128), (300, 7)):
        scale = torch.empty(r, c, dtype=torch.uint8, device="meta")
        yield Variant.of(f"swizzle_{r}x{c}", _swizzle(scale, scale))
        view = torch.empty(c, r, dtype=torch.uint8, device="meta").t()
        yield Variant.of(f"swizzle_{r}x{c}_view", _swizzle(view, scale))
