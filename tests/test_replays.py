"""Work that is recorded and replayed, without a GPU: what it does are operators of PyTorch."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import minifloat
from minifloat import env, experts, library, opaque, programs, replays, sums
from minifloat.writer import Program


@pytest.fixture(autouse=True)
def _recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where kernels run, with nothing remembered."""
    monkeypatch.setattr(env, "runs_kernels", lambda x: True)
    monkeypatch.setattr(sums, "_has_kernel", lambda x: False)
    monkeypatch.setattr(replays, "_KINDS", {})


def kinds() -> list[Any]:
    return list(replays._KINDS.values())


def step(module: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor | None]:
    module.zero_grad(set_to_none=True)
    leaf = x.detach().requires_grad_()
    y = module(leaf)
    y.backward(grad)
    return [y.detach(), leaf.grad, *[p.grad for p in module.parameters()]]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(6, 16), (2, 3, 16)], ids=str)
def test_replayed_steps_are_the_ordinary_ones(bias: bool, shape: tuple[int, ...]) -> None:
    ours = minifloat.Linear(16, 32, bias=bias, device="cpu")
    plain = nn.Linear(16, 32, bias=bias)
    plain.load_state_dict(ours.state_dict())
    for i in range(5):
        x, grad = torch.randn(shape), torch.randn(*shape[:-1], 32)
        for a, b in zip(step(ours, x, grad), step(plain, x, grad), strict=True):
            assert a is not None and b is not None
            torch.testing.assert_close(a, b)
        (kind,) = kinds()
        if i == 0:
            assert kind is None  # seen
        else:
            assert isinstance(kind, replays.Recorded)
            (backward,) = kind.backward.values()
            assert "def program" in backward.source


def test_a_replay_runs_none_of_the_ordinary_code(monkeypatch: pytest.MonkeyPatch) -> None:
    from minifloat.core import linear

    module = minifloat.Linear(16, 32, device="cpu")
    x, grad = torch.randn(4, 16), torch.randn(4, 32)
    expected = [step(module, x, grad) for _ in range(2)][-1]
    monkeypatch.setattr(linear, "product", None)
    for a, b in zip(step(module, x, grad), expected, strict=True):
        assert torch.equal(a, b)  # type: ignore[arg-type]


def test_other_shapes_strides_and_gradients_are_other_kinds() -> None:
    module = minifloat.Linear(16, 32, bias=False, device="cpu")
    wide = torch.randn(4, 32)
    for x in (torch.randn(4, 16), torch.randn(5, 16), wide[:, 16:], wide[:, :16]):
        for _ in range(3):
            y, dx, dw = step(module, x, torch.ones(x.shape[0], 32))
            torch.testing.assert_close(y, x @ module.weight.T)
            torch.testing.assert_close(dw, torch.ones(32, x.shape[0]) @ x)
            torch.testing.assert_close(dx, torch.ones(x.shape[0], 32) @ module.weight)
    x = torch.randn(4, 16)
    grads = (torch.randn(4, 32), torch.randn(32, 4).t(), torch.ones(()).expand(4, 32))
    for grad in grads:
        for _ in range(3):
            torch.testing.assert_close(step(module, x, grad)[2], grad.T @ x)
    assert sum(isinstance(k, replays.Recorded) for k in kinds()) == len(kinds()) == 3


def test_frozen_and_no_grad_are_other_kinds() -> None:
    module = minifloat.Linear(16, 32, device="cpu")
    x = torch.randn(4, 16)
    for _ in range(3):
        with torch.no_grad():
            y = module(x)
        assert not y.requires_grad
        torch.testing.assert_close(y, x @ module.weight.T + module.bias)
        y = module(x)
        y.sum().backward()
    module.weight.requires_grad_(False)
    module.zero_grad(set_to_none=True)
    for _ in range(3):
        leaf = x.clone().requires_grad_()
        module(leaf).sum().backward()
        assert module.weight.grad is None and leaf.grad is not None
        torch.testing.assert_close(leaf.grad, torch.ones(4, 32) @ module.weight)


