"""The whole of `minifloat train`: two runs, and what is to be said about them."""

from __future__ import annotations

import platform
import shutil
import sys
import time
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
from .loop import Job, Result, run
from .options import Options
from .recipes import quantized_share, recipe_map

__all__ = ["train"]

BASELINE = "bf16"


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        said = str(error).splitlines()[0]
        raise TrainError(f"--device {name}: cannot be used here: {said}") from error
    return device


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


def _environment(device: torch.device) -> dict[str, Any]:
    capability = env.capability(device)
    return {
        "minifloat": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": env.triton_version() or "not installed",
        "device": env.device_name(device) + (f" (sm_{capability})" if capability else ""),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
    }


def _checked_folder(options: Options, names: list[str]) -> None:
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
        print(f"{folder}: no checkpoint there yet: starts at step 0")


def _jobs(options: Options) -> list[Job]:
    with torch.device("meta"):
        layers = Transformer(options.config, device="meta").recipe_names()
    name, recipes = recipe_map(options.recipe, layers)
    low = any(recipe is not None for recipe in recipes.values())
    jobs = [Job("recipe", name, recipes)] if low else []
    if options.baseline or not low:
        jobs.append(Job(BASELINE, "none", dict.fromkeys(layers)))
    return jobs


def train(options: Options) -> dict[str, Any]:
    """Run, print and write; the summary that `summary.json` holds."""
    began = time.perf_counter()
    options = options.checked()
    device = _device(options.device)
    backend = _backend(options, device)
    options = Options(**{**vars(options), "backend": backend})
    jobs = _jobs(options)
    _checked_folder(options, [job.name for job in jobs])
    corpus = data.load(options.data, options.config.context)
    parameters = sum(p.numel() for p in Transformer(options.config, device="meta").parameters())
    print(
        f"{options.preset}: {parameters / 1e6:.2f}M parameters, {options.steps} steps of"
        f" {options.batch_size} x {options.config.context} bytes of {corpus.source}"
        f" ({corpus.files} files, {len(corpus.train) / 1e6:.1f} MB and"
        f" {len(corpus.valid) / 1e6:.1f} MB for validation)"
    )
    how = f"torch.compile(fullgraph=True, backend={backend!r})" if options.compile else "eager"
    print(f"{env.device_name(device)}, {how}; recipe {jobs[0].recipe}", flush=True)
    out = Path(options.out)
    results = []
    try:
        out.mkdir(parents=True, exist_ok=True)
        with open(out / "metrics.jsonl", "w", encoding="utf-8") as metrics:
            for job in jobs:
                results.append(run(job, options, corpus, device, metrics))
    except OSError as error:
        raise TrainError(f"--out {out}: {error.strerror or error}") from error
    summary = _summary(options, device, corpus, jobs, results)
    summary["parameters"] = parameters
    summary["seconds"] = time.perf_counter() - began
    _write(out, summary, results)
    return summary


def _summary(
    options: Options,
    device: torch.device,
    corpus: data.Corpus,
    jobs: list[Job],
    results: list[Result],
) -> dict[str, Any]:
    flops = gemm_flops(options.config)
    runs = {}
    for job, result in zip(jobs, results, strict=True):
        plans = {recipe.plan() for recipe in job.recipes.values() if recipe is not None}
        backends = sorted({str(served(plan, device)[0]) for plan in plans})
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
        "data": {"source": corpus.source, "files": corpus.files, "sha256": corpus.digest},
        "runs": runs,
        "validation_gap": gap,
        "environment": _environment(device),
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
