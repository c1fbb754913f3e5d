"""Every op: eager, fake and compiled agree; outputs own their memory; modes see the op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

from minifloat import casting, dispatch, env, opaque, ragged, reference
from minifloat.formats import HADAMARD_SIGN_MASK, Cast
from minifloat.layout import flatten, parts
from minifloat.producer import activation

from .reference.cases import ALL, matrix, name

pytestmark = pytest.mark.skipif(not opaque.AVAILABLE, reason="this PyTorch has no opaque objects")

Casts = tuple[Cast | None, Cast | None]
SEED = torch.tensor([5, 7])
RHT = Cast("nvfp4", hadamard=HADAMARD_SIGN_MASK)
# One of each kind of scale, layout and option.
KINDS = [
    Cast("fp8_e4m3"),
    Cast("fp8_e5m2", pow2=True),
    Cast("fp8_e4m3_1x128"),
    Cast("fp8_e4m3_128x128", pow2=True),
    Cast("mxfp8_e4m3"),
    Cast("mxfp8_e5m2_32x32"),
    Cast("nvfp4"),
    Cast("nvfp4_16x16", error="MAE", scale_max=256),
    Cast("nvfp4", row_scaled=True),
    RHT,
    Cast("nvfp4", stochastic=True),
]
# One of each layout.
LAYOUTS = [KINDS[0], KINDS[2], KINDS[4], KINDS[6], RHT]
MIXED: list[Casts] = [
    (Cast("nvfp4"), RHT),
    (Cast("fp8_e4m3"), Cast("nvfp4")),
    (Cast("nvfp4"), Cast("fp8_e4m3")),
    (Cast("mxfp8_e4m3"), Cast("fp8_e5m2_1x128")),
    (Cast("high_precision", dtype=torch.bfloat16), Cast("mxfp8_e4m3")),
]
SHAPES: list[tuple[int, ...]] = [
    (0, 64),
    (64, 0),
    (0, 0),
    (0,),
    (1, 1),
    (1, 33),
    (33, 1),
    (7,),
    (2, 3, 40),
    (2, 4, 40),
    (3, 0, 16),
]


def pair(casts: Casts) -> str:
    return "+".join("none" if c is None else name(c) for c in casts)


def sample(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return matrix(flatten(shape)).reshape(shape).to(dtype)


def seed_for(*casts: Cast | None) -> Tensor | None:
    return SEED if any(c is not None and c.stochastic for c in casts) else None


def run_quantize(x: Tensor, row: Cast | None, col: Cast | None) -> list[Tensor]:
    return dispatch.quantize(x, row, col, seed=seed_for(row, col))


def dtyped(cast: Cast | None, x: Tensor) -> Cast | None:
    """High precision without a dtype keeps the input's."""
    if cast is None or cast.format.element is not None:
        return cast
    return cast.replace(dtype=cast.dtype or x.dtype)


def compiled(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(fn, fullgraph=True, backend="aot_eager", **options)


def assert_bits(a: list[Tensor], b: list[Tensor]) -> None:
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())
        if x.numel():
            assert torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


def assert_same_kind(fake: list[Tensor], real: list[Tensor]) -> None:
    """The fake outputs promise exactly what the real ones are."""
    assert [(t.shape, t.dtype, t.stride(), t.device) for t in fake] == [
        (t.shape, t.dtype, t.stride(), t.device) for t in real
    ]


def assert_own_memory(outputs: list[Tensor], *inputs: Tensor) -> None:
    storages = [t.untyped_storage().data_ptr() for t in (*outputs, *inputs) if t.numel()]
    assert len(set(storages)) == len(storages)


def fake_of(fn: Callable[..., Any], *tensors: Tensor) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:  # a seed stays real
        return fn(*(mode.from_tensor(t) for t in tensors))


