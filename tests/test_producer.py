"""Producers as values, and what they refuse."""

from __future__ import annotations

import pickle

import pytest

from minifloat import opaque
from minifloat.producer import ACTIVATIONS, Kind, Producer, activation, columns, norm
from minifloat.reference import FUNCTIONS


def test_they_are_interned_values() -> None:
    p = activation("clamped_swiglu", limit=3)
    assert p is activation("clamped_swiglu", limit=3.0)
    assert p is pickle.loads(pickle.dumps(p))
    assert p.gradient() is p.gradient() is not p and p.gradient().activation() is p
    source, names = norm(True).__fx_repr__()
    assert eval(source, names) is norm(True)
    source, names = activation("silu").__fx_repr__()
    assert eval(source, names) is activation("silu")
    assert not opaque.AVAILABLE or opaque.is_registered(Producer)


def test_every_activation_names_a_function() -> None:
    assert {a.function for a in ACTIVATIONS.values()} == set(FUNCTIONS)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="activation: got 'swish'; allowed: gelu, geglu"):
        activation("swish")
    with pytest.raises(ValueError, match="alpha.*'swiglu' takes none; they belong to clamped"):
        activation("swiglu", alpha=1.0)
    with pytest.raises(ValueError, match="limit: got -1.0; it must be > 0"):
        activation("clamped_swiglu", limit=-1)
    with pytest.raises(ValueError, match="alpha: got inf; it must be finite"):
        activation("clamped_swiglu", alpha=float("inf"))
    with pytest.raises(ValueError, match="glu_interleave_size: got 8; .* gated"):
        activation("gelu", glu_interleave_size=8)
    for size in (0, -2, "a"):
        with pytest.raises(ValueError, match=f"glu_interleave_size: got {size!r}; a positive"):
            activation("swiglu", glu_interleave_size=size)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="h: got 5 columns; .* a multiple of 2 is needed"):
        columns(activation("swiglu"), 5)
    with pytest.raises(ValueError, match="in blocks of 8, so a multiple of 16 is needed"):
        columns(activation("swiglu", glu_interleave_size=8), 40)


def test_kinds() -> None:
    assert norm().normalizes and not norm().differentiates
    assert activation("relu").gradient().differentiates
    assert activation("relu").kind is Kind.ACTIVATION
    assert columns(activation("relu"), 5) == 5 and columns(activation("glu"), 6) == 3
