"""Transformer Engine's `_extra_state`: recognised from its bytes, never unpickled.

An entry is None, empty, or the pickle of a dict: a uint8 tensor of its bytes, or a BytesIO that
`torch.save` wrote. One that holds no delayed scaling holds nothing of use here and is ignored.
Tensors of delayed scaling cannot be had without running the pickle, so those are refused;
`minifloat convert-checkpoint` turns them into plain tensors.
"""

from __future__ import annotations

import io
import pickletools
import zipfile
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["DELAYED_KEYS", "STATELESS", "SUFFIX", "payload", "refusal"]

SUFFIX = "_extra_state"
DELAYED_KEYS = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")
STATELESS = (
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
)
_TEXT = ("BINUNICODE", "BINUNICODE8", "SHORT_BINUNICODE", "UNICODE", "STRING", "BINSTRING",
         "SHORT_BINSTRING")  # fmt: skip
_IMPORTS = ("GLOBAL", "STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4")
_LEGACY = 0x1950A86A20F9469CFC6C  # what torch.save begins with where it writes no zip file
_CONVERT = "run `minifloat convert-checkpoint IN OUT`, and load OUT"


def payload(entry: Any) -> bytes | None:
    """The bytes of an entry; b"" where there are none; None where it is no entry at all."""
    if entry is None:
        return b""
    if isinstance(entry, torch.Tensor) and entry.dtype is torch.uint8:
        return bytes(entry.detach().cpu().contiguous().reshape(-1).tolist())
    if isinstance(entry, io.BytesIO):
        return entry.getvalue()
    return None


def refusal(entry: Any) -> str:
    """Why an entry cannot be loaded; "" if it can be ignored."""
    data = payload(entry)
    if data is None:
        return (
            f"got {type(entry).__name__}; Transformer Engine's extra state is None, a uint8 tensor "
            "or a BytesIO"
        )
    if not data:
        return ""
    try:
        words, imports = _scan(data)
    except Exception as error:
        return f"its bytes are no pickle that can be scanned ({error}); leave this entry out"
    if words.intersection(DELAYED_KEYS):
        return (
            "Transformer Engine's state of delayed scaling, as a pickle, which loading must not "
            f"run; {_CONVERT}"
        )
    if imports and not words.intersection(STATELESS):
        return f"a pickle of nothing that is known here, which loading must not run; {_CONVERT}"
    return ""


def _scan(data: bytes) -> tuple[set[str], bool]:
    """(every string in the pickles of `data`, whether they import anything); nothing is run."""
    words: set[str] = set()
    imports = False
    for file in _pickles(data):
        for opcode, argument, _ in pickletools.genops(file):
            if opcode.name in _IMPORTS:
                imports = True
                words.update(str(argument or "").split())
            elif opcode.name in _TEXT:
                words.add(str(argument))
    return words, imports


def _pickles(data: bytes) -> Iterator[io.BytesIO]:
    """Where the pickles in `data` begin: one, or those of a file of `torch.save`."""
    file = io.BytesIO(data)
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            for name in archive.namelist():
                if name.endswith(".pkl"):
                    yield io.BytesIO(archive.read(name))
        return
    file.seek(0)
    yield file
    if any(argument == _LEGACY for _, argument, _ in pickletools.genops(data)):
        for _ in range(3):  # version, system, the object
            yield file
