"""What a forward computes, as expressions: followed with symbols, never with numbers.

("input", name)          an argument
("linear", name, x)      a linear layer, by its name inside the module
("mlp", name, x)         a module that is fused already
("norm", name, x)
("act", kind, x)         a row of `ACTIVATIONS`, or what else it is
("mul", x, y)
("fact", what, x)        a row of `FACTS`: nothing that depends on the values of x
("call", name, ...)      any other module, of ("arg", parameter, x) each
("other", what, ...)     anything else
"""

from __future__ import annotations

import inspect
import operator
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.nn import functional as F

from .joint import FACTS

__all__ = ["Kind", "Traced", "follow"]

Kind = Callable[[nn.Module], str]  # "linear", "norm", "mlp", or "" for any other module

_FUNCTIONS: dict[Any, str] = {
    F.silu: "silu",
    F.relu: "relu",
    torch.relu: "relu",
    F.sigmoid: "sigmoid",
    torch.sigmoid: "sigmoid",
    F.gelu: "gelu",
    torch._C._nn.gelu: "gelu",
}
_METHODS = {"relu": "relu", "sigmoid": "sigmoid"}
_MODULES: dict[type, str] = {
    nn.SiLU: "silu", nn.ReLU: "relu", nn.Sigmoid: "sigmoid", nn.GELU: "gelu",
}  # fmt: skip
_PRODUCTS = (operator.mul, torch.mul)


class Traced(NamedTuple):
    """One way through a forward: its result, and every call in it with the number of readers."""

    result: Any
    calls: tuple[tuple[Any, int], ...]
    used: int  # how many of the calls the result is made of
    notes: bool  # whether it stores something on its modules

    @property
    def whole(self) -> bool:
        """Whether the result is all that the forward does."""
        return self.used == len(self.calls) and not self.notes


def follow(module: nn.Module, kind: Kind, deep: bool = True) -> tuple[Traced, ...] | str:
    """`module`'s forward, or why it cannot be followed.

    In training and in evaluation, with every argument and with those alone that have no default:
    a forward that branches on a tensor cannot be followed, and these are the other branches that
    are common. `deep` goes into modules of no `kind`; else they are calls of something.
    """
    found = []
    parameters = inspect.signature(type(module).forward).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    for given in (None, defaults) if defaults else (None,):
        for training in (True, False):
            try:
                with _untouched(module, training) as before, warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # what fx says about constants
                    graph = _Tracer(kind, deep).trace(module, given)
                    notes = any(_differ(vars(m), was) for m, was, _ in before)
            except Exception as error:  # user code, run with symbols: anything may happen
                text = (str(error).strip() or "no message").splitlines()[0]
                return f"{type(error).__name__}: {text[:120]}"
            found.append(_read(graph, module, kind, notes))
    return tuple(found)


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True  # a forward that writes to them writes to symbols

    def __init__(self, kind: Kind, deep: bool) -> None:
        super().__init__()
        self._kind, self._deep = kind, deep

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return bool(self._kind(m)) or not self._deep or super().is_leaf_module(m, "")

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        """A call with a symbol for each argument; `concrete_args` are left at their defaults.

        By the signature, which a decorated forward has too. Nothing is given for `*args` and
        `**kwargs`.
        """
        given: list[Any] = []
        named: dict[str, Any] = {}
        for p in list(inspect.signature(root_fn).parameters.values())[1:]:
            if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) or p.name in (concrete_args or {}):
                continue
            symbol = self.create_proxy("placeholder", p.name, (), {})
            if p.default is p.empty and p.kind is not p.KEYWORD_ONLY:
                given.append(symbol)
            else:
                named[p.name] = symbol
        return lambda root: root_fn(root, *given, **named), [self.root]


@contextmanager
def _untouched(module: nn.Module, training: bool) -> Iterator[list[Any]]:
    """The mode, for the time of a trace, after which attributes and random numbers are as before.

    What a forward stores on itself is a symbol then.
    """
    before = [(m, dict(vars(m)), dict(m._buffers)) for m in module.modules()]
    try:
        with torch.random.fork_rng(devices=[]):
            for m, _, _ in before:
                m.training = training
            yield before
    finally:
        for m, attributes, buffers in before:
            vars(m).clear()
            vars(m).update(attributes)
            m._buffers.clear()
            m._buffers.update(buffers)


