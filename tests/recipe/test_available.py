"""What is native where, for any device, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from minifloat import DType, env
from minifloat.formats import E4M3, E5M2
from minifloat.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
    available,
    check_recipe_support,
    get_align_size_for_quantization,
    get_default_fp8_recipe,
    get_default_recipe,
    get_device_compute_capability,
    get_fp4_te_dtype,
    get_fp8_max,
    get_fp8_te_dtype,
    get_fp8_torch_dtype,
    is_bf16_available,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
)

from .cases import RECIPES, mxfp8_everywhere

QUESTIONS: dict[str, Any] = {
    "fp8": is_fp8_available,
    "block": is_fp8_block_scaling_available,
    "mxfp8": is_mxfp8_available,
    "nvfp4": is_nvfp4_available,
}
Device = Callable[[int | None], None]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Pretend to have a device of this compute capability, or none."""

    def pretend(capability: int | None) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(env, "capability", lambda device: capability)

    return pretend


@pytest.mark.parametrize(
    "capability, native",
    [
        (None, set()),
        (80, set()),
        (89, {"fp8"}),
        (90, {"fp8", "block"}),
        (100, {"fp8", "mxfp8", "nvfp4"}),
        (103, {"fp8", "mxfp8", "nvfp4"}),
        (120, {"fp8", "nvfp4"}),
    ],
)
def test_native(capability: int | None, native: set[str], device: Device) -> None:
    device(capability)
    assert {name for name, question in QUESTIONS.items() if question()} == native
    for name, question in QUESTIONS.items():
        answer, reason = question(return_reason=True)
        assert answer is (name in native)
        if answer:
            assert reason == ""
        else:
            assert "emulates" in reason and "exactly" in reason and "native on sm_" in reason
            here = "no CUDA device" if capability is None else f"sm_{capability} has no tensor"
            assert here in reason


def test_the_checks_say_the_same(device: Device) -> None:
    device(90)
    for name in ("fp8", "mxfp8", "nvfp4", "fp8_block_scaling"):
        check = getattr(available, f"check_{name}_support")
        assert check() == getattr(available, f"is_{name}_available")(True)


@pytest.mark.parametrize(
    "capability, expected",
    [
        (None, Float8CurrentScaling()),
        (80, Float8CurrentScaling()),
        (90, Float8CurrentScaling()),
        (100, MXFP8BlockScaling()),
        (120, Float8CurrentScaling()),
    ],
)
def test_default_recipe(capability: int | None, expected: Recipe, device: Device) -> None:
    device(capability)
    assert get_default_recipe() is expected
    assert get_default_fp8_recipe() is expected


@pytest.mark.parametrize("capability", [None, 80, 90, 100, 120])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
def test_nothing_is_refused(recipe: Recipe, capability: int | None, device: Device) -> None:
    device(capability)
    check_recipe_support(recipe)


def test_alignment() -> None:
    sizes = {
        DelayedScaling(): 16,
        Float8CurrentScaling(): 16,
        Float8BlockScaling(): 16,
        MXFP8BlockScaling(): 32,
        NVFP4BlockScaling(): 128,
        CustomRecipe(mxfp8_everywhere): 128,
        CustomRecipe(mxfp8_everywhere, quantization_alignment=48): 48,
    }
    for recipe, size in sizes.items():
        assert get_align_size_for_quantization(recipe) == size


@pytest.mark.parametrize(
    "recipe, forward, element",
    [
        (DelayedScaling(), True, E4M3),
        (DelayedScaling(), False, E5M2),
        (DelayedScaling(fp8_format=Format.E4M3), False, E4M3),
        (MXFP8BlockScaling(), False, E4M3),
        (CustomRecipe(mxfp8_everywhere, Format.E5M2), True, E5M2),
    ],
)
def test_dtypes(recipe: Recipe, forward: bool, element: Any) -> None:
    assert get_fp8_torch_dtype(recipe, forward) == element.torch_dtype
    assert get_fp8_te_dtype(recipe, forward) == element.dtype
    assert get_fp8_max(recipe, forward) == element.max
    if forward:
        assert get_fp8_torch_dtype(recipe) == element.torch_dtype


def test_fp4_dtype() -> None:
    assert get_fp4_te_dtype(NVFP4BlockScaling()) is DType.kFloat4E2M1
    with pytest.raises(ValueError, match="has no FP4 format"):
        get_fp4_te_dtype(DelayedScaling())


@pytest.mark.parametrize(
    ("capability", "expected", "bf16"),
    [
        (None, (0, 0), True),
        (75, (7, 5), False),
        (80, (8, 0), True),
        (90, (9, 0), True),
        (103, (10, 3), True),
        (120, (12, 0), True),
    ],
)
def test_capability_and_bf16(
    device: Device, capability: int | None, expected: tuple[int, int], bf16: bool
) -> None:
    device(capability)
    assert get_device_compute_capability() == expected
    assert is_bf16_available() is bf16
    answer, reason = is_bf16_available(return_reason=True)
    assert answer is bf16 and bool(reason) is not bf16
    if not bf16:
        assert "sm_75" in reason and "sm_80" in reason
