"""Two casts in one launch make the bits that they make in two."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

from triton.runtime.errors import PTXASError  # noqa: E402

from minifloat.formats import E4M3, E5M2, Cast  # noqa: E402
from minifloat.kernels import activation_grad, beside, blocks, norm, sums, tensorwise  # noqa: E402
from minifloat.kernels.variant import Config, Launch  # noqa: E402

BF16 = torch.bfloat16
SHAPES = {
    "whole": ((2048, 768), (3072, 768)),
    "partial": ((130, 200), (72, 200)),
    "uneven": ((33, 2048), (2048, 56)),
}


def source(launch: Launch) -> Launch:
    made = launch.described()
    assert made is not None
    return made


def outputs(launches: list[Launch], inputs: set[int]) -> list[Tensor]:
    tensors = [t for one in launches for t in one.args.values() if isinstance(t, Tensor)]
    return [t for t in tensors if t.data_ptr() not in inputs]


def pair(kind: str, x: Tensor, w: Tensor) -> tuple[list[Launch], set[int]]:
    """Two launches, and where their inputs are; everything else is what they write."""
    device = x.device

    def codes(t: Tensor, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.full((t.numel(),), 0xA5, dtype=torch.uint8, device=device).view(dtype)

    def number(value: float = 0.0) -> Tensor:
        return torch.full((1,), value, device=device)

    def scales(t: Tensor) -> Tensor:
        return torch.full((t.numel() // 8 + 4096,), torch.nan, device=device)

    of = {x.data_ptr(), w.data_ptr()}
    if kind == "scaled":
        scale = number(3.5), number(7.25)
        bits = [number().view(torch.int32) for _ in range(2)]
        made = [
            tensorwise._cast(x, E4M3, codes(x), codes(x), number(), source=scale[0],
                             amax=bits[0], scaled=True),
            tensorwise._cast(w, E5M2, None, codes(w), number(), source=scale[1], amax=bits[1],
                             kept=number(), scaled=True),
        ]  # fmt: skip
        return made, of | {s.data_ptr() for s in scale}
    if kind == "amax":
        made = [tensorwise._amax_launch(t) for t in (x, w)]
        for one in made:
            one.args["partial"].fill_(-1)
        return made, of
    if kind == "current":
        known = [tensorwise._partial_amax(t) for t in (x, w)]
        made = [
            tensorwise._cast(x, E4M3, codes(x), codes(x), number(), source=known[0][0],
                             n=known[0][1], kept=number()),
            tensorwise._cast(w, E4M3, codes(w), None, number(), source=known[1][0], n=known[1][1],
                             pow2=True),
        ]  # fmt: skip
        return made, of | {p.data_ptr() for p, _ in known}
    if kind == "blocks":
        lines, square = Cast("fp8_e4m3_1x128"), Cast("fp8_e4m3_128x128")
        made = [
            blocks._f32(x, lines, codes(x), scales(x), codes(x), scales(x)),
            blocks._f32(w, square, codes(w), scales(w), None, None),
        ]
        return made, of
    lines, square = Cast("mxfp8_e4m3"), Cast("mxfp8_e4m3_32x32")
    value = torch.full((w.numel(),), torch.nan, dtype=BF16, device=device)
    wide = torch.full(((x.shape[0] + 128) * (x.shape[1] + 128) // 8,), 0xA5, dtype=torch.uint8,
                      device=device)  # fmt: skip
    made = [
        blocks._e8m0(x, lines, codes(x), wide, codes(x), wide.clone()),
        blocks._e8m0(w, square, None, None, None, None, row_out=value),
    ]
    return made, of


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["scaled", "amax", "current", "blocks", "mxfp8"])
def test_the_bits_are_those_of_two_launches(kind: str, shape: str) -> None:
    torch.manual_seed(0)
    x, w = (torch.randn(s, device="cuda").to(BF16) for s in SHAPES[shape])
    alone, inputs = pair(kind, x, w)
    for one in alone:
        one.run()
    expected = outputs(alone, inputs)
    launches, inputs = pair(kind, x, w)
    both = beside.beside(source(launches[0]), source(launches[1]))
    assert both is not None
    kernel = beside.compiled(both)
    args = [launches[0].programs, *(one.args[n] for one in launches for n in one.fn.arg_names)]
    stream = torch.cuda.current_stream().cuda_stream
    given = (kernel.function, kernel.packed_metadata, None, None, None)
    kernel.run(both.programs, 1, 1, stream, *given, *args)
    found = outputs(launches, inputs)
    assert len(found) == len(expected) >= 2
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


X = torch.empty(64, 64, dtype=BF16, device="meta")


def test_a_limit_of_registers_is_that_of_one_kernel() -> None:
    one = tensorwise._amax_launch(X)
    assert beside.beside(one, one) is not None
    assert beside.beside(one, one._replace(config=Config(1, 8192, 8, registers=80))) is None


def test_who_launches_nothing_is_beside_nobody() -> None:
    one = tensorwise._amax_launch(X)
    assert beside.beside(one, one._replace(programs=0)) is None


def test_who_adds_up_does_so_in_warps_of_its_own() -> None:
    """8 warps add up in another order than 4 do, and a program makes the bits of its launches."""
    few, tall = (
        sums._sums(torch.empty(n, 96, device="meta"), torch.empty(96, device="meta"), n)
        for n in (300, 4000)
    )
    assert few.config.warps != tall.config.warps
    assert beside.beside(few, tall) is None and beside.beside(tall, few) is None
    assert beside.beside(few, few) is not None and beside.beside(tall, tall) is not None
    assert beside._adds_up(norm.stats_kernel) and beside._adds_up(activation_grad.words_kernel)
    casts = [tensorwise._amax_launch(X), tensorwise._amax_launch(X, Config(1, 8192, 8))]
    assert beside.beside(*casts) is not None  # maxima are the same in any order


def test_kernels_of_one_kind_are_one_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each copy of one would stay on the device for as long as the process runs."""

    def both(m: int, value: float = 0.0) -> Launch:
        x = torch.empty(m, 64, dtype=BF16, device="meta")
        one = torch.empty(1, device="meta")
        cast = tensorwise._cast(x, E4M3, x, None, one, source=one, eps=value)
        made = beside.beside(cast, cast)
        assert made is not None
        return made

    made: list[tuple[int, Any]] = []
    active = SimpleNamespace(get_current_target=lambda: None, get_current_device=lambda: device)
    monkeypatch.setattr(beside, "_COMPILED", {})
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=active))

    def compile_(source: Any, **given: Any) -> Any:
        made.append((device, source))
        return SimpleNamespace(run=None)

    monkeypatch.setattr(triton, "compile", compile_)
    device = 0
    first = beside.compiled(both(64))
    assert beside.compiled(both(640, 0.5)) is first  # numbers are no part of a kernel
    assert beside.compiled(both(65)) is not first  # but for what the compiler is told of them
    device = 1
    assert beside.compiled(both(64)) is not first
    assert [d for d, _ in made] == [0, 0, 1]


