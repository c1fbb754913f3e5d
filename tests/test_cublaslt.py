"""Products of values: without a GPU a stand-in for cuBLASLt multiplies what is described to it."""

from __future__ import annotations

import ctypes
import gc
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from minifloat import batch, cublaslt, fastest, writer
from minifloat.recorder import Recorder
from minifloat.steps import Call, Constant, Piece
from minifloat.writer import Program

from .driver import CONTEXT, CUDA, INT, SIZE, VOID, allocate, built
from .test_batch import Library

aten = torch.ops.aten
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = {0: FP32, 2: FP16, 14: BF16}
CHOOSE = fastest.choose
TURNED = list(itertools.product((False, True), repeat=2))


class Gemm(Library):
    """cuBLASLt as its documentation has it: columns first, `D = op(A) op(B) + bias`, with pointers
    as the call and the descriptor say. Algorithm 8 sums the contraction in two halves."""

    def __init__(self) -> None:
        super().__init__()
        self.next = 1000
        self.objects: dict[int, Any] = {}  # attributes of descriptors, layouts
        self.calls = 0

    def _call(self, name: str, *args: Any) -> int | None:
        if name == "cublasLtMatmul":
            return self.multiply(*(getattr(a, "value", a) for a in args))
        if name == "cublasLtMatmulDescSetAttribute":
            self.objects[args[0].value][args[1]] = args[2]._obj.value
        super()._call(name, *args)
        if name.endswith("Create"):
            self.next += 1
            args[0]._obj.value = self.next
            self.objects[self.next] = (
                self.layouts[-1] if name == "cublasLtMatrixLayoutCreate" else {}
            )
        return None

    def set_attribute(self, descriptor: int, attribute: int, value: int, size: int) -> int:
        assert size == 8
        address = ctypes.cast(value, ctypes.POINTER(ctypes.c_uint64))[0]
        self.objects[descriptor][attribute] = address
        return 0

    def multiply(self, *args: Any) -> int:
        """As cublasLtMatmul is called, by Python or by C."""
        _, descriptor, _, a, of_a, b, of_b, _, c, of_c, d, of_d, algorithm, *_ = args
        assert c == d and self.objects[of_c] == self.objects[of_d]
        self.calls += 1
        said = self.objects[descriptor]
        left, right = self._matrix(a, of_a).float(), self._matrix(b, of_b).float()
        left, right = left.t() if said.get(3) else left, right.t() if said.get(4) else right
        half = left.shape[1] // 2 if self._number(algorithm) == 8 else 0
        made = halves(left, right, half)
        into = self._matrix(d, of_d)
        if said.get(7) == 4:
            bias = self._memory(said[8], into.shape[0], DTYPES[said[26]])
            made = made + bias[:, None].float()
        assert made.shape == into.shape and not said.keys() & {17, 18, 25, 31, 32}
        into.copy_(made)
        return 0

    def _number(self, algorithm: Any) -> int:
        where = ctypes.addressof(algorithm._obj) if hasattr(algorithm, "_obj") else algorithm
        return ctypes.c_uint64.from_address(where).value

    def _matrix(self, address: int, layout: int) -> Tensor:
        kind, rows, columns, stride = self.objects[layout]
        assert stride >= rows
        memory = self._memory(address, (columns - 1) * stride + rows, DTYPES[kind])
        return memory.as_strided((rows, columns), (1, stride))

    def _memory(self, address: int, size: int, dtype: torch.dtype) -> Tensor:
        raw = (ctypes.c_uint8 * (size * dtype.itemsize)).from_address(address)
        return torch.frombuffer(raw, dtype=dtype)


