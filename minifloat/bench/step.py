"""One training step of one provider, as something to call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from .cases import KINDS
from .work import Work

__all__ = ["Step"]


class Step:
    """Forward, and backward to the input and the weights; gradients are dropped, not added up.

    `weights` are the parameters that hold each weight of the work, in the order of its rows: they
    get its values here. `parameters` are all that get gradients.
    """

    def __init__(
        self,
        work: Work,
        forward: Callable[[], Tensor],
        weights: Mapping[str, Sequence[Tensor]],
        parameters: Iterable[Tensor] = (),
    ) -> None:
        self.forward, self.x, self.grad = forward, work.x, work.grad
        self.weights = {name: list(parts) for name, parts in weights.items()}
        held = [work.x, *(p for ps in self.weights.values() for p in ps), *parameters]
        self._cleared = list({id(t): t for t in held}.values())
        self.optimizer: torch.optim.Optimizer | None = None
        if KINDS[work.case.kind].trains:
            # It does all of its work and changes nothing: every step is the first one.
            self.optimizer = torch.optim.AdamW(
                self._cleared[1:], lr=0.0, weight_decay=0.0, fused=work.x.is_cuda
            )
        with torch.no_grad():
            for name, parts in self.weights.items():
                rows = work.weights[name].reshape(-1, work.weights[name].shape[-1])
                at = 0
                for part in parts:
                    count = part.numel() // rows.shape[1]
                    part.copy_(rows[at : at + count].view(part.shape))
                    at += count
                if at != rows.shape[0]:
                    raise ValueError(f"{name}: {at} rows of {rows.shape[0]} have a parameter")

    def __call__(self) -> None:
        self.forward().backward(self.grad)  # type: ignore[no-untyped-call]
        if self.optimizer is not None:
            self.optimizer.step()
        self.clear()

    step = __call__

    def clear(self) -> None:
        for t in self._cleared:
            t.grad = None

    def results(self) -> dict[str, Tensor]:
        """Output and gradients of a step, by name; weights as matrices."""
        y = self.forward()
        y.backward(self.grad)  # type: ignore[no-untyped-call]
        out = {"y": y.detach(), "dx": _grad(self.x, "x")}
        for name, parts in self.weights.items():
            grads = [_grad(p, name).reshape(-1, p.shape[-1]) for p in parts]
            out[f"d{name}"] = grads[0] if len(grads) == 1 else torch.cat(grads)
        self.clear()
        return out


def _grad(t: Tensor, name: str) -> Tensor:
    if t.grad is None:
        raise ValueError(f"{name}: backward left no gradient")
    return t.grad
