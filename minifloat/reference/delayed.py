"""Delayed scaling: from a history of amaxes to the next scale."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["amax_from_history", "delayed_update", "scale_from_amax"]

AmaxAlgorithm = str | Callable[[Tensor], Tensor]
ScaleAlgorithm = Callable[[Tensor, Tensor, Tensor], Tensor]


def amax_from_history(history: Tensor, algorithm: AmaxAlgorithm) -> Tensor:
    """`history[len, n]`, row 0 being the step just recorded -> amax[n]."""
    if callable(algorithm):
        return algorithm(history)
    if algorithm == "max":
        return history.amax(dim=0)
    if algorithm == "most_recent":
        return history[0]
    raise ValueError(
        f"amax_compute_algo: got {algorithm!r}; allowed: 'max', 'most_recent', or a callable"
    )


def scale_from_amax(amax: Tensor, scale: Tensor, fmax: Tensor | float, margin: int = 0) -> Tensor:
    """`fmax * 2**-margin / amax`; the old scale where amax is not positive and finite."""
    numerator = torch.as_tensor(fmax, dtype=torch.float32, device=amax.device) * 2.0**-margin
    # Not a constant of a module: `torch.compile(dynamic=True)` would make a graph's input of it.
    new = (numerator / amax).clamp(max=torch.finfo(torch.float32).max)
    return torch.where((amax > 0) & amax.isfinite(), new, scale)


def delayed_update(
    history: Tensor,
    scale: Tensor,
    fmax: Tensor | float,
    *,
    margin: int = 0,
    amax_algorithm: AmaxAlgorithm = "max",
    scale_algorithm: ScaleAlgorithm | None = None,
) -> tuple[Tensor, Tensor]:
    """(new history, new scale) after a step.

    The history is rolled by -1 and row 0 zeroed, so that row -1 is the newest and row 1 the oldest.
    A column whose row 0 is zero recorded nothing: it keeps its history and its scale.
    `scale_algorithm(amax, scale, fmax)` replaces `scale_from_amax`.
    """
    amax = amax_from_history(history, amax_algorithm)
    if scale_algorithm is None:
        new_scale = scale_from_amax(amax, scale, fmax, margin)
    else:
        limit = torch.as_tensor(fmax, dtype=torch.float32, device=amax.device)
        new_scale = scale_algorithm(amax, scale, limit)
    rolled = torch.cat((torch.zeros_like(history[:1]), history[2:], history[:1]))[: len(history)]
    idle = history[0] == 0
    return torch.where(idle, history, rolled), torch.where(idle, scale, new_scale)