def test_a_retained_graph_is_replayed_again() -> None:
    module = minifloat.Linear(16, 32, bias=False, device="cpu")
    x, grad = torch.randn(4, 16), torch.randn(4, 32)
    for _ in range(2):
        step(module, x, grad)
    module.zero_grad(set_to_none=True)
    y = module(x)
    y.backward(grad, retain_graph=True)
    y.backward(grad)
    torch.testing.assert_close(module.weight.grad, 2 * grad.T @ x)


def test_a_backward_of_tensors_that_were_replaced_since_is_not_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from minifloat.core import linear

    module = minifloat.Linear(16, 32, bias=False, device="cpu")
    x, grad = torch.randn(4, 16), torch.randn(4, 32)
    for _ in range(3):
        step(module, x, grad)
    ran: list[Any] = []
    monkeypatch.setattr(linear, "finish", ran.append)
    y = module(x.requires_grad_())
    module.delayed.fit(5)
    y.backward(grad)
    assert len(ran) == 1
    step(module, x, grad)
    assert len(ran) == 1


def test_main_grad_is_added_to_where_it_is_now() -> None:
    module = minifloat.Linear(16, 32, bias=False, device="cpu", fuse_wgrad_accumulation=True)
    x, grad = torch.randn(4, 16), torch.randn(4, 32)
    for _ in range(4):
        module.weight.main_grad = torch.ones(32, 16)
        module(x).backward(grad)
        torch.testing.assert_close(module.weight.main_grad, 1 + grad.T @ x)


class Work:
    """A piece of work of the caller's; `seen` counts how often it really ran."""

    def __init__(self, forward: Any, backward: Any = None) -> None:
        self._forward, self._backward, self.seen = forward, backward, 0

    @staticmethod
    def kind(tensors: tuple[Any, ...]) -> Any:
        return ()

    def forward(self, data: Any, tensors: tuple[Any, ...]) -> Any:
        self.seen += 1
        return self._forward(data, tensors)

    def backward(self, data: Any, note: Any, saved: list[Any], grads: tuple[Any, ...]) -> Any:
        self.seen += 1
        return self._backward(data, note, saved, grads)


def twice(work: Work, *tensors: Tensor, data: Any = ()) -> Any:
    """The result of the call after the recording."""
    for _ in range(2):
        replays.forward(work, data, tensors)
    return replays.forward(work, data, tensors)


def test_what_is_not_known_to_be_pure_is_run_every_time() -> None:
    def random(data: Any, tensors: Any) -> Any:
        return torch.rand_like(tensors[0]), [], None

    work, x = Work(random), torch.randn(3)
    for n in range(1, 5):
        replays.forward(work, (), (x,))
        assert work.seen == n
    (why,) = kinds()
    assert "rand_like" in why


def test_work_that_tells_no_kind_is_run_every_time() -> None:
    class Plain:
        seen = 0

        @staticmethod
        def forward(data: Any, tensors: tuple[Any, ...]) -> Any:
            Plain.seen += 1
            return tensors[0].add(1.0), [], None

    for n in range(1, 4):
        replays.forward(Plain, (), (torch.randn(3),))
        assert Plain.seen == n
    assert not kinds()


def test_an_argument_is_no_result() -> None:
    work, x = Work(lambda data, t: (t[0].view(6), [], None)), torch.randn(2, 3)
    y, _, _ = twice(work, x)
    assert work.seen == 3 and y.data_ptr() == x.data_ptr()


def test_plain_values_tell_kinds_apart_and_others_forbid() -> None:
    work = Work(lambda data, t: (t[0].add(data[0]), [], None))
    x = torch.randn(3)
    for value in (1.0, 2.0):
        y, _, _ = twice(work, x, data=(value,))
        assert torch.equal(y, x + value)
    assert work.seen == 4
    for _ in range(3):
        replays.forward(work, (1.0, object()), (x,))
    assert work.seen == 7


