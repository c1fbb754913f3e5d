"""The room that a group of unknown sizes is given."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minifloat import ragged

from .tensors.groups import GROUPS, quantizer_of

SIZES = st.lists(st.integers(0, 1100), min_size=1, max_size=8)


@pytest.mark.parametrize("kind", GROUPS)
@given(sizes=SIZES, columns=st.integers(1, 700))
def test_there_is_room_for_any_sizes(kind: str, sizes: list[int], columns: int) -> None:
    casts = quantizer_of(kind)._casts()
    needed = ragged.exact([(s, columns) for s in sizes], *casts)
    room = ragged.room((sum(sizes), columns), len(sizes), True, *casts)
    for part, there in zip(needed, room, strict=True):
        assert (part.name, part.dtype) == (there.name, there.dtype)
        assert part.shape[0] <= there.shape[0]
        # Never more than a worst member's padding for each.
        worst = ragged.exact([(1, columns)] * len(sizes), *casts)
        spare = {p.name: p.shape[0] for p in worst}[part.name]
        assert there.shape[0] <= part.shape[0] + spare


@pytest.mark.parametrize("kind", GROUPS)
def test_equal_members_have_nothing_to_spare(kind: str) -> None:
    casts = quantizer_of(kind)._casts()
    room = ragged.room((4 * 33, 17), 4, False, *casts)
    assert room == ragged.exact([(33, 17)] * 4, *casts)


def test_members_lie_back_to_back() -> None:
    casts = quantizer_of("nvfp4_rht")._casts()
    shapes = [(5, 33), (0, 33), (40, 33)]
    end: dict[str, int] = {}
    for member in ragged.places(shapes, *casts):
        for name, place in member.items():
            assert place.at == end.get(name, 0)
            end[name] = place.at + place.numel
    assert end == {p.name: p.shape[0] for p in ragged.exact(shapes, *casts)}