def _differ(now: dict[str, Any], before: dict[str, Any]) -> bool:
    names = (now.keys() | before.keys()) - {"training"}
    return any(now.get(name) is not before.get(name) for name in names)


def _read(graph: fx.Graph, module: nn.Module, kind: Kind, notes: bool) -> Traced:
    made: dict[fx.Node, Any] = {}
    result: Any = None
    calls = []
    for node in graph.nodes:
        if node.op == "output":
            result = node.args[0]
        elif node.op == "placeholder":
            made[node] = ("input", node.name)
        else:
            made[node] = _call(node, made, module, kind)
            if node.op != "get_attr":
                calls.append(node)
    used: set[fx.Node] = set()
    waiting = [result] if isinstance(result, fx.Node) else []
    while waiting:
        node = waiting.pop()
        if node not in used:
            used.add(node)
            waiting += node.all_input_nodes
    whole = made[result] if isinstance(result, fx.Node) else ("other", "a structure")
    return Traced(
        whole,
        tuple((made[n], len(n.users)) for n in calls),
        sum(n in used for n in calls),
        notes,
    )


def _call(node: fx.Node, made: dict[fx.Node, Any], module: nn.Module, kind: Kind) -> Any:
    of = [made[a] for a in node.args if isinstance(a, fx.Node)]
    read = [made[a] for a in node.all_input_nodes]
    plain = len(node.all_input_nodes) == len(node.args) == 1 and not node.kwargs
    if node.op == "call_module":
        called = module.get_submodule(str(node.target))
        found = kind(called)
        if found and plain:
            return found, str(node.target), of[0]
        if plain and type(called) in _MODULES:
            return "act", _gelu(_MODULES[type(called)], getattr(called, "approximate", "")), of[0]
        return "call", str(node.target), *_arguments(node, made, called)
    fact = _fact(node)
    if fact:
        return "fact", fact, *read
    half = _half(node, made)
    if half is not None:
        return half
    if node.op == "call_function" and node.target in _PRODUCTS and len(of) == 2:
        return "mul", *of
    if node.op == "call_method" and node.target == "mul" and len(of) == 2:
        return "mul", *of
    table: dict[Any, str] = _METHODS if node.op == "call_method" else _FUNCTIONS
    name = table.get(node.target)
    given = {k: v for k, v in node.kwargs.items() if k not in ("inplace", "approximate")}
    if name is not None and len(of) == len(node.args) == 1 and not given:
        return "act", _gelu(name, str(node.kwargs.get("approximate", "none"))), of[0]
    return "other", getattr(node.target, "__name__", str(node.target)), *read


def _arguments(node: fx.Node, made: dict[fx.Node, Any], called: nn.Module) -> list[Any]:
    """What a module is called with, by parameter; "" inside of structures."""
    try:
        bound = inspect.signature(type(called).forward).bind(None, *node.args, **node.kwargs)
    except (TypeError, ValueError):
        return [("arg", "", made[a]) for a in node.all_input_nodes]
    given = {name: a for name, a in bound.arguments.items() if isinstance(a, fx.Node)}
    inside = [a for a in node.all_input_nodes if a not in given.values()]
    named = [("arg", name, made[a]) for name, a in given.items()]
    return [*named, *(("arg", "", made[a]) for a in inside)]


def _fact(node: fx.Node) -> str:
    """What is asked of a tensor besides its values, or ""."""
    if node.op == "call_function" and node.target is getattr and len(node.args) == 2:
        return str(node.args[1]) if node.args[1] in FACTS else ""
    return str(node.target) if node.op == "call_method" and node.target in FACTS else ""


def _half(node: fx.Node, made: dict[fx.Node, Any]) -> Any:
    """Of `x.chunk(2, dim=-1)`, or None."""
    if node.op != "call_function" or node.target is not operator.getitem:
        return None
    of, index = node.args
    if not isinstance(of, fx.Node) or of.target not in ("chunk", torch.chunk):
        return None
    given = dict(zip(("chunks", "dim"), of.args[1:], strict=False)) | of.kwargs
    if given != {"chunks": 2, "dim": -1} or index not in (0, 1):
        return None
    return "half", index, made[of.all_input_nodes[0]]


def _gelu(name: str, approximate: str) -> str:
    return f"{name}_{approximate}" if name == "gelu" else name
