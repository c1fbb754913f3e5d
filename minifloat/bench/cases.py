"""What is timed, as data: layers and the shapes they train at.

A case is one training step (forward, and backward to input and weights) of one layer without bias.
Its id says all of it: `linear/16384x4096x14336` is 16384 tokens from 4096 to 14336 features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import NamedTuple

from .errors import BenchError, unknown

__all__ = [
    "CPU",
    "CPU_QUICK",
    "FULL",
    "KINDS",
    "PART1",
    "QUICK",
    "SPLITS",
    "Case",
    "Heads",
    "Layer",
    "parse",
    "select",
]

ALIGN = 128  # rows of an expert are a multiple of it: every library and every format takes that
SMALL = 2e11  # operations of a step below which its launches matter as much as its work


class Layer(NamedTuple):
    """A linear layer inside a case, and what its operands are made of.

    `x_reads` and `g_reads` are how many numbers are read for each number of the input and of the
    gradient; `x_made` and `g_made` say that a norm or an activation makes them anyway.
    """

    tokens: int
    k: int
    n: int
    experts: int = 1
    x_reads: float = 1.0
    x_made: bool = False
    g_reads: float = 1.0
    g_made: bool = False


class Heads(NamedTuple):
    """Heads of queries, heads of keys and values, numbers in one, tokens that see each other."""

    queries: int
    keys: int
    size: int
    context: int

    @property
    def qkv(self) -> int:
        return (self.queries + 2 * self.keys) * self.size


@dataclass(frozen=True)
class Case:
    """One step to time: a kind of layer, its sizes (tokens first), and how experts share tokens."""

    kind: str
    sizes: tuple[int, int, int]
    experts: int = 1
    split: str = "equal"

    @property
    def id(self) -> str:
        counts = (*((self.experts,) if self.kind == "grouped" else ()), *self.sizes)
        tail = "" if self.split == "equal" else f"/{self.split}"
        return f"{self.kind}/{'x'.join(map(str, counts))}{tail}"

    @property
    def layers(self) -> tuple[Layer, ...]:
        return KINDS[self.kind].layers(self)

    @property
    def extra(self) -> int:
        """Numbers moved besides operands of products: a norm's backward reads two, writes one."""
        kind = KINDS[self.kind]
        return 3 * kind.norms * kind.depth * self.sizes[0] * self.sizes[1]

    @property
    def flops(self) -> int:
        """Operations of the three products of each linear layer."""
        return sum(6 * layer.tokens * layer.k * layer.n for layer in self.layers)

    @property
    def small(self) -> bool:
        return self.flops < SMALL

    @property
    def graph(self) -> bool:
        """Whether it is timed in a CUDA graph as well."""
        return self.small and self.kind == "linear"

    @property
    def heads(self) -> Heads:
        """The attention of a decoder layer of this width, as GPT-2 and Llama 3 have it."""
        tokens, hidden, _ = self.sizes
        size = next(
            (s for s in ((128, 64) if hidden >= 1024 else (64,)) if hidden % s == 0), hidden
        )
        count = hidden // size
        context = next((c for c in (4096, 2048, 1024) if tokens % c == 0), tokens)
        return Heads(count, 8 if count % 8 == 0 else count, size, context)

    @property
    def rows(self) -> list[int]:
        """Rows of each expert; they add up to the tokens."""
        return SPLITS[self.split](self.sizes[0], self.experts)


# ------------------------------------------------------------------------------------------- kinds
@dataclass(frozen=True)
class Kind:
    """A layer that cases are made of; `sizes` names the numbers of an id.

    `parts` are the names of its linear layers' weights, `norms` how many norms there are, `depth`
    how many such layers are on top of each other. `bounded`: the linear layers and what is between
    them are all there is, so there is a roofline. `trains`: an optimizer ends the step.
    """

    sizes: str
    parts: tuple[str, ...] = ("weight",)
    norms: int = 0
    depth: int = 1
    bounded: bool = True
    trains: bool = False

    @property
    def prefixes(self) -> list[str]:
        """What the names of each layer's weights begin with."""
        return [""] if self.depth == 1 else [f"{i}." for i in range(self.depth)]

    @property
    def weights(self) -> list[str]:
        return [prefix + part for prefix in self.prefixes for part in self.parts]

    def layers(self, case: Case) -> tuple[Layer, ...]:
        t, k, n = case.sizes
        return (Layer(t, k, n, case.experts, x_made=self.norms > 0),)


