"""Values that PyTorch graphs hold as constants.

A *value* is equal by content, hashable, immutable and interned: `C(a) is C(a)`. Dynamo guards on
`==`, which interning turns into a pointer compare; FX prints a value with `__fx_repr__` and gets an
equal one back. PyTorch calls such a class *value-opaque*; 2.11 wants each concrete class to be an
instance of `OpaqueBaseMeta` and to list every member that traced code reads.

Everything here that depends on PyTorch's opaque-object API is decided once, by `AVAILABLE`.
Registration errors are never swallowed.
"""

from __future__ import annotations

import math
from abc import ABCMeta
from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

if TYPE_CHECKING:
    from typing_extensions import Self

try:
    from torch._library.opaque_object import MemberType, is_opaque_value_type, register_opaque_type
    from torch._opaque_base import OpaqueBaseMeta
except ImportError:  # a PyTorch without opaque objects: values stay ordinary Python objects
    AVAILABLE = False

    class OpaqueBaseMeta(type):  # type: ignore[no-redef]
        """A metaclass that others combine with, as PyTorch's would be."""

else:
    AVAILABLE = True

__all__ = ["AVAILABLE", "OpaqueABCMeta", "Value", "is_registered", "register"]

T = TypeVar("T", bound=type)


class OpaqueABCMeta(OpaqueBaseMeta, ABCMeta):
    """Metaclass of concrete value classes that derive from an abstract base."""

    if AVAILABLE:  # 2.11 traces isinstance by what the metaclass itself defines
        __instancecheck__ = OpaqueBaseMeta.__instancecheck__


def register(cls: T, *, real: Iterable[str] = (), inlined: Iterable[str] = ()) -> T:
    """Register `cls` as value-opaque; a no-op where PyTorch has no opaque objects.

    `real` members are read or called at trace time and baked into the graph, `inlined` methods are
    traced through. 2.11 knows no member that is not named here, and no class without PyTorch's
    metaclass: one that derives from an abstract base gets it here. A refused class stays as it was.
    """
    if AVAILABLE:
        members = dict.fromkeys(real, MemberType.USE_REAL)
        members |= dict.fromkeys(inlined, MemberType.INLINED)
        metaclass = type(cls)
        try:
            if metaclass is ABCMeta:
                cls.__class__ = OpaqueABCMeta  # type: ignore[assignment]
            register_opaque_type(cls, typ="value", members=members)
        except BaseException:
            cls.__class__ = metaclass
            raise
    return cls


def is_registered(cls: type) -> bool:
    """Whether `cls` itself (no base of it) is value-opaque to this PyTorch."""
    if not AVAILABLE:
        return False
    from torch._library.opaque_object import get_opaque_obj_info

    info = get_opaque_obj_info(cls)
    name = f"{cls.__module__}.{cls.__qualname__}"
    return info is not None and info.class_name == name and is_opaque_value_type(cls)


class Value(metaclass=OpaqueBaseMeta):
    """An immutable, interned record of the fields named in `_fields`.

    `C(*args) is C(*args)`, `pickle`, `copy` and `deepcopy` return the same object, and `eval` of
    `__fx_repr__` returns it too.
    """

    _fields: ClassVar[tuple[str, ...]] = ()
    _defaults: ClassVar[tuple[Any, ...]] = ()
    _interned: ClassVar[dict[tuple[Any, ...], Any]] = {}
    _key: tuple[Any, ...]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if len(args) != len(cls._fields) or kwargs:
            args = cls._bind(args, kwargs)
        key = (cls, *args)
        typed = (key, *map(type, args))  # True == 1, but it prints otherwise
        self: Self | None = Value._interned.get(typed)
        if self is None:
            self = object.__new__(cls)
            for name, value in zip(cls._fields, args, strict=True):
                object.__setattr__(self, name, value)
            object.__setattr__(self, "_key", key)
            for name, value in self._derived().items():
                object.__setattr__(self, name, value)
            self = Value._interned.setdefault(typed, self)
        return self

    @classmethod
    def _bind(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        if len(args) > len(cls._fields):
            raise TypeError(f"{cls.__name__}: got {len(args)} values; fields: {cls._fields}")
        first_default = len(cls._fields) - len(cls._defaults)
        bound = list(args)
        for i, name in enumerate(cls._fields[len(args) :], len(args)):
            if name in kwargs:
                bound.append(kwargs.pop(name))
            elif i >= first_default:
                bound.append(cls._defaults[i - first_default])
            else:
                raise TypeError(f"{cls.__name__}: the field {name!r} is missing")
        if kwargs:
            raise TypeError(
                f"{cls.__name__}: no field named {sorted(kwargs)[0]!r}; fields: {cls._fields}"
            )
        return tuple(bound)

    def _derived(self) -> dict[str, Any]:
        """Attributes that follow from the fields; ValueError if the fields mean nothing together.

        Set once, as plain attributes: Dynamo reads those of a constant without a source.
        """
        return {}

    def replace(self, **changes: Any) -> Self:
        """The value that differs from this one in `changes`."""
        unknown = set(changes) - set(self._fields)
        if unknown:
            raise TypeError(f"{type(self).__name__}: no field named {sorted(unknown)[0]!r}")
        return type(self)(*(changes.get(f, getattr(self, f)) for f in self._fields))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"{type(self).__name__} is a value: {name!r} cannot be set; use replace({name}=...)"
        )

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is a value: {name!r} cannot be deleted")

    def __eq__(self, other: object) -> bool:
        # Identity decides for live objects; the key, for a copy that tracing made behind our back.
        return self is other or (type(self) is type(other) and self._key == other._key)

    def __hash__(self) -> int:
        return hash(self._key)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._key[1:]

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self._key[1:]))})"

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        """Source that evaluates to this value, and what its names stand for: classes mostly."""
        cls = type(self)
        names: dict[str, Any] = {cls.__name__: cls}
        fields = ", ".join(_source(field, names) for field in self._key[1:])
        return f"{cls.__name__}({fields})", names


def _source(field: Any, names: dict[str, Any]) -> str:
    """Source of a field of a value; the names it uses are added to `names`."""
    if type(field) is tuple:
        return f"({''.join(_source(item, names) + ', ' for item in field)})"
    if isinstance(field, Enum):
        _name(type(field).__name__, type(field), names)
        return f"{type(field).__name__}.{field.name}"
    if hasattr(field, "__fx_repr__") and not isinstance(field, type):
        source, inner = field.__fx_repr__()
        for name, named in inner.items():
            _name(name, named, names)
        return str(source)
    if isinstance(field, float) and not math.isfinite(field):
        return f"float('{field}')"
    if callable(field) and not isinstance(field, type):  # a function of the user: by reference
        name = f"_callable_{id(field):x}"
        _name(name, field, names)
        return name
    return repr(field)


def _name(name: str, named: Any, names: dict[str, Any]) -> None:
    if names.setdefault(name, named) is not named:
        raise TypeError(f"two classes named {name!r} cannot be printed into one graph; rename one")
