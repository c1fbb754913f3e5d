"""Products over groups: each member has the bits of `gemm` on it alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minifloat import ragged
from minifloat.formats import Cast
from minifloat.gemm import gemm
from minifloat.grouped_gemm import Grouped, contraction, members, rows, sums
from minifloat.layout import part_names
from minifloat.operands import operands

HIGH = Cast("high_precision")
CASTS = {
    "high": HIGH,
    "e4m3": Cast("fp8_e4m3"),
    "e5m2": Cast("fp8_e5m2"),
    "block": Cast("fp8_e4m3_1x128"),
    "mxfp8": Cast("mxfp8_e4m3"),
    "nvfp4": Cast("nvfp4"),
}
SIZES = [[5, 0, 33, 17], [55, 0, 0, 0], [0, 0, 0, 55], [14, 14, 14, 13]]
K, N = 48, 40


def cast(x: torch.Tensor, sizes: Any, num: int, how: Cast, col: bool) -> Grouped:
    shape = (x.shape[0], x.shape[1])
    if how is HIGH:
        return Grouped(x, None, None, how, shape, col)
    casts = (None, how) if col else (how, None)
    made = ragged.quantize(x, sizes, num, *casts)
    found = dict(zip(part_names(*casts), made, strict=False))
    of = "col_" if col else "row_"
    scale = found.get(of + "scale", found.get("scale"))
    return Grouped(found[of + "data"], scale, found.get(of + "amax"), how, shape, col)


def alone(x: torch.Tensor, how: Cast, col: bool) -> Any:
    return operands(x, None if col else how, how if col else None)[col]


@pytest.mark.parametrize("split", SIZES, ids=str)
@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("backward", [False, True], ids=["fprop", "dgrad"])
def test_rows(name: str, split: list[int], backward: bool) -> None:
    how = CASTS[name]
    torch.manual_seed(0)
    x, w = torch.randn(55, N if backward else K), torch.randn(4, N, K)
    bias = None if backward else torch.randn(4, N)
    sizes = torch.tensor(split)
    a = cast(x, sizes, 4, how, False)
    b = cast(w.reshape(-1, K), None, 4, how, backward)
    y = rows(a, b, sizes, torch.float32, bias=bias)
    assert y.shape == (55, K if backward else N)
    for i, (part, got) in enumerate(zip(torch.split(x, split), torch.split(y, split), strict=True)):
        one = None if bias is None else bias[i]
        left, right = alone(part, how, False), alone(w[i], how, backward)
        assert torch.equal(got, gemm(left, right, torch.float32, bias=one))


@pytest.mark.parametrize("split", SIZES, ids=str)
@pytest.mark.parametrize("name", CASTS)
def test_contraction(name: str, split: list[int]) -> None:
    how = CASTS[name]
    torch.manual_seed(0)
    g, x = torch.randn(55, N), torch.randn(55, K)
    sizes = torch.tensor(split)
    made = contraction(
        cast(g, sizes, 4, how, True), cast(x, sizes, 4, how, True), sizes, torch.bfloat16
    )
    assert made.shape == (4, N, K) and made.dtype is torch.bfloat16
    for i, (one, other) in enumerate(
        zip(torch.split(g, split), torch.split(x, split), strict=True)
    ):
        if split[i] == 0:
            assert not made[i].any()
            continue
        expected = gemm(alone(one, how, True), alone(other, how, True), torch.bfloat16)
        assert torch.equal(made[i], expected)


@pytest.mark.parametrize("split", SIZES, ids=str)
def test_sums(split: list[int]) -> None:
    x = torch.randn(55, K)
    made = sums(x, torch.tensor(split))
    assert torch.equal(made, torch.stack([p.sum(0) for p in torch.split(x, split)]))


def test_members_are_views() -> None:
    x = torch.randn(55, K)
    sizes = torch.tensor(SIZES[0])
    group = cast(x, sizes, 4, CASTS["e4m3"], False)
    held = group.data.untyped_storage().data_ptr()
    assert all(
        m.data.untyped_storage().data_ptr() == held for m in members(group, SIZES[0]) if len(m.data)
    )


@pytest.mark.parametrize("split", [[5, 5, 5, 5], [60, 0, -5, 0]])
def test_wrong_sizes(split: list[int]) -> None:
    x, sizes = torch.randn(55, K), torch.tensor(split)
    a = Grouped(x, None, None, HIGH, (55, K), False)
    b = Grouped(torch.randn(4 * N, K), None, None, HIGH, (4 * N, K), False)
    with pytest.raises(ValueError, match="m_splits: got"):
        rows(a, b, sizes, torch.float32)


def test_operators_have_right_fakes() -> None:
    how = CASTS["mxfp8"]
    sizes = torch.tensor(SIZES[0])
    x, g, w = torch.randn(55, K), torch.randn(55, N), torch.randn(4 * N, K)
    a, b = cast(x, sizes, 4, how, False), cast(w, None, 4, how, False)
    ops = torch.ops.minifloat
    check: Any = torch.library.opcheck
    tests = ("test_schema", "test_faketensor")
    bias = torch.randn(4, N)
    check(ops.grouped_rows.default, (*a, *b, sizes, torch.float32, bias, False), test_utils=tests)
    g_col, x_col = cast(g, sizes, 4, how, True), cast(x, sizes, 4, how, True)
    check(
        ops.grouped_contraction.default,
        (*g_col, *x_col, sizes, torch.float32, False),
        test_utils=tests,
    )
    check(ops.grouped_sums.default, (g, sizes), test_utils=tests)