@pytest.fixture
def gemm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gemm]:
    made, module = Gemm(), built()
    functions = (
        ctypes.CFUNCTYPE(INT, VOID, *(ctypes.c_uint,) * 7, VOID, VOID, VOID)(lambda *_: 1),
        ctypes.CFUNCTYPE(INT, VOID)(lambda where: 0),
        ctypes.CFUNCTYPE(INT, VOID)(lambda context: 0),
        ctypes.CFUNCTYPE(INT, VOID, INT, VOID, SIZE)(made.set_attribute),
        ctypes.CFUNCTYPE(INT, *(VOID,) * 14, SIZE, VOID)(made.multiply),
    )
    module.bind(*(ctypes.cast(f, VOID).value for f in functions), 0, 0)
    monkeypatch.setattr(batch, "compiled", lambda: module)
    monkeypatch.setattr(batch, "context", lambda: CONTEXT)
    monkeypatch.setattr(writer, "_stream", lambda index: 5)
    monkeypatch.setattr(writer, "_allocate", allocate)
    monkeypatch.setattr(cublaslt, "_library", lambda: made)
    monkeypatch.setattr(cublaslt, "_handle", lambda: VOID(99))
    monkeypatch.setattr(cublaslt, "_tuned", lambda: False)
    monkeypatch.setattr(fastest, "choose", lambda product: 0)
    yield made
    gc.collect()  # programs are cycles, and products are destroyed where they were made
    monkeypatch.undo()
    batch._bound.cache_clear()  # who comes next binds CUDA's


def halves(a: Tensor, b: Tensor, half: int) -> Tensor:
    """`a b` with fp32 sums in an order that does not depend on strides."""
    sums = [torch.zeros(a.shape[0], b.shape[1]) for _ in range(2)]
    for i in range(a.shape[1]):
        sums[i >= half] += a[:, i, None] * b[i]
    return sums[0] + sums[1]


