"""`nn.Module.float`, `half`, `bfloat16` and `to(dtype)` leave quantized parameters quantized.

They change the nominal dtype only. PyTorch asks each parameter for `.half()`, which is a plain
tensor; no hook says that a module is asking, so the four methods are replaced, once.
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
    """Replace the four methods; modules without quantized parameters see no difference."""
    methods = {name: _named(name, dtype) for name, dtype in _METHODS.items()}
    for name, method in {**methods, "to": _to(torch.nn.Module.to)}.items():
        if not hasattr(getattr(torch.nn.Module, name), "_minifloat"):
            method._minifloat = True  # type: ignore[attr-defined]
            setattr(torch.nn.Module, name, method)


def _is_quantized(module: torch.nn.Module) -> bool:
    return any(isinstance(p, Wrapper) for p in module.parameters())


def _converted(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    def convert(t: Any) -> Any:
        if isinstance(t, Wrapper):
            return t.to_dtype(dtype)
        return t.to(dtype) if t.is_floating_point() else t

    return module._apply(convert)  # type: ignore[no-any-return,no-untyped-call]


def _named(name: str, dtype: torch.dtype) -> Callable[..., Any]:
    original = getattr(torch.nn.Module, name)

    @wraps(original)
    def method(self: torch.nn.Module) -> torch.nn.Module:
        if _is_quantized(self):
            return _converted(self, dtype)
        original(self)
        return self

    return method


def _to(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def method(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        if dtype is None or not dtype.is_floating_point or not _is_quantized(self):
            original(self, *args, **kwargs)
            return self
        original(self, device=device, non_blocking=non_blocking, memory_format=memory_format)
        return _converted(self, dtype)

    return method
