"""The rules of docs/architecture.md, checked on the source by `ast`; each violation names its line.

A check takes the tree and the layers and returns what is wrong with them. The first half of the
tests runs every check on this repository, the second half on small trees that break one rule each.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "minifloat"
TOP = {"__init__", "__main__"}  # may import anything, and are imported by nothing inside
FREE = "_version"  # may be imported by anything
MAX_LINES = 600  # a file has fewer
MAX_TEST_LINES = 800  # a file of tests is mostly tables of cases
FORMAT_LIMITS = {448, 57344}  # the largest E4M3 and E5M2 values
READ_BY_ENV = {
    "os.environ",
    "os.environb",
    "os.getenv",
    "os.getenvb",
    "os.putenv",
    "torch.cuda.get_arch_list",
    "torch.cuda.get_device_capability",
    "torch.cuda.get_device_name",
    "torch.cuda.get_device_properties",
    "torch.version.cuda",
    "torch.version.hip",
}
AUTOGRAD_FUNCTION = {
    "torch.autograd.Function",
    "torch.autograd.function.Function",
    "torch.autograd.function.InplaceFunction",
}
FUNCTIONS_ALLOWED = {"autograd": 1, "straight_through": 2}


@dataclass(frozen=True)
class Layers:
    """The parsed block: each noun's layer, imports allowed within a layer, nouns not there yet."""

    level: dict[str, int]
    edges: frozenset[tuple[str, str]]
    planned: frozenset[str]


def parse_layers(text: str) -> Layers:
    block = re.search(r"^```layers\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    if block is None:
        raise ValueError("no ```layers block")
    level: dict[str, int] = {}
    edges: list[tuple[str, str]] = []
    planned: set[str] = set()
    for line in filter(str.strip, block[1].splitlines()):
        if match := re.fullmatch(r"L(\d+)\s+(\w+)\s+(\S.*)", line):
            noun = match[2]
            if noun in level:
                raise ValueError(f"{noun} is listed twice")
            level[noun] = int(match[1])
            if match[3].endswith("(planned)"):
                planned.add(noun)
        elif match := re.fullmatch(r"(\w+) -> (\w+)\s+\S.*", line):
            edges.append((match[1], match[2]))
        else:
            raise ValueError(f"neither `L<n>  name  what it is` nor `a -> b  why`: {line!r}")
    for a, b in edges:
        if a not in level or b not in level:
            raise ValueError(f"{a} -> {b}: only listed names can be joined")
        if level[a] != level[b]:
            raise ValueError(f"{a} -> {b}: not in one layer, so the layers decide")
    reached = set(edges)
    while more := {(a, d) for a, b in reached for c, d in reached if b == c} - reached:
        reached |= more
    if loops := sorted(a for a, b in reached if a == b):
        raise ValueError(f"{', '.join(loops)}: the imports within a layer form a circle")
    return Layers(level, frozenset(edges), frozenset(planned))


@dataclass(frozen=True)
class Source:
    """One Python file of the package; `noun` is the module or package under the top it is in."""

    path: Path
    root: Path

    @property
    def parts(self) -> tuple[str, ...]:
        return self.path.relative_to(self.root).with_suffix("").parts

    @property
    def noun(self) -> str:
        return self.parts[1]

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(encoding="utf-8"), str(self.path))

    def at(self, line: int) -> str:
        return f"{self.path.relative_to(self.root).as_posix()}:{line}"


def sources(root: Path) -> list[Source]:
    return [Source(path, root) for path in sorted((root / PACKAGE).rglob("*.py"))]


def absolute(source: Source, module: str, level: int) -> str:
    """The module that `from <level dots><module> import ...` names in this file."""
    if level == 0:
        return module
    package = source.parts[: len(source.parts) - level]
    return ".".join((*package, module) if module else package)


