"""Checkpoints of Transformer Engine, whose delayed scaling is pickles, into plain tensors.

`<module>._extra_state` becomes `<module>.delayed.*`, or `<module>.fc1.delayed.*` and `fc2`'s where
the weights next to it are a LayerNormMLP's, or nothing where it holds no such state. The pickles
are read by an unpickler that makes tensors and containers; recipes and enums become inert objects,
and everything else is refused by name.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import tempfile
import types
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from ..extra_state import DELAYED_KEYS, SUFFIX, payload
from ..recipe.delayed import BACKWARD, FORWARD

__all__ = ["convert_checkpoint", "convert_state_dict", "read_extra_state"]

_RECIPES = "transformer_engine.common.recipe"
_STORAGES = {
    f"{kind}Storage"
    for kind in ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long",
                 "Short")
}  # fmt: skip


class _Refused(pickle.UnpicklingError):
    """A pickle that is whole, and holds what is not read."""


class _Inert:
    """Stands for an object of a class that is not here; it takes any state and does nothing."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Inert:
        return object.__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def _member(owner: Any, name: str) -> _Inert:
    """What Python 3.11 pickles an enum's member as: `getattr(class, name)`."""
    if owner is not _Inert:
        raise _Refused("builtins.getattr: of anything but a recipe's enum: refused")
    return _Inert()


