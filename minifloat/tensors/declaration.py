"""What a quantized tensor class declares about its fields."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["Inner", "Plain"]


class Inner(NamedTuple):
    """An inner tensor: its attribute, constructor argument and part of `layout.parts`."""

    attr: str
    kwarg: str
    part: str

    @property
    def usage(self) -> str:
        """The copy it belongs to: "row", "col", or "both"."""
        return self.part[:3] if self.part[:4] in ("row_", "col_") else "both"


class Plain(NamedTuple):
    """A plain attribute: its name, constructor argument and default (`...`: required)."""

    attr: str
    kwarg: str
    default: Any = ...
