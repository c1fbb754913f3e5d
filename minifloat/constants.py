"""`constants`: Transformer Engine's names for numbers that are ours as well."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch

from .dtypes import DType, TE_DType, TE_DType_To_Torch
from .formats import FORMATS

__all__ = [
    "MXFP8_BLOCK_SCALING_SIZE",
    "NVFP4_BLOCK_SCALING_SIZE",
    "DType",
    "FP8BwdTensorIdx",
    "FP8FwdTensorIdx",
    "TE_DType",
    "TE_DType_To_Torch",
    "dist_group_type",
]


def _block(name: str) -> int:
    """Elements that share a scale."""
    tile = FORMATS[name].tile
    assert tile is not None
    return tile[1]


MXFP8_BLOCK_SCALING_SIZE = _block("mxfp8_e4m3")
NVFP4_BLOCK_SCALING_SIZE = _block("nvfp4")


class FP8FwdTensorIdx(IntEnum):
    """Slots of forward, three to a product; `quantizers["scaling_fwd"]` has the first three."""

    GEMM1_INPUT = 0
    GEMM1_WEIGHT = 1
    GEMM1_OUTPUT = 2
    GEMM2_INPUT = 3
    GEMM2_WEIGHT = 4
    GEMM2_OUTPUT = 5
    GEMM3_OUTPUT = 8


class FP8BwdTensorIdx(IntEnum):
    """Slots of backward, two to a product; `quantizers["scaling_bwd"]` has the first two."""

    GRAD_OUTPUT1 = 0
    GRAD_INPUT1 = 1
    GRAD_OUTPUT2 = 2
    GRAD_INPUT2 = 3
    GRAD_OUTPUT3 = 4
    GRAD_INPUT3 = 5


# A build without torch.distributed has no groups, and no type of them.
dist_group_type: Any = getattr(torch.distributed, "ProcessGroup", None)
