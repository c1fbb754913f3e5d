"""`GroupedTensor`: a group of members that is one real `torch.Tensor`: it can be a parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import grouped_cast
from .grouped_factories import CLASSES
from .grouped_operators import HANDLERS, flat, refuse, refused
from .grouped_shapes import member_shapes, outer_shape
from .grouped_storage import GroupedTensorStorage, _no_parameter
from .operators import dequantized_call
from .storage import _as_size, _infer
from .tensor import QuantizedTensor
from .wrapper import Wrapper, contiguous_stride

__all__ = ["GroupedTensor", "as_group", "as_parameter", "group_like"]

# What else comes with the buffers of another group: where members lie in them.
_LAID_OUT = (
    "_shares_scale",
    "logical_shape",
    "tensor_shapes",
    "offsets",
    "scale_inv_offsets",
    "columnwise_scale_inv_offsets",
    "quantized_tensors",
)


class GroupedTensor(Wrapper, GroupedTensorStorage, Tensor):  # type: ignore[misc]
    """Wrapper subclass: (n, M, N) or (n, L) where all members are equal, else the logical shape.

    An operator that knows nothing of groups sees the stacked, dequantized members; one that writes
    in place has what it wrote quantized again. Views that would cut members up are errors.
    """

    @staticmethod
    def __new__(
        cls: Any,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        num_tensors: int,
        requires_grad: bool = False,
        stride: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        **kwargs: Any,
    ) -> Any:
        """`shape` is the logical shape; `stride`, of the outer shape, is computed if absent.

        The other arguments: shapes, quantizer, data, columnwise_data, scale_inv,
        columnwise_scale_inv, amax, columnwise_amax, scale, first_dims, last_dims, tensor_offsets,
        offsets, scale_inv_offsets, columnwise_scale_inv_offsets, with_gemm_swizzled_scales,
        row_scaled_nvfp4, nvfp4_use_4over6, nvfp4_e4m3_max.
        """
        if device is None:
            device = _device_of(cls, kwargs)
        varies = kwargs.get("first_dims") is not None, kwargs.get("last_dims") is not None
        members = member_shapes(tuple(shape), num_tensors, kwargs.get("shapes"), varies)
        outer = outer_shape(tuple(shape), num_tensors, None if any(varies) else members)
        self: Any = Tensor._make_wrapper_subclass(
            cls,
            outer,
            strides=stride if stride is not None else contiguous_stride(outer),
            storage_offset=0,
            dtype=dtype,
            device=torch.device(device),
            requires_grad=requires_grad,
        )
        kwargs["num_tensors"] = num_tensors
        self._set_group(shape, dtype, kwargs)
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass  # __new__ has set the fields

    # `torch.Tensor` has the truth about these; the storage's versions serve bare storages.
    shape = Tensor.shape
    size = Tensor.size  # type: ignore[assignment]
    device = Tensor.device
    dim = Tensor.dim
    numel = Tensor.numel
    __repr__ = GroupedTensorStorage.__repr__  # type: ignore[assignment]

    def to_dtype(self, dtype: torch.dtype) -> Any:
        """The same codes under another nominal dtype; without a quantizer, the values cast."""
        return self._like(self._under(dtype), dtype=dtype, requires_grad=self.requires_grad)

    def view(self, *shape: Any) -> Any:
        """The flat row buffer (`view(-1)`), or the shape that is there; other views are errors."""
        if shape and isinstance(shape[0], torch.dtype):
            return Tensor.view(self, *shape)
        size = _as_size(shape)
        # Codes are no function of the values that autograd could follow, nor what others who ask by
        # the operator want: this method alone gives them.
        codes = self._quantizer is not None and _infer(size, self.numel()) == (self.numel(),)
        return flat(self) if codes else Tensor.view(self, *size)

    def reshape(self, *shape: Any) -> Any:
        raise refuse(self, "reshape")

    def flatten(self, *dims: Any) -> Any:
        raise refuse(self, "flatten")

    @property
    def data(self) -> Any:
        return self._aliased()

    @data.setter
    def data(self, value: Any) -> None:
        """Rebind to another group's buffers, or quantize plain data."""
        if tuple(value.shape) != tuple(self.shape):
            raise ValueError(f"data: got shape {tuple(value.shape)}; {tuple(self.shape)} is needed")
        if isinstance(value, GroupedTensorStorage):
            if value.fake_dtype != self._dtype:
                value = value._like(value._under(self._dtype), dtype=self._dtype)
            for attr, _ in self._PAYLOAD:
                setattr(self, attr, getattr(value, attr))
            for plain in self._PLAIN:
                setattr(self, plain.attr, getattr(value, plain.attr))
            for attr in _LAID_OUT:
                setattr(self, attr, getattr(value, attr))
            self._keep(value._quantizer)
        else:
            self._check_writable("data")
            self._write_values(value)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return cls._dispatched(func, args, kwargs or {})

    @classmethod
    def _operate(cls, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        handler = HANDLERS.get(func)
        if handler is not None:
            out = handler(func, *args, **kwargs)
            if out is not NotImplemented:
                return out
        if refused(func):
            raise refuse(cls, func)
        return dequantized_call(func, args, kwargs)


CLASSES[False] = GroupedTensor


def as_parameter(group: Any, requires_grad: bool = True) -> torch.nn.Parameter:
    """`group` as one parameter; a bare storage is refused with the reason."""
    if not isinstance(group, GroupedTensor):
        if isinstance(group, GroupedTensorStorage):
            raise _no_parameter(group)
        raise TypeError(f"group: got {type(group).__name__}; a GroupedTensor is needed")
    return torch.nn.Parameter(group, requires_grad=requires_grad)


def group_like(one: Any, num: int) -> Any:
    """An uninitialised group of `num` quantized matrices like `one`, with the copies it has."""
    quantizer, shapes = one._quantizer._for_tensor(one), [tuple(one.shape)] * num
    return GroupedTensorStorage.make_grouped_tensor_with_shapes(
        num, shapes, quantizer, one.device, one.dtype
    )


def as_group(matrices: list[Any]) -> Any:
    """One `GroupedTensor` with the codes of quantized matrices; None where they are not quantized
    alike, or as no group is."""
    first = matrices[0]
    if not isinstance(first, QuantizedTensor) or not _forms_groups(first._quantizer):
        return None
    group = group_like(first, len(matrices))
    pairs = list(zip(group.split_into_quantized_tensors(), matrices, strict=True))
    for member, one in pairs:
        if type(one) is not type(member) or one.shape != member.shape or one.dtype != member.dtype:
            return None
        if one.get_usages() != member.get_usages() or member._difference(one):
            return None
    for member, one in pairs:
        member.copy_from_storage(one)
    if group._shares_scale:  # what a group keeps besides, and a member does not
        group.amax.copy_(group.dequantize(dtype=torch.float32).abs().amax((1, 2)))
        group.scale.copy_(group.scale_inv.reciprocal())
    return group


def _forms_groups(quantizer: Any) -> bool:
    """Whether what `quantizer` makes can be the members of a parameter."""
    if quantizer is None or quantizer.internal or quantizer._state_written():
        return False
    try:
        grouped_cast.check_quantizer(quantizer)
    except (NotImplementedError, ValueError):
        return False
    return True


def _device_of(cls: Any, kwargs: dict[str, Any]) -> torch.device:
    for _, kwarg in cls._PAYLOAD:
        t = kwargs.get(kwarg)
        if t is not None:
            return t.device  # type: ignore[no-any-return]
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
