"""Which layers of a model are converted, by which recipe, and why not the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

from ..inputs import INPUT_DTYPES
from ..modules import LayerNormLinear, LayerNormMLP, Linear
from ..modules.grouped_linear import GroupedLinear
from ..recipe import Recipe
from ..tensors import QuantizedTensorStorage

__all__ = ["OURS", "Choice", "Filter", "Patterns", "choose", "left"]

Filter = Callable[[str, nn.Module], bool]
OURS = (Linear, LayerNormLinear, LayerNormMLP, GroupedLinear)
# What has matrices, too, and does not multiply by them as a linear layer does.
_OTHERS = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm, nn.modules.conv._ConvNd)


class Choice(NamedTuple):
    """What becomes of one layer: a recipe, or a reason to leave it as it is."""

    name: str
    module: Any
    recipe: Recipe | None
    reason: str


class Patterns:
    """Recipes by name: the first pattern that matches decides; `default` where none does."""

    def __init__(self, recipes: Mapping[str, Recipe | None], default: Recipe) -> None:
        self.recipes, self.default = dict(recipes), default
        self.matched: set[str] = set()
        self.decided: set[str] = set()

    def find(self, name: str) -> tuple[Recipe | None, str | None]:
        """(recipe, the pattern that it came from)."""
        found = [pattern for pattern in self.recipes if fnmatchcase(name, pattern)]
        self.matched.update(found)
        if not found:
            return self.default, None
        self.decided.add(found[0])
        return self.recipes[found[0]], found[0]

    def unused(self) -> dict[str, str]:
        """Patterns that decided nothing, and why."""
        return {
            pattern: (
                "earlier patterns match all of its layers"
                if pattern in self.matched
                else "no linear layer has such a name"
            )
            for pattern in self.recipes
            if pattern not in self.decided
        }


def choose(
    model: nn.Module, patterns: Patterns, accept: Filter | None, skip_ends: bool
) -> list[Choice]:
    """Each linear layer of `model`, in its order; a layer that has two names goes by the first."""
    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, (nn.Linear, *OURS))]
    ends = _ends(model, layers) if skip_ends else {}
    chosen = []
    for name, module in layers:
        recipe, pattern = patterns.find(name)
        reason = _unfit(module) or ends.get(name, "")
        if not reason and accept is not None and not accept(name, module):
            reason = "filter returned False"
        if not reason and recipe is None:
            reason = f"recipes[{pattern!r}] is None"
        chosen.append(Choice(name, module, None if reason else recipe, reason))
    return chosen


def left(model: nn.Module) -> dict[str, str]:
    """Modules inside lists of blocks that hold matrices and are no linear layers, and their class:
    `Conv1D` of GPT-2, experts in one parameter. What they multiply has no recipe."""
    found: dict[str, str] = {}
    inside: tuple[str, ...] = ()
    linear: tuple[str, ...] = ()
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(module, (nn.Linear, *OURS)):
            linear += (prefix,)  # its parametrizations, and operations of ours, are its own
        elif isinstance(module, nn.ModuleList | nn.Sequential):
            inside += (prefix,)
        elif name.startswith(inside) and not name.startswith(linear) and _multiplies(module):
            found[name] = type(module).__name__
    return found


def _multiplies(module: nn.Module) -> bool:
    if isinstance(module, _OTHERS):
        return False
    shapes = [p.shape for p in module.parameters(recurse=False) if not is_lazy(p)]
    return any(sum(n > 1 for n in shape) > 1 for shape in shapes)


def _unfit(module: Any) -> str:
    """Why a layer cannot be converted, whatever anybody wants; "" if it can."""
    if isinstance(module, OURS):
        return ""
    kind = type(module)
    if kind is not nn.Linear:
        return (
            f"{kind.__module__}.{kind.__name__} is a subclass of nn.Linear, whose forward may do "
            "something else; only nn.Linear itself is converted"
        )
    if "forward" in vars(module):
        return "its forward was replaced on the instance; convert before that"
    weight = module.weight
    if isinstance(weight, QuantizedTensorStorage) or weight.dtype not in INPUT_DTYPES:
        return f"its weight is {weight.dtype}; float32, bfloat16 and float16 are quantized"
    if 0 in weight.shape:
        return f"its weight is empty, {tuple(weight.shape)}"
    return ""


def _ends(model: nn.Module, layers: list[tuple[str, Any]]) -> dict[str, str]:
    """The layers next to the embedding and next to the loss, which precision matters most to.

    A layer inside a stack of blocks is neither: those are alike, and most of the work.
    """
    of_embeddings = {
        id(m.weight): name for name, m in model.named_modules() if isinstance(m, nn.Embedding)
    }
    stacks = tuple(f"{name}." if name else "" for name, m in model.named_modules() if _is_stack(m))
    found = {}
    alone = [(name, m) for name, m in layers if not isinstance(m, GroupedLinear)]
    for (name, _), which in zip(alone[:1] + alone[-1:], ("first", "last"), strict=False):
        if not name.startswith(stacks):
            found[name] = f"the {which} linear layer; skip_ends=False converts it"
    for name, module in layers:
        tied = of_embeddings.get(id(getattr(module, "weight", None)))
        if tied is not None:
            found[name] = f"its weight is that of {tied}, an embedding; skip_ends=False converts it"
    return found


def _is_stack(module: nn.Module) -> bool:
    """Whether it is a list of blocks, with linear layers inside; a sequence has two of a class."""
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return False
    kinds = [
        type(block)
        for block in module
        if not isinstance(block, (nn.Linear, *OURS))
        and any(isinstance(m, (nn.Linear, *OURS)) for m in block.modules())
    ]
    return len(kinds) > (len(set(kinds)) if isinstance(module, nn.Sequential) else 0)
