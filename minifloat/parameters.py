"""Parameters of linear layers: where they live, how they are split, initialised and quantized, and
where their gradients go."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from . import library
from .recipe import Recipe, RecipeState
from .recipe.delayed import DelayedState
from .recipe.plan import Plan
from .tensors import GroupedTensorStorage, QuantizedTensorStorage

__all__ = [
    "add_gradient",
    "check_eps",
    "check_leaves",
    "check_one_main_grad",
    "check_parameter_dtype",
    "check_recipe_of",
    "check_size",
    "default_device",
    "default_init",
    "find_main_grad",
    "initialise",
    "keep_values",
    "main_grad",
    "make_writable",
    "quantized_parameter",
    "quantized_weight",
    "splits",
]


def default_device(device: torch.device | str | None) -> torch.device:
    """`device`, or the default device, or the current accelerator, else the CPU."""
    if device is not None:
        return torch.device(device)
    default = torch.get_default_device()
    if default.type != "cpu":
        return default
    return torch.accelerator.current_accelerator(check_available=True) or default


def make_writable(module: nn.Module, quantizes: bool) -> None:
    """Give the parameters of `module` itself values of their own to start with: memory, where they
    were on the meta device, and with `quantizes` high precision, where they are quantized."""
    found: list[tuple[str, Any]] = list(module.named_parameters(recurse=False))
    for name, held in found:
        quantized = quantizes and isinstance(held, (QuantizedTensorStorage, GroupedTensorStorage))
        if not (held.is_meta or quantized):
            continue
        device = default_device(None) if held.is_meta else held.device
        if quantized:
            made = torch.empty(held.shape, dtype=held.dtype, device=device)
        else:
            made = torch.empty_like(held, device=device)
        module.register_parameter(name, nn.Parameter(made, held.requires_grad))


def default_init(weight: Tensor) -> Tensor:
    return nn.init.normal_(weight, mean=0.0, std=0.023)


def check_parameter_dtype(dtype: object, where: str) -> None:
    """Raise unless parameters can have `dtype`."""
    floats = isinstance(dtype, torch.dtype) and dtype.is_floating_point
    if not floats or dtype.itemsize < 2:  # type: ignore[attr-defined]
        raise TypeError(
            f"{where}: params_dtype: got {dtype!r}; torch.float32, torch.bfloat16 or torch.float16 "
            "is needed"
        )


def check_size(size: object, where: str, argument: str) -> None:
    """Raise unless `size` can be that of a dim."""
    if isinstance(size, bool) or not hasattr(size, "__index__") or size < 0:  # type: ignore[operator]
        raise ValueError(f"{where}: {argument}: got {size!r}; an int >= 0 is needed")


def check_eps(eps: object, where: str) -> None:
    """Raise unless `eps` can be added to a mean of squares."""
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 <= eps < math.inf:
        raise ValueError(f"{where}: eps: got {eps!r}; a finite number >= 0 is needed")


def splits(given: Any, out_features: int, tp_size: int, where: str) -> dict[str, int]:
    """{prefix of the parameters: rows}; the prefix of an unsplit module is empty."""
    if given is None:
        return {"": out_features // tp_size}
    if not given:
        raise ValueError(f"{where}: parameters_split is empty; name at least one parameter")
    if isinstance(given, Mapping):
        sizes = dict(given)
    elif isinstance(given, Iterable) and not isinstance(given, str):
        names = list(given)
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{where}: parameters_split names {name!r} twice; name each once")
        if out_features % len(names):
            raise ValueError(
                f"{where}: parameters_split names {len(names)} parameters, which do not divide "
                f"out_features={out_features}; give a dict of sizes"
            )
        sizes = dict.fromkeys(names, out_features // len(names))
    else:
        raise TypeError(
            f"{where}: parameters_split: got {type(given).__name__}; a list of names or a dict "
            "{name: rows} is needed"
        )
    for name, size in sizes.items():
        if not isinstance(name, str) or not hasattr(size, "__index__") or size < 0:
            raise ValueError(
                f"{where}: parameters_split: got {name!r}: {size!r}; a name and an int >= 0 are "
                "needed"
            )
    if sum(sizes.values()) != out_features:
        raise ValueError(
            f"{where}: parameters_split: sizes {sizes} sum to {sum(sizes.values())}; "
            f"out_features is {out_features}"
        )
    for name, size in sizes.items():
        if size % tp_size:
            raise RuntimeError(
                f"{where}: parameters_split: {name!r} has {size} rows, which tp_size={tp_size} "
                "does not divide"
            )
    made: dict[str, int] = {}
    for name, size in sizes.items():
        prefix = name.rstrip("_") + "_"
        if prefix in made:
            raise ValueError(
                f"{where}: parameters_split: {name!r} is a second {prefix!r}: trailing underscores "
                "do not count; name each once"
            )
        made[prefix] = size // tp_size
    return made


def initialise(
    weights: Iterable[Tensor],
    init_method: Callable[[Tensor], Any],
    tracker: Callable[[], Any] | None,
    tracker_name: str | None,
    where: str,
) -> None:
    """Fill the weights; NaN is refused."""
    for argument, given in (("init_method", init_method), ("get_rng_state_tracker", tracker)):
        if given is not None and not callable(given):
            raise TypeError(f"{where}: {argument}: got {given!r}; a function is needed")
    fork = contextlib.nullcontext()
    if tracker is not None:
        fork = tracker().fork(tracker_name) if tracker_name else tracker().fork()
    with torch.no_grad(), fork:
        for weight in weights:
            init_method(weight)
            seen = weight.numel() and not library.traced()  # fake tensors have no values
            if seen and bool(weight.isnan().any()):
                raise ValueError(
                    f"{where}: init_method left NaN in the weight; let it write every element"
                )


def quantized_parameter(
    value: Tensor, recipe: Recipe, roles: Any, state: DelayedState, preserve: bool
) -> nn.Parameter:
    """A parameter that holds `value` as `recipe` quantizes weights; it trains if `value` does."""
    state_of: Any = RecipeState.create(
        recipe, mode="forward", num_quantizers=3, device=value.device, roles=roles
    )
    quantizer = state_of.make_quantizers()[1].copy()
    if recipe_scales_by_history(quantizer):
        quantizer.scale, quantizer.amax = state.scale_weight, state.amax_weight
    quantizer.set_usage(rowwise=True, columnwise=torch.is_grad_enabled())
    quantizer.internal = False
    with torch.no_grad():
        made = quantizer.quantize(value.detach())
    parameter = nn.Parameter(made, requires_grad=value.requires_grad)
    if preserve:
        keep_values(parameter, value.detach().cpu())
    return parameter


def quantized_weight(weight: Any, plan: Plan, where: str) -> Any:
    """A quantized weight as `plan` multiplies it; its values where that quantizes no weights."""
    if plan.w_row.layout[0] is not torch.uint8:
        coded = weight._cast(False).layout[0] is torch.uint8
        if coded and not torch.compiler.is_compiling():
            warnings.warn(
                f"{where}: a quantized weight outside autocast is dequantized",
                UserWarning,
                stacklevel=4,
            )
        return weight.dequantize()
    check_recipe_of(weight, plan, where)
    return weight


def check_leaves(weights: Iterable[Any], where: str) -> None:
    """Raise for a weight that is computed of others: it is gone when its gradient comes later."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    if any(w.requires_grad and not w.is_leaf for w in weights):
        raise RuntimeError(
            f"{where}: delay_wgrad_compute: the weight is computed of other tensors (by a "
            "parametrization, for instance), which a gradient that comes after backward does not "
            "reach; leave delay_wgrad_compute out"
        )


