"""Bad input to LayerNormLinear and LayerNormMLP: what is said names the module, the argument, the
rule and the fix, and nothing is changed by it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import minifloat
from minifloat import recipe as recipes
from minifloat.recipe.autocast import STATE

from .layers import ACTIVATIONS, KINDS
from .test_linear_errors import same

CURRENT, MX = recipes.Float8CurrentScaling(), recipes.MXFP8BlockScaling()
DELAYED = recipes.DelayedScaling(amax_history_len=4)
UNSUPPORTED = {
    "ub_overlap_ag": True,
    "ub_overlap_rs": True,
    "ub_overlap_rs_dgrad": True,
    "ub_bulk_dgrad": True,
    "ub_bulk_wgrad": True,
    "symmetric_ar_type": "multimem_all_reduce",
}
both = pytest.mark.parametrize("kind", KINDS)


def layer(kind: str, **kwargs: Any) -> Any:
    torch.manual_seed(1)
    return getattr(minifloat, kind)(32, 48, name="fc", **kwargs)


def says(kind: str, *words: str) -> str:
    return "(?s)" + ".*".join((rf"{kind}\(fc\)", *words))


def everything(module: Any) -> dict[str, Any]:
    """What a refused call must leave as it was."""
    parts = [module.fc1, module.fc2] if hasattr(module, "fc1") else [module]
    return {
        "state": {k: v.clone() for k, v in module.state_dict().items()},
        "buffers": {k: v.clone() for k, v in module.named_buffers()},
        "versions": [p._version for p in module.parameters()],
        "grads": [p.grad is None for p in module.parameters()],
        "used": [of.delayed.used for of in parts],
        "cached": [of._cached is None for of in parts],
        "queue": [len(of.wgrad_store.queue) for of in parts],
        "ambient": (STATE.recipe, STATE.depth, STATE.ran),
    }


@contextmanager
def refused(error: type[Exception], pattern: str, module: Any) -> Iterator[None]:
    before = everything(module)
    with pytest.raises(error, match=pattern):
        yield
    after = everything(module)
    assert [k for k in before if not same(before[k], after[k])] == []


# --------------------------------------------------------------------------------- constructor
@both
@pytest.mark.parametrize(("argument", "value"), UNSUPPORTED.items())
def test_userbuffers_are_refused(kind: str, argument: str, value: Any) -> None:
    with pytest.raises(NotImplementedError, match=says(kind, argument, "default")):
        layer(kind, **{argument: value})


def test_row_parallel_is_refused() -> None:
    with pytest.raises(
        NotImplementedError, match=says("LayerNormLinear", "parallel_mode='row'", "'column'")
    ):
        layer("LayerNormLinear", parallel_mode="row")


def test_an_unknown_parallel_mode() -> None:
    for error in (ValueError, AssertionError):
        with pytest.raises(error, match=says("LayerNormLinear", "parallel_mode", "allowed")):
            layer("LayerNormLinear", parallel_mode="diagonal")


@both
@pytest.mark.parametrize("value", ["BatchNorm", "layernorm", None, ""])
def test_an_unknown_norm(kind: str, value: Any) -> None:
    for error in (ValueError, AssertionError):
        pattern = says(kind, "normalization: got", "'LayerNorm', 'RMSNorm'")
        with pytest.raises(error, match=pattern):
            layer(kind, normalization=value)


@pytest.mark.parametrize("value", ["tanh", "SwiGLU", ""])
def test_an_unknown_activation(value: str) -> None:
    with pytest.raises(
        ValueError, match=says("LayerNormMLP", "activation", *sorted(ACTIVATIONS)[:1])
    ):
        layer("LayerNormMLP", activation=value)


@pytest.mark.parametrize(
    ("activation", "params"),
    [
        ("clamped_swiglu", {"limits": 3.0}),
        ("gelu", {"limit": 3.0}),
        ("swiglu", {"alpha": 2.0}),
        ("clamped_swiglu", {"limit": "high"}),
        ("clamped_swiglu", {"limit": -1.0}),
    ],
)
def test_bad_activation_params(activation: str, params: dict[str, Any]) -> None:
    (name,) = params
    with pytest.raises((TypeError, ValueError), match=says("LayerNormMLP", "activation", name)):
        layer("LayerNormMLP", activation=activation, activation_params=params)


@both
@pytest.mark.parametrize("eps", [-1e-5, float("nan"), float("inf"), None, "small", True])
def test_an_eps_that_is_none(kind: str, eps: Any) -> None:
    with pytest.raises(ValueError, match=says(kind, "eps", "number >= 0")):
        layer(kind, eps=eps)


@pytest.mark.parametrize("size", [-1, 2.5, "8", True])
def test_sizes_that_are_none(size: Any) -> None:
    for kind, names in (
        ("LayerNormLinear", ("in_features", "out_features")),
        ("LayerNormMLP", ("hidden_size", "ffn_hidden_size")),
    ):
        for i, name in enumerate(names):
            sizes = [32, 48]
            sizes[i] = size
            with pytest.raises(ValueError, match=f"{kind}: {name}: got .*; an int >= 0"):
                getattr(minifloat, kind)(*sizes)


def test_sizes_that_ranks_do_not_divide() -> None:
    with pytest.raises(ValueError, match=says("LayerNormLinear", "out_features=48", "tp_size=5")):
        layer("LayerNormLinear", parallel_mode="column", tp_size=5)
    with pytest.raises(ValueError, match=says("LayerNormMLP", "48", "tp_size=5", "divide")):
        layer("LayerNormMLP", set_parallel_mode=True, tp_size=5)


def test_a_gated_width_that_ranks_divide_in_halves_only() -> None:
    """2 * 3 columns are even; of three, two ranks cannot have the same part."""
    with pytest.raises(ValueError, match=r"LayerNormMLP.*3.*tp_size=2"):
        minifloat.LayerNormMLP(32, 3, activation="swiglu", set_parallel_mode=True, tp_size=2)


@both
def test_an_init_method_that_leaves_nan(kind: str) -> None:
    with pytest.raises(ValueError, match=says(kind, "init_method", "NaN")):
        layer(kind, init_method=lambda w: w.fill_(float("nan")))


# --------------------------------------------------------------------------------------- forward
@both
@pytest.mark.parametrize("recipe", [None, CURRENT, DELAYED], ids=["none", "current", "delayed"])
def test_bad_inputs(kind: str, recipe: Any) -> None:
    made = layer(kind)
    size = "in_features" if kind == "LayerNormLinear" else "hidden_size"
    bad: tuple[tuple[Any, type[Exception], tuple[str, ...]], ...] = (
        (torch.zeros(4, 31), ValueError, ("inp", r"\(4, 31\)", f"{size}=32")),
        (torch.zeros(()), ValueError, ("inp", r"\(\)", f"{size}=32")),
        (torch.zeros(4, 32).bfloat16(), TypeError, ("inp", "bfloat16", "float32", "convert")),
        ([1.0] * 32, TypeError, ("inp", "list", "tensor")),
        (None, TypeError, ("inp", "NoneType", "tensor")),
    )
    for x, error, words in bad:
        with (
            minifloat.autocast(enabled=recipe is not None, recipe=recipe),
            refused(error, says(kind, *words), made),
        ):
            made(x)


@both
def test_ranks_without_a_group(kind: str) -> None:
    mode: dict[str, Any] = {"parallel_mode": "column"}
    if kind == "LayerNormMLP":
        mode = {"set_parallel_mode": True}
    made = layer(kind, tp_size=2, **mode)
    pattern = says(kind, "tp_size=2", "tp_group", "set_tensor_parallel")
    for recipe in (None, CURRENT, DELAYED):
        with (
            minifloat.autocast(enabled=recipe is not None, recipe=recipe),
            refused(RuntimeError, pattern, made),
        ):
            made(torch.randn(4, 32))


@both
def test_main_grad_must_be_there(kind: str) -> None:
    made = layer(kind, fuse_wgrad_accumulation=True)
    for recipe in (None, CURRENT):
        with (
            minifloat.autocast(enabled=recipe is not None, recipe=recipe),
            refused(RuntimeError, says(kind, "fuse_wgrad_accumulation", "main_grad"), made),
        ):
            made(torch.randn(4, 32))


@both
def test_another_recipe_than_that_of_the_weight(kind: str) -> None:
    with minifloat.quantized_model_init(recipe=MX):
        made = layer(kind)
    with (
        minifloat.autocast(recipe=CURRENT),
        refused(RuntimeError, f"(?s)Recipe mismatch.*{kind}.*quantized_model_init", made),
    ):
        made(torch.randn(4, 32))


@pytest.mark.parametrize("kind", ["Linear", *KINDS, "GroupedLinear", "ops"])
def test_random_bits_in_a_weight_that_is_cast_again(kind: str) -> None:
    random = recipes.QParams(stochastic_rounding=True)
    recipe = recipes.NVFP4BlockScaling(fp4_quant_fwd_weight=random)
    pattern = "(?s)NVFP4BlockScaling, slot weight.*stochastic.*nearest.*quantized_model_init"
    grouped: tuple[Any, ...] = ([1, 3],) if kind == "GroupedLinear" else ()

    def make(**kwargs: Any) -> Any:
        if kind == "ops":
            return minifloat.ops.Linear(32, 48)
        return getattr(minifloat, kind)(*((2,) if grouped else ()), 32, 48, **kwargs)

    x = torch.randn(4, 32)
    for first in (None, True):
        flags = {} if first is None or kind == "ops" else {"is_first_microbatch": first}
        with minifloat.autocast(recipe=recipe), pytest.raises(ValueError, match=pattern):
            make()(x, *grouped, **flags)
    if not grouped and kind != "ops":
        with minifloat.autocast(recipe=recipe), pytest.raises(ValueError, match=pattern):
            make(cache_weights=True)
    with minifloat.quantized_model_init(recipe=recipe), minifloat.autocast(recipe=recipe):
        assert make()(x, *grouped).isfinite().all()  # rounded where it was written


@both
def test_backward_dw_without_a_backward(kind: str) -> None:
    made = layer(kind, delay_wgrad_compute=True)
    with refused(RuntimeError, says(kind, "backward_dw", "once per backward"), made):
        made.backward_dw()
    layer(kind).backward_dw()  # which has nothing to do


@both
def test_quantized_weights_outside_autocast_are_told(kind: str) -> None:
    with minifloat.quantized_model_init(recipe=CURRENT):
        made = layer(kind)
    with pytest.warns(UserWarning, match=rf"{kind}\(fc\).*outside autocast"):
        y = made(torch.randn(4, 32))
    assert isinstance(y, Tensor) and y.isfinite().all()


def test_fp8_output_outside_autocast() -> None:
    made = layer("LayerNormLinear")
    for argument in ("fp8_output", "fp8_grad"):
        with pytest.raises(ValueError, match=says("LayerNormLinear", argument, "autocast")):
            made(torch.randn(4, 32), **{argument: True})


@both
def test_a_quantized_input_is_worth_its_values(kind: str) -> None:
    made = layer(kind)
    x = minifloat.MXFP8Quantizer(minifloat.DType.kFloat8E4M3).quantize(torch.randn(4, 32))
    with minifloat.autocast(recipe=CURRENT):
        assert torch.equal(made(x), made(x.dequantize()))


@both
def test_a_dtype_without_statistics(kind: str) -> None:
    """Named as every other bad input is, in high precision too; the message was that of a cast."""
    made, x = layer(kind, params_dtype=torch.float64), torch.randn(4, 32, dtype=torch.float64)
    with refused(TypeError, says(kind, "inp: got torch.float64", "fp32, bf16 or fp16"), made):
        made(x)
    with minifloat.autocast(recipe=CURRENT), torch.autocast("cpu", dtype=torch.bfloat16):
        pattern = says(kind, "parameters are torch.float64, which no recipe quantizes")
        with refused(TypeError, pattern, made):
            made(x)


def test_what_fc2_refuses_changes_nothing_of_fc1() -> None:
    mlp = minifloat.LayerNormMLP(32, 32, fuse_wgrad_accumulation=True, device="cpu")
    mlp.fc1_weight.main_grad = torch.zeros(32, 32)
    with minifloat.autocast(recipe=DELAYED), pytest.raises(RuntimeError, match="fc2.*main_grad"):
        mlp(torch.randn(4, 32))
    assert not mlp.fc1.delayed.used and mlp.fc1.delayed.history_forward.shape[0] > 4
