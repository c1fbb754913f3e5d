"""`Linear`: a linear layer as a container of basic operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .basic.bias import Bias
from .basic.collectives import AllReduce, ReduceScatter
from .basic.linear import TP_MODES, BasicLinear
from .fused_operation import FusedOperation
from .group import group_of

__all__ = ["Linear"]


class Linear(FusedOperation):
    """`y = x w^T + bias`: `BasicLinear`, row mode's reduction, and `Bias` if there is one.

    In row mode the ranks have one bias, all of it, and add it to the sum, once. Parameters are
    those of the parts, under their names: `basic_ops.0.weight`.
    """

    def __init__(  # noqa: PLR0913  (the contract's signature)
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: Any = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
    ) -> None:
        if tensor_parallel_mode not in TP_MODES:
            raise ValueError(
                f"Linear: tensor_parallel_mode: got {tensor_parallel_mode!r}; allowed: None, "
                "'column', 'row'"
            )
        group = None if tensor_parallel_mode is None else group_of(tensor_parallel_group)
        size = 1 if group is None else group.size
        row = tensor_parallel_mode == "row" and group is not None
        if row and in_features % size:
            raise ValueError(
                f"Linear: in_features={in_features}: the {size} ranks of the group do not divide it"
            )
        common: dict[str, Any] = {"device": device, "dtype": dtype}
        parallel: dict[str, Any] = {}
        if not row:
            parallel = {
                "tensor_parallel_mode": tensor_parallel_mode,
                "tensor_parallel_group": tensor_parallel_group,
                "sequence_parallel": sequence_parallel,
            }
        parts: list[Any] = [
            BasicLinear(
                in_features // size if row else in_features,
                out_features,
                rng_state_tracker_function=rng_state_tracker_function,
                accumulate_into_main_grad=accumulate_into_main_grad,
                **common,
                **parallel,
            )
        ]
        if row:
            last = ReduceScatter if sequence_parallel else AllReduce
            parts.append(last(tensor_parallel_group))
        if bias:
            split = tensor_parallel_mode == "column" and group is not None
            parts.append(
                Bias(
                    out_features,
                    tensor_parallel=split,
                    tensor_parallel_group=tensor_parallel_group,
                    **common,
                )
            )
            if row:  # of a rank's tokens is its gradient then
                parts[-1].bias.sequence_parallel = sequence_parallel
        super().__init__(parts)
        self._has_bias = bias
        self.in_features, self.out_features = in_features, out_features

    @property
    def weight(self) -> Any:
        return self.basic_ops[0].weight

    @property
    def bias(self) -> Any:
        return self.basic_ops[-1].bias if self._has_bias else None

    def register_parameter(self, name: str, param: Any) -> None:
        """`weight` and `bias` are set where they live, in the parts."""
        if name == "weight":
            self.basic_ops[0].weight = param
        elif name == "bias" and self._has_bias:
            self.basic_ops[-1].bias = param
        else:
            raise AttributeError(f"Linear: {name}: no parameter of it; pass bias=True for a bias")
