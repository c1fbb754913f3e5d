"""Quantizing groups of matrices: offsets, one cast for all members, and a cast for each.

`group_quantize` keeps the members' sizes on the device, and its result has a graph of its own shape
whatever they are. How a group is cast is `ragged`'s business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import ragged
from .dtypes import DType, TE_DType_To_Torch
from .formats import cdiv
from .inputs import check_nominal, check_noop
from .layout import flatten
from .quantizers import Quantizer
from .tensors import GroupedTensor, GroupedTensorStorage, grouped_cast
from .tensors.grouped_factories import arguments, fields

__all__ = [
    "bgrad_group_quantize",
    "bgrad_quantize",
    "group_dequantize",
    "group_quantize",
    "multi_tensor_quantize",
    "split_quantize",
    "splits_to_offsets",
    "splits_to_offsets_multi",
]

_ALIGN = 16  # bytes: what TMA descriptors and vector loads ask of a pointer


# ---------------------------------------------------------------------------------------- offsets
def splits_to_offsets(first_dims: Tensor, logical_last_dim: int) -> Tensor:
    """int64 `[n + 1]`, beside `first_dims`: `[0, cumsum(first_dims) * logical_last_dim]`."""
    _check_splits(first_dims, "first_dims")
    return GroupedTensorStorage.make_tensor_offsets(first_dims, logical_last_dim)


def splits_to_offsets_multi(
    split_sizes: Tensor,
    device: torch.device | str,
    *,
    strides: Sequence[int],
    include_leading_zero: Sequence[bool],
    dtypes: Sequence[torch.dtype],
    bulk_allocate: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """(int64 splits on `device`, outputs): output k is `cumsum(splits) * strides[k]`, inclusive,
    after a leading 0 where asked for, in `dtypes[k]`.

    Every output begins at a multiple of 16 bytes; with `bulk_allocate` in one allocation for all.
    """
    _check_splits(split_sizes, "split_sizes")
    if not len(strides) == len(include_leading_zero) == len(dtypes):
        raise ValueError(
            f"strides, include_leading_zero, dtypes: got {len(strides)}, "
            f"{len(include_leading_zero)} and {len(dtypes)} entries; one of each per output"
        )
    splits = split_sizes.to(device, torch.int64, non_blocking=True)
    ends = torch.cumsum(splits, 0)
    made = [
        torch.nn.functional.pad(ends * stride, (1 if zero else 0, 0)).to(dtype)
        for stride, zero, dtype in zip(strides, include_leading_zero, dtypes, strict=True)
    ]
    return splits, _in_one_allocation(made) if bulk_allocate and made else made


def _in_one_allocation(tensors: list[Tensor]) -> list[Tensor]:
    sizes = [cdiv(t.numel() * t.element_size(), _ALIGN) * _ALIGN for t in tensors]
    memory = torch.empty(sum(sizes), dtype=torch.uint8, device=tensors[0].device)
    out, at = [], 0
    for t, size in zip(tensors, sizes, strict=True):
        here = memory.narrow(0, at, t.numel() * t.element_size()).view(t.dtype)
        out.append(here.copy_(t))
        at += size
    return out


def _check_splits(splits: Any, name: str) -> None:
    if not isinstance(splits, Tensor) or splits.dtype not in (torch.int32, torch.int64):
        given = splits.dtype if isinstance(splits, Tensor) else type(splits).__name__
        raise TypeError(f"{name}: got {given}; an int32 or int64 tensor is needed")
    if splits.dim() != 1:
        raise ValueError(f"{name}: got shape {tuple(splits.shape)}; one dim is needed")


# --------------------------------------------------------------------------------- quantize, bgrad
def group_quantize(  # noqa: PLR0913  (the contract's signature)
    tensor: Tensor,
    quantizer: Quantizer,
    num_tensors: int,
    first_dims: Tensor | Sequence[int] | None,
    last_dims: Tensor | Sequence[int] | None = None,
    tensor_offsets: Tensor | None = None,
    noop_flag: Tensor | None = None,
    output: Any = None,
    *,
    seed: Tensor | None = None,
) -> GroupedTensorStorage | GroupedTensor:
    """`tensor[M, K]` as a group of `num_tensors` members, `first_dims[i]` rows each.

    Member i has the bits of `quantizer.quantize(member i)`. `first_dims` None: all are equal. With
    `last_dims` the members, of those widths, lie back to back in the memory of `tensor`, and the
    host reads the sizes. `seed`, an int64 `[seed, offset]`, fixes stochastic rounding: member i
    uses `[seed, offset + i]`. `output` is written instead of a new group, in the copies it has;
    where `noop_flag` is 1.0 it keeps what it holds.
    """
    if not torch.compiler.is_compiling():  # PyTorch 2.11 hides a constant's class while it traces
        grouped_cast.check_quantizer(quantizer)
    _check_output(output, quantizer, num_tensors, tensor, first_dims, last_dims)
    check_noop(noop_flag)
    if noop_flag is not None and output is None:
        raise ValueError("noop_flag: a new group has nothing to keep; pass output= with it")
    with torch.no_grad():
        if last_dims is not None:
            if output is not None:
                raise ValueError("last_dims: output= is for members of one shape")
            made = _of_widths(tensor, quantizer, num_tensors, first_dims, last_dims, seed)
            return made  # type: ignore[no-any-return]
        x = tensor.reshape(flatten(tensor.shape)) if tensor.dim() > 2 else tensor
        sizes = _on_device(first_dims, num_tensors, x)
        writer = quantizer if output is None else output._writer()
        made = grouped_cast.of_matrix(writer, x, sizes, num_tensors, seed=seed, noop_flag=noop_flag)
        if output is not None:
            output._write_parts(made, noop_flag)
            output._written()
            return output  # type: ignore[no-any-return]
        if sizes is not None and tensor_offsets is None:
            tensor_offsets = splits_to_offsets(sizes, x.shape[1])
        sized = {"first_dims": sizes, "tensor_offsets": tensor_offsets}
        group = _group(quantizer, x.shape, tensor.dtype, made, num_tensors=num_tensors, **sized)
        return group  # type: ignore[no-any-return]


def _group(
    quantizer: Any,
    shape: Sequence[int],
    dtype: torch.dtype,
    made: dict[str, Tensor],
    **kwargs: Any,
) -> Any:
    make: Any = GroupedTensorStorage if quantizer.internal else GroupedTensor
    return make(tuple(shape), dtype, **fields(quantizer), **arguments(made), **kwargs)


def _on_device(dims: Any, num: int, x: Tensor) -> Tensor | None:
    """Sizes as an int64 tensor beside `x`; what the host knows already is checked here."""
    if dims is None or isinstance(dims, Tensor):
        if dims is not None:
            _check_splits(dims, "first_dims")
        return None if dims is None else dims.to(x.device, torch.int64)
    sizes = ragged.integers(dims, "first_dims")
    ragged.check_sizes(sizes, num, x.shape[0])
    return torch.tensor(sizes, dtype=torch.int64, device=x.device)


def _of_widths(
    tensor: Tensor, quantizer: Any, num: int, first_dims: Any, last_dims: Any, seed: Any
) -> Any:
    """Members of several widths, from their shapes on the host."""
    rows = None if first_dims is None else ragged.integers(first_dims, "first_dims")
    columns = ragged.integers(last_dims, "last_dims")
    for name, dims in (("first_dims", rows), ("last_dims", columns)):
        if dims is not None and (len(dims) != num or any(d < 0 for d in dims)):
            raise ValueError(f"{name}: got {dims}; {num} sizes, none negative, are needed")
    if rows is None:
        rows = [tensor.shape[0]] * num
    shapes = list(zip(rows, columns, strict=True))
    flat = tensor.reshape(-1)
    if sum(r * c for r, c in shapes) != flat.numel():
        raise ValueError(
            f"last_dims: members {shapes} have {sum(r * c for r, c in shapes)} elements; tensor "
            f"has {flat.numel()}"
        )
    members = [
        part.view(shape)
        for part, shape in zip(torch.split(flat, [r * c for r, c in shapes]), shapes, strict=True)
    ]
    group = GroupedTensorStorage.make_grouped_tensor_with_shapes(
        num, shapes, quantizer, tensor.device, tensor.dtype
    )
    group._write_parts(grouped_cast.of_members(quantizer, members, seed=seed))
    return group


def _check_output(
    output: Any, quantizer: Any, num: int, tensor: Tensor, first_dims: Any, last_dims: Any
) -> None:
    if output is None:
        return
    if not isinstance(output, GroupedTensorStorage):
        raise TypeError(f"output: got {type(output).__name__}; a grouped tensor is needed")
    if output.quantizer is not quantizer:
        raise ValueError(
            "output: its quantizer is another object; pass the one that the group was made with"
        )
    if first_dims is not None or last_dims is not None or not output.all_same_shape():
        raise ValueError("output: members must be of one shape, first_dims and last_dims None")
    rows = tensor.numel() // max(tensor.shape[-1], 1)
    if output.num_tensors != num or output.logical_shape != (rows, tensor.shape[-1]):
        raise ValueError(
            f"output: it has {output.num_tensors} members in {output.logical_shape}; "
            f"{num} in {(rows, tensor.shape[-1])} are to be written"
        )


def bgrad_group_quantize(
    tensor: Tensor,
    quantizer: Quantizer,
    num_tensors: int,
    first_dims: Tensor | Sequence[int] | None,
    last_dims: Tensor | Sequence[int] | None = None,
    tensor_offsets: Tensor | None = None,
) -> tuple[GroupedTensorStorage | GroupedTensor, Tensor]:
    """(`group_quantize`, dbias): `dbias[i]` is the sum of member i's rows, in `tensor`'s dtype."""
    if last_dims is not None:
        raise NotImplementedError(
            "last_dims: bias gradients of members of several widths do not make a matrix"
        )
    group = group_quantize(
        tensor, quantizer, num_tensors, first_dims, tensor_offsets=tensor_offsets
    )
    with torch.no_grad():
        x = tensor.reshape(flatten(tensor.shape))
        return group, ragged.sums(x, group.first_dims, num_tensors)


def bgrad_quantize(input: Tensor, quantizer: Quantizer) -> tuple[Tensor, Any]:
    """(dbias, quantized): the sum of the rows, in fp32, rounded once; and the tensor."""
    with torch.no_grad():
        x = input.reshape(flatten(input.shape))
        return ragged.sums(x, None, 1)[0], quantizer.quantize(input)


def group_dequantize(input: Any, otype: Any = None) -> Any:
    """A group of plain members with the values of `input`, in `otype` (default: nominal dtype).

    `otype` is a torch dtype or a `DType`. The members keep their sizes, and these their place.
    """
    if not isinstance(input, GroupedTensorStorage):
        raise TypeError(f"input: got {type(input).__name__}; a grouped tensor is needed")
    dtype = TE_DType_To_Torch[otype] if isinstance(otype, DType) else otype
    check_nominal(dtype)
    with torch.no_grad():
        return input._dequantized_group(dtype)  # a method: graphs call those of tensors as a whole


# ------------------------------------------------------------------------------- one cast for each
def split_quantize(
    tensor: Tensor,
    split_sections: Sequence[int],
    quantizer_list: Sequence[Quantizer],
    disable_bulk_allocation: bool = False,
) -> list[Any]:
    """Rows `split_sections[i]` of `tensor`, each quantized by its own quantizer; sizes on the host.

    `disable_bulk_allocation` changes nothing: results never share an allocation.
    """
    sizes = ragged.integers(split_sections, "split_sections")
    if len(quantizer_list) != len(sizes):
        raise ValueError(
            f"quantizer_list: got {len(quantizer_list)}; there are {len(sizes)} sections"
        )
    ragged.check_sizes(sizes, len(sizes), tensor.shape[0], "split_sections")
    return multi_tensor_quantize(torch.split(tensor, sizes), quantizer_list)


def multi_tensor_quantize(tensors: Sequence[Tensor], quantizers: Sequence[Quantizer]) -> list[Any]:
    """`[q.quantize(t)]`, pair by pair."""
    if len(tensors) != len(quantizers):
        raise ValueError(f"quantizers: got {len(quantizers)}; there are {len(tensors)} tensors")
    for i, quantizer in enumerate(quantizers):
        if not isinstance(quantizer, Quantizer):
            raise TypeError(
                f"quantizers[{i}]: got {type(quantizer).__name__}; a Quantizer is needed"
            )
    if not torch.compiler.is_compiling():
        for t, q in zip(tensors, quantizers, strict=True):  # before the first one records an amax
            if q._storage_class is not None:
                q._check_input(t)
    return [q.quantize(t) for t, q in zip(tensors, quantizers, strict=True)]
