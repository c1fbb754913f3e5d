"""From a cast to the kernels that serve it, by the data of its format."""

from __future__ import annotations

from torch import Tensor

from ..formats import Cast
from ..layout import pad
from . import blocks, fp4, fp4_amax, tensorwise
from .dequantize import dequantize
from .swizzle import swizzle
from .transpose import transpose

__all__ = [
    "amax",
    "dequantize",
    "fake_quantize",
    "quantize",
    "quantize_scaled",
    "supports",
    "swizzle",
    "transpose",
]


def supports(cast: Cast) -> bool:
    """Whether kernels make what the reference makes for this cast."""
    if cast.format.two_level:
        return fp4.supports(cast)
    return cast.format.element is not None


def quantize(
    x: Tensor,
    row: Cast | None,
    col: Cast | None,
    out: dict[str, Tensor],
    row_amax: Tensor | None,
    col_amax: Tensor | None,
    seed: Tensor | None,
) -> None:
    """`x[M, K]` -> `out`, the buffers of `layout.parts` by name."""
    cast = row or col
    assert cast is not None and cast.format.element is not None
    if cast.format.tile is None:
        tensorwise.cast_current(
            x,
            cast.format.element,
            pow2=cast.pow2,
            eps=cast.eps,
            row=out.get("row_data"),
            col=out.get("col_data"),
            scale_inv=out["scale"],
            amax=row_amax if row_amax is not None else col_amax,
            amax_out=out.get("amax"),
            pad=pad(cast, *x.shape),
        )
    elif cast.format.two_level:
        _global_amaxes(x, row, col, out, row_amax, col_amax)
        fp4.cast_fp4(x, row=row, col=col, seed=seed, **_named(out))
    else:
        blocks.cast_blocks(x, row=row, col=col, **out)


def quantize_scaled(
    x: Tensor, scale: Tensor, amax: Tensor | None, cast: Cast, out: dict[str, Tensor]
) -> None:
    """Delayed scaling into `out`; `amax`, if any, is a running maximum."""
    assert cast.format.element is not None
    tensorwise.cast_scaled(
        x,
        cast.format.element,
        scale=scale,
        amax=amax,
        row=out.get("row_data"),
        col=out.get("col_data"),
        scale_inv=out["scale"],
        scale_out=out.get("kept"),
        pad=pad(cast, *x.shape),
    )


def amax(x: Tensor, row: Cast | None, col: Cast | None, out: list[Tensor]) -> None:
    """Global amaxes of the directions present, one if they share it."""
    cast = row or col
    assert cast is not None
    if not cast.format.two_level:
        tensorwise.amax(x, out[0])
        return
    row_amax = out[0] if row is not None else None
    fp4_amax.amax_fp4(x, row=row, col=col, row_amax=row_amax, col_amax=out[-1] if col else None)


def fake_quantize(
    x: Tensor,
    row: Cast | None,
    col: Cast | None,
    out: dict[str, Tensor],
    seed: Tensor | None,
) -> None:
    """bf16 operands of an emulated format; see `dispatch.fake_quantize` for the names in `out`."""
    cast = row or col
    assert cast is not None
    buffers = {
        "row_out": out.get("row"),
        "col_out": out.get("col"),
        "col_data": out.get("col_data"),
        "col_scale": out.get("col_scale"),
    }
    if cast.format.two_level:
        amaxes = {"row_amax": out.get("row_amax"), "col_amax": out.get("col_amax")}
        fp4.fake_fp4(x, row=row, col=col, seed=seed, **amaxes, **buffers)
    else:
        blocks.fake_blocks(x, row=row, col=col, **buffers)


def _global_amaxes(
    x: Tensor,
    row: Cast | None,
    col: Cast | None,
    out: dict[str, Tensor],
    row_amax: Tensor | None,
    col_amax: Tensor | None,
) -> None:
    """Fill the amaxes in `out`: with what is known, else from one read of x."""
    known = {"row_amax": row_amax, "col_amax": col_amax}
    for name, value in known.items():
        if name in out and value is not None:
            out[name].copy_(value)
    missing_row = out.get("row_amax") if row_amax is None else None
    missing_col = out.get("col_amax") if col_amax is None else None
    if missing_row is not None or missing_col is not None:
        fp4_amax.amax_fp4(
            x,
            row=row if missing_row is not None else None,
            col=col if missing_col is not None else None,
            row_amax=missing_row,
            col_amax=missing_col,
        )


def _named(out: dict[str, Tensor]) -> dict[str, Tensor | None]:
    names = ("row_data", "row_scale", "row_amax", "col_data", "col_scale", "col_amax")
    return {name: out.get(name) for name in names}
