"""The layers of a model that have operands to look at."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..module import Module

__all__ = ["find", "release", "uncompiled"]


def find(model: Any, who: str) -> dict[str, Any]:
    """Every product of a module of ours, by name; names are those of the uncompiled model.

    A LayerNormMLP has two, `fc1` and `fc2`. Layers that somebody looks at already are an error, and
    so is a model without layers.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{who}: model: got {type(model).__name__}; a torch.nn.Module is needed, compiled or "
            "not"
        )
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, Module) and hasattr(module, "_probe"):
            found[uncompiled(name)] = module
    if not found:
        raise ValueError(
            f"{who}: model: it has no layer that could be quantized; call minifloat.convert(model),"
            " or build it of minifloat's modules"
        )
    for name, layer in found.items():
        if layer._probe is not None:
            raise RuntimeError(
                f"{who}: layer {name!r} is being looked at already; leave the inspect or bisect "
                "around this one first"
            )
    return found


def uncompiled(name: str) -> str:
    """The name that a module or parameter has in the model that is not compiled."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def release(layers: dict[str, Any]) -> None:
    """Nobody looks any more: the graphs from before fit again."""
    for layer in layers.values():
        layer._probe = None
