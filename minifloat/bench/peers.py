"""Other libraries, by their public interfaces, each in its documented best configuration.

Only what is documented is called. Where a library is not installed, or its interface has changed,
the reason goes into the results in place of a number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from .cases import Case
from .layers import Weights, plain, stacked
from .step import Step
from .work import EPS, Work

__all__ = ["LIGER", "TE", "TORCHAO", "Peer"]


@dataclass(frozen=True)
class Peer:
    """One configuration of a library; fields as a Provider's."""

    name: str
    build: Callable[[Work], Step]
    kinds: frozenset[str]
    missing: Callable[[Case, torch.device], str]
    judged: str
    limited: str | None
    compiled: bool = False


def _needs(package: str, aligned: int = 1) -> Callable[[Case, torch.device], str]:
    """Why a package cannot run a case, or ""."""

    def missing(case: Case, device: torch.device) -> str:
        if find_spec(package) is None:
            return f"{package} is not installed"
        if device.type != "cuda":
            return f"{package} needs a CUDA device"
        if any(n % aligned for n in (*case.sizes, *case.rows)):
            return f"{package}: sizes must be multiples of {aligned}"
        return ""

    return missing


# ----------------------------------------------------------------------------------------- torchao
def _torchao(recipe: str) -> Callable[[Work], Step]:
    def build(work: Work) -> Step:
        float8 = import_module("torchao.float8")
        module, rest, weights = plain(work)
        model = nn.Sequential(module)  # a root nn.Linear would be returned, not changed
        names = {id(p): name for name, p in model.named_parameters()}
        float8.convert_to_float8_training(
            model, config=float8.Float8LinearConfig.from_recipe_name(recipe)
        )
        now = dict(model.named_parameters())
        weights = {name: [now[names[id(p)]] for p in parts] for name, parts in weights.items()}
        fast: Any = torch.compile(model, dynamic=False)
        return Step(work, lambda: fast(work.x, *rest), weights, model.parameters())

    return build


def _torchao_grouped(work: Work) -> Step:
    home = import_module("torchao.prototype.moe_training")
    product = home._to_fp8_rowwise_then_scaled_grouped_mm
    weight = nn.Parameter(torch.empty_like(work.weights["weight"]))
    ends = work.ends

    def forward(x: Tensor, w: Tensor) -> Tensor:
        y: Tensor = product(x, w.transpose(-2, -1), ends, pad_token_groups_for_grouped_mm=False)
        return y

    fast: Any = torch.compile(forward, dynamic=False)
    return Step(work, lambda: fast(work.x, weight), {"weight": [weight]})


_DENSE = frozenset(("linear", "norm_linear", "mlp", "decoder", "model"))
_EXPERTS = frozenset(("grouped",))
_AO = _needs("torchao", aligned=16)
TORCHAO = (
    Peer("tensorwise", _torchao("tensorwise"), _DENSE, _AO, "current", "current", compiled=True),
    Peer("rowwise", _torchao("rowwise"), _DENSE, _AO, "current", None, compiled=True),
    Peer("rowwise", _torchao_grouped, _EXPERTS, _AO, "current", None, compiled=True),
)


# -------------------------------------------------------------------------------------------- TE
def _te(recipe: str | None) -> Callable[[Work], Step]:
    def build(work: Work) -> Step:
        te = import_module("transformer_engine.pytorch")
        if not hasattr(te, "autocast"):
            raise RuntimeError("this version has no transformer_engine.pytorch.autocast")
        made = None
        if recipe is not None:
            made = getattr(import_module("transformer_engine.common.recipe"), recipe)()
        module, rest, weights = _te_module(te, work)

        def forward() -> Tensor:
            with te.autocast(enabled=made is not None, recipe=made):
                y: Tensor = module(work.x, *rest)
            return y

        return Step(work, forward, weights, module.parameters())

    return build


def _te_module(te: Any, work: Work) -> tuple[Any, tuple[Any, ...], Weights]:
    case = work.case
    _, k, n = case.sizes
    same: dict[str, Any] = {"bias": False, "params_dtype": work.dtype, "device": work.device}
    if case.kind == "linear":
        module = te.Linear(k, n, **same)
        return module, (), {"weight": [module.weight]}
    if case.kind == "grouped":
        module = te.GroupedLinear(case.experts, k, n, **same)
        each = [getattr(module, f"weight{i}") for i in range(case.experts)]
        return module, (case.rows,), {"weight": each}
    normed = {**same, "eps": EPS, "normalization": "RMSNorm"}
    if case.kind == "norm_linear":
        module = te.LayerNormLinear(k, n, **normed)
        return module, (), {"weight": [module.weight]}

    def gated() -> tuple[Any, Weights]:
        mlp = te.LayerNormMLP(k, n, activation="swiglu", **normed)
        return mlp, {"fc1": [mlp.fc1_weight], "fc2": [mlp.fc2_weight]}

    def parts() -> tuple[Any, Any, Any, Weights]:
        mlp, weights = gated()
        qkv, out = te.LayerNormLinear(k, case.heads.qkv, **normed), te.Linear(k, k, **same)
        return qkv, out, mlp, weights | {"qkv": [qkv.weight], "out": [out.weight]}

    module, weights = gated() if case.kind == "mlp" else stacked(case, parts)
    return module, (), weights


_ALL = _DENSE | _EXPERTS
_TE = _needs("transformer_engine")
TE = (
    Peer("high precision", _te(None), _ALL, _TE, "", ""),
    Peer("delayed", _te("DelayedScaling"), _ALL, _TE, "delayed", "delayed"),
    Peer("current", _te("Float8CurrentScaling"), _ALL, _TE, "current", "current"),
    Peer("block", _te("Float8BlockScaling"), _ALL, _TE, "block", "block"),
)


# ------------------------------------------------------------------------------------------- Liger
class _LigerMLP(nn.Module):
    """Their norm and their gated MLP, in high precision."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        home = import_module("liger_kernel.transformers")
        _, hidden, ffn = work.case.sizes
        sizes = SimpleNamespace(hidden_size=hidden, intermediate_size=ffn, hidden_act="silu")
        self.norm = home.LigerRMSNorm(hidden, eps=EPS)
        self.mlp = home.LigerSwiGLUMLP(sizes)
        self.to(work.device, work.dtype)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.mlp(self.norm(x))
        return y


def _liger(work: Work) -> Step:
    module = _LigerMLP(work)
    mlp: Any = module.mlp
    weights = {
        "fc1": [mlp.gate_proj.weight, mlp.up_proj.weight],
        "fc2": [mlp.down_proj.weight],
    }
    return Step(work, lambda: module(work.x), weights, module.parameters())


LIGER = (Peer("", _liger, frozenset(("mlp",)), _needs("liger_kernel"), "", ""),)
