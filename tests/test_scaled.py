"""A product whose global scale its reader applies has the bits of one that a pass has scaled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

import minifloat
from minifloat import dispatch, env, gemm, norms, ops, producers
from minifloat import recipe as recipes
from minifloat import unscaled as front
from minifloat.formats import HADAMARD_SIGN_MASK, HIGH, Cast
from minifloat.operands import activation_backward, operands
from minifloat.producer import activation
from minifloat.recipe import zoo
from minifloat.scaled import Scaled, parts, whole
from minifloat.unscaled import unscaled

from .test_dispatch import assert_bits
from .test_gemm import made
from .test_producers import assert_equal, needs_ops, wide

BF16, FP32 = torch.bfloat16, torch.float32
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FP4 = Cast("nvfp4")
RHT = Cast("nvfp4", hadamard=HADAMARD_SIGN_MASK)
SHAPES = [(1, 2), (17, 34), (130, 4128), (0, 16)]


def scaled(m: int, k: int, device: str, dtype: torch.dtype = BF16, seed: int = 0) -> Scaled:
    number = torch.tensor([0.0123 * (seed + 1)], device=device)
    return Scaled(wide(m, k, device, dtype, seed) * 64, number)


def alike(a: Any, b: Any) -> None:
    a, b = ([t for t in of if t is not None] for of in (a, b))
    assert_bits(a, b)


# ----------------------------------------------------------------------------------------- products
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("pair", [(FP4, Cast("nvfp4_16x16")), (RHT, RHT)], ids=["2d", "rht"])
def test_a_product_and_its_number(pair: Any, dtype: torch.dtype, device: str) -> None:
    col = pair[0].transforms
    for m, n, k in ((5, 7, 19), (32, 48, 256), (0, 4, 8)):
        x, w = (wide(*((k, r) if col else (r, k)), device) for r in (m, n))
        a, b = made(x, pair[0], col), made(w, pair[1], col)
        y, expected = unscaled(a, b, dtype), gemm.gemm(a, b, dtype)
        # A CPU multiplies in fp32, and rounds what it has scaled.
        assert isinstance(y, Scaled) is (dtype is FP32 or device == "cuda")
        assert_bits([y.value() if isinstance(y, Scaled) else y], [expected])


@pytest.mark.parametrize("device", DEVICES)
def test_what_has_no_number_is_a_product(device: str) -> None:
    rows = Cast("nvfp4", row_scaled=True)
    fp8, mxfp8 = Cast("fp8_e4m3"), Cast("mxfp8_e4m3")
    pairs = ((FP4, FP4, torch.float16), (rows, FP4, FP32), (FP4, HIGH, FP32), (fp8, fp8, FP32),
             (mxfp8, FP4, FP32))  # fmt: skip
    for one, other, dtype in pairs:
        x, w = wide(32, 64, device), wide(48, 64, device)
        a, b = (made(t, cast, False) for t, cast in ((x, one), (w, other)))
        y = unscaled(a, b, dtype)
        assert isinstance(y, Tensor)
        assert_bits([y], [gemm.gemm(a, b, dtype)])


def test_parts_are_what_is_kept() -> None:
    x = scaled(3, 4, "cpu")
    assert whole(*parts(x)) == x and x.shape == (3, 4) and x.reshape(4, 3).shape == (4, 3)
    assert parts(x.data) == (x.data, None) and whole(x.data, None) is x.data


# ------------------------------------------------------------------------------------------ readers
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["swiglu", "gelu", "glu", "clamped_swiglu"])
def test_activations(name: str, shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    p, (m, k) = activation(name), shape
    h = scaled(m, k, device, dtype)
    dy = scaled(m, k // 2 if p.gated else k, device, dtype, seed=1)
    alike([producers.activated(h, p).value()], [producers.activated(h.value(), p).value()])
    expected = producers.activation_gradient(h.value(), dy.value(), p).value()
    for a, b in ((h, dy), (h.value(), dy), (h, dy.value())):
        alike([producers.activation_gradient(a, b, p).value()], [expected])


@pytest.mark.parametrize("device", DEVICES)
def test_halves_in_turns(device: str) -> None:
    p = activation("swiglu", glu_interleave_size=8)
    h, dy = scaled(20, 64, device), scaled(20, 32, device, seed=1)
    alike([producers.activated(h, p).value()], [producers.activated(h.value(), p).value()])
    expected = producers.activation_gradient(h.value(), dy.value(), p).value()
    alike([producers.activation_gradient(h, dy, p).value()], [expected])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e4m3_1x128", "mxfp8_e4m3", "nvfp4"])
def test_casts_of_activations(name: str, device: str) -> None:
    """Whichever format reads it: most have kernels that are given no number."""
    p, cast = activation("swiglu"), Cast(name)
    col = RHT if name == "nvfp4" else cast
    h, dy = scaled(64, 512, device), scaled(64, 256, device, seed=1)
    lazy, plain = producers.activated(h, p), producers.activated(h.value(), p)
    for casts in ((cast, None), (None, col), (cast, col)):
        assert_bits(producers.quantize(lazy, *casts), dispatch.quantize(plain.value(), *casts))
        assert_equal(operands(lazy, *casts), operands(plain, *casts))
    one = torch.full((1,), 40.0, device=device)
    if not cast.tiled:
        live = (one, None)
        assert_equal(operands(lazy, cast, col, live=live), operands(plain, cast, col, live=live))
    for act, dbias in ((col, True), (None, False)):
        got = activation_backward(h, dy, p, cast, col, act, dbias=dbias)
        expected = activation_backward(h.value(), dy.value(), p, cast, col, act, dbias=dbias)
        if not (dbias and device == "cuda"):
            assert_equal(got, expected)
            continue
        assert_equal(got[:3], expected[:3])  # kernels add in another order
        assert got[3] is not None and expected[3] is not None
        torch.testing.assert_close(got[3], expected[3])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
@pytest.mark.parametrize("shape", [(5, 100), (33, 4096), (3, 20000)], ids=str)
def test_gradients_of_norms(shape: tuple[int, int], rms: bool, device: str) -> None:
    x, dy = wide(*shape, device), scaled(*shape, device, seed=1)
    mean, rstd = norms.norm_stats(x, 1e-5, rms=rms)
    of: tuple[Any, ...] = (x, mean, rstd, wide(1, shape[1], device, seed=2)[0])
    for add in (None, wide(*shape, device, seed=3)):
        expected = norms.norm_backward(dy.value(), *of, add=add)
        alike(norms.norm_backward(dy, *of, add=add), expected)


# ------------------------------------------------------------------------------------------- layers
def nvfp4() -> Any:
    return recipes.NVFP4BlockScaling()


def first_nvfp4() -> Any:
    """fc1 in NVFP4, fc2 in MXFP8, whose casts are made by kernels that are given no number."""

    def factory(role: Any) -> Any:
        of = zoo.nvfp4_factory if role and "fc1" in role.name else zoo.mxfp8_factory
        return of(role)

    return recipes.CustomRecipe(qfactory=factory)


def sequential(dtype: torch.dtype, device: str) -> Any:
    options: dict[str, Any] = {"bias": False, "dtype": dtype, "device": device}
    return ops.Sequential(
        ops.RMSNorm(48, dtype=dtype, device=device), ops.Linear(48, 64, **options), ops.SwiGLU(),
        ops.Linear(32, 48, **options),
    )  # fmt: skip


def mlp(dtype: torch.dtype, device: str, **more: Any) -> Any:
    options = {"bias": False, "activation": "swiglu", "normalization": "RMSNorm", **more}
    return minifloat.LayerNormMLP(48, 32, params_dtype=dtype, device=device, **options)


def norm_linear(dtype: torch.dtype, device: str, **more: Any) -> Any:
    return minifloat.LayerNormLinear(48, 32, params_dtype=dtype, device=device, **more)


# The layer, the recipe, and how many of its products hand over: fc1's, and the gradients of the
# inputs of fc2 and fc1. A bias, or a caller who gets the norm's output, wants them scaled.
LAYERS: dict[str, tuple[Any, Any, int]] = {
    "mlp": (mlp, nvfp4, 3),
    "again": (lambda *of: mlp(*of, checkpoint=True), nvfp4, 4),
    "bias": (lambda *of: mlp(*of, bias=True), nvfp4, 2),
    "shown": (lambda *of: mlp(*of, return_layernorm_output=True), nvfp4, 2),
    "apart": (mlp, lambda: recipes.NVFP4BlockScaling(backward_override="high_precision"), 1),
    "mixed": (mlp, first_nvfp4, 2),
    "fp8": (mlp, recipes.Float8CurrentScaling, 0),
    "norm_linear": (norm_linear, nvfp4, 1),
    "norm_shown": (lambda *of: norm_linear(*of, return_layernorm_output=True), nvfp4, 0),
    "linear": (lambda d, v: minifloat.Linear(48, 32, params_dtype=d, device=v), nvfp4, 0),
    "ops": (sequential, nvfp4, 2),
}


def step(layer: Any, run: Any, recipe: Any) -> list[Tensor]:
    like = next(layer.parameters())
    torch.manual_seed(3)
    x = torch.randn(2, 17, 48).to(like).requires_grad_()
    with minifloat.autocast(recipe=recipe):
        y = run(x)
    y = y[0] if isinstance(y, tuple) else y
    y.backward(torch.linspace(-1, 2, y.numel()).reshape(y.shape).to(y))
    grads = [p.grad for p in layer.parameters()]
    layer.zero_grad(set_to_none=True)
    return [y, x.grad, *grads]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, recipe, count = LAYERS[name]
    monkeypatch.setattr(env, "replays", lambda: False)  # they would skip what is watched here
    torch.manual_seed(1)
    layer, of = make(FP32 if device == "cpu" else BF16, device), recipe()
    calls: list[Any] = []
    multiply = front._unscaled
    with monkeypatch.context() as patch:
        patch.setattr(front, "_unscaled", lambda *a: calls.append(a) or multiply(*a))
        got = step(layer, layer, of)
    assert len(calls) == count
    monkeypatch.setattr(front, "_leaves_number", lambda *_: False)
    assert_bits(got, step(layer, layer, of))


@needs_ops
@pytest.mark.parametrize("name", ["mlp", "ops", pytest.param("again", marks=pytest.mark.deep)])
def test_compiled(name: str) -> None:
    make, recipe, count = LAYERS[name]
    torch.manual_seed(1)
    layer, of, targets = make(FP32, "cpu"), recipe(), []

    def compiler(graph: Any, inputs: Any) -> Any:
        targets.extend(str(n.target) for n in graph.graph.nodes)
        return make_boxed_func(graph)

    torch.compiler.reset()
    run = torch.compile(layer, fullgraph=True, backend=aot_autograd(fw_compiler=compiler))
    assert_bits(step(layer, run, of), step(layer, layer, of))
    assert sum("gemm_unscaled" in t for t in targets) == count
