"""What quantization does to a model: `inspect` a step layer by layer, `bisect` for who did it.

`minifloat.inspect` is this package, and the function: calling the one calls the other.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from .bisection import bisect
from .ranking import Effect, Ranking
from .report import Report
from .session import inspect
from .statistics import GEMMS, OPERANDS, GemmStatistics, LayerStatistics, OperandStatistics

__all__ = [
    "GEMMS",
    "OPERANDS",
    "Effect",
    "GemmStatistics",
    "LayerStatistics",
    "OperandStatistics",
    "Ranking",
    "Report",
    "bisect",
    "inspect",
]


class _Callable(ModuleType):
    """A package and a function of one name: whichever way it was imported, it can be called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return inspect(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
