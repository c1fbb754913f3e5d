"""Casting a matrix as it is produced is casting its value; eager, fake and compiled agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from minifloat import dispatch, norms, opaque, producers, reference
from minifloat.core.linear import stored
from minifloat.formats import HADAMARD_SIGN_MASK, Cast, Operand
from minifloat.operands import activation_backward, operands
from minifloat.producer import ACTIVATIONS, activation, columns
from minifloat.producers import Lazy

from .test_dispatch import assert_bits, assert_own_memory, assert_same_kind, compiled, fake_of

needs_ops = pytest.mark.skipif(not opaque.AVAILABLE, reason="this PyTorch has no opaque objects")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SEED = torch.tensor([5, 7])
BF16 = torch.bfloat16
# One of each kind of scale in the recipes.
CASTS = [
    Cast("fp8_e4m3"),
    Cast("fp8_e5m2", pow2=True),
    Cast("fp8_e4m3_1x128", pow2=True),
    Cast("fp8_e4m3_128x128", pow2=True),
    Cast("mxfp8_e4m3"),
    Cast("nvfp4"),
]
DIRECTIONS = {"row": (True, False), "col": (False, True), "both": (True, True)}
SHAPES = [(1, 2), (17, 34), (128, 256), (130, 514), (130, 512), (0, 16), (16, 0)]


def wide(m: int, k: int, device: str = "cpu", dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed + 7 * m + k)
    x = torch.randn(m, k, generator=g) * torch.exp2(torch.randint(-6, 3, (m, k), generator=g))
    return x.to(dtype).to(device)


def swiglu(m: int, k: int, device: str, dtype: torch.dtype = BF16) -> Lazy:
    return producers.activated(wide(m, k, device, dtype), activation("swiglu"))


def gelu(m: int, k: int, device: str, dtype: torch.dtype = BF16) -> Lazy:
    return producers.activated(wide(m, k, device, dtype), activation("gelu"))


def dswiglu(m: int, k: int, device: str, dtype: torch.dtype = BF16) -> Lazy:
    dy = wide(m, k // 2, device, dtype, seed=1)
    return producers.activation_gradient(wide(m, k, device, dtype), dy, activation("swiglu"))


def layer_norm(m: int, k: int, device: str, dtype: torch.dtype = BF16) -> Lazy:
    x = wide(m, k, device, dtype)
    gamma, beta = (wide(1, k, device, dtype, seed=s)[0] for s in (2, 3))
    mean, rstd = norms.norm_stats(x, 1e-5, rms=False)
    return producers.normalized(x, mean, rstd, gamma, beta, zero_centered=True)


def rms_norm(m: int, k: int, device: str, dtype: torch.dtype = BF16) -> Lazy:
    x = wide(m, k, device, dtype)
    _, rstd = norms.norm_stats(x, 1e-5, rms=True)
    return producers.normalized(x, None, rstd, wide(1, k, device, dtype, seed=2)[0])


PRODUCERS: dict[str, Callable[..., Lazy]] = {
    "swiglu": swiglu,
    "gelu": gelu,
    "dswiglu": dswiglu,
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
}


def tensors(made: Any) -> list[Tensor]:
    """The tensors of operands, in order."""
    found = []
    for item in made:
        if isinstance(item, Operand):
            found += [t for t in (item.data, item.scale, item.amax) if t is not None]
        elif item is not None:
            found.append(item)
    return found


def assert_equal(a: Any, b: Any) -> None:
    assert [type(x) for x in a] == [type(x) for x in b]
    for x, y in zip(a, b, strict=True):
        if isinstance(x, Operand):
            assert (x.cast, x.columns, x.viewed) == (y.cast, y.columns, y.viewed)
    left, right = tensors(a), tensors(b)
    assert len(left) == len(right)
    for x, y in zip(left, right, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        fresh = (t.clone(memory_format=torch.contiguous_format).view(torch.uint8) for t in (x, y))
        assert torch.equal(*fresh)


# ------------------------------------------------------------------------------------------ the law
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("cast", CASTS, ids=lambda c: c.format_name)
@pytest.mark.parametrize("name", PRODUCERS)
def test_a_cast_of_what_is_produced_is_a_cast_of_its_value(
    name: str, cast: Cast, direction: str, shape: tuple[int, int], device: str
) -> None:
    lazy = PRODUCERS[name](*shape, device)
    casts = [cast if wanted else None for wanted in DIRECTIONS[direction]]
    x = lazy.value()
    assert x.shape == lazy.shape and x.dtype is lazy.dtype and lazy.device == x.device
    expected = dispatch.quantize(x, *casts)
    assert_bits(producers.quantize(lazy, *casts), expected)
    for keep in (False, True):
        made = operands(lazy, *casts, keep_col=keep)
        assert_equal(made, operands(x, *casts, keep_col=keep))
    if not cast.tiled:
        known = 2 * dispatch.amax(x, *casts)[0]
        options: dict[str, Any] = {"row_amax": known, "col_amax": known, "keep_amax": True}
        expected = dispatch.quantize(x, *casts, **options)
        assert_bits(producers.quantize(lazy, *casts, **options), expected)
        assert_equal(operands(lazy, *casts, keep_amax=True), operands(x, *casts, keep_amax=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", PRODUCERS)
def test_a_given_scale(name: str, direction: str, shape: tuple[int, int], device: str) -> None:
    lazy, cast = PRODUCERS[name](*shape, device), CASTS[1]
    x, scale = lazy.value(), torch.full((1,), 40.0, device=device)
    row, col = DIRECTIONS[direction]
    one, other = (torch.full((1,), 0.5, device=device) for _ in range(2))
    made = producers.quantize_scaled(lazy, scale, one, cast, row=row, col=col, keep_scale=True)
    expected = dispatch.quantize_scaled(x, scale, other, cast, row=row, col=col, keep_scale=True)
    assert_bits([*made, one], [*expected, other])
    casts = cast if row else None, cast if col else None
    made = operands(lazy, *casts, live=(scale, None))
    assert_equal(made, operands(x, *casts, live=(scale, None)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("cast", [CASTS[0], CASTS[2]], ids=lambda c: c.format_name)
@pytest.mark.parametrize("name", PRODUCERS)
def test_other_dtypes(name: str, cast: Cast, dtype: torch.dtype, device: str) -> None:
    lazy = PRODUCERS[name](130, 260, device, dtype)
    made = producers.quantize(lazy, cast, cast)
    assert_bits(made, dispatch.quantize(lazy.value(), cast, cast))
    narrow = lazy._replace(dtype=BF16)
    assert narrow.value().dtype is BF16
    assert_bits(
        producers.quantize(narrow, cast, cast), dispatch.quantize(narrow.value(), cast, cast)
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("cast", [CASTS[0], CASTS[2], CASTS[4]], ids=lambda c: c.format_name)
def test_every_activation(name: str, cast: Cast, device: str) -> None:
    h, p = wide(256, 512, device), activation(name)
    lazy = producers.activated(h, p)
    assert_bits(producers.quantize(lazy, cast, cast), dispatch.quantize(lazy.value(), cast, cast))
    dy = wide(256, lazy.shape[1], device, seed=1)
    d, y = producers.activation_gradient(h, dy, p).value(), lazy.value()
    made = activation_backward(h, dy, p, cast, cast, cast, dbias=False)
    assert_equal(made[:3], (*operands(d, cast, cast), operands(y, None, cast)[1]))


def ulps(a: Tensor, b: Tensor) -> Tensor:
    """How many bf16 numbers lie between a and b."""
    ordered = [t.cpu().view(torch.int16).int() for t in (a, b)]
    i, j = (torch.where(t < 0, -(t & 0x7FFF), t) for t in ordered)
    return (i - j).abs()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_kernels_are_one_ulp_from_the_twins(name: str) -> None:
    h, p = wide(257, 514), activation(name)
    dy = wide(257, columns(p, 514), seed=1)
    for on_cpu, on_gpu in (
        (producers.activated(h, p), producers.activated(h.cuda(), p)),
        (
            producers.activation_gradient(h, dy, p),
            producers.activation_gradient(h.cuda(), dy.cuda(), p),
        ),
    ):
        a, b = on_cpu.value(), on_gpu.value().cpu()
        # Where a derivative changes sign its terms cancel, and fp32's last place shows.
        small = (a.float() - b.float()).abs() <= 1e-6
        assert bool(((ulps(a, b) <= 1) | small).all())


@pytest.mark.parametrize("device", DEVICES)
def test_interleaved(device: str) -> None:
    h, p = wide(130, 256, device), activation("swiglu", glu_interleave_size=32)
    lazy = producers.activated(h, p)
    for cast in (*CASTS[:3], CASTS[4]):
        made = producers.quantize(lazy, cast, cast)
        assert_bits(made, dispatch.quantize(lazy.value(), cast, cast))
        assert_equal(operands(lazy, cast, cast), operands(lazy.value(), cast, cast))
    dy = wide(130, 128, device, seed=1)
    d = producers.activation_gradient(h, dy, p).value()
    made_ = activation_backward(h, dy, p, CASTS[0], CASTS[0], None)
    assert_equal(made_[:2], operands(d, CASTS[0], CASTS[0]))


def test_formats_that_no_kernel_makes_at_once() -> None:
    lazy = rms_norm(32, 64, "cpu")
    x = lazy.value()
    high, rht = Cast("high_precision"), Cast("nvfp4", hadamard=HADAMARD_SIGN_MASK)
    for row, col in ((high, high), (CASTS[5], rht), (CASTS[4], CASTS[2]), (high, CASTS[0])):
        assert_equal(operands(lazy, row, col), operands(x, row, col))
        assert_bits(producers.quantize(lazy, row, col), dispatch.quantize(x, row, col))


# ------------------------------------------------------------------------------ activation backward
RECIPES: dict[str, tuple[Cast, Cast, Cast]] = {
    "current": (Cast("fp8_e5m2"), Cast("fp8_e5m2"), Cast("fp8_e4m3")),
    "blocks": (CASTS[2], CASTS[2], CASTS[2]),
    "mxfp8": (CASTS[4], CASTS[4], CASTS[4]),
    "nvfp4": (
        Cast("nvfp4", stochastic=True),
        Cast("nvfp4", stochastic=True, hadamard=HADAMARD_SIGN_MASK),
        CASTS[5],
    ),
    "high precision": (Cast("high_precision"),) * 3,
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["swiglu", "gelu", "clamped_swiglu"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_activation_backward(recipe: str, name: str, shape: tuple[int, int], device: str) -> None:
    (row, col, act), p = RECIPES[recipe], activation(name)
    h, seed = wide(*shape, device), SEED.to(device)
    dy = wide(shape[0], columns(p, shape[1]), device, seed=1)
    d, y = producers.activation_gradient(h, dy, p).value(), producers.activated(h, p).value()
    expected = (*operands(d, row, col, seed=seed), operands(y, None, act, seed=seed)[1])
    *made, db = activation_backward(h, dy, p, row, col, act, seed=seed, dbias=True)
    assert_equal(made, expected)
    assert db is not None and db.dtype is BF16 and db.shape == (shape[1],)
    # The order of an fp32 sum, then one rounding.
    exact = d.double().sum(0)
    bound = 2**-8 * exact.abs() + 2**-20 * d.double().abs().sum(0)
    assert bool(((db.double() - exact).abs() <= bound).all())
    *made, db = activation_backward(h, dy, p, row, None, None, seed=seed)
    assert db is None
    assert_equal(made, (operands(d, row, None, seed=seed)[0], None, None))
    *made, _ = activation_backward(h, dy, p, None, col, act, seed=seed)
    assert_equal(made, (None, *expected[1:]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["swiglu", "gelu"])
def test_activation_backward_with_given_scales(
    name: str, shape: tuple[int, int], device: str
) -> None:
    (row, col, act), p = RECIPES["current"], activation(name)
    h = wide(*shape, device)
    dy = wide(shape[0], columns(p, shape[1]), device, seed=1)
    d, y = producers.activation_gradient(h, dy, p).value(), producers.activated(h, p).value()
    scale, act_scale = (torch.full((1,), s, device=device) for s in (30.0, 5.0))
    one, other = (torch.full((1,), 0.25, device=device) for _ in range(2))
    *made, _ = activation_backward(
        h, dy, p, row, col, act, live=(scale, one), act_live=(act_scale, None)
    )
    expected = operands(d, row, col, live=(scale, other))
    assert_equal(made, (*expected, operands(y, None, act, live=(act_scale, None))[1]))
    assert_bits([one], [other])
    known = 3 * dispatch.amax(y, act, act)[0]
    made_ = activation_backward(h, dy, p, row, col, act, act_amax=known)
    assert_equal(made_[2:3], operands(y, None, act, amax=known)[1:])


# ------------------------------------------------------------------------------------------ compile
def every(h: Tensor, dy: Tensor, x: Tensor, gamma: Tensor, scale: Tensor, amax: Tensor) -> Any:
    """All fronts, over one tensorwise and one tiled cast."""
    p, out = activation("swiglu"), []
    _, rstd, largest = norms.norm_stats_amax(x, 1e-5, gamma, None, rms=True)
    norm = producers.normalized(x, None, rstd, gamma)
    lazy = producers.activated(h, p)
    for cast in (CASTS[0], CASTS[2], CASTS[4]):
        out += tensors(operands(norm, cast, cast))
        out += tensors(operands(lazy, cast, cast))
        out += tensors(activation_backward(h, dy, p, cast, cast, cast, dbias=True))
    out += tensors(operands(norm, CASTS[0], CASTS[0], amax=largest))
    out += tensors(operands(lazy, CASTS[0], CASTS[0], live=(scale, amax)))
    out += tensors(
        activation_backward(h, dy, p, CASTS[1], CASTS[1], CASTS[0], live=(scale, amax),
                            act_live=(scale, None))
    )  # fmt: skip
    dx, dgamma, _ = norms.norm_backward(x, x, None, rstd, gamma, add=x)
    return [*out, lazy.value(), dx, dgamma]


def arguments(m: int, device: str = "cpu") -> tuple[Tensor, ...]:
    x = wide(m, 96, device)
    gamma, scale = wide(1, 96, device)[0], torch.full((1,), 9.0, device=device)
    h, dy = wide(m, 192, device), wide(m, 96, device, seed=1)
    return h, dy, x, gamma, scale, torch.zeros(1, device=device)


def without_spare(a: Tensor, b: Tensor) -> Tensor:
    """Column scales of blocks have one row more where the number of rows is open."""
    spare = a.dtype is torch.float32 and a.dim() == 2 and len(a) == len(b) + 1
    return a[:-1] if spare else a


@needs_ops
@pytest.mark.parametrize("device", DEVICES)
def test_compiled_is_eager_and_compiles_once(device: str) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(every, fullgraph=True, backend=counter, dynamic=True)
    for m in (130, 257, 144):
        given, again = arguments(m, device), arguments(m, device)
        made, expected = run(*given), every(*again)
        assert_bits([without_spare(a, b) for a, b in zip(made, expected, strict=True)], expected)
        assert_bits([given[-1]], [again[-1]])
        assert given[-1] > 0
    assert counter.frame_count == 1


def emulated(h: Tensor, dy: Tensor, x: Tensor, gamma: Tensor, seed: Tensor) -> Any:
    """All fronts, over casts whose values are multiplied."""
    p, out = activation("swiglu"), []
    _, rstd = norms.norm_stats(x, 1e-5, rms=True)
    norm, lazy = producers.normalized(x, None, rstd, gamma), producers.activated(h, p)
    for row, col, act in (RECIPES["mxfp8"], RECIPES["nvfp4"]):
        for keep in (False, True):
            out += tensors(operands(norm, act, act, keep_col=keep))
            out += tensors(operands(lazy.value(), act, act, keep_col=keep))
        out += tensors(operands(lazy, act, None))
        out += tensors(activation_backward(h, dy, p, row, col, act, seed=seed, dbias=True))
        out += tensors(activation_backward(h, dy, p, None, col, None, seed=seed))
    return out


@pytest.fixture
def emulates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every device multiplies values of the formats that an H200 does not know."""
    monkeypatch.setattr(
        "minifloat.operands._as_values", lambda cast, device: cast.layout[6] is not torch.float32
    )


