"""Batches without a GPU: functions of Python stand for the CUDA driver and cuBLASLt."""

from __future__ import annotations

import ctypes
import gc
import itertools
import struct
import sys
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minifloat import batch, cublaslt, env, fastest, programs, writer
from minifloat.formats import Cast, Operand
from minifloat.recorder import Recorder
from minifloat.steps import Call, Constant, Piece, Record

from .driver import CONTEXT, CUDA, VOID, Device, built, kernel, record, stand_in

pytest.importorskip("triton")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return stand_in(monkeypatch)


def test_a_launch_gets_addresses_numbers_and_two_empty_ones(device: Device) -> None:
    x = torch.randn(4, 8)
    given = kernel(11, "*fp32", "constexpr", "*u8", "i32", "fp32", "i64", "constexpr")

    def work(watching: Recorder) -> list[torch.Tensor]:
        out = torch.empty((4, 8), dtype=torch.uint8)
        watching.launch(given, 6, [x[1:], None, out, -3, 0.1, 1 << 40, True])
        return [out]

    program = record(work, x)
    device.parameters = ["Q", "Q", "i", "f", "q", "Q", "Q"]
    (made,) = program.run((x,))
    (context, (function, *sizes, shared, stream, values)) = device.seen
    assert context == ("context", CONTEXT)
    assert (function, sizes, shared, stream) == (11, [6, 1, 1, 128, 1, 1], 32, 5)
    near = struct.unpack("<f", struct.pack("<f", 0.1))[0]
    assert values == [x.data_ptr() + 32, made.data_ptr(), -3, near, 1 << 40, 0, 0]
    program.run((x,))
    assert len(device.seen) == 3  # the thread has its context
    assert given in program.run.__globals__.values()  # its code stays loaded


def test_buffers_of_a_batch_are_one_allocation(device: Device) -> None:
    """What no result holds: parts that start at multiples of 256 bytes, and are not mixed up."""
    x = torch.randn(16)
    copy = kernel(1, "*fp32", "*fp32", "i32")

    def work(watching: Recorder) -> list[torch.Tensor]:
        first = torch.empty(16)
        watching.launch(copy, 1, [x, first, 64])
        second = torch.empty(16)
        watching.launch(copy, 1, [first, second, 64])
        out = torch.empty(16)
        watching.launch(copy, 1, [second, out, 64])
        return [out]

    program = record(work, x)
    assert program.source.count("allocate(") == 2 and program.source.count("stream, p") == 1
    device.parameters = ["Q", "Q", "i"]
    device.work = lambda a, b, n: ctypes.memmove(b, a, n)
    other = torch.randn(16)
    (made,) = program.run((other,))
    assert torch.equal(made, other)
    addresses = [call[-1][:2] for call in device.seen[1:]]
    assert addresses[0][0] == other.data_ptr() and addresses[2][1] == made.data_ptr()
    assert addresses[1][1] - addresses[1][0] == 256
    assert addresses[0][1] == addresses[1][0] and addresses[1][1] == addresses[2][0]


