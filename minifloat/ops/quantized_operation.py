"""`QuantizedOperation`: a basic operation that quantizes by the recipe it runs in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..module import Module
from ..quantizers import Float8Quantizer
from ..recipe import Recipe, RecipeState
from ..recipe.roles import QuantizerRole
from .basic_operation import BasicOperation

__all__ = ["QuantizedOperation"]

MODES = ("forward", "backward")
# What a layer's slots are called in delayed scaling's state, by position.
SLOTS = {"forward": ("input", "weight", "output"), "backward": ("grad_output", "grad_input")}


class QuantizedOperation(BasicOperation, Module):
    """A basic operation with the slots of a linear layer, of which it uses the first ones.

    Calls read the ambient recipe in `begin`; `get_quantizer` shows what the last eager call, or
    `reset_recipe_state`, left.
    """

    _framework = True
    _slot_counts = {"forward": 0, "backward": 0}
    _live_slots = SLOTS  # of delayed scaling's state, by position

    def __init__(self, device: torch.device | str | None = None) -> None:
        super().__init__(device=device)
        self._has_own_roles = False
        self._quantizers: dict[str, list[Any]] = {}

    # ---------------------------------------------------------------------------------- quantizers
    def num_quantizers(self, mode: str) -> int:
        if mode not in MODES:
            raise ValueError(
                f"{type(self).__name__}: mode: got {mode!r}; allowed: 'forward', 'backward'"
            )
        return self._slot_counts[mode]

    def get_quantizer_roles(
        self, mode: str | None = None, *, fwd: bool = True, num_quantizers: int | None = None
    ) -> list[QuantizerRole | None] | None:
        """Roles of the quantizers of a mode; with `num_quantizers`, of a linear layer's slots."""
        mode = mode or ("forward" if fwd else "backward")
        kinds = SLOTS[mode][: self._slot_counts[mode]]
        roles: list[QuantizerRole | None] = [
            QuantizerRole(self.module_type, kind, self.name or "") for kind in kinds
        ]
        missing = (num_quantizers or len(roles)) - len(roles)
        return [*roles, *[None for _ in range(missing)]]

    def get_quantizer(self, mode: str, index: int) -> Any:
        self._check_quantizer(mode, index)
        if self._recipe is None:
            return None
        if mode not in self._quantizers:
            self._quantizers[mode] = self._made(mode, self._recipe)
        return self._quantizers[mode][index]

    def _made(self, mode: str, recipe: Recipe) -> list[Any]:
        count = self.num_quantizers(mode)
        state = RecipeState.create(
            recipe,
            mode=mode,
            num_quantizers=count,
            device=self.delayed.scale_input.device,
            roles=self.get_quantizer_roles(mode),
        )
        made = state.make_quantizers()
        for slot, quantizer, delayed in zip(
            self._live_slots[mode], made, (*state.delayed_slots, False, False), strict=False
        ):
            if delayed and isinstance(quantizer, Float8Quantizer):
                quantizer.scale, quantizer.amax = self.delayed.live(slot)
        return made

    def reset_recipe_state(self, *, recipe: Recipe | None) -> None:
        if recipe is None or self._recipe is None or recipe != self._recipe:
            self._quantizers = {}
        self._recipe = recipe

    def _save_fp8_metas(self) -> dict[str, Tensor] | None:
        if not self.delayed.used:
            return None
        return {name: buffer.clone() for name, buffer in self.delayed.named_buffers()}

    def _load_fp8_metas(self, metas: dict[str, Tensor] | None) -> None:
        if metas is None:
            return
        self.delayed.fit(metas["history_forward"].shape[0])
        with torch.no_grad():
            for name, buffer in self.delayed.named_buffers():
                buffer.copy_(metas[name])

    # ------------------------------------------------------------------- start and end of a call
    def _given(self, input_: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """`kwargs` of one half of forward, which somebody may call by itself."""
        if "begun" in kwargs:
            return kwargs
        return self._begun(input_, kwargs.get("requires_grad", True), kwargs)

    def end(self, **kwargs: Any) -> None:
        self._end(kwargs["begun"])