def test_arguments_that_were_one_must_be_so_again() -> None:
    work = Work(lambda data, t: (t[0].mul(t[1]), [], None))
    x = torch.randn(3)
    assert torch.equal(twice(work, x, x)[0], x * x) and work.seen == 2
    other = torch.randn(3)
    assert torch.equal(replays.forward(work, (), (x, other))[0], x * other)
    assert work.seen == 3


def test_views_are_found_by_their_address() -> None:
    def forward(data: Any, tensors: Any) -> Any:
        x, w = tensors
        made = torch.empty(4, 6)
        made.copy_(x[1:].t())
        y = made[:, 2:].mm(w)
        return y, [made.t(), w, None], "note"

    work = Work(forward)
    x, w = torch.randn(7, 4), torch.randn(4, 5)
    twice(work, x, w)
    assert work.seen == 2
    x, w = torch.randn(7, 4), torch.randn(4, 5)
    y, (saved, same, nothing), note = replays.forward(work, (), (x, w))
    assert work.seen == 2 and same is w and nothing is None and note.note == "note"
    assert torch.equal(saved, x[1:]) and saved.stride() == (1, 6)
    torch.testing.assert_close(y, x[3:].t() @ w)


def test_saved_tensors_die_with_their_last_use() -> None:
    alive: list[bool] = []

    def backward(data: Any, note: Any, saved: list[Any], grads: tuple[Any, ...]) -> Any:
        (kept,) = saved
        saved.clear()
        dx = kept.mul(grads[0])
        del kept
        return (dx.add(1.0),)

    work = Work(lambda data, t: (t[0].add(1.0), [t[0].mul(2.0)], None), backward)
    x, g = torch.randn(3), torch.randn(3)
    for i in range(4):
        y, saved, note = replays.forward(work, (), (x,))
        ref = weakref.ref(saved[0])
        (dx,) = replays.backward(work, (), note, saved, (g,))
        gc.collect()
        alive.append(ref() is not None)
        torch.testing.assert_close(dx, 2 * x * g + 1)
        assert work.seen == min(2 * (i + 1), 4)
    assert alive == [False] * 4
    (kind,) = kinds()
    (program,) = kind.backward.values()
    lines = program.source.splitlines()
    freed = next(i for i, line in enumerate(lines) if line.strip().startswith("del i0"))
    assert any(" = " in line for line in lines[freed + 1 : -1])  # the last operator is to come


def test_counting_is_never_replayed() -> None:
    module = minifloat.Linear(16, 32, device="cpu")
    x = torch.randn(4, 16)

    def run() -> None:
        module(x).sum().backward()

    for _ in range(3):
        run()
    module._counts = torch.zeros(9, dtype=torch.int64)
    for n in range(1, 4):
        run()
        assert module._counts.sum() == 2 * n
    assert programs.recording() is None


def test_batched_gradients_are_run_by_the_ordinary_code() -> None:
    module = minifloat.Linear(16, 32, bias=False, device="cpu")
    x, grads = torch.randn(4, 16), torch.randn(5, 4, 32)
    for _ in range(3):
        leaf = x.clone().requires_grad_()
        (found,) = torch.autograd.grad(module(leaf), leaf, grads, is_grads_batched=True)
        torch.testing.assert_close(found, grads @ module.weight)


def test_a_sparse_input_is_run_by_the_ordinary_code() -> None:
    module = minifloat.Linear(16, 32, bias=False, device="cpu")
    x = torch.randn(4, 16)
    for _ in range(3):
        with torch.no_grad():
            torch.testing.assert_close(module(x.to_sparse()), x @ module.weight.T)


