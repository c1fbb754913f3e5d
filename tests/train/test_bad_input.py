"""What is wrong is said in one sentence, without a traceback, and nothing old is lost."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from minifloat.cli import main
from minifloat.models import Transformer
from minifloat.train import Options, TrainError, checkpoint, files, train
from minifloat.train.recipes import RECIPES, recipe_map

LAYERS = ["blocks.0.attention.qkv", "blocks.0.attention.out", "blocks.0.mlp"]


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"def f{i}(x): return x * {i} + {i * i}\n" for i in range(2000)))
    return str(path)


def options(tmp_path: Path, corpus: str, **changes: Any) -> Options:
    given = {"preset": "smoke", "steps": 8, "batch_size": 4, "device": "cpu", "compile": False}
    more = {"data": corpus, "baseline": False, "out": str(tmp_path / "out")}
    return Options(**{**given, **more, **changes})


def command(asked: Options, *more: str) -> int:
    given = ["--preset", asked.preset, "--steps", str(asked.steps), "--data", str(asked.data)]
    given += ["--batch-size", str(asked.batch_size), "--device", "cpu", "--no-compile"]
    return main(["train", *given, "--no-baseline", "--out", asked.out, *more])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--recipe", "mxpf8"],
            "delayed, current, block, mxfp8, nvfp4, bf16; did you mean 'mxfp8'",
        ),
        (["--preset", "gpt3"], "smoke, gpt2, 1b; did you mean 'gpt2'"),
        (["--data", "/nowhere"], "No such file"),
        (["--data", "{small}"], "too small"),
        (["--steps", "0"], "--steps 0: must be positive"),
        (["--lr", "-1"], "--lr -1.0: must be positive"),
        (["--lr", "inf"], "--lr inf: must be positive and finite"),
        (["--seed", str(2**64)], "must fit into 64 bits"),
        (["--device", "meta"], "--device meta"),
        (["--resume"], "--checkpoint-dir"),
        (["--stop-after", "3"], "--checkpoint-dir"),
        (["--device", "moon"], "--device moon"),
        (["--backend", "moon"], "--backend moon"),
        (["--device", "cpu", "--cuda-graphs"], "--cuda-graphs: needs a CUDA GPU"),
        (["--no-compile", "--compile-blocks"], "leave one of them out"),
        (["--no-compile", "--backend", "aot_eager"], "--backend and --no-compile"),
        (["--recipe", "nothing*=mxfp8"], "'nothing*' decides for no layer"),
        (["--recipe", "current,*.mlp=nvpf4"], "did you mean 'nvfp4'"),
        (["--recipe", "current,block"], "current and block have no pattern"),
        (["--recipe", "=current"], "'=current' is not PATTERN=NAME"),
        (["--recipe", ","], "names nothing"),
        (["--tokenizer", "bep"], "byte, bpe; did you mean 'bpe'"),
        (["--vocab-size", "512"], "add --tokenizer bpe"),
        (["--tokenizer", "bpe", "--vocab-size", "200"], "more than the 256 bytes"),
        (["--top-k", "2"], "needs --experts"),
        (["--experts", "2", "--top-k", "3"], "top_k=3"),
        (["--experts", "-1"], "experts=-1"),
        (["--checkpoint-dir", "{small}"], "is a file, and a folder is wanted"),
        (["--out", "{small}"], "is a file, and a folder is wanted"),
    ],
)
def test_it_is_said_in_a_sentence(tmp_path, capsys, arguments, said) -> None:
    small = tmp_path / "small.txt"
    small.write_text("def f(): ...")
    given = [part.format(small=small) for part in arguments]
    assert main(["train", "--out", str(tmp_path / "out"), *given]) == 1
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()
    with pytest.raises(TrainError):
        main(["train", "--out", str(tmp_path / "out"), *given, "--debug"])


def test_recipes_by_name_and_by_layer() -> None:
    assert recipe_map("Float8BlockScaling", LAYERS)[1] == dict.fromkeys(LAYERS, RECIPES["block"])
    name, chosen = recipe_map("*.mlp=nvfp4, *.qkv = none,*=mxfp8", LAYERS)
    assert list(map(chosen.get, LAYERS)) == [None, RECIPES["mxfp8"], RECIPES["nvfp4"]]
    assert name == "*.mlp=nvfp4,*.qkv=bf16,*=mxfp8"
    name, chosen = recipe_map("current,blocks.0.mlp=bf16", LAYERS)
    assert list(map(chosen.get, LAYERS)) == [RECIPES["current"], RECIPES["current"], None]
    assert name == "current,blocks.0.mlp=bf16"
    _, chosen = recipe_map("*.mlp=block", LAYERS)
    assert list(map(chosen.get, LAYERS)) == [None, None, RECIPES["block"]]


def test_nvfp4_by_name_keeps_the_last_layers() -> None:
    """Also in a map, where a pattern overrules it."""
    layers = [f"blocks.{i}.{part}" for i in range(4) for part in ("attention.qkv", "mlp")]
    name, chosen = recipe_map("nvfp4", layers)
    assert [of is None for of in chosen.values()] == [False] * 6 + [True] * 2
    assert name == "nvfp4 (2 of 8 layers in bf16)"
    _, chosen = recipe_map("nvfp4,blocks.3.mlp=nvfp4", layers)
    assert [of is None for of in chosen.values()] == [False] * 6 + [True, False]
    _, chosen = recipe_map("*=nvfp4", layers)
    assert set(chosen.values()) == {RECIPES["nvfp4"]}
    _, chosen = recipe_map("current", layers)
    assert set(chosen.values()) == {RECIPES["current"]}


def test_a_map_of_recipes_reaches_the_model(tmp_path, corpus) -> None:
    given = {"steps": 1, "recipe": "mxfp8,*.mlp=bf16"}
    part = train(options(tmp_path, corpus, **given))["runs"]["recipe"]
    whole = train(options(tmp_path, corpus, steps=1, recipe="mxfp8"))["runs"]["recipe"]
    assert part["recipe"] == "mxfp8,*.mlp=bf16"
    share = "quantized_share_of_gemm_flops"
    assert 0 < part[share] < whole[share]
    assert part["training_loss"] != whole["training_loss"]


# ------------------------------------------------------------------------------------- checkpoints
def contents(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("checkpoint.json", b"{", "is damaged"),
        ("checkpoint.json", b'{"weights": []}', "no checkpoint of minifloat"),
        ("checkpoint.json", b"[1, 2]", "no checkpoint of minifloat"),
        ("checkpoint.json", b"\xff\xfe", "cannot be read"),
        (
            "checkpoint.json",
            b'{"format": "minifloat train checkpoint", "version": 1}',
            "of version 1, and this minifloat reads 2",
        ),
        (
            "checkpoint.json",
            b'{"format": "minifloat train checkpoint", "version": 2}',
            "step is missing or wrong",
        ),
        ("tensors", b"garbage", "hash is wrong"),
        ("tensors", None, "cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_refused(tmp_path, corpus, capsys, name, content, said) -> None:
    asked, saved = options(tmp_path, corpus, steps=2), tmp_path / "saved"
    given = ["--checkpoint-dir", str(saved)]
    assert command(asked, *given, "--stop-after", "1") == 0
    (target,) = (saved / "recipe").glob("step-*")
    if name != "tensors":
        target = target.with_name(name)
    target.unlink() if content is None else target.write_bytes(content)
    before = contents(saved)
    capsys.readouterr()
    assert command(asked, *given, "--resume") == 1
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert before == contents(saved)


def test_a_checkpoint_of_another_model_is_refused(tmp_path, corpus) -> None:
    """Even one that says it is ours: its tensors do not fit."""
    saved = {"checkpoint_dir": str(tmp_path / "saved")}
    train(options(tmp_path, corpus, stop_after=1, **saved))
    train(options(tmp_path, corpus, stop_after=1, experts=2, checkpoint_dir=str(tmp_path / "b")))
    ours, theirs = (tmp_path / name / "recipe" for name in ("saved", "b"))
    index = json.loads((ours / "checkpoint.json").read_text())
    other = json.loads((theirs / "checkpoint.json").read_text())
    (theirs / "checkpoint.json").write_text(json.dumps({**other, "identity": index["identity"]}))
    before = contents(theirs)
    with pytest.raises(TrainError, match="does not fit the model"):
        train(options(tmp_path, corpus, resume=True, checkpoint_dir=str(tmp_path / "b")))
    assert before == contents(theirs)


def test_a_new_run_does_not_overwrite_checkpoints(tmp_path, corpus) -> None:
    saved = {"checkpoint_dir": str(tmp_path / "saved")}
    train(options(tmp_path, corpus, stop_after=2, **saved))
    before = contents(tmp_path / "saved")
    with pytest.raises(TrainError, match="recipe at step 2: --resume goes on"):
        train(options(tmp_path, corpus, **saved))
    with pytest.raises(TrainError, match="seed: 0 there, 1 here"):
        train(options(tmp_path, corpus, resume=True, seed=1, **saved))
    assert before == contents(tmp_path / "saved")


# ------------------------------------------------------------------------------------ full disks
def test_a_file_that_cannot_be_written_leaves_what_was_there(tmp_path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def fill(name: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(TrainError, match="disk is full"):
        files.write(path, fill)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "old"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("I/O error: No space left on device (os error 28)"), "disk is full"),
        (ValueError("I/O error: Disk quota exceeded (os error 122)"), "disk is full"),
        (ValueError("I/O error: Input/output error (os error 5)"), "written: Input/output error"),
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos"), "is there"),
    ],
)
def test_writers_of_tensors_have_errors_of_their_own(tmp_path, error, said) -> None:
    """As safetensors and torch.save tell a disk that is full: seen on one."""

    def fill(name: str) -> None:
        raise error

    with pytest.raises(TrainError, match=said):
        files.write(tmp_path / "file", fill)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_files_are_as_private_as_the_user_asks(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        files.write_text(tmp_path / "file", "text")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o666 & ~mask


def test_tensors_larger_than_files_may_be(tmp_path, corpus, capsys) -> None:
    """The real writer meets a real limit."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
        code = command(options(tmp_path, corpus), "--checkpoint-dir", str(tmp_path / "saved"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    error = capsys.readouterr().err
    assert code == 1
    assert "saved/recipe/step-" in error and error.count("\n") == 1, error
    assert not list((tmp_path / "saved" / "recipe").iterdir())


@pytest.mark.parametrize("at", ["tensors", "index"])
def test_a_disk_that_fills_up_loses_nothing_old(tmp_path, corpus, capsys, monkeypatch, at) -> None:
    """The second checkpoint meets a full disk; the first is whole, and the run goes on from it."""
    whole = tmp_path / "whole"
    assert command(options(tmp_path, corpus, out=str(whole))) == 0
    asked, saved = options(tmp_path, corpus), tmp_path / "saved"
    given = ["--checkpoint-dir", str(saved), "--checkpoint-every", "3"]
    real = os.fsync
    written: list[str] = []

    def full(handle: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{handle}")).name
        kind = "index" if "checkpoint.json" in name else "tensors" if ".step-" in name else ""
        written.append(kind)
        if kind == at and written.count(kind) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc")
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", full)
        capsys.readouterr()
        assert command(asked, *given) == 1
    error = capsys.readouterr().err
    assert "the disk is full" in error and "--resume" in error and error.count("\n") == 1
    assert checkpoint.find(saved / "recipe")["step"] == 3
    assert command(asked, *given, "--resume") == 0
    assert (tmp_path / "out" / "metrics.jsonl").read_text() == (whole / "metrics.jsonl").read_text()


def test_metrics_on_a_full_disk_are_told(tmp_path, corpus, capsys) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.jsonl").symlink_to("/dev/full")
    assert command(options(tmp_path, corpus)) == 1
    error = capsys.readouterr().err
    assert "the disk is full" in error and error.count("\n") == 1


# ---------------------------------------------------------------------------------------- memory
@pytest.mark.parametrize(
    "problem",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate"),
    ],
)
def test_a_device_out_of_memory_is_told(tmp_path, corpus, capsys, monkeypatch, problem) -> None:
    def forward(*arguments: Any) -> None:
        raise problem

    monkeypatch.setattr(Transformer, "forward", forward)
    assert command(options(tmp_path, corpus)) == 1
    error = capsys.readouterr().err
    assert "out of memory with 4 sequences of 32 tokens: try a smaller --batch-size" in error
    assert error.count("\n") == 1
    with pytest.raises(TrainError) as caught:
        command(options(tmp_path, corpus), "--debug")
    assert caught.value.__cause__ is problem


def test_other_errors_are_not_called_memory(tmp_path, corpus, monkeypatch) -> None:
    def forward(*arguments: Any) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(Transformer, "forward", forward)
    with pytest.raises(RuntimeError, match="something else"):
        command(options(tmp_path, corpus))


def test_a_loss_that_is_no_number_is_told(tmp_path, corpus, capsys) -> None:
    assert command(options(tmp_path, corpus), "--recipe", "bf16", "--lr", "1e30") == 1
    error = capsys.readouterr().err
    assert "the loss of bf16 is nan" in error and "--lr" in error and error.count("\n") == 1
