"""Quantized weights of a distributed optimizer: sharded fp32 masters, whole quantized weights.

Each rank holds some elements of each master weight, in fp32, and the whole weight in quantized
form. It writes the codes of its own elements; the caller gathers the rest of the raw data.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..formats import cdiv
from ..layout import flatten
from ..quantizers import Quantizer
from .storage import QuantizedTensorStorage

__all__ = [
    "cast_master_weights_to_fp8",
    "clear_columnwise_cache",
    "is_custom",
    "post_all_gather_processing",
    "quantize_master_weights",
    "replace_raw_data",
]


def replace_raw_data(tensor: Any, new_raw_data: Tensor) -> None:
    """Move the codes of `tensor` into `new_raw_data`, which becomes its buffer."""
    attr = _raw_attribute(tensor)
    old: Tensor = getattr(tensor, attr)
    if new_raw_data.dtype != old.dtype or new_raw_data.shape != old.shape:
        raise ValueError(
            f"new_raw_data: got {new_raw_data.dtype} of shape {tuple(new_raw_data.shape)}; "
            f"{old.dtype} of shape {tuple(old.shape)} is needed"
        )
    new = new_raw_data.detach()
    new.copy_(old)
    setattr(tensor, attr, new)


def _raw_attribute(tensor: Any) -> str:
    """The attribute of the buffer from which the whole tensor follows."""
    if not isinstance(tensor, QuantizedTensorStorage) or not tensor._INNER:
        raise ValueError(
            f"tensor: got {type(tensor).__name__}; a tensor with one format for both directions is "
            "needed"
        )
    if not tensor._has("row") or (tensor._has("col") and not tensor._derivable("col")):
        raise ValueError(
            f"tensor: this {type(tensor).__name__} has no single data buffer that all else follows "
            "from; keep the rowwise copy alone, or use square blocks"
        )
    return tensor._ATTR["row_data"]


def quantize_master_weights(
    model_weights: Sequence[Any],
    master_weights: Sequence[Tensor | None],
    start_offsets: Sequence[int | None],
    group: Any,
    fsdp_shard_model_weights: Sequence[Any] | None = None,
    manual_post_all_gather_processing: bool = False,
) -> None:
    """Quantize sharded master weights into whole quantized weights, as if they were not sharded.

    `master_weights[i]` holds elements `start_offsets[i]` and on of `model_weights[i]`, flattened;
    None where this rank owns none of them. Amaxes are reduced over `group`, so that every rank
    gets all scales. Codes are written for the owned elements only, into the weight or into
    `fsdp_shard_model_weights[i]` (flat uint8, or a pair of them for the two copies).

    Column copies that follow from the row copy are dropped, for they would be stale until the
    caller has gathered the data; with `manual_post_all_gather_processing` they stay as they are
    until `post_all_gather_processing`.
    """
    shards = fsdp_shard_model_weights or [None] * len(model_weights)
    lengths = {len(model_weights), len(master_weights), len(start_offsets), len(shards)}
    if len(lengths) != 1:
        raise ValueError(
            f"master_weights: {len(model_weights)} model weights, {len(master_weights)} masters, "
            f"{len(start_offsets)} offsets and {len(shards)} shards were given: they must agree"
        )
    work = [
        _Sharded(weight, master, start, shard)
        for weight, master, start, shard in zip(
            model_weights, master_weights, start_offsets, shards, strict=True
        )
    ]
    _reduce([a for w in work for a in w.amaxes()], group)
    for w in work:
        w.quantize()
        if not manual_post_all_gather_processing and w.weight._derivable("col"):
            w.weight.update_usage(columnwise_usage=False)


class _Sharded:
    """One weight and what this rank owns of its master.

    `filled` is the master where it is owned and, elsewhere, the amax of the block that the element
    lies in. Every block then has its true amax, so quantizing `filled` gives all scales, and the
    codes of the owned elements, bit for bit as quantizing the whole master would.
    """

    def __init__(self, weight: Any, master: Tensor | None, start: int | None, shard: Any) -> None:
        if not isinstance(weight, QuantizedTensorStorage) or not weight._INNER:
            raise ValueError(
                f"model_weights: got {type(weight).__name__}; a quantized tensor with one format "
                "for both directions is needed"
            )
        if (master is None) != (start is None):
            raise ValueError("start_offsets: None where, and only where, master_weights is None")
        self.weight, self.shard = weight, shard
        self.copies = [c for c in ("row", "col") if weight._has(c)]
        if weight._derivable("col"):
            self.copies = ["row"]
        m, k = flatten(weight.shape)
        device = weight.device
        self.owned = torch.zeros(m * k, dtype=torch.bool, device=device)
        self.master = torch.zeros(m * k, dtype=torch.float32, device=device)
        self.span = (0, 0)
        if master is not None and start is not None:
            self.span = (start, start + master.numel())
            if not 0 <= start <= self.span[1] <= m * k:
                raise ValueError(
                    f"start_offsets: elements {self.span} lie outside a weight of {m * k} elements"
                )
            self._check()
            self.owned[slice(*self.span)] = True
            self.master[slice(*self.span)] = master.detach().reshape(-1).to(torch.float32)
        self.owned, self.master = self.owned.reshape(m, k), self.master.reshape(m, k)
        self.blocks = {c: _amaxes(self.master, self._tile(c)) for c in self.copies}

    def _check(self) -> None:
        """Raise for what cannot be quantized from a shard, before anything is written."""
        weight, quantizer = self.weight, self.weight._quantizer
        if quantizer is None:
            raise ValueError("model_weights: a weight without a quantizer cannot be quantized into")
        if any(cast is not None and cast.error for cast in quantizer._casts()):
            raise ValueError(
                "model_weights: 4-over-6 picks a block's scale by the errors of all its elements, "
                "which no shard knows; turn it off for sharded master weights"
            )
        _, k = flatten(weight.shape)
        for copy in self.copies:
            fmt = weight._cast(copy == "col").format
            if copy == "col" and fmt.col_transposed:
                raise ValueError(
                    f"model_weights: the columnwise copy of {fmt.name} lies across the elements of "
                    "a shard; use square blocks, or drop it"
                )
            per = 1 if fmt.element is None else fmt.element.per_byte
            if k % per or any(bound % per for bound in self.span):
                raise ValueError(
                    f"start_offsets: elements {self.span} of rows of {k} cut a byte of {per} codes"
                )

    def _tile(self, copy: str) -> tuple[int, int] | None:
        """The block that shares an amax, in the orientation of the source."""
        tile = self.weight._cast(copy == "col").format.tile
        return tile if tile is None or copy == "row" else (tile[1], tile[0])

    def amaxes(self) -> list[Tensor]:
        return list(self.blocks.values())

    def quantize(self) -> None:
        quantizer, weight = self.weight._quantizer, self.weight
        for copy in self.copies:
            foreign = _spread(self.blocks[copy], self._tile(copy), self.master.shape)
            filled = torch.where(self.owned, self.master, foreign)
            one = quantizer.copy()
            one.set_usage(rowwise=copy == "row", columnwise=copy == "col")
            made = one._quantize_buffers(filled.reshape(weight.shape))
            for inner in weight._INNER:
                if inner.part == f"{copy}_data":
                    self._write_codes(copy, getattr(weight, inner.attr), made[inner.attr])
                elif inner.attr in made:
                    getattr(weight, inner.attr).copy_(made[inner.attr])

    def _write_codes(self, copy: str, target: Tensor, codes: Tensor) -> None:
        """Write the owned codes, which are stored in the order of the source."""
        element = self.weight._cast(copy == "col").format.element
        per = 1 if element is None else element.per_byte
        span = slice(self.span[0] // per, self.span[1] // per)
        shard = self.shard
        if isinstance(shard, (tuple, list)):
            shard = shard[0 if copy == "row" else 1]
        if shard is None:
            target.view(-1)[span] = codes.view(-1)[span]
        else:
            shard.view(-1).copy_(codes.view(-1)[span])


def _amaxes(t: Tensor, tile: tuple[int, int] | None) -> Tensor:
    """Amax of each block of `t[M, K]`."""
    if tile is None:
        return t.abs().amax().reshape(1, 1) if t.numel() else t.new_zeros(1, 1)
    (r, c), (m, k) = tile, t.shape
    rows, cols = cdiv(m, r), cdiv(k, c)
    padded = pad(t, (0, cols * c - k, 0, rows * r - m))
    return padded.reshape(rows, r, cols, c).abs().amax(dim=(1, 3))


def _spread(blocks: Tensor, tile: tuple[int, int] | None, shape: torch.Size) -> Tensor:
    """Each block's value on all its elements."""
    if tile is None:
        return blocks.expand(shape)
    spread = blocks.repeat_interleave(tile[0], 0).repeat_interleave(tile[1], 1)
    return spread[: shape[0], : shape[1]]


