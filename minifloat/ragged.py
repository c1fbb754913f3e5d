"""Casts of matrices whose rows come in groups, with the groups' sizes on the device.

Member i of `x[M, K]` is its rows `[sum(sizes[:i]), sum(sizes[:i + 1]))`; without sizes, all members
are equal. Each part of `layout.parts` becomes one flat buffer, members back to back:

    buffer[part][at(i) : at(i + 1)] = part of quantize(member i),  at(i) = sum of numels before i

which is what quantizing each member alone gives, bit for bit. The host knows M and the number of
members but not the sizes, so a buffer has room for the worst sizes there could be (`room`); what
lies behind the last member is unspecified.

On CUDA one launch casts all members; elsewhere, and with options no kernel has, each by itself.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import casting, dispatch, env, library, reference
from .formats import Cast, Scale, cdiv, find_format
from .inputs import check_input, check_seed, holds
from .layout import Part, parts, shares_scale
from .library import op as _op
from .library import traced as _traced

__all__ = [
    "Place",
    "as_lines",
    "check_sizes",
    "dequantize",
    "dequantize_lines",
    "exact",
    "integers",
    "kernels",
    "places",
    "quantize",
    "quantize_members",
    "quantize_scaled",
    "room",
    "rows_at_once",
    "sums",
]

# Every rounding of a format's shapes (tiles, padding, packing) divides it.
_PERIOD = 512


class Place(NamedTuple):
    """Where a member's part lies in the flat buffer of that part."""

    at: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return _numel(self.shape)

    def of(self, buffer: Tensor) -> Tensor:
        """The member's part, as a view."""
        return buffer.narrow(0, self.at, self.numel).view(self.shape)


def _numel(shape: Sequence[int]) -> int:
    n = 1
    for d in shape:
        n = n * d
    return n


def places(
    shapes: Iterable[Sequence[int]], row: Cast | None, col: Cast | None
) -> list[dict[str, Place]]:
    """For each member, {part: its place}, the members packed back to back."""
    end: dict[str, int] = {}
    out = []
    for shape in shapes:
        here = {}
        for part in parts(tuple(shape), row, col):
            here[part.name] = Place(end.get(part.name, 0), part.shape)
            end[part.name] = end.get(part.name, 0) + _numel(part.shape)
        out.append(here)
    return out


