"""The whole of `minifloat train`: two runs, and what is to be said about them."""

from __future__ import annotations

import contextlib
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from .. import env
from .._version import __version__
from ..models import Transformer, gemm_flops
from ..modules.advice import served
from . import checkpoint, data, files, html, plot
from .errors import TrainError
from .loop import Result, run
from .metrics import Metrics
from .options import Options
from .recipes import quantized_share, recipe_map
from .repeats import repeatable
from .trainer import Job
from .world import World, joined

__all__ = ["train"]

BASELINE = "bf16"


def _backend(options: Options, device: torch.device) -> str | None:
    """What compiles; on a CPU the quickest to start, which is as quick to run at these sizes."""
    if not options.compile:
        return None
    if options.backend is not None:
        known = [*torch._dynamo.list_backends(), "eager", "aot_eager"]
        if options.backend not in known:
            raise TrainError(
                f"--backend {options.backend}: there are {', '.join(sorted({*known}))}"
            )
        if options.backend == "inductor" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
            raise TrainError("--backend inductor: needs a C++ compiler, and there is none here")
        return options.backend
    return "inductor" if device.type == "cuda" else "aot_eager"


def _blocks(options: Options, device: torch.device) -> bool:
    """Whether blocks are compiled one by one: in a CUDA graph that is as quick to run."""
    if options.compile_blocks is None:
        return options.compile and device.type == "cuda"
    return options.compile_blocks


def _graphs(options: Options, world: World) -> bool:
    """Whether a step is a CUDA graph."""
    gpu = world.device.type == "cuda"
    if options.cuda_graphs and not gpu:
        raise TrainError(f"--cuda-graphs: needs a CUDA GPU, and this runs on {world.device.type}")
    if options.cuda_graphs and world.size > 1:
        raise TrainError("--cuda-graphs: is for one process: FSDP2 gathers outside of graphs")
    return gpu and world.size == 1 if options.cuda_graphs is None else options.cuda_graphs


def _repeats(options: Options, world: World) -> bool:
    """Whether PyTorch is told to repeat; on a CPU it does so unasked.

    What a checkpoint is for is to go on as if nothing had happened.
    """
    if world.device.type != "cuda":
        return False
    asked = options.deterministic
    return options.checkpoint_dir is not None if asked is None else asked


def _environment(world: World) -> dict[str, Any]:
    device = world.device
    capability = env.capability(device)
    return {
        "minifloat": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": env.triton_version() or "not installed",
        "device": env.device_name(device) + (f" (sm_{capability})" if capability else ""),
        "processes": world.size,
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
    }


def _checked_folder(options: Options, names: list[str], world: World) -> None:
    """A new run does not overwrite the checkpoints of another."""
    if options.checkpoint_dir is None:
        return
    folder = Path(options.checkpoint_dir)
    if folder.exists() and not folder.is_dir():
        raise TrainError(f"--checkpoint-dir {folder}: is a file, and a folder is wanted")
    found = {name: checkpoint.find(folder / name) for name in names}
    there = [f"{name} at step {index['step']}" for name, index in found.items() if index]
    if there and not options.resume:
        raise TrainError(
            f"--checkpoint-dir {folder}: holds {' and '.join(there)}: --resume goes on with that,"
            " and a new run needs another folder"
        )
    if options.resume and not there:
        world.say(f"{folder}: no checkpoint there yet: starts at step 0")


def _jobs(options: Options) -> list[Job]:
    with torch.device("meta"):
        layers = Transformer(options.config, device="meta").recipe_names()
    name, recipes = recipe_map(options.recipe, layers)
    low = any(recipe is not None for recipe in recipes.values())
    jobs = [Job("recipe", name, recipes)] if low else []
    if options.baseline or not low:
        jobs.append(Job(BASELINE, BASELINE, dict.fromkeys(layers)))
    return jobs


def train(options: Options) -> dict[str, Any]:
    """Run, print and write; the summary that `summary.json` holds."""
    began = time.perf_counter()
    with joined(options.device) as world:
        with world.together():
            options = options.checked()
            options = replace(
                options,
                backend=_backend(options, world.device),
                compile_blocks=_blocks(options, world.device),
                cuda_graphs=_graphs(options, world),
                deterministic=_repeats(options, world),
            )
            _checked_shares(options, world)
            jobs = _jobs(options)
            _checked_folder(options, [job.name for job in jobs], world)
            assert options.vocab_size
            corpus = data.load(options.data, options.config.context, options.vocab_size)
        world.agree(corpus.digest, f"{corpus.source}: the text")
        parameters = sum(p.numel() for p in Transformer(options.config, device="meta").parameters())
        _announce(options, world, corpus, parameters, jobs[0].recipe)
        out = Path(options.out)
        lines = Metrics(out / "metrics.jsonl" if world.leads else None)
        with _located(world), repeatable(bool(options.deterministic)), lines as metrics:
            results = [run(job, options, corpus, world, metrics) for job in jobs]
        summary = _summary(options, world, corpus, jobs, results)
        summary["parameters"] = parameters
        summary["seconds"] = time.perf_counter() - began
        if world.leads:
            _write(out, summary, results)
    return summary