class Gated(Kind):
    """RMSNorm, fc1, SwiGLU, fc2; the sizes are tokens, hidden and ffn."""

    def layers(self, case: Case) -> tuple[Layer, ...]:
        t, h, f = case.sizes
        # The gradient of fc1's output [T, 2 F] is made of that output and of a [T, F]; fc2's input
        # [T, F] is made of the output.
        return (
            Layer(t, h, 2 * f, x_made=True, g_reads=1.5, g_made=True),
            Layer(t, f, h, x_reads=2.0, x_made=True),
        )


class Decoder(Gated):
    """A layer of a transformer: norm, q, k and v, attention, projection; then a gated MLP."""

    def layers(self, case: Case) -> tuple[Layer, ...]:
        t, h, _ = case.sizes
        qkv = Layer(t, h, case.heads.qkv, x_made=True, g_made=True)
        return (qkv, Layer(t, h, h, x_made=True), *super().layers(case)) * self.depth


_DECODER = ("qkv", "out", "fc1", "fc2")
KINDS: dict[str, Kind] = {
    "linear": Kind("TOKENSxINxOUT"),
    "norm_linear": Kind("TOKENSxINxOUT", norms=1),
    "mlp": Gated("TOKENSxHIDDENxFFN", ("fc1", "fc2"), norms=1),
    "grouped": Kind("EXPERTSxTOKENSxINxOUT"),
    "decoder": Decoder("TOKENSxHIDDENxFFN", _DECODER, norms=2, bounded=False),
    "model": Decoder("TOKENSxHIDDENxFFN", _DECODER, norms=2, depth=4, bounded=False, trains=True),
}


# ------------------------------------------------------------------------------------------ splits
def _equal(tokens: int, experts: int) -> list[int]:
    return _shared(tokens, [1.0] * experts)


def _zipf(tokens: int, experts: int) -> list[int]:
    """The i-th busiest expert has a share of 1 / i."""
    return _shared(tokens, [1.0 / (i + 1) for i in range(experts)])


def _empty(tokens: int, experts: int) -> list[int]:
    """The first expert has no rows, the others share them."""
    return [0, *_equal(tokens, experts - 1)] if experts > 1 else [tokens]


def _shared(tokens: int, shares: Sequence[float]) -> list[int]:
    unit = ALIGN if tokens % ALIGN == 0 and tokens >= ALIGN * len(shares) else 1
    units, total = tokens // unit, sum(shares)
    counts = [int(units * share / total) for share in shares]
    for i in range(units - sum(counts)):
        counts[i % len(counts)] += 1
    return [unit * count for count in counts]


SPLITS = {"equal": _equal, "zipf": _zipf, "empty": _empty}


# ------------------------------------------------------------------------------------------ tables
# The twelve shapes that were measured in other libraries too.
PART1: tuple[Case, ...] = (
    Case("linear", (16384, 4096, 4096)),
    Case("linear", (16384, 4096, 14336)),
    Case("linear", (16384, 14336, 4096)),
    Case("linear", (8192, 8192, 8192)),
    Case("linear", (4096, 1024, 4096)),
    Case("linear", (2048, 768, 3072)),
    Case("mlp", (16384, 4096, 14336)),
    Case("mlp", (8192, 8192, 28672)),
    Case("mlp", (2048, 768, 2048)),
    Case("grouped", (16384, 4096, 4096), 8),
    Case("grouped", (32768, 7168, 2048), 32),
    Case("grouped", (32768, 2048, 2048), 64),
)
QUICK: tuple[Case, ...] = (PART1[0], PART1[5], PART1[6], PART1[9])
CPU: tuple[Case, ...] = (
    Case("linear", (256, 512, 512)),
    Case("mlp", (128, 256, 512)),
    Case("grouped", (256, 256, 256), 4),
)
# So small that PyTorch takes one thread: busy cores do not make it wait for others.
CPU_QUICK: tuple[Case, ...] = (
    Case("linear", (64, 128, 128)),
    Case("mlp", (64, 64, 128)),
    Case("grouped", (128, 64, 64), 4),
)

