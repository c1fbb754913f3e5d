"""`Sequential`: modules in a row, of which consecutive operations run as one pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from .basic_operation import BasicOperation
from .fused_operation import FusedOperation
from .fuser import OperationFuser, check_keywords
from .fusible import FusibleOperation, hooked

__all__ = ["Sequential"]


class Sequential(nn.Module):
    """Modules in a row, from arguments or one dict of them; otherwise a list of modules.

    Consecutive `FusibleOperation`s are one `OperationFuser`, other modules run as they are, and so
    does an operation that somebody has hooked into.
    """

    def __init__(self, *modules: Any) -> None:
        super().__init__()
        if len(modules) == 1 and isinstance(modules[0], dict):
            named = list(modules[0].items())
        else:
            named = [(str(i), module) for i, module in enumerate(modules)]
        for name, module in named:
            _check(module)
            self.add_module(name, module)
        self._module_groups: list[Any] = []
        self._regroup()

    def add_module(self, name: str, module: nn.Module | None) -> None:
        super().add_module(name, module)
        if "_module_groups" in self.__dict__:
            self._regroup()

    def __setattr__(self, name: str, value: Any) -> None:
        """A module may be set by its name, as tools that wrap layers do."""
        super().__setattr__(name, value)
        if name in self.__dict__.get("_modules", ()) and "_module_groups" in self.__dict__:
            self._regroup()

    def __delattr__(self, name: str) -> None:
        held = name in self._modules
        super().__delattr__(name)
        if held:
            self._regroup()

    def _regroup(self) -> None:
        self._module_groups = _grouped(self._modules.values())

    # --------------------------------------------------------------------------------------- list
    def _key(self, index: int) -> str:
        if not isinstance(index, int):
            raise TypeError(f"Sequential: index: got {index!r}; an int or a slice is needed")
        n = len(self._modules)
        if not -n <= index < n:
            raise IndexError(f"Sequential: index {index} is out of range; it has {n} modules")
        return list(self._modules)[index % n]

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._modules.values())

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return type(self)(*list(self)[index])
        return self._modules[self._key(index)]

    def __setitem__(self, index: int | slice, module: Any) -> None:
        if isinstance(index, slice):
            modules = list(self)
            modules[index] = module
            self._replace(modules)
            return
        _check(module)
        self._modules[self._key(index)] = module
        self._regroup()

    def __delitem__(self, index: int | slice) -> None:
        modules = list(self)
        del modules[index]
        self._replace(modules)

    def append(self, module: nn.Module) -> Sequential:
        return self.extend([module])

    def extend(self, modules: Iterable[nn.Module]) -> Sequential:
        self._replace([*self, *modules])
        return self

    def insert(self, index: int, module: nn.Module) -> Sequential:
        modules = list(self)
        modules.insert(index, module)
        self._replace(modules)
        return self

    def pop(self, index: int | slice = -1) -> Any:
        found = self[index]
        del self[index]
        return found

    def __add__(self, modules: Iterable[nn.Module]) -> Sequential:
        return type(self)(*self, *modules)

    def __iadd__(self, modules: Iterable[nn.Module]) -> Sequential:
        return self.extend(modules)

    def _replace(self, modules: list[Any]) -> None:
        """These modules, named by position from the first that changed place on."""
        for module in modules:
            _check(module)
        names = list(self._modules)
        same = 0
        for old, new in zip(self._modules.values(), modules, strict=False):
            if old is not new:
                break
            same += 1
        kept = dict(list(self._modules.items())[:same])
        for i, module in enumerate(modules[same:], same):
            name = str(i)
            if name in kept:  # a dict's names, that look like positions
                raise ValueError(
                    f"Sequential: the module named {name!r} is in the way of the one at position "
                    f"{i}; names here: {', '.join(names)}"
                )
            kept[name] = module
        self._modules.clear()
        self._modules.update(kept)
        self._regroup()

    # ------------------------------------------------------------------------------------ forward
    def forward(
        self,
        input: Any,  # noqa: A002
        *extra_inputs: Any,
        op_kwargs: dict[Any, dict[str, Any]] | None = None,
    ) -> Any:
        """The output, or (it, extra outputs...). Extra inputs are taken from the left.

        `op_kwargs` are keyword arguments of operations: {BasicOperation, or its index: {...}}.
        """
        groups = self._groups()
        given = self._given({} if op_kwargs is None else op_kwargs, groups)
        wanted = sum([g.num_extra_inputs for g in groups if _fused(g)])
        if wanted != len(extra_inputs):
            raise ValueError(
                f"Sequential: extra_inputs: got {len(extra_inputs)}; its operations take {wanted}"
            )
        made = _run(groups, input, extra_inputs, given)
        return made[0] if len(made) == 1 else made

    def _groups(self) -> list[Any]:
        """What runs in a row: the groups, where hooks call for it taken apart."""
        for module in self._modules.values():
            if isinstance(module, FusibleOperation) and (hooked(module) or _hooked_inside(module)):
                return _apart(self._modules.values())
        return self._module_groups

    def _given(
        self, op_kwargs: dict[Any, dict[str, Any]], groups: list[Any]
    ) -> list[tuple[Any, dict[str, Any]]]:
        """(operation, its keyword arguments)."""
        if not isinstance(op_kwargs, dict):
            raise TypeError(
                f"Sequential: op_kwargs: got {type(op_kwargs).__name__}; a dict is needed, of "
                "operations or their indices to keyword arguments"
            )
        made = []
        for key, kwargs in op_kwargs.items():
            op = key
            if isinstance(key, int):
                op = self[key] if -len(self) <= key < len(self) else None
            if not isinstance(op, BasicOperation):
                raise ValueError(
                    f"Sequential: op_kwargs: got the key {key!r}; a BasicOperation of this "
                    "Sequential, or the index of one, is needed"
                )
            known = [o for g in groups if _fused(g) for o in g._basic_ops]
            if not any([op is other for other in known]):  # noqa: C419
                raise ValueError(
                    f"Sequential: op_kwargs: {type(op).__name__} is no operation of this Sequential"
                )
            check_keywords(op, kwargs, type(op).__name__)  # before any of them has run
            made.append((op, kwargs))
        return made


class _Called(OperationFuser):
    """An operation that is called as a module is, for its hooks to run."""

    _module: Any

    def __call__(
        self,
        input: Any,  # noqa: A002
        *extra_inputs: Any,
        basic_op_kwargs: list[dict[str, Any]] | None = None,
    ) -> Any:
        if isinstance(self._module, BasicOperation):
            given = basic_op_kwargs[0] if basic_op_kwargs else {}
            return self._module(input, *extra_inputs, **given)
        return self._module(input, *extra_inputs, basic_op_kwargs=basic_op_kwargs)


def _grouped(modules: Iterable[Any], called: bool = False) -> list[Any]:
    """The modules, consecutive operations as one fuser; with `called`, those that somebody has
    hooked into by themselves."""
    groups: list[Any] = []
    for module in modules:
        if isinstance(module, FusibleOperation) and not (called and hooked(module)):
            if not groups or not isinstance(groups[-1], list):
                groups.append([])
            groups[-1].append(module)
        else:
            groups.append(module)
    return [_group(g) for g in groups]


def _group(found: Any) -> Any:
    if isinstance(found, list):
        return OperationFuser.later(found)
    if not isinstance(found, FusibleOperation):
        return found
    made: Any = _Called.later([found])
    made._module = found
    return made


def _apart(modules: Iterable[Any]) -> list[Any]:
    """`_grouped`, and an operation whose parts have hooks is those parts."""
    parts: list[Any] = []
    for module in modules:
        if not hooked(module) and _hooked_inside(module):
            parts.extend(module.basic_ops)
        else:
            parts.append(module)
    groups = _grouped(parts, called=True)
    for group in groups if not torch.compiler.is_compiling() else ():
        if _fused(group):
            _wired(group)
    return groups


def _wired(group: OperationFuser) -> None:
    """Raise where a channel comes from beyond the pipeline's ends, which are where hooks are."""
    try:
        group._get_wiring()
    except ValueError as error:
        raise NotImplementedError(
            "Sequential: an operation of it has hooks, or a forward set on the object, and so runs "
            f"by itself; channels do not reach past it: {error}; or remove the hooks"
        ) from None


