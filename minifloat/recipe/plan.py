"""`Plan`: what a recipe makes of one linear layer, as plain values.

    fprop  x.row, w.row        dgrad  g.row, w.col        wgrad  g.col, x.col

A plan holds the casts of these six operands and how the products accumulate. It is all that a layer
needs of a recipe, so forward captures it once and backward reads no ambient state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from ..formats import HIGH, HIGH_PRECISION, Cast
from ..opaque import register
from ..quantizers import Float8Quantizer, HybridQuantizer, IdentityQuantizer, Quantizer
from .base import Recipe, Roles
from .recipes import DelayedScaling
from .roles import QuantizerRole
from .states import CustomRecipeState, RecipeState
from .types import Record

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["DelayedUpdate", "Plan", "Product", "make_plan", "make_quantizers", "products"]


class DelayedUpdate(Record):
    """How delayed scaling turns a history of amaxes into scales; fields as DelayedScaling's.

    `recipe` is what `scale_algo` gets as its fourth argument, and None where there is none.
    """

    margin: int
    history_len: int
    amax_algo: str | Callable[..., Any]
    scale_algo: Callable[..., Any] | None
    reduce_amax: bool
    recipe: DelayedScaling | None
    _fields = ("margin", "history_len", "amax_algo", "scale_algo", "reduce_amax", "recipe")
    _defaults = (None,)

    @classmethod
    def of(cls, recipe: DelayedScaling) -> Self:
        scale_algo = recipe.scaling_factor_compute_algo
        return cls(
            recipe.margin,
            recipe.amax_history_len,
            recipe.amax_compute_algo,
            scale_algo,
            recipe.reduce_amax,
            None if scale_algo is None else recipe,
        )


class Plan(Record):
    """The six casts of a linear layer and how its three products run.

    `col_from_row[i]`: the column copy of (x, w, g)[i] is made of the row copy's values.
    `fast`: whether (fprop, dgrad, wgrad) accumulate fast. `override`: "" or the recipe's
    `backward_override`. `delayed`: which of (input, weight, output, grad_output, grad_input) scale
    by history, which `update` then continues. `output` and `grad_input` quantize the results with
    `fp8_output` and `fp8_grad` (rowwise; None where the slot is delayed), `y_row` and `dx_row` are
    their casts. `requantizes`: quantizing a dequantized input again gives the same. `name`, the
    recipe's class, is for messages.
    """

    x_row: Cast
    x_col: Cast
    w_row: Cast
    w_col: Cast
    g_row: Cast
    g_col: Cast
    col_from_row: tuple[bool, bool, bool]
    fast: tuple[bool, bool, bool]
    override: str
    delayed: tuple[bool, bool, bool, bool, bool]
    update: DelayedUpdate | None
    output: Quantizer | None
    grad_input: Quantizer | None
    y_row: Cast
    dx_row: Cast
    requantizes: bool
    name: str
    _fields = (
        "x_row", "x_col", "w_row", "w_col", "g_row", "g_col", "col_from_row", "fast", "override",
        "delayed", "update", "output", "grad_input", "y_row", "dx_row", "requantizes", "name",
    )  # fmt: skip
    weight_key: str  # what a cached weight was cast by, as a string: graphs can store one
    quantizes: bool  # whether it quantizes anything
    stochastic: bool
    input_amax: bool  # whether the input's scale comes from its amax
    forward_limits: tuple[float, float, float]  # largest codes of (input, weight, output)
    backward_limits: tuple[float, float]  # and of (grad_output, grad_input)

    def _derived(self) -> dict[str, Any]:
        casts = (self.x_row, self.x_col, self.w_row, self.w_col, self.g_row, self.g_col)
        return {
            "weight_key": f"{self.w_row!r} {self.w_col!r} {self.delayed[1]}",
            "quantizes": any(cast.format.element is not None for cast in casts),
            "stochastic": any(cast.stochastic for cast in casts),
            "input_amax": not (self.x_row.tiled or self.delayed[0] or self.x_row.layout[0] is None),
            "forward_limits": (self.x_row.limit, self.w_row.limit, self.y_row.limit),
            "backward_limits": (self.g_row.limit, self.dx_row.limit),
        }


register(DelayedUpdate, real=(*DelayedUpdate._fields, "_key", "__eq__", "replace"))
register(
    Plan,
    real=(
        *Plan._fields,
        "weight_key",
        "quantizes",
        "stochastic",
        "input_amax",
        "forward_limits",
        "backward_limits",
        "_key",
        "__eq__",
        "replace",
    ),
)


class Product(NamedTuple):
    """The casts of the two operands that a product multiplies."""

    a: Cast
    b: Cast

    @property
    def quantized(self) -> bool:
        """Whether both operands are codes."""
        return self.a.format.element is not None and self.b.format.element is not None


def products(plan: Plan) -> tuple[Product, Product, Product]:
    """(fprop, dgrad, wgrad), as they run: a `backward_override` multiplies high precision."""
    fprop = Product(plan.x_row, plan.w_row)
    if plan.override:
        return fprop, Product(HIGH, HIGH), Product(HIGH, HIGH)
    return fprop, Product(plan.g_row, plan.w_col), Product(plan.g_col, plan.x_col)


def make_plan(recipe: Recipe, fwd_roles: Roles, bwd_roles: Roles) -> Plan:
    """Ask the recipe's states for quantizers of the five slots, and read off what they do."""
    # The tensors of delayed scaling are not wanted here: on the meta device they cost nothing.
    fwd = RecipeState.create(
        recipe, mode="forward", num_quantizers=3, device="meta", roles=_roles(fwd_roles)
    )
    bwd = RecipeState.create(
        recipe, mode="backward", num_quantizers=2, device="meta", roles=_roles(bwd_roles)
    )
    x, w, y = fwd.make_quantizers()
    g, dx = bwd.make_quantizers()
    delayed = (*fwd.delayed_slots, *bwd.delayed_slots)
    slots = ("input", "weight", "output", "grad_output", "grad_input")
    casts = {}
    for slot, quantizer, scaled in zip(slots, (x, w, y, g, dx), delayed, strict=True):
        casts[slot] = _casts(quantizer, f"{type(recipe).__name__}, slot {slot}", scaled)
    (x_row, x_col, x_from), (w_row, w_col, w_from) = casts["input"], casts["weight"]
    g_row, g_col, g_from = casts["grad_output"]
    override = recipe.backward_override or ""
    # What only hands on, `ops.Quantize`, has no input and no weight to multiply.
    if not override and (fwd_roles is None or any(role is not None for role in fwd_roles[:2])):
        _check_transforms(type(recipe).__name__, (x_col, g_col), (w_col, g_row))
    return Plan(
        x_row,
        x_col,
        w_row,
        w_col,
        g_row,
        g_col,
        (x_from, w_from, g_from),
        _fast(recipe, x_row, w_row),
        override,
        delayed,
        _update(recipe, fwd, bwd),
        None if delayed[2] else _rowwise(y),
        None if delayed[4] else _rowwise(dx),
        casts["output"][0],
        casts["grad_input"][0],
        bool(x.is_requantization_safe()),
        type(recipe).__name__,
    )


