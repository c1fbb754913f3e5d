"""Other libraries, made up: what is documented of them is called, and what fails is said."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import minifloat
from minifloat.bench import numerics, peers
from minifloat.bench.cases import Case
from minifloat.bench.providers import RECIPES, _plain
from minifloat.bench.step import Step
from minifloat.bench.work import make_work

CPU = torch.device("cpu")
CASES = {
    kind: Case(kind, (32, 64, 48), 4 if kind == "grouped" else 1)
    for kind in ("linear", "norm_linear", "mlp", "grouped", "decoder")
}


def module(monkeypatch: pytest.MonkeyPatch, name: str, **names: Any) -> None:
    """Install a module of that dotted name, its parents too."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), types.ModuleType(parts[i - 1]))
    for key, value in names.items():
        setattr(sys.modules[name], key, value)


def right(step: Step, case: Case, recipe: str) -> numerics.Verdict:
    work = make_work(case, CPU, torch.float32)
    for _ in range(3):
        step()
    truth = numerics.results(work, None, exact=True)
    made = numerics.results(work, RECIPES[recipe] if recipe else None)
    return numerics.judge(
        numerics.errors(step.results(), truth), numerics.errors(made, truth), work.dtype
    )


@pytest.mark.parametrize("peer", peers.TE, ids=lambda p: p.name)
@pytest.mark.parametrize("kind", ["linear", "mlp", "grouped", "decoder"])
def test_te(peer: peers.Peer, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """minifloat has the names of TE's interface, so it can stand in for it."""
    module(monkeypatch, "transformer_engine.common.recipe", **vars(minifloat.recipe))
    names = ("Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear", "autocast")
    module(monkeypatch, "transformer_engine.pytorch", **{n: getattr(minifloat, n) for n in names})
    case = CASES[kind]
    assert kind in peer.kinds
    if kind == "decoder" and peer.judged == "delayed":
        pytest.skip("so few tokens have amaxes that differ from step to step")
    step = peer.build(make_work(case, CPU, torch.float32))
    assert right(step, case, peer.judged).failure == ""


def test_te_without_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    module(monkeypatch, "transformer_engine.pytorch")
    with pytest.raises(RuntimeError, match="no transformer_engine.pytorch.autocast"):
        peers.TE[0].build(make_work(CASES["linear"], CPU, torch.float32))


class Float8Linear(nn.Linear):
    """What a conversion might leave: another class, other parameters."""


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_torchao(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Float8LinearConfig:
        @staticmethod
        def from_recipe_name(name: str) -> str:
            asked.append(name)
            return name

    def convert(model: nn.Module, *, config: str) -> None:
        for name, child in list(model.named_modules()):
            if isinstance(child, nn.Linear):
                new = Float8Linear(child.in_features, child.out_features, bias=False)
                model.set_submodule(name, new)

    module(
        monkeypatch, "torchao.float8", Float8LinearConfig=Float8LinearConfig,
        convert_to_float8_training=convert,
    )  # fmt: skip
    monkeypatch.setattr(torch, "compile", lambda model, dynamic: model)
    case = CASES[kind]
    step = peers.TORCHAO[1].build(make_work(case, CPU, torch.float32))
    assert asked == ["rowwise"]
    assert right(step, case, "").failure == ""  # the new parameters have the values, and gradients


def test_torchao_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    def product(
        x: Tensor, w: Tensor, ends: Tensor, *, pad_token_groups_for_grouped_mm: bool
    ) -> Any:
        assert not pad_token_groups_for_grouped_mm
        return F.grouped_mm(x, w, offs=ends)

    home = "torchao.prototype.moe_training"
    module(monkeypatch, home, _to_fp8_rowwise_then_scaled_grouped_mm=product)
    monkeypatch.setattr(torch, "compile", lambda model, dynamic: model)
    case = CASES["grouped"]
    step = peers.TORCHAO[2].build(make_work(case, CPU, torch.float32))
    assert right(step, case, "").failure == ""


def test_liger(monkeypatch: pytest.MonkeyPatch) -> None:
    class RMSNorm(nn.RMSNorm):
        pass

    class MLP(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            h, f = config.hidden_size, config.intermediate_size
            self.gate_proj = nn.Linear(h, f, bias=False)
            self.up_proj = nn.Linear(h, f, bias=False)
            self.down_proj = nn.Linear(f, h, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
            return made

    module(monkeypatch, "liger_kernel.transformers", LigerRMSNorm=RMSNorm, LigerSwiGLUMLP=MLP)
    case = CASES["mlp"]
    step = peers.LIGER[0].build(make_work(case, CPU, torch.float32))
    assert right(step, case, "").failure == ""


def test_why_one_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, odd = CASES["linear"], Case("linear", (32, 64, 50))
    cuda = torch.device("cuda")
    missing = peers.TORCHAO[0].missing
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    assert missing(linear, cuda) == "torchao is not installed"
    monkeypatch.setattr(peers, "find_spec", lambda name: object())
    assert missing(linear, CPU) == "torchao needs a CUDA device"
    assert missing(odd, cuda) == "torchao: sizes must be multiples of 16"
    assert missing(linear, cuda) == ""


def test_weights_must_have_a_parameter() -> None:
    work = make_work(CASES["linear"], CPU, torch.float32)
    good = _plain(work)
    with pytest.raises(ValueError, match="weight: 10 rows of 48 have a parameter"):
        Step(work, good.forward, {"weight": [nn.Parameter(torch.zeros(10, 64))]})
