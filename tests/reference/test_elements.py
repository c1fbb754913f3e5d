"""Codes against a table of all representable values, built from the definition of the fields."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minifloat.formats import E2M1, E4M3, E5M2, Element
from minifloat.reference import decode, encode, pack, unpack

from . import oracle

ELEMENTS = [E4M3, E5M2, E2M1]
NAN_CODES = {E4M3: {0x7F, 0xFF}, E5M2: {0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF}, E2M1: set()}
INF_CODES = {E4M3: {}, E5M2: {0x7C: np.inf, 0xFC: -np.inf}, E2M1: {}}

# |x| -> code (CONTRACT 1.6): each interval's end points.
E2M1_TIES = [
    (0.0, 0), (0.25, 0),
    (0.25 + 2**-25, 1), (0.75 - 2**-24, 1),
    (0.75, 2), (1.25, 2),
    (1.25 + 2**-23, 3), (1.75 - 2**-23, 3),
    (1.75, 4), (2.5, 4),
    (2.5 + 2**-22, 5), (3.5 - 2**-22, 5),
    (3.5, 6), (5.0, 6),
    (5.0 + 2**-21, 7), (6.0, 7), (7.0, 7), (2.0**100, 7), (np.inf, 7),
]  # fmt: skip


def codes_of(x: np.ndarray, element: Element) -> np.ndarray:
    return encode(torch.from_numpy(x), element).numpy()


def all_codes(element: Element) -> torch.Tensor:
    return torch.arange(2**element.bits, dtype=torch.int32).to(torch.uint8)


def steps_of(element: Element) -> np.ndarray:
    """Every value, every midpoint of neighbours, and the fp32 numbers on both sides of each."""
    table = oracle.magnitudes(element)
    points = np.concatenate((table, (table[1:] + table[:-1]) / 2)).astype(np.float32)
    near = [np.nextafter(points, np.float32(d)) for d in (-np.inf, np.inf)]
    return np.concatenate((points, *near))


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
def test_decode_of_every_code(element: Element) -> None:
    table, sign = oracle.magnitudes(element), 1 << (element.bits - 1)
    decoded = decode(all_codes(element), element)
    assert decoded.dtype is torch.float32
    for code, value in enumerate(decoded.tolist()):
        if code in NAN_CODES[element]:
            assert np.isnan(value)
        elif code in INF_CODES[element]:
            assert value == INF_CODES[element][code]
        else:
            assert abs(value) == table[code & (sign - 1)]
            assert np.signbit(value) == bool(code & sign)


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
def test_codes_survive_decode_and_encode(element: Element) -> None:
    codes = all_codes(element)
    special = NAN_CODES[element] | set(INF_CODES[element])
    codes = codes[[c not in special for c in codes.tolist()]]
    assert len(codes) == 2 * len(oracle.magnitudes(element))
    assert torch.equal(encode(decode(codes, element), element), codes)


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
def test_ties_and_their_neighbours(element: Element) -> None:
    x = steps_of(element)
    x = np.concatenate((x, -x))
    np.testing.assert_array_equal(codes_of(x, element), oracle.encode(x, element))


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
def test_random_bit_patterns(element: Element) -> None:
    """All of fp32: subnormal, huge, infinite and NaN numbers too."""
    g = np.random.default_rng(1)
    x = g.integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    near = np.ldexp(g.standard_normal(200_000), g.integers(-20, 18, 200_000)).astype(np.float32)
    for sample in (x, near):
        np.testing.assert_array_equal(codes_of(sample, element), oracle.encode(sample, element))


@pytest.mark.parametrize("element, top", [(E4M3, 0x7E), (E5M2, 0x7B), (E2M1, 0x7)])
def test_saturation(element: Element, top: int) -> None:
    sign = 1 << (element.bits - 1)
    for big in (element.max, element.max * 1.01, element.max * 2, 1e30, np.inf):
        x = np.array([big, -big], np.float32)
        assert codes_of(x, element).tolist() == [top, top | sign]


@pytest.mark.parametrize("element, nan", [(E4M3, 0x7F), (E5M2, 0x7F), (E2M1, 0x7)])
def test_nan_has_one_code_whatever_its_sign_and_payload(element: Element, nan: int) -> None:
    bits = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], np.uint32)
    assert codes_of(bits.view(np.float32), element).tolist() == [nan] * 4


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
def test_zeros_keep_their_sign(element: Element) -> None:
    x = np.array([0.0, -0.0, 1e-45, -1e-45], np.float32)
    sign = 1 << (element.bits - 1)
    assert codes_of(x, element).tolist() == [0, sign, 0, sign]


@pytest.mark.parametrize("magnitude, code", E2M1_TIES)
def test_e2m1_intervals(magnitude: float, code: int) -> None:
    x = np.array([magnitude, -magnitude], np.float32)
    assert abs(float(x[0])) == magnitude, "the table's numbers must be fp32 numbers"
    assert codes_of(x, E2M1).tolist() == [code, code | 8]


def test_stochastic_rounding_is_unbiased() -> None:
    """Over all 2**16 uniforms the share of round-ups is frac to half a uniform's step, 2**-17."""
    u = (torch.arange(2**16, dtype=torch.float32) + 0.5) * 2.0**-16
    table = oracle.magnitudes(E2M1)
    for x in (*np.linspace(0, 6, 13), *steps_of(E2M1), 6.5, -0.3, -2.7, -5.9):
        x = float(np.float32(x))
        got = decode(encode(torch.full_like(u, x), E2M1, u), E2M1).double()
        a = min(abs(x), 6.0)
        low = table[table <= a].max()
        high = table[table >= a].min()
        assert set(got.abs().unique().tolist()) <= {low, high}, "only the two neighbours"
        assert bool((got.signbit() == bool(np.signbit(x))).all())
        assert abs(got.abs().mean().item() - a) <= (high - low) * 2.0**-17


def test_stochastic_rounding_keeps_what_is_representable() -> None:
    codes = all_codes(E2M1)
    for u in (2.0**-17, 0.5, 1 - 2.0**-17):
        x = decode(codes, E2M1)
        assert torch.equal(encode(x, E2M1, torch.full_like(x, u)), codes)


def test_stochastic_rounding_of_nan_and_inf() -> None:
    x = torch.tensor([np.nan, -np.nan, np.inf, -np.inf])
    for u in (2.0**-17, 1 - 2.0**-17):
        assert encode(x, E2M1, torch.full_like(x, u)).tolist() == [7, 7, 7, 15]


@pytest.mark.parametrize("element", [E4M3, E5M2], ids=lambda e: e.name)
def test_stochastic_rounding_is_for_four_bits(element: Element) -> None:
    with pytest.raises(ValueError, match=f"4-bit.*{element.name}"):
        encode(torch.ones(2), element, torch.full((2,), 0.5))


@given(st.integers(0, 5), st.integers(0, 9), st.integers(0, 2**31))
def test_pack_and_unpack(rows: int, columns: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 16, (rows, columns), dtype=np.uint8)
    data = pack(torch.from_numpy(codes))
    assert data.shape == (rows, (columns + 1) // 2)
    assert data.dtype is torch.uint8
    for i in range(rows):
        for j in range(data.shape[1]):
            high = codes[i, 2 * j + 1] if 2 * j + 1 < columns else 0
            assert data[i, j] == codes[i, 2 * j] + 16 * int(high)
    assert torch.equal(unpack(data, columns), torch.from_numpy(codes))
