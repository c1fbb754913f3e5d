"""Operands with room: codes and scales as tensor cores read them, of any sizes, without a copy."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import ScalingType
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import minifloat
from minifloat import dispatch, gemm, gradients, native, producers, recipe, reference
from minifloat.formats import Cast, Operand, Scale, coded, rup
from minifloat.layout import parts
from minifloat.operands import operands
from minifloat.producer import activation

from .modules.cases import Counter

CASTS = [Cast("fp8_e4m3"), Cast("fp8_e5m2", pow2=True), Cast("fp8_e4m3_1x128", pow2=True)]
CASTS += [Cast("fp8_e4m3_128x128", pow2=True)]
RECIPES: dict[str, Callable[[], recipe.Recipe]] = {
    "current": recipe.Float8CurrentScaling,
    "delayed": recipe.DelayedScaling,
    "block": recipe.Float8BlockScaling,
}
SIZES = [(7, 64, 32), (8, 60, 32), (16, 64, 40), (1, 1, 1), (130, 129, 131), (32, 48, 64)]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ids: Any = lambda c: c.format_name  # noqa: E731


def wide(cast: Cast) -> Cast:
    return cast.replace(room=(cast.pad, 0))


# ------------------------------------------------------------------------- a CPU with tensor cores
class Products:
    """What scaled matmuls were given; they take what cuBLASLt takes of an sm_90, and no more."""

    def __init__(self) -> None:
        self.made = 0
        self.scaled_mm: Any = torch._scaled_mm

    def tensorwise(self, x: Tensor, w: Tensor, **options: Any) -> Tensor:
        self._check(x, w.t(), 1)
        return self.scaled_mm(x, w, **options)  # type: ignore[no-any-return]

    def blocks(self, x: Tensor, w: Tensor, *of: Any) -> Tensor:
        (sa,), (ra,), (sb,), (rb,), _, dtype, bias = of
        self._check(x, w, 4 if ra is ScalingType.BlockWise1x128 else 1)
        with _disable_current_modes():  # what stands for a tensor core may copy
            y = self._values(x, sa, ra) @ self._values(w, sb, rb).t()
            return (y if bias is None else y + bias).to(dtype)

    def _check(self, x: Tensor, w: Tensor, rows: int) -> None:
        self.made += 1
        assert x.shape[0] % rows == 0 and w.shape[0] % 16 == 0
        assert x.shape[1] == w.shape[1] and x.shape[1] % 16 == 0
        for t in (x, w):
            assert t.stride(1) == 1 and t.stride(0) % 16 == 0
            assert not (t.view(torch.uint8) == 0xA5).all()  # memory that nobody wrote

    def _values(self, x: Tensor, scale: Tensor, kind: ScalingType) -> Tensor:
        r, k = x.shape
        blocks = math.ceil(k / 128)
        if kind is ScalingType.BlockWise1x128:
            assert scale.shape == (r, blocks) and scale.stride(0) == 1
            assert scale.stride(1) == r or blocks == 1
            of = scale
        else:
            assert scale.shape == (rup(blocks, 4), math.ceil(r / 128)) and scale.stride(0) == 1
            of = scale.t()[:, :blocks].repeat_interleave(128, 0)[:r]
        return x.float() * of.repeat_interleave(128, 1)[:, :k]


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Products:
    """The CPU multiplies FP8 as an sm_90 does, and casts make what that asks for."""
    made = Products()

    def find(a: Operand, b: Operand) -> Any:
        fa, fb = a.cast.format, b.cast.format
        if not (coded(a) and coded(b)) or fa.scale is not Scale.F32:
            return None
        return native._NATIVE.get((fa.scale, fa.tile, fb.tile))

    monkeypatch.setattr(gemm, "find", find)
    monkeypatch.setattr(native, "is_native", lambda c, device: c.native[0] <= 90 < c.native[1])
    monkeypatch.setattr(torch, "_scaled_mm", made.tensorwise)
    monkeypatch.setattr(native, "_scaled_mm_v2", made.blocks)
    return made


class Copies(TorchDispatchMode):
    """Counts what moves codes or scales."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Codes are bytes and scales are fp32 matrices; the narrowed result is neither.
        moves = func._schema.name in ("aten::constant_pad_nd", "aten::copy_", "aten::clone")
        if moves and isinstance(args[0], Tensor) and args[0].dtype in (torch.uint8, torch.float32):
            self.seen[func._schema.name] += 1
        if func.namespace == "minifloat":
            self.seen[func._schema.name] += 1
        return func(*args, **kwargs or {})


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    """Those that eager products make."""
    counted, multiply = Copies(), gemm._gemm

    def watched(*args: Any) -> Tensor:
        with counted:
            return multiply(*args)

    monkeypatch.setattr(gemm, "_gemm", watched)
    return counted


def step(layer: Any, x: Tensor, made: recipe.Recipe, **options: Any) -> list[Tensor]:
    layer.zero_grad(set_to_none=True)
    leaf = x.detach().requires_grad_()
    with minifloat.autocast(recipe=made):
        y = layer(leaf, **options)
    grad = torch.linspace(-1, 1, y.numel(), device=y.device).reshape(y.shape).to(y.dtype)
    y.backward(grad)
    return [y.detach(), leaf.grad, *[p.grad for p in layer.parameters()]]  # type: ignore[list-item]


