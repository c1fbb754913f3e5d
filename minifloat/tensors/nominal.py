"""`nn.Module.float`, `half` and `bfloat16` leave quantized parameters quantized.

They change the nominal dtype only. PyTorch asks each parameter for `.half()`, which is a plain
tensor; no hook says that a module is asking, so the three methods are replaced, once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from .wrapper import Wrapper

__all__ = ["keep_quantized_parameters"]

_METHODS = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16}


def keep_quantized_parameters() -> None:
    """Replace the three methods; modules without quantized parameters see no difference."""
    for name, dtype in _METHODS.items():
        original = getattr(torch.nn.Module, name)
        if not hasattr(original, "_minifloat"):
            setattr(torch.nn.Module, name, _nominal(original, dtype))


def _nominal(original: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    def convert(t: Any) -> Any:
        if isinstance(t, Wrapper):
            return t.to_dtype(dtype)
        return t.to(dtype) if t.is_floating_point() else t

    @wraps(original)
    def method(self: torch.nn.Module) -> torch.nn.Module:
        quantized = any(isinstance(p, Wrapper) for p in self.parameters())
        if quantized:
            self._apply(convert)  # type: ignore[no-untyped-call]
        else:
            original(self)
        return self

    method._minifloat = True  # type: ignore[attr-defined]
    return method
