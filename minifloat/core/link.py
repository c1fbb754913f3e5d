"""`Link`: what every operation of a chain is."""

from __future__ import annotations

from typing import Any

__all__ = ["Link", "Tap"]


class Link:
    """Pure functions over matrices. `params` counts the tensors it takes besides its input.

        compute(x, params, call) -> (y, tensors to save)
        backward(grad, saved, call) -> (gradient of x, (gradient of each parameter, ...))

    `taps`: what it makes is also a result of the chain.
    """

    params = 0
    taps = False

    @staticmethod
    def leading(lead: tuple[int, ...], call: Any) -> tuple[int, ...]:
        """The leading dims of the output, given the input's."""
        return lead


class Tap(Link):
    """The identity, whose value the caller gets too."""

    taps = True

    @staticmethod
    def compute(x: Any, params: tuple[Any, ...], call: Any) -> tuple[Any, tuple[Any, ...]]:
        return x, ()

    @staticmethod
    def backward(grad: Any, saved: Any, call: Any) -> tuple[Any, tuple[Any, ...]]:
        return grad, ()
