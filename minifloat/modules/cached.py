"""`CachesWeight`: a module that can keep its weight cast from one call to the next."""

from __future__ import annotations

from typing import Any

import torch

from ..core.linear import weight_operands
from ..module import Begun, Module
from ..recipe import Recipe, get_default_recipe
from ..recipe.autocast import STATE, repeated
from ..recipe.replay import unseen
from ..tensors import QuantizedTensorStorage
from .workspace import Cached, Versions, cast_weight

__all__ = ["CachesWeight"]


class CachesWeight(Module):
    """Keeps a workspace: as an attribute, or in buffers that exist from the start.

    With `cache_weights` a workspace is made at construction, at addresses that stay, and eager
    calls cast the weight when it has changed.
    """

    cache_weights: bool
    _cached: Cached | None
    _cached_version: Versions | None  # of the parameters that were cast
    _preallocated: str  # Plan.weight_key of a workspace held in buffers, or ""
    _unused: bool = False  # no forward has cast into these buffers yet: they are memory alone
    _init_recipe: Recipe | None
    _weight_operands = staticmethod(weight_operands)  # what casts a weight for a workspace

    def _workspace(
        self, weight: Any, owners: list[Any], begun: Begun, first: bool | None, need_col: bool
    ) -> Cached | None:
        """The weight as it was cast before, or None to cast it in the operation.

        `owners` are the parameters that are cast, together, as one weight.
        """
        plan = begun.plan
        if isinstance(weight, QuantizedTensorStorage) or plan.w_row.layout[0] is not torch.uint8:
            return None
        if begun.replays:  # cast again, by forward's scale, and keep nothing
            assert begun.entry is not None
            if not begun.entry.workspace:
                return None
            with unseen(True):
                return cast_weight(
                    weight,
                    plan,
                    begun.live[1],
                    None,
                    col=need_col or self.training,
                    update=True,
                    cast=self._weight_operands,
                )[0]
        if first is None and not self._versioned(owners):
            return None
        # A graph cannot note that it has cast: there, False is taken at its word.
        unused = not torch.compiler.is_compiling() and self._unused
        update = first is not False or unused
        version = None
        if first is None:
            # Of the parameters: those of a split module are joined anew at every call.
            version = Versions(owners)
            update = version != self._cached_version
        with unseen(begun.entry is not None):
            cached, new = cast_weight(
                weight,
                plan,
                begun.live[1],
                self._get_cached(),
                col=need_col or self.training,
                update=update,
                cast=self._weight_operands,
            )
        if new is not None:
            self._set_cached(new)
        if unused:
            self._unused = False
        if version is not None:
            self._cached_version = version
        if begun.entry is not None:
            begun.entry.workspace = True
            if cached.scale is not None:
                begun.entry.scales[1] = cached.scale.clone()
        return cached

    def _get_cached(self) -> Cached | None:
        if not self._preallocated:
            return self._cached
        held = [getattr(self, f"_workspace_{i}") for i in range(7)]
        return Cached((tuple(held[:3]), tuple(held[3:6])), self._preallocated, held[6])

    def _set_cached(self, new: Cached) -> None:
        """Keep a workspace that a forward made, where it can be kept."""
        compiling = torch.compiler.is_compiling()
        if self._preallocated and not compiling:
            self._hold(new)
            return
        if repeated() or (not compiling and _capturing()) or self._preallocated:
            inside = "a CUDA graph" if not compiling else "a compiled checkpoint"
            if self._preallocated:
                inside = "torch.compile for another recipe than at construction"
            raise RuntimeError(
                f"{self._where()}: is_first_microbatch would make a weight workspace inside "
                f"{inside}; make it beforehand: run one eager forward under the recipe with "
                "is_first_microbatch=True, or give a module that takes it cache_weights=True at "
                "construction"
            )
        self._cached = new

    def _hold(self, new: Cached) -> None:
        """The workspace as buffers: at fixed addresses, and moved with the module."""
        for i, t in enumerate((*new.copies[0], *new.copies[1], new.scale)):
            self.register_buffer(f"_workspace_{i}", t, persistent=False)
        self._preallocated = new.key

    def _preallocate(self, weight: Any) -> None:
        recipe = self._init_recipe or STATE.recipe or get_default_recipe()
        plan = recipe.plan(*self._roles(recipe))
        if isinstance(weight, QuantizedTensorStorage) or weight.is_meta:
            return
        if plan.w_row.layout[0] is torch.uint8:
            live = self.delayed.live("weight") if plan.delayed[1] else None
            made, _ = cast_weight(
                weight, plan, live, None, col=True, update=True, cast=self._weight_operands
            )
            self._hold(made)
            self._unused = True
            self.delayed.reset()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._cached, self._cached_version = None, None  # it is not moved along
        self._unused = bool(self._preallocated)  # the buffers are: with other values, maybe
        held = [(name, b) for name, b in self._buffers.items() if b is not None]
        super()._apply(fn, recurse)
        for name, b in held:  # a workspace keeps its dtypes: module.bfloat16() means the parameters
            moved = self._buffers[name]
            assert moved is not None
            if moved.dtype != b.dtype:
                self._buffers[name] = b.to(moved.device)
        return self

    def _versioned(self, owners: list[Any]) -> bool:
        """Whether an eager call sees by itself that the weight has changed."""
        if not self.cache_weights or torch.compiler.is_compiling():
            return False
        # FSDP writes a weight that it gathers behind the back of its version; inference tensors
        # have none.
        sharded = self.__dict__.get("_is_fsdp_managed_module", False)
        return not sharded and not any(w.is_inference() for w in owners)


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
