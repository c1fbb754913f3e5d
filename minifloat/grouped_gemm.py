"""Products of matrices whose rows come in groups, the groups' sizes on the device.

    rows         y[r_e]  = a[r_e] b_e^T (+ bias_e)      r_e: the rows of member e
    contraction  d_e     = a[r_e]^T c[r_e]
    sums         s_e     = sum of a[r_e] over rows

Each is one operator, whose result has a shape that no size decides. On CUDA one launch multiplies
all members (`_rows_at_once`, `_contraction_at_once`): codes of 8 bits by tensor cores, what those
do not take as the bf16 values that hold it exactly. The rule is the loop over members, each the
product that `gemm` has for it: what a layer of its own would compute. It reads the sizes on the
host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import env, library, ragged, rates, reference, spread
from .emulated import values
from .formats import Cast, Operand, rup
from .gemm import gemm
from .layout import parts
from .operands import column
from .spread import Members

__all__ = ["Grouped", "contraction", "members", "rows", "sums"]


class Grouped(NamedTuple):
    """One direction of a matrix `[M, K]` whose rows come in groups.

    Codes lie in the buffers of `spread`; those of equal members, such as weights, in the flat ones
    of `ragged`, each as it would be alone. Data that is not codes is the matrix itself.
    """

    data: Tensor
    scale: Tensor | None
    amax: Tensor | None
    cast: Cast
    shape: tuple[int, int]
    col: bool
    spread: bool = False


def members(g: Grouped, sizes: Sequence[int]) -> list[Operand]:
    """What `gemm` reads of each member."""
    if g.spread:
        return _spread_members(g, sizes)
    k = g.shape[1]
    if g.data.dtype is not torch.uint8:
        each = torch.split(g.data, list(sizes))
        if g.col:
            return [Operand(p.t(), None, None, g.cast, len(p)) for p in each]
        return [Operand(p, None, None, g.cast, k) for p in each]
    prefix, casts = ("col_", (None, g.cast)) if g.col else ("row_", (g.cast, None))
    out = []
    for m, at in zip(sizes, ragged.places([(m, k) for m in sizes], *casts), strict=True):
        # One scale for the member has the name "scale", whichever copy it belongs to.
        scale_at, amax_at = at.get(f"{prefix}scale", at.get("scale")), at.get(f"{prefix}amax")
        data = at[f"{prefix}data"].of(g.data)
        scale = None if g.scale is None or scale_at is None else scale_at.of(g.scale)
        amax = None if g.amax is None or amax_at is None else amax_at.of(g.amax)
        made = column(data, scale, amax, g.cast, m) if g.col else None
        out.append(Operand(data, scale, amax, g.cast, k) if made is None else made)
    return out


def _spread_members(g: Grouped, sizes: Sequence[int]) -> list[Operand]:
    prefix = "col_" if g.col else "row_"
    cast = spread.as_lines(g.cast)
    found = {f"{prefix}data": g.data}
    scale_name = "scale" if cast.format.tile is None else f"{prefix}scale"
    if g.scale is not None:
        found[scale_name] = g.scale
    if g.amax is not None:
        found[f"{prefix}amax"] = g.amax
    out = []
    start = place = 0
    for e, m in enumerate(sizes):
        room = max(spread.PAD, rup(m, spread.PAD))
        of_row, of_col = (None, g.cast) if g.col else (g.cast, None)
        at = (start, start + m, place, place + room)
        part = spread.views(found, e, at, of_row, of_col)
        data, scale = part[f"{prefix}data"], part.get(scale_name)
        amax = part.get(f"{prefix}amax")
        if cast is not g.cast and scale is not None:  # one scale for a block's rows, again
            assert g.cast.format.tile is not None
            scale = scale[:, :: g.cast.format.tile[0]].t()
        if g.data.is_cuda:  # kernels read parts as they lie when a member is alone
            stored = {p.name: p.shape for p in parts((m, g.shape[1]), of_row, of_col)}
            data = _padded(data, stored[f"{prefix}data"])
            scale = None if scale is None else _padded(scale, stored[scale_name])
        if g.col:
            out.append(column(data, scale, amax, g.cast, m))
        else:
            out.append(Operand(data, scale, amax, g.cast, g.shape[1]))
        start, place = start + m, place + room
    return out


def _padded(view: Tensor, shape: Sequence[int]) -> Tensor:
    """A copy with zeros up to `shape`."""
    out = view.new_zeros(tuple(shape))
    out[tuple(slice(n) for n in view.shape)] = view
    return out


# --------------------------------------------------------------------------------------- the fronts
def rows(
    a: Grouped,
    b: Grouped,
    members: Members,
    out_dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    fast: bool = False,
) -> Tensor:
    """`[M, N]`: each member of `a[M, K]` by the matrix of `b` with its index, and its `bias[e]`.

    `b` holds equal members, as many as there are sizes.
    """
    arguments = (*a, *b, *members, out_dtype, bias, fast)
    return library.op("grouped_rows")(*arguments) if library.traced() else _rows(*arguments)


def contraction(
    a: Grouped,
    b: Grouped,
    members: Members,
    out_dtype: torch.dtype,
    *,
    fast: bool = False,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """`[members, N, K]` of the column operands of `a[M, N]` and `b[M, K]`; zeros for no rows.

    With `out` the result is stored there, or added to it in its dtype.
    """
    arguments = (*a, *b, *members)
    if out is not None:
        shape = (members.sizes.shape[0], a.shape[1], b.shape[1])
        if tuple(out.shape) != shape:
            raise ValueError(
                f"main_grad: got shape {tuple(out.shape)}; the gradient of the weights has {shape}"
            )
        if library.traced():
            library.op("grouped_contraction_into")(*arguments, out, accumulate, fast)
        else:
            _contraction_into(*arguments, out, accumulate, fast)
        return out
    if library.traced():
        return library.op("grouped_contraction")(*arguments, out_dtype, fast)  # type: ignore[no-any-return]
    return _contraction(*arguments, out_dtype, fast)


def sums(a: Tensor, sizes: Tensor) -> Tensor:
    """`[members, K]`: each member summed over its rows."""
    return library.op("grouped_sums")(a, sizes) if library.traced() else _sums(a, sizes)


# --------------------------------------------------------------------------------------- the loops
_A, _B, _M = slice(0, 7), slice(7, 14), slice(14, 17)


def _host(members: Members, total: int) -> list[int]:
    """The sizes on the host: a wait for the device, if they are on one."""
    found = [int(s) for s in members.sizes.tolist()]
    ragged.check_sizes(found, len(found), total, "m_splits")
    return found


def _rows(*args: Any) -> Tensor:
    a, b, group = Grouped(*args[_A]), Grouped(*args[_B]), Members(*args[_M])
    out_dtype, bias, fast = args[17:]
    if env.runs_kernels(a.data):
        return _rows_at_once(a, b, group, bias, fast, *args)
    y = _rows_fake(*args)
    num = group.num
    at = 0
    host = _host(group, a.shape[0])
    each = members(a, host), members(b, [b.shape[0] // num] * num)
    for i, (x, w) in enumerate(zip(*each, strict=True)):
        if host[i]:
            of_bias = None if bias is None else bias[i]
            y[at : at + host[i]] = gemm(x, w, out_dtype, bias=of_bias, fast=fast)
        at += host[i]
    return y


def _rows_fake(*args: Any) -> Tensor:
    a, b = Grouped(*args[_A]), Grouped(*args[_B])
    n = b.shape[1] if b.col else b.shape[0] // args[14].shape[0]
    return a.data.new_empty((a.shape[0], n), dtype=args[17])


def _contraction(*args: Any) -> Tensor:
    a, b, group = Grouped(*args[_A]), Grouped(*args[_B]), Members(*args[_M])
    if env.runs_kernels(a.data):
        return _contraction_at_once(a, b, group, args[17], None, False, args[18])
    out = _contraction_fake(*args)
    _contraction_into(*args[:17], out, False, args[18])
    return out


def _contraction_fake(*args: Any) -> Tensor:
    a, b = Grouped(*args[_A]), Grouped(*args[_B])
    return a.data.new_empty((args[14].shape[0], a.shape[1], b.shape[1]), dtype=args[17])


def _contraction_into(*args: Any) -> None:
    a, b, group = Grouped(*args[_A]), Grouped(*args[_B]), Members(*args[_M])
    out, accumulate, fast = args[17:]
    if env.runs_kernels(a.data):
        into = out if out.is_contiguous() else None
        made = _contraction_at_once(a, b, group, out.dtype, into, accumulate, fast)
        if made is not out:
            out.add_(made) if accumulate else out.copy_(made)
        return
    host = _host(group, a.shape[0])
    each = members(a, host), members(b, host)
    for i, (g, x) in enumerate(zip(*each, strict=True)):
        if host[i]:
            gemm(g, x, out.dtype, fast=fast, out=out[i], accumulate=accumulate)
        elif not accumulate:
            out[i].zero_()


def _contraction_into_fake(*args: Any) -> None:
    return None


def _sums(a: Tensor, sizes: Tensor) -> Tensor:
    if a.is_cuda:
        return ragged.sums(a, sizes, sizes.shape[0])
    host = sizes.tolist()
    ragged.check_sizes(host, len(host), a.shape[0], "m_splits")
    return torch.stack([p.sum(0) for p in torch.split(a, host)])


def _sums_fake(a: Tensor, sizes: Tensor) -> Tensor:
    return a.new_empty((sizes.shape[0], a.shape[1]))


# ------------------------------------------------------------------------------------- all at once
_GROUPED_MM = (9, 10)  # where PyTorch's grouped product is a kernel; elsewhere it reads the sizes
_FP8_DOT = 89  # the first compute capability whose tensor cores multiply 8-bit floats


class _Read(NamedTuple):
    """What a kernel reads of an operand: contraction last, in memory or as a view."""

    data: Tensor  # codes as PyTorch types them, or values
    blocks: Tensor | None = None  # fp32 scales per block
    alpha: Tensor | None = None  # fp32 `[E]`, what multiplies a member's product


def _as_codes(a: Grouped, b: Grouped) -> bool:
    """Whether both are codes that a kernel multiplies."""
    held = a.data.dtype is torch.uint8 and b.data.dtype is torch.uint8
    return held and rates.multiplies_codes(a.cast, b.cast)


def _alike(a: _Read, b: _Read) -> tuple[_Read, _Read]:
    """Both in a dtype that tensor cores of the device multiply: codes, or one that holds both."""
    x, w = a.data, b.data
    if x.element_size() == 1 and w.element_size() == 1:
        capability = env.capability(x.device)
        if capability is not None and capability >= _FP8_DOT:
            return a, b
        return a._replace(data=x.to(torch.bfloat16)), b._replace(data=w.to(torch.bfloat16))
    dtype = torch.promote_types(x.dtype, w.dtype)
    return a._replace(data=x.to(dtype)), b._replace(data=w.to(dtype))


def _alpha(g: Grouped) -> Tensor | None:
    """What multiplies a member's product."""
    fmt = g.cast.format
    if g.data.dtype is not torch.uint8:
        return None
    if fmt.two_level:
        assert g.amax is not None
        return g.amax * reference.dequantize_factor(g.cast)
    return g.scale if fmt.tile is None else None


