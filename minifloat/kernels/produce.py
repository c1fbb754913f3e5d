"""What norms and activations produce: its values, its amax, and FP8 casts of it with fp32 scales.

    y = activation(h) or norm(x)   ->   codes of y's row and column copies, one read of h or x

Values are rounded to their dtype before anything else is done with them, so a cast here has the
bytes of a cast of the values. bf16 goes through words of two numbers where M is a multiple of 4 and
K of 128, as in `blocks`: 19 instructions per element for swiglu to both copies. Blocks are made in
words alone: in partial tiles of elements they spill.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import FP32_MAX, Cast, Scale
from ..layout import pad
from ..producer import ACTIVATIONS, Producer, activation, norm
from ._blocks_device import ABS2, store_words, word_scales
from ._device import FP8, abs_bits, max2, reduce2, store_tile
from ._produce_device import (
    TYPES,
    in_words,
    load_four,
    load_pairs,
    load_produced,
    numbers,
    produced_words,
)
from .tensorwise import PARTIALS, find_scale, store_scaled
from .variant import Config, Launch, Variant

__all__ = [
    "amax_launch",
    "arguments",
    "fuses",
    "partial_amax",
    "quantize",
    "quantize_scaled",
    "tile",
    "value",
    "variants",
]

# A tile of words is 128 columns wide; without blocks, 64 rows fill it. H200, 1x128 in both
# directions, 16384x14336, 4 warps / 8 of at most 80 registers, three programs to a multiprocessor:
# SwiGLU 411 us / 378 (a copy of those bytes: 330), RMSNorm 254 / 250, LayerNorm 315 / 287; but
# Triton 3.9 spills at 80 what is not gated, and partial tiles, and 3.7 spills 792 bytes of SwiGLU.
# Others are not tuned.
_BLOCKS = Config(128, 128, 4)
_LIMITED = triton.__version__.startswith(("3.6.", "3.9."))
CONFIGS = {
    "value": Config(1, 2048, 4),
    "amax": Config(1, 2048, 4),
    "scaled": Config(64, 64, 4),
    "words_scaled": Config(64, 128, 4),
    "words_blocks": _BLOCKS,
    # Lines, both copies, whole tiles.
    "words_blocks_gated": Config(128, 128, 8, registers=80) if _LIMITED else _BLOCKS,
}
_UPPER = tl.constexpr(-0x10000)  # the second number of a word


@triton.jit
def value_kernel(
    x, number, mean, rstd, gamma, beta, out, M, K, stride, NORM: tl.constexpr, MEAN: tl.constexpr,
    GAMMA: tl.constexpr, BETA: tl.constexpr, ZERO: tl.constexpr, FN: tl.constexpr,
    GATED: tl.constexpr, ALPHA: tl.constexpr, CLIP: tl.constexpr, OFFSET: tl.constexpr,
    DTYPE: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """`out[M, K]` = what is produced."""
    n_k = tl.cdiv(K, BK)
    i_m = (tl.program_id(0) // n_k).to(tl.int64)
    i_k = (tl.program_id(0) % n_k).to(tl.int64)
    o_m = i_m * BM + tl.arange(0, BM)
    o_k = i_k * BK + tl.arange(0, BK)
    b_y = load_produced(
        x, number, mean, rstd, gamma, beta, o_m, o_k, M, K, stride, DTYPE, NORM, MEAN, GAMMA, BETA,
        ZERO, FN, GATED, ALPHA, CLIP, OFFSET, EVEN,
    )  # [BM, BK]  # fmt: skip
    store_tile(out, b_y, o_m, o_k, M, K, EVEN)


@triton.jit
def amax_kernel(
    x, mean, rstd, gamma, beta, partial, tiles, M, K, stride, NORM: tl.constexpr,
    MEAN: tl.constexpr, GAMMA: tl.constexpr, BETA: tl.constexpr, ZERO: tl.constexpr,
    FN: tl.constexpr, GATED: tl.constexpr, ALPHA: tl.constexpr, CLIP: tl.constexpr,
    OFFSET: tl.constexpr, DTYPE: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """`partial[p]`: bits of the largest |y| in tiles p, p + programs, ..."""
    i_p = tl.program_id(0).to(tl.int64)
    n_k = tl.cdiv(K, BK)
    b_max = tl.zeros((BM, BK), tl.int32)
    for i_t in range(i_p, tiles, tl.num_programs(0)):
        o_m = (i_t // n_k) * BM + tl.arange(0, BM)
        o_k = (i_t % n_k) * BK + tl.arange(0, BK)
        b_y = load_produced(
            x, None, mean, rstd, gamma, beta, o_m, o_k, M, K, stride, DTYPE, NORM, MEAN, GAMMA,
            BETA, ZERO, FN, GATED, ALPHA, CLIP, OFFSET, EVEN,
        )  # fmt: skip
        b_max = tl.maximum(b_max, abs_bits(b_y))
    tl.store(partial + i_p, tl.max(b_max))


@triton.jit(do_not_specialize=["n"])
def scaled_kernel(
    x, mean, rstd, gamma, beta, row, col, source, n, amax, scale_inv, kept, eps, M, K, stride,
    NORM: tl.constexpr, MEAN: tl.constexpr, GAMMA: tl.constexpr, BETA: tl.constexpr,
    ZERO: tl.constexpr, FN: tl.constexpr, GATED: tl.constexpr, ALPHA: tl.constexpr,
    CLIP: tl.constexpr, OFFSET: tl.constexpr, DTYPE: tl.constexpr, SCALED: tl.constexpr,
    ROW: tl.constexpr, COL: tl.constexpr, AMAX: tl.constexpr, KEEP: tl.constexpr,
    LIMIT: tl.constexpr, TYPE: tl.constexpr, INF: tl.constexpr, POW2: tl.constexpr,
    PARTIALS: tl.constexpr, EVEN: tl.constexpr, PAD: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """`tensorwise.cast_kernel` of what is produced."""
    i_p = tl.program_id(0)
    i_t = tl.num_programs(0) - 1 - i_p
    n_k = tl.cdiv(K, BK)
    i_m = (i_t // n_k).to(tl.int64)
    i_k = (i_t % n_k).to(tl.int64)
    o_m = i_m * BM + tl.arange(0, BM)
    o_k = i_k * BK + tl.arange(0, BK)
    b_y = load_produced(
        x, None, mean, rstd, gamma, beta, o_m, o_k, M, K, stride, DTYPE, NORM, MEAN, GAMMA, BETA,
        ZERO, FN, GATED, ALPHA, CLIP, OFFSET, EVEN,
    )  # [BM, BK]  # fmt: skip
    store_scaled(
        b_y, row, col, source, n, amax, scale_inv, kept, eps, i_p, o_m, o_k, M, K,
        SCALED, ROW, COL, AMAX, KEEP, LIMIT, TYPE, INF, POW2, PARTIALS, EVEN, PAD,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n"])
def words_kernel(
    x, mean, rstd, gamma, beta, row, row_scale, col, col_scale, source, n, amax, scale_inv, kept,
    eps, M, K, stride, NORM: tl.constexpr, MEAN: tl.constexpr, GAMMA: tl.constexpr,
    BETA: tl.constexpr, ZERO: tl.constexpr, FN: tl.constexpr, GATED: tl.constexpr,
    ALPHA: tl.constexpr, CLIP: tl.constexpr, OFFSET: tl.constexpr, TILED: tl.constexpr,
    SQUARE: tl.constexpr, SCALED: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr,
    AMAX: tl.constexpr, KEEP: tl.constexpr, LIMIT: tl.constexpr, TYPE: tl.constexpr,
    INF: tl.constexpr, POW2: tl.constexpr, PARTIALS: tl.constexpr, EVEN: tl.constexpr,
    PAD: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """`scaled_kernel` in BM x 128 tiles of words; TILED: every tile has scales of its own."""
    i_p = tl.program_id(0)
    i_t = tl.num_programs(0) - 1 - i_p
    n_k = K // 128
    i_m = (i_t // n_k).to(tl.int64)
    i_k = (i_t % n_k).to(tl.int64)
    o_m = i_m * BM + 4 * tl.arange(0, BM // 4)
    o_w = i_k * 64 + tl.arange(0, 64)
    m_x = o_m[:, None] < M
    p_x = x.to(tl.pointer_type(tl.int32), bitcast=True) + o_m[:, None] * (stride // 2)
    p_x += o_w[None, :]
    w0, w1, w2, w3 = load_four(p_x, stride // 2, m_x, EVEN)  # [BM/4, 64], rows 0, 4, ...
    v0, v1, v2, v3 = w0, w1, w2, w3
    if GATED:
        v0, v1, v2, v3 = load_four(p_x + K // 2, stride // 2, m_x, EVEN)
    g_0, g_1 = load_pairs(gamma, o_w, GAMMA, ZERO)
    b_0, b_1 = load_pairs(beta, o_w, BETA, False)
    w0 = produced_words(
        w0, v0, mean, rstd, g_0, g_1, b_0, b_1, o_m, M, NORM, MEAN, GAMMA, BETA,
        FN, GATED, ALPHA, CLIP, OFFSET, EVEN,
    )  # fmt: skip
    w1 = produced_words(
        w1, v1, mean, rstd, g_0, g_1, b_0, b_1, o_m + 1, M, NORM, MEAN, GAMMA, BETA,
        FN, GATED, ALPHA, CLIP, OFFSET, EVEN,
    )  # fmt: skip
    w2 = produced_words(
        w2, v2, mean, rstd, g_0, g_1, b_0, b_1, o_m + 2, M, NORM, MEAN, GAMMA, BETA,
        FN, GATED, ALPHA, CLIP, OFFSET, EVEN,
    )  # fmt: skip
    w3 = produced_words(
        w3, v3, mean, rstd, g_0, g_1, b_0, b_1, o_m + 3, M, NORM, MEAN, GAMMA, BETA,
        FN, GATED, ALPHA, CLIP, OFFSET, EVEN,
    )  # fmt: skip
    # Packed scales leave registers for a fourth program: RMSNorm 254 us for 282. SwiGLU has none to
    # gain by them, 406 us for 395.
    PACKED: tl.constexpr = TILED and POW2 and NORM and not SQUARE and PAD == 1
    if TILED:
        r0, r1, r2, r3, c0, c1 = word_scales(
            w0, w1, w2, w3, row_scale, col_scale, eps, i_m, i_k, M, K,
            SQUARE, ROW, COL, ROW, COL, LIMIT, INF, POW2, PACKED, EVEN, PAD,
        )  # fmt: skip
    else:
        top = 0
        if AMAX:
            b_a = max2(max2(w0 & ABS2, w1 & ABS2), max2(w2 & ABS2, w3 & ABS2))
            top = reduce2(tl.reshape(b_a, (BM * 16,)), 0)
            top = tl.maximum(top << 16, top & _UPPER)
        s = find_scale(
            source, n, top, amax, scale_inv, kept, eps, i_p, SCALED, AMAX, KEEP, LIMIT, INF, POW2,
            PARTIALS,
        )  # fmt: skip
        r0, r1, r2, r3, c0, c1 = s, s, s, s, s, s
    store_words(
        w0, w1, w2, w3, r0, r1, r2, r3, c0, c1, row, col, i_m, i_k, M, K, ROW, COL, LIMIT, TYPE,
        PACKED, EVEN, BM, PAD,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------- fronts
def fuses(
    p: Producer,
    inputs: Sequence[Tensor | None],
    dtype: torch.dtype,
    row: Cast | None,
    col: Cast | None,
) -> bool:
    """Whether kernels here make these casts of what `p` produces in `dtype`."""
    cast = row if row is not None else col
    if cast is None or (row is not None and col is not None and row != col):
        return False
    if p.interleave or cast.format.scale is not Scale.F32:
        return False
    if cast.tiled:
        args = arguments(p, inputs)
        return in_words(dtype, args["M"], args["K"], args["x"])
    # A transposed fp32 tile beside its codes is miscompiled: see `tensorwise._run`.
    return dtype is not torch.float32


def value(p: Producer, inputs: Sequence[Tensor | None], out: Tensor) -> None:
    """`out[M, K]`, in its dtype."""
    _value(p, inputs, out).run()


def quantize(
    p: Producer,
    inputs: Sequence[Tensor | None],
    dtype: torch.dtype,
    row: Cast | None,
    col: Cast | None,
    out: dict[str, Tensor],
    known: Tensor | None,
) -> None:
    """Codes into `out`, the buffers of `layout.parts` by name; `known` is the amax, if it is."""
    cast = row or col
    assert cast is not None
    if cast.format.tile is None:
        if known is None:
            source, n = partial_amax(p, inputs, dtype)
        else:
            source, n = known.view(torch.int32), 1
        _scaled(p, inputs, dtype, cast, out, source=source, n=n, kept=out.get("amax")).run()
    else:
        _blocks(p, inputs, dtype, cast, out).run()


def quantize_scaled(
    p: Producer,
    inputs: Sequence[Tensor | None],
    dtype: torch.dtype,
    scale: Tensor,
    amax: Tensor | None,
    cast: Cast,
    out: dict[str, Tensor],
) -> None:
    """Codes under the given scale; `amax`, if any, is a running maximum."""
    bits = None if amax is None else amax.view(torch.int32)
    kept = out.get("kept")
    _scaled(p, inputs, dtype, cast, out, source=scale, amax=bits, kept=kept, scaled=True).run()


# ----------------------------------------------------------------------------------------- launches
def arguments(p: Producer, inputs: Sequence[Tensor | None]) -> dict[str, Any]:
    """The arguments that every kernel here has: what is read, and how y comes of it.

    The number that multiplies h is for `value_kernel`.
    """
    number = None
    if p.normalizes:
        x, mean, rstd, gamma, beta = inputs
    else:
        x, number = (*inputs, None)[:2]
        mean = rstd = gamma = beta = None
    assert x is not None
    m, k = x.shape
    return {
        "x": x, "number": number, "mean": mean, "rstd": rstd, "gamma": gamma, "beta": beta,
        "M": m, "K": k // 2 if p.gated else k, "stride": x.stride(0),
        "NORM": p.normalizes, "MEAN": mean is not None, "GAMMA": gamma is not None,
        "BETA": beta is not None, "ZERO": p.zero_centered, **numbers(p),
    }  # fmt: skip


def tile(config: Config, m: int, k: int, dtype: torch.dtype) -> dict[str, Any]:
    """The arguments that say how tiles cover what is made, `[m, k]` in `dtype`."""
    even = config.even(m, k)
    return {"DTYPE": TYPES[dtype], "EVEN": even, "BM": config.m, "BK": config.k}


def amax_launch(
    fn: Any, args: dict[str, Any], config: Config, m: int, k: int, dtype: torch.dtype, like: Tensor
) -> Launch:
    """The launch of `fn`, which finds partial amaxes of what is made, beside `like`."""
    tiles = config.tiles(m, k)
    programs = max(1, min(tiles, PARTIALS))
    partial = torch.empty(programs, dtype=torch.int32, device=like.device)
    args = args | {"partial": partial, "tiles": tiles, **tile(config, m, k, dtype)}
    return Launch.of(fn, programs, args, config)


def _value(p: Producer, inputs: Sequence[Tensor | None], out: Tensor) -> Launch:
    args, config = arguments(p, inputs), CONFIGS["value"]
    m, k = args["M"], args["K"]
    args |= {"out": out, **tile(config, m, k, out.dtype)}
    return Launch.of(value_kernel, config.tiles(m, k), args, config)


def partial_amax(
    p: Producer, inputs: Sequence[Tensor | None], dtype: torch.dtype
) -> tuple[Tensor, int]:
    """Bits of partial amaxes of what is produced, and how many."""
    return _amax(p, inputs, dtype).partials()


def _amax(p: Producer, inputs: Sequence[Tensor | None], dtype: torch.dtype) -> Launch:
    args = arguments(p, inputs)
    m, k = args["M"], args["K"]
    return amax_launch(amax_kernel, args, CONFIGS["amax"], m, k, dtype, args["x"])


def _cast(cast: Cast, out: dict[str, Tensor], *shape: int) -> dict[str, Any]:
    """The arguments that every cast of a matrix of this shape has."""
    element = cast.format.element
    assert element is not None
    row, col = out.get("row_data"), out.get("col_data")
    return {
        "row": row, "row_scale": out.get("row_scale"), "col": col,
        "col_scale": out.get("col_scale"), "eps": cast.eps, "ROW": row is not None,
        "COL": col is not None, "LIMIT": element.max, "TYPE": FP8[element], "POW2": cast.pow2,
        "TILED": cast.tiled, "SQUARE": cast.tiled and cast.format.square,
        "PAD": pad(cast, *shape),
    }  # fmt: skip


def _scaled(
    p: Producer,
    inputs: Sequence[Tensor | None],
    dtype: torch.dtype,
    cast: Cast,
    out: dict[str, Tensor],
    *,
    source: Tensor,
    n: int = 1,
    amax: Tensor | None = None,
    kept: Tensor | None = None,
    scaled: bool = False,
) -> Launch:
    args = arguments(p, inputs)
    args |= _cast(cast, out, args["M"], args["K"])
    args |= {
        "source": source, "n": n, "amax": amax, "kept": kept, "scale_inv": out["scale"],
        "SCALED": scaled, "AMAX": amax is not None, "KEEP": kept is not None,
        "INF": FP32_MAX, "PARTIALS": PARTIALS,
    }  # fmt: skip
    m, k = args["M"], args["K"]
    fn, config = scaled_kernel, CONFIGS["scaled"]
    if in_words(dtype, m, k, args["x"]):
        fn, config = words_kernel, CONFIGS["words_scaled"]
    return Launch.of(fn, config.tiles(m, k), args | tile(config, m, k, dtype), config)


def _blocks(
    p: Producer,
    inputs: Sequence[Tensor | None],
    dtype: torch.dtype,
    cast: Cast,
    out: dict[str, Tensor],
) -> Launch:
    args = arguments(p, inputs)
    args |= _cast(cast, out, args["M"], args["K"])
    args |= {
        "source": None, "n": 1, "amax": None, "kept": None, "scale_inv": None, "SCALED": False,
        "AMAX": False, "KEEP": False, "INF": torch.finfo(dtype).max, "PARTIALS": PARTIALS,
    }  # fmt: skip
    config, m, k = CONFIGS["words_blocks"], args["M"], args["K"]
    lines = args["ROW"] and args["COL"] and not args["SQUARE"]
    if args["GATED"] and lines and config.even(m, k):
        config = CONFIGS["words_blocks_gated"]
    return Launch.of(words_kernel, config.tiles(m, k), args | tile(config, m, k, dtype), config)


# ----------------------------------------------------------------------------------------- variants
def _samples() -> Iterator[tuple[str, Producer, tuple[Tensor | None, ...], torch.dtype]]:
    """Producers of whole and of partial tiles of bf16; each activation once."""

    def x(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    def stat(n: int) -> Tensor:
        return torch.empty(n, dtype=torch.float32, device="meta")

    for m, k in ((4096, 4096), (4100, 4096), (4097, 4000)):
        tag = f"bf16_{m}x{k}"
        yield f"swiglu_{tag}", activation("swiglu"), (x(m, 2 * k),), torch.bfloat16
        rms = (x(m, k), None, stat(m), x(k), None)
        yield f"rmsnorm_{tag}", norm(), rms, torch.bfloat16
        layer = (x(m, k), stat(m), stat(m), x(k), x(k))
        yield f"layernorm_{tag}", norm(True), layer, torch.bfloat16
    for name, a in ACTIVATIONS.items():
        h = x(4096, 8192 if a.gated else 4096)
        yield f"act_{name}_bf16_4096x4096", activation(name), (h,), torch.bfloat16


def variants() -> Iterator[Variant]:
    """Values, amaxes and casts of a gated activation and of norms, with room for products."""
    room = (16, 0)
    bits = torch.empty(1, dtype=torch.int32, device="meta")
    one = torch.empty(1, dtype=torch.float32, device="meta")
    code = torch.empty(1, dtype=torch.uint8, device="meta")
    directions = {"row": ("row",), "col": ("col",), "both": ("row", "col")}
    for name, p, inputs, dtype in _samples():
        x, of = inputs[0], (p, inputs, dtype)
        assert x is not None
        k_even = x.shape[1] % 128 == 0
        if name.startswith("act_"):
            out = {"row_data": code, "col_data": code, "scale": one}
            launch = _scaled(*of, Cast("fp8_e4m3"), out, source=one, scaled=True)
            yield Variant.of(f"scaled_both_{name}", launch)
            continue
        yield Variant.of(f"value_{name}", _value(p, inputs, x))
        if not p.normalizes:
            yield Variant.of(f"value_scaled_{name}", _value(p, (x, one), x))
        yield Variant.of(f"amax_{name}", _amax(*of))
        for direction, prefixes in directions.items():
            out = {f"{d}_data": code for d in prefixes} | {"scale": one}
            cast = Cast("fp8_e4m3", room=room)
            launch = _scaled(*of, cast, out, source=one, amax=bits, scaled=True)
            yield Variant.of(f"scaled_{direction}_{name}", launch)
            launch = _scaled(*of, cast, out, source=bits, kept=one)
            yield Variant.of(f"current_{direction}_{name}", launch)
            for tile in ("1x128", "128x128") if k_even else ():
                out = {f"{d}_data": code for d in prefixes} | {f"{d}_scale": one for d in prefixes}
                launch = _blocks(*of, Cast(f"fp8_e4m3_{tile}", pow2=True, room=room), out)
                yield Variant.of(f"{tile}_{direction}_{name}", launch)
