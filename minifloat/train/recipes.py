"""Recipes by short names, and maps of layers to them."""

from __future__ import annotations

from fnmatch import fnmatchcase

from .. import recipe
from ..formats import HIGH_PRECISION
from ..models import Flops
from ..recipe import Plan, Recipe
from .errors import TrainError, pick

__all__ = ["RECIPES", "quantized_share", "recipe_map", "short_name"]

RECIPES: dict[str, Recipe | None] = {
    "delayed": recipe.DelayedScaling(),
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(),
    "none": None,
}


def short_name(wanted: Recipe) -> str:
    """The default recipe's name in RECIPES."""
    for name, known in RECIPES.items():
        if known == wanted:
            return name
    return type(wanted).__name__


def _named(name: str) -> str:
    name = name.strip()
    if name == "default":
        return short_name(recipe.get_default_recipe())
    by_class = {type(r).__name__: n for n, r in RECIPES.items() if r is not None}
    return pick("recipe", by_class.get(name, name), RECIPES)


def recipe_map(text: str, layers: list[str]) -> tuple[str, dict[str, Recipe | None]]:
    """(a name for the run, recipe of each layer) of a name or of `PATTERN=NAME,...`.

    The first pattern that matches a layer decides; one that none matches is in high precision.
    """
    if "=" not in text:
        name = _named(text)
        return name, dict.fromkeys(layers, RECIPES[name])
    rules = []
    for part in filter(str.strip, text.split(",")):
        pattern, equals, name = part.partition("=")
        if not equals or not pattern.strip():
            raise TrainError(f"--recipe: {part.strip()!r} is not PATTERN=NAME")
        rules.append((pattern.strip(), _named(name)))
    chosen: dict[str, Recipe | None] = {}
    used: set[str] = set()
    for layer in layers:
        for pattern, name in rules:
            if fnmatchcase(layer, pattern):
                chosen[layer] = RECIPES[name]
                used.add(pattern)
                break
    for pattern, _ in rules:
        if pattern not in used:
            raise TrainError(
                f"--recipe: {pattern!r} decides for no layer; they are called"
                f" {', '.join(layers[:3])}, ..."
            )
    return ",".join(f"{pattern}={name}" for pattern, name in rules), chosen


def _products(plan: Plan) -> int:
    """How many of the three products multiply quantized operands."""
    pairs = [(plan.x_row, plan.w_row)]
    if plan.override == "":
        pairs += [(plan.g_row, plan.w_col), (plan.g_col, plan.x_col)]
    return sum(all(cast.format.name != HIGH_PRECISION.name for cast in pair) for pair in pairs)


def quantized_share(flops: Flops, recipes: dict[str, Recipe | None]) -> float:
    """The share of the matrix products' operations whose operands are quantized."""
    total = 0.0
    for layer, used in recipes.items():
        if used is not None:
            total += flops.layer[layer] * _products(used.plan()) / 3
    return total / flops.total
