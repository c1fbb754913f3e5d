"""What a run leaves besides its lines of JSON: one JSON file, a page, a plot."""

from __future__ import annotations

from pathlib import Path

from . import table
from .store import Store, write_json, write_text

__all__ = ["write_report"]


def write_report(folder: Path, store: Store, wanted: set[str]) -> None:
    """Write `results.json`, `results.md` and `roofline.png` of the cases `wanted`."""
    sessions, ends = store.of("session"), store.of("end")
    cases = [record for record in store.of("case") if record["case"] in wanted]
    if not sessions:
        return
    write_json(
        folder / "results.json",
        {
            "environment": sessions[-1]["environment"],
            "ceilings_before": sessions[-1]["ceilings"],
            "ceilings_after": ends[-1]["ceilings"] if ends else None,
            "drift": [line for end in ends for line in end["drift"]],
            "cases": cases,
            "rows": [row for record in cases for row in record["rows"]],
        },
    )
    text = table.markdown(sessions[-1], ends[-1] if ends else None, cases)
    write_text(folder / "results.md", text)
    written = ["results.jsonl", "results.json", "results.md"]
    try:
        from .plot import draw

        draw(folder / "roofline.png", sessions[-1], cases)
        written.append("roofline.png")
    except ImportError as error:
        print(f"no plot: {error.name or 'matplotlib'} is missing (pip install matplotlib)")
    print(f"\nwrote {', '.join(str(folder / name) for name in written)}")
