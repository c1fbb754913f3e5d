"""Products of codes over groups whose programs go on from tile to tile without a pause.

One loop has the steps of all tiles of a program: while a tile is stored, the first steps of the
next one are being loaded. For codes with a scale for each member, the contraction last and in whole
steps, on devices where it was measured; `grouped_gemm` has the rest. H200, TFLOP/s, beside those of
its kernels in the same run: 8 x 2048 rows, 4096 -> 4096: rows 1435 (1357), contraction 1267 (1106),
added to fp32 881 (638); 64 x 512 rows, 2048 -> 2048: 1249 (1122), 881 (679) and 363 (258).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import env
from ..formats import cdiv
from ._gemm_device import put, put_quarters, swizzled
from .members import ENTRY, TILE, WIDTH
from .variant import Config, Launch, Variant

__all__ = ["contraction", "rows", "variants"]

# (m, k) is the tile of the result. Registers are short: where the compiler moves accumulators about
# in the loop (a MOV for each in SASS: with other orders of tiles, or 256 x 128) it is slower. It
# does so with a bias, which is left to `grouped_gemm`; and so is `rows` with a second accumulator,
# which took 674 us for 609 at 8 x 2048 rows.
CONFIGS = {
    "rows": Config(TILE, 256, 8, 4),
    "contraction": Config(128, 256, 8, 4),
    "contraction_parts": Config(128, 256, 8, 3),  # stored by quarters
    "contraction_split": Config(128, 128, 8, 4),
}
MEASURED = (90,)  # compute capabilities
STEP = 128  # codes of a line of either operand at a time
GROUP = 8  # tiles of rows that walk along b together: they share what L2 holds of it
# Tiles of a program of a contraction, at most, of one accumulator and of two. They are fewer where
# FILLED programs would not be left, three for each multiprocessor of an H200: those that end last
# are then too few.
CHUNK = {True: 8, False: 4}
FILLED = 396
ALIGNED = 16  # numbers of a line of the result: else they are stored one by one
LONGEST = (1 << 31) // 256  # a line, for offsets in a tile to have 32 bits


@triton.jit
def rows_kernel(
    a, b, out, scale_a, scale_b, tiles, N, K, a_m, b_e, b_n, EVEN: tl.constexpr,
    ENTRY: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Tiles p, p + programs, ... of `out[M, N]`. K is in whole steps; EVEN: N in whole tiles.

    Rows past a member's end are zeros that nobody loads, not its last row again. H200, us on Zipf's
    splits (on equal ones): 64 x 512 rows, 2048 -> 2048: 237 for 249 (216); 32 x 1024 rows, 7168 ->
    2048: 697 for 715 (645). Half tiles in a loop of their own were no faster: 243 and 696; nor in
    programs of their own, where one takes as long as a whole tile: it reads as much of b. Two
    products took 487 us for 458; all partial tiles behind the whole ones 563 for 493.

    What is of the tile being loaded (`left` steps, this one included) is carried by the loop, which
    the compiler splits into stages: each keeps it for the one behind.
    """
    n_t = tl.load(tiles + 6)
    n_n = tl.cdiv(N, BN)
    steps = K // BK
    n_p = tl.num_programs(0)
    count = (n_t * n_n - tl.program_id(0) + n_p - 1) // n_p
    o_m, o_n, o_k = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    q_a = o_m[:, None] * a_m + o_k[None, :]
    q_b = o_n[None, :] * b_n + o_k[:, None]
    tile = tl.program_id(0) - n_p
    left, e, first, size, i_n = 1, 0, 0, 0, 0
    alpha = 0.0
    acc = tl.zeros((BM, BN), tl.float32)
    for _ in range(0, count * steps):
        left -= 1
        if left == 0:
            left = steps
            tile += n_p
            i_t, i_n = swizzled(tile, n_t, n_n, GROUP)
            e = tl.load(tiles + i_t * ENTRY)
            first = tl.load(tiles + i_t * ENTRY + 1)
            size = tl.load(tiles + i_t * ENTRY + 3) - first
            alpha = tl.load(scale_a + e) * tl.load(scale_b + e)
        at = tl.cast(steps - left, tl.int64) * BK
        p_a = a + tl.cast(first, tl.int64) * a_m + at
        p_b = b + tl.cast(e, tl.int64) * b_e + tl.cast(i_n * BN, tl.int64) * b_n + at
        b_a = tl.load(p_a + q_a, mask=o_m[:, None] < size, other=0.0)
        if EVEN:
            b_b = tl.load(p_b + q_b)
        else:
            o_b = tl.minimum(o_n, N - 1 - i_n * BN)
            b_b = tl.load(p_b + o_b[None, :] * b_n + o_k[:, None])
        acc = tl.dot(b_a, b_b, acc)
        if left == 1:
            mask = o_m[:, None] < size
            if not EVEN:
                mask = mask & (i_n * BN + o_n[None, :] < N)
            p_o = out + tl.cast(first, tl.int64) * N + i_n * BN
            tl.store(p_o + (o_m[:, None] * N + o_n[None, :]), acc * alpha, mask=mask)
            acc = tl.zeros((BM, BN), tl.float32)


