"""Rows of tokens in the order of their experts, and back: gathers and ordered sums, on the device.

A `row_id_map` has the shape of the routing map, (tokens, experts) of a mask and (tokens, topk) of
indices, and says where each copy of a token went:

    permuted[row_id_map[t, j]] = inp[t]        where row_id_map[t, j] >= 0
    unpermuted[t] = sum over j of probs[t, j] * inp[row_id_map[t, j]]

Rows are ordered by expert, then by token. One is the other's transpose, so each is the other's
gradient. Of rows only their places in the map are scattered: every output row is written once, from
rows that it looks up, and sums run in the order of j. Nothing waits for the device but what says
so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import library, ragged
from .autograd import run
from .formats import cdiv
from .inputs import holds, known, known_equal

__all__ = [
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
]


# ---------------------------------------------------------------------------------------- the maps
def _mask_map(mask: Tensor, rows: int) -> Tensor:
    """`row_id_map` of a mask; what does not fit into `rows` is dropped (-1)."""
    by_expert = mask.t() != 0
    at = torch.cumsum(by_expert.reshape(-1), 0).reshape(by_expert.shape) - 1
    return torch.where(by_expert & (at < rows), at, -1).t().contiguous()


def _index_map(experts: Tensor, rows: int) -> Tensor:
    """`row_id_map` of expert ids; no row for an id below 0, nor for what does not fit (-1)."""
    last = torch.iinfo(experts.dtype).max
    order = torch.argsort(torch.where(experts < 0, last, experts).reshape(-1), stable=True)
    at = torch.argsort(order).reshape(experts.shape)  # the inverse permutation
    return torch.where((at < rows) & (experts >= 0), at, -1)


def _sources(row_id_map: Tensor, rows: int) -> Tensor:
    """int64 `[rows]`: the flat position in `row_id_map` that went to each row, or -1."""
    to = row_id_map.reshape(-1)
    # A row is named once; what has no row is written to a place behind the last one.
    to = torch.where((to >= 0) & (to < rows), to, rows)
    position = torch.arange(to.shape[0], device=to.device)
    return position.new_full((rows + 1,), -1).scatter(0, to, position).narrow(0, 0, rows)


def _bags(row_id_map: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """(rows in the order of their tokens, the flat position of each in the map, offsets): token t's
    rows are `[offsets[t], offsets[t + 1])` of them."""
    valid = row_id_map >= 0
    offsets = pad(torch.cumsum(valid.sum(1), 0), (1, 0))
    if _none(row_id_map.reshape(-1)):
        nothing = torch.zeros(0, dtype=torch.int64, device=row_id_map.device)
        return nothing, nothing, offsets
    ends = torch.cumsum(_some(valid.reshape(-1)), 0)
    # The position of the k-th valid entry; behind the last one, any: no token looks there.
    position = torch.searchsorted(ends, torch.arange(1, rows + 1, device=ends.device))
    position = position.clamp(max=ends.shape[0] - 1)
    return _some(row_id_map.reshape(-1))[position].clamp(min=0), position, offsets


def _none(t: Tensor) -> bool:
    return known(t.shape[0] == 0)


def _some(t: Tensor) -> Tensor:
    """`t`, with a row of zeros more where it is not known to have any: 0 is the index of one."""
    if not torch.compiler.is_compiling() or known(t.shape[0] > 0):
        return t
    return torch.cat([t, t.new_zeros((1, *t.shape[1:]))])


def _padded(row_id_map: Tensor, pad_offsets: Tensor | None) -> Tensor:
    """The map with each expert's rows moved down by its padding."""
    if pad_offsets is None:
        return row_id_map
    return torch.where(row_id_map >= 0, row_id_map + pad_offsets, -1)


# ------------------------------------------------------------------------------- the two movements
def _taken(x: Tensor, index: Tensor) -> Tensor:
    """`x[index]`, zeros where the index is -1."""
    if _none(x):
        return x.new_zeros((index.shape[0], *x.shape[1:]))
    rows = _some(x).index_select(0, index.clamp(min=0))
    return torch.where(_beside(index >= 0, rows), rows, 0)