def test_a_backward_that_is_watched_is_not_replayed() -> None:
    """Modes want to see the operators of the library, which a program does not call."""
    work = Work(
        lambda data, t: (t[0].add(1.0), [t[0]], None),
        lambda data, note, saved, grads: (saved.pop().mul(grads[0]),),
    )

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            return func(*args, **(kwargs or {}))

    x, grad = torch.randn(4), torch.randn(4)
    for watched, ran in ((False, 2), (True, 4), (False, 5), (False, 5), (True, 6)):
        _, saved, note = replays.forward(work, (), (x,))
        with Watch() if watched else nullcontext():  # type: ignore[no-untyped-call]
            (dx,) = replays.backward(work, (), note, saved, (grad,))
        assert torch.equal(dx, x * grad) and work.seen == ran
    (kind,) = kinds()
    assert [type(p) for p in kind.backward.values()] == [Program]


def test_inference_is_replayed() -> None:
    module = minifloat.Linear(16, 32, device="cpu")
    with torch.inference_mode():
        for shape in ((4, 16), (2, 3, 16)):
            for _ in range(3):
                x = torch.randn(shape)
                y = module(x)
                torch.testing.assert_close(y, x @ module.weight.T + module.bias)
    assert [type(k) for k in kinds()] == [replays.Recorded] * 2


@pytest.mark.parametrize("shape", [(6, 16), (2, 3, 16)], ids=str)
def test_outputs_may_be_changed_in_place(shape: tuple[int, ...]) -> None:
    module = minifloat.Linear(16, 32, device="cpu")
    for _ in range(4):
        x = torch.randn(shape)
        module.zero_grad()
        y = module(x).relu_()
        y.sum().backward()
        expected = (y > 0).to(y).reshape(-1, 32).T @ x.reshape(-1, 16)
        torch.testing.assert_close(module.weight.grad, expected)


@pytest.mark.parametrize("shape", [(6, 16), (2, 3, 16)], ids=str)
def test_a_change_in_place_of_what_is_saved_is_an_error(shape: tuple[int, ...]) -> None:
    module = minifloat.Linear(16, 32, device="cpu")
    for _ in range(4):
        x = torch.randn(shape)
        y = module(x)
        x.add_(1)
        with pytest.raises(RuntimeError, match="inplace"):
            y.sum().backward()


def test_saved_tensors_on_the_host_and_both_kinds_of_checkpoints() -> None:
    module = minifloat.Linear(16, 32, device="cpu")
    x = torch.randn(4, 16)
    expected = torch.ones(4, 32) @ module.weight
    for _ in range(4):
        with torch.autograd.graph.save_on_cpu():
            leaf = x.clone().requires_grad_()
            y = module(leaf)
        y.sum().backward()
        torch.testing.assert_close(leaf.grad, expected)
        for reentrant in (True, False):
            leaf = x.clone().requires_grad_()
            checkpoint(module, leaf, use_reentrant=reentrant).sum().backward()
            torch.testing.assert_close(leaf.grad, expected)


def test_a_recording_that_fails_leaves_nothing_behind() -> None:
    fails = True

    def forward(data: Any, tensors: Any) -> Any:
        made = tensors[0].mul(2.0)
        if fails:
            raise KeyError("now")
        return made.add(1.0), [], None

    work, x = Work(forward), torch.randn(3)
    fails = False
    replays.forward(work, (), (x,))
    fails = True
    with pytest.raises(KeyError, match="now"):
        replays.forward(work, (), (x,))
    assert programs.recording() is None and torch._C._len_torch_dispatch_stack() == 0
    assert kinds() == [None]
    fails = False
    for _ in range(2):
        assert torch.equal(replays.forward(work, (), (x,))[0], x * 2 + 1)
    assert work.seen == 3


