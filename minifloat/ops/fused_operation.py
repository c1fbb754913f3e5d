"""`FusedOperation`: several basic operations in a row that are computed together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from .basic_operation import BasicOperation
from .fusible import FusibleOperation, hooked

__all__ = ["FusedOperation"]


class FusedOperation(FusibleOperation):
    """Computes what its `basic_ops` compute one after the other, and records for each of them.

    It owns no parameters. A forward fusion defines `fuser_forward_compute` and
    `fuser_forward_save_ctx`, the latter by letting its basic operations record what they do when
    they run alone, so that any backward fits; a backward fusion defines `fuser_backward`.
    """

    _framework = True
    basic_ops: Any  # nn.ModuleList of BasicOperation

    def __init__(self, basic_ops: Iterable[BasicOperation]) -> None:
        super().__init__()
        self.basic_ops = nn.ModuleList(basic_ops)
        for i, op in enumerate(self.basic_ops):
            if not isinstance(op, BasicOperation):
                raise TypeError(
                    f"{type(self).__name__}: basic_ops: got {type(op).__name__} at {i}; each is a "
                    "BasicOperation"
                )
        if len(self.basic_ops) == 0:
            raise ValueError(
                f"{type(self).__name__}: basic_ops: got none; an operation is made of at least one"
            )

    @property
    def is_fused_op(self) -> bool:
        return True

    def pre_first_fuser_forward(self) -> None:
        for op in self.basic_ops:
            op.pre_first_fuser_forward()

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        for op in self.basic_ops:
            op.pre_fuser_forward(requires_grad=requires_grad)

    def basic_kwargs(self, index: int, fwd_kwargs: dict[str, Any]) -> dict[str, Any]:
        """The keyword arguments that basic operation `index` gets when it runs alone, from those
        that this operation got."""
        given = fwd_kwargs["basic_op_kwargs"]
        one = slice(index, index + 1)
        made = {k: v[one] if isinstance(v, list) else v for k, v in fwd_kwargs.items()}
        if index > 0:
            before = self.basic_ops[index - 1]
            made["prev_op_grad_output_quantizer"] = before._grad_taker(None, **given[index - 1])
        if index + 1 < len(self.basic_ops):
            after = self.basic_ops[index + 1]
            made["next_op_input_quantizer"] = after._input_taker(None, **given[index + 1])
        return made

    def get_input_quantizer(self) -> Any:
        return self.basic_ops[0].get_input_quantizer()

    def get_grad_output_quantizer(self) -> Any:
        return self.basic_ops[-1].get_grad_output_quantizer()

    def forward(
        self,
        input: Any,  # noqa: A002
        *extra_inputs: Any,
        basic_op_kwargs: list[dict[str, Any]] | None = None,
    ) -> Any:
        """Run the operation alone."""
        from .fuser import OperationFuser

        if any([hooked(op) for op in self.basic_ops]):  # noqa: C419  (2.11 traces lists)
            from .sequential import Sequential

            given = dict(zip(self.basic_ops, basic_op_kwargs or (), strict=False))
            return Sequential(*self.basic_ops)(input, *extra_inputs, op_kwargs=given)
        return OperationFuser([self])(input, *extra_inputs, basic_op_kwargs=basic_op_kwargs)
