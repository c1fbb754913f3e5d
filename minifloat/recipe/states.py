"""`RecipeState`: a recipe's quantizers for the slots of one module, and the state they share."""

from __future__ import annotations

import abc
import warnings
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..formats import E4M3, E5M2
from ..quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from .base import Recipe
from .checks import ModeError, RecipeError
from .recipes import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from .roles import DelayedScalingRequest, QuantizerRole
from .types import Format, QParams

__all__ = [
    "CustomRecipeState",
    "DelayedScalingRecipeState",
    "Float8BlockScalingRecipeState",
    "Float8CurrentScalingRecipeState",
    "MXFP8BlockScalingRecipeState",
    "NVFP4BlockScalingRecipeState",
    "RecipeState",
]

# Slots by position, for those without a role; a module repeats the sequence for each of its layers.
SLOTS = {"forward": ("input", "weight", "output"), "backward": ("grad_output", "grad_input")}
TENSOR_TYPES = {name for names in SLOTS.values() for name in names}


class RecipeState(abc.ABC):
    """Quantizers of `num_quantizers` slots of one module, in "forward" or "backward" mode.

    A slot is what its role's `tensor_type` says, or, where that says nothing we know, what its
    position says: (input, weight, output) or (grad_output, grad_input), repeated.
    """

    recipe: Any
    _persistent_state_buffers: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        recipe: Recipe,
        *,
        mode: str,
        num_quantizers: int = 1,
        device: torch.device | str | None = None,
        roles: Sequence[QuantizerRole | None] | None = None,
    ) -> None:
        if mode not in SLOTS:
            raise ModeError(f"mode: got {mode!r}; allowed: 'forward', 'backward'")
        if roles is not None and len(roles) != num_quantizers:
            raise ValueError(
                f"roles: got {len(roles)} for {num_quantizers} quantizers; one for each (None for "
                "a slot on the boundary), or roles=None to go by position"
            )
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.recipe = recipe
        self.mode = mode
        self.num_quantizers = num_quantizers
        self.device = torch.device(device)
        self.roles = None if roles is None else list(roles)

    @staticmethod
    def create(
        recipe: Recipe,
        *,
        mode: str,
        num_quantizers: int = 1,
        device: torch.device | str | None = None,
        roles: Sequence[QuantizerRole | None] | None = None,
    ) -> RecipeState:
        """The state of the recipe's kind."""
        for predicate, state in _STATES.items():
            if getattr(recipe, predicate, bool)():
                made: RecipeState = state(
                    recipe, mode=mode, num_quantizers=num_quantizers, device=device, roles=roles
                )
                return made
        raise RecipeError(
            f"recipe: got {recipe!r}; a recipe is a DelayedScaling, Float8CurrentScaling, "
            "Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling or CustomRecipe"
        )

    @abc.abstractmethod
    def make_quantizers(self) -> list[Any]:
        """A new quantizer for each slot."""

    def inherit_state_from(self, other: RecipeState | None) -> bool:
        """Take over the tensors of `other`, which both then hold, if they fit; whether they did.

        For before `make_quantizers`: quantizers keep the tensors that they were made with.
        """
        if type(self) is not type(other):
            return False
        names = self._persistent_state_buffers
        old: list[Tensor] = [getattr(other, name) for name in names]
        new: list[Tensor] = [getattr(self, name) for name in names]
        same = all(a.shape == b.shape and a.dtype == b.dtype for a, b in zip(old, new, strict=True))
        if same:
            for name, tensor in zip(names, old, strict=True):
                setattr(self, name, tensor)
        return same

    @property
    def delayed_slots(self) -> tuple[bool, ...]:
        """Which quantizers of the last `make_quantizers` scale by history."""
        return (False,) * self.num_quantizers

    def _tensor_types(self) -> list[str]:
        positional = SLOTS[self.mode]
        named = [r.tensor_type if r is not None else "" for r in self.roles or ()]
        named = named or [""] * self.num_quantizers
        return [
            name if name in TENSOR_TYPES else positional[i % len(positional)]
            for i, name in enumerate(named)
        ]

    @property
    def _forward(self) -> bool:
        return self.mode == "forward"


class DelayedScalingRecipeState(RecipeState):
    """One scale and one column of the amax history per slot; row 0 takes the amax of this step."""

    recipe: DelayedScaling
    _persistent_state_buffers = ("scale", "amax_history")

    def __init__(self, recipe: DelayedScaling, **kwargs: Any) -> None:
        super().__init__(recipe, **kwargs)
        n = self.num_quantizers
        self.dtype = recipe.fp8_format.element(forward=self._forward).dtype
        self.scale = torch.ones(n, dtype=torch.float32, device=self.device)
        shape = (recipe.amax_history_len, n)
        self.amax_history = torch.zeros(shape, dtype=torch.float32, device=self.device)

    def make_quantizers(self) -> list[Any]:
        return [
            Float8Quantizer(self.scale[i], self.amax_history[0][i].reshape(1), self.dtype)
            for i in range(self.num_quantizers)
        ]

    @property
    def delayed_slots(self) -> tuple[bool, ...]:
        return (True,) * self.num_quantizers


