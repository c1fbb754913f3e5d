"""What this device multiplies natively, the recipe for it, and what recipes say about dtypes.

Every recipe runs on every device: a format without tensor cores for it is emulated exactly. So
these functions tell how it runs, and nobody has to ask. They are constants in traced code.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch

from .. import env
from ..dtypes import DType
from ..formats import FORMATS
from ..opaque import Value, register
from .base import Recipe
from .recipes import Float8CurrentScaling, MXFP8BlockScaling
from .types import Format

__all__ = [
    "check_fp8_block_scaling_support",
    "check_fp8_support",
    "check_mxfp8_support",
    "check_nvfp4_support",
    "check_recipe_support",
    "get_align_size_for_quantization",
    "get_default_fp8_recipe",
    "get_default_recipe",
    "get_device_compute_capability",
    "get_fp4_te_dtype",
    "get_fp8_max",
    "get_fp8_te_dtype",
    "get_fp8_torch_dtype",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
]


class _Device(Value):
    """The current device; a value, so that traced code runs `support` for real."""

    def support(self, format_name: str, title: str) -> tuple[bool, str]:
        """(whether tensor cores multiply the format here, "" or why not and what happens)."""
        native = FORMATS[format_name].native
        assert native is not None
        capability = env.capability("cuda") if torch.cuda.is_available() else None
        low, high = native
        if capability is not None and low <= capability < high:
            return True, ""
        here = "this machine has no CUDA device" if capability is None else f"sm_{capability}"
        lacks = "" if capability is None else f" has no tensor cores for {title}"
        need = f"sm_{low}" + (f" to below sm_{high}" if high < 1000 else " or later")
        return False, (f"{here}{lacks}: minifloat emulates {title} exactly here; native on {need}")


register(_Device, real=("support", "_key", "__eq__"))
_DEVICE = _Device()
_FP8 = ("fp8_e4m3", "FP8")
_BLOCK = ("fp8_e4m3_1x128", "FP8 block scaling")
_MXFP8 = ("mxfp8_e4m3", "MXFP8")
_NVFP4 = ("nvfp4", "NVFP4")
_WHERE_MXFP8_IS_NATIVE, _ELSEWHERE = MXFP8BlockScaling(), Float8CurrentScaling()


@overload
def is_fp8_available(return_reason: Literal[False] = False) -> bool: ...
@overload
def is_fp8_available(return_reason: Literal[True]) -> tuple[bool, str]: ...
def is_fp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether the current device multiplies FP8 natively; with the reason why not."""
    checked = check_fp8_support()
    return checked if return_reason else checked[0]


@overload
def is_mxfp8_available(return_reason: Literal[False] = False) -> bool: ...
@overload
def is_mxfp8_available(return_reason: Literal[True]) -> tuple[bool, str]: ...
def is_mxfp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether the current device multiplies MXFP8 natively; with the reason why not."""
    checked = check_mxfp8_support()
    return checked if return_reason else checked[0]


@overload
def is_nvfp4_available(return_reason: Literal[False] = False) -> bool: ...
@overload
def is_nvfp4_available(return_reason: Literal[True]) -> tuple[bool, str]: ...
def is_nvfp4_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether the current device multiplies NVFP4 natively; with the reason why not."""
    checked = check_nvfp4_support()
    return checked if return_reason else checked[0]


@overload
def is_fp8_block_scaling_available(return_reason: Literal[False] = False) -> bool: ...
@overload
def is_fp8_block_scaling_available(return_reason: Literal[True]) -> tuple[bool, str]: ...
def is_fp8_block_scaling_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether the current device multiplies FP8 blocks natively; with the reason why not."""
    checked = check_fp8_block_scaling_support()
    return checked if return_reason else checked[0]


@overload
def is_bf16_available(return_reason: Literal[False] = False) -> bool: ...
@overload
def is_bf16_available(return_reason: Literal[True]) -> tuple[bool, str]: ...
def is_bf16_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether the current device multiplies bf16 (a CPU does, too); with the reason why not."""
    capability = get_device_compute_capability()
    found = capability == (0, 0) or capability >= (8, 0)
    reason = "" if found else f"sm_{capability[0]}{capability[1]} has no bf16; sm_80 or later has"
    return (found, reason) if return_reason else found


def get_device_compute_capability() -> tuple[int, int]:
    """(major, minor) of the current CUDA device; (0, 0), less than any, where there is none."""
    capability = env.capability("cuda") if torch.cuda.is_available() else None
    return divmod(capability or 0, 10)


def check_fp8_support() -> tuple[bool, str]:
    return _DEVICE.support(*_FP8)


def check_mxfp8_support() -> tuple[bool, str]:
    return _DEVICE.support(*_MXFP8)


def check_nvfp4_support() -> tuple[bool, str]:
    return _DEVICE.support(*_NVFP4)


def check_fp8_block_scaling_support() -> tuple[bool, str]:
    return _DEVICE.support(*_BLOCK)


def check_recipe_support(recipe: Recipe) -> None:
    """Nothing: every recipe runs on every device, natively or emulated."""


def get_default_recipe() -> Recipe:
    """What autocast takes without a recipe: MXFP8 where it is native, else current scaling."""
    return _WHERE_MXFP8_IS_NATIVE if is_mxfp8_available() else _ELSEWHERE


get_default_fp8_recipe = get_default_recipe


def get_align_size_for_quantization(recipe: Recipe) -> int:
    """What modules that pad tokens pad them to."""
    if recipe.custom():
        size: int = recipe.quantization_alignment  # type: ignore[attr-defined]
        return size
    return 32 if recipe.mxfp8() else 128 if recipe.nvfp4() else 16


def get_fp8_torch_dtype(recipe: Recipe, fprop_tensor: bool = True) -> torch.dtype:
    """The FP8 dtype of tensors of forward, or of backward."""
    dtype: torch.dtype = recipe._of_element("torch_dtype", fprop_tensor)
    return dtype


def get_fp8_te_dtype(recipe: Recipe, fprop_tensor: bool = True) -> DType:
    """The FP8 element of tensors of forward, or of backward."""
    dtype: DType = recipe._of_element("dtype", fprop_tensor)
    return dtype


def get_fp8_max(recipe: Recipe, fprop_tensor: bool = True) -> float:
    """The largest FP8 value of tensors of forward, or of backward."""
    largest: float = recipe._of_element("max", fprop_tensor)
    return largest


def get_fp4_te_dtype(recipe: Recipe) -> DType:
    """The FP4 element of a recipe that has one; ValueError otherwise."""
    fmt: Any = getattr(recipe, "fp4_format", None)
    if fmt is not Format.E2M1:
        raise ValueError(f"recipe: {recipe!r} has no FP4 format; NVFP4BlockScaling has")
    return DType.kFloat4E2M1
