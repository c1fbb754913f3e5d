"""Two quantizers, one per direction: mixed formats in forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import dispatch
from ..dynamo import register_value_opaque_quantizer
from ..dynamo.tensor_spec import Described
from ..opaque import OpaqueABCMeta
from .base import Quantizer

__all__ = ["COL", "ROW", "HybridQuantizer"]

# Prefixes of the parts' attributes in the flat list of a hybrid tensor's inner tensors.
ROW, COL = "_row_", "_col_"


@register_value_opaque_quantizer
class HybridQuantizer(Quantizer, metaclass=OpaqueABCMeta):
    """`rowwise_quantizer` makes the row copy, `columnwise_quantizer` the column copy.

    With `columnwise_source="rowwise_dequantized"` the column copy is made of the row copy's values.
    A value if both parts are values; else it equals only itself.
    """

    rowwise_quantizer: Quantizer
    columnwise_quantizer: Quantizer
    columnwise_source: str

    def __init__(
        self,
        *,
        rowwise_quantizer: Quantizer,
        columnwise_quantizer: Quantizer,
        columnwise_source: str = "original",
    ) -> None:
        super().__init__(rowwise=True, columnwise=True)
        for name, part in (
            ("rowwise_quantizer", rowwise_quantizer),
            ("columnwise_quantizer", columnwise_quantizer),
        ):
            if not isinstance(part, Quantizer):
                raise TypeError(f"{name}: got {type(part).__name__}; a Quantizer is needed")
        if rowwise_quantizer is columnwise_quantizer:
            raise ValueError(
                "columnwise_quantizer: the same object as rowwise_quantizer; pass a copy(): each "
                "is pinned to its direction"
            )
        if columnwise_source not in ("original", "rowwise_dequantized"):
            raise ValueError(
                f"columnwise_source: got {columnwise_source!r}; allowed: 'original', "
                "'rowwise_dequantized'"
            )
        self.rowwise_quantizer = _pinned(rowwise_quantizer, rowwise=True)
        self.columnwise_quantizer = _pinned(columnwise_quantizer, rowwise=False)
        self.columnwise_source = columnwise_source

    def _value_fields(self) -> tuple[str, ...] | None:
        parts = (self.rowwise_quantizer, self.columnwise_quantizer)
        return super()._value_fields() if all(p._is_value() for p in parts) else None

    def _freeze(self) -> None:
        super()._freeze()
        self.rowwise_quantizer._freeze()
        self.columnwise_quantizer._freeze()

    def copy(self) -> Any:
        other = super().copy()
        other.rowwise_quantizer = self.rowwise_quantizer.copy()
        other.columnwise_quantizer = self.columnwise_quantizer.copy()
        return other

    def _quantize_buffers(
        self, tensor: Tensor, seed: Tensor | None = None, group: Any = None
    ) -> dict[str, Tensor]:
        """The inner tensors of both parts, under joined names."""
        self._check_input(tensor)
        row, col = self.rowwise_quantizer, self.columnwise_quantizer
        dequantized = self.columnwise_source == "rowwise_dequantized"
        made: dict[str, Tensor] = {}
        source = tensor
        if self.rowwise_usage or (self.columnwise_usage and dequantized):
            rows = row._quantize_buffers(tensor, seed, group)
            if dequantized:
                source = _dequantized(row, rows, tensor)
            if self.rowwise_usage:
                made.update({f"{ROW}{attr}": t for attr, t in rows.items()})
        if self.columnwise_usage:
            cols = col._quantize_buffers(source, seed, group)
            made.update({f"{COL}{attr}": t for attr, t in cols.items()})
        return made

    def _check_input(self, tensor: Tensor) -> None:
        dispatch.check_usage(self.rowwise_usage, self.columnwise_usage)
        if self.rowwise_usage:
            self.rowwise_quantizer._check_input(tensor)
        if self.columnwise_usage:
            self.columnwise_quantizer._check_input(tensor)

    def _check_destination(self, dst: Any) -> None:
        self._check_class(dst)
        if dst._rowwise_storage is not None:
            self.rowwise_quantizer._check_destination(dst._rowwise_storage)
        if dst._columnwise_storage is not None:
            self.columnwise_quantizer._check_destination(dst._columnwise_storage)

    def _state_written(self) -> Sequence[Tensor]:
        return (
            *self.rowwise_quantizer._state_written(),
            *self.columnwise_quantizer._state_written(),
        )

    def _meet(self, group_name: str) -> None:
        self.rowwise_quantizer._meet(group_name)
        self.columnwise_quantizer._meet(group_name)

    def _reduces(self) -> bool:
        return self.rowwise_quantizer._reduces() or self.columnwise_quantizer._reduces()

    def _without_reduction(self) -> Any:
        other = self.copy()
        for name in ("rowwise_quantizer", "columnwise_quantizer"):
            part = getattr(self, name)
            if part._reduces():
                setattr(other, name, part._without_reduction())
        return other

    def _kwarg_order(self) -> tuple[tuple[str, str], ...]:
        """The parts' inner tensors, whose joined names are also their constructor arguments."""
        names = [f"{ROW}{attr}" for attr, _ in self.rowwise_quantizer._kwarg_order()]
        names += [f"{COL}{attr}" for attr, _ in self.columnwise_quantizer._kwarg_order()]
        return tuple((n, n) for n in names)

    def _described(self) -> tuple[Described, ...]:
        row = self.rowwise_quantizer._described() if self.rowwise_usage else ()
        col = self.columnwise_quantizer._described() if self.columnwise_usage else ()
        return (
            *((ROW + prefix, r, c, order) for prefix, r, c, order in row),
            *((COL + prefix, r, c, order) for prefix, r, c, order in col),
        )

    def _holding(self, dtype: torch.dtype) -> Any:
        other = self.copy()
        other.rowwise_quantizer = self.rowwise_quantizer._holding(dtype)
        other.columnwise_quantizer = self.columnwise_quantizer._holding(dtype)
        return other

    def _used(self) -> list[Quantizer]:
        used = []
        if self.rowwise_usage:
            used.append(self.rowwise_quantizer)
        if self.columnwise_usage:
            used.append(self.columnwise_quantizer)
        return used

    def calibrate(self, tensor: Tensor) -> None:
        for part in self._used():
            part.calibrate(tensor)

    def is_requantization_safe(self) -> bool:
        used = self._used()
        if self.columnwise_source == "rowwise_dequantized":
            used = [self.rowwise_quantizer, *used]
        return all(part.is_requantization_safe() for part in used)

    def is_quantizable(self, inp: Tensor) -> bool:
        row = not self.rowwise_usage or self.rowwise_quantizer.is_quantizable(inp)
        return row and (not self.columnwise_usage or self.columnwise_quantizer.is_quantizable(inp))

    def supports_only_rowwise_all_gather(self) -> bool:
        """A column copy that cannot be gathered (packed across rows) is derived instead."""
        return self.rowwise_quantizer.supports_only_rowwise_all_gather() or any(
            c is not None and c.format.two_level for c in self.columnwise_quantizer._casts()
        )


def _pinned(quantizer: Quantizer, *, rowwise: bool) -> Any:
    pinned = quantizer.copy()
    pinned.set_usage(rowwise=rowwise, columnwise=not rowwise)
    pinned.internal = True  # its results are parts of a tensor, never tensors
    return pinned


def _dequantized(quantizer: Quantizer, buffers: dict[str, Tensor], like: Tensor) -> Tensor:
    """The values of a row copy that exists as buffers only."""
    if quantizer.optimize_for_gemm and any(quantizer._swizzles()):
        raise ValueError(
            "columnwise_source: 'rowwise_dequantized' reads the row copy back, whose scales "
            "optimize_for_gemm=True swizzles; turn it off on rowwise_quantizer"
        )
    cast, _ = quantizer._casts()
    by_part = {part: buffers[attr] for attr, part in quantizer._part_order() if attr in buffers}
    assert cast is not None
    scale = by_part.get("row_scale", by_part.get("scale"))
    return dispatch.dequantize(
        by_part["row_data"], scale, by_part.get("row_amax"), cast, like.shape, like.dtype
    )
