"""Files that are there whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .errors import TrainError

__all__ = ["explained", "write", "write_json", "write_text"]


def write(path: Path, fill: Callable[[str], None]) -> None:
    """Have `fill` write a temporary file next to `path`, then put it in place in one step."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise explained(path, error) from error
    os.close(handle)
    try:
        fill(name)
        with open(name, "rb+") as file:
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except OSError as error:
        raise explained(path, error) from error
    except Exception as error:
        if "No space left" in str(error):  # safetensors has an exception of its own
            raise explained(path, OSError(errno.ENOSPC, "No space left on device")) from error
        raise
    finally:
        if os.path.exists(name):
            os.unlink(name)


def explained(path: Path, error: OSError) -> TrainError:
    """What went wrong with `path`, in a sentence."""
    if error.errno == errno.ENOSPC:
        return TrainError(
            f"{path}: the disk is full, and nothing was overwritten: make room, then --resume"
            " goes on from the last checkpoint"
        )
    return TrainError(f"{path}: cannot be written: {error.strerror or error}")


def write_text(path: Path, text: str) -> None:
    def fill(name: str) -> None:
        Path(name).write_text(text, encoding="utf-8")

    write(path, fill)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1) + "\n")
