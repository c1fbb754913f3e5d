"""Models of `nn.Linear` layers into ours, and checkpoints of Transformer Engine into tensors."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .checkpoints import convert_checkpoint, convert_state_dict, read_extra_state
from .swap import convert

if TYPE_CHECKING:
    from .report import ConversionReport, ConvertedLayer

__all__ = [
    "ConversionReport",
    "ConvertedLayer",
    "convert",
    "convert_checkpoint",
    "convert_state_dict",
    "read_extra_state",
]


def __getattr__(name: str) -> Any:
    if name in ("ConversionReport", "ConvertedLayer"):  # loaded when they are first asked for
        return getattr(importlib.import_module(".report", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