def layer_of(k: int, n: int, device: str = "cpu") -> Any:
    torch.manual_seed(k + n)
    return minifloat.Linear(k, n, params_dtype=torch.bfloat16, device=device)


def input_of(m: int, k: int, device: str = "cpu") -> Tensor:
    g = torch.Generator().manual_seed(m)
    return torch.randn(m, k, generator=g).to(torch.bfloat16).to(device)


# --------------------------------------------------------------------------------------- products
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_step_copies_no_operand(
    name: str, sizes: tuple[int, int, int], products: Products, copies: Copies
) -> None:
    m, k, n = sizes
    for _ in range(2):
        step(layer_of(k, n), input_of(m, k), RECIPES[name]())
    assert products.made == 6
    assert not copies.seen


@pytest.mark.gpu
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_step_copies_no_operand_on_the_gpu(
    name: str, sizes: tuple[int, int, int], copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    m, k, n = sizes
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("block scales are native to sm_90")
    monkeypatch.setattr(minifloat.env, "replays", lambda: False)
    layer, x = layer_of(k, n, "cuda"), input_of(m, k, "cuda")
    got = step(layer, x, RECIPES[name]())
    assert not copies.seen
    monkeypatch.setattr(native, "is_native", lambda c, device: False)  # no room: copies are made
    for a, b in zip(got, step(layer_of(k, n, "cuda"), x, RECIPES[name]()), strict=True):
        assert torch.equal(a, b)
    assert copies.seen or all(size % 16 == 0 for size in sizes)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_room_changes_no_bit(
    name: str, sizes: tuple[int, int, int], products: Products, monkeypatch: pytest.MonkeyPatch
) -> None:
    m, k, n = sizes
    got = step(layer_of(k, n), input_of(m, k), RECIPES[name]())
    monkeypatch.setattr(native, "is_native", lambda c, device: False)
    expected = step(layer_of(k, n), input_of(m, k), RECIPES[name]())
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["current", "block"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_operands_that_are_decoded_later_have_room_too(
    name: str, sizes: tuple[int, int, int], products: Products, copies: Copies
) -> None:
    m, k, n = sizes
    made = type(RECIPES[name]())(backward_override="dequantized")
    got = step(layer_of(k, n), input_of(m, k), made)
    assert products.made == 1 and not copies.seen
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "is_native", lambda c, device: False)
        expected = step(layer_of(k, n), input_of(m, k), made)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("name", RECIPES)
def test_results_can_be_changed_in_place(name: str, products: Products) -> None:
    """Though the product of an operand with more rows has them too."""
    x = input_of(7, 64).requires_grad_()
    with minifloat.autocast(recipe=RECIPES[name]()):
        y = layer_of(64, 32)(x)
    y.mul_(2).sum().backward()
    assert y.shape == (7, 32) and x.grad is not None


@pytest.mark.parametrize("name", RECIPES)
def test_backward_keeps_one_copy_and_its_room(name: str, products: Products) -> None:
    kept: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    layer, x = layer_of(96, 64), input_of(66, 96).requires_grad_()
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        minifloat.autocast(recipe=RECIPES[name]()),
    ):
        layer(x)
    codes = [t for t in kept if t.dtype is torch.uint8]
    assert [t.untyped_storage().nbytes() for t in codes] == [96 * 80]


@pytest.mark.parametrize("cast", CASTS, ids=ids)
@pytest.mark.parametrize("sizes", [(0, 5, 7), (5, 0, 7), (5, 7, 0)], ids=str)
def test_empty_products(sizes: tuple[int, int, int], cast: Cast, products: Products) -> None:
    m, n, k = sizes
    other = Cast("fp8_e4m3_1x128", pow2=True) if cast.format.square and cast.tiled else cast
    a, b = operands(torch.randn(m, k), cast, None)[0], operands(torch.randn(n, k), other, None)[0]
    assert a is not None and b is not None
    assert torch.equal(gemm.gemm(a, b, torch.float32), torch.zeros(m, n))


def test_public_tensors_are_copied(products: Products, copies: Copies) -> None:
    """They have the documented layout, whatever products ask for."""
    quantizer = minifloat.Float8CurrentScalingQuantizer(minifloat.DType.kFloat8E4M3, "cpu")
    x = quantizer(torch.randn(5, 7))
    assert x.operand(False).data.shape == (5, 7)
    y = gemm.gemm(x.operand(False), x.operand(False), torch.float32)
    torch.testing.assert_close(y, x.dequantize() @ x.dequantize().t())
    assert copies.seen["aten::constant_pad_nd"] == 2


