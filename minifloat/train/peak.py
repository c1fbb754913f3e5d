"""Peak memory of a run: PyTorch's on a GPU, on Linux without one the whole process's."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import torch

__all__ = ["peak", "restart"]

_PROCESS = Path("/proc/self")


def restart(device: torch.device) -> None:
    """Forget earlier peaks."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    # Where that is not allowed, the peak is that of the process until now, or not known.
    with contextlib.suppress(OSError):
        (_PROCESS / "clear_refs").write_text("5")  # what Linux takes for a reset of VmHWM


def peak(device: torch.device) -> int | None:
    """The most bytes that were in use since `restart`; None where nobody counts."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        found = re.search(r"^VmHWM:\s*(\d+) kB$", (_PROCESS / "status").read_text(), re.M)
    except OSError:
        return None
    return None if found is None else int(found[1]) * 1024
