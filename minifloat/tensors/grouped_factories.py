"""How groups are made: uninitialised, or around data that is there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..inputs import check_nominal
from . import grouped_cast
from .grouped_shapes import (
    Shape,
    check_logical,
    logical_shape,
    member_shapes,
    numel,
    on_host,
    starts,
)

if TYPE_CHECKING:
    from .grouped import GroupedTensor
    from .grouped_storage import GroupedTensorStorage

__all__ = ["CLASSES", "DimsError", "Factories", "arguments", "fields"]

# {internal: class}; the modules that define the two put them here.
CLASSES: dict[bool, Any] = {}


class DimsError(ValueError, AssertionError):
    """A dim that no member can have."""


class Factories:
    """The static methods of `GroupedTensorStorage` that make groups."""

    @staticmethod
    def make_grouped_tensor_with_shapes(
        num_tensors: int,
        shapes: Sequence[Sequence[int]],
        quantizer: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> GroupedTensorStorage | GroupedTensor:
        """An uninitialised group of members of these (rows, columns)."""
        if len(shapes) != num_tensors or any(len(s) != 2 for s in shapes):
            raise ValueError(
                f"shapes: got {[tuple(s) for s in shapes]}; {num_tensors} of (rows, columns) are "
                "needed"
            )
        _check_dims(num_tensors, shapes)
        device = _default(device)
        rows, columns = ([s[d] for s in shapes] for d in (0, 1))

        def dims(sizes: list[int]) -> Tensor | None:
            same = all(s == sizes[0] for s in sizes)
            return None if same else torch.tensor(sizes, dtype=torch.int64, device=device)

        members = [tuple(s) for s in shapes]
        logical = logical_shape(members)
        return _empty(logical, members, dims(rows), dims(columns), quantizer, device, dtype)  # type: ignore[no-any-return]

    @staticmethod
    def make_grouped_tensor(
        num_tensors: int,
        first_dims: Tensor | None,
        last_dims: Tensor | None,
        logical_first_dim: int,
        logical_last_dim: int,
        quantizer: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> GroupedTensorStorage | GroupedTensor:
        """An uninitialised group. Sizes that vary are read from the device, to allocate exactly."""
        if num_tensors <= 0:
            raise ValueError(f"num_tensors: got {num_tensors}; a group has at least one member")
        for name, dims in (("first_dims", first_dims), ("last_dims", last_dims)):
            _check_sizes(dims, num_tensors, name)
        if _is_capturing(first_dims, last_dims):
            raise ValueError(
                "first_dims, last_dims: sizes that vary are read by the host, which a CUDA graph "
                "cannot record; make the group before the capture, or use group_quantize"
            )
        logical = (logical_first_dim, logical_last_dim)
        varies = first_dims is not None, last_dims is not None
        shapes = member_shapes(logical, num_tensors, None, varies)
        if shapes is None:
            # A dim that does not vary is every member's.
            rows = on_host(first_dims, num_tensors, logical_first_dim)
            columns = on_host(last_dims, num_tensors, logical_last_dim)
            shapes = list(zip(rows, columns, strict=True))
        _check_dims(num_tensors, shapes)
        check_logical(logical, shapes, varies, "logical_first_dim, logical_last_dim")
        device = _default(device)
        return _empty(logical, shapes, first_dims, last_dims, quantizer, device, dtype)  # type: ignore[no-any-return]

    @staticmethod
    def make_grouped_tensor_from_rowwise_data(
        *,
        num_tensors: int,
        tensor_shape: Sequence[int],
        rowwise_data: Tensor | None,
        dtype: torch.dtype | None = None,
        internal: bool = False,
    ) -> GroupedTensorStorage | GroupedTensor:
        """`rowwise_data`, unquantized, as `num_tensors` members of `tensor_shape`; no copy."""
        member = tuple(tensor_shape)
        if num_tensors <= 0:
            raise ValueError(f"num_tensors: got {num_tensors}; a group has at least one member")
        if rowwise_data is None:
            raise ValueError("rowwise_data: got None; a tensor is needed")
        if len(member) not in (1, 2) or any(d < 0 for d in member):
            raise ValueError(
                f"tensor_shape: got {member}; one or two dims are needed, none negative"
            )
        if rowwise_data.numel() != num_tensors * numel(member):
            raise ValueError(
                f"rowwise_data, tensor_shape: got {rowwise_data.numel()} elements; {num_tensors} "
                f"members of {member} have {num_tensors * numel(member)}"
            )
        if dtype is not None and dtype != rowwise_data.dtype:
            raise ValueError(
                f"dtype: got {dtype}; the data, which is not copied, has {rowwise_data.dtype}"
            )
        if not rowwise_data.is_contiguous():
            raise ValueError("rowwise_data: it is not contiguous; pass rowwise_data.contiguous()")
        shapes = [member] * num_tensors
        return CLASSES[internal](  # type: ignore[no-any-return]
            logical_shape(shapes),
            rowwise_data.dtype,
            num_tensors=num_tensors,
            shapes=shapes,
            data=rowwise_data.detach().view(-1),
        )


def _empty(
    logical: Shape,
    shapes: list[Shape],
    first_dims: Tensor | None,
    last_dims: Tensor | None,
    quantizer: Any,
    device: torch.device,
    dtype: torch.dtype | None,
) -> Any:
    kwargs: dict[str, Any] = {}
    if quantizer is None:
        if dtype is None:
            raise ValueError("dtype: got None; without a quantizer the members' dtype is needed")
        total = sum(numel(s) for s in shapes)
        made = {"row_data": torch.empty(total, dtype=dtype, device=device)}
        internal = False
    else:
        grouped_cast.check_quantizer(quantizer)
        check_nominal(dtype)
        made, internal = grouped_cast.allocate(quantizer, shapes, device), quantizer.internal
        kwargs = fields(quantizer)
    offsets = starts(numel(s) for s in shapes)
    dims = (first_dims, last_dims)
    first, last = (None if t is None else t.to(device, torch.int64) for t in dims)
    varies = first is not None or last is not None
    group = CLASSES[internal](
        logical,
        torch.float32 if dtype is None else dtype,
        num_tensors=len(shapes),
        shapes=shapes,
        first_dims=first,
        last_dims=last,
        tensor_offsets=torch.tensor(offsets, device=device) if varies else None,
        offsets=offsets,
        **arguments(made),
        **kwargs,
    )
    group.quantized_tensors = group.split_into_quantized_tensors()
    return group


def fields(quantizer: Any) -> dict[str, Any]:
    """Constructor arguments that a group takes from its quantizer."""
    about = quantizer._plain_kwargs()
    declared = {p.kwarg for p in CLASSES[True]._PLAIN}
    return {"quantizer": quantizer, **{k: v for k, v in about.items() if k in declared}}


def arguments(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parts as constructor arguments; one scale for a member is the row copy's."""
    kwargs = {inner.part: inner.kwarg for inner in CLASSES[True]._INNER}
    kwargs["scale"] = kwargs["row_scale"]
    return {kwargs[part]: t for part, t in parts.items()}


def _check_sizes(sizes: Any, num: int, name: str) -> None:
    if sizes is None:
        return
    if not isinstance(sizes, Tensor):
        raise TypeError(f"{name}: got {type(sizes).__name__}; a tensor of integers is needed")
    if sizes.dtype not in (torch.int32, torch.int64) or tuple(sizes.shape) != (num,):
        raise ValueError(
            f"{name}: got {sizes.dtype} of shape {tuple(sizes.shape)}; int32 or int64 of shape "
            f"({num},) is needed"
        )


def _check_dims(num_tensors: int, shapes: Sequence[Sequence[int]]) -> None:
    if num_tensors <= 0:
        raise ValueError(f"num_tensors: got {num_tensors}; a group has at least one member")
    for i, (rows, columns) in enumerate(shapes):
        if rows < 0 or columns <= 0:
            raise DimsError(
                f"shapes[{i}]: got ({rows}, {columns}); rows must be >= 0 and columns > 0"
            )


def _default(device: torch.device | str | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)


def _is_capturing(*sizes: Tensor | None) -> bool:
    on_device = any(s is not None and s.is_cuda for s in sizes)
    return on_device and torch.cuda.is_current_stream_capturing()
