"""Process groups by name, which graphs can hold."""

from __future__ import annotations

from typing import Any

import torch

from ..core.collectives import Group

__all__ = ["group_of"]


def group_of(process_group: Any) -> Group | None:
    """The group, the world's if None; None where there is nobody else in it."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    process_group = torch.distributed.group.WORLD if process_group is None else process_group
    size = torch.distributed.get_world_size(process_group)
    return Group(str(process_group.group_name), size) if size > 1 else None
