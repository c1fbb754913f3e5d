"""The recipes. Each constructor's parameters are the recipe's fields, in the contract's order.

`fp8_quant_*` and `fp4_quant_*` follow from the other fields unless they are given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .base import Recipe, common, element_format, own, register_recipe
from .checks import RecipeError, choice, count, flag, instance, whole
from .types import Format, MMParams, QParams

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "CustomRecipe",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
]

FAST, SPLIT = MMParams(False), MMParams(True)
SCOPES = ("none", "weights", "activations", "all")


@register_recipe
class DelayedScaling(Recipe):
    """FP8, one scale per tensor, from the amaxes of earlier steps.

    The scale is `fp8_max / amax / 2**margin`, the amax that of `amax_history_len` steps: their
    "max", the "most_recent", or `amax_compute_algo(history)`.
    `scaling_factor_compute_algo(amax, old_scale, fp8_max, recipe)` computes the scale otherwise.
    `reduce_amax` takes the maximum over autocast's group. `fp8_gemm_*` say how products accumulate,
    as in the other recipes (TE fixes it: fprop fast, dgrad and wgrad split, which is the default).
    """

    margin: int
    amax_history_len: int
    amax_compute_algo: str | Callable[..., Any]
    scaling_factor_compute_algo: Callable[..., Any] | None
    reduce_amax: bool
    fp8_gemm_fprop: MMParams
    fp8_gemm_dgrad: MMParams
    fp8_gemm_wgrad: MMParams

    def __new__(  # noqa: PLR0913  (the contract's signature)
        cls,
        margin: int = 0,
        fp8_format: Format = Format.HYBRID,
        amax_history_len: int = 1024,
        amax_compute_algo: str | Callable[..., Any] = "max",
        scaling_factor_compute_algo: Callable[..., Any] | None = None,
        reduce_amax: bool = True,
        fp8_dpa: bool = False,
        fp8_mha: bool = False,
        backward_override: None = None,
        fp8_gemm_fprop: MMParams = FAST,
        fp8_gemm_dgrad: MMParams = SPLIT,
        fp8_gemm_wgrad: MMParams = SPLIT,
    ) -> Self:
        if not callable(amax_compute_algo) and amax_compute_algo not in ("max", "most_recent"):
            raise RecipeError(
                f"amax_compute_algo: got {amax_compute_algo!r}; allowed: 'max', 'most_recent', or "
                "a function of the history"
            )
        if scaling_factor_compute_algo is not None and not callable(scaling_factor_compute_algo):
            raise TypeError(
                f"scaling_factor_compute_algo: got {scaling_factor_compute_algo!r}; None or a "
                "function of (amax, old_scale, fp8_max, recipe) is needed"
            )
        if backward_override is not None:
            raise RecipeError(
                f"backward_override: got {backward_override!r}; DelayedScaling allows None only: "
                "Float8CurrentScaling takes the others"
            )
        return super().__new__(
            cls,
            whole(margin, "margin"),
            element_format(fp8_format, "fp8_format", Format.E4M3, Format.HYBRID),
            count(amax_history_len, "amax_history_len"),
            amax_compute_algo,
            scaling_factor_compute_algo,
            flag(reduce_amax, "reduce_amax"),
            *common(fp8_dpa, fp8_mha, backward_override),
            *_products(fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad),
        )

    @classmethod
    def delayed(cls) -> bool:
        return True


@register_recipe
class Float8CurrentScaling(Recipe):
    """FP8, one scale per tensor, from the amax of the tensor itself."""

    use_power_2_scales: bool
    fp8_gemm_fprop: MMParams
    fp8_gemm_dgrad: MMParams
    fp8_gemm_wgrad: MMParams
    fp8_quant_fwd_inp: QParams
    fp8_quant_fwd_weight: QParams
    fp8_quant_bwd_grad: QParams

    def __new__(  # noqa: PLR0913  (the contract's signature)
        cls,
        use_power_2_scales: bool = False,
        fp8_format: Format = Format.HYBRID,
        fp8_gemm_fprop: MMParams = FAST,
        fp8_gemm_dgrad: MMParams = SPLIT,
        fp8_gemm_wgrad: MMParams = SPLIT,
        fp8_dpa: bool = False,
        fp8_mha: bool = False,
        backward_override: str | None = None,
        fp8_quant_fwd_inp: QParams | None = None,
        fp8_quant_fwd_weight: QParams | None = None,
        fp8_quant_bwd_grad: QParams | None = None,
    ) -> Self:
        follows = QParams(power_2_scale=flag(use_power_2_scales, "use_power_2_scales"))
        return super().__new__(
            cls,
            use_power_2_scales,
            element_format(fp8_format, "fp8_format", Format.E4M3, Format.HYBRID),
            *_products(fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad),
            *common(fp8_dpa, fp8_mha, backward_override),
            own(fp8_quant_fwd_inp, "fp8_quant_fwd_inp", follows),
            own(fp8_quant_fwd_weight, "fp8_quant_fwd_weight", follows),
            own(fp8_quant_bwd_grad, "fp8_quant_bwd_grad", follows),
        )

    def _derived(self) -> dict[str, Any]:
        return super()._derived() | _fp8_params(self, power_2_scale=self.use_power_2_scales)

    @classmethod
    def float8_current_scaling(cls) -> bool:
        return True


@register_recipe
class Float8BlockScaling(Recipe):
    """FP8, one fp32 scale per 1x128 block (dim 1) or 128x128 block (dim 2).

    Scales are powers of two unless `use_f32_scales`. Two operands of one product cannot both have
    128x128 blocks, and products always accumulate split.
    """

    use_f32_scales: bool
    x_block_scaling_dim: int
    w_block_scaling_dim: int
    grad_block_scaling_dim: int
    fp8_gemm_fprop: MMParams
    fp8_gemm_dgrad: MMParams
    fp8_gemm_wgrad: MMParams
    fp8_quant_fwd_inp: QParams
    fp8_quant_fwd_weight: QParams
    fp8_quant_bwd_grad: QParams

    def __new__(  # noqa: PLR0913  (the contract's signature)
        cls,
        use_f32_scales: bool = False,
        fp8_format: Format = Format.E4M3,
        x_block_scaling_dim: int = 1,
        w_block_scaling_dim: int = 2,
        grad_block_scaling_dim: int = 1,
        fp8_gemm_fprop: MMParams = SPLIT,
        fp8_gemm_dgrad: MMParams = SPLIT,
        fp8_gemm_wgrad: MMParams = SPLIT,
        fp8_dpa: bool = False,
        fp8_mha: bool = False,
        backward_override: str | None = None,
        fp8_quant_fwd_inp: QParams | None = None,
        fp8_quant_fwd_weight: QParams | None = None,
        fp8_quant_bwd_grad: QParams | None = None,
    ) -> Self:
        dims = {
            "x_block_scaling_dim": x_block_scaling_dim,
            "w_block_scaling_dim": w_block_scaling_dim,
            "grad_block_scaling_dim": grad_block_scaling_dim,
        }
        wide = [name for name, dim in dims.items() if choice(dim, name, (1, 2)) == 2]
        if len(wide) > 1:
            raise RecipeError(
                f"{wide[0]}, {wide[1]}: both are 2; no product takes two operands with 128x128 "
                "blocks: set one of them to 1"
            )
        products = _products(fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad)
        for name, product in zip(("fprop", "dgrad", "wgrad"), products, strict=True):
            if not product.use_split_accumulator:
                raise RecipeError(
                    f"fp8_gemm_{name}: got {product!r}; block scaling accumulates split: "
                    "MMParams(use_split_accumulator=True)"
                )
        for name, given in (("fp8_dpa", fp8_dpa), ("fp8_mha", fp8_mha)):
            if flag(given, name):
                raise RecipeError(
                    f"{name}: got True; Float8BlockScaling has no FP8 attention: leave it False"
                )
        follows = QParams(power_2_scale=not flag(use_f32_scales, "use_f32_scales"))
        return super().__new__(
            cls,
            use_f32_scales,
            element_format(fp8_format, "fp8_format", Format.E4M3, Format.HYBRID),
            *dims.values(),
            *products,
            *common(fp8_dpa, fp8_mha, backward_override),
            own(fp8_quant_fwd_inp, "fp8_quant_fwd_inp", follows),
            own(fp8_quant_fwd_weight, "fp8_quant_fwd_weight", follows),
            own(fp8_quant_bwd_grad, "fp8_quant_bwd_grad", follows),
        )

    def _derived(self) -> dict[str, Any]:
        return super()._derived() | _fp8_params(self, power_2_scale=not self.use_f32_scales)

    @classmethod
    def float8_block_scaling(cls) -> bool:
        return True


@register_recipe
class MXFP8BlockScaling(Recipe):
    """FP8, one power-of-two scale per 32 elements.

    `enable_2d_quantization` gives weights one scale per 32x32 tile, so that both of their copies
    hold the same values. `margin` is part of the contract and does nothing in this format.
    """

    margin: int
    enable_2d_quantization: bool

    def __new__(
        cls,
        margin: int = 0,
        fp8_format: Format = Format.E4M3,
        fp8_dpa: bool = False,
        fp8_mha: bool = False,
        backward_override: str | None = None,
        enable_2d_quantization: bool = False,
    ) -> Self:
        return super().__new__(
            cls,
            whole(margin, "margin"),
            element_format(fp8_format, "fp8_format", Format.E4M3, Format.HYBRID),
            *common(fp8_dpa, fp8_mha, backward_override),
            flag(enable_2d_quantization, "enable_2d_quantization"),
        )

    @classmethod
    def mxfp8(cls) -> bool:
        return True


@register_recipe
class NVFP4BlockScaling(Recipe):
    """FP4, one E4M3 scale per 16 elements and an fp32 scale per tensor.

    A random Hadamard transform of the operands of wgrad, stochastic rounding of gradients and
    16x16 tiles of weights are on unless disabled. `row_scaled_activation` scales each row of an
    activation; `nvfp4_4over6` names the tensors whose block scales are chosen by the smaller
    error (`nvfp4_4over6_err_mode`). Both exclude the Hadamard transform: `disable_rht=True`.
    """

    disable_rht: bool
    disable_stochastic_rounding: bool
    disable_2d_quantization: bool
    row_scaled_activation: bool
    nvfp4_4over6: str
    nvfp4_4over6_e4m3_use_256: str
    nvfp4_4over6_err_mode: str
    fp4_format: Format
    fp4_quant_fwd_inp: QParams
    fp4_quant_fwd_weight: QParams
    fp4_quant_bwd_grad: QParams

    def __new__(  # noqa: PLR0913  (the contract's signature)
        cls,
        disable_rht: bool = False,
        disable_stochastic_rounding: bool = False,
        disable_2d_quantization: bool = False,
        row_scaled_activation: bool = False,
        nvfp4_4over6: str = "none",
        nvfp4_4over6_e4m3_use_256: str = "all",
        nvfp4_4over6_err_mode: str = "MAE",
        fp4_format: Format = Format.E2M1,
        fp8_format: Format = Format.E4M3,
        fp8_dpa: bool = False,
        fp8_mha: bool = False,
        backward_override: str | None = None,
        fp4_quant_fwd_inp: QParams | None = None,
        fp4_quant_fwd_weight: QParams | None = None,
        fp4_quant_bwd_grad: QParams | None = None,
    ) -> Self:
        inp, weight, grad = _fp4_params(
            flag(disable_rht, "disable_rht"),
            flag(disable_stochastic_rounding, "disable_stochastic_rounding"),
            flag(disable_2d_quantization, "disable_2d_quantization"),
        )
        return super().__new__(
            cls,
            disable_rht,
            disable_stochastic_rounding,
            disable_2d_quantization,
            flag(row_scaled_activation, "row_scaled_activation"),
            choice(nvfp4_4over6, "nvfp4_4over6", SCOPES),
            choice(nvfp4_4over6_e4m3_use_256, "nvfp4_4over6_e4m3_use_256", SCOPES),
            choice(nvfp4_4over6_err_mode, "nvfp4_4over6_err_mode", ("MAE", "MSE")),
            element_format(fp4_format, "fp4_format", Format.E2M1),
            element_format(fp8_format, "fp8_format", Format.E4M3),
            *common(fp8_dpa, fp8_mha, backward_override),
            own(fp4_quant_fwd_inp, "fp4_quant_fwd_inp", inp),
            own(fp4_quant_fwd_weight, "fp4_quant_fwd_weight", weight),
            own(fp4_quant_bwd_grad, "fp4_quant_bwd_grad", grad),
        )

    def _derived(self) -> dict[str, Any]:
        follows = _fp4_params(
            self.disable_rht, self.disable_stochastic_rounding, self.disable_2d_quantization
        )
        names = ("fp4_quant_fwd_inp", "fp4_quant_fwd_weight", "fp4_quant_bwd_grad")
        return super()._derived() | {
            name: getattr(self, name) or params for name, params in zip(names, follows, strict=True)
        }

    @classmethod
    def nvfp4(cls) -> bool:
        return True


@register_recipe
class CustomRecipe(Recipe):
    """A quantizer for each slot, from `qfactory(role)`; equal only to itself.

    `qfactory` gets a QuantizerRole (None for a slot on a module's boundary) and returns a Quantizer
    or a DelayedScalingRequest. It is called once per slot for a recipe object and a layer's roles,
    so it must not depend on anything else. A quantizer of the user's own implements `_casts`.
    `quantization_alignment` is what modules that pad tokens pad to.
    """

    qfactory: Callable[..., Any]
    quantization_alignment: int

    def __new__(
        cls,
        qfactory: Callable[..., Any],
        fp8_format: Format = Format.HYBRID,
        fp8_dpa: bool = False,
        fp8_mha: bool = False,
        backward_override: str | None = None,
        quantization_alignment: int = 128,
    ) -> Self:
        if not callable(qfactory):
            raise TypeError(
                f"qfactory: got {qfactory!r}; a function of a QuantizerRole (or None) that returns "
                "a Quantizer or a DelayedScalingRequest is needed"
            )
        fields = (
            qfactory,
            element_format(fp8_format, "fp8_format", Format.E4M3, Format.E5M2, Format.HYBRID),
            *common(fp8_dpa, fp8_mha, backward_override),
            count(quantization_alignment, "quantization_alignment"),
        )
        self = object.__new__(cls)  # not interned: the factory may close over anything
        derived = {"_key": (cls, *fields), "_plans": {}, "_quantizers": {}}
        for name, value in (*zip(cls._fields, fields, strict=True), *derived.items()):
            object.__setattr__(self, name, value)
        return self

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return object.__hash__(self)

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        name = f"_custom_recipe_{id(self):x}"
        return name, {name: self}

    def to_dict(self) -> dict[str, Any]:
        raise TypeError(
            "qfactory: a CustomRecipe holds a function, which JSON cannot: make it by code"
        )

    @classmethod
    def custom(cls) -> bool:
        return True


def _products(*given: object) -> tuple[MMParams, ...]:
    names = ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad")
    return tuple(
        instance(value, name, MMParams, "MMParams(use_split_accumulator=True)")
        for name, value in zip(names, given, strict=True)
    )


def _fp8_params(recipe: Recipe, *, power_2_scale: bool) -> dict[str, QParams]:
    """The QParams in force: those given, else what follows from the recipe's flags."""
    names = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
    follows = QParams(power_2_scale=power_2_scale)
    return {name: getattr(recipe, name) or follows for name in names}


def _fp4_params(no_rht: bool, no_stochastic: bool, no_2d: bool) -> tuple[QParams, QParams, QParams]:
    """(input, weight, gradient) as the flags have it."""
    return (
        QParams(random_hadamard_transform=not no_rht),
        QParams(fp4_2d_quantization=not no_2d),
        QParams(random_hadamard_transform=not no_rht, stochastic_rounding=not no_stochastic),
    )
