"""Tensor-wide FP8 casts against the reference: amax, current scaling, delayed scaling."""

from __future__ import annotations

import pytest
import torch
from _cases import (
    BOTH,
    CASES,
    DEVICE,
    DIRECTED,
    DIRECTIONS,
    EMPTY,
    SMALL,
    assert_codes,
    assert_exact,
    buffer,
    filled,
    inputs,
    on_device,
    run_interpreted,
)
from torch import Tensor

from minifloat import reference
from minifloat.formats import E4M3, E5M2, Cast, Element, Scale, find_format, rup

pytest.importorskip("triton")
from minifloat.kernels import tensorwise  # noqa: E402
from minifloat.kernels.variant import Launch  # noqa: E402


def check_amax(shape: tuple[int, int], dtype: torch.dtype, plain: bool = False) -> None:
    for x in inputs(shape, dtype, plain):
        expected = reference.amax(x, Cast("fp8_e4m3"))
        out = buffer(expected)
        tensorwise.amax(on_device(x), out)
        assert_exact(out, expected)


def check_current(  # noqa: PLR0913  (what a cast takes)
    shape: tuple[int, int],
    dtype: torch.dtype,
    element: Element,
    directions: tuple[bool, bool],
    *,
    pow2: bool = False,
    eps: float = 0.0,
    given: bool = False,
    plain: bool = False,
    pad: int = 1,
) -> None:
    cast = Cast(find_format(element, Scale.F32, None).name, pow2=pow2, eps=eps)
    row, col = directions
    for x in inputs(shape, dtype, plain):
        expected, scale_inv, _ = reference.quantize(x, cast)
        expected = filled(expected, [rup(n, pad) for n in shape])
        amax = on_device(reference.amax(x, cast)) if given else None
        out = buffer(expected) if row else None
        out_t = buffer(expected.t()) if col else None
        out_scale = buffer(scale_inv)
        tensorwise.cast_current(
            on_device(x),
            element,
            pow2=pow2,
            eps=eps,
            row=out,
            col=out_t,
            scale_inv=out_scale,
            amax=amax,
            pad=pad,
        )
        assert_exact(out_scale, scale_inv)
        assert_codes(out, expected if row else None)
        assert_codes(out_t, expected.t() if col else None)


def check_scaled(
    shape: tuple[int, int],
    dtype: torch.dtype,
    element: Element,
    directions: tuple[bool, bool],
    plain: bool = False,
    pad: int = 1,
    scales: tuple[float, ...] = (0.37, 1.0, 3e5),
) -> None:
    cast = Cast(find_format(element, Scale.F32, None).name)
    row, col = directions
    for i, x in enumerate(inputs(shape, dtype, plain)):
        scale = torch.tensor([scales[i % len(scales)]])
        before = torch.tensor([(0.0, 1e3)[i % 2]])
        expected, scale_inv, amax = reference.quantize_scaled(x, scale, cast)
        expected = filled(expected, [rup(n, pad) for n in shape])
        out = buffer(expected) if row else None
        out_t = buffer(expected.t()) if col else None
        out_scale, out_amax = buffer(scale_inv), on_device(before)
        tensorwise.cast_scaled(
            on_device(x), element, scale=on_device(scale), amax=out_amax, row=out, col=out_t,
            scale_inv=out_scale, pad=pad,
        )  # fmt: skip
        assert_exact(out_scale, scale_inv)
        assert_exact(out_amax, torch.maximum(amax, before))
        assert_codes(out, expected if row else None)
        assert_codes(out_t, expected.t() if col else None)


def check_empty(shape: tuple[int, int], x: Tensor | None = None) -> None:
    x = torch.empty(shape, device=DEVICE) if x is None else x
    one, two = torch.ones(1, device=DEVICE), torch.full((1,), 2.0, device=DEVICE)
    row, col = x.to(torch.uint8), x.t().to(torch.uint8)
    out = buffer(one)
    tensorwise.amax(x, out)
    assert_exact(out, torch.zeros(1))
    out = buffer(one)
    tensorwise.cast_current(x, E4M3, pow2=False, eps=0.0, row=row, col=col, scale_inv=out)
    assert_exact(out, torch.ones(1))
    out = buffer(one)
    tensorwise.cast_current(x, E4M3, pow2=False, eps=0.0, row=row, col=col, scale_inv=out, amax=two)
    assert_exact(out, reference.quantize(x.cpu(), Cast("fp8_e4m3"), amax=two.cpu())[1])
    out, seen = buffer(one), one.clone()
    tensorwise.cast_scaled(x, E4M3, scale=two, amax=seen, row=row, col=col, scale_inv=out)
    assert_exact(out, torch.full((1,), 0.5))
    assert_exact(seen, torch.ones(1))


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "dtype"), CASES)
def test_amax(shape: tuple[int, int], dtype: torch.dtype) -> None:
    check_amax(shape, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("directions", "shape", "dtype"), DIRECTED)
