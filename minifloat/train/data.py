"""Tokens of real text: this Python's standard library, or the user's file or folder.

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
from .tokenizer import BYTES, Tokenizer, learn
from .world import World

__all__ = ["CAP", "Batches", "Corpus", "load", "mixed"]

CAP = 16 * 2**20  # bytes of the standard library
_SKIPPED = {"__pycache__", "site-packages", "dist-packages", "node_modules"}
_TAIL = 10  # of a single file, one part in ten is for validation: its end


@dataclass(frozen=True)
class Corpus:
    """Tokens, in small integers; `sizes` are the bytes they stand for, `digest` is of all."""

    train: Tensor
    valid: Tensor
    tokenizer: Tokenizer
    source: str
    files: int
    sizes: tuple[int, int]
    digest: str

    @property
    def bytes_per_token(self) -> float:
        """Of the validation half: a loss per token over this is one per byte."""
        return self.sizes[1] / len(self.valid)


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


def load(path: str | None, context: int, vocab_size: int = BYTES) -> Corpus:
    """The corpus at `path`, or the standard library; each half holds a context and its target.

    More tokens than bytes are learned from the training half.
    """
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
    tokenizer = learn(train, vocab_size) if vocab_size > BYTES else Tokenizer()
    halves = [tokenizer.encode(part) for part in (train, valid)]
    unit = "tokens" if tokenizer.merges else "bytes"
    for name, part in zip(("training", "validation"), halves, strict=True):
        if len(part) <= context:
            raise TrainError(
                f"{source}: too small: {len(part)} {unit} are left for {name}, and a context of"
                f" {context} needs at least {context + 1}: give more text, or a smaller --preset"
            )
    digest = hashlib.sha256(train + b"|" + valid + repr(tokenizer.merges).encode()).hexdigest()
    sizes = (len(train), len(valid))
    return Corpus(halves[0], halves[1], tokenizer, source, count, sizes, digest)


def mixed(*parts: int) -> int:
    """A seed that depends on all of them."""
    text = " ".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


@dataclass(frozen=True)
class Batches:
    """A process's share of batches of `size` windows: tokens and targets [share, context]."""

    corpus: Corpus
    seed: int
    size: int
    context: int
    world: World

    def train(self, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(mixed(self.seed, step))
        last = len(self.corpus.train) - self.context
        starts = torch.randint(last, (self.size,), generator=generator)
        return self._cut(self.corpus.train, starts)

    def valid(self, count: int) -> list[tuple[Tensor, Tensor]]:
        """`count` batches of windows spread evenly over the validation half."""
        last = len(self.corpus.valid) - self.context - 1
        starts = torch.linspace(0, last, count * self.size, dtype=torch.float64).long()
        return [self._cut(self.corpus.valid, part) for part in starts.view(count, self.size)]

    def _cut(self, part: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        own = starts[self.world.share(self.size)]
        window = part[own[:, None] + torch.arange(self.context + 1)]
        if self.world.device.type == "cuda":  # pinned, so that the copy waits for nothing
            window = window.pin_memory()
        window = window.to(self.world.device, non_blocking=True).to(torch.int64)
        return window[:, :-1], window[:, 1:]
