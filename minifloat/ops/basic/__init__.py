"""The basic operations, all on the split API: the names of `minifloat.ops` that live here."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    # Later: the files here are imported by what they are exported from.
    found = getattr(importlib.import_module(__name__.rpartition(".")[0]), name, None)
    if getattr(found, "__module__", "").startswith(f"{__name__}."):
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
