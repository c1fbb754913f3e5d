"""The README and the docs tell the truth: their code runs and their links lead somewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])


def blocks(page: Path) -> list[str]:
    """The Python code of a page, with line numbers of the page when run."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```python\n(.*?)^```", text, re.M | re.S)
    return ["\n" * text.count("\n", 0, match.start(1)) + match[1] for match in found]


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="torch.compile needs a compiler"
)
@pytest.mark.parametrize("page", list(filter(blocks, PAGES)), ids=name)
def test_the_code_runs(page: Path, tmp_path: Path) -> None:
    """All blocks of a page in order, in one session, as somebody who tries them would."""
    script = tmp_path / f"{page.stem}.py"
    script.write_text(
        f"for block in {blocks(page)!r}:\n"
        f"    exec(compile(block, {name(page)!r}, 'exec'), globals())\n",
        encoding="utf-8",
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, env=env)
    assert result.returncode == 0, result.stderr


def test_pages_with_code_are_found() -> None:
    assert {"README.md", "docs/linear.md", "docs/recipes.md"} <= {
        name(page) for page in PAGES if blocks(page)
    }


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []
