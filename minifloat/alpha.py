"""What multiplies a whole product: the scale of a tensor, or the global one of two levels."""

from __future__ import annotations

from torch import Tensor

from . import reference
from .formats import Operand

__all__ = ["alpha", "is_scaled", "number", "scale_of_product", "times"]


def number(o: Operand) -> tuple[Tensor, float] | None:
    """(tensor of one element, factor) whose product scales all of the product, if that is so."""
    if not is_scaled(o) or o.cast.row_scaled:
        return None
    if o.cast.format.two_level:
        assert o.amax is not None
        return o.amax, reference.dequantize_factor(o.cast)
    assert o.scale is not None
    return o.scale, 1.0


def is_scaled(o: Operand) -> bool:
    """Whether `alpha` of it is a tensor."""
    fmt = o.cast.format
    whole = fmt.tile is None and fmt.element is not None and o.scale is not None
    return fmt.two_level or whole


def alpha(o: Operand) -> Tensor | None:
    """What multiplies the product: `[1, 1]`, or `[R, 1]` where each row has its own; None: 1."""
    if not is_scaled(o):
        return None
    if o.cast.format.two_level:
        assert o.amax is not None
        return (o.amax * reference.dequantize_factor(o.cast)).reshape(-1, 1)
    assert o.scale is not None
    return o.scale.reshape(1, 1)


def times(o: Operand, alpha: float) -> Operand | None:
    """`o` whose values are alpha times as large, if a number of the whole operand says so."""
    if not is_scaled(o):
        return None
    if o.cast.format.two_level:
        assert o.amax is not None
        return o._replace(amax=o.amax * alpha)
    assert o.scale is not None
    return o._replace(scale=o.scale * alpha)


def scale_of_product(a: Operand, b: Operand) -> Tensor:
    """fp32 `[M or 1, N or 1]`."""
    sa, sb = alpha(a), alpha(b)
    if sa is None or sb is None:
        one = sb.t() if sa is None else sa  # type: ignore[union-attr]
        return one
    return sa * sb.t()
