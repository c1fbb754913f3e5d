"""Products over groups in loops over tiles, of small integers: sums are exact in any order."""

from __future__ import annotations

import pytest
import torch
from _cases import DEVICE, INTERPRETED, assert_exact, run_interpreted
from torch import Tensor

pytest.importorskip("triton")
from minifloat.kernels import flat_gemm, members  # noqa: E402

E4M3 = torch.float8_e4m3fn
SIZES = [0, 130, 1, 0, 257, 64, 16]  # three tiles, two and one; some without rows
SCALES = torch.tensor([0.5, 1.0, 2.0, 4.0, 1.0, 0.25, 1.0])


def tables() -> tuple[Tensor, Tensor]:
    num, rows = len(SIZES), sum(SIZES)
    table = torch.empty(num, members.WIDTH, dtype=torch.int32, device=DEVICE)
    count = members.tile_count(rows, num)
    tiles = torch.empty(count, members.ENTRY, dtype=torch.int32, device=DEVICE)
    members.tables(torch.tensor(SIZES, device=DEVICE), table, tiles, rows)
    return table, tiles


def codes(*shape: int) -> Tensor:
    return torch.randint(-3, 4, shape).float().to(E4M3)


def check_rows(n: int, k: int, programs: int) -> None:
    _, tiles = tables()
    a, b = codes(sum(SIZES), k), codes(len(SIZES), n, k)
    scales = SCALES.to(DEVICE)
    out = torch.full((sum(SIZES), n), 7.0, dtype=torch.float16, device=DEVICE)
    launch = flat_gemm._rows(a.to(DEVICE), b.to(DEVICE), tiles, out, scales, scales, programs)
    launch.run()
    each = zip(a.float().split(SIZES), b.float(), SCALES, strict=True)
    assert_exact(out, torch.cat([x @ w.t() * (s * s) for x, w, s in each]).half())


def check_contraction(n: int, k: int, filled: int, fast: bool = True) -> None:
    table, _ = tables()
    places = table[:, :4].tolist()
    pitch = places[-1][3] + 128
    a, b = codes(n, pitch), codes(k, pitch)
    for start, end, place, place_end in places:
        for o in (a, b):
            o.view(torch.uint8)[:, place + end - start : place_end] = 0
    spans = [slice(place, place_end) for _, _, place, place_end in places]
    pairs = zip(spans, SCALES, strict=True)
    want = torch.stack([a[:, p].float() @ b[:, p].float().t() * (s * s) for p, s in pairs])
    scales = SCALES.to(DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flat_gemm, "FILLED", filled)
        for dtype, add in ((torch.float16, False), (torch.float32, True)):
            out = torch.full((len(SIZES), n, k), 3.0, dtype=dtype, device=DEVICE)
            args = (a.to(DEVICE), b.to(DEVICE), table, out, scales, scales, add, fast)
            flat_gemm._contraction(*args).run()
            assert_exact(out, (want + 3.0 if add else want).to(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("programs", [1, 5, 132])
@pytest.mark.parametrize(("n", "k"), [(512, 128), (528, 384)])
def test_rows(n: int, k: int, programs: int) -> None:
    check_rows(n, k, programs)


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("filled", [1, 60])
@pytest.mark.parametrize(("n", "k"), [(256, 1536), (272, 528)])
def test_contraction(n: int, k: int, filled: int, fast: bool) -> None:
    check_contraction(n, k, filled, fast)


def test_interpreted() -> None:
    run_interpreted(__file__)


if __name__ == "__main__":
    assert INTERPRETED
    check_rows(272, 256, 3)
    check_contraction(128, 528, 12)