def _storage(data: bytes) -> Any:
    """`torch.storage._load_from_bytes`, which would unpickle whatever there is."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


_ALLOWED: dict[tuple[str, str], Any] = {
    ("_codecs", "encode"): __import__("_codecs").encode,
    ("builtins", "getattr"): _member,
    ("builtins", "set"): set,
    ("collections", "OrderedDict"): OrderedDict,
    ("io", "BytesIO"): io.BytesIO,
    ("_io", "BytesIO"): io.BytesIO,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("torch._utils", "_rebuild_parameter"): torch._utils._rebuild_parameter,
    ("torch._utils", "_rebuild_tensor"): torch._utils._rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch.storage", "TypedStorage"): torch.storage.TypedStorage,
    ("torch.storage", "UntypedStorage"): torch.UntypedStorage,
    ("torch.storage", "_load_from_bytes"): _storage,
    **{
        ("torch", name): value for name, value in vars(torch).items()
        if isinstance(value, torch.dtype) or name in _STORAGES
    },
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = _ALLOWED.get((module, name))
        if found is not None:
            return found
        if module == _RECIPES or module.startswith(f"{_RECIPES}."):
            return _Inert
        raise _Refused(
            f"{module}.{name}: refused; a checkpoint may hold tensors, numbers, strings and "
            "containers of them, and Transformer Engine's recipes"
        )


def _load(file: IO[bytes], **kwargs: Any) -> Any:
    return _Unpickler(file, **kwargs).load()


_MODULE: Any = types.SimpleNamespace(
    Unpickler=_Unpickler,
    load=_load,
    loads=lambda data, **kwargs: _load(io.BytesIO(data), **kwargs),
    UnpicklingError=pickle.UnpicklingError,
    __name__="minifloat.convert",
)


# ------------------------------------------------------------------------------------ one entry
def read_extra_state(
    entry: Any, name: str = SUFFIX, layers: Sequence[str] = ("",), members: int = 1
) -> dict[str, Tensor]:
    """`delayed.*` tensors of one entry; {} where it holds no delayed scaling.

    `layers` are the prefixes of those that share the entry, in the order of their slots; each is
    `members` linear layers side by side: there the slots of one come before those of the next, here
    the members of a slot.
    """
    data = payload(entry)
    if data is None:
        raise ValueError(
            f"{name}: got {type(entry).__name__}; an extra state is None, a uint8 tensor or a "
            "BytesIO"
        )
    if not data:
        return {}
    try:
        if data.startswith(b"PK") or isinstance(entry, io.BytesIO):
            state = _torch_load(io.BytesIO(data))
        else:
            state = _load(io.BytesIO(data))
    except Exception as error:
        raise ValueError(f"{name}: {error}") from error
    if not isinstance(state, Mapping) or not any(key in state for key in DELAYED_KEYS):
        return {}
    out: dict[str, Tensor] = {}
    for tag, direction, slots in (("fwd", "forward", FORWARD), ("bwd", "backward", BACKWARD)):
        scale: Any = state.get(f"scale_{tag}")
        history: Any = state.get(f"amax_history_{tag}")
        count = len(layers) * members
        n = len(slots) * count
        if not _is_state(scale, history, n):
            of = "a linear layer has" if count == 1 else f"{count} linear layers have"
            raise ValueError(
                f"{name}: scale_{tag} and amax_history_{tag}: got {_shape(scale)} and "
                f"{_shape(history)}; {of} ({n},) and (length, {n})"
            )
        # [length, layer, slot, member] of [length, layer, member, slot]
        shape = (-1, len(layers), members, len(slots))
        scales, histories = (t.float().reshape(shape).transpose(2, 3) for t in (scale, history))
        for j, layer in enumerate(layers):
            rows = histories[:, j].clone()
            for i, slot in enumerate(slots):
                out[f"{layer}delayed.scale_{slot}"] = scales[0, j, i].clone()
                out[f"{layer}delayed.amax_{slot}"] = rows[0, i].clone()
            rows[0] = 0.0  # the step that is being recorded, which is amax_* here
            out[f"{layer}delayed.history_{direction}"] = rows.reshape(len(rows), -1)
    return out


def _members(state: Mapping[str, Any], prefix: str) -> int:
    """How many linear layers a module is: experts have a weight each, or one of all."""
    whole = state.get(f"{prefix}weight")
    if isinstance(whole, Tensor):
        return whole.shape[0] if whole.dim() == 3 else 1
    each = 0
    while f"{prefix}weight{each}" in state:
        each += 1
    return max(each, 1)


def _is_state(scale: Any, history: Any, n: int) -> bool:
    tensors = isinstance(scale, Tensor) and isinstance(history, Tensor)
    return (
        tensors and scale.shape == (n,) and history.dim() == 2
        and history.shape[1] == n and history.shape[0] > 0
    )  # fmt: skip


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__


def _torch_load(file: Any) -> Any:
    return torch.load(file, map_location="cpu", pickle_module=_MODULE, weights_only=False)


# ----------------------------------------------------------------------------- whole checkpoints
def convert_state_dict(state: Any, path: str = "") -> tuple[Any, int]:
    """(`state` with every extra state converted, at any depth; how many there were)."""
    if isinstance(state, list | tuple) and type(state) in (list, tuple):
        made = [convert_state_dict(value, path) for value in state]
        return type(state)(value for value, _ in made), sum(n for _, n in made)
    if not isinstance(state, dict):
        return state, 0
    out: dict[Any, Any] = OrderedDict() if isinstance(state, OrderedDict) else {}
    if isinstance(out, OrderedDict):
        vars(out).update(vars(state))  # nn.Module.state_dict's `_metadata`
    count = 0
    for key, value in state.items():
        if isinstance(key, str) and (key == SUFFIX or key.endswith(f".{SUFFIX}")):
            prefix = key[: -len(SUFFIX)]
            layers = ("fc1.", "fc2.") if f"{prefix}fc1_weight" in state else ("",)
            found = read_extra_state(value, f"{path}{key}", layers, _members(state, prefix))
            out.update({prefix + name: tensor for name, tensor in found.items()})
            count += 1
        else:
            out[key], inner = convert_state_dict(value, f"{path}{key}/")
            count += inner
    return out, count


_TORCH = (".pt", ".pth", ".bin", ".ckpt")  # as files of torch.save are named


def convert_checkpoint(source: str | Path, target: str | Path) -> int:
    """Read `source`, write it to `target` in the same format, converted; how many entries were.

    A file of `torch.save` or of safetensors. `target` appears whole or not at all; where it is a
    link, what it leads to.
    """
    source, target = Path(source), Path(target)
    if source.is_dir():
        raise ValueError("it is a folder; a file of torch.save or safetensors is needed")
    safe = _is_safetensors(source)
    if target.suffix in (_TORCH if safe else (".safetensors",)):
        what = "safetensors" if safe else "torch.save"
        raise ValueError(
            f"cannot be written to {target}: it is a file of {what}, and is written as one; "
            "give it a name that says so"
        )
    if safe:
        tensors, metadata = _read_safetensors(source)
        made, count = convert_state_dict(tensors)
        _replace(target, lambda path: _write_safetensors(path, made, metadata))
        return count
    made, count = convert_state_dict(_read_torch(source))
    _replace(target, lambda path: torch.save(made, path))
    return count


def _read_torch(source: Path) -> Any:
    try:
        return _torch_load(source)
    except (OSError, _Refused):
        raise
    except Exception as error:
        raise ValueError(f"neither a file of torch.save nor of safetensors: {error}") from error


def _replace(target: Path, write: Callable[[str], None]) -> None:
    target = Path(os.path.realpath(target))
    what = None
    if target.is_dir():
        what = "it is a folder"
    elif target.exists() and not target.is_file():
        what = "it is a device or a pipe, which a file would replace"
    elif not target.parent.is_dir():
        what = f"there is no folder {target.parent}"
    if what is not None:
        raise ValueError(f"cannot be written to {target}: {what}")
    handle, path = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    os.close(handle)
    try:
        write(path)
        os.chmod(path, 0o666 & ~_umask())
        os.replace(path, target)
    except BaseException:
        os.unlink(path)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _is_safetensors(path: Path) -> bool:
    """A length of 8 bytes and that much JSON: no pickle and no zip file begins so."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= path.stat().st_size - 8:
            return False
        try:
            return isinstance(json.loads(file.read(length)), dict)
        except ValueError:
            return False


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str] | None]:
    from safetensors import safe_open

    with safe_open(str(path), "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118


def _write_safetensors(path: str, tensors: Any, metadata: dict[str, str] | None) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path, metadata=metadata)
