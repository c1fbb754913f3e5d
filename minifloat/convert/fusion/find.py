"""Which parts of a model are fused, and why not the rest; `Fusion.apply` alone changes anything."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ...modules import Linear
from ...recipe import Recipe
from .modules import FusedMLP, Handover, HandsOver, MLPParts, NormedLinear, fused_class, hooked
from .norms import NormSpec, looks_like_norm, norm_spec
from .patterns import ACTIVATIONS, Pattern, match
from .trace import Traced, follow

__all__ = ["Finder", "Fusion", "find"]


@dataclass(frozen=True)
class Fusion:
    """`members`, by what they are in the pattern, run as one; names are those in the model."""

    pattern: str
    members: dict[str, str]
    _owner: Any = field(default=None, repr=False, compare=False)
    _parts: Any = field(default=None, repr=False, compare=False)

    def apply(self) -> None:
        """Fuse; the layers are ours by now."""
        if isinstance(self._parts, MLPParts):
            before: Any = type(self._owner)
            self._owner.__class__ = fused_class(FusedMLP, before)
            self._owner._parts, self._owner._handover = self._parts, None
        elif isinstance(self._parts, Handover):
            made = self._parts
            norm = self._owner.get_submodule(made.norm)
            reader = self._owner.get_submodule(made.reader)
            before = type(norm)
            norm.__class__ = fused_class(HandsOver, before)
            if isinstance(reader, Linear):
                reader.__class__ = NormedLinear
            norm._handover = reader._handover = made


def find(
    model: nn.Module, patterns: tuple[Pattern, ...], recipes: Mapping[str, Recipe]
) -> tuple[dict[str, Fusion], dict[str, str]]:
    """(what is fused, by the name of the MLP or of the norm; what could not be, and why).

    `recipes` are those of the linear layers that are converted, by name.
    """
    if not patterns:
        return {}, {}
    finder = Finder(model, patterns, recipes)
    finder.mlps()
    finder.norms()
    return finder.found, finder.refused


class Finder:
    """The search, MLPs first: a norm may be fused into one of them."""

    def __init__(
        self, model: nn.Module, patterns: tuple[Pattern, ...], recipes: Mapping[str, Recipe]
    ) -> None:
        self.modules = dict(model.named_modules())
        self.patterns, self.recipes = patterns, recipes
        self.places = Counter(id(m) for _, m in model.named_modules(remove_duplicate=False))
        self.found: dict[str, Fusion] = {}
        self.refused: dict[str, str] = {}
        self.specs: dict[int, NormSpec | str] = {
            id(m): norm_spec(m) for m in self.modules.values() if looks_like_norm(m)
        }
        self.mlp_ids: set[int] = set()  # of fused MLPs without a norm

    def kind(self, module: nn.Module) -> str:
        """What a traced forward sees of a module: see `trace`."""
        if isinstance(module, nn.Linear):
            return "linear"
        if id(module) in self.mlp_ids:
            return "mlp"
        return "norm" if isinstance(self.specs.get(id(module)), NormSpec) else ""

    # -------------------------------------------------------------------------------------- MLPs
    def mlps(self) -> None:
        whole = [pattern for pattern in self.patterns if not pattern.inside]
        normed = any(pattern.name == "norm_mlp" for pattern in self.patterns)
        if not whole:
            return
        for name, module in self.modules.items():
            if isinstance(module, FusedMLP):
                self._known(name, module)
                continue
            linears = [n for n, m in module.named_modules() if n and isinstance(m, nn.Linear)]
            if len(linears) not in (2, 3) or any("." in n for n in linears):
                continue
            made = self._mlp(name, module, whole, normed)
            if isinstance(made, str):
                self.refused[name] = made
                continue
            self.found[name] = made
            if not made._parts.norm:
                self.mlp_ids.add(id(module))

    def _known(self, name: str, module: FusedMLP) -> None:
        parts = module._parts
        roles = {r: getattr(parts, r) for r in ("gate", "up", "down", "norm")}
        self.found[name] = Fusion(
            parts.pattern, {r: _join(name, part) for r, part in roles.items() if part}
        )

    def _mlp(
        self, name: str, module: nn.Module, patterns: list[Pattern], normed: bool
    ) -> Fusion | str:
        if len(inspect.signature(type(module).forward).parameters) != 2:
            return "its forward takes more than one argument"
        ways = follow(module, self.kind)
        if isinstance(ways, str):
            return f"its forward cannot be followed: {ways}"
        for pattern in patterns:
            names = _same([match(pattern.shape, way.result) for way in ways])
            if names is None:
                continue
            if not all(way.whole for way in ways):
                return "its forward does more than to compute its result"
            return self._checked_mlp(name, module, pattern, names, normed)
        allowed = ", ".join(pattern.name for pattern in patterns)
        return f"its forward computes something else than {allowed}"

    def _checked_mlp(
        self, name: str, module: nn.Module, pattern: Pattern, names: dict[str, str], normed: bool
    ) -> Fusion | str:
        which = 0 if pattern.gated else 1
        activation = ACTIVATIONS.get(names["act"], ("", ""))[which]
        if not activation:
            allowed = ", ".join(name for name, of in ACTIVATIONS.items() if of[which])
            return f"its activation, {names['act']}, is not one of those that are fused: {allowed}"
        layers = [names[role] for role in ("gate", "up", "down") if role in names]
        if "norm" in names and not normed:
            return "it begins with a norm; ask for norm_mlp too"
        for part in [*layers, *([names["norm"]] if "norm" in names else [])]:
            if "." in part:
                return f"{part} is not a child of its own"
            reason = self._unfit(_join(name, part))
            if reason:
                return reason
        if "gate" in names:
            gate, up = (module.get_submodule(names[role]) for role in ("gate", "up"))
            reason = _unlike(gate, up, [self.recipes[_join(name, n)] for n in layers[:2]])
            if reason:
                return reason
        spec = None if "norm" not in names else self.specs[id(module.get_submodule(names["norm"]))]
        parts = MLPParts(
            pattern.name,
            names.get("gate", ""),
            names["up"],
            names["down"],
            activation,
            names.get("norm", ""),
            spec if isinstance(spec, NormSpec) else None,
        )
        members = {r: _join(name, part) for r, part in names.items() if r != "act"}
        return Fusion(pattern.name, members, module, parts)

    # ------------------------------------------------------------------------------------- norms
    def norms(self) -> None:
        inside = {pattern.shape[0]: pattern for pattern in self.patterns if pattern.inside}
        taken = {fusion.members.get("norm") for fusion in self.found.values()}
        if not inside:
            return
        for name, module in self.modules.items():
            norms = [
                child for child, m in module.named_children()
                if id(m) in self.specs and _join(name, child) not in taken
            ]  # fmt: skip
            if not norms:
                continue
            ways: tuple[Traced, ...] | str = ""
            for deep in (True, False):
                ways = follow(module, self.kind, deep)
                if not isinstance(ways, str):
                    break
            for child in norms:
                full = _join(name, child)
                made = self._norm(name, module, child, ways, inside)
                if isinstance(made, str):
                    self.refused[full] = made
                else:
                    self.found[full] = made

    def _norm(
        self,
        name: str,
        module: nn.Module,
        child: str,
        ways: tuple[Traced, ...] | str,
        inside: Mapping[str, Pattern],
    ) -> Fusion | str:
        norm: Any = module.get_submodule(child)
        if isinstance(norm, HandsOver):
            known = norm._handover
            fused = (
                "norm_linear"
                if isinstance(known.owner.get_submodule(known.reader), Linear)
                else "norm_mlp"
            )
            members = {"norm": _join(name, known.norm), "reader": _join(name, known.reader)}
            return Fusion(fused, members)
        spec = self.specs[id(norm)]
        if isinstance(spec, str):
            return spec
        if isinstance(ways, str):
            return f"the forward of {name or 'the model'} cannot be followed: {ways}"
        readers = [_reader(way, child) for way in ways]
        reader = readers[0]
        if any(other != reader for other in readers):
            return "training and evaluation, or arguments left out, read it differently"
        if isinstance(reader, str):
            return reader
        kind, inner = reader
        pattern = inside.get(kind)
        if pattern is None:
            return f"{_join(name, inner)} reads it: that is a pattern that was not asked for"
        target = module.get_submodule(inner)
        steps = inner.split(".")
        for part in (child, *(".".join(steps[: i + 1]) for i in range(len(steps)))):
            reason = self._unfit(_join(name, part))
            if reason:
                return reason
        first = (
            target.get_submodule(self.found[_join(name, inner)]._parts.up)
            if kind == "mlp"
            else target
        )
        if norm.weight.dtype is not first.weight.dtype:
            return f"its weight is {norm.weight.dtype}, that of its reader {first.weight.dtype}"
        members = {"norm": _join(name, child), "reader": _join(name, inner)}
        return Fusion(pattern.name, members, module, Handover(module, child, inner, spec))

    def _unfit(self, name: str) -> str:
        """Why a module cannot be a part of anything."""
        module: Any = self.modules.get(name)
        if module is None or self.places[id(module)] > 1:
            return f"{name} is in the model more than once"
        if hooked(module):
            return f"{name} has hooks, which would not see its calls"
        if isinstance(module, nn.Linear):
            if name not in self.recipes:
                return f"{name} is not converted"
            if isinstance(module, Linear) and not _usual(module):
                return f"{name} has options of its own (parallelism, main_grad, caches)"
        return ""


def _usual(layer: Any) -> bool:
    return not (layer._special or layer.return_bias or layer.primary_weights_in_fp8) and (
        layer.tp_size == 1 and "" in layer._splits
    )


def _reader(way: Traced, norm: str) -> tuple[str, str] | str:
    """(kind, name) of the one module that reads a norm's output, or why there is none."""
    made = [(of, readers) for of, readers in way.calls if of[:2] == ("norm", norm)]
    if not made:
        return "the forward of its parent does not call it, or not with a tensor alone"
    if len(made) > 1:
        return "it is called more than once"
    value, readers = made[0]
    found = [of for of, _ in way.calls if value in of[1:]]
    if way.result == value or not found:
        return "its output is returned"
    names = [str(of[1]) for of in found]
    if readers > 1 or len(found) > 1:
        return f"{', '.join(names)} read it, and each would have to normalize again"
    kind = found[0][0]
    if kind not in ("linear", "mlp"):
        return f"{names[0]} reads it, which is neither a linear layer nor a fused MLP"
    if sum(of[:2] == found[0][:2] for of, _ in way.calls) > 1:
        return f"{names[0]} is called more than once"
    return kind, names[0]


def _same(found: list[Any]) -> Any:
    return found[0] if all(one == found[0] for one in found) else None


def _unlike(gate: Any, up: Any, recipes: list[Recipe]) -> str:
    """Why two layers cannot be one product."""
    if recipes[0] != recipes[1]:
        return "its gate and up layers have different recipes"
    if gate.weight.shape != up.weight.shape or gate.weight.dtype is not up.weight.dtype:
        return "its gate and up layers have different shapes or dtypes"
    if (gate.bias is None) != (up.bias is None):
        return "one of its gate and up layers has a bias"
    return ""


def _join(name: str, part: str) -> str:
    return f"{name}.{part}" if name else part