def _matrix(g: Grouped, codes: bool) -> _Read:
    """A spread operand, or values; a column operand is `[K, M]`, or `[K, width]` if spread."""
    if g.data.dtype is not torch.uint8:
        return _Read(g.data.t() if g.col else g.data)
    cast = spread.as_lines(g.cast)
    fmt = cast.format
    assert fmt.element is not None
    if codes:
        assert fmt.element.torch_dtype is not None
        data = g.data.view(fmt.element.torch_dtype)
        return _Read(data, None if fmt.tile is None else g.scale, _alpha(g))
    if g.col:
        rows, columns = g.data.shape
        wide = columns * fmt.element.per_byte if fmt.col_transposed else rows
        o = column(g.data, g.scale, g.amax, cast, wide)
    else:
        o = Operand(g.data, g.scale, g.amax, cast, g.shape[1])
    return _Read(values(o, torch.bfloat16), None, _alpha(g))


def _stack(g: Grouped, num: int, codes: bool) -> _Read:
    """Equal members `[num, R, C]`, as flat buffers have them."""
    n, k = g.shape[0] // num, g.shape[1]
    r, c = (k, n) if g.col else (n, k)
    if g.data.dtype is not torch.uint8:
        data = g.data.view(num, n, k)
        return _Read(data.transpose(1, 2) if g.col else data)
    fmt = g.cast.format
    assert fmt.element is not None
    if codes:
        assert fmt.element.torch_dtype is not None
        data = g.data.view(fmt.element.torch_dtype).view(num, r, c)
        if fmt.tile is None:
            return _Read(data, None, g.scale)
        assert g.scale is not None
        return _Read(data, g.scale.view(num, *fmt.scale_shape(r, c)))
    return _Read(_stacked_values(g, num, n, k), None, _alpha(g))


