"""Who computes a case: minifloat by each recipe, plain PyTorch, and other libraries if installed.

A provider is data: a name, whose recipe its errors and its limit are judged by, and a function that
builds a step. `missing` says why it cannot run a case, before anything is built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..modules import LayerNormLinear, LayerNormMLP, Linear
from ..modules.grouped_linear import GroupedLinear
from ..recipe import Recipe
from ..recipe.autocast import autocast
from ..train.recipes import RECIPES as NAMED
from . import peers
from .cases import KINDS, Case
from .layers import Weights, plain, stacked
from .step import Step
from .work import EPS, Work

__all__ = ["DEFAULT", "LIBRARIES", "RECIPES", "Provider", "providers"]

RECIPES: dict[str, Recipe] = {name: r for name, r in NAMED.items() if r is not None}


@dataclass(frozen=True)
class Provider:
    """A name, the kinds of cases it computes, and how.

    `judged` names the recipe whose reference its errors are compared with, `limited` the one
    whose roofline it has (None: none of ours); "" is plain high precision. `foreign` code may have
    changed its ways: that it cannot be built is not a failure of ours.
    """

    name: str
    library: str
    build: Callable[[Work], Step]
    kinds: frozenset[str] = frozenset(KINDS)
    missing: Callable[[Case, torch.device], str] = lambda case, device: ""
    judged: str = ""
    limited: str | None = ""
    foreign: bool = False
    compiled: bool = False


# --------------------------------------------------------------------------------- plain PyTorch
def _plain(work: Work) -> Step:
    module, rest, weights = plain(work)
    return Step(work, lambda: module(work.x, *rest), weights, module.parameters())


def _compiled(mode: str | None) -> Callable[[Work], Step]:
    def build(work: Work) -> Step:
        module, rest, weights = plain(work)
        fast: Any = torch.compile(module, dynamic=False, mode=mode)
        return Step(work, lambda: fast(work.x, *rest), weights, module.parameters())

    return build


def _compiles(case: Case, device: torch.device) -> str:
    if case.kind == "grouped" and device.type != "cuda":
        return "PyTorch compiles grouped products in bf16 on CUDA alone"
    return ""


# ------------------------------------------------------------------------------------------- ours
def _module(work: Work) -> tuple[Any, tuple[Any, ...], Weights]:
    """(module, what it takes besides the input, weights by the work's names)."""
    case = work.case
    _, k, n = case.sizes
    same: dict[str, Any] = {"bias": False, "params_dtype": work.dtype, "device": work.device}
    normed = {**same, "eps": EPS, "normalization": "RMSNorm"}
    one: Any
    if case.kind == "linear":
        one = Linear(k, n, **same)
        return one, (), {"weight": [one.weight]}
    if case.kind == "grouped":
        one = GroupedLinear(case.experts, k, n, single_grouped_weight=True, **same)
        return one, (work.sizes,), {"weight": [one.weight]}
    if case.kind == "norm_linear":
        one = LayerNormLinear(k, n, **normed)
        return one, (), {"weight": [one.weight]}

    def gated() -> tuple[Any, Weights]:
        mlp: Any = LayerNormMLP(k, n, activation="swiglu", **normed)
        return mlp, {"fc1": [mlp.fc1_weight], "fc2": [mlp.fc2_weight]}

    def parts() -> tuple[Any, Any, Any, Weights]:
        mlp, weights = gated()
        qkv, out = LayerNormLinear(k, case.heads.qkv, **normed), Linear(k, k, **same)
        return qkv, out, mlp, weights | {"qkv": [qkv.weight], "out": [out.weight]}

    module, weights = gated() if case.kind == "mlp" else stacked(case, parts)
    return module, (), weights


def _ours(recipe: Recipe, *, compiled: bool = False, cached: bool = False) -> Any:
    def build(work: Work) -> Step:
        module, rest, weights = _module(work)
        run: Any = torch.compile(module, dynamic=False, fullgraph=True) if compiled else module
        how: dict[str, Any] = {"is_first_microbatch": True} if cached else {}

        def forward() -> Tensor:
            with autocast(recipe=recipe):
                y: Tensor = run(work.x, *rest, **how)
            return y

        step = Step(work, forward, weights, list(module.parameters()))
        if cached:
            for _ in range(3):  # delayed scaling finds its scales; the last cast is what is kept
                step()
            how["is_first_microbatch"] = False
        return step

    return build


# ------------------------------------------------------------------------------------------ tables
def _mine(library: str, names: Sequence[str], **how: bool) -> list[Provider]:
    tail = library.removeprefix("ours").replace("-", " ")
    return [
        Provider(
            f"{name}{tail}", library, _ours(RECIPES[name], **how), judged=name, limited=name,
            compiled=how.get("compiled", False),
        )
        for name in names
    ]  # fmt: skip


def _theirs(library: str, found: Sequence[peers.Peer]) -> list[Provider]:
    return [
        Provider(
            f"{library} {peer.name}".rstrip(), library, peer.build, peer.kinds, peer.missing,
            peer.judged, peer.limited, foreign=True, compiled=peer.compiled,
        )
        for peer in found
    ]  # fmt: skip


def _compiler(name: str, mode: str | None) -> Provider:
    return Provider(name, name, _compiled(mode), missing=_compiles, compiled=True)


# library -> what it brings, given the recipes that were asked for
LIBRARIES: dict[str, Callable[[Sequence[str]], list[Provider]]] = {
    "eager": lambda names: [Provider("eager", "eager", _plain)],
    "compile": lambda names: [_compiler("compile", None)],
    "autotune": lambda names: [_compiler("autotune", "max-autotune-no-cudagraphs")],
    "ours": lambda names: _mine("ours", names),
    "ours-compile": lambda names: _mine("ours-compile", names, compiled=True),
    "ours-cached": lambda names: _mine("ours-cached", names, cached=True),
    "torchao": lambda names: _theirs("torchao", peers.TORCHAO),
    "te": lambda names: _theirs("te", peers.TE),
    "liger": lambda names: _theirs("liger", peers.LIGER),
}
DEFAULT = ("eager", "compile", "ours", "torchao", "te", "liger")


def providers(libraries: Sequence[str], names: Sequence[str]) -> list[Provider]:
    """The providers of these libraries, ours by these recipes."""
    return [p for library in libraries for p in LIBRARIES[library](names)]
