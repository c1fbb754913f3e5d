"""DType keeps Transformer Engine's numbers and turns everything that names a dtype into one."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch

from minifloat.dtypes import DType, TE_DType, TE_DType_To_Torch

NUMBERS = {
    "kByte": 0,
    "kInt32": 2,
    "kFloat32": 4,
    "kFloat16": 5,
    "kBFloat16": 6,
    "kFloat8E4M3": 7,
    "kFloat8E5M2": 8,
    "kFloat4E2M1": 10,
}
TORCH = [
    (torch.uint8, DType.kByte),
    (torch.int32, DType.kInt32),
    (torch.float32, DType.kFloat32),
    (torch.float16, DType.kFloat16),
    (torch.bfloat16, DType.kBFloat16),
    (torch.float8_e4m3fn, DType.kFloat8E4M3),
    (torch.float8_e5m2, DType.kFloat8E5M2),
    (torch.float4_e2m1fn_x2, DType.kFloat4E2M1),
]


class Foreign:
    """Like the enum of a compiled extension: not an int, but convertible."""

    def __int__(self) -> int:
        return 7

    __index__ = __int__


def test_numbers() -> None:
    assert {m.name: m.value for m in DType} == NUMBERS


@pytest.mark.parametrize("name, number", NUMBERS.items())
def test_member_equals_its_number(name: str, number: int) -> None:
    assert DType[name] == number
    assert hash(DType[name]) == hash(number)


@pytest.mark.parametrize("member", DType)
def test_cast_of_members_and_numbers(member: DType) -> None:
    assert DType.cast(member) is member
    assert DType.cast(int(member)) is member
    assert DType.cast(np.int64(member)) is member


def test_cast_of_a_foreign_enum() -> None:
    assert DType.cast(Foreign()) is DType.kFloat8E4M3


@pytest.mark.parametrize("dtype, member", TORCH)
def test_torch_dtypes(dtype: torch.dtype, member: DType) -> None:
    assert DType.cast(dtype) is member
    assert TE_DType[dtype] is member
    assert TE_DType_To_Torch[member] is dtype


def test_the_maps_are_inverse_and_complete() -> None:
    assert len(TE_DType) == len(TE_DType_To_Torch) == len(DType)


@pytest.mark.parametrize("bad", [1, 3, 9, 11, -1, 4.7, "7", "kByte", None, torch.int64, object()])
def test_cast_refuses(bad: object) -> None:
    with pytest.raises(TypeError, match=r"allowed: DType\.kByte, .*DType\.kFloat4E2M1"):
        DType.cast(bad)


@pytest.mark.parametrize("member", DType)
def test_copies_are_the_member(member: DType) -> None:
    assert pickle.loads(pickle.dumps(member)) is member
    assert copy.copy(member) is copy.deepcopy(member) is member
