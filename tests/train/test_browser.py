"""The report in a real browser, where one is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
import zlib
from pathlib import Path

import pytest

from minifloat.train import Options, train

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)


def headless(tmp_path: Path, page: Path, *more: str) -> str:
    assert BROWSER is not None
    ran = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
         f"--user-data-dir={tmp_path / 'profile'}", *more, page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "CONSOLE" not in ran.stderr, ran.stderr  # the page complains of nothing
    return ran.stdout


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_the_report_opens_in_a_browser(tmp_path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"def f{i}(x): return x * {i} + {i * i}\n" for i in range(2000)))
    train(
        Options(
            preset="smoke", steps=3, batch_size=4, device="cpu", compile=False, data=str(text),
            out=str(tmp_path / "out"),
        )
    )  # fmt: skip
    page = tmp_path / "out" / "report.html"
    seen = headless(tmp_path, page, "--dump-dom")
    # What the parser made of it is what was written: nothing was moved, closed or dropped.
    assert re.findall(r"<(\w+)", seen.lower()).count("polyline") == 4
    assert seen.count("<svg") == page.read_text().count("<svg")
    assert "Training loss" in seen and "</html>" in seen
    picture = tmp_path / "page.png"
    headless(tmp_path, page, f"--screenshot={picture}", "--window-size=900,1400")
    assert len(set(pixels(picture))) > 20  # it is not blank


def pixels(path: Path) -> bytes:
    """The filtered bytes of a PNG: one value only, if all of it is one colour."""
    content, at, parts = path.read_bytes(), 8, []
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    while at < len(content):
        size, kind = int.from_bytes(content[at : at + 4], "big"), content[at + 4 : at + 8]
        if kind == b"IDAT":
            parts.append(content[at + 8 : at + 8 + size])
        at += 12 + size
    return zlib.decompress(b"".join(parts))