def test_pairs_without_tensor_cores_read_what_has_room(products: Products) -> None:
    """The product of two E5M2 operands, or with high precision, decodes codes."""
    high = Cast("high_precision")
    x, w = torch.randn(5, 131), torch.randn(7, 131)
    for a, b in ((CASTS[1], CASTS[1]), (CASTS[2], high), (high, CASTS[0]), (CASTS[3], high)):
        left, right = operands(x, a, None)[0], operands(w, b, None)[0]
        assert left is not None and right is not None
        plain = [o._replace(data=o.codes.contiguous(), rows=None) for o in (left, right)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gemm, "find", lambda a, b: None)
            y = gemm.gemm(left, right, torch.float32)
            assert torch.equal(y, gemm.gemm(*plain, torch.float32))  # type: ignore[arg-type]
        torch.testing.assert_close(y, reference.matmul(left, right, torch.float32))


# ------------------------------------------------------------------------------------------ casts
def check(made: list[Tensor], expected: list[Tensor], described: Any) -> None:
    """What has room begins with what has none, and zeros follow."""
    assert [tuple(t.shape) for t in made] == [p.shape for p in described]
    for a, b in zip(made, expected, strict=True):
        assert a.is_contiguous()
        if b.dim() == 1:
            assert torch.equal(a, b)
            continue
        assert torch.equal(a[: b.shape[0], : b.shape[1]], b)
        assert a.sum(dtype=torch.float64) == b.sum(dtype=torch.float64)  # neither has negatives


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cast", CASTS, ids=ids)
@pytest.mark.parametrize("shape", [(7, 64), (130, 129), (1, 1), (16, 32), (0, 5), (5, 0)], ids=str)
def test_casts(shape: tuple[int, int], cast: Cast, device: str) -> None:
    x = input_of(*shape, device)
    for row, col in ((cast, cast), (cast, None), (None, cast)):
        casts = [None if c is None else wide(c) for c in (row, col)]
        expected = dispatch.quantize(x, row, col)
        check(dispatch.quantize(x, *casts), expected, parts(shape, *casts))
        if cast.tiled:
            continue
        scale = torch.full((1,), 3.0, device=device)
        which = {"row": row is not None, "col": col is not None}
        expected = dispatch.quantize_scaled(x, scale, None, cast, **which)
        made = dispatch.quantize_scaled(x, scale, None, wide(cast), **which)
        check(made, expected, parts(shape, *casts))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cast", CASTS, ids=ids)
@pytest.mark.parametrize("shape", [(7, 56), (130, 129), (132, 128)], ids=str)
def test_casts_of_what_is_produced(shape: tuple[int, int], cast: Cast, device: str) -> None:
    m, k = shape
    p, room = activation("swiglu"), wide(cast)
    h, dy = input_of(m, 2 * k, device), input_of(m, k, device)
    lazy = producers.activated(h, p)
    made = producers.quantize(lazy, room, room)
    check(made, producers.quantize(lazy, cast, cast), parts(shape, room, room))
    dh, given = producers.activation_gradient(h, dy, p), gradients.Given()
    made = gradients.activation_backward(dh, room, room, room, given, dbias=False)
    expected = gradients.activation_backward(dh, cast, cast, cast, given, dbias=False)
    check(made, expected, [*parts((m, 2 * k), room, room), *parts(shape, None, room)])


@pytest.mark.parametrize(
    ("name", "room", "why"), [("mxfp8_e4m3", (16, 0), "mxfp8_e4m3"), ("fp8_e4m3", (16, 1), "fp8")]
)
def test_room_where_there_can_be_none(name: str, room: tuple[int, int], why: str) -> None:
    with pytest.raises(ValueError, match=f"room: {why}"):
        Cast(name, room=room)


# ------------------------------------------------------------------------------------- workspaces
@pytest.mark.filterwarnings("error:Using a non-tuple")
@pytest.mark.parametrize("name", RECIPES)
def test_a_workspace_of_another_device_is_refilled(
    name: str, products: Products, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One made without room moves to where there is room, and back."""
    layer = layer_of(60, 40)
    x, made = input_of(16, 60), RECIPES[name]()
    got = []
    for first, then in ((False, True), (True, False), (True, True)):
        layer._cached = None
        for here in (first, then):
            monkeypatch.setattr(native, "is_native", lambda c, device, here=here: here)
            again = step(layer, x, made, is_first_microbatch=True)
        shape = layer._cached.copies[0][0].shape
        assert shape == ((48, 64) if first else (40, 60))
        got.append(again)
    for one in got[1:]:
        for a, b in zip(one, got[0], strict=True):
            assert torch.equal(a, b)


# ---------------------------------------------------------------------------------------- compiled
@pytest.mark.parametrize(
    "name", ["current", "block", pytest.param("delayed", marks=pytest.mark.deep)]
)
def test_a_graph_has_the_bits_of_eager(name: str, products: Products) -> None:
    """One for the first number of rows, and one for any other."""
    torch._dynamo.reset()
    layer, twin, graphs = layer_of(60, 40), layer_of(60, 40), Counter()
    compiled = torch.compile(layer, backend=graphs, fullgraph=True)
    for m in (7, 16, 33, 130, 257, 128):
        x = input_of(m, 60)
        got, expected = (step(f, x, RECIPES[name]()) for f in (compiled, twin))
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert graphs.graphs <= 2
    assert products.made == 36
