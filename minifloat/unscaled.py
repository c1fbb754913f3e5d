"""Products that leave their global scale to who reads them: see `Scaled`.

    unscaled(a, b, dtype).value() == gemm(a, b, dtype)

bit for bit: what is handed over is what `gemm` would have scaled in one more pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import library, native
from .alpha import number
from .emulated import compute_dtype, product, values
from .formats import Operand
from .gemm import OPERANDS, check, fake, flat, gemm
from .scaled import Scaled

__all__ = ["unscaled"]


def unscaled(
    a: Operand, b: Operand, out_dtype: torch.dtype, *, fast: bool = False
) -> Tensor | Scaled:
    """`a b^T`, `Scaled` where its numbers are global scales that no tensor core multiplies by.

    And where `gemm` scales what is rounded to `out_dtype` already. Any other product is `gemm`'s.
    """
    if not _leaves_number(a, b, out_dtype):
        return gemm(a, b, out_dtype, fast=fast)
    if library.traced():
        made = library.op("gemm_unscaled")(*flat(a), *flat(b), out_dtype)
        return Scaled(*made)
    check(a, b)
    return Scaled(*_unscaled(a, b, out_dtype))


def _leaves_number(a: Operand, b: Operand, out_dtype: torch.dtype) -> bool:
    for o in (a, b):
        *_, two_level, _, row_scaled, _, _ = o.cast.layout
        if not two_level or row_scaled or o.amax is None:
            return False
    device = a.data.device
    if native.is_native(a.cast, device) and native.is_native(b.cast, device):
        return False
    # What `gemm` scales is of the dtype that values are multiplied in, or else fp32.
    return out_dtype is torch.float32 or (out_dtype is torch.bfloat16 and device.type == "cuda")


def _unscaled(a: Operand, b: Operand, out_dtype: torch.dtype) -> list[Tensor]:
    """[the product of the values, the number that multiplies it]."""
    dtype = compute_dtype(a, b)
    y = product(values(a, dtype), values(b, dtype), out_dtype, None)
    (sa, fa), (sb, fb) = number(a), number(b)  # type: ignore[misc]
    return [y, sa * sb * (fa * fb)]


def _unscaled_op(*args: Any) -> list[Tensor]:
    return _unscaled(Operand(*args[:7]), Operand(*args[7:14]), args[14])


def _unscaled_fake(*args: Any) -> list[Tensor]:
    y = fake(*args)
    return [y, y.new_empty(1, dtype=torch.float32)]


library.define(
    (
        (
            f"gemm_unscaled({OPERANDS}, ScalarType out_dtype) -> Tensor[]",
            _unscaled_op,
            _unscaled_fake,
        ),
    ),
    replayed=True,
)
