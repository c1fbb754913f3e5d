"""Steps on single numbers: against the reference, and as operators."""

from __future__ import annotations

import pytest
import torch

from minifloat import scalars
from minifloat.recipe.delayed import Slots, update, update_all
from minifloat.recipe.plan import DelayedUpdate

OPCHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")


def test_snapshot_is_an_operator_and_a_copy() -> None:
    torch.library.opcheck(
        torch.ops.minifloat.snapshot.default, (torch.ones(1),), test_utils=OPCHECKS
    )
    x = torch.ones(1)
    y = scalars.snapshot(x)
    x.zero_()
    assert y.item() == 1


def test_nothing_is_advanced_without_a_kernel() -> None:
    history, one = torch.zeros(4, 1), torch.ones(1)
    assert not scalars.advance([scalars.Step(history, (one,), (one,), (448.0,), False)])
    assert not history.any()


def test_rescale_rounds_once() -> None:
    y = torch.randn(5, 7)
    a, b = torch.tensor([3.0]), torch.tensor([0.5])
    expected = (y * (a * b * 0.25)).to(torch.bfloat16)
    assert torch.equal(scalars.rescale(y, a, b, 0.25, torch.bfloat16), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1, 2, 3, 16, 1024])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("margin", [0, 2])
def test_advance_has_the_bits_of_the_reference(length: int, algorithm: str, margin: int) -> None:
    rule = DelayedUpdate(margin, length, algorithm, None, False)
    nan, inf = float("nan"), float("inf")
    steps = [
        (1.0, 2.0, 0.0),
        (0.0, 1e-30, 5.0),
        (nan, 3.0, inf),
        (7.0, 1e-45, 2.0),
        (1.0, 1.0, 1.0),
    ]
    states = []
    for device in ("cpu", "cuda"):
        history = torch.zeros(length, 3, device=device)
        scales = tuple(torch.ones(1, device=device) for _ in range(3))
        amaxes = tuple(torch.zeros(1, device=device) for _ in range(3))
        seen = []
        for step in steps:
            for amax, value in zip(amaxes, step, strict=True):
                amax.fill_(value)
            update(Slots(history, scales, amaxes, (448.0, 448.0, 57344.0)), rule, None)
            seen.append(torch.cat((history.flatten(), *scales, *amaxes)).cpu())
        states.append(torch.stack(seen))
    assert torch.equal(*(s.view(torch.int32) for s in states))


@pytest.mark.gpu
def test_layers_advance_together_as_one_by_one() -> None:
    """More than a program has, two of a length, two of a rule; replayed at the third time."""

    def layers() -> list[tuple[Slots, DelayedUpdate, None]]:
        made: list[tuple[Slots, DelayedUpdate, None]] = []
        for i in range(scalars.MANY + 3):
            length = 4 if i % 2 else 16
            history = torch.zeros(length, 3, device="cuda")
            scales = tuple(torch.ones(1, device="cuda") for _ in range(3))
            amaxes = tuple(torch.zeros(1, device="cuda") for _ in range(3))
            rule = DelayedUpdate(0, length, "max" if i % 3 else "most_recent", None, False)
            made.append((Slots(history, scales, amaxes, (448.0, 448.0, 57344.0)), rule, None))
        return made

    alone, together = layers(), layers()
    for step in range(4):
        for steps in (alone, together):
            for i, (slots, *_) in enumerate(steps):
                for k, amax in enumerate(slots.amaxes):
                    amax.fill_((i * 7 + k * 3 + step * 5) % 11)
        for slots, rule, group in alone:
            update(slots, rule, group)
        update_all(together)
        for (a, *_), (b, *_) in zip(alone, together, strict=True):
            for x, y in zip((a.history, *a.scales, *a.amaxes), (b.history, *b.scales, *b.amaxes),
                            strict=True):  # fmt: skip
                assert torch.equal(x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 1), (17, 33), (128, 4096)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_rescale_on_the_gpu(shape: tuple[int, int], dtype: torch.dtype) -> None:
    y = torch.randn(shape, device="cuda")
    a, b = torch.tensor([3.0], device="cuda"), torch.tensor([0.3], device="cuda")
    expected = (y * (a * b * 0.25)).to(dtype)
    assert torch.equal(scalars.rescale(y.clone(), a, b, 0.25, dtype), expected)


def test_advance_is_an_operator() -> None:
    """What a graph runs on a GPU; here by the reference."""

    def made() -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        g = torch.Generator().manual_seed(0)
        pair = ([torch.rand(2, generator=g) for _ in range(3)] for _ in range(2))
        return (torch.rand(8, 6, generator=g), *pair)

    limits, op = (448.0, 448.0, 57344.0), torch.ops.minifloat.advance.default
    torch.library.opcheck(op, (*made(), list(limits), False), test_utils=OPCHECKS)
    for algorithm in ("max", "most_recent"):
        history, scales, amaxes = made()
        rule = DelayedUpdate(0, 8, algorithm, None, False)
        update(Slots(history, tuple(scales), tuple(amaxes), limits), rule, None)
        got = made()
        op(*got, list(limits), algorithm == "most_recent")
        for a, b in zip((history, *scales, *amaxes), (got[0], *got[1], *got[2]), strict=True):
            assert torch.equal(a, b)
