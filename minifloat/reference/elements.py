"""Codes of the element formats: saturating round-to-nearest-even, stochastic rounding, decoding."""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import Element

__all__ = ["decode", "encode", "pack", "unpack"]

_NAN8 = 0x7F  # the NaN code hardware casts give, whatever the sign of the input NaN
_MAX4 = 0x7  # E2M1 has no NaN; hardware casts give +6
_VALUES4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def encode(x: Tensor, element: Element, u: Tensor | None = None) -> Tensor:
    """fp32 values -> uint8 codes (unpacked), saturating at +-max.

    To nearest even; or stochastically, by uniforms `u` in (0, 1).

    The clamp comes first: PyTorch 2.11 casts what overflows to NaN, 2.13 saturates.
    """
    if element.torch_dtype is None:
        return _encode4(x, element, u)
    if u is not None:
        raise ValueError(f"stochastic rounding is defined for 4-bit elements, not {element.name}")
    codes = x.clamp(-element.max, element.max).to(element.torch_dtype).view(torch.uint8)
    return torch.where(x.isnan(), _NAN8, codes)


def _encode4(x: Tensor, element: Element, u: Tensor | None) -> Tensor:
    """E2M1: the grid's step is 0.5 below 2, 1 below 4, 2 above, so codes are `base + |x|/step`.

    To nearest, ties to the even code. Stochastic: up with probability frac(|x|/step).
    """
    a = x.abs().clamp(max=element.max)
    step = torch.where(a < 2, 2.0, torch.where(a < 4, 1.0, 0.5))  # 1/step, exact
    base = torch.where(a < 2, 0.0, torch.where(a < 4, 2.0, 4.0))
    t = a * step
    if u is None:
        n = t.round()
    else:
        low = t.floor()
        n = low + (u < t - low)
    code = torch.where(x.isnan(), float(_MAX4), n + base)
    sign = torch.where(x.isnan(), False, x.signbit())
    return code.to(torch.uint8) | (sign.to(torch.uint8) << 3)


def decode(codes: Tensor, element: Element) -> Tensor:
    """uint8 codes (unpacked) -> fp32 values, exactly."""
    if element.torch_dtype is None:
        c = (codes & 7).to(torch.float32)
        # Piecewise linear in the code: no table lookup, so it fuses and traces anywhere.
        v = torch.where(c < 4, c * 0.5, torch.where(c < 6, c - 2, c * 2 - 8))
        return torch.where(codes > 7, -v, v)
    return codes.view(element.torch_dtype).to(torch.float32)


def pack(codes: Tensor) -> Tensor:
    """4-bit codes `[..., C]` -> bytes `[..., ceil(C/2)]`: the even index is the low nibble.

    An odd C leaves the last high nibble zero.
    """
    c = codes.shape[-1]
    codes = torch.nn.functional.pad(codes, (0, c % 2))
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(data: Tensor, columns: int) -> Tensor:
    """The inverse of `pack` for `columns` codes."""
    pairs = torch.stack((data & 15, data >> 4), dim=-1)
    return pairs.reshape(*data.shape[:-1], 2 * data.shape[-1])[..., :columns]