def _beside(flags: Tensor, rows: Tensor) -> Tensor:
    return flags.reshape(-1, *[1] * (rows.dim() - 1))


def _summed(rows: Tensor, row_id_map: Tensor, probs: Tensor | None) -> Tensor:
    """`out[t] = sum over j of probs[t, j] * rows[row_id_map[t, j]]`, in fp32, rounded once."""
    tokens = row_id_map.shape[0]
    if _none(rows) or _none(row_id_map):
        return rows.new_zeros((tokens, rows.shape[1]))
    index, position, offsets = _bags(row_id_map, rows.shape[0])
    dtype = torch.promote_types(rows.dtype, torch.float32)
    weights = None if probs is None else _some(probs.reshape(-1))[position].to(dtype)
    # A bag is a gather and a sum in one kernel, in the order of the index. The last one is for the
    # rows that belong to no token.
    out = torch.embedding_bag(rows.to(dtype), index, offsets, False, 0, False, weights)[0]
    # A copy: in a graph of PyTorch 2.11, an output that is a view gets no gradient.
    return out.narrow(0, 0, tokens).to(rows.dtype, copy=True)


class _Permute:
    """(inp, probs or None, map) -> rows, and their probs."""

    @staticmethod
    def forward(rows: int, tensors: tuple[Any, ...]) -> tuple[Any, list[Any], Any]:
        inp, probs, row_id_map = tensors
        sources = _sources(row_id_map, rows)
        tokens = torch.where(sources >= 0, sources // max(row_id_map.shape[1], 1), -1)
        permuted = _taken(inp, tokens)
        if probs is None:
            return permuted, [row_id_map], None
        return (permuted, _taken(probs.reshape(-1), sources)), [row_id_map], None

    @staticmethod
    def backward(rows: int, note: Any, saved: list[Any], grads: tuple[Any, ...]) -> tuple[Any, ...]:
        (row_id_map,) = saved
        of_inp = None if grads[0] is None else _summed(grads[0].contiguous(), row_id_map, None)
        of_probs = None
        if len(grads) > 1 and grads[1] is not None:
            of_probs = _taken(grads[1], row_id_map.reshape(-1)).reshape(row_id_map.shape)
        return of_inp, of_probs, None


class _Unpermute:
    """(rows, probs or None, map) -> tokens."""

    @staticmethod
    def forward(data: Any, tensors: tuple[Any, ...]) -> tuple[Any, list[Any], Any]:
        rows, probs, row_id_map = tensors
        out = _summed(rows, row_id_map, probs)
        # Without probs, the gradient needs no rows.
        return out, [row_id_map, probs, None if probs is None else rows], rows.shape[0]

    @staticmethod
    def backward(
        data: Any, count: int, saved: list[Any], grads: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        row_id_map, probs, rows = saved
        (grad,) = grads
        sources = _sources(row_id_map, count)
        tokens = torch.where(sources >= 0, sources // max(row_id_map.shape[1], 1), -1)
        taken = _taken(grad, tokens)
        if probs is None:
            return taken, None, None
        dtype = torch.promote_types(rows.dtype, torch.float32)
        weights, wide = _taken(probs.reshape(-1), sources).to(dtype), taken.to(dtype)
        of_rows = (wide * weights[:, None]).to(taken.dtype)
        dots = (wide * rows.to(dtype)).sum(1)
        of_probs = _taken(dots, row_id_map.reshape(-1)).reshape(probs.shape).to(probs.dtype)
        return of_rows, of_probs, None


class _Rows:
    """(inp, probs or None, where each row comes from, where each row goes) -> rows moved."""

    @staticmethod
    def forward(data: Any, tensors: tuple[Any, ...]) -> tuple[Any, list[Any], Any]:
        inp, probs, source, target = tensors
        moved = _taken(inp, source)
        if probs is None:
            return moved, [target], None
        return (moved, _taken(probs, source)), [target], None

    @staticmethod
    def backward(data: Any, note: Any, saved: list[Any], grads: tuple[Any, ...]) -> tuple[Any, ...]:
        (target,) = saved
        moved = [None if g is None else _taken(g, target) for g in grads]
        return moved[0], (moved[1] if len(moved) > 1 else None), None, None


# -------------------------------------------------------------------------------- public functions
def moe_permute(
    inp: Tensor,
    routing_map: Tensor,
    num_out_tokens: int = -1,
    max_token_num: int = -1,
    map_type: str = "mask",
) -> tuple[Tensor, Tensor]:
    """(permuted `[num_out_tokens, hidden]`, row_id_map): a row for each token an expert gets.

    `routing_map` is a mask (tokens, experts), which needs `num_out_tokens`, or expert ids (tokens,
    topk) with `map_type="index"`, where `num_out_tokens` <= 0 means all. Rows past the last one are
    zeros; copies that do not fit are dropped, those of the last experts first. `max_token_num` is
    not needed.
    """
    _check(inp, routing_map, map_type)
    rows = _count(num_out_tokens, routing_map, map_type)
    make = _mask_map if map_type == "mask" else _index_map
    row_id_map = make(routing_map, rows)
    return run(_Permute, rows, inp, None, row_id_map), row_id_map


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(permuted, permuted_probs, row_id_map): `moe_permute` by a mask, and `probs[t, e]` of each
    row beside it."""
    _check(inp, routing_map, "mask")
    _check_probs(probs, routing_map, "probs")
    rows = _count(num_out_tokens, routing_map, "mask")
    row_id_map = _mask_map(routing_map, rows)
    permuted, permuted_probs = run(_Permute, rows, inp, probs, row_id_map)
    return permuted, permuted_probs, row_id_map


def moe_permute_and_pad_with_probs(
    inp: Tensor,
    probs: Tensor,
    routing_map: Tensor,
    tokens_per_expert: Tensor | Sequence[int],
    align_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """(permuted, permuted_probs, row_id_map, pad_offsets, padded tokens per expert): each expert's
    rows padded with zeros to a multiple of `align_size`.

    `row_id_map` is that of the rows without padding; `pad_offsets[e]` is the padding before expert
    e, None where there is known to be none. The number of rows is a shape: `tokens_per_expert` on
    the host is free, on the device it is waited for. (`minifloat` needs no padding.)
    """
    _check(inp, routing_map, "mask")
    _check_probs(probs, routing_map, "probs")
    if align_size <= 0:
        raise ValueError(f"align_size: got {align_size}; it must be positive")
    counts = ragged.integers(tokens_per_expert, "tokens_per_expert")
    if len(counts) != routing_map.shape[1] or not holds(min(0, *counts) >= 0):
        raise ValueError(
            f"tokens_per_expert: got {counts}; routing_map has {routing_map.shape[1]} experts, and "
            "none has a negative count"
        )
    padded = [cdiv(n, align_size) * align_size for n in counts]
    found = (routing_map != 0).sum(0)
    got = "" if torch.compiler.is_compiling() else f"got {counts}; "  # a graph may not know them
    _require(
        (found == torch.tensor(counts, device=found.device)).all(),
        f"tokens_per_expert: {got}routing_map gives the experts other numbers of tokens",
    )
    row_id_map = _mask_map(routing_map, sum(counts))
    target = torch.tensor(padded, dtype=torch.int64, device=inp.device)
    offsets = None
    if not known_equal(padded, counts):
        gaps = [p - n for p, n in zip(padded, counts, strict=True)]
        before = [sum(gaps[:e]) for e in range(len(gaps))]
        offsets = torch.tensor(before, dtype=torch.int64, device=inp.device)
    moved = _padded(row_id_map, offsets)
    permuted, permuted_probs = run(_Permute, sum(padded), inp, probs, moved)
    return permuted, permuted_probs, row_id_map, offsets, target


def moe_unpermute(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None = None,
    restore_shape: Sequence[int] | None = None,
    map_type: str = "mask",
    probs: Tensor | None = None,
    pad_offsets: Tensor | None = None,
) -> Tensor:
    """Each token's rows, weighted by `merging_probs` if given, summed: `[tokens, hidden]`.

    `merging_probs` has the shape of `row_id_map`; `probs` is its old name. `restore_shape`, if
    given, is the shape of the result. `map_type` changes nothing: a map of either type says where
    each row is.
    """
    if probs is not None:
        if merging_probs is not None:
            raise ValueError("probs: the old name of merging_probs, which was given too")
        merging_probs = probs
    if map_type not in ("mask", "index"):
        raise ValueError(f"map_type: got {map_type!r}; allowed: 'mask', 'index'")
    if inp.dim() != 2:
        raise ValueError(f"inp: got shape {tuple(inp.shape)}; rows [rows, hidden] are needed")
    given: Any = row_id_map
    if not isinstance(given, Tensor):
        got = type(given).__name__
        raise TypeError(f"row_id_map: got {got}; the map that moe_permute returned is needed")
    if given.dim() != 2:
        shape = tuple(given.shape)
        raise ValueError(f"row_id_map: got shape {shape}; that of moe_permute is [tokens, ...]")
    if given.dtype is not torch.int64:
        raise TypeError(f"row_id_map: got {given.dtype}; that of moe_permute is torch.int64")
    if merging_probs is not None:
        _check_probs(merging_probs, row_id_map, "merging_probs")
    elements = row_id_map.shape[0] * inp.shape[1]
    if restore_shape is not None and not holds(_elements(restore_shape) == elements):
        raise ValueError(
            f"restore_shape: got {tuple(restore_shape)}; there are {row_id_map.shape[0]} tokens of "
            f"{inp.shape[1]}"
        )
    if pad_offsets is not None:
        of: Any = tuple(pad_offsets.shape) if isinstance(pad_offsets, Tensor) else pad_offsets
        if of != (row_id_map.shape[1],):
            raise ValueError(
                f"pad_offsets: got {of}; one for each of {row_id_map.shape[1]} experts"
            )
    moved = _padded(row_id_map, pad_offsets)
    if _on_host(moved) and moved.numel() > 0:
        _require(
            moved.max() < inp.shape[0],
            f"inp: got {inp.shape[0]} rows; row_id_map is of an input with more",
        )
    out: Tensor = run(_Unpermute, None, inp, merging_probs, moved)
    return out if restore_shape is None else out.reshape(tuple(restore_shape))


def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    """`inp` is chunks of `split_sizes` rows; the result is chunk `sorted_index[0]`, `[1]`, ..."""
    source, target = _chunk_rows(inp, split_sizes, sorted_index)
    return run(_Rows, None, inp, None, source, target)  # type: ignore[no-any-return]


def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor]:
    """(`moe_sort_chunks_by_index`, the rows' probs in the same order)."""
    if probs.dim() == 0 or not holds(probs.shape[0] == inp.shape[0]):
        raise ValueError(
            f"probs: got shape {tuple(probs.shape)}; one for each of the {inp.shape[0]} rows"
        )
    source, target = _chunk_rows(inp, split_sizes, sorted_index)
    moved, of_rows = run(_Rows, None, inp, probs, source, target)
    return moved, of_rows


def _chunk_rows(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> tuple[Tensor, Tensor]:
    """(the row that each row of the result comes from, the row that each row goes to), or -1."""
    for name, t in (("split_sizes", split_sizes), ("sorted_index", sorted_index)):
        if not isinstance(t, Tensor) or t.is_floating_point():
            kind = t.dtype if isinstance(t, Tensor) else type(t).__name__
            raise TypeError(f"{name}: got {kind}; a tensor of integers is needed")
        if t.dim() != 1 or t.shape != split_sizes.shape:
            raise ValueError(
                f"{name}: got shape {tuple(t.shape)}; one entry per chunk, in one dim, is needed"
            )
    if split_sizes.shape[0] == 0:
        raise ValueError("split_sizes: got no chunks; one at least is needed")
    sizes = split_sizes.to(inp.device, torch.int64)
    order = sorted_index.to(inp.device, torch.int64)
    if _on_host(sizes):
        _require(
            (sizes >= 0).all() & (sizes.sum() <= inp.shape[0]),
            f"split_sizes: got {sizes.tolist()}; none may be negative, and together they are at "
            f"most the {inp.shape[0]} rows",
        )
        _require(
            (order.sort().values == torch.arange(order.shape[0], device=order.device)).all(),
            f"sorted_index: got {order.tolist()}; each of the {order.shape[0]} chunks once is "
            "needed",
        )
    ends = torch.cumsum(sizes, 0)
    sorted_ends = torch.cumsum(sizes[order], 0)
    # Where chunk c begins, before and after.
    begins, sorted_begins = ends - sizes, (sorted_ends - sizes[order])[torch.argsort(order)]
    row = torch.arange(inp.shape[0], device=inp.device)
    last = max(sizes.shape[0] - 1, 0)
    taken = order[torch.searchsorted(sorted_ends, row, right=True).clamp(max=last)]
    source = row - sorted_begins[taken] + begins[taken]
    given = torch.searchsorted(ends, row, right=True).clamp(max=last)
    target = row - begins[given] + sorted_begins[given]
    inside = row < ends[-1]
    return torch.where(inside, source, -1), torch.where(inside, target, -1)


def _on_host(t: Tensor) -> bool:
    """Whether looking at the numbers waits for nothing."""
    return t.device.type == "cpu" and not library.traced()


def _require(flag: Tensor, message: str) -> None:
    """Raise unless `flag`: here if the host knows, else where the device finds out."""
    if not _on_host(flag):
        torch._assert_async(flag, message)
    elif not bool(flag):
        raise ValueError(message)


def _check(inp: Tensor, routing_map: Any, map_type: str) -> None:
    if not isinstance(routing_map, Tensor):
        raise TypeError(f"routing_map: got {type(routing_map).__name__}; a tensor is needed")
    if map_type not in ("mask", "index"):
        raise ValueError(f"map_type: got {map_type!r}; allowed: 'mask', 'index'")
    two = inp.dim() == 2 and routing_map.dim() == 2
    if not (two and holds(routing_map.shape[0] == inp.shape[0])):
        raise ValueError(
            f"routing_map: got shape {tuple(routing_map.shape)} for inp of {tuple(inp.shape)}; "
            "(tokens, experts) of a mask or (tokens, topk) of ids, and inp (tokens, hidden)"
        )
    if map_type == "index" and routing_map.is_floating_point():
        raise TypeError(f"routing_map: got {routing_map.dtype}; expert ids are integers")


def _check_probs(probs: Any, of: Tensor, name: str) -> None:
    if not isinstance(probs, Tensor):
        raise TypeError(f"{name}: got {type(probs).__name__}; a tensor is needed")
    shapes = zip(probs.shape, of.shape, strict=False)
    alike = probs.dim() == of.dim() and all([holds(a == b) for a, b in shapes])  # noqa: C419  (2.11 traces lists)
    if not alike or not probs.is_floating_point():
        raise ValueError(
            f"{name}: got {probs.dtype} of shape {tuple(probs.shape)}; floating-point of shape "
            f"{tuple(of.shape)} is needed, one for each place of the map"
        )


def _count(num_out_tokens: int, routing_map: Tensor, map_type: str) -> int:
    if not isinstance(num_out_tokens, (int, torch.SymInt)):
        raise TypeError(
            f"num_out_tokens: got {type(num_out_tokens).__name__}; a number of rows is needed: a "
            "shape, which the host knows"
        )
    if holds(num_out_tokens >= 0 if map_type == "mask" else num_out_tokens > 0):
        return num_out_tokens
    if map_type == "mask":
        raise ValueError(
            f"num_out_tokens: got {num_out_tokens}; only the device knows how many places of a "
            "mask are set: pass the number of rows (tokens * topk)"
        )
    return routing_map.shape[0] * routing_map.shape[1]


def _elements(shape: Sequence[int]) -> int:
    n = 1
    for d in shape:
        n = n * d
    return n