def _check_transforms(recipe: str, wgrad: tuple[Cast, Cast], dgrad: tuple[Cast, Cast]) -> None:
    """Raise where a Hadamard transform of one operand is not undone by the other's."""
    x_col, g_col = wgrad
    if x_col.hadamard != g_col.hadamard:
        raise ValueError(
            f"{recipe}: wgrad multiplies the column copies of input and "
            f"grad_output, whose Hadamard transforms differ ({x_col!r}, {g_col!r}); transform both "
            "by the same signs, or neither"
        )
    w_col, g_row = dgrad
    if w_col.hadamard != g_row.hadamard:
        raise ValueError(
            f"{recipe}: dgrad multiplies the column copy of weight by the row copy of "
            f"grad_output, whose Hadamard transforms differ ({w_col!r}, {g_row!r}); row copies "
            "have none: leave weight's out"
        )


def make_quantizers(recipe: Recipe, mode: str, roles: Roles) -> tuple[Quantizer | None, ...]:
    """Quantizers of the slots of one direction, for keeps; None where one scales by history."""
    count = len(roles) if roles is not None else 3 if mode == "forward" else 2
    state = RecipeState.create(
        recipe, mode=mode, num_quantizers=count, device="meta", roles=_roles(roles)
    )
    made = []
    for quantizer, delayed in zip(state.make_quantizers(), state.delayed_slots, strict=True):
        kept = None if delayed else quantizer._with_usages(True, True)
        if kept is not None and kept._is_value():
            kept._freeze()
        made.append(kept)
    return tuple(made)