def test_a_batch_takes_so_many_addresses(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one has an allocation of its own."""
    copy = kernel(1, "*fp32", "*fp32", "i32")

    def work(watching: Recorder) -> list[torch.Tensor]:
        memory = [torch.empty(16) for _ in range(8)]
        watching.launch(copy, 1, [x, memory[0], 64])
        for a, b in itertools.pairwise(memory):
            watching.launch(copy, 1, [a, b, 64])
        return memory[-1:]

    x = torch.randn(16)
    monkeypatch.setattr(writer, "MOST", 3)
    program = record(work, x)
    assert program.source.count("stream, p") == 3 and program.source.count("p_part = ") == 2
    device.parameters = ["Q", "Q", "i"]
    device.work = lambda a, b, n: ctypes.memmove(b, a, n)
    other = torch.randn(16)
    assert torch.equal(program.run((other,))[0], other)


def test_operators_end_a_batch_and_see_what_it_made(device: Device) -> None:
    x = torch.randn(16)
    copy = kernel(1, "*fp32", "*fp32")

    def work(watching: Recorder) -> list[torch.Tensor]:
        first = torch.empty(16)
        watching.launch(copy, 1, [x, first])
        second = first.add(1.0)
        out = torch.empty(16)
        watching.launch(copy, 1, [second, out])
        return [out]

    program = record(work, x)
    assert program.source.count("stream, p") == 2
    device.parameters = ["Q", "Q"]
    device.work = lambda a, b: ctypes.memmove(b, a, 64)
    assert torch.equal(program.run((x,))[0], x + 1)


def test_a_batch_ends_where_much_memory_dies(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be there for longer than without batches."""
    x = torch.randn(16)
    copy = kernel(1, "*fp32", "*fp32")

    def work(watching: Recorder) -> list[torch.Tensor]:
        first, out = torch.empty(16), torch.empty(16)
        watching.launch(copy, 1, [x, first])
        watching.launch(copy, 1, [first, out])
        second = torch.empty(16)
        watching.launch(copy, 1, [out, second])
        watching.launch(copy, 1, [second, out])
        return [out]

    assert record(work, x).source.count("stream, p") == 1
    monkeypatch.setattr(writer, "HELD", 64)
    for consume, count in ((False, 2), (True, 3)):  # x dies with the first launch, if at all
        lines = [line.strip() for line in record(work, x, consume=consume).source.splitlines()]
        runs = [i for i, line in enumerate(lines) if "stream, p" in line]
        assert len(runs) == count
        assert all(lines[i + 1].startswith("del ") for i in runs)


def test_what_only_triton_can_launch_stays_tritons(device: Device) -> None:
    assert batch.launch_words(kernel(1, "*fp32"), 3, [("i0", 0)]) is not None
    for wrong in (
        {"num_ctas": 2}, {"launch_pdl": True}, {"global_scratch_size": 8},
        {"launch_cooperative_grid": True},
    ):  # fmt: skip
        assert batch.launch_words(kernel(1, "*fp32", **wrong), 3, [("i0", 0)]) is None
    assert batch.launch_words(kernel(1, "tensordesc<fp32[1]>"), 3, [("i0", 0)]) is None
    assert batch.launch_words(kernel(1, "i1"), 3, [True]) is None
    assert batch.launch_words(kernel(1, "*fp32"), 0, [("i0", 0)]) is None
    assert batch.launch_words(kernel(1, "*fp32"), 3, [("i0", 0), 5]) is None
    assert batch.launch_words(SimpleNamespace(function=1), 3, []) is None


def test_an_error_names_the_step_and_who_returned_it(device: Device) -> None:
    x = torch.randn(4)

    def work(watching: Recorder) -> list[torch.Tensor]:
        out = torch.empty(4)
        watching.launch(kernel(1, "*fp32"), 1, [out])
        return [out]

    program = record(work, x)
    device.status = 700
    with pytest.raises(RuntimeError, match=r"step 1 of a recorded program.*driver returned 700"):
        program.run((x,))
    with pytest.raises(TypeError, match="run"):
        batch.compiled().run("plan")


class Colour(IntEnum):
    RED = 1


class Given(tuple[Any, ...]):
    told: programs.Told | None = None


def given(*items: Any, index: int = -1) -> Given:
    made = Given(items)
    made.told = programs.tell(items, index)
    return made


def nested() -> torch.Tensor:
    """A tensor that has no shape."""
    shape, strides, start = torch.tensor([[2, 2]]), torch.tensor([[2, 1]]), torch.tensor([0])
    return torch._nested_view_from_buffer(torch.empty(4), shape, strides, start)


TOLD: tuple[Any, ...] = (
    (),
    (1, given(torch.empty(2, 3), (torch.empty(4).t(), 2)), torch.empty(5)),
    (1, Given((torch.empty(2, 3), 2))),  # never told
    (1, given(torch.empty(2, 3), object())),  # what cannot be told
    (1, True, 2.5, "a", None, torch.float8_e4m3fn, torch.device("cpu"), int),
    (torch.empty(3, 4), [torch.empty(4, 3).t(), (torch.nn.Parameter(torch.empty(2)), None)], 7),
    (torch.empty(9, dtype=torch.uint8)[3:], torch.empty(0, 5), torch.empty(())),
    (Cast("fp8_e4m3"), (Cast("fp8_e4m3"), Cast("fp8_e5m2"))),
    (Operand(torch.empty(2, 2), None, None, Cast("fp8_e4m3"), 2, False, 2), 5),
    (1, Colour.RED),
    (1, torch.empty(2, device="meta"), 2),
    (torch.eye(3).to_sparse(), 1),
    (nested(), 1),
    (1, object()),
    (1, [2, {3: 4}]),
)


@pytest.mark.parametrize("value", TOLD, ids=range(len(TOLD)))
@pytest.mark.parametrize("index", [-1, 0])
def test_compiled_keys_are_those_of_python(value: Any, index: int) -> None:
    module = built()
    for _ in range(2):  # types that are new, and types that are known
        key: list[Any] = []
        found: list[Any] = []
        told = module.walk(programs._PARTS, programs._part, value, key, found, index)
        plain_key: list[Any] = []
        plain_found: list[Any] = []
        assert told is programs._walk(value, plain_key, plain_found, index)
        if told:  # else nobody reads them
            assert list(map(type, key)) == list(map(type, plain_key)) and key == plain_key
            assert list(map(id, found)) == list(map(id, plain_found))


def test_compiled_keys_pass_errors_on() -> None:
    module = built()

    def part_of(kind: type) -> int:
        raise KeyError(kind)

    with pytest.raises(KeyError):
        module.walk({}, part_of, (1,), [], [], -1)
    with pytest.raises(TypeError, match="tuple or a list"):
        module.walk({}, part_of, 5, [], [], -1)
    with pytest.raises(TypeError, match="walk"):
        module.walk({}, part_of, (), (), [], -1)
    before = sys.getrefcount(Colour)
    for _ in range(100):
        module.walk({}, lambda kind: 4, (Colour.RED,), [], [], -1)
    assert sys.getrefcount(Colour) <= before + 2


class Library:
    """cuBLASLt, as far as descriptions go: it notes what is made, set and destroyed."""

    def __init__(self, workspace: int = 0, by_size: bool = False) -> None:
        self.made: list[str] = []
        self.attributes: dict[int, int] = {}
        self.layouts: list[tuple[int, ...]] = []
        self.workspace, self.by_size = workspace, by_size
        self.offered = 0
        self.refused: set[tuple[int, int]] = set()  # tiles and clusters
        self.version, self.tiles = 0, [0, 20, 300]
        self.needed = 0

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self._call(name, *args) or 0

    def _call(self, name: str, *args: Any) -> int | None:
        kind = name.removeprefix("cublasLt")
        if kind.endswith("Create"):
            self.made.append(kind.removesuffix("Create"))
            args[0]._obj.value = 1000 + len(self.made)
        if kind.endswith("Destroy"):
            self.made.remove(kind.removesuffix("Destroy"))
        if kind == "MatrixLayoutCreate":
            self.layouts.append(tuple(getattr(a, "value", a) for a in args[1:]))
        if kind == "MatmulDescSetAttribute":
            self.attributes[args[1]] = args[2]._obj.value
        if kind == "MatmulPreferenceSetAttribute":
            self.offered = args[2]._obj.value
        if kind == "MatmulAlgoConfigSetAttribute":
            args[0]._obj[{1: 1, 8: 2}[args[1]]] = args[2]._obj.value
        if kind == "GetVersion":
            return self.version
        if kind == "MatmulAlgoCapGetAttribute":
            assert args[1] == 6 and args[3] >= 4 * len(self.tiles)
            args[2]._obj[: len(self.tiles)] = self.tiles
            args[4]._obj.value = 4 * len(self.tiles)
        if kind == "MatmulAlgoCheck":
            if tuple(args[-2]._obj[1:3]) in self.refused:
                return 15
            args[-1]._obj.workspace = self.needed
        if kind == "MatmulAlgoGetHeuristic":
            result, count = args[-2]._obj, args[-1]._obj
            for i in range(2):
                result[i].algorithm[0] = self.offered if self.by_size else 7 + i
                result[i].workspace = self.workspace
            count.value = 2
        return None


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(cublaslt, "_library", lambda: made)
    monkeypatch.setattr(cublaslt, "_handle", lambda: VOID(99))
    monkeypatch.setattr(cublaslt, "_tuned", lambda: False)
    monkeypatch.setattr(fastest, "choose", lambda product: 0)
    return made


Y = ((8, 32), (32, 1), torch.bfloat16, 0)


def call(fast: bool = True, bias: bool = False) -> tuple[Call, dict[str, Any]]:
    """y[8, 32] = x[8, 64] w[32, 64]^T, as a recorder notes it."""
    n, e4m3, half = 32, torch.float8_e4m3fn, torch.bfloat16
    one = ((1,), (1,), torch.float32, 0)
    args = [
        Piece("x", ((8, 64), (64, 1), e4m3, 0)),
        Piece("w", ((64, n), (1, 80), torch.float8_e5m2, 16)),
        Piece("sx", one),
        Piece("sw", one),
        Piece("b", ((n,), (1,), half, 0)) if bias else Constant(None),
        Constant(None),
        Constant(half),
        Constant(fast),
    ]
    made = Call(torch.ops.aten._scaled_mm.default, args, {}, ("y",))
    return made, {"y": Y}


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_described_as_pytorch_does(library: Library, bias: bool) -> None:
    found = cublaslt.of_call(*call(bias=bias), "s")
    assert found is not None
    words, owner = found
    # Columns first: y^T[32, 8] = w x^T.
    e4m3, e5m2, half = 28, 29, 14
    expected = [(e5m2, 64, 32, 80), (e4m3, 64, 8, 64), (half, 32, 8, 32), (half, 32, 8, 32)]
    assert library.layouts == expected
    assert {library.attributes[k] for k in (3, 25)} == {1}
    assert library.attributes[31] == library.attributes[32] == 0
    assert (library.attributes.get(7), library.attributes.get(26)) == (
        (4, 14) if bias else (None,) * 2
    )
    assert words[0] == 99 and words[6] == ctypes.addressof(owner.proposals[0].algorithm)
    reads = [17, ("sw", 0), 18, ("sx", 0), *([8, ("b", 0)] if bias else [])]
    assert words[7:] == [0, ("w", 16), ("x", 0), ("y", 0), (0,), 2 + bias, *reads]
    assert library.made == ["MatmulDesc", *["MatrixLayout"] * 4]
    del found, owner, words
    gc.collect()
    assert library.made == []


def test_scales_of_blocks_have_their_modes(library: Library) -> None:
    e4m3 = torch.float8_e4m3fn
    scale = ((8, 1), (1, 8), torch.float32, 0)
    args = [
        Piece("x", ((8, 128), (128, 1), e4m3, 0)), Piece("w", ((128, 32), (1, 128), e4m3, 0)),
        [Piece("sx", scale)], [Constant(4)], [], [Piece("sw", scale)], [Constant(5)], [],
        Constant(None), Constant(torch.bfloat16),
    ]  # fmt: skip
    made = Call(torch.ops.aten._scaled_mm_v2.default, args, {}, ("y",))
    form = {"y": ((8, 32), (32, 1), torch.bfloat16, 0)}
    assert cublaslt.of_call(made, form, "s") is not None
    assert (library.attributes[31], library.attributes[32]) == (5, 4)
    assert library.attributes[25] == 0
    rows = [*args[:3], [Constant(1)], *args[4:]]  # a scale for each row is not known here
    assert cublaslt.of_call(made._replace(args=rows), form, "s") is None
    swizzled = [*args[:4], [Constant(1)], *args[5:]]
    assert cublaslt.of_call(made._replace(args=swizzled), form, "s") is None


def test_products_that_are_not_told_apart_from_pytorchs_are_left_to_it(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, forms = call()
    assert cublaslt.of_call(step, forms, "s") is not None
    x, w, sx, *rest = step.args
    lines = sx._replace(form=((8, 1), (1, 1), torch.float32, 0))
    turned = x._replace(form=((8, 64), (1, 8), torch.float8_e4m3fn, 0))
    for args in ([x, w, lines, *rest], [turned, w, sx, *rest]):
        assert cublaslt.of_call(step._replace(args=args), forms, "s") is None
    assert cublaslt.of_call(step._replace(function=torch.ops.aten.mm.default), forms, "s") is None
    wide = {"y": ((8, 32), (40, 1), torch.bfloat16, 0)}
    assert cublaslt.of_call(step, wide, "s") is None
    monkeypatch.setattr(cublaslt, "_tuned", lambda: True)
    assert cublaslt.of_call(step, forms, "s") is None


def test_where_pytorchs_algorithm_is_not_known_one_with_its_bits_is_taken_or_none(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Library(by_size=True)  # what PyTorch takes depends on the memory that it offers
    monkeypatch.setattr(cublaslt, "_library", lambda: other)
    seen: list[Any] = []
    for chosen in (None, 3):
        monkeypatch.setattr(fastest, "choose", lambda p, chosen=chosen: seen.append(p) or chosen)
        found = cublaslt.of_call(*call(), "s")
        if chosen is None:
            tried = [bytes(p.algorithm) for p in seen[-1].proposals]
        assert not seen[-1].is_pytorchs
        assert (found is None) == (chosen is None)
    assert found is not None and tried[3] == bytes(found[1].proposals[0].algorithm)
    del found
    seen.clear()  # before the library is gone


@pytest.mark.parametrize("chosen", [0, 3])
def test_a_plan_keeps_no_proposals_but_its_own(
    library: Library, monkeypatch: pytest.MonkeyPatch, chosen: int
) -> None:
    """Programs are many, and so are proposals."""
    seen: list[bytes] = []

    def choose(product: cublaslt.Product) -> int:
        seen.extend(bytes(p.algorithm) for p in product.proposals)
        return chosen

    monkeypatch.setattr(fastest, "choose", choose)
    words, owner = cublaslt.of_call(*call(), "s")  # type: ignore[misc]
    assert len(seen) > 3
    (kept,) = owner.proposals
    assert bytes(kept.algorithm) == seen[chosen]
    assert words[6] == ctypes.addressof(kept.algorithm)


def test_other_tiles_and_clusters_are_tried(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tried() -> list[tuple[int, ...]]:
        seen: list[Any] = []
        monkeypatch.setattr(fastest, "choose", lambda p: seen.extend(p.proposals) or 0)
        found = cublaslt.of_call(*call(), "s")
        assert found is not None and found[1].is_pytorchs
        return [tuple(p.algorithm[:3]) for p in seen]

    derived = [(of, tile, c) for of in (7, 8) for tile in (0, 20) for c in (2, 3, 5)]
    assert tried() == [(7, 0, 0), (8, 0, 0), *derived]
    library.refused = {(20, 3), (0, 2)}
    rest = [d for d in derived if d[1:] not in library.refused]
    assert tried() == [(7, 0, 0), (8, 0, 0), *rest]
    library.needed = cublaslt.WORKSPACES[0] + 1
    assert tried() == [(7, 0, 0), (8, 0, 0)]


def test_all_tiles_of_a_list_are_tried_for_a_short_product_of_blocks(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    e4m3 = torch.float8_e4m3fn
    lines = cublaslt.Operand(8, 128, 128, e4m3, 4), cublaslt.Operand(32, 128, 128, e4m3, 4)
    whole = [o._replace(mode=0) for o in lines]

    def tiles(a: Any, b: Any) -> set[int]:
        made = cublaslt.product(a, b, torch.bfloat16, False, False)
        assert made is not None and made.is_pytorchs
        return {p.algorithm[1] for p in made.proposals}

    assert tiles(*lines) == {0, 20}  # nothing is known of the lists of this version
    library.version = 130100
    assert tiles(*lines) == {0, 20, 300}
    assert tiles(*whole) == {0, 20}
    operations = 2 * 8 * 32 * 128
    monkeypatch.setattr(cublaslt, "SHORT", operations)
    assert tiles(*lines) == {0, 20, 300}
    monkeypatch.setattr(cublaslt, "SHORT", operations - 1)
    assert tiles(*lines) == {0, 20}


@pytest.mark.parametrize("bias", [False, True])
def test_pytorchs_own_product_of_a_trial(library: Library, bias: bool) -> None:
    """Codes as the operands lie, and every scale one."""
    made = cublaslt.product(
        cublaslt.Operand(16, 32, 48, torch.float8_e4m3fn),
        cublaslt.Operand(64, 32, 32, torch.float8_e4m3fn),
        torch.bfloat16, True, bias,
    )  # fmt: skip
    assert made is not None
    a, b = (torch.randint(0, 120, (n,), dtype=torch.uint8) for n in (16 * 48, 64 * 32))
    ones = torch.ones(64)
    x = a.view(torch.float8_e4m3fn).view(16, 48)[:, :32]
    w = b.view(torch.float8_e4m3fn).view(64, 32)
    expected = x.float() @ w.float().t()
    if bias:  # the same bytes, read as bf16
        expected += ones.view(torch.bfloat16)[:64].float()
    got = made.ordinary(a, b, ones)
    assert got is not None and torch.equal(got, expected.bfloat16())
    blocks = cublaslt.Operand(16, 128, 128, torch.float8_e4m3fn, 4)
    made = cublaslt.product(blocks, blocks, torch.bfloat16, False, False)
    assert made is not None and made.ordinary(a, b, ones) is None


def test_a_product_sets_its_scales_and_multiplies(device: Device, library: Library) -> None:
    words, owner = cublaslt.of_call(*call(), "s")  # type: ignore[misc]
    steps = batch.Steps()
    steps.add(batch.PRODUCT, words)
    where = {"w": 1 << 33, "x": 2 << 33, "y": 3 << 33, "sw": 4 << 33, "sx": 5 << 33}
    batch.compiled().run(steps.plan, CONTEXT, 5, *(where[name] for name in steps.names))
    _, one, two, product = device.seen
    descriptor = words[1]
    assert one == (descriptor, 17, where["sw"], 8) and two == (descriptor, 18, where["sx"], 8)
    assert product[:2] == (99, descriptor) and (product[2], product[7]) == (1.0, 0.0)
    y, algorithm = where["y"], ctypes.addressof(owner.proposals[0].algorithm)
    assert product[3:7] == (where["w"] + 16, words[2], where["x"], words[3])
    assert product[8:] == (y, words[4], y, words[5], algorithm, None, 0, 5)


def test_a_product_has_the_memory_that_its_algorithm_needs(
    device: Device, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.workspace = 40
    monkeypatch.setattr(fastest, "choose", lambda product: 1)
    step, forms = call()
    forms |= {piece.region: piece.form for piece in step.args if isinstance(piece, Piece)}
    program = writer.Writer(Record([step], forms, 0, set()), [Piece("y", Y)], 1, CUDA, False)
    assert program.forms["s0"] == ((40,), (1,), torch.uint8, 0)
    assert program._allocated(0) == ["y", "s0"]
    kind, words, owner = program.words[0]  # type: ignore[misc]
    assert kind == batch.PRODUCT and words[7] == 40 and ("s0", 0) in words
    assert words[6] == ctypes.addressof(owner.proposals[0].algorithm)


def test_without_a_compiler_there_are_no_batches_and_doctor_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails() -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(env, "triton_version", lambda: "3.6.0")
    monkeypatch.setattr(batch, "_library", lambda name: SimpleNamespace())
    monkeypatch.setattr(batch, "build", fails)
    batch._bound.cache_clear()
    assert batch.compiled() is None and "RuntimeError: no compiler" in batch.state()
    monkeypatch.setattr(batch, "_library", lambda name: None)
    batch._bound.cache_clear()
    assert batch.compiled() is None and "no CUDA" in batch.state()
    monkeypatch.setattr(env, "triton_version", lambda: "9.9.0")
    batch._bound.cache_clear()
    assert batch.compiled() is None and "9.9.0" in batch.state()
    monkeypatch.undo()
    batch._bound.cache_clear()