def test_current(directions: tuple[bool, bool], shape: tuple[int, int], dtype: torch.dtype) -> None:
    check_current(shape, dtype, E4M3, directions)


@pytest.mark.gpu
@pytest.mark.parametrize("directions", DIRECTIONS)
@pytest.mark.parametrize("element", [E4M3, E5M2], ids=lambda e: e.name)
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-40])
def test_current_options(
    eps: float, given: bool, element: Element, directions: tuple[bool, bool]
) -> None:
    check_current((100, 127), torch.bfloat16, element, directions, pow2=True, eps=eps, given=given)


@pytest.mark.gpu
@pytest.mark.parametrize(("directions", "shape", "dtype"), DIRECTED)
def test_scaled(directions: tuple[bool, bool], shape: tuple[int, int], dtype: torch.dtype) -> None:
    check_scaled(shape, dtype, E5M2, directions)


WORDS = [(4, 128), (100, 128), (2052, 384)]  # four rows at a time; whole lines, partial tiles


@pytest.mark.gpu
@pytest.mark.parametrize("directions", DIRECTIONS)
@pytest.mark.parametrize("shape", [*WORDS, (256, 384)])
def test_in_words(shape: tuple[int, int], directions: tuple[bool, bool]) -> None:
    check_current(shape, torch.bfloat16, E5M2, directions, pow2=True)
    check_scaled(shape, torch.bfloat16, E4M3, directions)
    check_scaled(shape, torch.bfloat16, E5M2, directions, scales=(torch.inf, torch.nan))


@pytest.mark.parametrize(("offset", "words"), [(0, True), (64, True), (1, False), (3, False)])
def test_words_begin_with_a_pair(offset: int, words: bool) -> None:
    x = torch.empty(64, 256, dtype=torch.bfloat16)[:, offset : offset + 128]
    code, one = torch.empty(64 * 128, dtype=torch.uint8), torch.empty(1)
    cast = tensorwise._cast(x, E4M3, code, code, one, source=one, scaled=True)
    assert (cast.fn is tensorwise.words_kernel) == words
    assert (tensorwise._amax_launch(x).fn is tensorwise.words_amax_kernel) == words
    bytewise = tensorwise._cast(x, E4M3, code[1:], None, one, source=one, scaled=True)
    assert bytewise.fn is tensorwise.cast_kernel