@pytest.mark.usefixtures("emulates")
@pytest.mark.parametrize("name", PRODUCERS)
@pytest.mark.parametrize("cast", CASTS[4:], ids=lambda c: c.format_name)
def test_values_of_what_is_produced(name: str, cast: Cast) -> None:
    lazy = PRODUCERS[name](20, 68, "cpu")
    x = lazy.value()
    for keep in (False, True):
        row, col = operands(lazy, cast, cast, keep_col=keep)
        assert_equal((row, col), operands(x, cast, cast, keep_col=keep))
        assert row is not None and col is not None and row.data.dtype is BF16
        assert_bits([row.data], [reference.fake_quantize(x, cast)])
        if keep:
            expected = reference.quantize(x, cast, col=True)[:2]
            assert_bits(list(stored(col)[:2]), list(expected))
        else:
            assert_bits([stored(col)[0]], [reference.fake_quantize(x, cast, col=True)])


@pytest.mark.usefixtures("emulates")
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_activation_backward_to_values(recipe: str) -> None:
    (row, col, act), p = RECIPES[recipe], activation("swiglu")
    h, dy = wide(20, 68), wide(20, 34, seed=1)
    d, y = producers.activation_gradient(h, dy, p).value(), producers.activated(h, p).value()
    *made, db = activation_backward(h, dy, p, row, col, act, seed=SEED, dbias=True)
    expected = (*operands(d, row, col, seed=SEED), operands(y, None, act, seed=SEED)[1])
    assert_equal(made, expected)
    assert_bits([db], [d.sum(0, dtype=torch.float32).to(BF16)])
    assert all(o.data.dtype is BF16 for o in made)