# family: ((in, out), ...), tokens
_DENSE: dict[str, tuple[tuple[tuple[int, int], ...], tuple[int, ...]]] = {
    "GPT-2 124M": (
        ((768, 2304), (768, 768), (768, 3072), (3072, 768)),
        (1024, 8192, 16384),
    ),
    "GPT-2 XL": (((1600, 4800), (1600, 1600), (1600, 6400), (6400, 1600)), (8192,)),
    "Llama-3 8B": (
        ((4096, 6144), (4096, 4096), (4096, 2 * 14336), (14336, 4096)),
        (2048, 8192, 16384),
    ),
    "Llama-3 70B": (((8192, 10240), (8192, 8192), (8192, 2 * 28672), (28672, 8192)), (4096, 8192)),
    "DeepSeek-V3": (
        ((7168, 1536), (1536, 24576), (7168, 576), (512, 32768), (16384, 7168), (7168, 36864),
         (18432, 7168), (7168, 4096), (2048, 7168)),
        (4096, 8192),
    ),
    "cross-check": (((4096, 12288), (4096, 4096), (4096, 16384), (16384, 4096)), (15872,)),
}  # fmt: skip
_NORMED = {(768, 2304), (4096, 6144), (8192, 10240)}  # a norm comes before q, k and v
_MLP = (
    ((768, 2048), (1024, 8192, 16384)),
    ((4096, 14336), (2048, 8192, 16384)),
    ((8192, 28672), (4096, 8192)),
    ((7168, 18432), (4096, 8192)),
)
# tokens, in, out, experts
_EXPERTS = (
    *((t, k, n, e) for t in (65536, 32768) for k, n in ((7168, 4096), (2048, 7168))
      for e in (8, 32)),
    (16384, 7168, 4096, 64),
    (16384, 2048, 7168, 64),
    (32768, 7168, 2048, 8),
    (65536, 2048, 1536, 128),
    (65536, 768, 2048, 128),
    (16384, 4096, 28672, 8),
    (16384, 14336, 4096, 8),
)  # fmt: skip


def _full() -> Iterator[Case]:
    yield from PART1
    for pairs, tokens in _DENSE.values():
        for t in tokens:
            for pair in pairs:
                yield Case("linear", (t, *pair))
                if pair in _NORMED:
                    yield Case("norm_linear", (t, *pair))
    for size in (1024, 2048, 4096, 8192):
        yield Case("linear", (size, size, size))
    for (hidden, ffn), tokens in _MLP:
        for t in tokens:
            yield Case("mlp", (t, hidden, ffn))
    for (hidden, ffn), tokens in _MLP[:3]:
        for t in tokens[-2:]:
            yield Case("decoder", (t, hidden, ffn))
        if hidden <= 4096:
            yield Case("model", (tokens[-2], hidden, ffn))
    for t, k, n, e in _EXPERTS:
        for split in SPLITS:
            yield Case("grouped", (t, k, n), e, split)


FULL: tuple[Case, ...] = tuple(dict.fromkeys(_full()))


# ------------------------------------------------------------------------------------------- names
def parse(text: str) -> Case:
    """The case of an id, of a table or not; BenchError says how ids are made."""
    kind, _, rest = text.partition("/")
    found = KINDS.get(kind)
    if found is None:
        near = get_close_matches(kind.lower(), KINDS, 1, 0.5)
        raise unknown(
            "case", text, [c.id for c in PART1], _more(), f"{near[0]}/{rest}" if near else ""
        )
    sizes, _, split = rest.partition("/")
    words = sizes.split("x")
    count = found.sizes.count("x") + 1
    if len(words) != count or not all(w.isdecimal() and int(w) > 0 for w in words):
        raise BenchError(f"case {text!r}: {kind}/{found.sizes} is needed, such as {_example(kind)}")
    if split and (split not in SPLITS or kind != "grouped"):
        raise unknown("split of experts", split, SPLITS if kind == "grouped" else [])
    numbers = [int(w) for w in words]
    experts = numbers.pop(0) if kind == "grouped" else 1
    return Case(kind, (numbers[0], numbers[1], numbers[2]), experts, split or "equal")


def _more() -> str:
    return f" and {len(FULL) - len(PART1)} more (--list prints them), or any other sizes"


def _example(kind: str) -> str:
    return next(c.id for c in FULL if c.kind == kind)


def select(names: Sequence[str], table: Sequence[Case]) -> list[Case]:
    """Cases by id or by pattern (`linear/*`, in all tables); all of `table` for no name."""
    if not names:
        return list(table)
    out: list[Case] = []
    for name in names:
        if any(c in name for c in "*?["):
            known = (*table, *FULL)
            found = [c for c in known if fnmatchcase(c.id, name)]
            if not found:
                raise unknown("case", name, [c.id for c in PART1], _more())
            out += found
        else:
            out.append(parse(name))
    return list(dict.fromkeys(out))