@pytest.mark.parametrize(
    ("shape", "stride", "words"),
    [((4, 128), 1 << 30, True), ((4, 128), (1 << 30) + 2, False), ((4, 0), 256, False),
     ((0, 128), 128, True), ((4, 1 << 25), 1 << 25, True), ((4, 3 << 24), 3 << 24, False)],
)  # fmt: skip
def test_words_are_of_tiles_that_32_bits_span(
    shape: tuple[int, int], stride: int, words: bool
) -> None:
    x = torch.empty(1, dtype=torch.bfloat16, device="meta").as_strided(shape, (stride, 1))
    code, one = (torch.empty(1, dtype=t, device="meta") for t in (torch.uint8, torch.float32))
    cast = tensorwise._cast(x, E4M3, code, None, one, source=one, scaled=True)
    assert (cast.fn is tensorwise.words_kernel) == words


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 2, 1])
def test_rows_of_words_may_be_apart(offset: int) -> None:
    x = torch.randn(132, 400).to(torch.bfloat16)[:, offset : offset + 384]
    expected, scale_inv, _ = reference.quantize(x, Cast("fp8_e4m3"))
    wide = torch.full((132, 400), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    given = wide[:, offset : offset + 384].copy_(x)
    row, col, inverse = buffer(expected), buffer(expected.t()), buffer(scale_inv)
    tensorwise.cast_current(given, E4M3, pow2=False, eps=0.0, row=row, col=col, scale_inv=inverse)
    assert_exact(inverse, scale_inv)
    assert_codes(row, expected)
    assert_codes(col, expected.t())


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(1, 1), (17, 1), (100, 127), (129, 129), (4100, 300), *WORDS[:2]]
)
@pytest.mark.parametrize("directions", DIRECTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_room_is_filled_with_zeros(
    dtype: torch.dtype, directions: tuple[bool, bool], shape: tuple[int, int]
) -> None:
    check_current(shape, dtype, E4M3, directions, pad=16)
    check_scaled(shape, dtype, E5M2, directions, pad=16)
    check_scaled(shape, dtype, E4M3, directions, pad=16, scales=(torch.inf, torch.nan))


def check_empty_words() -> None:
    """No columns of a matrix that has some, and no rows."""
    some = torch.empty(16, 256, dtype=torch.bfloat16, device=DEVICE)
    check_empty((16, 0), some[:, :0])
    check_empty((0, 256), some[:0])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", EMPTY)
def test_empty(shape: tuple[int, int]) -> None:
    check_empty(shape)


@pytest.mark.gpu
def test_empty_words() -> None:
    check_empty_words()


@pytest.mark.gpu
def test_many_partial_amaxes() -> None:
    """More tiles than programs in the amax pass, and several rows of tiles in the cast."""
    check_amax((4096, 4100), torch.bfloat16)
    check_current((4096, 4100), torch.bfloat16, E4M3, BOTH)


@pytest.mark.gpu
def test_casts_replay_in_a_cuda_graph() -> None:
    x = torch.randn(256, 384, device="cuda", dtype=torch.bfloat16)
    row, col = (torch.empty(s, dtype=torch.uint8, device="cuda") for s in ((256, 384), (384, 256)))
    scale_inv = torch.empty(1, device="cuda")

    def run() -> None:
        tensorwise.cast_current(x, E4M3, pow2=False, eps=0.0, row=row, col=col, scale_inv=scale_inv)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    x.copy_(torch.randn_like(x) * 3)
    graph.replay()
    expected, inverse, _ = reference.quantize(x.cpu(), Cast("fp8_e4m3"))
    assert_codes(row, expected)
    assert_codes(col, expected.t())
    assert_exact(scale_inv, inverse)


@pytest.mark.parametrize("shape", [(1, 17), (17, 1), (17, 17)])
def test_a_size_of_one_is_not_compiled_in_where_zeros_follow(shape: tuple[int, int]) -> None:
    x, code, one = (
        torch.empty(s, dtype=t, device="meta")
        for s, t in ((shape, torch.bfloat16), ((1,), torch.uint8), ((1,), torch.float32))
    )
    for pad in (1, 16):
        launch = tensorwise._cast(x, E4M3, code, None, one, source=one, scaled=True, pad=pad)
        known = {p.name for p in launch.fn.params if p.do_not_specialize}
        assert known == ({"n", "M", "K"} if pad == 16 and 1 in shape else {"n"})


def test_a_kernel_that_writes_no_zeros_is_refused() -> None:
    with pytest.raises(ValueError, match="amax_kernel: PAD 16"):
        Launch.of(tensorwise.amax_kernel, 1, {"PAD": 16}, tensorwise.CONFIGS["amax"])


def test_interpreted() -> None:
    run_interpreted(__file__)


if __name__ == "__main__":
    check_amax((3, 40000), torch.float16, plain=True)
    check_amax((30, 4000), torch.bfloat16, plain=True)
    check_amax((17, 1), torch.bfloat16)
    for shape in SMALL:
        check_current(shape, torch.bfloat16, E4M3, BOTH, plain=True)
        check_scaled(shape, torch.float32, E5M2, BOTH, plain=True)
    check_current((100, 127), torch.float16, E5M2, (True, False), pow2=True, eps=1e-12, plain=True)
    check_current((100, 127), torch.float32, E4M3, (False, True), given=True, plain=True)
    for shape in ((1, 17), (17, 1), (66, 71), (68, 128)):
        check_current(shape, torch.bfloat16, E4M3, BOTH, plain=True, pad=16)
        check_scaled(shape, torch.float32, E5M2, (False, True), plain=True, pad=16)
    for shape in EMPTY:
        check_empty(shape)
    check_empty_words()