class Seen(TorchDispatchMode):
    """Counts the minifloat ops that pass."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "minifloat":
            self.ops.append(func._opname)
        return func(*args, **(kwargs or {}))


# --------------------------------------------------------------------------------------- quantize
@pytest.mark.parametrize(
    "cast, dtype",
    [
        *((c, torch.float32) for c in ALL),
        *((c, d) for c in KINDS for d in (torch.bfloat16, torch.float16)),
    ],
    ids=lambda v: name(v) if isinstance(v, Cast) else str(v),
)
def test_quantize_is_the_reference_in_the_described_buffers(cast: Cast, dtype: torch.dtype) -> None:
    x = sample((20, 40), dtype)
    seed = seed_for(cast)
    for casts in ((cast, cast), (cast, None), (None, cast)):
        made = run_quantize(x, *casts)
        described = parts(x.shape, *(dtyped(c, x) for c in casts))
        assert [(tuple(t.shape), t.dtype) for t in made] == [(p.shape, p.dtype) for p in described]
        assert all(t.is_contiguous() for t in made)
        assert_own_memory(made, x)
        by_name = {p.name: t for p, t in zip(described, made, strict=True)}
        for prefix, c in zip(("row", "col"), casts, strict=True):
            if c is None:
                continue
            data, scale, amax = reference.quantize(x, c, col=prefix == "col", seed=seed)
            assert torch.equal(by_name[f"{prefix}_data"], data)
            if scale is not None:
                key = "scale" if "scale" in by_name else f"{prefix}_scale"
                assert torch.equal(by_name[key], scale.reshape(by_name[key].shape))
            assert (amax is not None and c.format.two_level) == (f"{prefix}_amax" in by_name)
            if c.format.two_level:
                assert torch.equal(by_name[f"{prefix}_amax"], amax)


@pytest.mark.parametrize("casts", MIXED, ids=pair)
def test_quantize_with_a_format_per_direction(casts: Casts) -> None:
    x = sample((20, 40))
    made = run_quantize(x, *casts)
    for (row, col), prefix in (((casts[0], None), "row_"), ((None, casts[1]), "col_")):
        described = parts(x.shape, row, col)
        alone = {p.name: t for p, t in zip(described, run_quantize(x, row, col), strict=True)}
        both = {p.name: t for p, t in zip(parts(x.shape, *casts), made, strict=True)}
        assert all(torch.equal(both[n], t) for n, t in alone.items())
        assert any(n.startswith(prefix) for n in alone)


@pytest.mark.parametrize(
    "casts", [*((c, c) for c in ALL if c.format.element is not None), *MIXED], ids=pair
)
def test_quantize_fake_and_compiled(casts: Casts) -> None:
    x = sample((20, 40))
    eager = run_quantize(x, *casts)
    assert_same_kind(fake_of(lambda t: run_quantize(t, *casts), x), eager)
    if casts in MIXED or casts[0] in KINDS:
        assert_bits(compiled(lambda t: run_quantize(t, *casts))(x), eager)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantize_any_shape(shape: tuple[int, ...]) -> None:
    x = sample(shape, torch.bfloat16)

    def every(t: Tensor, casts: list[Cast]) -> list[Tensor]:
        return [made for c in casts for made in run_quantize(t, c, c)]

    eager = every(x, KINDS)
    assert [tuple(t.shape) for t in eager] == [p.shape for c in KINDS for p in parts(shape, c, c)]
    assert_own_memory(eager, x)
    assert_same_kind(fake_of(lambda t: every(t, KINDS), x), eager)
    assert_bits(compiled(every, dynamic=False)(x, LAYOUTS), every(x, LAYOUTS))


def test_quantize_a_scalar() -> None:
    x = torch.tensor(3.0)
    data, col, scale = dispatch.quantize(x, Cast("fp8_e4m3"), Cast("fp8_e4m3"))
    assert data.shape == col.shape == ()
    assert data == col == 0x7E
    assert_own_memory([data, col, scale], x)


@pytest.mark.parametrize("cast", KINDS, ids=name)
@pytest.mark.parametrize("shape", [(40, 72), (1, 33), (33, 1)], ids=str)
def test_quantize_reads_any_strides(cast: Cast, shape: tuple[int, int]) -> None:
    x = sample(shape)
    expected = run_quantize(x, cast, cast)
    wide = torch.full((shape[0], 2 * shape[1]), float("nan"))
    wide[:, ::2] = x
    assert_bits(run_quantize(wide[:, ::2], cast, cast), expected)
    turned = x.t().contiguous().t()
    assert_bits(run_quantize(turned, cast, cast), expected)
    assert_same_kind(fake_of(lambda t: run_quantize(t, cast, cast), turned), expected)


@pytest.mark.parametrize("cast", [Cast("fp8_e4m3"), Cast("nvfp4"), RHT], ids=name)
def test_quantize_with_a_known_amax(cast: Cast) -> None:
    x = sample((20, 40))
    amaxes = [2 * a for a in dispatch.amax(x, cast, cast)]
    made = dispatch.quantize(x, cast, cast, row_amax=amaxes[0], col_amax=amaxes[-1])
    assert_own_memory(made, x, *amaxes)
    for prefix, amax, col in (("row", amaxes[0], False), ("col", amaxes[-1], True)):
        data, _, _ = reference.quantize(x, cast, col=col, amax=amax)
        described = parts(x.shape, cast, cast)
        (got,) = (t for p, t in zip(described, made, strict=True) if p.name == f"{prefix}_data")
        assert torch.equal(got, data)

    def known(t: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
        return dispatch.quantize(t, cast, cast, row_amax=a, col_amax=b)

    assert_bits(compiled(known)(x, amaxes[0], amaxes[-1].clone()), made)


@pytest.mark.parametrize("cast", KINDS, ids=name)
def test_dynamic_shapes_compile_once(cast: Cast) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    kept = None if cast.transforms else cast

    @torch.compile(fullgraph=True, backend=counter, dynamic=True)
    def both(t: Tensor) -> list[Tensor]:
        made = run_quantize(t, cast, cast)
        if kept is not None:
            scale = made[1] if cast.tiled else made[-1]
            amax = made[2] if cast.format_name.startswith("nvfp4") else None
            made = [*made, dispatch.dequantize(made[0], scale, amax, kept, t.shape, t.dtype)]
        return made

    # Each dim is longer than a block: PyTorch tells a scale of one row from one of many.
    long = 128 if cast.format.tile and cast.format.tile[1] == 128 else 0
    for shape in ((long + 20, long + 36), (long + 34, long + 3), (long + 17, long + 40)):
        x = sample(shape)
        made = both(x)
        n = len(parts(shape, cast, cast))
        assert_bits(made[:n], run_quantize(x, cast, cast))
        if kept is not None:
            assert made[n].shape == shape
    assert counter.frame_count == 1


def test_cast_is_a_constant_of_the_graph() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def cast_to(t: Tensor, cast: Cast) -> list[Tensor]:
        return dispatch.quantize(t, cast, None)

    x = sample((8, 32))
    for cast in (Cast("mxfp8_e4m3"), Cast("mxfp8_e4m3"), Cast("mxfp8_e5m2"), Cast("mxfp8_e4m3")):
        assert_bits(cast_to(x, cast), dispatch.quantize(x, cast, None))
    assert counter.frame_count == 2


# ------------------------------------------------------------------------------------------- amax
@pytest.mark.parametrize("cast", ALL, ids=name)
def test_amax(cast: Cast) -> None:
    x = sample((20, 40))

    def run(t: Tensor) -> list[Tensor]:
        return [
            *dispatch.amax(t, cast, cast),
            *dispatch.amax(t, cast, None),
            *dispatch.amax(t, None, cast),
        ]

    eager = run(x)
    both = eager[: len(eager) - 2]
    row, col = reference.amax(x, cast), reference.amax(x, cast, col=True)
    expected = [row] if cast.format.shares_scale else [row, col]
    assert_bits(both, expected)
    assert_bits(eager[-2:], [row, col])
    assert_own_memory(eager, x)
    assert_same_kind(fake_of(run, x), eager)
    if cast in KINDS:
        assert_bits(compiled(run)(x), eager)


def test_amax_of_a_format_per_direction() -> None:
    x = sample((20, 40))
    row, col = dispatch.amax(x, Cast("fp8_e4m3"), RHT)
    assert torch.equal(row, x.abs().max().reshape(1))
    assert torch.equal(col, reference.amax(x, RHT, col=True))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_amax_any_shape(shape: tuple[int, ...]) -> None:
    x = sample(shape)

    def every(t: Tensor) -> list[Tensor]:
        return [made for c in KINDS for made in dispatch.amax(t, c, c)]

    eager = every(x)
    assert_same_kind(fake_of(every, x), eager)
    assert_own_memory(eager, x)


# -------------------------------------------------------------------------------- delayed scaling
@pytest.mark.parametrize("row, col", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("tag", ["e4m3", "e5m2"])
def test_quantize_scaled(row: bool, col: bool, tag: str) -> None:
    cast = Cast(f"fp8_{tag}")
    x = sample((2, 3, 40), torch.bfloat16)
    scale = torch.tensor([3.0])

    def run(t: Tensor, s: Tensor, a: Tensor) -> list[Tensor]:
        return dispatch.quantize_scaled(t, s, a, cast, row=row, col=col)

    amax = torch.tensor([0.5])
    eager = run(x, scale, amax)
    data, inverse, seen = reference.quantize_scaled(x, scale, cast)
    copies = [data] if row else []
    copies += [data.reshape(6, 40).t().reshape(40, 2, 3).contiguous()] if col else []
    assert_bits(eager, [*copies, inverse])
    assert_own_memory(eager, x, scale, amax)
    assert torch.equal(amax, seen)
    assert_same_kind(fake_of(run, x, scale, amax), eager)

    for start in (0.0, 1e9):
        live, expected = torch.tensor([start]), torch.tensor([start])
        run(x, scale, expected)
        assert_bits(compiled(run)(x, scale, live), eager)
        assert torch.equal(live, expected)
        assert torch.equal(live, torch.maximum(seen, torch.tensor([start])))


def test_quantize_scaled_under_a_mode_updates_amax() -> None:
    amax = torch.zeros(1)
    with Seen() as mode:
        dispatch.quantize_scaled(
            sample((4, 8)), torch.ones(1), amax, Cast("fp8_e4m3"), row=True, col=False
        )
    assert mode.ops == ["quantize_scaled"]
    assert amax == sample((4, 8)).abs().max()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantize_scaled_any_shape(shape: tuple[int, ...]) -> None:
    x, cast = sample(shape), Cast("fp8_e4m3")

    def run(t: Tensor, a: Tensor) -> list[Tensor]:
        return dispatch.quantize_scaled(t, torch.ones(1), a, cast, row=True, col=True)

    amax = torch.zeros(1)
    eager = run(x, amax)
    assert [tuple(t.shape) for t in eager] == [p.shape for p in parts(shape, cast, cast)]
    assert amax == (x.abs().max() if x.numel() else 0)
    assert_own_memory(eager, x)
    assert_same_kind(fake_of(run, x, amax), eager)
    assert_bits(compiled(run, dynamic=False)(x, torch.zeros(1)), eager)


def test_quantize_scaled_reads_any_strides() -> None:
    x = sample((20, 40))
    cast, one = Cast("fp8_e4m3"), torch.ones(1)
    expected = dispatch.quantize_scaled(x, one, torch.zeros(1), cast, row=True, col=True)
    turned = x.t().contiguous().t()
    made = dispatch.quantize_scaled(turned, one, torch.zeros(1), cast, row=True, col=True)
    assert_bits(made, expected)


def test_quantize_scaled_dynamic_shapes_compile_once() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    cast = Cast("fp8_e4m3")
    run = torch.compile(
        lambda t, s, a: dispatch.quantize_scaled(t, s, a, cast, row=True, col=True),
        fullgraph=True,
        backend=counter,
        dynamic=True,
    )
    amax = torch.zeros(1)
    for shape in ((40, 72), (64, 130), (257, 48)):
        run(sample(shape), torch.ones(1), amax)
        assert amax >= sample(shape).abs().max()
    assert counter.frame_count == 1


# ------------------------------------------------------------------------------------- dequantize
DEQUANTIZED = [c for c in ALL if not c.transforms]


def stored(x: Tensor, cast: Cast, col: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    row, column = (None, cast) if col else (cast, None)
    described = parts(x.shape, dtyped(row, x), dtyped(column, x))
    by_name = {p.name: t for p, t in zip(described, run_quantize(x, row, column), strict=True)}
    prefix = "col_" if col else "row_"
    scale = by_name.get("scale", by_name.get(prefix + "scale"))
    return by_name[prefix + "data"], scale, by_name.get(prefix + "amax")


@pytest.mark.parametrize("cast", DEQUANTIZED, ids=name)
@pytest.mark.parametrize("col", [False, True])
def test_dequantize(cast: Cast, col: bool) -> None:
    x = sample((20, 40))
    buffers = stored(x, cast, col)
    inputs = [t for t in buffers if t is not None]

    def run(*tensors: Tensor) -> list[Tensor]:
        data, *rest = tensors
        scale = rest[0] if rest else None
        amax = rest[1] if len(rest) > 1 else None
        return [
            dispatch.dequantize(data, scale, amax, cast, (20, 40), dtype, col=col)
            for dtype in (torch.float32, torch.bfloat16)
        ]

    eager = run(*inputs)
    assert all(t.is_contiguous() and t.shape == (20, 40) for t in eager)
    assert torch.equal(
        eager[0], reference.dequantize(*buffers, cast, (20, 40), torch.float32, col=col)
    )
    assert torch.equal(eager[1], eager[0].bfloat16())
    assert_own_memory(eager, *inputs)
    assert_same_kind(fake_of(run, *inputs), eager)
    if cast in KINDS:
        assert_bits(compiled(run)(*inputs), eager)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("col", [False, True])
def test_dequantize_any_shape(shape: tuple[int, ...], col: bool) -> None:
    x = sample(shape)

    def every(casts: list[Cast], buffers: Any) -> list[Tensor]:
        return [
            dispatch.dequantize(*b, c, shape, torch.float32, col=col)
            for b, c in zip(buffers, casts, strict=True)
        ]

    kinds = [c for c in KINDS if not c.transforms]
    inputs = [stored(x, c, col) for c in kinds]
    eager = every(kinds, inputs)
    assert all(t.shape == shape and t.is_contiguous() and not t.isnan().any() for t in eager)
    assert_own_memory(eager, *(t for b in inputs for t in b if t is not None))
    layouts = [c for c in LAYOUTS if not c.transforms]
    inputs = [stored(x, c, col) for c in layouts]
    assert_bits(compiled(every, dynamic=False)(layouts, inputs), every(layouts, inputs))


def test_dequantize_refuses_a_transformed_copy() -> None:
    x = sample((32, 32))
    data, scale, amax = stored(x, RHT, True)
    with pytest.raises(ValueError, match="columnwise: a Hadamard-transformed copy"):
        dispatch.dequantize(data, scale, amax, RHT, (32, 32), torch.float32, col=True)


# -------------------------------------------------------------------------- transpose and swizzle
@pytest.mark.parametrize("shape", [(5, 7), (1, 7), (7, 1), (1, 1), (0, 4), (4, 0), (2, 3, 5), (6,)])
def test_transpose(shape: tuple[int, ...]) -> None:
    data = torch.arange(torch.Size(shape).numel(), dtype=torch.uint8).reshape(shape)
    eager = dispatch.transpose(data)
    assert torch.equal(eager, data.movedim(-1, 0))
    assert eager.is_contiguous()
    assert_own_memory([eager], data)
    assert_same_kind([fake_of(dispatch.transpose, data)], [eager])
    assert_bits([compiled(dispatch.transpose, dynamic=False)(data)], [eager])


@pytest.mark.parametrize("shape", [(128, 4), (1, 1), (130, 5), (256, 8), (0, 4), (128, 0)])
def test_swizzle(shape: tuple[int, int]) -> None:
    scale = torch.randint(0, 256, shape, dtype=torch.uint8)
    eager = dispatch.swizzle(scale)
    assert torch.equal(eager, reference.swizzle(scale))
    assert_own_memory([eager], scale)
    assert_same_kind([fake_of(dispatch.swizzle, scale)], [eager])
    assert_bits([compiled(dispatch.swizzle, dynamic=False)(scale)], [eager])


def test_transpose_and_swizzle_dynamic_shapes_compile_once() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(
        lambda t: (dispatch.transpose(t), dispatch.swizzle(t)),
        fullgraph=True,
        backend=counter,
        dynamic=True,
    )
    for shape in ((40, 72), (130, 5), (257, 48)):
        t = torch.randint(0, 256, shape, dtype=torch.uint8)
        assert_bits(list(run(t)), [dispatch.transpose(t), dispatch.swizzle(t)])
    assert counter.frame_count == 1


# ------------------------------------------------------------------------------------- fake quant
@pytest.mark.parametrize(
    "casts",
    [
        *((c, c) for c in ALL if c.format.element is not None),
        (Cast("nvfp4"), RHT),
        (Cast("mxfp8_e4m3"), Cast("nvfp4")),
        (Cast("nvfp4"), None),
        (None, RHT),
    ],
    ids=pair,
)
@pytest.mark.parametrize("keep_col", [False, True])
def test_fake_quantize(casts: Casts, keep_col: bool) -> None:
    x = sample((20, 40), torch.bfloat16)
    row, col = casts
    seed = seed_for(*casts)

    def run(t: Tensor) -> list[Tensor]:
        return dispatch.fake_quantize(t, row, col, keep_col=keep_col, seed=seed)

    eager = run(x)
    assert all(t.is_contiguous() for t in eager)
    assert_own_memory(eager, x)
    expected: list[Tensor | None] = []
    if row is not None:
        expected.append(reference.fake_quantize(x, row, seed=seed))
    if col is not None and keep_col:
        data, scale, _ = reference.quantize(x, col, col=True, seed=seed)
        expected += [data, scale]
    elif col is not None:
        expected.append(reference.fake_quantize(x, col, col=True, seed=seed))
    for c, is_col in ((row, False), (col, True)):
        if c is not None and c.format.two_level:
            expected.append(reference.amax(x, c, col=is_col))
    assert len(eager) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(eager, expected, strict=True))
    assert_same_kind(fake_of(run, x), eager)
    if keep_col and (row in KINDS or row is None):
        assert_bits(compiled(run)(x), eager)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fake_quantize_any_shape(shape: tuple[int, ...]) -> None:
    x = sample(shape)

    def every(t: Tensor) -> list[Tensor]:
        return [
            made
            for c in KINDS
            for made in dispatch.fake_quantize(t, c, c, keep_col=True, seed=seed_for(c))
        ]

    eager = every(x)
    assert_own_memory(eager, x)
    assert_same_kind(fake_of(every, x), eager)


# --------------------------------------------------------------------------------- ops themselves
OPS = torch.ops.minifloat


def op_calls(cast: Cast) -> list[tuple[Any, tuple[Any, ...]]]:
    x = sample((20, 36))
    seed = seed_for(cast)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (OPS.quantize.default, (x, cast, cast, None, None, seed)),
        (OPS.quantize.default, (x[:, ::2], cast, None, None, None, seed)),
        (OPS.quantize.default, (x[:1], None, cast, None, None, seed)),
        (OPS.amax.default, (x, cast, cast)),
        (OPS.fake_quantize.default, (x, cast, cast, True, seed)),
    ]
    for col in (False, True):
        if not cast.transforms:
            buffers = stored(x, cast, col)
            calls.append((OPS.dequantize.default, (*buffers, cast, [20, 36], torch.bfloat16, col)))
    return calls


OPCHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("cast", KINDS, ids=name)
def test_opcheck(cast: Cast) -> None:
    for op, args in op_calls(cast):
        torch.library.opcheck(op, args, test_utils=OPCHECKS[: 3 if cast in LAYOUTS else 2])


def test_opcheck_of_ops_without_a_cast_and_delayed_scaling() -> None:
    data = torch.randint(0, 256, (20, 36), dtype=torch.uint8)
    for t in (data, data[:1], data[:, :1]):
        torch.library.opcheck(OPS.transpose.default, (t,), test_utils=OPCHECKS)
        torch.library.opcheck(OPS.swizzle.default, (t,), test_utils=OPCHECKS)
    scaled = (sample((20, 36)), torch.ones(1), Cast("fp8_e4m3"), True, True)
    torch.library.opcheck(OPS.quantize_scaled.default, scaled, test_utils=OPCHECKS)


def test_every_op_is_checked() -> None:
    checked = {op._opname for cast in KINDS for op, _ in op_calls(cast)}
    checked |= {"transpose", "swizzle", "quantize_scaled"}
    assert {schema.split("(")[0] for schema, _, _ in dispatch._OPS} == checked


# ------------------------------------------------------------------------------------------ modes
def test_eager_calls_no_op_and_a_mode_sees_each() -> None:
    x, cast = sample((32, 32)), Cast("nvfp4")

    def everything() -> None:
        row_data, row_scale, row_amax, *_ = dispatch.quantize(x, cast, cast)
        dispatch.amax(x, cast, None)
        dispatch.quantize_scaled(
            x, torch.ones(1), torch.zeros(1), Cast("fp8_e4m3"), row=True, col=True
        )
        dispatch.dequantize(row_data, row_scale, row_amax, cast, (32, 32), torch.float32)
        dispatch.transpose(row_data)
        dispatch.swizzle(row_scale)
        dispatch.fake_quantize(x, cast, cast, keep_col=True)

    with Seen() as mode:
        everything()
    assert mode.ops == [
        "quantize", "amax", "quantize_scaled", "dequantize", "transpose", "swizzle",
        "fake_quantize",
    ]  # fmt: skip
    assert not dispatch._traced()
    with FlopCounterMode(display=False):
        assert dispatch._traced()
        everything()


class Straight(torch.autograd.Function):
    """Saves codes, as a quantized layer does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        cast = Cast("mxfp8_e4m3")
        data, scale = dispatch.quantize(x, cast, None)
        ctx.save_for_backward(data, scale)
        ctx.shape = x.shape
        return dispatch.dequantize(data, scale, None, cast, x.shape, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        data, scale = ctx.saved_tensors
        cast = Cast("mxfp8_e4m3")
        return grad * dispatch.dequantize(data, scale, None, cast, ctx.shape, grad.dtype)


def test_selective_checkpointing_saves_the_op() -> None:
    def save_quantize(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op == OPS.quantize.default:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def grads(context_fn: Any) -> tuple[Tensor, list[str], list[str]]:
        x = sample((8, 32)).requires_grad_()
        options = {} if context_fn is None else {"context_fn": context_fn}
        with Seen() as mode:
            y = checkpoint(lambda t: Straight.apply(t * 2), x, use_reentrant=False, **options)
            forward = list(mode.ops)
            y.sum().backward()
        assert x.grad is not None
        return x.grad, forward, mode.ops[len(forward) :]

    plain, forward, recomputed = grads(None)
    assert forward.count("quantize") == recomputed.count("quantize") == 1
    saved, forward, recomputed = grads(lambda: create_selective_checkpoint_contexts(save_quantize))
    assert forward.count("quantize") == 1
    assert recomputed.count("quantize") == 0
    assert recomputed.count("dequantize") >= 1
    assert torch.equal(plain, saved)


# -------------------------------------------------------------------------------------- bad input
MX, FP8 = Cast("mxfp8_e4m3"), Cast("fp8_e4m3")


@pytest.mark.parametrize(
    "dtype",
    [torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float64, torch.float8_e4m3fn],
    ids=str,
)
@pytest.mark.parametrize("front", ["quantize", "amax", "fake_quantize", "quantize_scaled"])
def test_other_dtypes_are_refused(front: str, dtype: torch.dtype) -> None:
    x = torch.zeros(4, 32).to(dtype)
    amax = torch.zeros(1)
    calls: dict[str, Callable[[], Any]] = {
        "quantize": lambda: dispatch.quantize(x, MX, None),
        "amax": lambda: dispatch.amax(x, MX, None),
        "fake_quantize": lambda: dispatch.fake_quantize(x, MX, None, keep_col=False),
        "quantize_scaled": lambda: dispatch.quantize_scaled(
            x, torch.ones(1), amax, FP8, row=True, col=False
        ),
    }
    with pytest.raises(TypeError, match=rf"tensor: got dtype {dtype}; allowed: torch.float32"):
        calls[front]()
    assert amax == 0


def test_a_list_is_refused() -> None:
    with pytest.raises(TypeError, match="tensor: got list; a torch.Tensor is needed"):
        dispatch.quantize([1.0], MX, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("cast", [c for c in KINDS if c.tiled], ids=name)
def test_a_scalar_has_no_blocks(cast: Cast) -> None:
    for casts in ((cast, None), (None, cast)):
        with pytest.raises(ValueError, match=r"tensor: got a 0-d tensor; .*reshape it to \(1,\)"):
            run_quantize(torch.tensor(1.0), *casts)


def test_some_copy_is_asked_for() -> None:
    x = torch.zeros(4, 32)
    for call in (
        lambda: dispatch.quantize(x, None, None),
        lambda: dispatch.amax(x, None, None),
        lambda: dispatch.fake_quantize(x, None, None, keep_col=True),
        lambda: dispatch.quantize_scaled(
            x, torch.ones(1), torch.zeros(1), FP8, row=False, col=False
        ),
    ):
        with pytest.raises(ValueError, match="usage: neither rowwise nor columnwise"):
            call()


def test_one_scale_means_one_cast() -> None:
    with pytest.raises(ValueError, match="row, col: got .*fp8_e4m3.*fp8_e5m2.*cast alike"):
        dispatch.quantize(torch.zeros(4, 32), FP8, Cast("fp8_e5m2"))


@pytest.mark.parametrize(
    "seed",
    [3, torch.tensor(3), torch.tensor([3]), torch.tensor([3, 4, 5]), torch.tensor([3.0, 4.0])],
    ids=repr,
)
def test_a_seed_is_two_integers(seed: Any) -> None:
    with pytest.raises(ValueError, match=r"seed: got .*int64 tensor \[seed, offset\]"):
        dispatch.quantize(torch.zeros(4, 32), Cast("nvfp4", stochastic=True), None, seed=seed)


def test_stochastic_rounding_needs_a_seed() -> None:
    with pytest.raises(ValueError, match="seed: stochastic rounding needs"):
        dispatch.quantize(torch.zeros(4, 32), Cast("nvfp4", stochastic=True), None)


def test_high_precision_is_not_emulated() -> None:
    with pytest.raises(ValueError, match="row, col: high precision has no codes"):
        dispatch.fake_quantize(torch.zeros(4, 32), Cast("high_precision"), None, keep_col=False)


# ----------------------------------------------------------------------------------------- choice
def test_the_reference_serves_every_device_without_kernels() -> None:
    assert casting.choose(MX, torch.device("cpu"))[0] == "cpu"
    assert casting.choose(None, torch.device("cpu"))[0] == "cpu"
    assert casting.choose(MX, torch.device("meta"))[0] == "emulated"


@pytest.mark.parametrize("sm", [80, 86, 89, 90])
def test_the_reference_serves_devices_for_which_triton_has_no_e4m3(
    monkeypatch: pytest.MonkeyPatch, sm: int
) -> None:
    pytest.importorskip("triton")
    from minifloat.kernels import produce_entry

    monkeypatch.setattr(env, "capability", lambda device: sm)
    monkeypatch.setattr(env, "runs_kernels", lambda x: True)
    has = sm >= 89
    x = torch.zeros(128, 256, dtype=torch.bfloat16)
    for cast in (MX, Cast("fp8_e4m3"), Cast("nvfp4")):
        assert (casting._kernels(x, cast) is not None) == has
        assert (ragged.kernels(x, cast, None) is not None) == has
        found = casting.choose(cast, torch.device("cuda", 0))
        assert found[0] == ("triton" if has else "emulated") and ("sm_89" in found[1]) == (not has)
    relu, one = activation("relu"), Cast("fp8_e4m3")
    assert produce_entry.fuses(relu, (x,), x.dtype, one, one) == has
    gradient = (relu.gradient(), (x, x), x.dtype, one, one, None)
    assert produce_entry.fuses_backward(*gradient) == has
