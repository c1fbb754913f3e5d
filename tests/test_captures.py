"""Batches in CUDA graphs, without a GPU: what waits for what."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from minifloat import batch
from minifloat.recorder import Recorder

from .driver import CONTEXT, VOID, Device, kernel, record, stand_in

pytest.importorskip("triton")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return stand_in(monkeypatch)


CAST, NEXT, FIRST, SECOND, STEP, OTHER = range(101, 107)
KINDS = {FIRST: batch.PRODUCT, SECOND: batch.PRODUCT, STEP: batch.ASIDE, OTHER: batch.ASIDE}
STREAM = 5


def capture(device: Device, *batches: tuple[int, ...], stream: int = STREAM) -> None:
    """Capture batches of these nodes."""
    for names in batches:
        steps = batch.Steps()
        for name in names:
            kind = KINDS.get(name, batch.LAUNCH)
            words: list[Any] | None = [1, name, 0, 0, 0, 0, 0, 0, *[(0,)] * 4, 0]
            if kind != batch.PRODUCT:
                words = batch.launch_words(kernel(name, "i32"), 1, [3])
            assert words is not None
            steps.add(kind, words)
        batch.compiled().run(steps.plan, CONTEXT, stream)


@pytest.mark.parametrize("apart", [False, True])
def test_a_graph_runs_a_launch_aside_beside_products(device: Device, apart: bool) -> None:
    """In a batch of their own or in theirs; what comes next waits for both, products first."""
    device.capture[STREAM] = 9
    products = (CAST, FIRST, SECOND)
    if apart:
        capture(device, products, (STEP,), (NEXT,))
    else:
        capture(device, (*products, STEP), (NEXT,))
    assert device.graph == {CAST: [], FIRST: [CAST], SECOND: [FIRST], STEP: [CAST],
                            NEXT: [SECOND, STEP]}  # fmt: skip


def test_launches_aside_wait_for_each_other(device: Device) -> None:
    device.capture[STREAM] = 9
    capture(device, (CAST, FIRST), (STEP, OTHER, NEXT))
    assert device.graph == {CAST: [], FIRST: [CAST], STEP: [CAST], OTHER: [STEP],
                            NEXT: [FIRST, OTHER]}  # fmt: skip


def test_a_product_behind_a_launch_aside_waits_for_both(device: Device) -> None:
    device.capture[STREAM] = 9
    capture(device, (CAST, FIRST, STEP, SECOND, OTHER, NEXT))
    both = [FIRST, STEP]
    assert device.graph == {CAST: [], FIRST: [CAST], STEP: [CAST], SECOND: both, OTHER: both,
                            NEXT: [SECOND, OTHER]}  # fmt: skip


def test_products_of_other_batches_are_waited_for(device: Device) -> None:
    device.capture[STREAM] = 9
    capture(device, (CAST, FIRST), (SECOND, STEP))
    assert (device.graph[SECOND], device.graph[STEP]) == ([FIRST], [FIRST])


def test_a_launch_aside_waits_for_all_else(device: Device) -> None:
    """For what is captured behind the products, by others too; and where they began a graph."""
    device.capture[STREAM] = 9
    capture(device, (CAST, FIRST, NEXT), (STEP,))
    assert device.graph[STEP] == [NEXT]
    capture(device, (CAST, FIRST))
    device.node(55, STREAM)
    capture(device, (STEP,))
    assert device.graph[STEP] == [55]
    capture(device, (CAST, FIRST, NEXT, STEP))
    assert device.graph[STEP] == [NEXT]
    device.tips.clear()
    capture(device, (FIRST, STEP))
    assert device.graph[STEP] == [FIRST]


def test_a_launch_aside_waits_for_products_of_other_captures(device: Device) -> None:
    device.capture |= {STREAM: 9, 6: 9}
    capture(device, (CAST, FIRST))
    device.capture[STREAM] = 10
    capture(device, (STEP,))
    assert device.graph[STEP] == [FIRST]
    capture(device, (CAST, FIRST))
    device.tips[6] = [FIRST]
    capture(device, (STEP,), stream=6)
    assert device.graph[STEP] == [FIRST]


def test_what_waits_for_much_waits_for_products_too(device: Device) -> None:
    """For more nodes than are looked at."""
    device.capture[STREAM] = 9
    device.tips[STREAM] = list(range(1, 9))
    capture(device, (FIRST, STEP))
    assert device.graph == dict.fromkeys((FIRST, STEP), list(range(1, 9)))
    device.tips[STREAM] = list(range(1, 10))
    capture(device, (FIRST, STEP))
    assert device.graph == {FIRST: list(range(1, 10)), STEP: [FIRST]}


def test_a_graph_that_loses_what_it_waits_for_is_an_error(device: Device) -> None:
    device.capture[STREAM] = 9
    for names in ((CAST, FIRST, STEP), (CAST, FIRST, STEP, SECOND)):
        device.refuses = [0, 9]
        with pytest.raises(RuntimeError, match="the CUDA driver returned 9"):
            capture(device, names)
    device.refuses = [9]
    with pytest.raises(RuntimeError, match="the CUDA driver returned 9"):
        capture(device, (CAST, FIRST, STEP))


def test_where_a_step_is_several_nodes_all_are_waited_for(device: Device) -> None:
    device.capture[STREAM] = 9
    device.more = {STEP: 77}  # a node that is captured along with it
    capture(device, (CAST, FIRST, STEP, NEXT))
    assert device.graph[NEXT] == [STEP, 77, FIRST]
    device.more = {FIRST: 78}
    capture(device, (CAST, FIRST, STEP))
    assert device.graph[STEP] == [FIRST, 78]


def test_outside_of_a_capture_steps_run_one_by_one(device: Device) -> None:
    capture(device, (CAST, FIRST, SECOND, STEP))
    assert device.graph == {} and device.updates == 0
    assert [call[0] for call in device.seen if len(call) == 10] == [CAST, STEP]
    assert [call[1] for call in device.seen if len(call) > 10] == [FIRST, SECOND]


def test_a_driver_that_cannot_tell_captures_has_none(device: Device) -> None:
    given = [ctypes.cast(f, VOID).value for f in device.functions]
    batch.compiled().bind(*given[:5], 0, 0)
    device.capture[STREAM] = 9
    capture(device, (CAST, FIRST, STEP))
    assert device.graph == {CAST: [], FIRST: [CAST], STEP: [FIRST]}


def test_the_end_of_a_step_is_written_down_as_a_launch_aside(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(watching: Recorder) -> list[torch.Tensor]:
        out = torch.empty(4)
        for aside in (False, True):
            watching.launch(kernel(1, "*fp32"), 1, [out], aside=aside)
        return [out]

    found: list[int] = []
    add = batch.Steps.add

    def seen(steps: batch.Steps, kind: int, words: list[Any]) -> None:
        found.append(kind)
        add(steps, kind, words)

    monkeypatch.setattr(batch.Steps, "add", seen)
    record(work, torch.randn(4))
    assert found == [batch.LAUNCH, batch.ASIDE]
