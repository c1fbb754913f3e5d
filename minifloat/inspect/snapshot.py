"""`Snapshot`: what a forward and a backward change, kept, and put back as often as wanted."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

from ..recipe.autocast import STATE
from ..recipe.delayed import DelayedState

__all__ = ["Snapshot"]


class Snapshot:
    """Buffers (delayed scaling's histories and cached weights among them), gradients, `main_grad`s,
    and the random numbers of PyTorch and of Python. Tensors keep their addresses.

    Parameters are not copied: a step that changes one is refused, see `changed`.
    """

    def __init__(self, model: nn.Module, layers: dict[str, Any]) -> None:
        self._parameters = dict(model.named_parameters())
        self._grads = {name: p.grad for name, p in self._parameters.items()}
        self._main = {
            name: (held, held.clone())
            for name, p in self._parameters.items()
            if isinstance(held := getattr(p, "main_grad", None), Tensor)
        }
        self._buffers = [
            (module, name, held, None if held is None else held.clone())
            for module in model.modules()
            for name, held in module._buffers.items()
        ]
        self._used = [(m, m.used) for m in model.modules() if isinstance(m, DelayedState)]
        self._cached = [
            (layer, layer._cached, layer._cached_version, _copied(layer._cached))
            for layer in layers.values()
            if hasattr(layer, "_cached")
        ]
        self._ran = STATE.ran
        self._rng = torch.get_rng_state()
        self._cuda_rng = torch.cuda.get_rng_state_all() if _uses_cuda() else []
        self._python = random.getstate()
        self._versions = {name: p._version for name, p in self._parameters.items()}

    def changed(self) -> str:
        """The name of a parameter that is not what it was, or ""."""
        for name, p in self._parameters.items():
            if p._version != self._versions[name]:
                return name
        return ""

    def begin(self) -> None:
        """As it was, without gradients: the start of every run."""
        self._restore()
        for p in self._parameters.values():
            p.grad = None
        for held, _ in self._main.values():
            held.zero_()

    def end(self) -> None:
        """As it was."""
        self._restore()
        for name, p in self._parameters.items():
            p.grad = self._grads[name]
        for held, kept in self._main.values():
            held.copy_(kept)

    def gradients(self) -> dict[str, Tensor]:
        """What the run left, by parameter: `.grad` and `main_grad`."""
        found = {}
        for name, p in self._parameters.items():
            if p.grad is not None:
                found[name] = p.grad.detach()
            if name in self._main:
                found[f"{name} (main_grad)"] = self._main[name][0]
        return found

    def _restore(self) -> None:
        with torch.no_grad():
            for module, name, held, kept in self._buffers:
                module._buffers[name] = held
                if held is not None and kept is not None:
                    held.data.copy_(kept)
            for layer, cached, version, copies in self._cached:
                layer._cached, layer._cached_version = cached, version
                for into, value in zip(_tensors(cached), copies, strict=True):
                    into.data.copy_(value)
        for module, used in self._used:
            module.__dict__["used"] = used
        STATE.ran = self._ran
        torch.set_rng_state(self._rng)
        if self._cuda_rng:
            torch.cuda.set_rng_state_all(self._cuda_rng)
        random.setstate(self._python)


def _uses_cuda() -> bool:
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _tensors(cached: Any) -> list[Tensor]:
    if cached is None:
        return []
    (row, col), _, scale = cached
    return [t for t in (*row, *col, scale) if t is not None]


def _copied(cached: Any) -> list[Tensor]:
    return [t.clone() for t in _tensors(cached)]
