"""`Wrapper`: what every declared object that is a real `torch.Tensor` does.

Shape, nominal dtype and device are the tensor's; the data is in the declared fields.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import straight_through
from ..quantizers import Quantizer
from .views import is_view, leaves

__all__ = ["Wrapper", "contiguous_stride", "rebuild_tensor"]


class Wrapper:
    """Mixed in before a `Declared` class and `torch.Tensor`.

    The class says how it is read (`_dequantize`), copied (`_like`, `_aliased`) and dispatched.
    """

    _is_tensor = True

    def dequantize(self: Any, *, dtype: torch.dtype | None = None) -> Tensor:
        """The high-precision tensor; the gradient passes unchanged."""
        dtype = self.dtype if dtype is None else dtype
        if torch.is_grad_enabled() and self.requires_grad:
            return straight_through.dequantize(self, dtype)
        return self._dequantize(dtype)  # type: ignore[no-any-return]

    @classmethod
    def _dispatched(cls, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """`_operate`, in inference mode as elsewhere."""
        if not torch.is_inference_mode_enabled():
            return cls._operate(func, args, kwargs)
        if func._can_decompose():  # whole where autograd does not take it apart
            return func.decompose(*args, **kwargs)
        held = [t for t in leaves(args) if isinstance(t, Tensor)]
        if is_view(func) and not any(t.is_inference() for t in held):
            # Views of ordinary tensors are ordinary ones, which PyTorch expects here too.
            with torch.inference_mode(False), torch.no_grad():
                return cls._operate(func, args, kwargs)
        return cls._operate(func, args, kwargs)

    @classmethod
    def _operate(cls, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What an operator does to tensors of this class."""
        raise NotImplementedError

    def to_dtype(self, dtype: torch.dtype) -> Any:
        """The same tensor under another nominal dtype."""
        raise NotImplementedError

    def detach(self: Any) -> Any:
        # PyTorch's own: what is written to the result counts as written here, which a backward has
        # to know. Graphs count nothing.
        if torch.compiler.is_compiling():
            return self._aliased()
        return Tensor.detach(self)

    def _written(self: Any) -> None:
        """Count new values of this tensor, too: it may be what a backward has saved. So may the one
        that it is a view of, with whose buffers those of a view, made in an operator, count not."""
        for t in (self, self._base):
            if isinstance(t, Wrapper):
                super(Wrapper, t)._written()  # type: ignore[misc]
        if not (self.is_inference() or torch.compiler.is_compiling()):
            torch.autograd.graph.increment_version(self)

    def float(self) -> Tensor:
        return self.dequantize(dtype=torch.float32)

    def half(self) -> Tensor:
        return self.dequantize(dtype=torch.float16)

    def bfloat16(self) -> Tensor:
        return self.dequantize(dtype=torch.bfloat16)

    def cpu(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.to("cpu")

    def expand_as(self: Any, other: Tensor) -> Any:
        # DDP finds a parameter's gradient accumulator behind the node of `p.expand_as(p)`.
        return (
            Tensor.view(self, self.shape) if other is self else self.dequantize().expand_as(other)
        )

    def untyped_storage(self: Any) -> Any:
        return torch.UntypedStorage(0, device=self.device)  # type: ignore[no-untyped-call]

    def share_memory_(self: Any) -> Any:
        """Move what it is made of to memory that processes share."""
        for t in self._memory():
            t.share_memory_()
        return self

    def is_shared(self: Any) -> bool:
        return all(t.is_shared() for t in self._memory())

    def _memory(self: Any) -> list[Tensor]:
        """The inner tensors, those of the quantizer among them."""
        return [getattr(self, name) for name in self.__tensor_flatten__()[0]]

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        # What PyTorch would hand out is the address 0.
        raise BufferError(
            f"{type(self).__name__}: its values have no memory that others could read; "
            "dequantize() it first"
        )

    # ----------------------------------------------------------------------- copies of itself
    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        names, ctx = self.__tensor_flatten__()
        ctx = {k: v for k, v in ctx.items() if k != "group_name"}
        inner = {n: getattr(self, n) for n in names}
        is_parameter = isinstance(self, torch.nn.Parameter)
        return rebuild_tensor, (inner, ctx, tuple(self.shape), is_parameter)

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        with torch.no_grad():
            made: Any = self.clone()
        made._keep(copy.deepcopy(self._quantizer, memo))
        made.requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=self.requires_grad)
        memo[id(self)] = made
        return made

    def _stable_hash_for_caching(self: Any) -> str:
        """What compile caches key this tensor by: everything but the data."""
        names, ctx = self.__tensor_flatten__()
        inner = [(n, tuple(getattr(self, n).shape), str(getattr(self, n).dtype)) for n in names]
        kwargs = dict(ctx.pop("nontensor_kwargs"))
        quantizer = kwargs.pop("quantizer")
        if isinstance(quantizer, Quantizer):
            quantizer = quantizer._value_key()
        ctx["cls"] = ctx["cls"].__qualname__
        return repr((tuple(self.shape), self.stride(), inner, ctx, kwargs, quantizer))

    def __coerce_tangent_metadata__(self) -> Any:
        """PyTorch asks, while it compiles, what gradient a compiled region's output will get."""
        raise RuntimeError(
            f"{type(self).__name__}: a quantized tensor that needs a gradient cannot leave a "
            "compiled region (fp8_output=True, or quantize as the last step): its gradient is a "
            "plain tensor, which PyTorch refuses there. Use it inside the region, return "
            "dequantize() or detach() of it, or run under torch.no_grad()"
        )


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense tensor of `shape`."""
    stride, step = [], 1
    for d in reversed(tuple(shape)):
        stride.append(step)
        step = step * max(d, 1) if isinstance(d, int) else step * d
    return tuple(reversed(stride))


def rebuild_tensor(
    inner: dict[str, Tensor], ctx: dict[str, Any], shape: Any, is_param: bool
) -> Any:
    """Unpickle: `torch.load(weights_only=True)` may call this and the classes it names."""
    made = ctx["cls"].__tensor_unflatten__(inner, ctx, shape, contiguous_stride(shape))
    return torch.nn.Parameter(made, requires_grad=ctx["requires_grad"]) if is_param else made
