"""Bytes of real text: this Python's standard library, or the user's file or folder.

Files come in sorted order, and a hash of a file's name says whether it is for validation, so that
the split is the same everywhere and always. A batch depends on the seed and the step alone: the
position in the data is the step.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .errors import TrainError

__all__ = ["CAP", "Corpus", "batch", "load", "validation_batches"]

CAP = 16 * 2**20  # bytes of the standard library
_SKIPPED = {"__pycache__", "site-packages", "dist-packages", "node_modules"}
_TAIL = 10  # of a single file, one part in ten is for validation: its end


@dataclass(frozen=True)
class Corpus:
    """Bytes as uint8 tensors; `digest` is of both."""

    train: Tensor
    valid: Tensor
    source: str
    files: int
    digest: str


def _walk(root: Path, suffix: str) -> list[Path]:
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [s for s in subfolders if s not in _SKIPPED and not s.startswith(".")]
        found += [Path(folder, n) for n in names if n.endswith(suffix) and not n.startswith(".")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _is_validation(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] % _TAIL == 0


def _read(root: Path, paths: list[Path], cap: int | None) -> tuple[bytearray, bytearray, int]:
    train, valid, count = bytearray(), bytearray(), 0
    for path in paths:
        if cap is not None and len(train) + len(valid) >= cap:
            break
        try:
            text = path.read_bytes()
        except OSError:
            continue
        if not text or b"\0" in text[:8192]:
            continue
        if cap is not None:
            text = text[: cap - len(train) - len(valid)]
        count += 1
        (valid if _is_validation(path.relative_to(root).as_posix()) else train).extend(text)
    return train, valid, count


def load(path: str | None, context: int) -> Corpus:
    """The corpus at `path`, or the standard library; each half holds a context and its target."""
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        train, valid, count = _read(root, _walk(root, ".py"), CAP)
        source = f"the standard library of Python {sysconfig.get_python_version()}"
    else:
        root, source = Path(path), path
        if root.is_dir():
            train, valid, count = _read(root, _walk(root, ""), None)
        else:
            try:
                train, valid, count = bytearray(root.read_bytes()), bytearray(), 1
            except OSError as error:
                raise TrainError(f"--data {path}: {error.strerror or error}") from error
    if not count:
        raise TrainError(f"{source}: there is no text in it: name a text file with --data")
    if not valid:
        cut = len(train) - len(train) // _TAIL
        train, valid = train[:cut], train[cut:]
    for name, part in (("training", train), ("validation", valid)):
        if len(part) <= context:
            raise TrainError(
                f"{source}: too small: {len(part)} bytes are left for {name}, and a context of"
                f" {context} needs at least {context + 1}: give more text, or a smaller --preset"
            )
    digest = hashlib.sha256(train + b"|" + valid).hexdigest()
    tensors = [torch.frombuffer(part, dtype=torch.uint8) for part in (train, valid)]
    return Corpus(tensors[0], tensors[1], source, count, digest)


def _cut(part: Tensor, starts: Tensor, context: int, device: torch.device) -> tuple[Tensor, Tensor]:
    index = starts[:, None] + torch.arange(context + 1)
    window = part[index].to(device, torch.int64, non_blocking=True)
    return window[:, :-1], window[:, 1:]


def batch(
    corpus: Corpus, step: int, *, seed: int, size: int, context: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Tokens and targets [size, context] of a step."""
    mixed = hashlib.sha256(f"{seed} {step}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(mixed[:7], "big"))
    last = len(corpus.train) - context
    starts = torch.randint(last, (size,), generator=generator)
    return _cut(corpus.train, starts, context, device)


def validation_batches(
    corpus: Corpus, *, count: int, size: int, context: int, device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """`count` batches of windows spread evenly over the validation half."""
    last = len(corpus.valid) - context - 1
    starts = torch.linspace(0, last, count * size, dtype=torch.float64).long()
    return [_cut(corpus.valid, part, context, device) for part in starts.view(count, size)]