def imported_modules(source: Source) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, wherever it stands; `from . import x` names x."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            module = absolute(source, node.module or "", node.level)
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"
        elif isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func).rpartition(".")[2]
            name = node.args[0]
            if called in ("import_module", "__import__") and isinstance(name, ast.Constant):
                dots = len(str(name.value)) - len(str(name.value).lstrip("."))
                yield node.lineno, absolute(source, str(name.value)[dots:], dots)


def known_names(tree: ast.Module) -> dict[str, str]:
    """What the names that the file imports stand for: {"t": "torch"} after `import torch as t`."""
    known = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                known[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return known


def dotted(node: ast.AST, known: dict[str, str]) -> str | None:
    """An attribute chain on a name, in full: `t.cuda` is torch.cuda after `import torch as t`."""
    if isinstance(node, ast.Name):
        return known.get(node.id, node.id)
    if isinstance(node, ast.Attribute) and (base := dotted(node.value, known)):
        return f"{base}.{node.attr}"
    return None


def check_imports_point_down(root: Path, layers: Layers) -> list[str]:
    wrong = []
    level = {**layers.level, FREE: -1}
    unlisted = {source.noun for source in sources(root)} - {*level}  # another check's business
    for source in sources(root):
        if source.noun in unlisted:
            continue
        here = level[source.noun]
        for line, module in imported_modules(source):
            package, _, rest = module.partition(".")
            target = rest.partition(".")[0]
            if package != PACKAGE or target == source.noun or target in unlisted - TOP:
                continue
            there = level.get(target)
            if there is None:
                wrong.append(
                    f"{source.at(line)}: imports {module} from the top of the package, "
                    "which is for users: name the module that defines it"
                )
            elif there > here or (there == here and (source.noun, target) not in layers.edges):
                wrong.append(
                    f"{source.at(line)}: {source.noun} (L{here}) imports {target} (L{there})"
                )
    return sorted(set(wrong))


def check_modules_are_listed(root: Path, layers: Layers) -> list[str]:
    first = {source.noun: source for source in reversed(sources(root))}
    wrong = []
    for noun in sorted({*first} - TOP - {FREE}):
        if noun not in layers.level:
            wrong.append(f"{first[noun].at(1)}: {noun} is not in the layers block")
        if noun in layers.planned:
            wrong.append(f"{first[noun].at(1)}: {noun} is there, and still marked as planned")
    return wrong


def check_environment_is_read_in_env(root: Path, layers: Layers) -> list[str]:
    wrong = []
    for source in sources(root):
        if source.noun == "env":
            continue
        tree = source.tree
        known = known_names(tree)
        used = {(n.lineno, dotted(n, known)) for n in ast.walk(tree) if isinstance(n, ast.expr)}
        for line, name in sorted(used | {*imported_modules(source)}, key=lambda use: use[0]):
            if name in READ_BY_ENV:
                wrong.append(f"{source.at(line)}: reads {name}; only env does")
    return wrong


def check_limits_are_in_formats(root: Path, layers: Layers) -> list[str]:
    return [
        f"{source.at(node.lineno)}: the number {node.value}; ask the format for its limit"
        for source in sources(root)
        if source.noun != "formats"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, int | float)
        and node.value in FORMAT_LIMITS
    ]


def check_autograd_functions(root: Path, layers: Layers) -> list[str]:
    wrong = []
    seen: Counter[str] = Counter()
    for source in sources(root):
        tree = source.tree
        known = known_names(tree)
        functions = set(AUTOGRAD_FUNCTION)
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef):
                continue
            if not functions.isdisjoint(dotted(base, known) for base in node.bases):
                functions.add(node.name)
                seen[source.noun] += 1
                if seen[source.noun] > (allowed := FUNCTIONS_ALLOWED.get(source.noun, 0)):
                    wrong.append(
                        f"{source.at(node.lineno)}: {node.name} is a torch.autograd.Function; "
                        f"{source.noun} may define {allowed}"
                    )
    return wrong


def check_triton_is_imported_in_kernels(root: Path, layers: Layers) -> list[str]:
    wrong = []
    for source in sources(root):
        if source.noun == "kernels":
            continue
        early = {node.lineno for node in run_on_import(source.tree) if isinstance(node, ast.stmt)}
        for line, module in imported_modules(source):
            if module.partition(".")[0] == "triton" and line in early:
                wrong.append(f"{source.at(line)}: imports triton when minifloat is imported")
    return wrong