@pytest.mark.parametrize("error", [PTXASError("internal error"), PermissionError("read-only")])
def test_two_that_are_not_compiled_together_run_apart(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    cast = tensorwise._amax_launch(X)
    both = beside.beside(cast, cast)
    assert both is not None
    active = SimpleNamespace(get_current_target=lambda: None, get_current_device=lambda: 0)
    monkeypatch.setattr(beside, "_COMPILED", {})
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=active))

    def fail(source: Any, **given: Any) -> Any:
        raise error

    monkeypatch.setattr(triton, "compile", fail)
    assert beside.compiled(both) is None


def test_the_kernel_has_the_parameters_of_both() -> None:
    a, b = tensorwise.amax_kernel, tensorwise.cast_kernel
    made = beside.joined(a, b)
    names = [*("a_" + n for n in a.arg_names), *("b_" + n for n in b.arg_names)]
    assert made.arg_names == ["programs", *names]
    told = {p.name: (p.is_constexpr, p.do_not_specialize) for p in made.params}
    assert told["b_n"] == (False, True)
    assert told["a_BK"][0]
    assert not told["a_K"][1]
    assert made is beside.joined(a, b)


def test_a_kernel_whose_functions_number_programs_is_not_rewritten() -> None:
    assert beside._numbers_itself(tensorwise.cast_kernel)
    assert not beside._numbers_itself(asking)
    assert not beside._numbers_itself(asks_by_another)
    assert not beside._numbers_itself(other_axis)


if isinstance(tensorwise.cast_kernel, triton.JITFunction):
    import triton.language as tl

    @triton.jit
    def number(x):
        return x + tl.program_id(0)

    @triton.jit
    def asking(x):
        tl.store(x + number(0), 1.0)

    @triton.jit
    def by_another(x):
        return number(x)

    @triton.jit
    def asks_by_another(x):
        tl.store(x + by_another(0), 1.0)

    @triton.jit
    def other_axis(x):
        tl.store(x + tl.program_id(1), 1.0)
