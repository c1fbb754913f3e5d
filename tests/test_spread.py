"""Casts of groups: each member has the bits it has alone, on every device, wherever it lies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from minifloat import dispatch, ragged, spread
from minifloat.formats import HADAMARD_SIGN_MASK, Cast
from minifloat.layout import part_names, parts

_NVFP4 = Cast("nvfp4")
_RHT = _NVFP4.replace(hadamard=HADAMARD_SIGN_MASK)
CASTS: dict[str, tuple[Cast, Cast]] = {
    **{
        name: (Cast(name), Cast(name))
        for name in (
            "fp8_e4m3",
            "fp8_e5m2",
            "fp8_e4m3_1x128",
            "fp8_e4m3_128x128",
            "fp8_e5m2_1x128",
            "mxfp8_e4m3",
            "mxfp8_e4m3_32x32",
            "nvfp4",
            "nvfp4_16x16",
        )
    },
    "pow2": (Cast("fp8_e4m3").replace(pow2=True),) * 2,
    "1x128_pow2": (Cast("fp8_e4m3_1x128").replace(pow2=True),) * 2,
    "hadamard": (_NVFP4, _RHT),
    "stochastic": (_NVFP4.replace(stochastic=True), _RHT.replace(stochastic=True)),
}
SIZES = ([0, 130, 1, 0, 257, 64, 16], [3], [0, 0, 5], [128, 256, 384])
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


def seed_of(cast: Cast, device: str, e: int = 0) -> Tensor | None:
    return torch.tensor([7, 100 + e], device=device) if cast.stochastic else None


def source(rows: int, k: int, dtype: torch.dtype, sizes: list[int]) -> Tensor:
    """Members of very different size: a scale that is not their own shows."""
    torch.manual_seed(rows + k)
    x = torch.randn(rows, k)
    at = 0
    for e, m in enumerate(sizes):
        x[at : at + m] *= 4.0 ** ((e % 4) - 1)
        at += m
    return x.to(dtype)


def alone(x: Tensor, row: Cast | None, col: Cast | None, e: int) -> dict[str, Tensor]:
    """What the reference makes of a member."""
    cast = row or col
    assert cast is not None
    made = dispatch.quantize(x, row, col, seed=seed_of(cast, "cpu", e))
    return dict(zip(part_names(row, col), made, strict=True))


def trimmed(
    name: str, part: Tensor, view: Tensor, row: Cast | None, col: Cast | None, k: int
) -> Tensor:
    """A member's part as a spread copy has it."""
    cast = row if name.startswith("row_") else col
    if name.endswith("_scale") and cast is not None and spread.as_lines(cast) is not cast:
        lines = view.shape[1] if name.startswith("row_") else k
        part = part.t().repeat_interleave(128, 1)[:, :lines]
        part = torch.nn.functional.pad(part, (0, view.shape[1] - lines))
    return part[tuple(slice(n) for n in view.shape)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("k", [256, 200, 33])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", CASTS)
def test_spread(name: str, sizes: list[int], k: int, dtype: torch.dtype, device: str) -> None:
    if device == "cpu" and (dtype is not torch.bfloat16 or k == 256):
        pytest.skip("the rule: once is enough")
    casts = CASTS[name]
    x = source(sum(sizes), k, dtype, sizes)
    on = torch.tensor(sizes, device=device)
    for row, col in (casts, (casts[0], None), (None, casts[1])):
        group = spread.members(on, sum(sizes))
        cast = row or col
        assert cast is not None
        seed = seed_of(cast, device)
        found = spread.quantize(x.to(device), group, row, col, seed=seed)
        found = {part: buffer.cpu() for part, buffer in found.items()}
        table = [at[:4] for at in group.table.cpu().tolist()]
        order = group.table[:, 4].tolist()
        assert order == sorted(range(len(sizes)), key=lambda e: -sizes[e])
        starts = torch.tensor([0, *sizes]).cumsum(0).tolist()
        for e, at in enumerate(table):
            assert at[:2] == starts[e : e + 2] and at[2] % spread.PAD == 0
            assert at[3] - at[2] == max(spread.PAD, -(-sizes[e] // spread.PAD) * spread.PAD)
            member = x[at[0] : at[1]]
            views = spread.views(found, e, at, row, col)
            for part, expected in alone(member, row, col, e).items():
                want = trimmed(part, expected, views[part], row, col, k)
                assert torch.equal(views[part], want), (part, e)
            if col is not None and not col.transforms and col.format.col_transposed:
                per = col.format.element.per_byte  # type: ignore[union-attr]
                behind = found["col_data"][:, -(-(at[2] + sizes[e]) // per) : at[3] // per]
                assert not behind.any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("k", [136, 256])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_spread_by_given_scales(sizes: list[int], k: int, dtype: torch.dtype, device: str) -> None:
    cast = Cast("fp8_e4m3")
    x = source(sum(sizes), k, dtype, sizes)
    group = spread.members(torch.tensor(sizes, device=device), sum(sizes))
    scales = 2.0 ** torch.arange(len(sizes), device=device) + 0.3
    x[0, 0] = 1e6  # beyond the largest code
    found = spread.quantize_scaled(x.to(device), group, scales, cast, row=True, col=True)
    found = {part: buffer.cpu() for part, buffer in found.items()}
    amax = found.pop("amax")
    for e, at in enumerate(group.table[:, :4].cpu().tolist()):
        seen = torch.zeros(1)
        scale = scales[e : e + 1].cpu()
        made = dispatch.quantize_scaled(x[at[0] : at[1]], scale, seen, cast, row=True, col=True)
        views = spread.views(found, e, at, cast, cast)
        for part, want in zip(part_names(cast, cast), made, strict=True):
            assert torch.equal(views[part], want), (part, e)
        assert torch.equal(amax[e : e + 1], seen)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("k", [256, 33])
@pytest.mark.parametrize("sizes", [*SIZES, 72, 128], ids=str)
@pytest.mark.parametrize("name", CASTS)
def test_back_to_back(name: str, sizes: list[int] | int, k: int, dtype: torch.dtype) -> None:
    row, col = CASTS[name]
    of = [sizes] * 3 if isinstance(sizes, int) else sizes
    x = source(sum(of), k, dtype, of)
    on = None if isinstance(sizes, int) else torch.tensor(sizes)
    seed, device_seed = seed_of(row, "cpu"), seed_of(row, "cuda")
    want = ragged.quantize(x, on, len(of), row, col, seed=seed)
    torch.cuda.set_sync_debug_mode("error")
    try:
        device_sizes = None if on is None else on.to("cuda", non_blocking=True)
        args = (x.to("cuda", non_blocking=True), device_sizes, len(of), row, col)
        got = ragged.quantize(*args, seed=device_seed)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    where: Any = ragged.places([(m, k) for m in of], row, col)
    for i, member in enumerate(where):
        for j, (part, place) in enumerate(member.items()):
            assert torch.equal(place.of(got[j]).cpu(), place.of(want[j])), (part, i)
    for a, b in zip(
        got[len(parts((1, 1), row, col)) :], want[len(parts((1, 1), row, col)) :], strict=True
    ):
        assert torch.equal(a.cpu(), b)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("m", [72, 128])
def test_equal_members_by_given_scales(m: int, name: str) -> None:
    cast, k = Cast(name), 256
    x = source(3 * m, k, torch.bfloat16, [m] * 3)
    x[0, 0], x[m, 1], x[2 * m, 3] = 1e6, torch.inf, torch.nan
    scales = torch.tensor([0.7, 300.0, 2.0])
    want = ragged.quantize_scaled(x, None, 3, scales, cast, row=True, col=True)
    got = ragged.quantize_scaled(x.cuda(), None, 3, scales.cuda(), cast, row=True, col=True)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.cpu().nan_to_num(7.0), b.nan_to_num(7.0))


@pytest.mark.parametrize("device", DEVICES)
def test_inf_and_nan_stay_with_their_member(device: str) -> None:
    sizes, k = [40, 50, 60], 128
    x = torch.randn(150, k)
    x[3, 5], x[45, 6] = torch.inf, torch.nan
    for row, col in CASTS.values():
        group = spread.members(torch.tensor(sizes, device=device), 150)
        args = (x.to(device), group, row, col)
        found = spread.quantize(*args, seed=seed_of(row, device))
        found = {part: buffer.cpu() for part, buffer in found.items()}
        for e, at in enumerate(group.table[:, :4].cpu().tolist()):
            views = spread.views(found, e, at, row, col)
            for part, expected in alone(x[at[0] : at[1]], row, col, e).items():
                want = trimmed(part, expected, views[part], row, col, k)
                same = torch.equal(views[part].nan_to_num(7.0), want.nan_to_num(7.0))
                assert same, (row.format_name, part, e)


@pytest.mark.parametrize("device", DEVICES)
def test_wrong_sizes_write_nowhere_else(device: str) -> None:
    """Too many rows are cut off, and negative sizes are none."""
    rows = 40
    for sizes in ([30, 30, 30], [-5, 20, 100], [1 << 20, 1, 1], [1 << 62] * 3):
        group = spread.members(torch.tensor(sizes, device=device), rows)
        table = group.table.cpu()
        assert table.min() >= 0 and table[:, :2].max() <= rows
        assert table[:, 3].max() <= spread.width(rows, 3)
        x = torch.randn(rows, 32, device=device)
        if device == "cuda":
            spread.quantize(x, group, Cast("fp8_e4m3"), Cast("fp8_e4m3"))
            torch.cuda.synchronize()


def test_operators_have_right_fakes() -> None:
    sizes = torch.tensor([5, 0, 30])
    cast = Cast("fp8_e4m3")
    x = torch.randn(35, 40)
    group = spread.members(sizes, 35)
    ops = torch.ops.minifloat
    check: Any = torch.library.opcheck
    tests = ("test_schema", "test_faketensor")
    check(ops.group_members.default, (sizes, 35), test_utils=tests)
    check(ops.spread_quantize.default, (x, *group, cast, cast, None), test_utils=tests)
    scales = torch.ones(3)
    arguments = (x, *group, scales, cast, True, True)
    check(ops.spread_quantize_scaled.default, arguments, test_utils=tests)
    found = spread.quantize(x, group, cast, None)
    arguments = (found["row_data"], found["scale"], None, group.table, cast, [35, 40], x.dtype)
    check(ops.spread_dequantize.default, arguments, test_utils=tests)


@pytest.mark.parametrize("device", DEVICES)
def test_strides_are_followed(device: str) -> None:
    """Of the matrix, and of the sizes."""
    counts = torch.tensor([[3, 100], [25, 200], [2, 300]], device=device)
    x = torch.randn(64, 30, device=device)
    cast = Cast("fp8_e4m3")
    for strided in (x.t(), x[:30, ::2], x[:1, :16].expand(30, 16)):
        group = spread.members(counts[:, 0], 30)
        assert group.table[:, 1].tolist() == [3, 28, 30]
        group_of = spread.members(counts[:, 0].contiguous(), 30)
        got = spread.quantize(strided, group, cast, None)
        want = spread.quantize(strided.contiguous(), group_of, cast, None)
        assert torch.equal(got["row_data"], want["row_data"])
        flat = ragged.quantize(strided, counts[:, 0], 3, cast, None)
        assert torch.equal(flat[0][: strided.numel()].view(got["row_data"].shape), want["row_data"])


def test_an_amax_for_each_row_is_refused() -> None:
    group = spread.members(torch.tensor([3, 5]), 8)
    with pytest.raises(ValueError, match="row_scaled: groups have one amax for each member"):
        spread.quantize(torch.randn(8, 32), group, _NVFP4.replace(row_scaled=True), None)


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_16x16", "stochastic", "mxfp8_e4m3", "fp8_e4m3"])
def test_values_of_a_row_copy(name: str) -> None:
    row = CASTS[name][0]
    sizes, k = [3, 0, 20], 40
    x = source(23, k, torch.bfloat16, sizes)
    group = spread.members(torch.tensor(sizes), 23)
    found = spread.quantize(x, group, row, None, seed=seed_of(row, "cpu"))
    scale = found.get("row_scale", found.get("scale"))
    got = spread.dequantize(
        found["row_data"], scale, found.get("row_amax"), group, row, (23, k), torch.bfloat16
    )
    for e, (part, member) in enumerate(
        zip(torch.split(got, sizes), torch.split(x, sizes), strict=True)
    ):
        made = alone(member, row, None, e)
        of = made.get("row_scale", made.get("scale"))
        args = (made["row_data"], of, made.get("row_amax"), row, member.shape, torch.bfloat16)
        assert torch.equal(part, dispatch.dequantize(*args))