@contextlib.contextmanager
def _located(world: World) -> Iterator[None]:
    """An error in the middle of a run names the process, if there are several."""
    try:
        yield
    except TrainError as error:
        if world.size == 1 or error.told:
            raise
        raise TrainError(f"process {world.rank}: {error}") from error


def _checked_shares(options: Options, world: World) -> None:
    assert options.batch_size
    if options.batch_size % world.size:
        raise TrainError(
            f"--batch-size {options.batch_size}: {world.size} processes cannot share it: it must be"
            f" a multiple of {world.size}"
        )


def _announce(
    options: Options, world: World, corpus: data.Corpus, parameters: int, recipe: str
) -> None:
    config = options.config
    experts = f" in {config.experts} experts, {config.top_k} a token" if config.experts else ""
    world.say(
        f"{options.preset}: {parameters / 1e6:.2f}M parameters{experts}, {options.steps} steps of"
        f" {options.batch_size} x {config.context} {options.unit}s of {corpus.source}"
        f" ({corpus.files} files, {corpus.sizes[0] / 1e6:.1f} MB and"
        f" {corpus.sizes[1] / 1e6:.1f} MB for validation)"
    )
    if corpus.tokenizer.merges:
        world.say(
            f"{corpus.tokenizer.vocab_size} tokens, each {corpus.bytes_per_token:.2f} bytes on"
            " average; losses are per token"
        )
    how = "eager"
    if options.compile:
        each = ", each block" if options.compile_blocks or world.size > 1 else ""
        how = f"torch.compile(fullgraph=True, backend={options.backend!r}){each}"
    if options.cuda_graphs:
        how += ", in a CUDA graph"
    if options.deterministic:
        how += ", deterministic"
    several = f", {world.size} processes" if world.size > 1 else ""
    world.say(f"{env.device_name(world.device)}{several}, {how}; recipe {recipe}")


def _summary(
    options: Options,
    world: World,
    corpus: data.Corpus,
    jobs: list[Job],
    results: list[Result],
) -> dict[str, Any]:
    flops = gemm_flops(options.config)
    runs = {}
    for job, result in zip(jobs, results, strict=True):
        plans = {recipe.plan() for recipe in job.recipes.values() if recipe is not None}
        backends = sorted({str(served(plan, world.device)[0]) for plan in plans})
        runs[result.name] = {
            **result.summary(),
            "quantized_share_of_gemm_flops": quantized_share(flops, job.recipes),
            "gemm_backends": backends,
        }
    gap = None
    validation = [result.validation for result in results]
    if len(results) == 2 and validation[0] is not None and validation[1] is not None:
        gap = validation[0] / validation[1] - 1
    return {
        "options": {k: v for k, v in vars(options).items() if k != "debug"},
        "data": {
            "source": corpus.source,
            "files": corpus.files,
            "sha256": corpus.digest,
            "unit": options.unit,
            "bytes_per_token": corpus.bytes_per_token,
        },
        "runs": runs,
        "validation_gap": gap,
        "environment": _environment(world),
    }


def _write(out: Path, summary: dict[str, Any], results: list[Result]) -> None:
    curves = {result.name: [(r["step"], r["loss"]) for r in result.history] for result in results}
    files.write_json(out / "summary.json", summary)
    files.write_text(out / "report.html", html.report(summary, curves))
    print(table(summary))
    wrote = [out / "report.html", out / "summary.json", out / "metrics.jsonl"]
    if find_spec("matplotlib") is None:
        print("no plot: matplotlib is not installed (pip install 'minifloat[train]')")
    else:
        plot.draw(out / "curves.png", curves, summary)
        wrote.append(out / "curves.png")
    stopped = [r for r in results if r.validation is None]
    if stopped:
        print(f"stopped at step {stopped[0].step}: --resume goes on", file=sys.stderr)
    print("wrote", ", ".join(map(str, wrote)), flush=True)


def table(summary: dict[str, Any]) -> str:
    """The comparison, for a terminal."""
    rows = [["", "recipe", "validation loss", "tokens/s", "peak memory", "quantized GEMM FLOPs"]]
    for name, entry in summary["runs"].items():
        rows.append(html.cells(name, entry))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [""]
    for row in rows:
        lines.append("  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)).rstrip())
    if summary["validation_gap"] is not None:
        lines.append(f"validation loss {summary['validation_gap']:+.2%} against bf16")
    backends = sorted({b for entry in summary["runs"].values() for b in entry["gemm_backends"]})
    if "emulated" in backends:
        lines.append("quantized products are emulated here: exact, and slower than bf16")
    lines.append(f"{summary['seconds']:.0f} s in all")
    return "\n".join(lines)