class Float8CurrentScalingRecipeState(RecipeState):
    """No state: the recipe's QParams by kind of tensor."""

    recipe: Float8CurrentScaling

    def make_quantizers(self) -> list[Any]:
        dtype = self.recipe.fp8_format.element(forward=self._forward).dtype
        made = []
        for tensor_type in self._tensor_types():
            params = _fp8_params(self.recipe, tensor_type)
            made.append(
                Float8CurrentScalingQuantizer(
                    dtype,
                    self.device,
                    force_pow_2_scales=params.power_2_scale,
                    amax_epsilon=params.amax_epsilon,
                )
            )
        return made


class MXFP8BlockScalingRecipeState(RecipeState):
    """No state: 1x32 blocks; 32x32 tiles for the weights of linear modules, if the recipe asks."""

    recipe: MXFP8BlockScaling

    def make_quantizers(self) -> list[Any]:
        dtype = self.recipe.fp8_format.element(forward=self._forward).dtype
        roles = self.roles or [None] * self.num_quantizers
        return [
            MXFP8Quantizer(
                dtype,
                with_2d_quantization=self.recipe.enable_2d_quantization
                and tensor_type == "weight"
                and (role is None or role.module_type in ("", "linear", "grouped_linear")),
            )
            for tensor_type, role in zip(self._tensor_types(), roles, strict=True)
        ]


class Float8BlockScalingRecipeState(RecipeState):
    """No state: 1x128 or 128x128 blocks by kind of tensor."""

    recipe: Float8BlockScaling

    def make_quantizers(self) -> list[Any]:
        recipe, made = self.recipe, []
        for tensor_type in self._tensor_types():
            params = _fp8_params(recipe, tensor_type)
            grad = _is_grad(tensor_type)
            dim = recipe.grad_block_scaling_dim if grad else recipe.x_block_scaling_dim
            dim = recipe.w_block_scaling_dim if tensor_type == "weight" else dim
            element = E5M2 if grad and recipe.fp8_format is Format.HYBRID else E4M3
            made.append(
                Float8BlockQuantizer(
                    element.dtype,
                    amax_epsilon=params.amax_epsilon,
                    force_pow_2_scales=params.power_2_scale,
                    block_scaling_dim=dim,
                )
            )
        return made


class NVFP4BlockScalingRecipeState(RecipeState):
    """No state: the recipe's QParams, row scaling and 4-over-6 by kind of tensor."""

    recipe: NVFP4BlockScaling

    def make_quantizers(self) -> list[Any]:
        return [self._quantizer(tensor_type) for tensor_type in self._tensor_types()]

    def _quantizer(self, tensor_type: str) -> NVFP4Quantizer:
        recipe = self.recipe
        weight, grad = tensor_type == "weight", _is_grad(tensor_type)
        kind = "fwd_weight" if weight else "bwd_grad" if grad else "fwd_inp"
        params: QParams = getattr(recipe, f"fp4_quant_{kind}")
        scopes = () if grad else ("all", "weights" if weight else "activations")
        row_scaled = recipe.row_scaled_activation and not weight and not grad
        over = recipe.nvfp4_4over6 in scopes
        asked = "row_scaled_activation" if row_scaled else "nvfp4_4over6" if over else ""
        if asked and (params.random_hadamard_transform or params.stochastic_rounding):
            raise RecipeError(
                f"{asked}: it excludes the Hadamard transform and stochastic rounding, and "
                f"fp4_quant_{kind} is {params!r}; pass disable_rht=True, or a fp4_quant_{kind} "
                "without them"
            )
        return NVFP4Quantizer(
            recipe.fp4_format.element(forward=self._forward).dtype,
            with_rht=params.random_hadamard_transform,
            with_post_rht_amax=params.random_hadamard_transform,
            with_2d_quantization=params.fp4_2d_quantization,
            stochastic_rounding=params.stochastic_rounding,
            row_scaled_nvfp4=row_scaled,
            nvfp4_use_4over6=over,
            nvfp4_e4m3_max=256 if recipe.nvfp4_4over6_e4m3_use_256 in scopes else int(E4M3.max),
            nvfp4_4over6_err_mode=recipe.nvfp4_4over6_err_mode,
        )


