"""Bytes to tokens and back: each byte one, or byte-pair encoding learned from the text.

Text is cut into words first, so that a merge never crosses one, and a word is encoded once however
often it occurs. Learning is a function of the bytes alone: of equally frequent pairs, the lowest
is merged.
"""

from __future__ import annotations

import heapq
import re
from array import array
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .errors import TrainError, pick

__all__ = ["TOKENIZERS", "Tokenizer", "learn"]

BYTES = 256
SAMPLE = 2 * 2**20  # bytes that are learned from
TOKENIZERS = ("byte", "bpe")
_LARGEST = 65536
# A name, digits or signs, with the space before; line breaks and the indentation; other spaces.
_WORD = re.compile(
    rb" ?[A-Za-z_\x80-\xff]+| ?[0-9]+| ?[^\sA-Za-z0-9_\x80-\xff]+|[\r\n]+[ \t]*|\s", re.DOTALL
)

Pair = tuple[int, int]


@dataclass(frozen=True)
class Tokenizer:
    """`merges[i]` is the pair that token 256 + i stands for; with none, tokens are bytes."""

    merges: tuple[Pair, ...] = ()

    @property
    def kind(self) -> str:
        return TOKENIZERS[bool(self.merges)]

    @property
    def vocab_size(self) -> int:
        return BYTES + len(self.merges)

    @cached_property
    def _ranks(self) -> dict[Pair, int]:
        return {pair: BYTES + index for index, pair in enumerate(self.merges)}

    @cached_property
    def _texts(self) -> list[bytes]:
        texts = [bytes([value]) for value in range(BYTES)]
        for left, right in self.merges:
            texts.append(texts[left] + texts[right])
        return texts

    def _word(self, word: bytes) -> list[int]:
        """The earliest merge that applies, again and again."""
        tokens, ranks = list(word), self._ranks
        while len(tokens) > 1:
            merged = min(
                ranks.get(pair, _LARGEST) for pair in zip(tokens, tokens[1:], strict=False)
            )
            if merged == _LARGEST:
                break
            tokens = _joined(tokens, self.merges[merged - BYTES], merged)
        return tokens

    def encode(self, text: bytes | bytearray) -> Tensor:
        """uint8 for bytes, else int32."""
        if not self.merges:
            return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else _EMPTY
        known: dict[bytes, bytes] = {}
        parts = []
        for word in _WORD.findall(text):
            part = known.get(word)
            if part is None:
                part = known[word] = array("i", self._word(word)).tobytes()
            parts.append(part)
        return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.int32) if parts else _EMPTY

    def decode(self, tokens: Tensor) -> bytes:
        texts = self._texts
        return b"".join(texts[token] for token in tokens.tolist())

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "merges": [list(pair) for pair in self.merges]}

    @staticmethod
    def from_json(value: Any) -> Tokenizer:
        """TrainError where it is not one."""
        try:
            kind = pick("tokenizer", value["kind"], TOKENIZERS)
            made = Tokenizer(tuple((int(left), int(right)) for left, right in value["merges"]))
        except (TypeError, KeyError, ValueError) as error:
            raise TrainError("the tokenizer is damaged: it is not a list of pairs") from error
        for index, pair in enumerate(made.merges):
            if not all(0 <= token < BYTES + index for token in pair):
                raise TrainError(f"the tokenizer is damaged: merge {index} is of a later token")
        if made.kind != kind:
            raise TrainError(f"the tokenizer is damaged: {kind} with {len(made.merges)} merges")
        return made


_EMPTY = torch.empty(0, dtype=torch.uint8)


def _joined(tokens: list[int], pair: Pair, merged: int) -> list[int]:
    """`tokens` with each `pair`, from left to right, replaced."""
    out, at, last = [], 0, len(tokens) - 1
    while at <= last:
        if at < last and (tokens[at], tokens[at + 1]) == pair:
            out.append(merged)
            at += 2
        else:
            out.append(tokens[at])
            at += 1
    return out


def learn(text: bytes | bytearray, vocab_size: int) -> Tokenizer:
    """Merge the most frequent pair of `text`'s first bytes until there are `vocab_size` tokens.

    TrainError where the text has fewer pairs than that.
    """
    counts = Counter(_WORD.findall(bytes(text[:SAMPLE])))
    words = [(list(word), count) for word, count in sorted(counts.items())]
    pairs: Counter[Pair] = Counter()
    where: dict[Pair, set[int]] = {}
    for index, (tokens, count) in enumerate(words):
        for pair in zip(tokens, tokens[1:], strict=False):
            pairs[pair] += count
            where.setdefault(pair, set()).add(index)
    # Entries are not removed when a count changes: one that is out of date is skipped.
    queue = [(-count, pair) for pair, count in pairs.items()]
    heapq.heapify(queue)
    merges: list[Pair] = []
    while BYTES + len(merges) < vocab_size:
        best = _most_frequent(queue, pairs)
        if best is None:
            raise TrainError(
                f"--vocab-size {vocab_size}: the text has only {BYTES + len(merges)} tokens worth"
                " having: ask for fewer, or give more text"
            )
        merged = BYTES + len(merges)
        merges.append(best)
        changed: set[Pair] = set()
        for index in sorted(where.pop(best)):
            tokens, count = words[index]
            joined = _joined(tokens, best, merged)
            for pair in zip(tokens, tokens[1:], strict=False):
                pairs[pair] -= count
                changed.add(pair)
            for pair in zip(joined, joined[1:], strict=False):
                pairs[pair] += count
                where.setdefault(pair, set()).add(index)
                changed.add(pair)
            words[index] = (joined, count)
        for pair in changed:
            if pairs[pair] > 0:
                heapq.heappush(queue, (-pairs[pair], pair))
    return Tokenizer(tuple(merges))


def _most_frequent(queue: list[tuple[int, Pair]], pairs: Counter[Pair]) -> Pair | None:
    """The pair with the highest count; None where none occurs twice."""
    while queue:
        count, pair = heapq.heappop(queue)
        if -count == pairs[pair]:
            return pair if -count > 1 else None
    return None
