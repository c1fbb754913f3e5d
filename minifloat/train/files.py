"""Files that are there whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .errors import TrainError

__all__ = ["explained", "unfinished", "write", "write_json", "write_text"]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the disk, a quota, the size of a file


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
        os.chmod(name, _mode())
        os.replace(name, path)
    except OSError as error:
        raise explained(path, error) from error
    except Exception as error:
        told = _system_error(error)
        if told is None:
            raise
        raise explained(path, told) from error
    finally:
        if os.path.exists(name):
            os.unlink(name)


def _mode() -> int:
    """Of a file that is made here in the ordinary way: a temporary one is its owner's alone."""
    mask = os.umask(0o077)
    os.umask(mask)
    return 0o666 & ~mask


def unfinished(folder: Path, prefix: str) -> list[Path]:
    """The temporary files of `write` for names that begin with `prefix`."""
    return list(folder.glob(f".{prefix}*"))


def _system_error(error: Exception) -> OSError | None:
    """The system's error in an exception of those who write tensors; None if there is none.

    safetensors gives its number, and torch.save tells that a write failed, but not why.
    """
    found = re.search(r"\(os error (\d+)\)", str(error))
    if found is not None:
        return OSError(int(found[1]), os.strerror(int(found[1])))
    if "inline_container.cc" in str(error):
        return OSError(errno.EIO, "torch.save could not write all of it; is there room?")
    return None


def explained(path: Path, error: OSError) -> TrainError:
    """What went wrong with `path`, in a sentence."""
    if error.errno in _FULL:
        return TrainError(
            f"{path}: the disk is full, and nothing was overwritten: make room; --resume goes on"
            " from the last checkpoint, if --checkpoint-dir was given"
        )
    return TrainError(f"{path}: cannot be written: {error.strerror or error}")


def write_text(path: Path, text: str) -> None:
    def fill(name: str) -> None:
        Path(name).write_text(text, encoding="utf-8")

    write(path, fill)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1) + "\n")