def _stacked_values(g: Grouped, num: int, n: int, k: int) -> Tensor:
    """bf16 values of equal members, `[num, R, C]`.

    Members of whole blocks and whole tiles of scales are one matrix: one launch. Others have each
    its own.
    """
    fmt = g.cast.format
    r, c = (k, n) if g.col else (n, k)
    whole = n % 128 == 0 if not (g.col and fmt.col_transposed) else r % 128 == 0 and c % 64 == 0
    if not whole or fmt.scale_transposed or fmt.tile is None or g.scale is None:
        each = members(g, [n] * num)
        return torch.stack([values(o, torch.bfloat16) for o in each])
    if g.col and not fmt.col_transposed:
        scale = g.scale.view(-1, fmt.scale_shape(k, 1)[0])
        o = column(g.data.view(num * n, k), scale, g.amax, g.cast, num * n)
        return values(o, torch.bfloat16).t().view(num, n, k).transpose(1, 2)
    scale = g.scale.view(num * r, -1)
    o = Operand(g.data.view(num * r, -1), scale, g.amax, g.cast, c)
    return values(o, torch.bfloat16).view(num, r, c)


def _rows_at_once(
    a: Grouped, b: Grouped, group: Members, bias: Tensor | None, fast: bool, *args: Any
) -> Tensor:
    from .kernels import grouped_gemm as kernel

    codes = _as_codes(a, b)
    x, w = _alike(_matrix(a, codes), _stack(b, group.num, codes))
    plain = x.alpha is None and w.alpha is None and bias is None
    if plain and _takes(args[17], x.data, w.data.transpose(1, 2)):
        ends = group.table[:, 1].contiguous()
        made: Tensor = torch._grouped_mm(x.data, w.data.transpose(1, 2), offs=ends)
        return made
    blocks = kernel.NO_BLOCKS
    if x.blocks is not None:
        blocks = kernel.SQUARE if b.cast.format.square else kernel.LINES
    y = _rows_fake(*args)
    kernel.rows(
        x.data if x.data.stride(1) == 1 else x.data.contiguous(),
        w.data,
        group.tiles,
        y,
        scale_a=x.alpha if x.blocks is None else x.blocks,
        scale_b=w.alpha if w.blocks is None else w.blocks,
        blocks=blocks,
        bias=bias,
        fast=fast,
    )
    return y


