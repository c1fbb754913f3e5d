"""Roles and requests are plain frozen records."""

from __future__ import annotations

import dataclasses

import pytest

from minifloat.recipe import DelayedScalingRequest, Format, QuantizerRequest, QuantizerRole


@pytest.mark.parametrize(
    "role, text",
    [
        (QuantizerRole(), "QuantizerRole()"),
        (QuantizerRole("linear"), "module_type=linear"),
        (
            QuantizerRole("linear", "weight", "fc1"),
            "module_type=linear|tensor_type=weight|name=fc1",
        ),
        (QuantizerRole(name="fc1"), "name=fc1"),
    ],
)
def test_a_role_prints_what_it_says(role: QuantizerRole, text: str) -> None:
    assert str(role) == text


def test_frozen_and_hashable() -> None:
    role = QuantizerRole("linear", "input")
    assert role == QuantizerRole("linear", "input") and len({role, QuantizerRole("linear")}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        role.name = "x"  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        DelayedScalingRequest().margin = 1  # type: ignore[misc]


def test_requests() -> None:
    request = DelayedScalingRequest()
    assert isinstance(request, QuantizerRequest) and hash(request) == hash(DelayedScalingRequest())
    assert [(f.name, f.default) for f in dataclasses.fields(request)] == [
        ("fp8_format", Format.HYBRID),
        ("margin", 0),
        ("amax_history_len", 1024),
        ("amax_compute_algo", "max"),
        ("scaling_factor_compute_algo", None),
        ("reduce_amax", True),
    ]
