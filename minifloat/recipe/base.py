"""`Recipe`: which format each operand of a layer gets, as a value.

A recipe is its class and its fields, which are the parameters of its constructor: equal by content,
hashable, interned (`R(a) is R(a)`), never changed; `replace()` makes another. Dynamo guards on it
by `==` and runs its methods for real while it traces. It reads no environment.
"""

from __future__ import annotations

import difflib
import inspect
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from ..opaque import register
from .checks import RecipeError, choice, flag, instance
from .replay import unseen
from .types import Format, MMParams, QParams, Record

if TYPE_CHECKING:
    from typing_extensions import Self

    from .plan import Plan

__all__ = ["OVERRIDES", "Recipe", "RoleKey", "Roles", "check_recipe", "register_recipe"]

T = TypeVar("T", bound="type[Recipe]")

# A role as plain strings, (module_type, tensor_type, name), which traced code can pass; None is a
# slot on the boundary of a module. Roles that are None as a whole: go by position.
RoleKey = tuple[str, str, str]
Roles = tuple[RoleKey | None, ...] | None

OVERRIDES = (None, "high_precision", "dequantized")
_PREDICATES = (
    "custom", "delayed", "float8_block_scaling", "float8_current_scaling",
    "float8_per_tensor_scaling", "mxfp8", "nvfp4",
)  # fmt: skip


