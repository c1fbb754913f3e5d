"""Cases are data: their ids, their work, their tables."""

from __future__ import annotations

import pytest

from minifloat.bench import cases
from minifloat.bench.cases import FULL, PART1, SPLITS, Case, parse, select
from minifloat.bench.errors import BenchError


def test_the_default_is_the_twelve_cases() -> None:
    assert [c.id for c in PART1] == [
        "linear/16384x4096x4096",
        "linear/16384x4096x14336",
        "linear/16384x14336x4096",
        "linear/8192x8192x8192",
        "linear/4096x1024x4096",
        "linear/2048x768x3072",
        "mlp/16384x4096x14336",
        "mlp/8192x8192x28672",
        "mlp/2048x768x2048",
        "grouped/8x16384x4096x4096",
        "grouped/32x32768x7168x2048",
        "grouped/64x32768x2048x2048",
    ]
    assert [c.rows[0] for c in PART1[-3:]] == [2048, 1024, 512]
    assert [c.id for c in PART1 if c.small] == [PART1[4].id, PART1[5].id, PART1[8].id]


def test_every_id_names_its_case() -> None:
    every = (*FULL, *cases.QUICK, *cases.CPU, *cases.CPU_QUICK)
    assert [parse(c.id) for c in every] == list(every)
    assert len({c.id for c in FULL}) == len(FULL) > 100
    assert set(PART1) <= set(FULL)
    assert {c.kind for c in FULL} == set(cases.KINDS)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("tokens", "experts"), [(16384, 64), (65536, 8), (100, 7), (32, 1)])
def test_experts_share_all_tokens(split: str, tokens: int, experts: int) -> None:
    rows = Case("grouped", (tokens, 8, 8), experts, split).rows
    assert (len(rows), sum(rows)) == (experts, tokens)
    assert all(r % cases.ALIGN == 0 for r in rows) or tokens % cases.ALIGN
    if split == "zipf" and experts > 1:
        assert rows[0] > 2 * rows[-1] and sorted(rows, reverse=True)[0] == rows[0]
    if split == "empty" and experts > 1:
        assert rows[0] == 0 and min(rows[1:]) > 0


def test_operations() -> None:
    assert Case("linear", (3, 5, 7)).flops == 6 * 3 * 5 * 7
    assert Case("mlp", (3, 5, 7)).flops == 6 * 3 * 5 * 14 + 6 * 3 * 7 * 5
    assert Case("grouped", (6, 5, 7), 2).flops == 6 * 6 * 5 * 7


def test_a_decoder_layer_has_the_heads_of_known_models() -> None:
    heads = {h: Case("decoder", (8192, h, 3 * h)).heads for h in (768, 4096, 8192, 96)}
    assert heads[768] == (12, 12, 64, 4096)
    assert heads[4096] == (32, 8, 128, 4096) and heads[4096].qkv == 6144
    assert heads[8192].qkv == 10240
    assert heads[96] == (1, 1, 96, 4096)
    case = Case("decoder", (100, 4096, 14336))
    assert case.heads.context == 100
    assert case.flops == 6 * 100 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336)


def test_any_other_sizes_are_a_case_too() -> None:
    assert parse("grouped/4x64x32x16/zipf") == Case("grouped", (64, 32, 16), 4, "zipf")
    assert select(["linear/1x2x3", "mlp/2048*"], PART1)[0] == Case("linear", (1, 2, 3))
    assert {c.kind for c in select(["mlp/*"], PART1)} == {"mlp"}
    assert select([], PART1) == list(PART1)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("linar/16384x4096x4096", "did you mean 'linear/16384x4096x4096'"),
        ("liner/5x6x7", "or any other sizes; did you mean 'linear/5x6x7'?"),
        ("mpl/*", "unknown case 'mpl/*': there are linear/16384x4096x4096, "),
        ("linear/16x16", "linear/TOKENSxINxOUT is needed, such as linear/16384x4096x4096"),
        ("linear/16x0x16", "linear/TOKENSxINxOUT is needed"),
        ("grouped/4x64x32x16/zip", "unknown split of experts 'zip': there are equal, zipf, empty"),
    ],
)
def test_what_is_no_case(name: str, said: str) -> None:
    with pytest.raises(BenchError) as raised:
        select([name], PART1)
    assert said in str(raised.value) and "\n" not in str(raised.value)
