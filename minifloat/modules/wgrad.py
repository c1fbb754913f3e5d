"""`WeightGradStore`: gradients of weights that are computed after backward."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..autograd import later
from ..core.linear import Call, wgrad
from ..formats import Operand

__all__ = ["WeightGradStore"]


class WeightGradStore:
    """First in, first out. Backward puts the operands of a product here, `pop` multiplies them."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.queue: deque[tuple[Operand, Operand, Call]] = deque()
        self.hooks: list[Callable[[], Any]] = []

    def expects(self, owners: list[Any]) -> bool:
        """Whether the gradient of `owners` comes later: not where they are frozen."""
        return self.enabled and (bool(self.queue) or any(w.requires_grad for w in owners))

    def put(self, g_col: Operand, x_col: Operand, call: Call) -> None:
        self.queue.append((g_col, x_col, call))

    def pop(self, where: str) -> Tensor | None:
        """The oldest gradient; None where `main_grad` took it."""
        if not self.queue:
            raise RuntimeError(
                f"{where}: backward_dw without a backward before it; call it once per backward"
            )
        made: Tensor | None = later(wgrad, *self.queue.popleft())
        return made
