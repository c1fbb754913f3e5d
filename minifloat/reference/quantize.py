"""Quantize a matrix in one direction, for every format, from the same five steps.

    orient (col: transpose) -> transform -> amax per tile -> scale -> round

`x` is 2-D here; the shapes of N-D tensors are `dispatch`'s business. A partial tile's amax comes
from its real elements (zeros pad it, and zeros never raise an amax); stored padding is zero.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..formats import E2M1, E4M3, Cast, Element, Scale, cdiv, rup
from .dequantize import unscaled
from .elements import decode, encode, pack
from .hadamard import hadamard
from .philox import uniform16
from .scales import (
    TwoLevel,
    block_multiplier,
    block_scale,
    divide,
    e4m3_scale,
    e8m0_from_amax,
    e8m0_multiplier,
    fp8_scale,
    global_scale,
    reciprocal,
)

__all__ = ["amax", "fake_quantize", "quantize", "quantize_scaled"]


def quantize(
    x: Tensor,
    cast: Cast,
    *,
    col: bool = False,
    amax: Tensor | None = None,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`x[M, K]` -> (data, scale, amax) of one direction, in the format's stored layout.

    `amax`: the tensor's (or rows') amax where it is known already, e.g. reduced over a group.
    `seed`: int64 `[seed, offset]` of stochastic rounding.
    """
    fmt = cast.format
    if fmt.scale is Scale.NONE:
        return _high_precision(x, cast, col), None, None
    t = _orient(x, cast, col)
    if fmt.tile is None:
        if amax is None:
            amax = _amax_all(t)
        scale = fp8_scale(amax, _element(cast), eps=cast.eps, pow2=cast.pow2)
        return encode(t * scale, _element(cast)).contiguous(), reciprocal(scale), None
    codes, scale, amax = _blocks(t, x.dtype, cast, col, amax, seed)
    data = pack(codes) if _element(cast).per_byte == 2 else codes
    if col and not fmt.col_transposed:
        data, scale = data.t().contiguous(), scale.t().contiguous()
    return data, scale, amax if fmt.two_level else None


def quantize_scaled(x: Tensor, scale: Tensor, cast: Cast) -> tuple[Tensor, Tensor, Tensor]:
    """Delayed scaling: (codes, 1/scale, amax of x) for a given encode scale."""
    t = x.to(torch.float32)
    return encode(t * scale, _element(cast)), reciprocal(scale), _amax_all(t)


def amax(x: Tensor, cast: Cast, *, col: bool = False) -> Tensor:
    """The global amax that `quantize` would compute: fp32 (1,), or one per row when row-scaled."""
    t = _orient(x, cast, col)
    return _amax_rows(t) if cast.row_scaled else _amax_all(t)


def fake_quantize(
    x: Tensor,
    cast: Cast,
    *,
    col: bool = False,
    amax: Tensor | None = None,
    seed: Tensor | None = None,
) -> Tensor:
    """The bf16 matrix whose GEMM is the format's arithmetic: codes times block scales, exactly.

    Without the global amax of a two-level format, which the GEMM applies. A column copy comes back
    in the orientation of the source, `[rows kept, K]`: bf16 GEMMs read either layout.
    """
    data, scale, _ = quantize(x, cast, col=col, amax=amax, seed=seed)
    c = cast.format.columns(x.shape[0] if col else x.shape[1], cast.transforms)
    out = unscaled(data, scale, cast, c, col=col).to(torch.bfloat16)
    # Not contiguous(): that leaves the odd strides of a one-column matrix alone.
    return out.t().clone(memory_format=torch.contiguous_format) if col else out


def _element(cast: Cast) -> Element:
    element = cast.format.element
    assert element is not None
    return element


def _high_precision(x: Tensor, cast: Cast, col: bool) -> Tensor:
    t = x.t() if col else x
    return t.to(cast.dtype or x.dtype, copy=True, memory_format=torch.contiguous_format)


def _orient(x: Tensor, cast: Cast, col: bool) -> Tensor:
    """fp32 `[R, C]`, contraction last, transformed if the cast says so."""
    t = (x.t() if col else x).to(torch.float32)
    return hadamard(t, cast.hadamard) if cast.transforms else t


def _amax_all(t: Tensor) -> Tensor:
    if t.numel() == 0:
        return t.new_zeros(1)
    return t.abs().amax().reshape(1)


