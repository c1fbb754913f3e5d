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
from .joint import FACTS, Joint, JointLinear, JointNorm
from .modules import FusedMLP, Handover, HandsOver, MLPParts, NormedLinear, fused_class
from .norms import NormSpec, looks_like_norm, norm_spec
from .parts import Reader, hooked
from .patterns import ACTIVATIONS, Pattern, match
from .source import readers as readers_in_source
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
        elif isinstance(self._parts, Joint):
            joint = self._parts
            norm = self._owner.get_submodule(joint.norm)
            before = type(norm)
            norm.__class__ = fused_class(JointNorm, before)
            norm._handover = joint
            for index, name in enumerate(joint.readers):
                reader = self._owner.get_submodule(name)
                reader.__class__ = JointLinear
                reader._handover, reader._index = joint, index


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
        allowed = ", ".join(dict.fromkeys(pattern.name for pattern in patterns))
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
            reason = self._unjoined([_join(name, layer) for layer in layers[:2]])
            if not reason and gate.weight.shape != up.weight.shape:
                reason = "have different shapes"
            if reason:
                return f"its gate and up layers {reason}"
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
        if isinstance(norm, HandsOver | JointNorm):
            held: Any = norm._handover
            known = held.readers if isinstance(held, Joint) else (held.reader,)
            linear = isinstance(held.owner.get_submodule(known[0]), Linear)
            fused = "norm_linear" if linear else "norm_mlp"
            return Fusion(fused, _members(name, held.norm, known))
        spec = self.specs[id(norm)]
        if isinstance(spec, str):
            return spec
        if "forward" in vars(module):
            return f"the forward of {name or 'the model'} was replaced on the instance"
        if isinstance(ways, str):
            return f"the forward of {name or 'the model'} cannot be followed: {ways}"
        every = [_readers(way, child, module) for way in ways]
        found = every[0]
        if any(other != found for other in every):
            return "training and evaluation, or arguments left out, read it differently"
        if isinstance(found, str):
            return found
        kind, readers = found
        pattern = inside.get(kind)
        if pattern is None:
            which = f"{_listed(name, readers)} read{'s' if len(readers) == 1 else ''} it"
            return f"{which}: that is a pattern that was not asked for"
        for path in (child, *readers):
            steps = path.split(".")
            for part in (".".join(steps[: i + 1]) for i in range(len(steps))):
                reason = self._unfit(_join(name, part))
                if reason:
                    return reason
        layers: list[Any] = [module.get_submodule(reader) for reader in readers]
        if kind == "mlp":
            layers = [layers[0].get_submodule(self.found[_join(name, readers[0])]._parts.up)]
        if norm.weight.dtype is not layers[0].weight.dtype:
            return f"its weight is {norm.weight.dtype}, that of its reader {layers[0].weight.dtype}"
        members = _members(name, child, readers)
        if len(readers) == 1:
            return Fusion(pattern.name, members, module, Handover(module, child, readers[0], spec))
        reason = self._unjoined([_join(name, reader) for reader in readers])
        if reason:
            return f"{_listed(name, readers)} read it, and {reason}"
        return Fusion(pattern.name, members, module, Joint(module, child, readers, spec))

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
            if isinstance(module, Reader):
                return f"{name} is fused with a norm already"
            if isinstance(module, Linear) and not _usual(module):
                return f"{name} has options of its own (parallelism, main_grad, caches)"
        return ""

    def _unjoined(self, names: list[str]) -> str:
        """Why layers cannot be one product, as the end of a sentence about them."""
        layers: list[Any] = [self.modules[name] for name in names]
        recipe = self.recipes[names[0]]
        if any(self.recipes[name] != recipe for name in names):
            return "have different recipes"
        if any(_plan(recipe, name) != _plan(recipe, names[0]) for name in names):
            return "are cast differently by their recipe"
        if len({layer.weight.dtype for layer in layers}) > 1:
            return "have different dtypes"
        if len({layer.weight.device for layer in layers}) > 1:
            return "are on different devices"
        if len({layer.bias is None for layer in layers}) > 1:
            return "do not all have a bias"
        return ""


def _usual(layer: Any) -> bool:
    return not (layer._special or layer.return_bias or layer.primary_weights_in_fp8) and (
        layer.tp_size == 1 and "" in layer._splits
    )


def _readers(way: Traced, norm: str, module: nn.Module) -> tuple[str, tuple[str, ...]] | str:
    """(kind, names) of the modules that read a norm's output, or why it cannot be fused.

    Several of them are linear layers; what asks for a shape alone is none.
    """
    made = [(of, readers) for of, readers in way.calls if of[:2] == ("norm", norm)]
    if not made:
        return "the forward of its parent does not call it, or not with a tensor alone"
    if len(made) > 1:
        return "it is called more than once"
    value, uses = made[0]
    known = [of for of, _ in way.calls if any(_is(part, value) for part in of[1:])]
    if way.result == value or not known or uses > len(known):
        return "its output is returned"
    found = [of for of in known if of[0] != "fact"]
    names = tuple(str(of[1]) for of in found)
    kinds = {of[0] for of in found}
    if not found or (len(found) > 1 and kinds != {"linear"}):
        return f"{', '.join(names) or 'nobody'} read it: only linear layers can read it together"
    for of in found:
        if sum(of[:2] == other[:2] for other, _ in way.calls) > 1:
            return f"{of[1]} is called more than once"
    (kind,) = kinds
    if kind == "call":
        return _inside(module, found[0], value)
    if kind not in ("linear", "mlp"):
        return f"{names[0]} reads it, which is neither a linear layer nor a fused MLP"
    return kind, names


def _inside(
    module: nn.Module, call: tuple[Any, ...], value: Any
) -> tuple[str, tuple[str, ...]] | str:
    """The linear layers that read it inside of a module whose forward cannot be followed."""
    name = str(call[1])
    given = [of[1] for of in call[2:] if of[2] == value]
    read = (
        readers_in_source(module.get_submodule(name), given[0], FACTS)
        if len(given) == 1 and given[0]
        else "it is a part of what its forward is given"
    )
    if isinstance(read, str):
        return f"{name} reads it, which is neither a linear layer nor a fused MLP: {read}"
    return "linear", tuple(f"{name}.{layer}" for layer in read)


def _is(part: Any, value: Any) -> bool:
    """Whether a part of an expression is that value, or a module's argument that is."""
    argument = isinstance(part, tuple) and part[0] == "arg"
    return bool((part[2] if argument else part) == value)


def _members(name: str, norm: str, readers: tuple[str, ...]) -> dict[str, str]:
    """The first reader is "reader", the others "reader2" and so on."""
    numbered = {f"reader{i}" if i > 1 else "reader": r for i, r in enumerate(readers, 1)}
    return {role: _join(name, part) for role, part in {"norm": norm, **numbered}.items()}


def _listed(name: str, parts: tuple[str, ...]) -> str:
    return ", ".join(_join(name, part) for part in parts)


def _same(found: list[Any]) -> Any:
    return found[0] if all(one == found[0] for one in found) else None


def _plan(recipe: Recipe, name: str) -> Any:
    """What the recipe makes of a converted layer of that name; None: the same for every name."""
    if not recipe.custom():
        return None
    forward = (("linear", "input", name), ("linear", "weight", name), None)
    return recipe.plan(forward, (("linear", "grad_output", name), None))


def _join(name: str, part: str) -> str:
    return f"{name}.{part}" if name else part
