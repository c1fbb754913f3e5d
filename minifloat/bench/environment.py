"""What a reader needs to know to repeat the numbers."""

from __future__ import annotations

import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from .. import env
from .._version import __version__

__all__ = ["clocks", "describe", "version_of"]

ROOT = Path(__file__).resolve().parents[2]
SMI = "clocks.sm,clocks.mem,clocks.max.sm,power.draw,power.limit,temperature.gpu,driver_version"
# The name of cuBLAS's package has changed with CUDA's version.
PACKAGES = {
    "cublas": ("nvidia-cublas", "nvidia-cublas-cu12"),
    "torchao": ("torchao",),
    "transformer_engine": ("transformer-engine", "transformer_engine"),
    "liger": ("liger-kernel",),
}


def _command(*words: str) -> str | None:
    """The output of a command; None where it does not exist or fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def clocks() -> dict[str, str]:
    """Clocks, power and temperature now, as the driver's tool reports them."""
    answer = _command("nvidia-smi", f"--query-gpu={SMI}", "--format=csv,noheader")
    if not answer:
        return {}
    return dict(zip(SMI.split(","), answer.splitlines()[0].split(", "), strict=False))


def version_of(*names: str) -> str | None:
    """The version of the first of these packages that is installed."""
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def describe(device: torch.device, seed: int) -> dict[str, Any]:
    git = ("git", "-C", str(ROOT))
    known = (ROOT / ".git").exists()  # an installed package may lie inside somebody's repository
    return {
        "device": env.device_name(device),
        "torch": torch.__version__,
        "triton": env.triton_version(),
        "minifloat": __version__,
        "python": platform.python_version(),
        **{name: version_of(*packages) for name, packages in PACKAGES.items()},
        "git": _command(*git, "rev-parse", "HEAD") if known else None,
        "git_dirty": bool(_command(*git, "status", "--porcelain")) if known else None,
        "seed": seed,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