def whole(rows: int, columns: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Numbers whose sums are exact."""
    return torch.randint(-2, 3, (rows, columns), device=device).to(dtype)


def lying(lines: int, k: int, turned: bool, dtype: torch.dtype) -> Tensor:
    """`[lines, K]` among other numbers, its lines contiguous where turned."""
    rows, columns = (k, lines) if turned else (lines, k)
    x = whole(rows + 1, -(-columns // 8) * 8 + 24, dtype)[1:, 8 : 8 + columns]
    return x.t() if turned else x


def piece(name: str, x: Tensor) -> Piece:
    return Piece(name, (tuple(x.shape), x.stride(), x.dtype, int(x.storage_offset())))


def asked(function: Any, *args: Tensor, to: torch.dtype | None = None) -> tuple[Call, Any]:
    """A call as it is recorded, and the form of what it makes."""
    a, b = args[-2:]
    given: list[Any] = [piece(f"i{i}", x) for i, x in enumerate(args)]
    given += [] if to is None else [Constant(to)]
    shape = (a.shape[0], b.shape[1])
    made = (shape, (shape[1], 1), to or a.dtype, 0)
    return Call(function, given, {}, ("y",)), {"y": made}


def multiplied(function: Any, *args: Tensor, to: torch.dtype | None = None) -> Tensor:
    """What a batch makes of a call."""
    step, forms = asked(function, *args, to=to)
    words, owner = cublaslt.of_call(step, forms, "s")  # type: ignore[misc]
    shape, strides, dtype, _ = forms["y"]
    y = torch.empty_strided(shape, strides, dtype=dtype)
    steps = batch.Steps()
    steps.add(batch.PRODUCT, words)
    where = {f"i{i}": x.untyped_storage().data_ptr() for i, x in enumerate(args)}
    where["y"] = y.data_ptr()
    batch.compiled().run(steps.plan, CONTEXT, 5, *(where[name] for name in steps.names))
    assert owner.proposals
    return y


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("first", "second"), TURNED)
def test_a_product_of_values_is_described_in_every_orientation(
    gemm: Gemm, first: bool, second: bool, dtype: torch.dtype
) -> None:
    a, b = lying(10, 6, first, dtype), lying(14, 6, second, dtype).t()
    expected = a.float() @ b.float()
    assert torch.equal(multiplied(aten.mm.default, a, b), expected.to(dtype))
    assert torch.equal(multiplied(aten.mm.dtype, a, b, to=FP32), expected)
    bias = whole(1, 14, dtype)[0]
    made = multiplied(aten.addmm.default, bias, a, b)
    assert torch.equal(made, (expected + bias.float()).to(dtype))
    assert gemm.calls == 3


def recorded(work: Any, *inputs: Tensor, device: torch.device = CUDA) -> Program:
    watching = Recorder(inputs)
    with watching:
        made = work(*inputs)
    program = watching.program(made, device)
    assert program is not None, watching.why
    return program


def test_products_of_a_step_are_one_batch(gemm: Gemm) -> None:
    """Forward with a bias, and both gradients, from operands as they were stored."""

    def work(x: Tensor, w: Tensor, g: Tensor, bias: Tensor) -> list[Tensor]:
        return [torch.addmm(bias, x, w.t()), torch.mm(g, w), torch.mm(g.t(), x)]

    sizes = ((8, 16), (24, 16), (8, 24))
    inputs = [*(whole(*size, BF16) for size in sizes), torch.ones(24, dtype=BF16)]
    program = recorded(work, *inputs)
    assert program.source.count("stream, p") == 1
    other = [*(whole(*size, BF16) for size in sizes), torch.full((24,), 3.0, dtype=BF16)]
    for made, expected in zip(program.run(other), work(*other), strict=True):
        assert torch.equal(made, expected)
    assert gemm.calls == 3


def test_operands_that_start_elsewhere_are_left_to_pytorch(gemm: Gemm) -> None:
    """cuBLAS may multiply them by another algorithm. Keys of programs tell them apart."""

    def work(x: Tensor, w: Tensor) -> list[Tensor]:
        return [torch.mm(x, w)]

    memory, w = whole(1, 8 * 16 + 8, BF16)[0], whole(16, 8, BF16)
    for start, batches in ((0, 1), (1, 0), (8, 1)):
        x = memory[start : start + 128].view(8, 16)
        program = recorded(work, x, w)
        assert program.source.count("stream, p") == batches
        assert torch.equal(program.run([x, w])[0], torch.mm(x, w))
    part = lambda x, w: [torch.mm(x[:, 1:], w[1:])]  # noqa: E731
    assert recorded(part, whole(8, 16, BF16), w).source.count("stream, p") == 0


def test_what_is_described_otherwise_is_left_to_pytorch(
    gemm: Gemm, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = whole(8, 16, BF16), whole(16, 24, BF16)
    bias = torch.ones(24, dtype=BF16)
    assert cublaslt.of_call(*asked(aten.mm.default, x, w), "s") is not None
    assert cublaslt.of_call(*asked(aten.addmm.default, bias, x, w), "s") is not None
    wide = whole(8, 64, BF16)
    for a, b in (
        (x.float(), w.float()), (x, w.half()), (x[:1], w), (x, w[:, :1]), (x[:, :1], w[:1]),
        (wide[:, ::4], w), (x[0].expand(8, 16), w), (wide[0].as_strided((8, 16), (8, 1)), w),
        (x, w[0].expand(16, 24)),
    ):  # fmt: skip
        assert cublaslt.of_call(*asked(aten.mm.default, a, b), "s") is None
    for other in (bias.float(), bias[None], bias[:1], torch.ones(48, dtype=BF16)[::2]):
        assert cublaslt.of_call(*asked(aten.addmm.default, other, x, w), "s") is None
    step, forms = asked(aten.addmm.default, bias, x, w)
    assert cublaslt.of_call(step._replace(kwargs={"alpha": Constant(2)}), forms, "s") is None
    assert cublaslt.of_call(*asked(aten.mm.dtype, x, w, to=FP16), "s") is None
    gaps = {"y": ((8, 24), (32, 1), BF16, 0)}
    assert cublaslt.of_call(asked(aten.mm.default, x, w)[0], gaps, "s") is None
    monkeypatch.setattr(fastest, "choose", lambda product: None)
    assert cublaslt.of_call(*asked(aten.mm.default, x, w), "s") is None


def described(lines: int = 8, k: int = 64, dtype: torch.dtype = BF16) -> cublaslt.Product:
    operand = cublaslt.Operand(lines, k, k, dtype, None)
    made = cublaslt.product(operand, operand, dtype, False, False)
    assert made is not None
    return made


def test_proposals_for_values_are_cublaslts_own(gemm: Gemm) -> None:
    """Neither is the first of them known to be PyTorch's, nor are there tiles for them."""
    made = described()
    assert [p.algorithm[0] for p in made.proposals] == [7, 8] and not made.is_pytorchs
    assert made.attributes == []
    gemm.by_size = True
    assert [p.algorithm[0] for p in described().proposals] == list(cublaslt.WORKSPACES)


def test_what_was_chosen_holds_for_the_settings_that_it_was_chosen_under(
    gemm: Gemm, monkeypatch: pytest.MonkeyPatch
) -> None:
    matmul: Any = torch.backends.cuda.matmul
    before = described().settings
    assert before == described().settings
    for name in ("allow_bf16_reduced_precision_reduction", "allow_fp16_accumulation"):
        was = getattr(matmul, name)
        try:
            setattr(matmul, name, not was)
            assert described().settings != before
        finally:
            setattr(matmul, name, was)
    assert described().settings == before
    tried: list[Any] = []
    monkeypatch.setattr(fastest, "_CHOSEN", {})
    monkeypatch.setattr(fastest, "_fits", lambda product: True)
    monkeypatch.setattr(fastest, "_fastest", lambda product, device: tried.append(product))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    operand = cublaslt.Operand(8, 64, 64, BF16, None)
    for settings, turned in (((1,), False), ((1,), False), ((2,), False), ((2,), True)):
        a = operand._replace(turned=turned)
        product = SimpleNamespace(
            a=a, b=operand, dtype=BF16, fast=False, bias=False, settings=settings,
            proposals=[1, 2], is_pytorchs=False,
        )  # fmt: skip
        assert CHOOSE(product) is None
    assert len(tried) == 3


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("first", "second"), TURNED)
def test_pytorchs_own_product_of_a_trial_of_values(
    gemm: Gemm, first: bool, second: bool, bias: bool
) -> None:
    a = cublaslt.Operand(4, 8, 16, BF16, None, first)
    b = cublaslt.Operand(6, 8, 16, BF16, None, second)
    made = cublaslt.product(a, b, BF16, False, bias)
    assert made is not None
    memory = [whole(1, o.nbytes // 2, BF16)[0] for o in (a, b)]
    assert [m.numel() for m in memory] == [(8 if turned else n) * 16
                                           for turned, n in ((first, 4), (second, 6))]  # fmt: skip
    x, w = (
        m.view(-1, 16)[:, : o.lines].t() if o.turned else m.view(-1, 16)[:, : o.k]
        for m, o in zip(memory, (a, b), strict=True)
    )
    ones = torch.ones(64)
    expected = x.float() @ w.float().t()
    if bias:  # the same bytes, read as bf16
        expected += ones.view(BF16)[:6].float()
    got = made.ordinary(*(m.view(torch.uint8) for m in memory), ones)
    assert got is not None and torch.equal(got, expected.to(BF16))


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("k", [64, 97])
def test_sums_in_another_order_are_seen(
    gemm: Gemm, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, k: int
) -> None:
    """Also where a product is small, and normal numbers would not tell."""
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0), raising=False
    )
    kept: list[list[int]] = []
    monkeypatch.setattr(fastest, "_best", lambda found, *_: kept.append(found) or found[0])
    product = described(8, k, dtype)
    operand, half = product.a, 0

    def ordinary(a: Tensor, b: Tensor, ones: Tensor) -> Tensor:
        return halves(operand.view(a).float(), operand.view(b).float().t(), half).to(dtype)

    product.ordinary = ordinary  # type: ignore[method-assign]
    for half, best in ((0, 0), (k // 2, 1), (k // 4, None)):  # noqa: B007
        assert fastest._fastest(product, torch.device("cpu")) == best
    assert kept == [[0], [1]]
    monkeypatch.setattr(fastest, "_cancel", lambda *given: None)
    assert fastest._fastest(product, torch.device("cpu")) is not None


def test_what_cancels_is_zero_but_for_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(n, 33, generator=generator) for n in (5, 7))
    before = a.clone()
    fastest._cancel(a, b, generator)
    assert (a.double() @ b.double().t()).abs().max() < 1e-12
    assert (a == before).float().mean() > 0.4 and (a[0] != 0).sum() == 32


# ------------------------------------------------------------------------------------ on a device
gpu = pytest.mark.gpu
SHAPES = [(64, 160, 96), (2048, 768, 3072), (4096, 4096, 4096)]


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many kinds of products are tried as a process tries."""
    monkeypatch.setattr(fastest, "_CHOSEN", {})


def products(to: torch.dtype, first: bool, second: bool) -> Any:
    def work(x: Tensor, w: Tensor) -> list[Tensor]:
        a, b = x.t() if first else x, w if second else w.t()
        return [torch.mm(a, b) if to is x.dtype else torch.mm(a, b, out_dtype=to)]

    return work


@gpu
@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize(("first", "second"), TURNED)
@pytest.mark.parametrize(("dtype", "to"), [(BF16, BF16), (FP16, FP16), (BF16, FP32), (FP16, FP32)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_are_those_of_pytorch(
    shape: tuple[int, int, int], dtype: torch.dtype, to: torch.dtype, first: bool, second: bool
) -> None:
    m, k, n = shape
    work, device = products(to, first, second), torch.device("cuda", 0)

    def inputs() -> list[Tensor]:
        sizes = (k, m) if first else (m, k), (k, n) if second else (n, k)
        return [torch.randn(size, device=device, dtype=dtype) for size in sizes]

    program = recorded(work, *inputs(), device=device)
    if shape == SHAPES[-1] and dtype is to is BF16:  # enough tiles for any device
        assert "stream, p" in program.source
    for _ in range(3):
        given = inputs()
        assert torch.equal(program.run(given)[0], work(*given)[0])


@gpu
@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_with_a_bias_are_those_of_pytorch(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    device = torch.device("cuda", 0)

    def work(x: Tensor, w: Tensor, bias: Tensor) -> list[Tensor]:
        return [torch.addmm(bias, x, w.t())]

    def inputs() -> list[Tensor]:
        return [torch.randn(size, device=device, dtype=BF16) for size in ((m, k), (n, k), (n,))]

    program = recorded(work, *inputs(), device=device)
    for _ in range(3):
        given = inputs()
        assert torch.equal(program.run(given)[0], work(*given)[0])


@gpu
@pytest.mark.usefixtures("untried")
def test_a_product_whose_bits_no_algorithm_makes_stays_pytorchs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        cublaslt.Product,
        "ordinary",
        lambda self, a, b, ones: torch.zeros(
            self.a.lines, self.b.lines, dtype=self.dtype, device=a.device
        ),
    )
    device = torch.device("cuda", 0)
    x, w = (torch.randn(256, 256, device=device, dtype=BF16) for _ in range(2))
    work = products(BF16, False, False)
    program = recorded(work, x, w, device=device)
    assert list(fastest._CHOSEN.values()) == [None]
    assert "stream, p" not in program.source
    assert id(torch.mm) in map(id, program.run.__globals__.values())
    assert torch.equal(program.run([x, w])[0], work(x, w)[0])