def run_on_import(node: ast.AST) -> Iterator[ast.AST]:
    """Every node outside function bodies and `if TYPE_CHECKING`."""
    yield node
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return
    children = ast.iter_child_nodes(node)
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        children = iter(node.orelse)
    for child in children:
        yield from run_on_import(child)


def check_files_are_short(root: Path, layers: Layers) -> list[str]:
    wrong = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if any(p.startswith(".") or p in ("build", "dist", "venv") for p in relative.parts):
            continue
        lines = len(path.read_text(encoding="utf-8").splitlines())
        limit = MAX_TEST_LINES if relative.parts[0] == "tests" else MAX_LINES
        if lines >= limit:
            wrong.append(f"{relative.as_posix()}:{lines}: {lines} lines; under {limit}, please")
    return wrong


Check = Callable[[Path, Layers], list[str]]
CHECKS: list[Check] = [
    check_imports_point_down,
    check_modules_are_listed,
    check_environment_is_read_in_env,
    check_limits_are_in_formats,
    check_autograd_functions,
    check_triton_is_imported_in_kernels,
    check_files_are_short,
]


def name_of(check: Check) -> str:
    return check.__name__.removeprefix("check_")


@pytest.mark.parametrize("check", CHECKS, ids=name_of)
def test_this_repository(check: Check) -> None:
    layers = parse_layers((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))
    assert sources(ROOT), "found no source to check"
    wrong = check(ROOT, layers)
    assert not wrong, "\n" + "\n".join(wrong)


# From here on: does each check fail when it should, and only then?

LAYERS = parse_layers(
    """```layers
L0  formats    x
L0  env        x
L0  opaque     x
L1  reference  x
L1  kernels    x
L4  tensors    x
L6  ops        x
L7  autograd   x
L9  cli        x (planned)

formats -> opaque   why
```"""
)

