"""Format, MMParams and QParams are values whose numbers come from the formats."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from minifloat import formats
from minifloat.recipe import Format, MMParams, QParams, RecipeError


def test_formats_take_their_limits_from_the_elements() -> None:
    e2m1, e4m3, e5m2 = formats.E2M1.max, formats.E4M3.max, formats.E5M2.max
    assert [f.name for f in Format] == ["E2M1", "E4M3", "E5M2", "HYBRID"]
    assert Format.E2M1.value == (e2m1, e2m1)
    assert Format.E4M3.value == (e4m3, e4m3)
    assert Format.E5M2.value == (e5m2, e5m2)
    assert Format.HYBRID.value == (e4m3, e5m2)
    assert Format.HYBRID.value.max_fwd == e4m3 and Format.HYBRID.value.max_bwd == e5m2


@pytest.mark.parametrize("fmt", Format)
def test_the_element_has_the_limit(fmt: Format) -> None:
    assert fmt.element(forward=True).max == fmt.value.max_fwd
    assert fmt.element(forward=False).max == fmt.value.max_bwd


def test_defaults_and_order() -> None:
    assert MMParams() is MMParams(True) is MMParams(use_split_accumulator=True)
    assert QParams() is QParams(False, 0.0, False, False, False)
    full = QParams(True, 0.5, True, True, True)
    assert full.to_dict() == {
        "power_2_scale": True,
        "amax_epsilon": 0.5,
        "random_hadamard_transform": True,
        "stochastic_rounding": True,
        "fp4_2d_quantization": True,
    }
    assert MMParams(False).to_dict() == {"use_split_accumulator": False}


@pytest.mark.parametrize("value", [MMParams(False), QParams(amax_epsilon=1), Format.HYBRID])
def test_values(value: Any) -> None:
    assert pickle.loads(pickle.dumps(value)) is value
    assert copy.deepcopy(value) is value
    assert eval(repr(value)) is value
    assert hash(value) == hash(copy.copy(value))
    with pytest.raises(AttributeError):
        value.name = "other"


def test_an_int_epsilon_is_the_float() -> None:
    assert QParams(amax_epsilon=1) is QParams(amax_epsilon=1.0)


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: MMParams(1), TypeError, "use_split_accumulator: got 1"),
        (lambda: MMParams(None), TypeError, "use_split_accumulator"),
        (lambda: QParams(power_2_scale="yes"), TypeError, "power_2_scale: got 'yes'"),
        (lambda: QParams(amax_epsilon=-1.0), RecipeError, "amax_epsilon: got -1.0"),
        (lambda: QParams(amax_epsilon=float("nan")), RecipeError, "amax_epsilon"),
        (lambda: QParams(amax_epsilon=True), TypeError, "amax_epsilon"),
        (lambda: QParams(amax_epsilon=torch.ones(1)), TypeError, "amax_epsilon"),
    ],
)
def test_bad_arguments(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_a_recipe_error_is_both() -> None:
    assert issubclass(RecipeError, ValueError) and issubclass(RecipeError, AssertionError)