def _amax_rows(t: Tensor) -> Tensor:
    if t.shape[1] == 0:
        return t.new_zeros(t.shape[0])
    return t.abs().amax(dim=1)


def _tiles(t: Tensor, tile: tuple[int, int]) -> Tensor:
    """`[R, C]` -> zero-padded `[R/r, r, C/c, c]`."""
    (r, c), (rows, cols) = tile, t.shape
    t = pad(t, (0, rup(cols, c) - cols, 0, rup(rows, r) - rows))
    return t.reshape(cdiv(rows, r), r, cdiv(cols, c), c)


def _blocks(
    t: Tensor, dtype: torch.dtype, cast: Cast, col: bool, amax: Tensor | None, seed: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes `[R, C]`, the stored scale matrix and the global amax of a tiled format."""
    fmt, element = cast.format, _element(cast)
    assert fmt.tile is not None and fmt.scale_tile is not None
    rows, cols = t.shape
    if fmt.two_level and amax is None:
        amax = _amax_rows(t) if cast.row_scaled else _amax_all(t)
    tiles = _tiles(t, fmt.tile)
    block = tiles.abs().amax(dim=(1, 3))
    if fmt.scale is Scale.F32:
        inf = torch.finfo(dtype).max
        encode_ = fp8_scale(block, element, eps=cast.eps, pow2=cast.pow2, inf=inf)
        scale, multiplier = reciprocal(encode_), encode_
    elif fmt.scale is Scale.E8M0:
        scale = e8m0_from_amax(block, element)
        multiplier = e8m0_multiplier(scale)
    else:
        assert amax is not None
        g = global_scale(amax, cast.scale_max)
        if cast.row_scaled:
            g = TwoLevel(g.encode[:, None], g.decode[:, None])
            amax_ = amax[:, None]
        else:
            amax_ = amax
        scale = (
            _four_over_six(tiles, block, g, amax_, cast) if cast.error else block_scale(block, g)
        )
        multiplier = block_multiplier(scale, g)
    u = None
    if cast.stochastic:
        if seed is None:
            raise ValueError("seed: stochastic rounding needs an int64 tensor [seed, offset]")
        u = uniform16(rows, tiles.shape[2] * tiles.shape[3], seed, int(col))
        u = _tiles(u, fmt.tile)
    codes = encode(tiles * multiplier[:, None, :, None], element, u)
    codes = codes.reshape(tiles.shape[0] * tiles.shape[1], tiles.shape[2] * tiles.shape[3])
    repeat = fmt.tile[0] // fmt.scale_tile[0]  # a 2-D tile's scale, once for each of its rows
    scale = scale.repeat_interleave(repeat, dim=0)[: cdiv(rows, fmt.scale_tile[0])]
    if fmt.scale_transposed:
        scale = scale.t()
    shape = fmt.scale_shape(rows, cols)
    scale = pad(scale, (0, shape[1] - scale.shape[1], 0, shape[0] - scale.shape[0]))
    return codes[:rows, :cols].contiguous(), scale.contiguous(), amax


def _four_over_six(tiles: Tensor, block: Tensor, g: TwoLevel, amax: Tensor, cast: Cast) -> Tensor:
    """E4M3 byte of each block: the scale that maps its amax to 6, or to 4 if that errs less.

    A candidate's error is summed over the block's 16 columns in index order; over the 16 rows of a
    2-D tile by halves (8, 4, 2, 1).
    """
    base = divide(block, E2M1.max) * g.encode
    candidates = (e4m3_scale(base), e4m3_scale(1.5 * base))
    errors = []
    for byte in candidates:
        scaled = encode(tiles * block_multiplier(byte, g)[:, None, :, None], E2M1)
        errors.append(_error(scaled, byte, tiles, amax, cast))
    return torch.where(errors[1] < errors[0], candidates[1], candidates[0])


def _error(codes: Tensor, byte: Tensor, tiles: Tensor, amax: Tensor, cast: Cast) -> Tensor:
    sf = decode(byte, E4M3)[:, None, :, None]
    value = divide(decode(codes, E2M1) * sf * amax.reshape(-1, 1, 1, 1), E2M1.max * cast.scale_max)
    err = (value - tiles).abs() if cast.error == "MAE" else (value - tiles) ** 2
    total = err[..., 0]
    for i in range(1, err.shape[-1]):
        total = total + err[..., i]
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total[:, 0]
