"""`OperationContext`: what one operation remembers from forward to backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

__all__ = ["OperationContext"]


@dataclass(eq=False)
class OperationContext:
    """The record of one operation in one call. Any other attribute may be set on it.

    Forward fills `to_save` (`save_for_backward`) and sets attributes; the fuser saves the tensors
    of all operations at once. Backward reads `saved_tensors` and the attributes. `requires_grad`:
    whether this operation takes part in backward.
    """

    saved_tensors: tuple[Any, ...] | None = None
    to_save: tuple[Any, ...] | None = None
    requires_grad: bool = True
    _save_range: tuple[int, int] | None = None
    _begun: bool = False  # a fuser called the operation's `begin`
    # Backward gets a record of its own, whose attributes are forward's until it sets them: a graph
    # cannot change in backward what was made in forward.
    _forward: OperationContext | None = None

    if TYPE_CHECKING:

        def __setattr__(self, name: str, value: Any) -> None: ...

    def save_for_backward(self, *tensors: Any) -> None:
        """Keep tensors, quantized storages or None; a second call replaces the first."""
        self.to_save = tensors

    def for_backward(self, saved: tuple[Any, ...]) -> OperationContext:
        """What backward gets: these tensors, and the attributes of this record."""
        return OperationContext(saved, None, self.requires_grad, self._save_range, True, self)

    def __getattr__(self, name: str) -> Any:
        # Dataclass fields are found without this, so there is no recursion beyond forward's record.
        if name == "_forward" or self._forward is None:
            raise AttributeError(
                f"OperationContext has no attribute {name!r}: forward did not set it"
            )
        return getattr(self._forward, name)
