"""Products over groups: each member has the bits of `gemm` on it alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minifloat import ragged, spread
from minifloat.alpha import alpha as alpha_of
from minifloat.emulated import values
from minifloat.formats import HIGH, Cast
from minifloat.gemm import gemm
from minifloat.grouped_gemm import Grouped, contraction, members, rows, sums
from minifloat.layout import part_names
from minifloat.operands import operands

CASTS = {
    "high": HIGH,
    "e4m3": Cast("fp8_e4m3"),
    "e5m2": Cast("fp8_e5m2"),
    "block": Cast("fp8_e4m3_1x128"),
    "square": Cast("fp8_e4m3_128x128"),
    "mxfp8": Cast("mxfp8_e4m3"),
    "nvfp4": Cast("nvfp4"),
}
SIZES = [[5, 0, 33, 17], [55, 0, 0, 0], [0, 0, 0, 55], [14, 14, 14, 13]]
K, N = 48, 40


def grouped(sizes: Any, rows: int = 55) -> spread.Members:
    return spread.members(sizes, rows)


def cast(x: torch.Tensor, group: spread.Members | int, how: Cast, col: bool) -> Grouped:
    """Spread, as inputs and gradients are; or equal members, as weights are."""
    shape = (x.shape[0], x.shape[1])
    if how is HIGH:
        return Grouped(x, None, None, how, shape, col)
    casts = (None, how) if col else (how, None)
    if isinstance(group, int):
        made = ragged.quantize(x, None, group, *casts)
        found = dict(zip(part_names(*casts), made, strict=False))
    else:
        found = spread.quantize(x, group, *casts)
    of = "col_" if col else "row_"
    scale = found.get(of + "scale", found.get("scale"))
    spreads = not isinstance(group, int)
    return Grouped(found[of + "data"], scale, found.get(of + "amax"), how, shape, col, spreads)


def of_weight(how: Cast) -> Cast:
    """What multiplies x: one operand has 1-D blocks."""
    return CASTS["block"] if how is CASTS["square"] else how


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
    group = grouped(sizes)
    a = cast(x, group, how, False)
    b = cast(w.reshape(-1, K), 4, of_weight(how), backward)
    y = rows(a, b, group, torch.float32, bias=bias)
    assert y.shape == (55, K if backward else N)
    for i, (part, got) in enumerate(zip(torch.split(x, split), torch.split(y, split), strict=True)):
        one = None if bias is None else bias[i]
        left, right = alone(part, how, False), alone(w[i], of_weight(how), backward)
        assert torch.equal(got, gemm(left, right, torch.float32, bias=one))


@pytest.mark.parametrize("split", SIZES, ids=str)
@pytest.mark.parametrize("name", CASTS)
def test_contraction(name: str, split: list[int]) -> None:
    how = CASTS[name]
    torch.manual_seed(0)
    g, x = torch.randn(55, N), torch.randn(55, K)
    sizes = torch.tensor(split)
    other = of_weight(how)
    group = grouped(sizes)
    a, b = cast(g, group, how, True), cast(x, group, other, True)
    made = contraction(a, b, group, torch.bfloat16)
    before = torch.randn(4, N, K)
    added = contraction(a, b, group, torch.float32, out=before.clone(), accumulate=True)
    assert made.shape == (4, N, K) and made.dtype is torch.bfloat16
    for i, (one, two) in enumerate(zip(torch.split(g, split), torch.split(x, split), strict=True)):
        if split[i] == 0:
            assert not made[i].any()
            assert torch.equal(added[i], before[i])
            continue
        pair = alone(one, how, True), alone(two, other, True)
        assert torch.equal(made[i], gemm(*pair, torch.bfloat16))
        assert torch.equal(added[i], before[i] + gemm(*pair, torch.float32))


@pytest.mark.parametrize("split", SIZES, ids=str)
def test_sums(split: list[int]) -> None:
    x = torch.randn(55, K)
    made = sums(x, torch.tensor(split))
    assert torch.equal(made, torch.stack([p.sum(0) for p in torch.split(x, split)]))


def test_members_are_views() -> None:
    x = torch.randn(55, K)
    sizes = torch.tensor(SIZES[0])
    group = cast(x, grouped(sizes), CASTS["e4m3"], False)
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
        rows(a, b, grouped(sizes), torch.float32)


def test_operators_have_right_fakes() -> None:
    how = CASTS["mxfp8"]
    sizes = torch.tensor(SIZES[0])
    x, g, w = torch.randn(55, K), torch.randn(55, N), torch.randn(4 * N, K)
    group = grouped(sizes)
    a, b = cast(x, group, how, False), cast(w, 4, how, False)
    ops = torch.ops.minifloat
    check: Any = torch.library.opcheck
    tests = ("test_schema", "test_faketensor")
    bias = torch.randn(4, N)
    check(ops.grouped_rows.default, (*a, *b, *group, torch.float32, bias, False), test_utils=tests)
    pair = (*cast(g, group, how, True), *cast(x, group, how, True), *group)
    check(ops.grouped_contraction.default, (*pair, torch.float32, False), test_utils=tests)
    into = torch.randn(4, N, K)
    check(ops.grouped_contraction_into.default, (*pair, into, True, False), test_utils=tests)
    check(ops.grouped_sums.default, (g, sizes), test_utils=tests)


# ------------------------------------------------------------------------------------- on a device
def error(y: torch.Tensor, exact: torch.Tensor) -> float:
    return float((y.double() - exact).norm() / exact.norm().clamp(min=1e-30))


def exact(a: Any, b: Any) -> torch.Tensor:
    """The product of two operands in fp64."""
    left, right = (_scaled(o) for o in (a, b))
    return left @ right.t()


def _scaled(o: Any) -> torch.Tensor:
    alpha = alpha_of(o)
    made = values(o, torch.float32).double()
    return made if alpha is None else made * alpha.double()


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(("n", "k"), [(256, 384), (384, 400), (200, 136), (24, 40), (33, 65)])
@pytest.mark.parametrize("name", CASTS)
def test_all_at_once(name: str, n: int, k: int, fast: bool) -> None:
    """Against fp64 of the same operands; PyTorch's bf16 product is the measure of the error."""
    how = CASTS[name]
    other = of_weight(how)
    split = [0, 130, 1, 0, 257, 64, 16]
    torch.manual_seed(0)
    x, g = (torch.randn(sum(split), d, device="cuda", dtype=torch.bfloat16) for d in (k, n))
    w = torch.randn(len(split), n, k, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(len(split), n, device="cuda", dtype=torch.bfloat16)
    group = grouped(torch.tensor(split, device="cuda"), sum(split))
    operands_of = {
        "fprop": (cast(x, group, how, False), cast(w.reshape(-1, k), 7, other, False)),
        "dgrad": (cast(g, group, how, False), cast(w.reshape(-1, k), 7, other, True)),
        "wgrad": (cast(g, group, how, True), cast(x, group, other, True)),
    }
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = rows(*operands_of["fprop"], group, torch.bfloat16, bias=bias, fast=fast)
        dx = rows(*operands_of["dgrad"], group, torch.bfloat16, fast=fast)
        dw = contraction(*operands_of["wgrad"], group, torch.bfloat16, fast=fast)
        into = torch.ones_like(dw, dtype=torch.float32)
        contraction(*operands_of["wgrad"], group, into.dtype, fast=fast, out=into, accumulate=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    results = {"fprop": torch.split(y, split), "dgrad": torch.split(dx, split), "wgrad": dw}
    weights = [w.shape[1]] * len(split)
    # A short accumulator keeps 13 bits of each partial sum.
    bound = 2**-7 if fast else 2**-8
    for what, (a, b) in operands_of.items():
        sizes_b = weights if what != "wgrad" else split
        pairs = zip(members(a, split), members(b, sizes_b), strict=True)
        for i, (left, right) in enumerate(pairs):
            got = results[what][i]
            if split[i] == 0:
                assert not got.any()
                continue
            want = exact(left, right)
            if what == "fprop":
                want = want + bias[i].double()
            assert error(got, want) < bound, (what, i)
            if what == "wgrad":
                assert error(into[i] - 1, want) < bound, i


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("n", [640, 656])
def test_programs_of_many_tiles(n: int, fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops that go on from tile to tile have the bits of a program for each."""
    from minifloat.kernels import flat_gemm

    k, how = 1280, CASTS["e4m3"]
    split = [(37 * e) % 260 if e % 5 else 0 for e in range(40)]
    total = sum(split)
    torch.manual_seed(0)
    x, g = (torch.randn(total, d, device="cuda", dtype=torch.bfloat16) for d in (k, n))
    w = torch.randn(len(split) * n, k, device="cuda", dtype=torch.bfloat16)
    group = grouped(torch.tensor(split, device="cuda"), total)
    a, c = cast(x, group, how, False), cast(x, group, how, True)
    b, g_row, g_col = cast(w, 40, how, False), cast(g, group, how, False), cast(g, group, how, True)
    w_col = cast(w, 40, how, True)

    def made() -> list[torch.Tensor]:
        into = torch.ones(40, n, k, device="cuda")
        return [
            rows(a, b, group, torch.bfloat16, fast=fast),
            rows(g_row, w_col, group, torch.bfloat16, fast=fast),
            contraction(g_col, c, group, torch.bfloat16, fast=fast),
            contraction(g_col, c, group, torch.float32, fast=fast),
            contraction(g_col, c, group, torch.float32, fast=fast, out=into, accumulate=True),
        ]

    got = made()
    monkeypatch.setattr(flat_gemm, "MEASURED", ())
    for one, want in zip(got, made(), strict=True):
        assert torch.equal(one, want)


def test_a_gradient_of_another_shape() -> None:
    group = grouped(torch.tensor(SIZES[0]))
    a, b = cast(torch.randn(55, N), group, HIGH, True), cast(torch.randn(55, K), group, HIGH, True)
    with pytest.raises(ValueError, match="main_grad: got shape"):
        contraction(a, b, group, torch.float32, out=torch.zeros(4, N, K + 1))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["high", "e4m3", "block"])
def test_into_a_view(name: str) -> None:
    split, n, k = [40, 0, 30], 64, 48
    how = CASTS[name]
    group = grouped(torch.tensor(split, device="cuda"), 70)
    g, x = (torch.randn(70, d, device="cuda", dtype=torch.bfloat16) for d in (n, k))
    a, b = cast(g, group, how, True), cast(x, group, of_weight(how), True)
    want = contraction(a, b, group, torch.float32)
    for into in (torch.zeros(3, n, k + 8, device="cuda")[:, :, :k],
                 torch.zeros(3, k, n, device="cuda").transpose(1, 2)):  # fmt: skip
        got = contraction(a, b, group, torch.float32, out=into, accumulate=True)
        assert torch.equal(got, want)