@needs_ops
@pytest.mark.usefixtures("emulates")
def test_compiled_values_are_eagers_and_compile_once() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(emulated, fullgraph=True, backend=counter, dynamic=True)
    for m in (130, 257):
        given = (*arguments(m)[:4], SEED)
        assert_bits(run(*given), emulated(*given))
    assert counter.frame_count == 1


@needs_ops
@pytest.mark.parametrize("name", PRODUCERS)
def test_fakes_promise_what_comes(name: str) -> None:
    lazy = PRODUCERS[name](20, 40, "cpu")

    def run(*inputs: Tensor) -> list[Tensor]:
        given = iter(inputs)
        again = lazy._replace(inputs=tuple(None if t is None else next(given) for t in lazy.inputs))
        made = [again.value()]
        for cast in CASTS:
            made += producers.quantize(again, cast, cast)
        for keep in (False, True):
            made += producers.fake_quantize(again, CASTS[4], CASTS[4], keep_col=keep)
        return made

    inputs = [t for t in lazy.inputs if t is not None]
    eager = run(*inputs)
    assert_own_memory(eager, *inputs)
    assert_same_kind(fake_of(run, *inputs), eager)
    assert_bits(compiled(run)(*inputs), eager)


# ------------------------------------------------------------------------------------------- errors
def test_what_is_refused() -> None:
    h, p = torch.randn(4, 6), activation("swiglu")
    with pytest.raises(ValueError, match="h: got 5 columns; .* a multiple of 2 is needed"):
        producers.activated(h[:, :5], p)
    with pytest.raises(ValueError, match=r"h: got \(4,\); a matrix"):
        producers.activated(h[:, 0], p)
    with pytest.raises(TypeError, match="h: got dtype torch.float64; allowed"):
        producers.activated(h.double(), p)
    with pytest.raises(ValueError, match=r"dy: got \(4, 6\); .* has the shape \(4, 3\)"):
        producers.activation_gradient(h, h, p)
    with pytest.raises(ValueError, match=r"gamma: got \(5,\); x \(4, 6\) needs \(6,\)"):
        producers.normalized(h, None, torch.ones(4), torch.ones(5))
    with pytest.raises(ValueError, match=r"rstd: got \(6,\); x \(4, 6\) needs \(4,\)"):
        producers.normalized(h, None, torch.ones(6))
    with pytest.raises(ValueError, match="usage: neither"):
        producers.quantize(producers.activated(h, p), None, None)
