"""`Bias`: addition of a vector."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ...parameters import default_device
from ...sums import column_sums
from ..basic_operation import BasicOperation
from ..context import OperationContext
from .values import matrix, plain

__all__ = ["Bias"]


class Bias(BasicOperation):
    """`y = x + bias`, with `bias[size]`, or this rank's part of it."""

    forward_keywords = ()

    def __init__(
        self,
        size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel: bool = False,
        tensor_parallel_group: Any = None,
    ) -> None:
        super().__init__()
        ways = 1
        if tensor_parallel and torch.distributed.is_initialized():
            ways = torch.distributed.get_world_size(tensor_parallel_group)
        if size % ways:
            raise ValueError(f"Bias: size={size}: the {ways} ranks of the group do not divide it")
        self.local_size = size // ways
        self.bias = nn.Parameter(
            torch.zeros(self.local_size, device=default_device(device), dtype=dtype)
        )

    def reset_parameters(self) -> None:
        """Zeros; a meta parameter is made real."""
        if self.bias.is_meta:
            real = torch.empty_like(self.bias, device=default_device(None))
            made = nn.Parameter(real, self.bias.requires_grad)
            vars(made).update(vars(self.bias))
            self.bias = made
        nn.init.zeros_(self.bias)

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        if self.bias.is_meta and not torch.compiler.is_compiling():
            self.reset_parameters()

    def op_forward_compute(self, input_: Any, **kwargs: Any) -> tuple[Any, Any]:
        x = plain(input_)
        if x.dim() == 0 or x.shape[-1] != self.local_size:
            raise ValueError(
                f"input: got shape {tuple(x.shape)}; its last dim must be the bias's, "
                f"{self.local_size}"
            )
        return x + self.bias.to(x.dtype), ()

    def op_forward_save_ctx(
        self, ctx: OperationContext, input_: Any, tensors_to_save: Any, **kwargs: Any
    ) -> None:
        # For a fused backward, which quantizes the gradient of what comes before.
        ctx.prev_op_grad_output_quantizer = kwargs.get("prev_op_grad_output_quantizer")

    def op_backward(self, ctx: OperationContext, grad_output: Any) -> tuple[Any, Iterable[Any]]:
        if not self.bias.requires_grad:
            return grad_output, (None,)
        return grad_output, (column_sums(matrix(grad_output), self.bias.dtype),)

    def extra_repr(self) -> str:
        return f"size={self.local_size}"
