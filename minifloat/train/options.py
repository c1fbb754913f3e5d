"""What can be asked of a run, as a value and as arguments of the command line."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..models import PRESETS, TransformerConfig
from .errors import TrainError, pick
from .tokenizer import BYTES, TOKENIZERS

__all__ = ["Options", "add_arguments"]

# preset: (steps, sequences per step, learning rate), on a device that can take them
_DEFAULTS = {
    "smoke": (20, 8, 3e-3),
    "tiny": (100, 8, 1e-3),
    "gpt2": (500, 32, 6e-4),
    "1b": (200, 8, 3e-4),
}
_VOCABULARY = 2048  # of --tokenizer bpe
_LARGEST_VOCABULARY = 65536


@dataclass(frozen=True)
class Options:
    """A run. None asks for what suits the preset or the machine."""

    recipe: str = "default"
    preset: str = "tiny"
    steps: int | None = None
    batch_size: int | None = None
    lr: float | None = None
    seed: int = 0
    data: str | None = None
    tokenizer: str = "byte"
    vocab_size: int | None = None
    experts: int = 0
    top_k: int | None = None
    device: str | None = None
    compile: bool = True
    compile_blocks: bool | None = None
    backend: str | None = None
    cuda_graphs: bool | None = None
    deterministic: bool | None = None
    baseline: bool = True
    out: str = "runs/train"
    checkpoint_dir: str | None = None
    checkpoint_every: int = 50
    resume: bool = False
    stop_after: int | None = None
    log_every: int = 10
    eval_batches: int = 16
    debug: bool = False

    def checked(self) -> Options:
        """Itself, with the preset's defaults filled in; TrainError for what cannot be."""
        pick("preset", self.preset, PRESETS)
        defaults = zip(("steps", "batch_size", "lr"), _DEFAULTS[self.preset], strict=True)
        filled: dict[str, Any] = {n: value for n, value in defaults if getattr(self, n) is None}
        options = replace(self, **filled, vocab_size=self._vocabulary())
        positive = ("steps", "batch_size", "lr", "checkpoint_every", "log_every", "eval_batches")
        for name in (*positive, "stop_after"):
            value = getattr(options, name)
            if value is not None and not 0 < value < math.inf:
                raise TrainError(f"--{name.replace('_', '-')} {value}: must be positive and finite")
        if not -(2**63) <= options.seed < 2**64:
            raise TrainError(f"--seed {options.seed}: must fit into 64 bits")
        if options.resume and options.checkpoint_dir is None:
            raise TrainError("--resume needs --checkpoint-dir: the folder of the run to go on with")
        if options.stop_after is not None and options.checkpoint_dir is None:
            raise TrainError("--stop-after needs --checkpoint-dir: the run would be lost")
        if options.compile_blocks and not options.compile:
            raise TrainError("--compile-blocks and --no-compile: leave one of them out")
        if options.backend is not None and not options.compile:
            raise TrainError("--backend and --no-compile: leave one of them out")
        if options.top_k is not None and not options.experts:
            raise TrainError(f"--top-k {options.top_k}: needs --experts, of which a token takes it")
        try:
            options.config  # noqa: B018  (it checks itself)
        except ValueError as error:
            raise TrainError(f"--experts {options.experts}: {error}") from error
        if Path(options.out).exists() and not Path(options.out).is_dir():
            raise TrainError(f"--out {options.out}: is a file, and a folder is wanted")
        return options

    def _vocabulary(self) -> int:
        kind, size = pick("tokenizer", self.tokenizer, TOKENIZERS), self.vocab_size
        if kind == TOKENIZERS[0]:
            if size not in (None, BYTES):
                raise TrainError(f"--vocab-size {size}: bytes are {BYTES}: add --tokenizer bpe")
            return BYTES
        if size is not None and not BYTES < size <= _LARGEST_VOCABULARY:
            raise TrainError(
                f"--vocab-size {size}: must be more than the {BYTES} bytes, and at most"
                f" {_LARGEST_VOCABULARY}"
            )
        return _VOCABULARY if size is None else size

    @property
    def config(self) -> TransformerConfig:
        """The model, of checked options."""
        preset = PRESETS[self.preset]
        return replace(
            preset,
            vocab_size=self.vocab_size or preset.vocab_size,
            experts=self.experts,
            top_k=preset.top_k if self.top_k is None else self.top_k,
        )

    @property
    def unit(self) -> str:
        """What a loss is per."""
        return "byte" if self.tokenizer == TOKENIZERS[0] else "token"

    def identity(self) -> dict[str, Any]:
        """What a checkpoint must agree on: all that decides the numbers of a step."""
        names = ("preset", "steps", "batch_size", "lr", "seed", "compile", "backend")
        more = ("tokenizer", "vocab_size", "experts", "top_k")
        flags = ("compile_blocks", "deterministic")  # unasked for is off, once a machine is known
        asked = {name: getattr(self, name) for name in names + more}
        return asked | {name: bool(getattr(self, name)) for name in flags}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    say = parser.add_argument
    say("--recipe", default="default", metavar="NAME",
        help="delayed, current, block, mxfp8, nvfp4, bf16, or a map [NAME,]PATTERN=NAME,... of"
        " layers (default: the best this device has)")  # fmt: skip
    say("--preset", default="tiny", metavar="NAME", help=f"{', '.join(PRESETS)} (default: tiny)")
    say("--steps", type=int, default=None, help="training steps (default: by preset)")
    say("--batch-size", type=int, default=None, help="sequences per step (default: by preset)")
    say("--lr", type=float, default=None, help="the highest learning rate (default: by preset)")
    say("--seed", type=int, default=0, help="of parameters and data (default: 0)")
    say("--data", default=None, metavar="PATH",
        help="a text file or a folder (default: this Python's standard library)")  # fmt: skip
    say("--tokenizer", default="byte", metavar="NAME",
        help="byte, or bpe, learned from the text (default: byte)")  # fmt: skip
    say("--vocab-size", type=int, default=None, metavar="N",
        help=f"tokens of bpe (default: {_VOCABULARY})")  # fmt: skip
    say("--experts", type=int, default=0, metavar="N",
        help="MLPs of each block, of which a token takes some (default: 0, one MLP)")  # fmt: skip
    say("--top-k", type=int, default=None, metavar="K",
        help="experts that a token takes (default: 2)")  # fmt: skip
    say("--device", default=None, help="e.g. cpu, cuda:0 (default: the GPU if any)")
    say("--compile", action=argparse.BooleanOptionalAction, default=True,
        help="torch.compile(fullgraph=True) (default: yes)")  # fmt: skip
    say("--compile-blocks", action=argparse.BooleanOptionalAction, default=None,
        help="one graph for all blocks in place of one for the model: starts sooner (default: yes"
        " on a GPU)")  # fmt: skip
    say("--backend", default=None, help="of torch.compile (default: inductor, on CPU aot_eager)")
    say("--cuda-graphs", action=argparse.BooleanOptionalAction, default=None,
        help="a step as one launch (default: yes on a GPU, no in several processes)")  # fmt: skip
    say("--deterministic", action=argparse.BooleanOptionalAction, default=None,
        help="steps that repeat to the bit on a GPU (default: with --checkpoint-dir)")  # fmt: skip
    say("--baseline", action=argparse.BooleanOptionalAction, default=True,
        help="train the same model in bf16 too (default: yes)")  # fmt: skip
    say("--out", default="runs/train", metavar="DIR",
        help="metrics, summary, plot and report (default: runs/train)")  # fmt: skip
    say("--checkpoint-dir", default=None, metavar="DIR", help="save checkpoints there")
    say("--checkpoint-every", type=int, default=50, metavar="N", help="steps (default: 50)")
    say("--resume", action="store_true", help="go on from the last checkpoint")
    say("--stop-after", type=int, default=None, metavar="N",
        help="save a checkpoint after step N of each run and stop: --resume goes on")  # fmt: skip
    say("--log-every", type=int, default=10, metavar="N", help="steps (default: 10)")
    say("--eval-batches", type=int, default=16, metavar="N", help="of validation (default: 16)")
    say("--debug", action="store_true", help="show tracebacks of errors")
