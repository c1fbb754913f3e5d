"""Philox4x32-10 against Random123's known answers, and the layout of the uniforms."""

from __future__ import annotations

import pytest
import torch

from minifloat.reference import philox, uniform16

ONES = 0xFFFFFFFF
# counter, key, result: kat_vectors of Random123.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def philox_ints(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """The ten rounds on Python integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & ONES, (p0 >> 32) ^ c3 ^ k1, p0 & ONES
        k0, k1 = (k0 + 0x9E3779B9) & ONES, (k1 + 0xBB67AE85) & ONES
    return c0, c1, c2, c3


def words(values: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([v], dtype=torch.int64) for v in values)


@pytest.mark.parametrize("counter, key, result", KNOWN)
def test_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], result: tuple[int, ...]
) -> None:
    assert philox_ints(counter, key) == result
    assert tuple(w.item() for w in philox(words(counter), words(key))) == result


def test_random_counters_and_keys() -> None:
    g = torch.Generator().manual_seed(3)
    table = torch.randint(0, 2**32, (6, 200), generator=g)
    got = torch.stack(philox(tuple(table[:4]), tuple(table[4:])))
    for column, result in zip(table.t().tolist(), got.t().tolist(), strict=True):
        assert philox_ints(tuple(column[:4]), tuple(column[4:])) == tuple(result)


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32 + 5, 2**63 - 1, -1, -(2**40)])
@pytest.mark.parametrize("offset", [0, 7, 2**32 - 1, 2**33 + 9])
def test_layout(seed: int, offset: int) -> None:
    """Element i takes half i%2 of word (i%8)//2 of call i//8, each a 16-bit uniform."""
    rows, columns, stream = 3, 16, 1
    got = uniform16(rows, columns, torch.tensor([seed, offset]), stream).flatten().tolist()
    for i, u in enumerate(got):
        counter = (i // 8, 0, offset % 2**32, stream)
        word = philox_ints(counter, (seed % 2**32, seed // 2**32 % 2**32))[i % 8 // 2]
        half = word >> 16 if i % 2 else word & 0xFFFF
        assert u == (half + 0.5) / 2**16


def test_shape_range_and_dtype() -> None:
    u = uniform16(64, 128, torch.tensor([1, 0]), 0)
    assert (u.shape, u.dtype) == ((64, 128), torch.float32)
    assert u.min() > 0 and u.max() < 1
    assert uniform16(0, 16, torch.tensor([1, 0]), 0).shape == (0, 16)
    assert uniform16(4, 0, torch.tensor([1, 0]), 0).shape == (4, 0)


def test_place_alone_decides() -> None:
    """More rows do not change the rows there were."""
    seed = torch.tensor([11, 5])
    assert torch.equal(uniform16(3, 24, seed, 0), uniform16(9, 24, seed, 0)[:3])


@pytest.mark.parametrize(
    "seed, stream", [((12, 5), 0), ((11, 6), 0), ((11, 5), 1), ((11 + 2**32, 5), 0)]
)
def test_seed_offset_and_stream_matter(seed: tuple[int, int], stream: int) -> None:
    """Unrelated uniforms agree in 16 bits once in 2**16: of 1024, 10 would be out of this world."""
    one = uniform16(8, 128, torch.tensor([11, 5]), 0)
    other = uniform16(8, 128, torch.tensor(seed), stream)
    assert (one == other).sum() < 10


def test_moments() -> None:
    """2**17 uniforms: mean 1/2 and variance 1/12, within five standard errors."""
    u = uniform16(1024, 128, torch.tensor([2, 3]), 0).double()
    n = u.numel()
    assert abs(u.mean() - 1 / 2) < 5 * (1 / 12 / n) ** 0.5
    assert abs(((u - 0.5) ** 2).mean() - 1 / 12) < 5 * (1 / 180 / n) ** 0.5
