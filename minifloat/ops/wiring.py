"""`Wiring`: where the extra inputs of a pipeline come from, and where its extra outputs go.

A tensor is named by a key: `(CALLER, k)` is the caller's k-th extra input, `(i, slot)` extra output
`slot` of operation i.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

__all__ = ["CALLER", "Key", "Wiring", "placed", "position", "wire"]

CALLER = -1
Key = tuple[int, int]


class Wiring(NamedTuple):
    """`sources[i]` names the extra inputs of operation i, `public` the extra outputs that the
    caller gets, `used` all extra outputs that somebody gets. `inputs` counts the caller's."""

    sources: tuple[tuple[Key, ...], ...]
    public: tuple[Key, ...]
    used: tuple[Key, ...]
    inputs: int


def position(ops: Any, index: int) -> str:
    """How messages call an operation of a pipeline."""
    return f"{type(ops[index]).__name__} (op {index} of {len(ops)})"


def placed(ops: Any, indices: list[int], method: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a method of operations of a pipeline; its errors say which those are."""
    if torch.compiler.is_compiling():
        return method(*args, **kwargs)
    try:
        return method(*args, **kwargs)
    except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        if type(error) not in (ValueError, TypeError, RuntimeError, NotImplementedError):
            raise
        where = ", ".join([position(ops, i) for i in indices])
        raise type(error)(f"{where}: {error}") from error


def wire(ops: Any) -> Wiring:
    """The wiring of basic operations in a row; ValueError where their channels do not fit."""
    producers: dict[str, Key] = {}
    for i, op in enumerate(ops):
        for slot, name in enumerate(op._extra_output_channels):
            if name is None:
                continue
            if name in producers:
                first = position(ops, producers[name][0])
                raise ValueError(
                    f"channel {name!r}: {position(ops, i)}, extra output {slot}, puts a second "
                    f"tensor on it, after {first}; give each output a channel of its own"
                )
            producers[name] = (i, slot)
    sources = []
    taken = 0
    for i, op in enumerate(ops):
        keys = []
        for slot, name in enumerate(op._extra_input_channels):
            if name is None:
                keys.append((CALLER, taken))
                taken += 1
                continue
            keys.append(_produced(ops, producers, name, i, slot))
        sources.append(tuple(keys))
    public = [
        (i, slot)
        for i, op in enumerate(ops)
        for slot, to_caller in enumerate(op._extra_outputs_to_caller)
        if to_caller
    ]
    consumed = [key for keys in sources for key in keys if key[0] != CALLER]
    used = tuple(dict.fromkeys([*public, *consumed]))
    return Wiring(tuple(sources), tuple(public), used, taken)


def _produced(ops: Any, producers: dict[str, Key], name: str, i: int, slot: int) -> Key:
    where = f"{position(ops, i)}, extra input {slot}"
    if name not in producers:
        have = ", ".join(map(repr, producers)) or "none"
        raise ValueError(
            f"channel {name!r}: {where}, reads it, and no operation of this pipeline puts a tensor "
            f"on it (channels here: {have}); call set_extra_output_channel on an earlier operation"
        )
    key = producers[name]
    if key[0] >= i:
        raise ValueError(
            f"channel {name!r}: {where}, reads it before {position(ops, key[0])} puts a tensor on "
            "it; the producer must come earlier"
        )
    return key