def test_weights_side_by_side_are_told_from_those_in_one_storage() -> None:
    """A view of the first reaches the others only in one storage."""
    flat = torch.zeros(4, 3, 16)
    apart = [torch.zeros(0).set_(w.clone().untyped_storage(), 0, w.shape) for w in flat]
    sizes, x = torch.tensor([1, 1, 1, 1]), torch.randn(4, 16)
    one = experts.Apart.kind((sizes, x, None, *flat))
    assert one == experts.Apart.kind((sizes, x, None, *flat.clone()))
    assert one[0] and not experts.Apart.kind((sizes, x, None, *apart))[0]


def test_other_ranks_make_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    module = minifloat.Linear(16, 32, device="cpu")
    for ranks in (0, 1, 2):
        monkeypatch.setattr(replays, "_ranks", lambda ranks=ranks: ranks)
        module(torch.randn(4, 16))
    assert len(kinds()) == 3


def test_another_current_device_is_left_to_the_ordinary_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A program launches on the stream of its device, which must be the current one."""
    work = Work(
        lambda data, t: (t[0].add(1.0), [t[0]], None),
        lambda data, note, saved, grads: (saved.pop().mul(grads[0]),),
    )
    x, grad = torch.randn(4), torch.randn(4)

    def run() -> int:
        _, saved, note = replays.forward(work, (), (x,))
        replays.backward(work, (), note, saved, (grad,))
        return work.seen

    assert [run() for _ in range(3)] == [2, 4, 4]
    _, saved, note = replays.forward(work, (), (x,))
    monkeypatch.setattr(env, "is_current", lambda index: False)
    replays.backward(work, (), note, saved, (grad,))
    assert work.seen == 5 and [run() for _ in range(2)] == [7, 9]


# ------------------------------------------------------------------------------ operators in graphs
SEEN: list[str] = []


def _half(x: Tensor, others: list[Tensor | None], factor: float) -> list[Tensor]:
    SEEN.append("half")
    made = x.mul(factor)
    return [made, made.add(1.0)] if others[0] is None else [made.add(others[0]), made]


def _half_fake(x: Tensor, others: list[Tensor | None], factor: float) -> list[Tensor]:
    return [torch.empty_like(x), torch.empty_like(x)]


def _double(x: Tensor) -> Tensor:
    SEEN.append("double")
    return x.mul(2.0)


@pytest.fixture(scope="module")
def operators() -> None:
    library.define(
        (
            ("tests_half(Tensor x, Tensor?[] others, float factor) -> Tensor[]", _half, _half_fake),
            ("tests_double(Tensor x) -> Tensor", _double, torch.empty_like),
        ),
        replayed=True,
    )


@pytest.mark.skipif(not opaque.AVAILABLE, reason="needs PyTorch's opaque objects")
@pytest.mark.usefixtures("operators")
def test_operators_are_replayed_in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_OPERATORS", {})
    SEEN.clear()
    half, double = library.op("tests_half"), library.op("tests_double")

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(x: Tensor, w: Tensor) -> Tensor:
        a, b = half(x, [None, x], 0.5)
        c, d = half(x, [w], 0.5)
        return double(a + b) + c * d  # type: ignore[no-any-return]

    w = torch.nn.Parameter(torch.randn(4))
    for i in range(4):
        x = torch.randn(3, 4)
        expected = 2 * (x / 2 + (x / 2 + 1)) + (x / 2 + w) * (x / 2)
        torch.testing.assert_close(run(x, w), expected)
        assert SEEN.count("half") == min(2 * (i + 1), 4) and SEEN.count("double") == min(i + 1, 2)
    kinds = list(programs._OPERATORS.values())
    assert len(kinds) == 3 and all(isinstance(k, tuple) for k in kinds)


@pytest.mark.skipif(not opaque.AVAILABLE, reason="needs PyTorch's opaque objects")
def test_operators_that_change_what_no_schema_tells_are_not() -> None:
    counts = torch.zeros(9, dtype=torch.int64)
    for n in range(1, 5):
        assert torch.equal(library.op("tallied")(torch.ones(2), counts, 3), torch.ones(2))
        assert counts[3] == n and counts._version == 0
