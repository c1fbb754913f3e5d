"""`memory_report`: the bytes of linear layers, in high precision and by a recipe.

What a layer keeps for backward is not a formula here: its forward runs on fake tensors, and what
autograd saves is added up, once for each storage.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import is_lazy

from .experts import Experts
from .inputs import INPUT_DTYPES
from .modules import LayerNormLinear, LayerNormMLP, Linear
from .modules.projection import Projection
from .ops.basic.linear import BasicLinear
from .recipe import Recipe, get_default_recipe
from .recipe.autocast import autocast
from .recipe.base import check_recipe
from .tensors import GroupedTensorStorage, QuantizedTensorStorage

__all__ = ["LayerMemory", "MemoryReport", "kept_per_token", "memory_report"]

OURS = (Linear, LayerNormLinear, LayerNormMLP, Experts, BasicLinear)
_QUANTIZED = (QuantizedTensorStorage, GroupedTensorStorage)


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of one layer: `before` in high precision, `after` by `recipe` ("" where it has none).

    `parameters` is how many numbers there are; `kept` is what one token leaves for backward.
    """

    name: str
    kind: str
    recipe: str
    parameters: int
    bytes_before: int
    bytes_after: int
    kept_before: float
    kept_after: float


@dataclass(frozen=True)
class MemoryReport:
    """The layers of a model and their bytes; `str` makes a table."""

    layers: tuple[LayerMemory, ...]
    tokens: int

    @property
    def per_parameter(self) -> tuple[float, float]:
        """Bytes for each number of these layers' parameters, (before, after)."""
        n = max(sum(layer.parameters for layer in self.layers), 1)
        return (
            sum(layer.bytes_before for layer in self.layers) / n,
            sum(layer.bytes_after for layer in self.layers) / n,
        )

    @property
    def per_token(self) -> tuple[float, float]:
        """Bytes that a token leaves in these layers for backward, (before, after)."""
        return (
            sum(layer.kept_before for layer in self.layers),
            sum(layer.kept_after for layer in self.layers),
        )

    def __str__(self) -> str:
        head = ("layer", "kind", "recipe", "parameters", "bytes each", "kept per token")
        rows = [
            (
                layer.name or "(model)",
                layer.kind,
                layer.recipe or "-",
                f"{layer.parameters:,}",
                _arrow(layer.bytes_before / n, layer.bytes_after / n),
                _arrow(layer.kept_before, layer.kept_after),
            )
            for layer in self.layers
            for n in (max(layer.parameters, 1),)
        ]
        total = f"{sum(layer.parameters for layer in self.layers):,}"
        sums = ("total", "", "", total, _arrow(*self.per_parameter), _arrow(*self.per_token))
        table = [head, *rows, sums]
        widths = [max(len(row[i]) for row in table) for i in range(len(head))]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
            for row in table
        ]
        note = (
            f"Bytes, at {self.tokens} tokens. Kept is what each layer saves for backward on its "
            "own: in high precision, layers that read the same input share it."
        )
        return "\n".join((*lines, note))


def memory_report(
    model: nn.Module, recipe: Recipe | None = None, *, tokens: int = 8192
) -> MemoryReport:
    """Bytes per parameter and per token of each linear layer, in high precision and quantized.

    A layer of ours is quantized by its own recipe if it has one, else by `recipe` (None: the
    default). An `nn.Linear` counts as if it were converted, unless there are layers of ours in
    `model`: then it has been left out, and stays as it is. Nothing is computed, and `model` is not
    changed. Activations have the parameters' dtype; under torch.autocast, its. A lazy layer that
    has not run has no size yet, and is not in it.
    """
    default = get_default_recipe() if recipe is None else check_recipe(recipe, "recipe")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}; an nn.Module is needed")
    if not isinstance(tokens, int) or tokens < 1:
        raise ValueError(f"tokens: got {tokens!r}; a whole number, at least 1, is needed")
    every = [(n, m) for n, m in model.named_modules() if isinstance(m, (nn.Linear, *OURS))]
    found = [(n, m) for n, m in every if not any(map(is_lazy, m.parameters()))]
    converted = any(isinstance(m, OURS) for _, m in found)
    layers = []
    for name, module in found:
        used: Recipe | None = default
        if isinstance(module, OURS):
            used = getattr(module, "recipe", None) or default  # an operation has none of its own
        elif converted or type(module) is not nn.Linear or module.weight.dtype not in INPUT_DTYPES:
            used = None
        before, after = _parameter_bytes(module)
        kept = kept_per_token(module, None, tokens)
        layers.append(
            LayerMemory(
                name.replace("_orig_mod.", ""),
                type(module).__name__,
                "" if used is None else type(used).__name__,
                sum(p.numel() for p in module.parameters()),
                before,
                after,
                kept,
                kept if used is None else kept_per_token(module, used, tokens),
            )
        )
    return MemoryReport(tuple(layers), tokens)


