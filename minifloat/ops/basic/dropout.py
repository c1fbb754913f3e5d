"""`Dropout`: zeros at random."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..basic_operation import BasicOperation
from ..context import OperationContext
from .values import plain

__all__ = ["Dropout"]

IDENTITY, MASK, BITS = 0, 1, 2  # how a call is computed


class Dropout(BasicOperation):
    """`y = x m / (1 - p)`, where m is 0 with probability p; without training, `y = x`.

    The mask is drawn in forward and saved: one bit per element for 16-bit tensors whose last dim is
    a multiple of 16, else a byte.
    """

    forward_keywords = ()

    def __init__(self, p: float) -> None:
        super().__init__()
        if not isinstance(p, int | float) or not 0.0 <= p <= 1.0:
            raise ValueError(f"Dropout: p: got {p!r}; a probability is needed, 0 to 1")
        self.dropout_probability = p

    def _how(self, x: Any) -> int:
        """The implementation, for both halves of forward."""
        if not self.training or self.dropout_probability == 0.0:
            return IDENTITY
        sixteen = x.dtype in (torch.float16, torch.bfloat16)
        return BITS if sixteen and x.dim() > 0 and x.shape[-1] % 16 == 0 else MASK

    def op_forward_compute(
        self, input_: Any, *, requires_grad: bool = True, **kwargs: Any
    ) -> tuple[Any, Any]:
        how = self._how(input_)
        if how == IDENTITY:
            return input_, ()
        x = plain(input_)
        keep = torch.rand(x.shape, device=x.device, dtype=torch.float32) >= self.dropout_probability
        saved = () if not requires_grad else (_packed(keep) if how == BITS else keep,)
        return self._masked(x, keep), saved

    def op_forward_save_ctx(
        self, ctx: OperationContext, input_: Any, tensors_to_save: Any, **kwargs: Any
    ) -> None:
        ctx.how = self._how(input_)
        ctx.save_for_backward(*tensors_to_save)

    def op_backward(self, ctx: OperationContext, grad_output: Any) -> tuple[Any, Iterable[Any]]:
        if ctx.how == IDENTITY:
            return grad_output, ()
        assert ctx.saved_tensors is not None
        (keep,) = ctx.saved_tensors
        grad = plain(grad_output)
        return self._masked(grad, _unpacked(keep) if ctx.how == BITS else keep), ()

    def _masked(self, x: Tensor, keep: Tensor) -> Tensor:
        left = 1.0 - self.dropout_probability
        return x * keep * (1.0 / left if left else 0.0)

    def extra_repr(self) -> str:
        return f"p={self.dropout_probability}"


def _packed(keep: Tensor) -> Tensor:
    """`keep[..., n]` as bits, `[..., n // 8]`."""
    bits = keep.reshape(*keep.shape[:-1], keep.shape[-1] // 8, 8).to(torch.uint8)
    packed: Tensor = (bits << _places(keep)).sum(-1, dtype=torch.uint8)
    return packed


def _unpacked(bits: Tensor) -> Tensor:
    return ((bits.unsqueeze(-1) >> _places(bits)) & 1).flatten(-2).bool()


def _places(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)