def check_one_main_grad(parts: Collection[Any], where: str) -> None:
    """Raise unless a weight is one parameter."""
    if len(parts) > 1:
        raise ValueError(
            f"{where}: fuse_wgrad_accumulation with parameters_split: one product cannot be added "
            "to the main_grad of several parameters; leave one of them out"
        )


def check_recipe_of(weight: Any, plan: Plan, where: str) -> None:
    """Raise unless `plan` multiplies weights that are quantized as this one is, or none."""
    if plan.w_row.layout[0] is not torch.uint8:
        return
    if weight._cast(False).format_name != plan.w_row.format_name:
        raise RuntimeError(
            f"Recipe mismatch for '{where}': the weight was quantized as "
            f"{weight._cast(False).format_name}, and {plan.name} multiplies "
            f"{plan.w_row.format_name}; use the recipe of quantized_model_init"
        )


def recipe_scales_by_history(quantizer: Any) -> bool:
    return bool(quantizer._state_written())


def keep_values(parameter: Any, value: Tensor) -> None:
    """`get_high_precision_init_val()` and `clear_high_precision_init_val()` on a parameter."""
    held: list[Tensor] = [value]
    parameter.get_high_precision_init_val = lambda: held[0] if held else None
    parameter.clear_high_precision_init_val = held.clear


def find_main_grad(weight: Any, where: str, argument: str) -> Tensor:
    """What the gradient of `weight` is added to; `argument` is the option that asks for it."""
    found = (
        weight.get_main_grad()
        if hasattr(weight, "__fsdp_param__")
        else getattr(weight, "main_grad", None)
    )
    if found is None:
        raise RuntimeError(
            f"{where}: {argument} without weight.main_grad; set it to an fp32 or bf16 tensor of "
            "the weight's shape"
        )
    if not isinstance(found, Tensor) or not found.is_floating_point():
        got = found.dtype if isinstance(found, Tensor) else type(found).__name__
        raise TypeError(
            f"{where}: {argument}: weight.main_grad is {got}; it must be an fp32 or bf16 tensor of "
            "the weight's shape"
        )
    if found.shape != weight.shape:
        raise ValueError(
            f"{where}: {argument}: weight.main_grad has shape {tuple(found.shape)}; it must have "
            f"the weight's, {tuple(weight.shape)}"
        )
    if found.device != weight.device:
        raise RuntimeError(
            f"{where}: {argument}: weight.main_grad is on {found.device}, the weight on "
            f"{weight.device}; move it there"
        )
    return found


def main_grad(weight: Any, where: str, argument: str) -> tuple[Tensor, bool, bool | None]:
    """(main_grad, whether to overwrite it, dummy gradient: None, or whether it is zeros)."""
    found = find_main_grad(weight, where, argument)
    dummy = None
    if hasattr(weight, "grad_added_to_main_grad"):
        weight.grad_added_to_main_grad = True
        dummy = bool(getattr(weight, "zero_out_wgrad", False))
    return found, bool(getattr(weight, "overwrite_main_grad", False)), dummy


def add_gradient(parameter: Any, gradient: Tensor) -> None:
    """To what `parameter.grad` holds, in its memory, as autograd does: that may be a part of a flat
    buffer, or what a CUDA graph reads."""
    made = gradient.to(parameter.dtype)  # torch.autocast, where nothing quantizes
    if parameter.grad is None:
        parameter.grad = made
        return
    with torch.no_grad():
        parameter.grad.add_(made)