def room(shape: Sequence[int], num: int, ragged: bool, *casts: Cast | None) -> list[Part]:
    """The flat buffers for `num` members of `x[M, K]`: exact for equal members, else a bound.

    A part of m rows has `f(m)` elements: the same for all m (an amax), or a sum of steps with
    periods that divide P = 512, so that `f(m) <= f(P) m / P + f(1) - f(P) / P` for m >= 1, with
    equality at 1, and `f(0) = 0`. Summed over the members, this bounds them all.
    """
    m, k = shape
    row, col = casts
    if not ragged:
        one = parts((m // num, k), row, col)
        return [Part(p.name, (num * _numel(p.shape),), p.dtype) for p in one]
    out = []
    of_rows = [parts((rows, k), row, col) for rows in (0, 1, _PERIOD)]
    for none, first, period in zip(*of_rows, strict=True):
        empty, one_row, rows = (_numel(p.shape) for p in (none, first, period))
        total = cdiv(rows * m + num * (_PERIOD * one_row - rows), _PERIOD)
        out.append(Part(first.name, (num * rows if empty == rows else total,), first.dtype))
    return out


def integers(given: Any, name: str) -> list[int]:
    """`given`, a sequence of integers or a tensor of them, as a list; the host waits for it."""
    try:
        found = given.tolist() if isinstance(given, Tensor) else given
        # The index of a number that a graph computes would be a constant.
        return [n if type(n) is int else operator.index(n) for n in found]
    except TypeError as error:
        raise TypeError(
            f"{name}: got {given!r}; a sequence of integers, or a tensor of them, is needed"
        ) from error


def check_sizes(sizes: Sequence[int], num: int, rows: int, name: str = "first_dims") -> None:
    """Raise for sizes that are not those of `num` members with `rows` rows together."""
    if len(sizes) != num:
        raise ValueError(f"{name}: got {len(sizes)} sizes; there are {num} members")
    if sizes and not holds(min(sizes) >= 0):
        raise ValueError(f"{name}: got {list(sizes)}; a member cannot have a negative size")
    if not holds(sum(sizes) == rows):
        raise ValueError(
            f"{name}: got {list(sizes)}, {sum(sizes)} rows together; the matrix has {rows}: the "
            "sizes must add up to its rows"
        )


def _sizes(sizes: Tensor | None, num: int, rows: int) -> list[int]:
    """The sizes on the host: the reference's way, which waits for the device."""
    if sizes is None:
        if rows % num != 0:
            raise ValueError(
                f"num_tensors: got {num}; {rows} rows do not divide into that many equal members: "
                "pass first_dims"
            )
        return [rows // num] * num
    found = [int(s) for s in sizes.tolist()]
    check_sizes(found, num, rows)
    return found


def kernels(x: Tensor, row: Cast | None, col: Cast | None) -> Any:
    """The grouped kernels where they serve both casts on x's device, else None.

    They read sizes on the device alone, and write nowhere else whatever those are.
    """
    if not (env.runs_kernels(x) and env.encodes(x.device)):
        return None
    from .kernels import ragged_entry

    return ragged_entry if ragged_entry.supports(row, col) else None


def _check(x: Tensor, sizes: Tensor | None, num: int) -> None:
    if x.dim() != 2:
        raise ValueError(f"tensor: got shape {tuple(x.shape)}; a matrix [rows, columns] is needed")
    if not hasattr(num, "__index__") or num < 1:
        raise ValueError(f"num_tensors: got {num!r}; an int >= 1 is needed")
    if sizes is None:
        return
    if sizes.dtype not in (torch.int32, torch.int64) or sizes.dim() != 1:
        raise ValueError(
            f"first_dims: got {sizes.dtype} of shape {tuple(sizes.shape)}; int32 or int64 of shape "
            f"({num},) is needed"
        )
    if sizes.shape[0] != num:
        raise ValueError(f"first_dims: got {sizes.shape[0]} sizes; there are {num} members")


# --------------------------------------------------------------------------------------- quantize
def quantize(
    x: Tensor,
    sizes: Tensor | None,
    num: int,
    row: Cast | None,
    col: Cast | None,
    *,
    seed: Tensor | None = None,
    swizzle: bool = False,
) -> list[Tensor]:
    """The buffers of `room`, in its order; with one scale for a member, then the amaxes `[num]`
    that the scales came from, and the encode scales `[num]` whose reciprocals they are.

    Member i is rounded stochastically with `[seed, offset + i]`. `swizzle` puts scales into the
    layout GEMMs read, where the format has one.
    """
    check_input(x, row, col)
    check_seed(seed)
    _check(x, sizes, num)
    arguments = (x, sizes, num, row, col, seed, swizzle)
    return _op("group_quantize")(*arguments) if _traced() else _quantize(*arguments)


def _quantize(
    x: Tensor,
    sizes: Tensor | None,
    num: int,
    row: Cast | None,
    col: Cast | None,
    seed: Tensor | None,
    swizzle: bool,
) -> list[Tensor]:
    out = _quantize_fake(x, sizes, num, row, col, seed, swizzle)
    if x.is_meta:  # shapes alone, which sizes do not change
        return out
    fused = None if swizzle else kernels(x, row, col)
    if fused is not None:
        fused.quantize(casting.matrix(x), sizes, num, row, col, seed, out)
        return out
    members = torch.split(x, _sizes(sizes, num, x.shape[0]))
    _fill(members, row, col, seed, swizzle, out)
    return out


def quantize_members(
    members: Sequence[Tensor],
    row: Cast | None,
    col: Cast | None,
    *,
    seed: Tensor | None = None,
    swizzle: bool = False,
) -> list[Tensor]:
    """As `quantize`, of matrices that lie anywhere and may differ in both dims; nothing to spare.

    Each member is a launch of its own.
    """
    for i, member in enumerate(members):
        check_input(member, row, col, f"tensors[{i}]")
    check_seed(seed)
    (device,) = {m.device for m in members}
    out = [
        torch.empty(p.shape, dtype=p.dtype, device=device)
        for p in exact([m.shape for m in members], row, col)
    ]
    out += _amaxes(len(members), device, row, col)
    _fill(members, row, col, seed, swizzle, out)
    return out


def exact(shapes: Sequence[Sequence[int]], row: Cast | None, col: Cast | None) -> list[Part]:
    """The flat buffers for members of these shapes, with nothing to spare."""
    total: dict[str, Part] = {}
    for shape in shapes:
        for p in parts(tuple(shape), row, col):
            before = total[p.name].shape[0] if p.name in total else 0
            total[p.name] = Part(p.name, (before + _numel(p.shape),), p.dtype)
    return list(total.values())


def _fill(
    members: Sequence[Tensor],
    row: Cast | None,
    col: Cast | None,
    seed: Tensor | None,
    swizzle: bool,
    out: list[Tensor],
) -> None:
    """Cast each member on its own and put its parts where they belong."""
    wide = _is_tensor_wide(row, col)
    for i, (member, at) in enumerate(
        zip(members, places([m.shape for m in members], row, col), strict=True)
    ):
        of_member = None if seed is None else torch.stack((seed[0], seed[1] + i))
        made = dispatch.quantize(member, row, col, seed=of_member, keep_amax=wide)
        if swizzle:
            made = _swizzled(made, list(at), row, col)
        for buffer, place, part in zip(out, at.values(), made, strict=False):
            place.of(buffer).copy_(part)
        if wide:
            out[-2][i : i + 1].copy_(made[-1])
    if wide:
        out[-1].copy_(_encode_scale(out[-2], row, col))


def _encode_scale(amax: Tensor, row: Cast | None, col: Cast | None) -> Tensor:
    cast = row if row is not None else col
    assert cast is not None and cast.format.element is not None
    return reference.fp8_scale(amax, cast.format.element, eps=cast.eps, pow2=cast.pow2)


def _is_tensor_wide(row: Cast | None, col: Cast | None) -> bool:
    return any(c is not None and shares_scale(c) for c in (row, col))


def _swizzled(
    made: list[Tensor], names: list[str], row: Cast | None, col: Cast | None
) -> list[Tensor]:
    out = list(made)
    for i, name in enumerate(names):
        cast = {"row_scale": row, "col_scale": col}.get(name)
        if cast is not None and cast.format.swizzles:
            source = name == "col_scale" and not cast.format.col_transposed
            scale = out[i].t() if source else out[i]
            out[i] = dispatch.swizzle(scale).reshape(out[i].shape)
    return out


def _quantize_fake(
    x: Tensor,
    sizes: Tensor | None,
    num: int,
    row: Cast | None,
    col: Cast | None,
    seed: Tensor | None,
    swizzle: bool,
) -> list[Tensor]:
    described = room(x.shape, num, sizes is not None, row, col)
    made = [torch.empty(p.shape, dtype=p.dtype, device=x.device) for p in described]
    return made + _amaxes(num, x.device, row, col)


def _amaxes(num: int, device: torch.device, row: Cast | None, col: Cast | None) -> list[Tensor]:
    """Room for the amaxes and encode scales of members that have one scale each."""
    wide = _is_tensor_wide(row, col)
    return [torch.empty(num, dtype=torch.float32, device=device) for _ in range(2 if wide else 0)]


# -------------------------------------------------------------------------------- delayed scaling
def quantize_scaled(
    x: Tensor,
    sizes: Tensor | None,
    num: int,
    scales: Tensor,
    cast: Cast,
    *,
    row: bool,
    col: bool,
    seen: Tensor | None = None,
) -> list[Tensor]:
    """Cast member i with `scales[i]`: the row copy and the column copy, those asked for, then
    `1 / scales`, then the members' amaxes `[num]`.

    `seen[num]`, if given, is a running maximum of those.
    """
    check_input(x, cast if row else None, cast if col else None)
    _check(x, sizes, num)
    arguments = (x, sizes, num, scales, cast, row, col)
    if not _traced():
        return _quantize_scaled(*arguments, seen)
    made: list[Tensor] = _op("group_quantize_scaled")(*arguments)
    if seen is not None:
        seen.copy_(torch.maximum(seen, made[-1]))
    return made


def _quantize_scaled(
    x: Tensor,
    sizes: Tensor | None,
    num: int,
    scales: Tensor,
    cast: Cast,
    row: bool,
    col: bool,
    seen: Tensor | None = None,
) -> list[Tensor]:
    out = _quantize_scaled_fake(x, sizes, num, scales, cast, row, col)
    out[-1] = out[-1].zero_() if seen is None else seen
    if x.is_meta:
        return out
    fused = kernels(x, cast, None)
    if fused is not None:
        fused.quantize_scaled(casting.matrix(x), sizes, num, scales, cast, row, col, out)
        return out
    members = torch.split(x, _sizes(sizes, num, x.shape[0]))
    at = places([m.shape for m in members], cast if row else None, cast if col else None)
    for i, member in enumerate(members):
        one = out[-1][i : i + 1]
        made = dispatch.quantize_scaled(member, scales[i : i + 1], one, cast, row=row, col=col)
        for buffer, place, part in zip(out, at[i].values(), made, strict=False):
            place.of(buffer).copy_(part)
    return out


def _quantize_scaled_fake(
    x: Tensor,
    sizes: Tensor | None,
    num: int,
    scales: Tensor,
    cast: Cast,
    row: bool,
    col: bool,
) -> list[Tensor]:
    one = cast if row else None, cast if col else None
    return _quantize_fake(x, sizes, num, *one, None, False)[:-1]  # the encode scales were given


# ------------------------------------------------------------------------------------- dequantize
def dequantize(
    buffers: tuple[Tensor, Tensor | None, Tensor | None],
    sizes: Tensor | None,
    num: int,
    cast: Cast,
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    col: bool = False,
) -> Tensor:
    """`[M, K]` of `shape`, its members read from (data, scale, amax) of one direction."""
    if cast.transforms:
        raise ValueError(
            "columnwise: a Hadamard-transformed copy holds transformed values and cannot be "
            "dequantized; keep the rowwise copy"
        )
    arguments = (*buffers, sizes, num, cast, list(shape), dtype, col)
    return _op("group_dequantize")(*arguments) if _traced() else _dequantize(*arguments)


def _dequantize(  # noqa: PLR0913  (the operator's)
    data: Tensor,
    scale: Tensor | None,
    amax: Tensor | None,
    sizes: Tensor | None,
    num: int,
    cast: Cast,
    shape: Sequence[int],
    dtype: torch.dtype,
    col: bool,
) -> Tensor:
    if data.is_cuda and sizes is not None and not col:
        return rows_at_once(data, scale, amax, sizes, cast, shape, dtype)
    out = torch.empty(tuple(shape), dtype=dtype, device=data.device)
    if data.is_meta:
        return out
    m, k = shape
    of, prefix = ((None, cast), "col_") if col else ((cast, None), "row_")
    members = torch.split(out, _sizes(sizes, num, m))
    for member, at in zip(members, places([(len(t), k) for t in members], *of), strict=True):
        # One scale for the member has the name "scale", whichever copy it belongs to.
        scale_at, amax_at = at.get(f"{prefix}scale", at.get("scale")), at.get(f"{prefix}amax")
        part = dispatch.dequantize(
            at[f"{prefix}data"].of(data),
            None if scale is None or scale_at is None else scale_at.of(scale),
            None if amax is None or amax_at is None else amax_at.of(amax),
            cast,
            member.shape,
            dtype,
            col=col,
        )
        member.copy_(part)
    return out


def _dequantize_fake(  # noqa: PLR0913
    data: Tensor,
    scale: Tensor | None,
    amax: Tensor | None,
    sizes: Tensor | None,
    num: int,
    cast: Cast,
    shape: Sequence[int],
    dtype: torch.dtype,
    col: bool,
) -> Tensor:
    return data.new_empty(tuple(shape), dtype=dtype)


def rows_at_once(
    data: Tensor,
    scale: Tensor | None,
    amax: Tensor | None,
    sizes: Tensor,
    cast: Cast,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    """The values of row copies, all members at once. Nothing waits for the device; wrong sizes give
    wrong values, and nothing is read outside the buffers."""
    m, k = shape
    row, ends = torch.arange(m, device=data.device), torch.cumsum(sizes, 0)
    member = torch.searchsorted(ends, row, right=True).clamp(max=sizes.shape[0] - 1)
    of_all = {p.name: p.shape for p in parts((m, k), as_lines(cast), None)}
    lines = data[: _numel(of_all["row_data"])].view(of_all["row_data"])
    if cast.format.tile is not None:
        assert scale is not None
        # The shape rules are integer arithmetic, and a tensor of sizes goes through them like one.
        found: Any = {p.name: p.shape for p in parts((sizes, k), cast, None)}["row_scale"]  # type: ignore[arg-type]
        high, wide = (d if isinstance(d, Tensor) else torch.full_like(sizes, d) for d in found)
        first, wide = (torch.cumsum(high * wide, 0) - high * wide)[member], wide[member]
        _, _, (tall, long), _, transposed, *_ = cast.layout
        local = (row - (ends - sizes)[member]) // tall
        block = torch.arange(cdiv(k, long), device=data.device)
        if transposed:
            place = (first + local)[:, None] + wide[:, None] * block
        else:
            place = (first + local * wide)[:, None] + block
        of_row = scale[place.clamp(0, scale.shape[0] - 1)]  # [M, K/long]
        if as_lines(cast).layout[4]:
            of_row = of_row.t()
        scale = scale.new_zeros(of_all["row_scale"])
        scale[: of_row.shape[0], : of_row.shape[1]] = of_row
    if cast.row_scaled:
        assert amax is not None
        member, amax = row, amax[:m]
    return dequantize_lines(lines, scale, amax, member, cast, shape, dtype)


def dequantize_lines(
    data: Tensor,
    scale: Tensor | None,
    amax: Tensor | None,
    member: Tensor,
    cast: Cast,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    """`[M, K]` of a row copy whose block scales are those of `as_lines(cast)`; row i has the scale
    or amax of `member[i]`. The arithmetic is that of a member by itself."""
    if cast.format.two_level:
        assert amax is not None
        # The same arithmetic, by the amax of each row. How codes were found is no matter here.
        fmt = find_format(cast.format.element, cast.format.scale, (1, cast.format.tile[1]))  # type: ignore[arg-type,index]
        by_row = Cast(fmt.name, scale_max=cast.scale_max, row_scaled=True)
        return dispatch.dequantize(data, scale, amax[member], by_row, shape, dtype)
    if cast.format.tile is not None:
        return dispatch.dequantize(data, scale, None, as_lines(cast), shape, dtype)
    assert scale is not None and cast.format.element is not None
    code = cast.format.element.torch_dtype
    assert code is not None
    return (data.view(code).to(torch.float32) * scale[member][:, None]).to(dtype)


def as_lines(cast: Cast) -> Cast:
    """The cast whose layout a matrix of several members has: scales of square fp32 blocks are one
    for each row, since a member's rows may begin anywhere."""
    fmt = cast.format
    if fmt.scale is not Scale.F32 or fmt.tile is None or not fmt.square:
        return cast
    assert fmt.element is not None
    return cast.replace(format_name=find_format(fmt.element, fmt.scale, (1, fmt.tile[1])).name)


# ------------------------------------------------------------------------------------------- sums
def sums(x: Tensor, sizes: Tensor | None, num: int) -> Tensor:
    """`[num, K]`: the sum of each member's rows, in fp32, rounded once to x's dtype.

    Nothing waits for the device. The order of additions is fixed: no atomics.
    """
    _check(x, sizes, num)
    if sizes is None:
        equal = x.reshape(num, x.shape[0] // num, x.shape[1])
        return equal.sum(1, dtype=torch.float32).to(x.dtype)
    return _op("group_sum")(x, sizes) if _traced() else _sums(x, sizes)


def _sums(x: Tensor, sizes: Tensor) -> Tensor:
    if x.is_meta:
        return _sums_fake(x, sizes)
    if not x.is_cuda:
        _sizes(sizes, sizes.shape[0], x.shape[0])  # on the host it costs nothing to look
    lengths = sizes.to(x.device, torch.int64)
    found = torch.segment_reduce(x.float(), "sum", lengths=lengths, axis=0, unsafe=True)
    return found.to(x.dtype)


def _sums_fake(x: Tensor, sizes: Tensor) -> Tensor:
    return x.new_empty((sizes.shape[0], x.shape[1]))


# -------------------------------------------------------------------------------------------- ops
_CAST = f"{Cast.__module__}.{Cast.__qualname__}"
_OPS: tuple[library.Definition, ...] = (
    (
        f"group_quantize(Tensor x, Tensor? sizes, int num, {_CAST}? row, {_CAST}? col, "
        "Tensor? seed, bool swizzle) -> Tensor[]",
        _quantize,
        _quantize_fake,
    ),
    (
        f"group_quantize_scaled(Tensor x, Tensor? sizes, int num, Tensor scales, {_CAST} cast, "
        "bool row, bool col) -> Tensor[]",
        _quantize_scaled,
        _quantize_scaled_fake,
    ),
    (
        f"group_dequantize(Tensor data, Tensor? scale, Tensor? amax, Tensor? sizes, int num, "
        f"{_CAST} cast, SymInt[] shape, ScalarType dtype, bool col) -> Tensor",
        _dequantize,
        _dequantize_fake,
    ),
    ("group_sum(Tensor x, Tensor sizes) -> Tensor", _sums, _sums_fake),
)

library.define(_OPS, replayed=True)