def _hooked_inside(module: Any) -> bool:
    return isinstance(module, FusedOperation) and any([hooked(op) for op in module.basic_ops])  # noqa: C419


def _check(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"Sequential: got {type(module).__name__}; an operation or another nn.Module is needed"
        )


def _run(groups: list[Any], x: Any, extra: tuple[Any, ...], given: Any) -> tuple[Any, ...]:
    """(output, extra outputs...) of the groups in a row. Not by a loop: a graph that breaks in one
    is lost."""
    if not groups:
        return (x,)
    group, count = groups[0], 0
    if _fused(group):
        count = group.num_extra_inputs
        kwargs = [_found(given, op) for op in group._basic_ops]
        made = group(x, *extra[:count], basic_op_kwargs=kwargs)
    else:
        made = group(x)
    more: tuple[Any, ...] = ()
    if _fused(group) and isinstance(made, tuple):
        made, more = made[0], made[1:]
    y, *rest = _run(groups[1:], made, extra[count:], given)
    return (y, *more, *rest)


def _fused(group: Any) -> bool:
    return isinstance(group, OperationFuser)


def _found(given: list[tuple[Any, dict[str, Any]]], op: Any) -> dict[str, Any]:
    for other, kwargs in given:
        if other is op:
            return kwargs
    return {}