def _reduce(amaxes: list[Tensor], group: Any) -> None:
    """All amaxes become their maxima over `group`, in one collective per device."""
    if not torch.distributed.is_initialized():
        return
    for device in dict.fromkeys(a.device for a in amaxes):
        here = [a for a in amaxes if a.device == device]
        flat = torch.cat([a.reshape(-1) for a in here])
        torch.distributed.all_reduce(flat, torch.distributed.ReduceOp.MAX, group=group)
        pieces = torch.split(flat, [a.numel() for a in here])
        for a, reduced in zip(here, pieces, strict=True):
            a.copy_(reduced.reshape(a.shape))


def cast_master_weights_to_fp8(*args: Any, **kwargs: Any) -> None:
    """The old name of `quantize_master_weights`."""
    warnings.warn(
        "cast_master_weights_to_fp8 is deprecated; use quantize_master_weights",
        DeprecationWarning,
        stacklevel=2,
    )
    quantize_master_weights(*args, **kwargs)


def post_all_gather_processing(model_weights: Any) -> None:
    """Make the column copies that follow from the gathered row copies anew."""
    weights = model_weights if isinstance(model_weights, (list, tuple)) else [model_weights]
    for weight in weights:
        wanted = weight._quantizer is None or weight._quantizer.columnwise_usage
        if weight._derivable("col") and (wanted or weight._has("col")):
            weight.update_usage(columnwise_usage=False)
            weight.update_usage(columnwise_usage=True)


def clear_columnwise_cache(model_weights: Any) -> None:
    """Drop the column copies that `post_all_gather_processing` can make again."""
    weights = model_weights if isinstance(model_weights, (list, tuple)) else [model_weights]
    for weight in weights:
        if weight._derivable("col"):
            weight.update_usage(columnwise_usage=False)


def is_custom(x: Any = None) -> bool:
    """Whether a quantizer or a quantized tensor says that it is a user's own (`custom = True`)."""
    if not isinstance(x, (Quantizer, QuantizedTensorStorage)):
        if x is None or isinstance(x, Tensor):
            return False
        raise TypeError(
            f"x: got {type(x).__name__}; a Quantizer, a quantized tensor or None is needed"
        )
    return bool(getattr(x, "custom", False))
