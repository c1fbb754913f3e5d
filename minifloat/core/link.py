"""`Link`: what every operation of a chain is."""

from __future__ import annotations

from typing import Any

__all__ = ["Link", "Tap"]


class Link:
    """Pure functions over matrices. `params` counts the tensors it takes besides its input; where
    that is a matter of the call, `takes` tells.

        compute(x, params, call) -> (y, tensors to save)
        backward(grad, saved, call) -> (gradient of x, (gradient of each parameter, ...))

    `taps`: what it makes is also a result of the chain. `splits`: it makes a tuple of matrices, the
    chain's results, and gets their gradients; it is the last one then.
    """

    params = 0
    taps = False
    splits = False

    @classmethod
    def takes(cls, call: Any) -> int:
        """How many tensors this call takes besides its input."""
        return cls.params

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
