"""Recipes by short names, and maps of layers to them."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase

from .. import recipe
from ..models import Flops
from ..recipe import Recipe
from ..recipe.plan import products
from .errors import TrainError, pick

__all__ = ["RECIPES", "quantized_share", "recipe_map", "short_name"]

RECIPES: dict[str, Recipe | None] = {
    "delayed": recipe.DelayedScaling(),
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(),
    "bf16": None,
}
# The share of the layers, the last ones, that a name without a pattern leaves in high precision: in
# NVIDIA's report on pre-training with NVFP4 (arXiv:2509.25149) about 15%, most of them at the end.
_KEPT = {"nvfp4": 0.15}


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
    return pick("recipe", {"none": "bf16", **by_class}.get(name, name), RECIPES)


def recipe_map(text: str, layers: list[str]) -> tuple[str, dict[str, Recipe | None]]:
    """(a name for the run, recipe of each layer) of `NAME`, of `PATTERN=NAME,...` or of both.

    The first pattern that matches a layer decides. Where none does, the name that has no pattern
    does, for some recipes not in the last layers, and without one the layer is in high precision.
    """
    rules: list[tuple[str, str]] = []
    rest: list[str] = []
    for part in filter(str.strip, text.split(",")):
        pattern, equals, name = part.partition("=")
        if not equals:
            rest.append(_named(part))
        elif not pattern.strip():
            raise TrainError(f"--recipe: {part.strip()!r} is not PATTERN=NAME")
        else:
            rules.append((pattern.strip(), _named(name)))
    if not rules and not rest:
        raise TrainError(f"--recipe {text!r}: names nothing: there are {', '.join(RECIPES)}")
    if len(rest) > 1:
        raise TrainError(
            f"--recipe: {' and '.join(rest)} have no pattern: one recipe is for the other layers"
        )
    otherwise = RECIPES[rest[0]] if rest else None
    chosen: dict[str, Recipe | None] = dict.fromkeys(layers, otherwise)
    kept = math.ceil(len(layers) * _KEPT.get(rest[0], 0.0)) if rest else 0
    for layer in layers[len(layers) - kept :]:
        chosen[layer] = None
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
    if kept:
        rest = [f"{rest[0]} ({kept} of {len(layers)} layers in bf16)"]
    return ",".join([*rest, *(f"{pattern}={name}" for pattern, name in rules)]), chosen


def quantized_share(flops: Flops, recipes: dict[str, Recipe | None]) -> float:
    """The share of the matrix products' operations whose operands are quantized."""
    total = 0.0
    for layer, used in recipes.items():
        if used is not None:
            total += flops.layer[layer] * sum(p.quantized for p in products(used.plan())) / 3
    return total / flops.total