def _contraction_at_once(
    a: Grouped,
    b: Grouped,
    group: Members,
    dtype: torch.dtype,
    out: Tensor | None,
    accumulate: bool,
    fast: bool,
) -> Tensor:
    """The product: in `out`, if that is given and the kernel is ours; the caller stores another."""
    from .kernels import grouped_gemm as kernel

    codes = _as_codes(a, b)
    if codes:
        width = a.shape[1], b.shape[1]
        how: Any = {"out_dtype": dtype, "into": out is not None, "fast": fast}
        codes = rates.choose(a.cast, b.cast, *width, a.data.device, **how).name == rates.CODES
    padded = a.spread or b.spread
    if padded:
        a, b = (g if g.spread else _spread_out(g, group) for g in (a, b))
    x, w = _alike(_matrix(a, codes), _matrix(b, codes))
    plain = x.alpha is None and w.alpha is None and out is None
    if plain and _takes(dtype, x.data, w.data.t()):
        ends = group.table[:, 3 if padded else 1].contiguous()
        made: Tensor = torch._grouped_mm(x.data, w.data.t(), offs=ends)
        return made
    add = accumulate and out is not None
    if out is None:
        shape = (group.num, x.data.shape[0], w.data.shape[0])
        out = torch.empty(shape, dtype=dtype, device=x.data.device)
    kernel.contraction(
        x.data,
        w.data,
        group.table,
        out,
        scale_a=x.alpha if x.blocks is None else x.blocks,
        scale_b=w.alpha if w.blocks is None else w.blocks,
        blocks=x.blocks is not None,
        padded=padded,
        add=add,
        fast=fast,
    )
    return out