class Recipe(Record):
    """Base of all recipes. Fields are the parameters of `__new__`, in its order.

    `backward_override` "high_precision" runs backward on the original operands, "dequantized" on
    forward's quantized ones, both in high precision; None quantizes backward as well.
    """

    fp8_format: Format
    fp8_dpa: bool
    fp8_mha: bool
    backward_override: str | None
    _plans: dict[tuple[Roles, Roles], Plan]
    _quantizers: dict[tuple[Roles, Roles], tuple[tuple[Any, ...], tuple[Any, ...]]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__new__" in vars(cls):
            parameters = list(inspect.signature(cls.__new__).parameters.values())[1:]
            if all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters):
                cls._fields = tuple(p.name for p in parameters)
                given = (p.default for p in parameters)
                cls._defaults = tuple(d for d in given if d is not inspect.Parameter.empty)

    def _derived(self) -> dict[str, Any]:
        return {"_plans": {}, "_quantizers": {}}

    # ------------------------------------------------------------------------------- kinds
    @classmethod
    def nvfp4(cls) -> bool:
        return False

    @classmethod
    def mxfp8(cls) -> bool:
        return False

    @classmethod
    def delayed(cls) -> bool:
        return False

    @classmethod
    def float8_current_scaling(cls) -> bool:
        return False

    @classmethod
    def float8_block_scaling(cls) -> bool:
        return False

    @classmethod
    def custom(cls) -> bool:
        return False

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        """One FP8 scale for the whole tensor."""
        return cls.delayed() or cls.float8_current_scaling()

    # -------------------------------------------------------------------------------- plan
    def plan(self, fwd_roles: Roles = None, bwd_roles: Roles = None) -> Plan:
        """What this recipe makes of one linear layer; the same object for the same roles.

        `fwd_roles` are the roles of (input, weight, output), `bwd_roles` of (grad_output,
        grad_input). Runs for real while Dynamo traces, so it takes constants only.
        """
        try:
            return self._plans[fwd_roles, bwd_roles]
        except KeyError:
            from .plan import make_plan

            with unseen(True):
                made = make_plan(self, fwd_roles, bwd_roles)
            return self._plans.setdefault((fwd_roles, bwd_roles), made)

    def quantizers(
        self, fwd_roles: Roles = None, bwd_roles: Roles = None
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Quantizers of forward's and of backward's slots, None where one scales by history.

        They make both copies and are values: `copy()` one to change it. As `plan`, this runs for
        real while Dynamo traces; a number of roles other than a linear layer's is welcome here.
        """
        try:
            return self._quantizers[fwd_roles, bwd_roles]
        except KeyError:
            from .plan import make_quantizers

            with unseen(True):
                made = (
                    make_quantizers(self, "forward", fwd_roles),
                    make_quantizers(self, "backward", bwd_roles),
                )
            return self._quantizers.setdefault((fwd_roles, bwd_roles), made)

    def _of_element(self, field: str, forward: bool) -> Any:
        """A field of the element of `fp8_format`, for traced code, which cannot read an enum."""
        return getattr(self.fp8_format.element(forward=forward), field)

    # ------------------------------------------------------------------------ other forms
    def replace(self, **changes: Any) -> Self:
        """The recipe that differs from this one in `changes`; it is checked as a new one is.

        A QParams that was not given keeps following from the other fields.
        """
        unknown = sorted(set(changes) - set(self._fields))
        if unknown:
            raise TypeError(
                f"{type(self).__name__}: no field named {unknown[0]!r}; "
                f"fields: {', '.join(self._fields)}"
            )
        return type(self)(**{**self._given(), **changes})

    def to_dict(self) -> dict[str, Any]:
        """The recipe as JSON has it: {"recipe": class name, field: plain value, ...}."""
        out: dict[str, Any] = {"recipe": type(self).__name__}
        for name, value in self._given().items():
            if isinstance(value, Format):
                out[name] = value.name
            elif isinstance(value, MMParams | QParams):
                out[name] = value.to_dict()
            elif value is None or isinstance(value, bool | int | float | str):
                out[name] = value
            else:
                raise TypeError(
                    f"{name}: {type(self).__name__} holds {value!r}, which JSON cannot; a recipe "
                    "with a function in it is made by code"
                )
        return out

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """The inverse of `to_dict`; fields that are missing have their defaults."""
        name = data.get("recipe", cls.__name__)
        known = [c for c in _classes(cls) if c is not Recipe]
        found = next((c for c in known if c.__name__ == name), None)
        if found is None:
            names = ", ".join(sorted(c.__name__ for c in known if c._fields))
            raise RecipeError(f"recipe: got {name!r}; {cls.__name__} reads: {names}")
        fields = {k: v for k, v in data.items() if k != "recipe"}
        for key, value in fields.items():
            if key.endswith("_format") and isinstance(value, str):
                members = Format.__members__
                fields[key] = members[choice(value, key, tuple(members))]
            elif isinstance(value, dict):
                fields[key] = (MMParams if key.startswith("fp8_gemm") else QParams)(**value)
        made: Self = found(**fields)
        return made

    def to_json(self, **kwargs: Any) -> str:
        """`to_dict` as JSON text; `kwargs` go to `json.dumps`."""
        return json.dumps(self.to_dict(), **kwargs)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The recipe of `to_json`'s text."""
        return cls.from_dict(instance(json.loads(text), "text", dict, '{"recipe": ...}'))


def _classes(cls: type[Recipe]) -> Iterator[type[Any]]:
    yield cls
    for sub in cls.__subclasses__():
        yield from _classes(sub)


def check_recipe(recipe: Any, what: str) -> Recipe:
    """`recipe`, if it is one; TypeError lists those that there are, and the nearest to a name."""
    if isinstance(recipe, Recipe):
        return recipe
    raise TypeError(_no_recipe(recipe, what))


def _no_recipe(value: Any, what: str) -> str:
    given = value.__name__ if isinstance(value, type) else repr(value)
    said = f"{what}: got {given}; a recipe of minifloat.recipe is needed"
    if isinstance(value, type) and issubclass(value, Recipe):
        return f"{said}, make one: {given}()"
    names = {c.__name__.lower(): f"{c.__name__}()" for c in _classes(Recipe) if c._fields}
    near = difflib.get_close_matches(str(value).lower(), names, 1, 0.4)
    hint = f"; did you mean {names[near[0]]}?" if isinstance(value, str) and near else ""
    return f"{said}, such as {', '.join(names.values())}{hint}"


def register_recipe(cls: T) -> T:
    """Tell PyTorch that `cls`, a subclass of Recipe, is a value: compiled code then guards on it.

    A class that is not registered works in eager; 2.11 cannot trace it.
    """
    derived = [n for base in cls.__mro__ for n in inspect.get_annotations(base)]
    public = [n for n in (*cls._fields, *derived) if not n.startswith("_")]
    methods = (
        "_key", "_of_element", "__eq__", "plan", "quantizers", "replace", "to_dict", "to_json",
    )  # fmt: skip
    return register(cls, real=dict.fromkeys((*public, *methods, *_PREDICATES)))


# --------------------------------------------------------------------------- checks of fields
def element_format(value: object, name: str, *allowed: Format) -> Format:
    """`value`, one of `allowed`."""
    given = instance(value, name, Format, "Format.E4M3")
    if given not in allowed:
        names = ", ".join(map(repr, allowed))
        raise RecipeError(f"{name}: got {given!r}; allowed: {names}")
    return given


def common(fp8_dpa: object, fp8_mha: object, backward_override: object) -> tuple[Any, ...]:
    """The three fields that end every recipe's list, checked."""
    return (
        flag(fp8_dpa, "fp8_dpa"),
        flag(fp8_mha, "fp8_mha"),
        choice(backward_override, "backward_override", OVERRIDES),
    )


def own(given: object, name: str, follows: QParams) -> QParams | None:
    """A QParams argument: None if it was not given or says what follows from the others anyway."""
    if given is None:
        return None
    params = instance(given, name, QParams, "QParams()")
    fp4 = name.startswith("fp4")
    foreign = (
        ("power_2_scale", "amax_epsilon")
        if fp4
        else ("random_hadamard_transform", "stochastic_rounding", "fp4_2d_quantization")
    )
    for field in foreign:
        if getattr(params, field):
            raise RecipeError(
                f"{name}: {field} belongs to {'fp8' if fp4 else 'fp4'} quantization, and would do "
                "nothing here; leave it out"
            )
    return None if params == follows else params