# For each check: a file, its text, and the lines that must be named.
CASES: dict[Check, list[tuple[str, str, list[int]]]] = {
    check_imports_point_down: [
        ("formats.py", "import minifloat.ops", [1]),
        ("formats.py", "from minifloat.ops.linear import x", [1]),
        ("formats.py", "\nfrom minifloat import ops", [2]),
        ("formats.py", "from .ops import x", [1]),
        ("formats.py", "from . import opaque, ops", [1]),
        ("kernels/a.py", "from ..ops import x", [1]),
        ("kernels/a.py", "from .. import ops", [1]),
        ("kernels/a.py", "from ..reference import x", [1]),
        ("kernels/a/b.py", "from ...ops import x", [1]),
        ("kernels/__init__.py", "from .. import ops", [1]),
        ("opaque.py", "from .formats import x", [1]),
        ("ops.py", "def f():\n    from .cli import main", [2]),
        ("ops.py", "if TYPE_CHECKING:\n    from .cli import main", [2]),
        ("ops.py", "import importlib\nimportlib.import_module('minifloat.cli')", [2]),
        ("ops.py", "import_module('.cli', 'minifloat')\n__import__('minifloat.cli')", [1, 2]),
        ("ops.py", "import minifloat", [1]),
        ("ops.py", "from minifloat import Linear", [1]),
        ("ops.py", "from . import *", [1]),
        ("_version.py", "from . import formats", [1]),
        ("formats.py", "from .opaque import Value", []),
        ("ops.py", "from . import formats, _version\nimport inspect", []),
        ("kernels/a.py", "from . import b\nfrom .b import c", []),
        ("kernels/__init__.py", "from . import b\nfrom .b import c", []),
        ("__init__.py", "from .cli import main", []),
        ("__main__.py", "from .cli import main", []),
    ],
    check_modules_are_listed: [
        ("helpers.py", "", [1]),
        ("helpers/a.py", "", [1]),
        ("cli.py", "", [1]),  # planned
        ("formats.py", "", []),
        ("_version.py", "", []),
    ],
    check_environment_is_read_in_env: [
        ("ops.py", "import os\nos.environ['A']\nos.environ.get('A')\nos.getenv('A')", [2, 3, 4]),
        ("ops.py", "import os as o\no.environ", [2]),
        ("ops.py", "from os import getenv", [1]),
        ("ops.py", "import torch\ntorch.cuda.get_device_capability()", [2]),
        ("ops.py", "import torch\ntorch.cuda.get_device_properties(0).name", [2]),
        ("ops.py", "import torch\ntorch.version.cuda", [2]),
        ("ops.py", "from torch import cuda as c\nc.get_device_capability()", [2]),
        ("ops.py", "import os, torch\nos.path.join('environ')\ntorch.cuda.current_stream()", []),
        ("env.py", "import os\nos.environ", []),
    ],
    check_limits_are_in_formats: [
        ("ops.py", "a = 448\nb = -448.0\nc = 57344.0\n'448'\nd = f(448) / 2", [1, 2, 3, 5]),
        ("ops.py", "a = 447\nb = True", []),
        ("formats.py", "a = 448", []),
    ],
    check_autograd_functions: [
        (
            "ops.py",
            "import torch\nclass F(torch.autograd.Function): pass\nclass G(F): pass",
            [2, 3],
        ),
        ("ops.py", "from torch.autograd import Function as Fn\nclass F(Fn): pass", [2]),
        ("ops.py", "from torch import autograd\nclass F(autograd.Function): pass", [2]),
        ("autograd.py", "from torch.autograd import Function\nclass F(Function): pass", []),
        (
            "autograd.py",
            "from torch.autograd import Function as F\nclass A(F): 0\nclass B(F): 0",
            [3],
        ),
        (
            "autograd.py",
            "from torch.autograd import Function as F\nclass A(F): 0\nclass B(F): 0",
            [3],
        ),
        ("ops.py", "class Function: pass\nclass F(Function): pass", []),
    ],
    check_triton_is_imported_in_kernels: [
        ("ops.py", "import triton.language as tl", [1]),
        ("ops.py", "try:\n    from triton import jit\nexcept ImportError: pass", [2]),
        ("ops.py", "class A:\n    import triton", [2]),
        ("ops.py", "def f():\n    import triton", []),
        ("ops.py", "if TYPE_CHECKING:\n    import triton", []),
        ("kernels/a.py", "import triton", []),
    ],
    check_files_are_short: [
        ("ops.py", "#\n" * 600, [600]),
        ("ops.py", "#\n" * 599, []),
    ],
}


def test_every_check_has_a_case_that_fails() -> None:
    assert [check for check in CHECKS if not any(lines for _, _, lines in CASES[check])] == []


@pytest.mark.parametrize(
    ("check", "file", "text", "lines"),
    [pytest.param(check, *case, id=name_of(check)) for check in CASES for case in CASES[check]],
)
def test_a_check_names_the_lines(
    check: Check, file: str, text: str, lines: list[int], tmp_path: Path
) -> None:
    path = tmp_path / PACKAGE / file
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")
    found = sorted(violation.partition(": ")[0] for violation in check(tmp_path, LAYERS))
    assert found == [f"{PACKAGE}/{file}:{line}" for line in lines]


@pytest.mark.parametrize(
    ("block", "complaint"),
    [
        ("L0  a  x\nL1  a  x", "twice"),
        ("L0 a", "neither"),
        ("L0  a  x\na -> b  x", "listed"),
        ("L0  a  x\nL1  b  x\nb -> a  x", "one layer"),
        ("L0  a  x\nL0  b  x\na -> b  x\nb -> a  x", "circle"),
    ],
)
def test_a_wrong_block_is_refused(block: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_layers(f"```layers\n{block}\n```")


def test_a_missing_block_is_refused() -> None:
    with pytest.raises(ValueError, match="no ```layers block"):
        parse_layers("# Architecture")