class CustomRecipeState(RecipeState):
    """What the recipe's factory returns; its requests for delayed scaling share one inner state."""

    recipe: CustomRecipe

    def __init__(self, recipe: CustomRecipe, **kwargs: Any) -> None:
        super().__init__(recipe, **kwargs)
        if getattr(recipe, "qfactory", None) is None:
            raise ValueError(f"recipe: {recipe!r} has no qfactory; give it one")
        self._inner: DelayedScalingRecipeState | None = None
        self._predecessor: DelayedScalingRecipeState | None = None
        self._requested: tuple[bool, ...] = (False,) * self.num_quantizers

    def make_quantizers(self) -> list[Any]:
        roles: Sequence[QuantizerRole | None] | None = self.roles
        if roles is None:
            warnings.warn(
                f"CustomRecipe: the module gives no roles for its {self.mode} slots, so qfactory "
                "sees QuantizerRole() for each; implement get_quantizer_roles",
                UserWarning,
                stacklevel=2,
            )
            roles = [QuantizerRole()] * self.num_quantizers
        made = [self._answer(role) for role in roles]
        self._requested = tuple(isinstance(one, DelayedScalingRequest) for one in made)
        requests = [one for one in made if isinstance(one, DelayedScalingRequest)]
        if not requests:
            self._inner = None
            return made
        self._inner = self._delayed(requests)
        delayed = iter(self._inner.make_quantizers())
        return [next(delayed) if isinstance(one, DelayedScalingRequest) else one for one in made]

    def _answer(self, role: QuantizerRole | None) -> Any:
        answer = self.recipe.qfactory(role)
        if answer is None:
            raise ValueError(
                f"qfactory: returned None for {role}; to leave a tensor unquantized return "
                "IdentityQuantizer()"
            )
        if not isinstance(answer, Quantizer | DelayedScalingRequest):
            raise TypeError(
                f"qfactory: returned {answer!r} for {role}; a Quantizer or a DelayedScalingRequest "
                "is needed"
            )
        return answer

    def _delayed(self, requests: list[DelayedScalingRequest]) -> DelayedScalingRecipeState:
        inner = DelayedScalingRecipeState(
            delayed_recipe(requests),
            mode=self.mode,
            num_quantizers=len(requests),
            device=self.device,
        )
        before = self._predecessor or self._inner
        if before is not None and before.dtype == inner.dtype:
            inner.inherit_state_from(before)
        return inner

    def inherit_state_from(self, other: RecipeState | None) -> bool:
        if not isinstance(other, CustomRecipeState):
            return False
        self._predecessor = other._inner or other._predecessor
        if self._inner is None or self._predecessor is None:
            return self._predecessor is not None  # used by make_quantizers, if it fits
        return self._inner.inherit_state_from(self._predecessor)

    @property
    def delayed_slots(self) -> tuple[bool, ...]:
        return self._requested

    @property
    def _has_delayed_scaling(self) -> bool:
        return self._inner is not None

    @property
    def _inner_delayed_scaling_recipe(self) -> DelayedScaling | None:
        return None if self._inner is None else self._inner.recipe

    @property
    def amax_history(self) -> Tensor | None:
        return None if self._inner is None else self._inner.amax_history

    @property
    def scale(self) -> Tensor | None:
        return None if self._inner is None else self._inner.scale


_STATES: dict[str, type[Any]] = {  # in the order in which a recipe's kind is asked for
    "delayed": DelayedScalingRecipeState,
    "mxfp8": MXFP8BlockScalingRecipeState,
    "float8_current_scaling": Float8CurrentScalingRecipeState,
    "float8_block_scaling": Float8BlockScalingRecipeState,
    "nvfp4": NVFP4BlockScalingRecipeState,
    "custom": CustomRecipeState,
}


# The recipe that a quantizer belongs to; quantizers, a layer below, cannot name it.
_RECIPES: dict[type[Quantizer], type[Recipe]] = {
    Float8Quantizer: DelayedScaling,
    Float8CurrentScalingQuantizer: Float8CurrentScaling,
    Float8BlockQuantizer: Float8BlockScaling,
    MXFP8Quantizer: MXFP8BlockScaling,
    NVFP4Quantizer: NVFP4BlockScaling,
    HybridQuantizer: CustomRecipe,
    IdentityQuantizer: CustomRecipe,
}
for _quantizer, _recipe in _RECIPES.items():
    _quantizer._recipe_class = _recipe


def delayed_recipe(requests: Sequence[DelayedScalingRequest]) -> DelayedScaling:
    """The recipe that these requests, which must be equal, ask for."""
    first = requests[0]
    for other in requests[1:]:
        if other != first:
            raise ValueError(
                f"qfactory: the requests for delayed scaling differ: {first!r} and {other!r}; a "
                "layer's slots share one update, so return equal ones"
            )
    return DelayedScaling(**{f.name: getattr(first, f.name) for f in fields(first)})


def _is_grad(tensor_type: str) -> bool:
    return tensor_type.startswith("grad")


def _fp8_params(recipe: Float8CurrentScaling | Float8BlockScaling, tensor_type: str) -> QParams:
    if tensor_type == "weight":
        return recipe.fp8_quant_fwd_weight
    return recipe.fp8_quant_bwd_grad if _is_grad(tensor_type) else recipe.fp8_quant_fwd_inp
