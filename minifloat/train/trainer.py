"""What the steps of a run share: a model, its optimizer, its data."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..inspect import inspect
from ..models import Transformer
from ..recipe import Recipe
from . import peak
from .data import Batches, Corpus, mixed
from .errors import TrainError
from .graph import ORDINARY, StepGraph
from .options import Options
from .world import World

__all__ = ["Job", "Trainer", "memory_explained", "rate"]

_CLIP = 1.0
_INSPECTED = 4  # sequences, of each process


@dataclass(frozen=True)
class Job:
    """What one run is: its name, the recipe of each layer, and how its name is written down."""

    name: str
    recipe: str
    recipes: dict[str, Recipe | None]


def rate(step: int, steps: int, highest: float) -> float:
    """Warm up over a tenth of the steps, then down a cosine to a hundredth.

    The last steps are small, so that the final loss tells more of the recipe than of the last
    batches.
    """
    warm = max(1, steps // 10)
    if step < warm:
        return highest * (step + 1) / warm
    part = (step - warm) / max(1, steps - warm)
    return highest * (0.01 + 0.495 * (1 + math.cos(math.pi * part)))


@contextlib.contextmanager
def memory_explained(options: Options) -> Iterator[None]:
    """Out of memory, in one sentence."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not _is_of_memory(error):
            raise
        raise TrainError(
            f"the device is out of memory with {options.batch_size} sequences of"
            f" {options.config.context} tokens: try a smaller --batch-size or --preset"
        ) from error


def _is_of_memory(error: BaseException | None) -> bool:
    """Whether it, or what it was raised from, is: compilers wrap. Of a CPU only the text says."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _freed(device: torch.device) -> None:
    """Let go of the run before, so that its memory is not counted, nor its graphs."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    peak.restart(device)


class Trainer:
    """Steps of `job`; a step depends on the seed, its number and the state that a checkpoint holds.

    In several processes the parameters are sharded, and each block is a graph.
    """

    def __init__(self, job: Job, options: Options, corpus: Corpus, world: World) -> None:
        assert options.batch_size
        self.options, self.world = options, world
        _freed(world.device)
        self.batches = Batches(
            corpus, options.seed, options.batch_size, options.config.context, world
        )
        torch.manual_seed(options.seed)
        self.model = Transformer(options.config, job.recipes, device=world.device)
        self.call: Callable[..., Tensor] = self.model
        if options.compile:
            backend = options.backend or "inductor"
            if options.compile_blocks or world.size > 1:
                for block in self.model.blocks:
                    block.compile(fullgraph=True, backend=backend)
            else:
                self.call = torch.compile(self.model, fullgraph=True, backend=backend)
        world.shard(self.model, self.model.blocks)
        # Alone on a GPU the learning rate is there, too, where a CUDA graph can read it.
        alone = world.device.type == "cuda" and world.size == 1
        self.lr = torch.zeros((), device=world.device) if alone else None
        decayed = [p for p in self.model.parameters() if p.ndim > 1]
        rest = [p for p in self.model.parameters() if p.ndim <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
            lr=1e-3 if self.lr is None else self.lr,
            betas=(0.9, 0.95),
            fused=True,
            capturable=alone,
        )
        self.graph = StepGraph(self._work) if options.cuda_graphs else None

    @property
    def settles(self) -> int:
        """Steps of this process until all are alike: compilation and capture are in them."""
        return 2 if self.graph is None else ORDINARY + 1

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        # Backward runs outside of autocast, which a graph has to be told.
        told = torch._functorch.config.patch(backward_pass_autocast="off")
        with told, torch.autocast(self.world.device.type, torch.bfloat16):
            return self.call(tokens, targets)

    def step(self, step: int) -> tuple[Tensor, float]:
        """(this process's loss, learning rate) of a step; neither waits for the device."""
        options = self.options
        assert options.steps and options.lr
        lr = rate(step, options.steps, options.lr)
        if self.lr is not None:
            self.lr.fill_(lr)
        else:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
        torch.manual_seed(mixed(options.seed, step, self.world.rank))  # stochastic rounding
        return (self.graph or self._work)(*self.batches.train(step)), lr

    def _work(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """What the device does in a step."""
        loss = self.loss(tokens, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), _CLIP, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def release(self) -> None:
        """Give back what only steps need."""
        if self.graph is not None:
            self.graph.release()

    def validate(self) -> float:
        """The mean loss, eager: it takes less time than a graph without gradients to compile."""
        batches = self.batches.valid(self.options.eval_batches)
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            losses = [self.loss(tokens, targets) for tokens, targets in batches]
        return float(self.world.mean(torch.stack(losses).double().mean()))

    def errors(self) -> dict[str, Any]:
        """What the casts of a step do, layer by layer: `minifloat.inspect`'s statistics.

        The step is eager, on the first sequences of validation. Delayed scaling takes it for one of
        its own, so it comes last; its gradients are dropped.
        """
        tokens, targets = self.batches.valid(1)[0]
        torch.manual_seed(mixed(self.options.seed, self.world.rank))
        with torch.compiler.set_stance("force_eager"), inspect(self.model) as report:
            self.loss(tokens[:_INSPECTED], targets[:_INSPECTED]).backward()  # type: ignore[no-untyped-call]
        self.optimizer.zero_grad(set_to_none=True)
        layers: dict[str, Any] = report.as_dict()["layers"]
        return layers
