"""Tokens: any bytes come back, learning is a function of the text, and a model trains on them."""

from __future__ import annotations

import json
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minifloat.train import Options, TrainError, checkpoint, data, train
from minifloat.train.tokenizer import BYTES, Tokenizer, learn

TEXT = b"".join(b"def f%d(x):\n    return x * %d + %d\n" % (i, i, i * i) for i in range(400))
LEARNED = learn(TEXT, 400)


@given(st.binary(max_size=200) | st.text(max_size=100).map(str.encode))
def test_any_bytes_come_back(text: bytes) -> None:
    for tokenizer in (Tokenizer(), LEARNED):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_byte_beside_every_byte_comes_back() -> None:
    text = bytes(value for a in range(256) for b in range(0, 256, 7) for value in (a, b))
    assert LEARNED.decode(LEARNED.encode(text)) == text


def test_what_is_learned_shortens_the_text() -> None:
    tokens = LEARNED.encode(TEXT)
    assert LEARNED.decode(tokens) == TEXT
    assert len(tokens) < len(TEXT) / 2
    assert BYTES <= int(tokens.max()) < LEARNED.vocab_size == 400
    assert b"return" in LEARNED._texts


def test_learning_depends_on_the_text_alone() -> None:
    assert learn(TEXT, 300).merges == LEARNED.merges[: 300 - BYTES]
    words = TEXT.split(b"\n")
    random.Random(0).shuffle(words)
    again = learn(b"\n".join(words), 300)
    assert again.merges == learn(b"\n".join(words), 300).merges


def test_merges_are_the_most_frequent_pairs() -> None:
    """Against counting all over again for every merge."""
    text = b"low low low lower lowest newer newer wider wide " * 3
    words = [list(word) for word in __import__("re").findall(rb" ?[a-z]+", text)]
    merges = []
    for _ in range(8):
        counts: dict[tuple[int, int], int] = {}
        for word in words:
            for pair in zip(word, word[1:], strict=False):
                counts[pair] = counts.get(pair, 0) + 1
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        token = BYTES + len(merges)
        merges.append(best)
        for word in words:
            at = 0
            while at < len(word) - 1:
                if (word[at], word[at + 1]) == best:
                    word[at : at + 2] = [token]
                at += 1
    assert learn(text, BYTES + 8).merges == tuple(merges)


def test_json_brings_it_back_and_damage_is_told() -> None:
    kept = json.loads(json.dumps(LEARNED.to_json()))
    assert Tokenizer.from_json(kept) == LEARNED
    assert Tokenizer.from_json(Tokenizer().to_json()) == Tokenizer()
    for wrong in (
        {"kind": "bpe", "merges": [[1]]},
        {"kind": "bpe", "merges": [[256, 1]]},
        {"kind": "bpe", "merges": []},
        {"kind": "byte"},
        {"kind": "words", "merges": []},
    ):
        with pytest.raises(TrainError, match="tokenizer"):
            Tokenizer.from_json(wrong)


def test_a_text_with_too_few_pairs_is_told() -> None:
    with pytest.raises(TrainError, match="--vocab-size 1000: the text has only"):
        learn(b"abc abc abc", 1000)


def test_a_model_trains_on_tokens_and_the_checkpoint_holds_them(tmp_path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(TEXT)
    given = {"preset": "smoke", "steps": 4, "batch_size": 4, "device": "cpu", "compile": False}
    given |= {"data": str(text), "tokenizer": "bpe", "vocab_size": 300, "out": str(tmp_path / "o")}
    summary = train(Options(**given, checkpoint_dir=str(tmp_path / "saved")))
    assert summary["data"]["unit"] == "token"
    assert 1 < summary["data"]["bytes_per_token"] < 8
    assert summary["runs"]["recipe"]["validation"] == pytest.approx(
        summary["runs"]["bf16"]["validation"], rel=0.015
    )
    index = checkpoint.find(tmp_path / "saved" / "recipe")
    corpus = data.load(str(text), 32, 300)
    assert Tokenizer.from_json(index["tokenizer"]) == corpus.tokenizer
    assert torch.equal(corpus.train, corpus.tokenizer.encode(corpus.tokenizer.decode(corpus.train)))
    assert "nats per token" in (tmp_path / "o" / "report.html").read_text()
    with pytest.raises(TrainError, match="vocab_size: 300 there, 310 here"):
        other = {**given, "vocab_size": 310}
        train(Options(**other, checkpoint_dir=str(tmp_path / "saved"), resume=True))