def kept_per_token(module: Any, recipe: Recipe | None, tokens: int) -> float:
    """Bytes that `module` saves for backward per token; `recipe` None: in high precision."""
    saved: dict[int, tuple[Any, int]] = {}  # by storage, which is held so that its id is its own
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        twin = _twin(module, mode)
        if type(twin) is nn.Linear and recipe is not None:
            Linear.adopt(twin)
            twin.__dict__["_advise"] = lambda *args: None
        given = _splits(twin, tokens)
        own = {id(t.untyped_storage()) for t in _tensors(twin)}
        weight = next(iter(twin.parameters()))
        features = getattr(twin, "in_features", None) or twin.hidden_size
        x = torch.empty(tokens, features, dtype=weight.dtype, device=weight.device)
        x.requires_grad_()

        def keep(t: Tensor) -> Tensor:
            for part in _parts(t):
                storage = part.untyped_storage()
                if id(storage) not in own:
                    saved[id(storage)] = (storage, storage.nbytes())
            return t

        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t)
        quiet = warnings.catch_warnings()
        with quiet, torch.enable_grad(), hooks, autocast(recipe is not None, recipe=recipe):
            warnings.simplefilter("ignore")
            type(twin).forward(twin, x, *given)
    return sum(size for _, size in saved.values()) / tokens


def _twin(module: nn.Module, mode: FakeTensorMode) -> Any:
    """`module` with fake tensors and without hooks; writing to it changes nothing of `module`."""
    twin = object.__new__(type(module))
    twin.__dict__.update(vars(module))
    for key, value in vars(module).items():
        if key.endswith("_hooks") or key.endswith("_hooks_with_kwargs"):
            twin.__dict__[key] = type(value)() if value is not None else None
    if isinstance(module, Projection):
        # What the model needs to train, and a measurement does not have to say.
        off = {"fuse_wgrad_accumulation": False, "cache_weights": False, "_preallocated": ""}
        twin.__dict__.update(off, _counts=None, _advise=lambda *args: None)
    twin.__dict__["_parameters"] = {
        n: None if p is None else _fake_parameter(p, mode) for n, p in module._parameters.items()
    }
    twin.__dict__["_buffers"] = {
        n: None if b is None else _fake_buffer(b, mode) for n, b in module._buffers.items()
    }
    twin.__dict__["_modules"] = {
        n: None if m is None else _twin(m, mode) for n, m in module._modules.items()
    }
    return twin


def _splits(twin: Any, tokens: int) -> tuple[Any, ...]:
    """What a layer takes besides its input: of experts, rows of each, which decide no size, and
    what an operation scales their biases by."""
    if not isinstance(twin, Experts):
        return ()
    weights = twin._weights()
    if len(weights) > 1 and not isinstance(weights[0], _QUANTIZED):
        # They lie side by side and are read there, which fake tensors cannot tell.
        whole = torch.empty(len(weights), *weights[0].shape, dtype=weights[0].dtype)
        twin.weight = nn.Parameter(whole.to(weights[0].device), weights[0].requires_grad)
        twin.single_grouped_weight = True
    sizes = torch.empty(twin.num_gemms, dtype=torch.int64, device=weights[0].device)
    twin.__dict__["_sizes"] = lambda *args: sizes
    if getattr(twin, "num_extra_inputs", 1) == 1:
        return (sizes,)
    return sizes, torch.empty(tokens, dtype=weights[0].dtype, device=weights[0].device)


def _fake_buffer(b: Tensor, mode: FakeTensorMode) -> Tensor:
    return torch.empty_like(b, device="cpu") if b.is_meta else mode.from_tensor(b)


def _fake_parameter(p: Any, mode: FakeTensorMode) -> Any:
    if isinstance(p, _QUANTIZED):
        return mode.from_tensor(p)  # type: ignore[arg-type]
    made = torch.empty(p.shape, dtype=p.dtype, device=_where(p))
    return nn.Parameter(made, p.requires_grad)


def _where(t: Tensor) -> torch.device:
    """Where it runs: what is on the meta device keeps what it would keep on the CPU."""
    return torch.device("cpu") if t.is_meta else t.device


def _tensors(module: nn.Module) -> list[Tensor]:
    return [part for t in (*module.parameters(), *module.buffers()) for part in _parts(t)]


def _parts(t: Any) -> list[Tensor]:
    """The plain tensors that hold the bytes of `t`."""
    if isinstance(t, _QUANTIZED):
        names, _ = t.__tensor_flatten__()
        return [getattr(t, name) for name in names]
    return [t]


def _parameter_bytes(module: nn.Module) -> tuple[int, int]:
    """(in high precision, as they are held: quantized copies and delayed scaling's state too)."""
    before = sum(p.numel() * p.element_size() for p in module.parameters())
    after = sum(t.numel() * t.element_size() for p in module.parameters() for t in _parts(p))
    after += sum(b.numel() * b.element_size() for b in module.buffers())
    return before, after


def _arrow(before: float, after: float) -> str:
    return f"{before:,.4g} -> {after:,.4g}" if max(before, after) < 1e4 else _large(before, after)


def _large(before: float, after: float) -> str:
    return f"{before:,.0f} -> {after:,.0f}"
