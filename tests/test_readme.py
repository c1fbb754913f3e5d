"""The README and the docs tell the truth: their code runs, their tables are those that are made
elsewhere, and their links lead somewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from minifloat import doctor

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])

# Imports what every page does, and then runs each page in a child of its own: a page starts in a
# fresh process, and the imports, which take longer than most pages, are paid for once.
SERVER = """
import os, sys, traceback
import torch, torch._dynamo, torch._inductor.compile_fx
import minifloat

for path in map(str.strip, sys.stdin):
    child = os.fork()
    if child == 0:
        code = 1
        with open(path + ".log", "w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            try:
                exec(compile(open(path, encoding="utf-8").read(), path, "exec"),
                     {"__name__": "__main__"})
                code = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def blocks(page: Path) -> list[str]:
    """The Python code of a page, with line numbers of the page when run."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```python\n(.*?)^```", text, re.M | re.S)
    return ["\n" * text.count("\n", 0, match.start(1)) + match[1] for match in found]


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    # One thread compiles: a pool of them would import torch in each.
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="torch.compile needs a compiler"
)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="pages run in forked processes")
@pytest.mark.parametrize("page", list(filter(blocks, PAGES)), ids=name)
def test_the_code_runs(page: Path, tmp_path: Path, server: subprocess.Popen[str]) -> None:
    """All blocks of a page in order, in one session, as somebody who tries them would."""
    script = tmp_path / f"{page.stem}.py"
    script.write_text(
        f"import os\nos.chdir({str(tmp_path)!r})\n"
        f"for block in {blocks(page)!r}:\n"
        f"    exec(compile(block, {name(page)!r}, 'exec'), globals())\n",
        encoding="utf-8",
    )
    assert server.stdin is not None and server.stdout is not None
    print(script, file=server.stdin, flush=True)
    code = server.stdout.readline().strip()
    assert code == "0", Path(f"{script}.log").read_text(encoding="utf-8")


def test_pages_with_code_are_found() -> None:
    found = {name(page) for page in PAGES if blocks(page)}
    assert {"README.md", "docs/linear.md", "docs/recipes.md"} <= found
    without = {name(page) for page in ROOT.glob("docs/*.md")} - found
    assert without <= {"docs/architecture.md"}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_of_python_is_run(page: Path) -> None:
    """None looks like Python to a reader, by its fence or by its indentation, and not to us."""
    text = page.read_text(encoding="utf-8")
    fences = re.findall(r"^ *```(.*)$", text, re.M)
    assert set(fences) <= {"", "python", "diff", "layers", "sh", "json"}
    rest = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    code = r"^    (?:import |from \w|with |def |class |for .*:$|torch\.|model|print\()"
    assert re.findall(code, rest, re.M) == []


def test_the_support_matrix_is_the_doctors() -> None:
    assert doctor.matrix() in (ROOT / "README.md").read_text(encoding="utf-8")


def test_measured_tables_are_the_benchmarks() -> None:
    """A number in the README stands in the report of the run that made it."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    measured = text[text.index("## Measured") : text.index("## Coming from another library")]
    rows = [line for line in measured.splitlines() if re.match(r"\|.*\d\.\d\d", line)]
    assert len(rows) >= 8
    known = (ROOT / "benchmarks/README.md").read_text(encoding="utf-8").splitlines()
    assert [row for row in rows if row not in known] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_headings(page: Path) -> None:
    for link, heading in re.findall(r"\]\(([^)#]*)#([^)]+)\)", page.read_text(encoding="utf-8")):
        if link.startswith("http"):
            continue
        target = page.parent / link if link else page
        titles = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.M)
        made = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
        assert heading in made, f"{name(page)}: {link}#{heading}"
