"""What a forward does with one of its arguments, read from its source.

An attention's forward can seldom be followed with symbols: it branches on shapes. But what it may
do with the input of its projections is little enough to be seen in its text, whichever branch runs.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

from torch import nn

__all__ = ["readers"]

_LOOKS_AROUND = ("locals", "vars", "eval", "exec")


def readers(module: nn.Module, argument: str, facts: tuple[str, ...]) -> list[str] | str:
    """The linear layers of `module` that its forward calls with `argument`, or why one cannot say.

    Every place where the name stands is such a call, `self.layer(argument)`, once for each layer
    and outside of branches and loops, or asks for one of `facts`.
    """
    forward: Any = type(module).forward
    if hasattr(forward, "__wrapped__") or not inspect.isfunction(forward):
        return "its forward is wrapped in another function"
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):
        return "the source of its forward is not there"
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef) or not function.args.args:
        return "its forward is not a function of its own"
    this = function.args.args[0].arg
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    if any(node.id in _LOOKS_AROUND for node in names):
        return "its forward looks at its own variables"
    allowed: set[int] = set()
    found = []
    for node in _unconditional(function):
        if isinstance(node, ast.Call) and _is_call_of_one(node, argument):
            name = _path(node.func, this)
            if name and isinstance(_submodule(module, name), nn.Linear):
                found.append(name)
                allowed.add(id(node.args[0]))
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and _is(node.value, argument) and node.attr in facts:
            allowed.add(id(node.value))
    others = [node for node in names if node.id == argument and id(node) not in allowed]
    if others:
        line = ast.unparse(_statement(function, others[0])).splitlines()[0]
        return f"its forward does something else with {argument}: {line[:80]}"
    if len(set(found)) < len(found):
        return "its forward calls a layer more than once"
    return found or f"its forward calls no linear layer with {argument}"


def _unconditional(function: ast.FunctionDef) -> list[ast.AST]:
    """The nodes that run once in every call: not in branches, loops, comprehensions, functions."""
    found: list[ast.AST] = []
    plain = (ast.Assign, ast.AnnAssign, ast.Expr, ast.Return)
    simple = [statement for statement in function.body if isinstance(statement, plain)]
    skipped = (
        ast.IfExp, ast.BoolOp, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp,
        ast.GeneratorExp,
    )  # fmt: skip
    for statement in function.body:  # what follows an early return may not run
        if any(isinstance(node, ast.Return) for node in ast.walk(statement)):
            simple = [s for s in simple if s.lineno <= statement.lineno]
            break
    waiting: list[ast.AST] = list(simple)
    while waiting:
        node = waiting.pop(0)
        if not isinstance(node, skipped):
            found.append(node)
            waiting = [*ast.iter_child_nodes(node), *waiting]
    return found


def _is_call_of_one(node: ast.Call, argument: str) -> bool:
    return len(node.args) == 1 and not node.keywords and _is(node.args[0], argument)


def _is(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)


def _path(node: ast.AST, this: str) -> str:
    """`a.b` of `self.a.b`, or ""."""
    steps: list[str] = []
    while isinstance(node, ast.Attribute):
        steps.insert(0, node.attr)
        node = node.value
    return ".".join(steps) if _is(node, this) else ""


def _submodule(module: nn.Module, name: str) -> Any:
    try:
        return module.get_submodule(name)
    except AttributeError:
        return None


def _statement(function: ast.FunctionDef, of: ast.AST) -> ast.AST:
    """The innermost statement around a node."""
    found: ast.AST = function
    for node in ast.walk(function):
        if isinstance(node, ast.stmt) and node is not function:
            inside = any(child is of for child in ast.walk(node))
            found = node if inside else found
    return found
