"""`convert`: `nn.Linear` layers become ours, in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from torch import nn

from ..modules import Linear
from ..recipe import Recipe, get_default_recipe
from ..recipe.base import check_recipe

if TYPE_CHECKING:
    from .policy import Filter
    from .report import ConversionReport

__all__ = ["convert"]


def convert(
    model: nn.Module,
    recipe: Recipe | None = None,
    filter: Filter | None = None,  # noqa: A002  (the name that people know)
    *,
    recipes: Mapping[str, Recipe | None] | None = None,
    skip_ends: bool | None = None,
    fuse: bool | str | Iterable[str] = False,
    tokens: int = 8192,
) -> ConversionReport:
    """Turn each `nn.Linear` of `model` into a `minifloat.Linear` that trains by `recipe`.

    It stays the same object, with the same parameters, hooks and names, so whoever holds it (an
    optimizer, a tied layer) holds the converted one. An autocast is not needed, and one that is
    active comes before these recipes. `recipe=None` is the default one of the machine. `recipes`
    are others by name, `{"*.down_proj": recipe, "blocks.0.*": None}`: shell patterns, the first
    match wins, None leaves a layer as it is. `filter(name, module)` says which layers to convert;
    without one the first and the last are left out, as `skip_ends` says. Layers that are ours
    already get their recipe, experts too. `fuse` names patterns of layers that are to run as one
    (True: all of `gated_mlp`, `mlp`, `norm_mlp`, `norm_linear`); the parameters stay where they
    are. `tokens`, of one forward, is what the report's speed is of.
    """
    # Not with the package, which everybody imports.
    from .fusion import asked, find
    from .policy import OURS, Patterns, choose, left
    from .report import make_report

    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}; an nn.Module is needed")
    inner = getattr(model, "_orig_mod", None)
    if isinstance(inner, nn.Module):  # compiled: names are those of the model itself
        model = inner
    if not isinstance(tokens, int) or tokens < 1:
        raise ValueError(f"tokens: got {tokens!r}; a whole number, at least 1, is needed")
    if filter is not None and not callable(filter):
        raise TypeError(
            f"filter: got {type(filter).__name__}; a function (name, module) -> bool is needed"
        )
    if recipes is not None and not isinstance(recipes, Mapping):
        raise TypeError(
            f"recipes: got {type(recipes).__name__}; a dict of patterns and recipes is needed"
        )
    default = get_default_recipe() if recipe is None else check_recipe(recipe, "recipe")
    wanted = asked(fuse)
    for pattern, one in (recipes or {}).items():
        if one is not None:
            check_recipe(one, f"recipes[{pattern!r}]")
    patterns = Patterns(recipes or {}, default)
    chosen = choose(model, patterns, filter, filter is None if skip_ends is None else skip_ends)
    used = {choice.name: choice.recipe for choice in chosen if choice.recipe is not None}
    fused, unfused = find(model, wanted, used)
    for choice in chosen:
        if choice.recipe is None:
            continue
        if not isinstance(choice.module, OURS):
            Linear.adopt(choice.module, choice.name or None)
        choice.module.recipe = choice.recipe
    report = make_report(chosen, patterns.unused(), tokens, fused, unfused, left(model))
    for fusion in fused.values():
        fusion.apply()
    return report
