"""`minifloat train` in two processes: the curve, the checkpoints and the errors of one."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.tensor import DTensor

from minifloat.train import Options, TrainError, data, train
from minifloat.train.loop import run
from minifloat.train.metrics import Metrics
from minifloat.train.run import _jobs
from minifloat.train.trainer import Trainer
from minifloat.train.world import World

from ..tensors import world

CPU = torch.device("cpu")
STEPS = 6


def text(folder: Path) -> str:
    path = folder / "text.txt"
    path.write_text("".join(f"def f{i}(x): return x * {i} + {i * i}\n" for i in range(2000)))
    return str(path)


def shared(rank: int) -> Path:
    """A folder that both ranks have, with a text in it."""
    made = [tempfile.mkdtemp() if rank == 0 else ""]
    distributed.broadcast_object_list(made, src=0)
    if rank == 0:
        text(Path(made[0]))
    distributed.barrier()
    return Path(made[0])


def options(folder: Path, **changes: Any) -> Options:
    given = {"preset": "smoke", "steps": STEPS, "batch_size": 4, "device": "cpu", "compile": False}
    more = {"baseline": False, "data": str(folder / "text.txt"), "out": str(folder / "out")}
    return Options(**{**given, **more, **changes})


@contextlib.contextmanager
def fp32() -> Iterator[None]:
    """Without autocast, processes and one differ by the order of fp32 sums alone."""
    real, torch.autocast = torch.autocast, lambda *a, **k: contextlib.nullcontext()  # type: ignore
    try:
        yield
    finally:
        torch.autocast = real  # type: ignore[misc]


def alone(asked: Options) -> tuple[list[float], float | None]:
    """Losses of the steps and of validation, by one process that has all the rows."""
    asked = asked.checked()
    (job,) = _jobs(asked)
    corpus = data.load(asked.data, asked.config.context, asked.vocab_size or 256)
    result = run(job, asked, corpus, World(CPU), Metrics(None))
    return [record["loss"] for record in result.history], result.validation


def together(asked: Options) -> tuple[list[float], float | None]:
    """The same by all; every process knows the summary, the first one wrote the metrics."""
    summary = train(asked)
    distributed.barrier()
    lines = (Path(asked.out) / "metrics.jsonl").read_text().splitlines()
    distributed.barrier()
    (made,) = summary["runs"].values()
    return [json.loads(line)["loss"] for line in lines], made["validation"]


def check_curve(asked: dict[str, Any], tolerance: float, rank: int) -> None:
    """Also in two processes the losses are those of one, up to the order of sums."""
    folder = shared(rank)
    exact = fp32() if tolerance < 1e-3 else contextlib.nullcontext()
    with exact:
        expected, expected_validation = alone(options(folder, **asked))
        found, validation = together(options(folder, **asked))
    assert found == pytest.approx(expected, rel=tolerance)
    assert validation == pytest.approx(expected_validation, rel=tolerance)
    assert len(set(found)) == STEPS


def check_sharded(rank: int) -> None:
    folder = shared(rank)
    asked = options(folder).checked()
    corpus = data.load(asked.data, asked.config.context)
    made = Trainer(_jobs(asked)[0], asked, corpus, World(CPU, rank, world.SIZE))
    for name, parameter in made.model.named_parameters():
        assert isinstance(parameter, DTensor), name
        assert parameter.to_local().numel() == parameter.numel() / 2, name


def check_resume(recipe: str, compiled: bool, rank: int) -> None:
    """Bit-equal in as many processes; in fewer or more, up to the order of sums."""
    folder = shared(rank)
    same = {"recipe": recipe, "compile": compiled, "checkpoint_every": 100}
    whole, _ = together(options(folder, **same))
    saved = {**same, "checkpoint_dir": str(folder / "saved")}
    part, _ = together(options(folder, stop_after=3, **saved))
    assert part == whole[:3]
    kept = sorted(p.name for p in (folder / "saved" / "recipe").iterdir())
    assert kept == ["checkpoint.json", "step-00000003.safetensors"]
    found, validation = together(options(folder, resume=True, **saved))
    assert found == whole and validation is not None


def check_other_number(rank: int) -> None:
    """Saved by two and resumed by one, and the other way round."""
    folder = shared(rank)
    with fp32():
        expected, expected_validation = alone(options(folder, recipe="mxfp8"))
        two = {"recipe": "mxfp8", "checkpoint_dir": str(folder / "two")}
        together(options(folder, stop_after=3, **two))
        if rank == 1:  # each a copy: both go on with it, and save at the end
            two["checkpoint_dir"] = str(shutil.copytree(folder / "two", folder / "copy"))
        distributed.barrier()
        found, validation = alone(options(folder, resume=True, **two))
        assert found == pytest.approx(expected, rel=1e-5)
        assert validation == pytest.approx(expected_validation, rel=1e-5)
        one = {"recipe": "mxfp8", "checkpoint_dir": str(folder / "one")}
        if rank == 0:
            alone(options(folder, stop_after=3, **one))
        distributed.barrier()
        found, validation = together(options(folder, resume=True, **one))
        assert found == pytest.approx(expected, rel=1e-5)
        assert validation == pytest.approx(expected_validation, rel=1e-5)


def check_errors(rank: int) -> None:
    """All stop, and the first one says why."""
    folder = shared(rank)
    for changes, said in (
        ({"batch_size": 3}, "2 processes cannot share it"),
        ({"recipe": "mxpf8"}, "did you mean 'mxfp8'"),
        ({"data": "/nowhere" if rank else str(folder / "text.txt")}, "process 1: --data /nowhere"),
    ):
        with pytest.raises(TrainError, match=said) as caught:
            train(options(folder, **changes))
        assert caught.value.told is (rank == 1)
    if rank == 1:
        (folder / "other.txt").write_text("x = 1\n" * 2000)
    own = folder / ("other.txt" if rank else "text.txt")
    distributed.barrier()
    with pytest.raises(TrainError, match="the text of process 1 differs"):
        train(options(folder, data=str(own)))
    assert not (folder / "out").exists()


QUICK: world.Checks = {
    "curve_mxfp8": partial(check_curve, {"recipe": "mxfp8"}, 1e-6),
    "sharded": check_sharded,
    "resume": partial(check_resume, "delayed", False),
    "errors": check_errors,
}
DEEP: world.Checks = {
    "curve_bf16": partial(check_curve, {"recipe": "bf16"}, 2e-3),
    "curve_fp32": partial(check_curve, {"recipe": "bf16"}, 1e-6),
    "curve_delayed_compiled": partial(check_curve, {"recipe": "delayed", "compile": True}, 1e-4),
    "curve_current": partial(check_curve, {"recipe": "current"}, 2e-3),
    "curve_experts": partial(check_curve, {"recipe": "bf16", "experts": 4}, 2e-3),
    "curve_bpe": partial(check_curve, {"tokenizer": "bpe", "vocab_size": 300}, 2e-3),
    "resume_nvfp4_compiled": partial(check_resume, "nvfp4", True),
    "other_number": check_other_number,
}


@pytest.mark.parametrize("name", QUICK)
def test_two_processes_train_as_one(name: str) -> None:
    world.passes(__name__, "QUICK", name)


@pytest.mark.deep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", DEEP)
def test_two_processes_train_as_one_deeply(name: str) -> None:
    world.passes(__name__, "DEEP", name)


@pytest.mark.deep
@pytest.mark.parametrize("wrong", [False, True])
def test_torchrun_starts_it(tmp_path, wrong: bool) -> None:
    given = ["--preset", "smoke", "--steps", "3", "--device", "cpu", "--no-compile"]
    given += ["--data", text(tmp_path), "--out", str(tmp_path / "out")]
    given += ["--batch-size", "3"] if wrong else []
    ran = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "-m", "minifloat", "train", *given],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )  # fmt: skip
    if wrong:
        assert ran.returncode
        assert ran.stderr.count("minifloat train: --batch-size 3") == 1
        return
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("against bf16") == 1 and "2 processes" in ran.stdout
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["validation_gap"] is not None
