"""The gate: what is right passes in every recipe and kind, and what is wrong does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from minifloat.bench import numerics
from minifloat.bench.cases import Case
from minifloat.bench.providers import RECIPES, providers
from minifloat.bench.step import Step
from minifloat.bench.work import Work, make_work

CPU = torch.device("cpu")
CASES = (
    Case("linear", (64, 128, 96)),
    Case("norm_linear", (64, 128, 96)),
    Case("mlp", (64, 96, 128)),
    Case("grouped", (128, 64, 96), 4, "empty"),
    Case("decoder", (64, 128, 96)),
    Case("model", (256, 128, 128)),
)
# bf16, as on a GPU: the errors of its roundings are part of the reference.
BF16 = torch.bfloat16


def verdict(step: Step, work: Work, name: str) -> numerics.Verdict:
    truth = numerics.results(work, None, exact=True)
    expected = numerics.errors(numerics.results(work, RECIPES.get(name)), truth)
    return numerics.judge(numerics.errors(step.results(), truth), expected, work.dtype)


def built(work: Work, name: str) -> Step:
    (provider,) = (p for p in providers(["eager", "ours"], list(RECIPES)) if p.name == name)
    step = provider.build(work)
    for _ in range(3):
        step()
    return step


@pytest.mark.parametrize("name", ["eager", *RECIPES])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.kind)
def test_what_is_right_passes(case: Case, name: str) -> None:
    work = make_work(case, CPU, BF16)
    found = verdict(built(work, name), work, name)
    assert found.failure == ""
    # The largest ratio: less error would be another, finer format.
    assert 0.9 < found.ratio < numerics.MARGIN
    assert set(found.errors) == set(found.expected) >= {"y", "dx"}


def wrong_weight(work: Work, step: Step) -> None:
    with torch.no_grad():
        next(iter(step.weights.values()))[0].mul_(1.02)


def no_input_gradient(work: Work, step: Step) -> None:
    real = step.forward
    step.forward = lambda: 0.9 * real() + 0.1 * real().detach()


def zeros(work: Work, step: Step) -> None:
    real = step.forward

    def forward() -> Tensor:
        return real() * 0.0

    step.forward = forward


def not_a_number(work: Work, step: Step) -> None:
    real = step.forward
    step.forward = lambda: real() * float("nan")


@pytest.mark.parametrize("fault", [wrong_weight, no_input_gradient, zeros, not_a_number])
@pytest.mark.parametrize("name", ["eager", "delayed"])
def test_what_is_wrong_does_not(fault: Callable[[Work, Step], None], name: str) -> None:
    work = make_work(CASES[0], CPU, BF16)
    step = built(work, name)
    fault(work, step)
    found = verdict(step, work, name)
    if (fault, name) == (wrong_weight, "delayed"):  # 2% are within what FP8 rounds away
        assert found.failure or found.ratio > 1.02
    else:
        assert "the reference's is" in found.failure


def test_an_optimizer_works_and_changes_nothing() -> None:
    work = make_work(Case("model", (16, 32, 32)), CPU, torch.float32)
    step = built(work, "eager")
    assert step.optimizer is not None and len(step.optimizer.state) == 4 * (4 + 2)
    assert all(s["step"] == 3 and s["exp_avg"].any() for s in step.optimizer.state.values())
    for name, (weight,) in step.weights.items():
        assert torch.equal(weight, work.weights[name])


@pytest.mark.parametrize(("runs", "claims"), [("nvfp4", "delayed"), ("delayed", "eager")])
def test_a_coarser_format_than_claimed_fails(runs: str, claims: str) -> None:
    work = make_work(CASES[0], CPU, BF16)
    assert verdict(built(work, runs), work, claims).failure


def test_a_missing_gradient_is_an_error() -> None:
    work = make_work(CASES[0], CPU, BF16)
    step = built(work, "eager")
    y = step.forward().detach().requires_grad_()
    step.forward = lambda: y * 1.0
    with pytest.raises(ValueError, match="no gradient"):
        step.results()


@pytest.mark.parametrize("name", RECIPES)
def test_pieces_make_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The specification is applied in pieces, as large tensors need it."""
    work = make_work(Case("linear", (256, 384, 256)), CPU, BF16)
    whole = numerics.results(work, RECIPES[name])
    monkeypatch.setattr(numerics, "CHUNK", 1)
    pieces = numerics.results(work, RECIPES[name])
    random = RECIPES[name].plan().stochastic
    assert torch.equal(pieces["y"], whole["y"])
    for output, wanted in whole.items():
        assert numerics.relative_error(pieces[output], wanted) < (0.2 if random else 1e-6)


def test_relative_error() -> None:
    a = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    assert numerics.relative_error(a, a) == 0.0
    assert numerics.relative_error(0 * a, a) == 1.0
    assert numerics.relative_error(a[:1], a) == float("inf")
    assert numerics.relative_error(a * float("nan"), a) == float("inf")
