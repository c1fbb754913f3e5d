"""A layer says once that it runs emulated, and, if asked, that its shape is slow."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
import torch

from minifloat import env
from minifloat import recipe as recipes
from minifloat.module import HIGH_PLAN
from minifloat.modules import advice
from minifloat.recipe.zoo import mxfp8_fwd_high_precision_bwd_factory

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
CURRENT = recipes.Float8CurrentScaling().plan()
DELAYED = recipes.DelayedScaling().plan()
MXFP8 = recipes.MXFP8BlockScaling().plan()
NVFP4 = recipes.NVFP4BlockScaling().plan()
SLOW = (512, 256, 256)  # tokens, in, out
FAST = (16384, 4096, 4096)


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200 as device 0, and nobody has said anything."""
    capability = env.capability
    monkeypatch.setattr(env, "capability", lambda d: 90 if d == CUDA else capability(d))
    monkeypatch.setattr(env, "advise", lambda: False)
    monkeypatch.setattr(advice, "SETTLED", set())
    monkeypatch.setattr(advice, "_said", set())


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "advise", lambda: True)


@pytest.fixture
def say(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[..., list[str]]]:
    """What a call says."""

    def call(plan: recipes.Plan, shape: tuple[int, int, int], device: torch.device) -> list[str]:
        caplog.clear()
        advice.advise("Linear(up)", plan, *shape, device)
        assert all(r.levelno == logging.WARNING for r in caplog.records)
        return [r.getMessage() for r in caplog.records]

    with caplog.at_level(logging.DEBUG, logger="minifloat"):
        yield call


# ------------------------------------------------------------------------------------ the number
@pytest.mark.parametrize(
    ("recipe", "expected"),
    [  # rooflines worked out by hand, to two digits
        (recipes.DelayedScaling(), (1.66, 1.63, 1.26, 1.15)),
        (recipes.Float8CurrentScaling(), (1.59, 1.55, 1.09, 0.97)),
        (recipes.Float8BlockScaling(), (1.32, 1.30, 1.05, 0.97)),
        (recipes.MXFP8BlockScaling(), (0.92, 0.91, 0.73, 0.67)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_roofline(recipe: recipes.Recipe, expected: tuple[float, ...]) -> None:
    shapes = ((4096, 6144), (4096, 4096), (512, 32768), (768, 768))
    plan = recipe.plan()
    assert [round(advice.speed(plan, 16384, *shape), 2) for shape in shapes] == list(expected)


@pytest.mark.parametrize(
    ("plan", "r", "c"), [(DELAYED, 0.545, 4), (CURRENT, 0.545, 6), (MXFP8, 1, 6), (NVFP4, 1, 8)]
)
def test_the_formula(plan: recipes.Plan, r: float, c: float) -> None:
    t, k, n = 1024, 768, 3072
    expected = 1 / (r + 30.6 * c * (1 / t + 1 / k + 1 / n))
    assert advice.speed(plan, t, k, n) == pytest.approx(expected)


def test_high_precision_is_as_fast_as_itself() -> None:
    assert advice.speed(HIGH_PLAN, *SLOW) == 1.0


def test_a_backward_in_high_precision_gains_and_costs_less() -> None:
    for override in ("high_precision", "dequantized"):
        plan = recipes.Float8CurrentScaling(backward_override=override).plan()
        t, k, n = FAST
        expected = 1 / ((0.545 + 2) / 3 + 30.6 * 5 * (1 / t + 1 / n))
        assert advice.speed(plan, t, k, n) == pytest.approx(expected)


def test_a_mixed_recipe() -> None:
    forward = (("linear", "input", ""), ("linear", "weight", ""), None)
    backward = (("linear", "grad_output", ""), None)
    recipe = recipes.CustomRecipe(qfactory=mxfp8_fwd_high_precision_bwd_factory)
    made = recipe.plan(forward, backward)
    t, k, n = FAST
    assert advice.speed(made, t, k, n) == pytest.approx(1 / (1 + 30.6 * 4 * (1 / t + 1 / n)))


@pytest.mark.parametrize("shape", [(0, 8, 8), (8, 0, 8), (8, 8, 0)])
def test_nothing_takes_no_time(shape: tuple[int, int, int]) -> None:
    assert advice.speed(CURRENT, *shape) == 1.0


# --------------------------------------------------------------------------------------- emulation
def test_an_emulated_recipe_says_so_once(say: Callable[..., list[str]]) -> None:
    (text,) = say(MXFP8, SLOW, CUDA)
    assert "MXFP8BlockScaling" in text and "emulated" in text and "sm_90" in text
    assert say(MXFP8, FAST, CUDA) == []
    assert say(recipes.MXFP8BlockScaling().plan(), SLOW, CUDA) == []


def test_each_emulated_recipe_says_so(say: Callable[..., list[str]]) -> None:
    assert len(say(MXFP8, SLOW, CUDA)) == len(say(NVFP4, SLOW, CUDA)) == 1


def test_what_is_native_and_what_has_no_gpu_says_nothing(say: Callable[..., list[str]]) -> None:
    assert say(CURRENT, SLOW, CUDA) == say(HIGH_PLAN, SLOW, CUDA) == say(MXFP8, SLOW, CPU) == []


# ------------------------------------------------------------------------------------------ advice
@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_a_slow_shape_says_so_once_with_the_number(
    say: Callable[..., list[str]], device: torch.device
) -> None:
    assert say(CURRENT, FAST, device) == []
    (text,) = say(CURRENT, SLOW, device)
    assert f"{advice.speed(CURRENT, *SLOW):.2f} times" in text
    for words in ("Linear(up)", "256 to 256", "512 tokens", "Float8CurrentScaling", "bf16"):
        assert words in text
    assert say(CURRENT, SLOW, device) == say(CURRENT, (64, 256, 256), device) == []
    assert len(say(CURRENT, (512, 256, 128), device)) == 1  # another shape
    assert len(say(DELAYED, SLOW, device)) == 1  # another recipe


@pytest.mark.usefixtures("asked")
def test_more_tokens_are_advised_where_they_help(say: Callable[..., list[str]]) -> None:
    assert "more tokens" in say(CURRENT, (1024, 1024, 1024), CPU)[0]
    assert "more tokens" not in say(CURRENT, SLOW, CPU)[0]
    assert "more tokens" not in say(MXFP8, FAST, CPU)[0]


def test_nobody_asked(say: Callable[..., list[str]]) -> None:
    assert say(CURRENT, SLOW, CPU) == []


@pytest.mark.usefixtures("asked")
def test_high_precision_needs_no_advice(say: Callable[..., list[str]]) -> None:
    assert say(HIGH_PLAN, SLOW, CPU) == []


@pytest.mark.usefixtures("asked")
def test_a_gpu_whose_numbers_are_not_known_gets_none(
    say: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env, "capability", lambda device: 100)
    assert say(CURRENT, SLOW, CUDA) == []


# -------------------------------------------------------------------------------------------- cost
def test_what_is_settled_is_looked_up_and_no_more(
    say: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for plan in (CURRENT, MXFP8, HIGH_PLAN):
        say(plan, SLOW, CUDA)
        assert (id(plan), CUDA) in advice.SETTLED
    monkeypatch.setattr(advice, "served", None)
    assert say(CURRENT, FAST, CUDA) == []


@pytest.mark.usefixtures("asked")
def test_tracing_says_nothing(
    say: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert say(MXFP8, SLOW, CUDA) == []
    assert not advice.SETTLED
