"""`FusibleOperation`: a step of a pipeline that the fuser can run, alone or fused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .styles import settle

__all__ = ["FusibleOperation", "hooked"]


class FusibleOperation(nn.Module):
    """One operation, or several fused into one, with a forward and a backward.

    Forward comes in two styles, and a class uses one of them.

    *Split*: `fuser_forward_compute` is pure: it reads its arguments and the operation, and returns
    the outputs and the tensors to save. `fuser_forward_save_ctx` gets the same keyword arguments
    and only records: it saves those tensors, and may set attributes on the contexts that follow
    from its arguments and the operation. A pipeline of such operations is one graph under
    `torch.compile`, so this is the one to use.

    *Legacy*: `fuser_forward` does both at once, and may do anything. It compiles where Dynamo can
    follow it; otherwise the graph breaks around this operation. For operations whose record needs
    more than their arguments.

    Both are given, by keyword: `basic_op_extra_inputs` (a tuple of tensors for each basic
    operation), `prev_op_grad_output_quantizer` and `next_op_input_quantizer` (what the neighbours
    quantize with, or None), `basic_op_kwargs` (a dict for each basic operation). The split style is
    given `requires_grad` too (a bool for each); legacy has it in the contexts.
    """

    _framework: ClassVar[bool] = True  # its forwards are defaults, not a choice of style
    _use_split_forward: ClassVar[bool] = False
    _computes_as: ClassVar[type[Any]] = nn.Module  # whose forward or backward it has
    # What a caller may give its forward by keyword; None: whatever that makes of it.
    forward_keywords: ClassVar[tuple[str, ...] | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        settle(cls)

    @property
    def is_fused_op(self) -> bool:
        """Whether it is made of other operations."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------ hooks
    def pre_first_fuser_forward(self) -> None:
        """Called before the first forward of a fuser."""

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        """Called before every forward; `requires_grad`: whether there will be a backward."""

    def get_input_quantizer(self) -> Any:
        """What the previous operation may quantize its output with; None: nothing."""
        return None

    def get_grad_output_quantizer(self) -> Any:
        """What the next operation may quantize the gradient of its input with; None: nothing."""
        return None

    # ---------------------------------------------------------------------------------- forward
    def fuser_forward(
        self, basic_op_ctxs: list[Any], input_: Any, *args: Any, **fwd_kwargs: Any
    ) -> tuple[Any, Iterable[Iterable[Tensor | None]]]:
        """(output, the extra outputs of each basic operation)."""
        # Whatever `_use_split_forward`: a legacy subclass of a split class gets here by super().
        fwd_kwargs["requires_grad"] = [ctx.requires_grad for ctx in basic_op_ctxs]
        with torch.no_grad():  # fuser_backward differentiates it, not autograd
            output, extra, saved = self.fuser_forward_compute(input_, **fwd_kwargs)
        self.fuser_forward_save_ctx(basic_op_ctxs, input_, saved, **fwd_kwargs)
        return output, extra

    def fuser_forward_compute(
        self, input_: Any, *args: Any, **fwd_kwargs: Any
    ) -> tuple[Any, Iterable[Iterable[Tensor | None]], Any]:
        """(output, the extra outputs of each basic operation, tensors to save)."""
        raise NotImplementedError(
            f"{type(self).__name__} defines no forward: define fuser_forward_compute and "
            "fuser_forward_save_ctx"
        )

    def fuser_forward_save_ctx(
        self,
        basic_op_ctxs: list[Any],
        input_: Any,
        tensors_to_save: Any,
        *args: Any,
        **fwd_kwargs: Any,
    ) -> None:
        """Record what backward needs; `tensors_to_save` is what compute returned."""
        raise NotImplementedError(f"{type(self).__name__} does not define fuser_forward_save_ctx")

    def fuser_backward(
        self, basic_op_ctxs: list[Any], grad_output: Any, *, basic_op_grad_extra_outputs: list[Any]
    ) -> tuple[Any, Iterable[Iterable[Any]], Iterable[Iterable[Any]]]:
        """(gradient of the input, of each operation's parameters, of its extra inputs)."""
        raise NotImplementedError(f"{type(self).__name__} does not define fuser_backward")


def hooked(module: nn.Module) -> bool:
    """Whether somebody's code runs where a module is called: what sees its values, or makes its
    weight (`torch.nn.utils.prune`, FSDP2). What computes its part without calling it leaves that
    out."""
    return (
        len(module._forward_hooks) > 0
        or len(module._forward_pre_hooks) > 0
        or len(module._backward_hooks) > 0
        or len(module._backward_pre_hooks) > 0
        or "forward" in module.__dict__
    )