def _roles(roles: Roles) -> list[QuantizerRole | None] | None:
    if roles is None:
        return None
    return [None if role is None else QuantizerRole(*role) for role in roles]


def _casts(quantizer: Quantizer, where: str, delayed: bool = False) -> tuple[Cast, Cast, bool]:
    """(row, column, whether the column copy is made of the row copy) with both copies in use."""
    if isinstance(quantizer, HybridQuantizer):
        row, _, _ = _casts(quantizer.rowwise_quantizer, where)
        _, col, _ = _casts(quantizer.columnwise_quantizer, where)
        return row, col, quantizer.columnwise_source == "rowwise_dequantized"
    if isinstance(quantizer, IdentityQuantizer):
        cast = Cast(HIGH_PRECISION.name, dtype=quantizer.dtype)
        return cast, cast, False
    if isinstance(quantizer, Float8Quantizer) and not delayed:
        raise TypeError(
            f"{where}: got a Float8Quantizer, whose scale belongs to the module; return "
            "DelayedScalingRequest() from qfactory, and the module makes one"
        )
    if type(quantizer)._casts is Quantizer._casts:
        raise TypeError(
            f"{where}: {type(quantizer).__name__} does not say what it casts to; implement "
            "_casts(self), which returns the (row, column) minifloat.formats.Cast of the copies in "
            "use"
        )
    row, col = quantizer._with_usages(True, True)._casts()
    return row, col, False


def _rowwise(quantizer: Quantizer) -> Any:
    """A copy for keeps, that makes the row copy and cannot change."""
    kept = quantizer._with_usages(True, False)
    if kept._is_value():
        kept._freeze()
    return kept


def _fast(recipe: Recipe, x_row: Cast, w_row: Cast) -> tuple[bool, bool, bool]:
    """Whether (fprop, dgrad, wgrad) may accumulate fast.

    A recipe that does not say so means fprop, where both operands have one FP8 scale.
    """
    names = ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad")
    if all(hasattr(recipe, name) for name in names):
        fprop, dgrad, wgrad = (not getattr(recipe, n).use_split_accumulator for n in names)
        return fprop, dgrad, wgrad
    tensorwise = all(c.format.element is not None and c.format.tile is None for c in (x_row, w_row))
    return tensorwise, False, False


def _update(recipe: Recipe, *states: RecipeState) -> DelayedUpdate | None:
    if isinstance(recipe, DelayedScaling):
        return DelayedUpdate.of(recipe)
    inner = {
        state._inner_delayed_scaling_recipe
        for state in states
        if isinstance(state, CustomRecipeState)
    } - {None}
    if len(inner) > 1:
        first, second = inner
        raise ValueError(
            f"qfactory: the requests for delayed scaling differ: {first!r} and {second!r}; a "
            "layer's slots share one update, so return equal ones"
        )
    for one in inner:
        assert one is not None
        return DelayedUpdate.of(one)
    return None
