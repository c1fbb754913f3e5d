"""One copy of a square-tiled format from the other, without the source."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .. import dispatch, reference
from ..formats import Cast, cdiv
from ..layout import flatten, parts

__all__ = ["derive"]


def derive(
    data: Tensor, scale: Tensor, amax: Tensor | None, cast: Cast, shape: Sequence[int], *, col: bool
) -> dict[str, Tensor]:
    """The column copy (`col`) or the row copy of a tensor of `shape`, by part, from the other's
    buffers. Exact: the tile is its own transpose. A tensor-wide scale serves both and is left out.
    """
    fmt, prefix = cast.format, "col_" if col else "row_"
    assert fmt.element is not None
    m, k = flatten(shape)
    # The copy that is there, contraction last, is the [r, c] operand.
    r, c = (m, k) if col else (k, m)
    if fmt.tile is None:
        made = {"data": dispatch.transpose(data.reshape(r, c))}
    elif fmt.col_transposed:
        flipped = reference.flip(
            data.reshape(r, cdiv(c, fmt.element.per_byte)), scale, cast, (r, c)
        )
        made = {"data": flipped[0], "scale": flipped[1]}
    else:
        # Both copies store their codes in the source's orientation; only the scales turn.
        oriented = scale if col else scale.t()
        codes, turned = reference.flip(data.reshape(m, k), oriented, cast, (r, c))
        made = {"data": codes, "scale": turned if col else turned.t()}
    if amax is not None:
        made["amax"] = amax.clone()
    described = parts(shape, None if col else cast, cast if col else None)
    shapes = {p.name: p.shape for p in described}
    return {
        prefix + kind: t.reshape(shapes[prefix + kind]).contiguous() for kind, t in made.items()
    }