@triton.jit
def contraction_kernel(
    a, b, out, scale_a, scale_b, members, N, K, a_n, b_k, ADD: tl.constexpr, FAST: tl.constexpr,
    EVEN: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
    GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """CHUNK neighbouring tiles of a row of `out[e, N, K]`, of `a[N, T]` and `b[K, T]`.

    Members go by size, the largest first, and begin at multiples of 128 tokens, with zeros up to
    the next; one without any has a step of zeros. EVEN: N and K are in whole tiles.

    What was no faster, H200, us on Zipf's splits of 64 x 512 rows, 2048 -> 2048: not to load the
    zeros, 348 for 344; half steps for small members whose last step is half empty, 335 for 335;
    one program for each multiprocessor, with every 132nd tile, 348 for 336 (on equal splits 319
    for 308); two programs on each, of 128 x 128 tiles, 378 for 337 (303 for 311).
    """
    n_n, n_k = tl.cdiv(N, BM), tl.cdiv(K, BN)
    n_c = tl.cdiv(n_k, CHUNK)
    e = tl.load(members + (tl.program_id(0) // (n_n * n_c)) * WIDTH + 4).to(tl.int64)
    i_n, i_c = swizzled(tl.program_id(0) % (n_n * n_c), n_n, n_c, GROUP)
    size = tl.load(members + e * WIDTH + 1) - tl.load(members + e * WIDTH)
    place = tl.multiple_of(tl.load(members + e * WIDTH + 2), BK)
    alpha = tl.load(scale_a + e) * tl.load(scale_b + e)
    steps = tl.maximum(tl.cdiv(size, BK), 1)
    count = min(CHUNK, n_k - i_c * CHUNK)
    o_m, o_n, o_t = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    o_a = o_m if EVEN else tl.minimum(o_m, N - 1 - i_n * BM)
    q_a = o_a[:, None] * a_n + o_t[None, :]
    q_b = o_n[None, :] * b_k + o_t[:, None]
    p_a = a + (i_n * BM).to(tl.int64) * a_n + place
    p_b = b + place
    p_o = out + e * N * K + (i_n * BM).to(tl.int64) * K
    i_k = i_c * CHUNK - 1
    left = 1  # as in `rows_kernel`
    acc = tl.zeros((BM, BN), tl.float32)
    for _ in range(0, count * steps):
        left -= 1
        if left == 0:
            left = steps
            i_k += 1
        at = (steps - left) * BK
        p_t = p_b + (i_k * BN).to(tl.int64) * b_k + at
        b_a = tl.load(p_a + at + q_a)
        if EVEN:
            b_b = tl.load(p_t + q_b)
        else:
            o_b = tl.minimum(o_n, K - 1 - i_k * BN)
            b_b = tl.load(p_t + o_b[None, :] * b_k + o_t[:, None])
        if FAST:
            acc = tl.dot(b_a, b_b, acc)
        else:
            acc += tl.dot(b_a, b_b)
        if left == 1:
            high, wide = N - i_n * BM, K - i_k * BN
            if PARTS == 1:
                put(p_o + i_k * BN, acc * alpha, K, high, wide, ADD, EVEN, BM, BN)
            else:
                put_quarters(p_o + i_k * BN, acc * alpha, K, high, wide, ADD, EVEN, BM, BN)
            acc = tl.zeros((BM, BN), tl.float32)


# ---------------------------------------------------------------------------------------- launches
def rows(
    a: Tensor,
    b: Tensor,
    tiles: Tensor,
    out: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
) -> Launch | None:
    """`grouped_gemm.rows` without blocks or a bias, by a short accumulator; None: not here."""
    n, k = b.shape[1:]
    if not _takes(a, b, scale_a, scale_b) or out.element_size() != 2 or b.stride(2) != 1:
        return None
    if k % STEP != 0 or n % ALIGNED != 0 or n <= CONFIGS["rows"].k // 2:
        return None
    if max(a.stride(0), b.stride(1), n) > LONGEST:
        return None
    return _rows(a, b, tiles, out, scale_a, scale_b, env.multiprocessors(a.device))


def contraction(
    a: Tensor,
    b: Tensor,
    table: Tensor,
    out: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    add: bool,
    fast: bool,
) -> Launch | None:
    """`grouped_gemm.contraction` of members at their places, without blocks; None: not here."""
    if not _takes(a, b, scale_a, scale_b) or a.stride(1) != 1 or b.stride(1) != 1:
        return None
    if out.shape[2] % ALIGNED != 0 or max(a.stride(0), b.stride(0), out.shape[2]) > LONGEST:
        return None
    return _contraction(a, b, table, out, scale_a, scale_b, add, fast)


def _takes(a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None) -> bool:
    """Whether these are codes, a scale for each member, on a device where this was measured."""
    codes = a.element_size() == 1 and b.element_size() == 1
    scaled = scale_a is not None and scale_b is not None
    return codes and scaled and env.capability(a.device) in MEASURED


def _rows(
    a: Tensor,
    b: Tensor,
    tiles: Tensor,
    out: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    programs: int,
) -> Launch:
    config = CONFIGS["rows"]
    n, k = b.shape[1:]
    args = {
        "a": a,
        "b": b,
        "out": out,
        "scale_a": scale_a,
        "scale_b": scale_b,
        "tiles": tiles,
        "N": n,
        "K": k,
        "a_m": a.stride(0),
        "b_e": b.stride(0),
        "b_n": b.stride(1),
        "EVEN": n % config.k == 0,
        "ENTRY": ENTRY,
        "GROUP": GROUP,
        "BM": config.m,
        "BN": config.k,
        "BK": STEP,
    }
    return Launch(rows_kernel, min(programs, tiles.shape[0] * cdiv(n, config.k)), args, config)


def _contraction(
    a: Tensor,
    b: Tensor,
    table: Tensor,
    out: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    add: bool,
    fast: bool,
) -> Launch:
    num, n, k = out.shape
    plain = out.element_size() == 2 and not add
    kind = "contraction" if plain else "contraction_parts"
    config = CONFIGS[kind if fast else "contraction_split"]
    n_n, n_k = cdiv(n, config.m), cdiv(k, config.k)
    chunk = CHUNK[fast]
    while chunk > 1 and num * n_n * cdiv(n_k, chunk) < FILLED:
        chunk //= 2
    args = {
        "a": a,
        "b": b,
        "out": out,
        "scale_a": scale_a,
        "scale_b": scale_b,
        "members": table,
        "N": n,
        "K": k,
        "a_n": a.stride(0),
        "b_k": b.stride(0),
        "ADD": add,
        "FAST": fast,
        "EVEN": n % config.m == 0 and k % config.k == 0,
        "PARTS": 1 if plain else 4,
        "CHUNK": chunk,
        "WIDTH": WIDTH,
        "GROUP": GROUP,
        "BM": config.m,
        "BN": config.k,
        "BK": STEP,
    }
    return Launch(contraction_kernel, num * n_n * cdiv(n_k, chunk), args, config)


def variants() -> Iterator[Variant]:
    """Of whole tiles and of partial ones; results that are new, and that are added to."""
    tiles = torch.empty(320, ENTRY, dtype=torch.int32, device="meta")
    table = torch.empty(64, WIDTH, dtype=torch.int32, device="meta")
    one = torch.empty(64, dtype=torch.float32, device="meta")

    def make(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    for tag, n, k in (("whole", 2048, 4096), ("partial", 2000, 4000)):
        a, b, y = make(e4m3, 4096, 4096), make(e4m3, 64, n, 4096), make(torch.bfloat16, 4096, n)
        yield Variant.of(f"rows_{tag}", _rows(a, b, tiles, y, one, one, 132))
        for name, da, dtype, add, fast in (
            ("fast", e4m3, torch.bfloat16, False, True),
            ("fast_add", e4m3, torch.float32, True, True),
            ("split", e5m2, torch.bfloat16, False, False),
            ("split_add", e5m2, torch.float32, True, False),
        ):
            a, b, dw = make(da, n, 8192), make(e4m3, k, 8192), make(dtype, 64, n, k)
            launch = _contraction(a, b, table, dw, one, one, add, fast)
            yield Variant.of(f"contraction_{name}_{tag}", launch)