def _spread_out(g: Grouped, group: Members) -> Grouped:
    """A column operand of values, its rows at their members' places, zeros between them."""
    m = g.shape[0]
    table = group.table.long()
    number = torch.arange(m, device=g.data.device)
    e = torch.searchsorted(table[:, 1].contiguous(), number, right=True).clamp(max=group.num - 1)
    rows = spread.width(m, group.num)
    data = g.data.new_zeros((rows, g.shape[1]))
    data.index_copy_(0, table[e, 2] + number - table[e, 0], g.data)
    return g._replace(data=data, spread=True)


def _takes(dtype: torch.dtype, a: Tensor, b: Tensor) -> bool:
    """Whether PyTorch's grouped product takes `a` and `b`: bf16, with lines of 16 bytes."""
    capability = env.capability(a.device)
    if capability is None or capability // 10 not in _GROUPED_MM:
        return False
    # It pads the lines of its result to 16 bytes, where ours are as long as they are.
    if dtype is not torch.bfloat16 or b.shape[-1] % 8 != 0:
        return False
    for o in (a, b):
        straight = o.stride(-1) == 1
        line, length = (o.stride(-2), o.shape[-1]) if straight else (o.stride(-1), o.shape[-2])
        if (
            o.dtype is not torch.bfloat16
            or 1 not in o.stride()[-2:]
            or line % 8 != 0
            or line < length
            or o.numel() == 0
            or o.data_ptr() % 16 != 0
        ):
            return False
    return True


# ------------------------------------------------------------------------------------------ the ops
_CAST = f"{Cast.__module__}.{Cast.__qualname__}"
_GROUPED = (
    "Tensor {0}, Tensor? {0}_scale, Tensor? {0}_amax, {1} {0}_cast, SymInt[] {0}_shape, "
    "bool {0}_col, bool {0}_spread"
)
_PAIR = (
    f"{_GROUPED.format('a', _CAST)}, {_GROUPED.format('b', _CAST)}, "
    "Tensor sizes, Tensor table, Tensor tiles"
)
library.define(
    (
        (
            f"grouped_rows({_PAIR}, ScalarType out_dtype, Tensor? bias, bool fast) -> Tensor",
            _rows,
            _rows_fake,
        ),
        (
            f"grouped_contraction({_PAIR}, ScalarType out_dtype, bool fast) -> Tensor",
            _contraction,
            _contraction_fake,
        ),
        (
            f"grouped_contraction_into({_PAIR}, Tensor(o!) out, bool accumulate, bool fast) -> ()",
            _contraction_into,
            _contraction_into_fake,
        ),
        ("grouped_sums(Tensor a, Tensor sizes) -> Tensor", _sums, _sums_fake),
    ),
    replayed=True,
)
