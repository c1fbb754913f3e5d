"""One run: a model, its optimizer, its steps, its checkpoints."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from ..models import Transformer
from ..recipe import Recipe
from . import checkpoint, data
from .errors import TrainError
from .options import Options
from .progress import Progress

__all__ = ["Job", "Result", "run"]

_SETTLE = 2  # steps until the clock of the throughput starts: compilation is in them
_CLIP = 1.0


@dataclass(frozen=True)
class Job:
    """What one run is: its name, the recipe of each layer, and how its name is written down."""

    name: str
    recipe: str
    recipes: dict[str, Recipe | None]


@dataclass
class Result:
    """What a run gave. `validation` is None where it was stopped before the end."""

    name: str
    recipe: str
    history: list[dict[str, Any]] = field(default_factory=list)
    step: int = 0
    validation: float | None = None
    tokens_per_second: float | None = None
    peak_memory: int | None = None
    first_step_seconds: float | None = None
    seconds: float = 0.0

    def summary(self) -> dict[str, Any]:
        values = asdict(self)
        del values["history"]
        losses = [record["loss"] for record in self.history]
        return {**values, "training_loss": losses[-1] if losses else None}


def rate(step: int, steps: int, highest: float) -> float:
    """Warm up over a twentieth of the steps, then down a cosine to a tenth."""
    warm = max(1, steps // 20)
    if step < warm:
        return highest * (step + 1) / warm
    part = (step - warm) / max(1, steps - warm)
    return highest * (0.1 + 0.45 * (1 + math.cos(math.pi * part)))


@contextlib.contextmanager
def _explained(options: Options) -> Iterator[None]:
    """Out of memory, in one sentence."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise TrainError(
            f"the device is out of memory with {options.batch_size} sequences of"
            f" {options.config.context} tokens: try a smaller --batch-size or --preset"
        ) from error


class _Trainer:
    """The parts of a run that its steps share."""

    def __init__(
        self, job: Job, options: Options, corpus: data.Corpus, device: torch.device
    ) -> None:
        self.options, self.corpus, self.device = options, corpus, device
        torch.manual_seed(options.seed)
        self.model = Transformer(options.config, job.recipes, device=device)
        decayed = [p for p in self.model.parameters() if p.ndim > 1]
        rest = [p for p in self.model.parameters() if p.ndim <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
            betas=(0.9, 0.95),
            fused=True,
        )
        self.call: Callable[..., Tensor] = self.model
        if options.compile:
            torch._dynamo.reset()
            self.call = torch.compile(
                self.model, fullgraph=True, backend=options.backend or "inductor"
            )

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16):
            return self.call(tokens, targets)

    def step(self, step: int) -> tuple[Tensor, float]:
        """(loss, learning rate) of a step; neither waits for the device."""
        options = self.options
        assert options.steps and options.batch_size and options.lr
        lr = rate(step, options.steps, options.lr)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss = self.loss(
            *data.batch(
                self.corpus,
                step,
                seed=options.seed,
                size=options.batch_size,
                context=options.config.context,
                device=self.device,
            )
        )
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), _CLIP, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach(), lr

    def validate(self) -> float:
        assert self.options.batch_size
        batches = data.validation_batches(
            self.corpus,
            count=self.options.eval_batches,
            size=self.options.batch_size,
            context=self.options.config.context,
            device=self.device,
        )
        with torch.no_grad():
            losses = [self.loss(tokens, targets) for tokens, targets in batches]
        return float(torch.stack(losses).double().mean())


def _identity(job: Job, options: Options, corpus: data.Corpus, device: torch.device) -> str:
    own = {"recipe": job.recipe, "data": corpus.digest, "device": device.type}
    return json.dumps({**options.identity(), **own}, sort_keys=True)


def run(
    job: Job,
    options: Options,
    corpus: data.Corpus,
    device: torch.device,
    metrics: IO[str],
) -> Result:
    """Train, from a checkpoint where there is one; write a line per step to `metrics`."""
    with _explained(options):
        return _run(job, options, corpus, device, metrics)


def _run(
    job: Job, options: Options, corpus: data.Corpus, device: torch.device, metrics: IO[str]
) -> Result:
    assert options.steps and options.batch_size
    began = time.perf_counter()
    identity = _identity(job, options, corpus, device)
    folder = None
    saved = None
    if options.checkpoint_dir is not None:
        folder = Path(options.checkpoint_dir) / job.name
        if options.resume:
            saved = checkpoint.load(folder, identity)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    result = Result(job.name, job.recipe)
    trainer = _Trainer(job, options, corpus, device)
    if saved is not None:
        checkpoint.restore(saved, trainer.model, trainer.optimizer)
        result.history = list(saved.history)
        result.step = saved.step
        for key, value in saved.extra.items():
            setattr(result, key, value)
        for record in result.history:
            metrics.write(json.dumps(record) + "\n")
        print(f"{job.name:>10}  goes on from step {saved.step}", flush=True)
    earlier = result.seconds
    last = options.steps if options.stop_after is None else min(options.steps, options.stop_after)

    def save() -> None:
        if folder is not None:
            result.seconds = earlier + time.perf_counter() - began
            kept = ("seconds", "tokens_per_second", "peak_memory", "first_step_seconds")
            checkpoint.save(
                folder,
                trainer.model,
                trainer.optimizer,
                step=result.step,
                identity=identity,
                history=result.history,
                extra={name: getattr(result, name) for name in kept},
            )

    _steps(trainer, result, last, metrics, save)
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        result.peak_memory = max(peak, result.peak_memory or 0)
    if result.step >= options.steps:
        result.validation = trainer.validate()
    result.seconds = earlier + time.perf_counter() - began
    return result


def _steps(
    trainer: _Trainer, result: Result, last: int, metrics: IO[str], save: Callable[[], None]
) -> None:
    """From `result.step` to `last`; losses are read in groups, so that the device is kept busy."""
    options, first = trainer.options, result.step
    assert options.steps and options.batch_size
    tokens = options.batch_size * options.config.context
    waiting: list[tuple[int, Tensor, float]] = []
    clock, counted = time.perf_counter(), 0
    with Progress(result.name, options.steps, first, options.log_every) as progress:
        while result.step < last:
            loss, lr = trainer.step(result.step)
            result.step += 1
            waiting.append((result.step, loss, lr))
            ran = result.step - first
            ends = result.step == last
            saves = ends or result.step % options.checkpoint_every == 0
            if not (saves or ran <= _SETTLE or result.step % options.log_every == 0):
                continue
            values = torch.stack([loss for _, loss, _ in waiting]).tolist()
            now = time.perf_counter()
            if ran <= _SETTLE:
                if ran == 1 and result.first_step_seconds is None:
                    result.first_step_seconds = now - clock
                if ran == _SETTLE:
                    clock, counted = now, 0
            else:
                counted += len(waiting)
                result.tokens_per_second = counted * tokens / (now - clock)
            for (step, _, lr), value in zip(waiting, values, strict=True):
                record = {"run": result.name, "step": step, "loss": value, "lr": lr}
                result.history.append(record)
                metrics.write(json.dumps(record) + "\n")
            metrics.flush()
            waiting.clear()
            if not math.isfinite(values[-1]):
                raise TrainError(
                    f"the loss of {result.name} is {values[-1]} at step {result.step}: try a lower"
                    " --lr or another --recipe"
                )
            if ran != _SETTLE or ends:
                progress.step(result.step, values[-1], result.tokens_per_second)
            if saves:
                save()
                clock += time.perf_counter() - now  # saving is not training
