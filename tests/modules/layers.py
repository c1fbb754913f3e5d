"""LayerNormLinear, LayerNormMLP and the ways to run them: a covering design, as data.

Every option meets delayed scaling, which has state, and one other recipe; every recipe meets every
module, and many options.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from minifloat import recipe as recipes

from .cases import RECIPES as SIX
from .cases import STATELESS, Case

KINDS = ("LayerNormLinear", "LayerNormMLP")
ACTIVATIONS = (
    "gelu", "geglu", "glu", "qgelu", "qgeglu", "relu", "reglu", "srelu", "sreglu", "silu", "swiglu",
    "clamped_swiglu",
)  # fmt: skip
RECIPES: dict[str, Callable[[], recipes.Recipe]] = {
    **SIX,
    "high_override": lambda: recipes.Float8CurrentScaling(backward_override="high_precision"),
    "dequantized": lambda: recipes.MXFP8BlockScaling(backward_override="dequantized"),
}
OVERRIDES = ("high_override", "dequantized")
RMS: dict[str, Any] = {"normalization": "RMSNorm"}
NORM_OUTPUT: dict[str, Any] = {"return_layernorm_output": True}
AGAIN: dict[str, Any] = {"checkpoint": True}
FLAGS = (True, False, True, False)
WEIGHTS = {"LayerNormLinear": ("weight",), "LayerNormMLP": ("fc1_weight", "fc2_weight")}
NORM = ("layer_norm_weight", "layer_norm_bias")

BOTH = (
    Case("inside", inside=True),
    Case("no_bias", module={"bias": False, **RMS}),
    Case("rms", module=RMS),
    Case("zero_centered", module={"zero_centered_gamma": True}),
    Case("zero_centered_rms", module={"zero_centered_gamma": True, **RMS}),
    Case("eval", train=False),
    Case("no_grad", grad=False),
    Case("no_grad_inside", grad=False, inside=True),
    Case("primary", primary=True),
    Case("primary_microbatches", primary=True, microbatches=(True, False)),
    Case("microbatches", microbatches=FLAGS),
    Case("microbatches_inside", microbatches=(True, False, False), inside=True),
    Case("main_grad", main_grad=True, module={"fuse_wgrad_accumulation": True}),
    Case(
        "main_grad_microbatches",
        main_grad=True,
        module={"fuse_wgrad_accumulation": True},
        microbatches=(True, False, True),
    ),
    Case("checkpoint_plain", checkpoint="non-reentrant", recipes=STATELESS),
    Case("checkpoint", checkpoint="ours"),
    Case("checkpoint_inside", checkpoint="ours", inside=True),
    Case(
        "checkpoint_microbatches",
        checkpoint="ours",
        module={"cache_weights": True},
        microbatches=FLAGS,
    ),
    Case("return_bias", module={"return_bias": True}),
    Case("norm_output", module=NORM_OUTPUT),
    Case("norm_output_gathered", module={"return_layernorm_output_gathered": True, **RMS}),
    Case("all_outputs", module={"return_bias": True, **NORM_OUTPUT}, microbatches=FLAGS),
    Case("norm_output_no_grad", module=NORM_OUTPUT, grad=False),
    Case("frozen_input", frozen=("input",)),
    Case("frozen_norm", frozen=NORM),
    Case("frozen_before", frozen=("input", *NORM)),
    Case("calibrating", calibrating=True),
    Case("calibrating_inside", calibrating=True, inside=True),
    Case("two_dim", shape=(17, 48)),
    # Without flags a compiled layer casts at every call: delayed scales then move on.
    Case("cache_weights", module={"cache_weights": True}, recipes=STATELESS),
    Case("override", recipes=OVERRIDES),
    Case("override_microbatches", recipes=OVERRIDES, microbatches=(True, False)),
)
OWN = {
    "LayerNormLinear": (
        Case("frozen_weight", frozen=("weight",)),
        Case("frozen_but_bias", frozen=("input", *NORM, "weight")),
        Case("frozen_but_norm", frozen=("input", "weight", "bias")),
        Case("split", module={"parameters_split": ("q", "k")}),
        Case("fp8_grad", forward={"fp8_grad": True}, recipes=STATELESS),
    ),
    "LayerNormMLP": (
        Case("frozen_weights", frozen=WEIGHTS["LayerNormMLP"]),
        Case("frozen_fc1", frozen=("fc1_weight", "fc1_bias")),
        Case("frozen_before_fc2", frozen=("input", *NORM, "fc1_weight", "fc1_bias")),
        Case("frozen_fc2", frozen=("fc2_weight", "fc2_bias")),
        Case("frozen_but_biases", frozen=("input", *NORM, *WEIGHTS["LayerNormMLP"])),
        Case("again", module=AGAIN),
        Case("again_swiglu", module={"activation": "swiglu", **RMS, **AGAIN}),
        Case("again_inside", module=AGAIN, inside=True),
        Case("again_microbatches", module=AGAIN, microbatches=FLAGS),
        Case(
            "again_cache_weights",
            module={"cache_weights": True, **AGAIN},
            microbatches=(True, False, False, True),
        ),
        Case("again_main_grad", main_grad=True, module={"fuse_wgrad_accumulation": True, **AGAIN}),
        Case("again_primary", primary=True, module=AGAIN),
        Case("again_norm_output", module={**NORM_OUTPUT, **AGAIN}),
        Case("again_frozen", frozen=("input", *NORM, "fc1_weight"), module=AGAIN),
        Case("again_no_grad", grad=False, module=AGAIN),
        Case("again_twice", module=AGAIN, checkpoint="ours"),
        Case("again_override", module=AGAIN, recipes=OVERRIDES),
        *(
            Case(f"act_{name}", module={"activation": name}, recipes=(recipe,))
            for name, recipe in zip(ACTIVATIONS, (*SIX, *SIX), strict=True)
        ),
    ),
}
PLAIN = {"LayerNormLinear": {}, "LayerNormMLP": {"activation": "swiglu"}}


def design() -> list[tuple[str, Case]]:
    """(recipe, case): what is run."""
    made = []
    for kind in KINDS:
        plain = Case("plain", kind=kind, module=PLAIN[kind])
        made += [(name, plain) for name in SIX]
        for i, case in enumerate((*BOTH, *OWN[kind])):
            others = [name for name in case.recipes if name != "delayed"]
            names = [others[i % len(others)]] if others else []
            if "delayed" in case.recipes:
                names.append("delayed")
            if case.recipes is OVERRIDES or len(case.recipes) == 1:
                names = list(case.recipes)
            made += [(name, replace(case, kind=kind)) for name in names]
    return made
