"""`DType`: Transformer Engine's numbering of element types, as an enum that graphs can hold."""

from __future__ import annotations

import operator
from enum import IntEnum

import torch

__all__ = ["DType", "TE_DType", "TE_DType_To_Torch"]


class DType(IntEnum):
    """Element types by Transformer Engine's numbers; equal to the `int` of the same value."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10

    @classmethod
    def cast(cls, value: object) -> DType:
        """`value` (a DType, its integer, or a torch dtype) as a DType."""
        if isinstance(value, cls):
            return value
        if isinstance(value, torch.dtype):
            if value in TE_DType:
                return TE_DType[value]
        elif hasattr(value, "__index__"):
            try:
                return cls(operator.index(value))
            except ValueError:
                pass
        allowed = ", ".join(f"DType.{m.name}" for m in cls)
        raise TypeError(f"dtype: got {value!r}; allowed: {allowed}, or the matching torch dtype")


TE_DType: dict[torch.dtype, DType] = {
    torch.uint8: DType.kByte,
    torch.int32: DType.kInt32,
    torch.float32: DType.kFloat32,
    torch.float16: DType.kFloat16,
    torch.bfloat16: DType.kBFloat16,
    torch.float8_e4m3fn: DType.kFloat8E4M3,
    torch.float8_e5m2: DType.kFloat8E5M2,
}
if hasattr(torch, "float4_e2m1fn_x2"):
    TE_DType[torch.float4_e2m1fn_x2] = DType.kFloat4E2M1

TE_DType_To_Torch: dict[DType, torch.dtype] = {v: k for k, v in TE_DType.items()}
