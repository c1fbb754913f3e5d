"""Tables: what is measured is shown, and what is not is said."""

from __future__ import annotations

from typing import Any

from minifloat.bench import table
from minifloat.bench.cases import Case


def row(provider: str, **more: Any) -> dict[str, Any]:
    about = {"case": "linear/1x2x3", "kind": "linear", "library": provider, "status": "ok"}
    return {**about, "provider": provider, "reason": "", **more}


ROWS = [
    row("eager", us=2000.0, p20=1990.0, p80=2030.0, tflops=700.0, us_vs_eager=1.0),
    row("delayed", us=1160.0, p20=1160.0, p80=1160.0, tflops=12.345, us_vs_eager=0.58,
        percent_of_limit=91.4, error_ratio=1.0, waits=True),
    row("nvfp4", status="wrong", reason="y: error 1, the reference's is 0.1", us=10.0, p20=10.0,
        p80=10.0, tflops=1.0, error_ratio=10.0),
    row("mxfp8", status="out of memory", reason="name fewer --providers"),
    row("te block", library="te", status="not measured", reason="te is not installed"),
]  # fmt: skip


def test_a_case() -> None:
    text = table.of_case("linear/1x2x3", ROWS, Case("linear", (1, 2, 3)))
    title, head, eager, delayed, nvfp4, mxfp8, *notes = text.splitlines()
    assert title == "linear/1x2x3  (3.6e-11 TFLOP)"
    assert head.split() == ["provider", "ms", "+-%", "TFLOP/s", "/eager", "%", "limit", "error"]
    assert eager.split() == ["eager", "2.00", "1.0", "700", "1.00"]
    assert delayed.split() == ["delayed", "1.16*", "0.0", "12.3", "0.58", "91", "1.00"]
    assert nvfp4.split() == ["nvfp4", "0.0100", "0.0", "1", "WRONG"]
    assert mxfp8.split() == ["mxfp8", "out", "of", "memory"]
    assert len({len(line) for line in (head, delayed)}) == 1  # columns are aligned
    assert [note.strip() for note in notes] == [
        "nvfp4: wrong: y: error 1, the reference's is 0.1",
        "mxfp8: out of memory: name fewer --providers",
    ]


def test_a_case_that_nobody_could_run() -> None:
    assert table.of_case("x", ROWS[-1:]) == "x"
    assert table.of_case("x", []) == "x"


def test_the_last_lines() -> None:
    lines = table.closing(ROWS, ["DRIFT: bf16 went from 1 to 2"])
    assert "not measured: te block: te is not installed" in lines
    assert "wrong: linear/1x2x3 nvfp4" in lines
    assert "out of memory: linear/1x2x3 mxfp8" in lines
    assert lines[-1] == "DRIFT: bf16 went from 1 to 2"


def test_a_page() -> None:
    session = {"environment": {"device": "H200", "git": None}, "ceilings": {"copy": 4.26e12}}
    page = table.markdown(session, {"ceilings": {"copy": 4.2e12}}, [{"case": "c", "rows": ROWS}])
    assert "device H200.\n" in page and "git" not in page
    assert "| copy | 4260 GB/s | 4200 GB/s |" in page
    assert "## c\n\n| provider | ms |" in page
    assert "- te block: not measured: te is not installed" in page
    widths = {line.count("|") for line in page.split("## c")[1].splitlines() if "|" in line}
    assert len(widths) == 1


def test_ceilings() -> None:
    found = table.ceilings({"copy": 4.26e12, "bf16": 679e12})
    assert [line.split() for line in found[1:]] == [
        ["copy", "4260", "GB/s"],
        ["bf16", "679", "TFLOP/s"],
    ]
