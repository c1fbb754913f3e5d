"""Checkpoints: tensors in one file, all else in a JSON file that names it.

The tensors are written under a new name, then `checkpoint.json` is replaced by one that names them,
then the older tensors are removed: whenever the process dies, `checkpoint.json` names a whole file.
Sharded tensors are gathered and saved whole by the first process, and any number of processes can
read them. Random bits are no part of it: they depend on the seed and the step.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import files
from .errors import TrainError
from .tokenizer import Tokenizer
from .world import World

__all__ = ["Checkpoint", "find", "load", "restore", "save"]

_FORMAT = "minifloat train checkpoint"
_VERSION = 2
_INDEX = "checkpoint.json"


@dataclass(frozen=True)
class Checkpoint:
    """What was saved after `step` steps; `history` is the records of the steps until then."""

    step: int
    identity: str
    history: list[dict[str, Any]]
    extra: dict[str, Any]
    tokenizer: Tokenizer
    tensors: dict[str, Tensor]


class _Gathered(dict[str, Tensor]):
    """Whole tensors by name, in the first process; the others take part in making them."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def take(self, name: str, value: Tensor) -> None:
        whole = self.world.whole(value.detach())
        if self.world.leads:
            own = whole.untyped_storage().nbytes() == whole.nbytes
            self[name] = whole.contiguous() if own else whole.clone()


def _gather(model: nn.Module, optimizer: Optimizer, world: World) -> dict[str, Tensor]:
    tensors = _Gathered(world)
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:  # tied ones are saved once
            seen.add(id(value))
            tensors.take(f"model.{name}", value)
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors.take(f"optimizer.{name}.{key}", value)
    return tensors


def save(
    folder: Path,
    checkpoint: Checkpoint,
    model: nn.Module,
    optimizer: Optimizer,
    world: World,
) -> None:
    """Write `checkpoint` with the tensors of `model` and `optimizer`; all processes take part."""
    tensors = _gather(model, optimizer, world)
    if not world.leads:
        return
    safe = find_spec("safetensors") is not None
    path = folder / f"step-{checkpoint.step:08d}{'.safetensors' if safe else '.pt'}"

    def fill(name: str) -> None:
        if safe:
            from safetensors.torch import save_file

            save_file(tensors, name)
        else:
            torch.save(dict(tensors), name)

    files.write(path, fill)
    files.write_json(
        folder / _INDEX,
        {
            "format": _FORMAT,
            "version": _VERSION,
            "step": checkpoint.step,
            "tensors": path.name,
            "sha256": _sha256(path),
            "identity": checkpoint.identity,
            "extra": checkpoint.extra,
            "tokenizer": checkpoint.tokenizer.to_json(),
            "history": checkpoint.history,
        },
    )
    for old in folder.glob("step-*"):
        if old.name != path.name and old.suffix in (".safetensors", ".pt"):
            old.unlink(missing_ok=True)
    for half in files.unfinished(folder, "step-"):
        half.unlink(missing_ok=True)  # of a process that was killed while it wrote


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def find(folder: Path) -> dict[str, Any] | None:
    """The index of the checkpoint in `folder`; None where there is none."""
    path = folder / _INDEX
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise TrainError(f"{path}: cannot be read: {error}") from error
    try:
        index = json.loads(text)
    except json.JSONDecodeError as error:
        raise TrainError(
            f"{path}: is damaged (not JSON: {error.msg}); nothing was changed: use another"
            " --checkpoint-dir"
        ) from error
    if not isinstance(index, dict) or index.get("format") != _FORMAT:
        raise TrainError(f"{path}: is no checkpoint of minifloat train; nothing was changed")
    if index.get("version") != _VERSION:
        raise TrainError(
            f"{path}: is of version {index.get('version')}, and this minifloat reads {_VERSION};"
            " nothing was changed"
        )
    wanted = {"step": int, "tensors": str, "sha256": str, "identity": str, "history": list}
    for key, kind in {**wanted, "extra": dict, "tokenizer": dict}.items():
        if not isinstance(index.get(key), kind):
            raise TrainError(f"{path}: is damaged ({key} is missing or wrong); nothing was changed")
    return index


def load(folder: Path, identity: str) -> Checkpoint | None:
    """The checkpoint in `folder`, made by a run with this `identity`; None where there is none."""
    index = find(folder)
    if index is None:
        return None
    if index["identity"] != identity:
        raise TrainError(
            f"{folder}: was made by another run ({_difference(index['identity'], identity)});"
            " nothing was changed: give the same options, or another --checkpoint-dir"
        )
    path = folder / Path(index["tensors"]).name
    try:
        if _sha256(path) != index["sha256"]:
            raise TrainError(f"{path}: is damaged (its hash is wrong); nothing was changed")
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            tensors = load_file(path)
        else:
            tensors = torch.load(path, map_location="cpu", weights_only=True)
        tokenizer = Tokenizer.from_json(index["tokenizer"])
    except OSError as error:
        raise TrainError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ImportError as error:
        raise TrainError(f"{path}: needs safetensors: pip install safetensors") from error
    return Checkpoint(index["step"], identity, index["history"], index["extra"], tokenizer, tensors)


def _difference(saved: str, wanted: str) -> str:
    try:
        a, b = json.loads(saved), json.loads(wanted)
        keys = [k for k in sorted({*a, *b}) if a.get(k) != b.get(k)]
        return ", ".join(f"{k}: {a.get(k)} there, {b.get(k)} here" for k in keys)
    except (ValueError, AttributeError):
        return "its identity is unreadable"


def restore(checkpoint: Checkpoint, model: nn.Module, optimizer: Optimizer, world: World) -> None:
    """Put everything back; TrainError where the tensors are not this model's."""
    state: dict[str, Tensor] = {}
    moments: dict[str, dict[str, Tensor]] = {}
    for name, value in checkpoint.tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "model":
            state[rest] = value
        elif kind == "optimizer":
            owner_name, _, key = rest.rpartition(".")
            moments.setdefault(owner_name, {})[key] = value
    shared = model.state_dict(keep_vars=True)
    for name, owner in shared.items():
        twins = [n for n, v in shared.items() if v is owner and n in state]
        if name not in state and twins:
            state[name] = state[twins[0]]
    try:
        model.load_state_dict({k: world.divided(v, shared.get(k)) for k, v in state.items()})
    except RuntimeError as error:
        raise TrainError(f"the checkpoint does not fit the model: {error}") from error
    for name, parameter in model.named_parameters():
        if name in moments:
            optimizer.state[parameter] = {
                key: world.divided(value, parameter) if key != "step"
                else value.to(parameter.device) if _on_device(optimizer) else value
                for key, value in moments[name].items()
            }  # fmt: skip


def _on_device(optimizer: Optimizer) -> bool:
    """Fused and capturable optimizers keep their step counts where the parameters are."""
    return any(g.get("fused") or g.get("capturable") for g in optimizer.param_groups)
