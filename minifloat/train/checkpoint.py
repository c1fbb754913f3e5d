"""Checkpoints: tensors in one file, all else in a JSON file that names it.

The tensors are written under a new name, then `checkpoint.json` is replaced by one that names them,
then the older tensors are removed: whenever the process dies, `checkpoint.json` names a whole file.
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

__all__ = ["Checkpoint", "find", "load", "restore", "save"]

_FORMAT = "minifloat train checkpoint"
_VERSION = 1
_INDEX = "checkpoint.json"


@dataclass(frozen=True)
class Checkpoint:
    """What was saved after `step` steps; `history` is the records of the steps until then."""

    step: int
    identity: str
    history: list[dict[str, Any]]
    extra: dict[str, Any]
    tensors: dict[str, Tensor]


def _gather(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:  # tied ones are saved once
            seen.add(id(value))
            own = value.untyped_storage().nbytes() == value.nbytes
            kept = value.detach()
            tensors[f"model.{name}"] = kept.contiguous() if own else kept.clone()
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{name}.{key}"] = value.detach().contiguous()
    tensors["rng.cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["rng.cuda"] = torch.cuda.get_rng_state()
    return tensors


def save(
    folder: Path,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    step: int,
    identity: str,
    history: list[dict[str, Any]],
    extra: dict[str, Any],
) -> None:
    tensors = _gather(model, optimizer)
    safe = find_spec("safetensors") is not None
    path = folder / f"step-{step:08d}{'.safetensors' if safe else '.pt'}"

    def fill(name: str) -> None:
        if safe:
            from safetensors.torch import save_file

            save_file(tensors, name)
        else:
            torch.save(tensors, name)

    files.write(path, fill)
    files.write_json(
        folder / _INDEX,
        {
            "format": _FORMAT,
            "version": _VERSION,
            "step": step,
            "tensors": path.name,
            "sha256": _sha256(path),
            "identity": identity,
            "extra": extra,
            "history": history,
        },
    )
    for old in folder.glob("step-*"):
        if old.name != path.name and old.suffix in (".safetensors", ".pt"):
            old.unlink(missing_ok=True)


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
    for key, kind in {**wanted, "extra": dict}.items():
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
    except OSError as error:
        raise TrainError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ImportError as error:
        raise TrainError(f"{path}: needs safetensors: pip install safetensors") from error
    return Checkpoint(index["step"], identity, index["history"], index["extra"], tensors)


def _difference(saved: str, wanted: str) -> str:
    try:
        a, b = json.loads(saved), json.loads(wanted)
        keys = [k for k in sorted({*a, *b}) if a.get(k) != b.get(k)]
        return ", ".join(f"{k}: {a.get(k)} there, {b.get(k)} here" for k in keys)
    except (ValueError, AttributeError):
        return "its identity is unreadable"


def restore(checkpoint: Checkpoint, model: nn.Module, optimizer: Optimizer) -> None:
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
        model.load_state_dict(state)
    except RuntimeError as error:
        raise TrainError(f"the checkpoint does not fit the model: {error}") from error
    for name, parameter in model.named_parameters():
        if name in moments:
            optimizer.state[parameter] = {
                key: value if key == "step" and not _on_device(optimizer)
                else value.to(parameter.device)
                for key, value in moments[name].items()
            }  # fmt: skip
    torch.set_rng_state(checkpoint.tensors["rng.cpu"])
    if torch.cuda.is_available() and "rng.cuda" in checkpoint.tensors:
        torch.cuda.set_rng_state(checkpoint.tensors["rng.cuda"])


def _on_device(optimizer: Optimizer) -> bool:
    """Fused and capturable optimizers keep their step counts where the parameters are."""
    return any(g.get("fused") or g.get("capturable") for g in optimizer.param_groups)
