"""One run: its steps, its metrics, its checkpoints."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import checkpoint
from .data import Corpus
from .errors import TrainError
from .metrics import Metrics
from .options import Options
from .peak import peak
from .progress import Progress
from .trainer import Job, Trainer, memory_explained
from .world import World

__all__ = ["Result", "run"]

_KEPT = ("seconds", "tokens_per_second", "peak_memory", "first_step_seconds")  # in a checkpoint


@dataclass
class Result:
    """What a run gave. `validation` is None where it was stopped before the end.

    `errors` are the statistics of its casts by layer, none where nothing is quantized.
    """

    name: str
    recipe: str
    history: list[dict[str, Any]] = field(default_factory=list)
    step: int = 0
    validation: float | None = None
    tokens_per_second: float | None = None
    peak_memory: int | None = None
    first_step_seconds: float | None = None
    seconds: float = 0.0
    errors: dict[str, Any] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        values = asdict(self)
        del values["history"]
        losses = [record["loss"] for record in self.history]
        return {**values, "training_loss": losses[-1] if losses else None}


def _identity(job: Job, options: Options, corpus: Corpus, device: torch.device) -> str:
    own = {"recipe": job.recipe, "data": corpus.digest, "device": device.type}
    return json.dumps({**options.identity(), **own}, sort_keys=True)


def run(job: Job, options: Options, corpus: Corpus, world: World, metrics: Metrics) -> Result:
    """Train, from a checkpoint where there is one; add a record per step to `metrics`."""
    with memory_explained(options):
        return _run(job, options, corpus, world, metrics)


def _run(job: Job, options: Options, corpus: Corpus, world: World, metrics: Metrics) -> Result:
    assert options.steps
    began = time.perf_counter()
    identity = _identity(job, options, corpus, world.device)
    folder = None
    saved = None
    if options.checkpoint_dir is not None:
        folder = Path(options.checkpoint_dir) / job.name
        if options.resume:
            with world.together():
                saved = checkpoint.load(folder, identity)
            step = -1 if saved is None else saved.step
            world.agree(str(step), f"{folder}: the checkpoint's step")
    result = Result(job.name, job.recipe)
    trainer = Trainer(job, options, corpus, world)
    if saved is not None:
        checkpoint.restore(saved, trainer.model, trainer.optimizer, world)
        result.history = list(saved.history)
        result.step = saved.step
        for key in _KEPT:
            setattr(result, key, saved.extra.get(key, getattr(result, key)))
        metrics.add(*result.history)
        world.say(f"{job.name:>10}  goes on from step {saved.step}")
    earlier = result.seconds
    last = options.steps if options.stop_after is None else min(options.steps, options.stop_after)

    def save() -> None:
        if folder is None:
            return
        result.seconds = earlier + time.perf_counter() - began
        extra = {name: getattr(result, name) for name in _KEPT}
        made = checkpoint.Checkpoint(
            result.step, identity, result.history, extra, corpus.tokenizer, {}
        )
        checkpoint.save(folder, made, trainer.model, trainer.optimizer, world)

    _steps(trainer, result, last, metrics, save)
    trainer.release()
    used = peak(world.device)
    if used is not None:
        result.peak_memory = max(used, result.peak_memory or 0)
    if result.step >= options.steps:
        result.validation = trainer.validate()
        if any(recipe is not None for recipe in job.recipes.values()):
            result.errors = trainer.errors()
    result.seconds = earlier + time.perf_counter() - began
    return result


def _steps(
    trainer: Trainer, result: Result, last: int, metrics: Metrics, save: Callable[[], None]
) -> None:
    """From `result.step` to `last`; losses are read in groups, so that the device is kept busy."""
    options, world, first = trainer.options, trainer.world, result.step
    settles = trainer.settles  # then the clock of the throughput starts
    assert options.steps and options.batch_size
    tokens = options.batch_size * options.config.context
    waiting: list[tuple[int, Tensor, float]] = []
    clock, counted = time.perf_counter(), 0
    with Progress(result.name, options.steps, first, not world.leads) as progress:
        while result.step < last:
            loss, lr = trainer.step(result.step)
            result.step += 1
            waiting.append((result.step, loss, lr))
            ran = result.step - first
            ends = result.step == last
            saves = ends or result.step % options.checkpoint_every == 0
            if not (saves or ran <= settles or result.step % options.log_every == 0):
                continue
            values = world.mean(torch.stack([loss for _, loss, _ in waiting])).tolist()
            now = time.perf_counter()
            if ran <= settles:
                if ran == 1 and result.first_step_seconds is None:
                    result.first_step_seconds = now - clock
                if ran == settles:
                    clock, counted = now, 0
            else:
                counted += len(waiting)
                result.tokens_per_second = counted * tokens / (now - clock)
            records = [
                {"run": result.name, "step": step, "loss": value, "lr": lr}
                for (step, _, lr), value in zip(waiting, values, strict=True)
            ]
            result.history += records
            metrics.add(*records)
            waiting.clear()
            for record in records:
                if not math.isfinite(record["loss"]):
                    raise TrainError(
                        f"the loss of {result.name} is {record['loss']} at step {record['step']}:"
                        " try a lower --lr or another --recipe"
                    )
            if ran < 2 or ran > settles or ends:
                progress.step(result.step, values[-1], result.tokens_per_second)
            if saves:
                save()
                clock += time.perf_counter() - now  # saving is not training
