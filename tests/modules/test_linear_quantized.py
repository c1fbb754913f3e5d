"""Quantized tensors into and out of a Linear, eager and inside compiled regions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import minifloat
from minifloat import recipe as recipes

from .cases import RECIPES, Counter, compare
from .test_linear_compile_more import backward, input_quantizer, linear, quick, sample, state

E4M3, E5M2 = minifloat.DType.kFloat8E4M3, minifloat.DType.kFloat8E5M2
CLASSES = {
    "delayed": minifloat.Float8Tensor,
    "current": minifloat.Float8Tensor,
    "block": minifloat.Float8BlockwiseQTensor,
    "mxfp8": minifloat.MXFP8Tensor,
    "nvfp4": minifloat.NVFP4Tensor,
    "custom": minifloat.Float8Tensor,
}
COMPILED = tuple(name for name in RECIPES if name != "delayed")
EAGER = ("eager", "compiled")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def prepared(fn: Callable[..., Any], way: str, backend: Any = "aot_eager") -> Callable[..., Any]:
    return torch.compile(fn, backend=backend, fullgraph=True) if way == "compiled" else fn


# ------------------------------------------------------------------------------------------- output
@quick(("delayed", "current", "nvfp4"))
def test_the_output_is_a_quantized_tensor(name: str) -> None:
    recipe, layer, x = RECIPES[name](), linear(), sample(2, 5, 48)
    results = []
    for way in EAGER:
        if way == "compiled" and name == "delayed":
            continue
        call = prepared(lambda x: layer(x, fp8_output=True), way)
        with torch.no_grad(), minifloat.autocast(recipe=recipe):
            y, plain = call(x), layer(x)
        assert type(y) is CLASSES[name]
        assert y.shape == plain.shape and y.dtype is plain.dtype and not y.requires_grad
        assert y.get_usages() == {"rowwise": True, "columnwise": False}
        assert isinstance(y._quantizer, minifloat.Quantizer)
        assert type(y._quantizer)._tensor_class is CLASSES[name]
        again = y._quantizer.copy().quantize(plain)
        assert torch.equal(again.dequantize(), y.dequantize())
        results.append(y)
    for y in results[1:]:
        assert y._quantizer == results[0]._quantizer
        assert torch.equal(y.dequantize(), results[0].dequantize())


def test_its_quantizer_keeps_working() -> None:
    layer, x = linear(), sample(5, 48)
    call = prepared(lambda x: layer(x, fp8_output=True), "compiled")
    with torch.no_grad(), minifloat.autocast(recipe=recipes.Float8CurrentScaling()):
        y = call(x)
    y.quantize_(torch.full((5, 64), 3.0))
    assert (y.dequantize() == 3).all()


def pair() -> tuple[Any, Any]:
    torch.manual_seed(1)
    return (
        minifloat.Linear(48, 64, device="cpu", name="first"),
        minifloat.Linear(64, 32, device="cpu", name="second"),
    )


def joined(layers: Any, fp8: bool) -> Callable[[Tensor], Tensor]:
    first, second = layers

    def run(x: Tensor) -> Tensor:
        y: Tensor = (
            second(torch.relu(first(x))) if fp8 is None else second(first(x, fp8_output=fp8))
        )
        return y

    return run


@quick(("current", "mxfp8"), COMPILED)
@pytest.mark.parametrize("shape", [(20, 48), pytest.param((2, 7, 48), marks=pytest.mark.deep)])
def test_a_quantized_tensor_between_layers_trains(name: str, shape: tuple[int, ...]) -> None:
    """In one compiled region with the bits of eager; those of a plain tensor there, too: the next
    layer would have quantized it alike."""
    recipe, counter = RECIPES[name](), Counter()
    layers = pair()
    others, plain = copy.deepcopy(layers), copy.deepcopy(layers)
    compiled = prepared(joined(others, True), "compiled", counter)
    for i in range(2):
        x = sample(*shape, seed=i)
        results = [
            trained(joined(layers, True), x, recipe, layers),
            trained(compiled, x, recipe, others),
            trained(joined(plain, False), x, recipe, plain),
        ]
        compare(results[0], results[1])
        if name != "nvfp4":  # which draws the random bits of its layers in another order
            compare(results[0], results[2])
    assert counter.graphs == 1


@pytest.mark.parametrize("way", EAGER)
def test_a_frozen_layer_hands_on_what_the_next_ones_weight_gradient_multiplies(way: str) -> None:
    recipe, (first, second), x = recipes.MXFP8BlockScaling(), pair(), sample(20, 48)
    first.requires_grad_(False)
    made = []
    for fp8 in (False, True):
        second.zero_grad()
        with minifloat.autocast(recipe=recipe):
            prepared(joined((first, second), fp8), way)(x).sum().backward()
        made.append(second.weight.grad)
    assert torch.equal(*made)


def trained(call: Any, x: Tensor, recipe: Any, layers: Any) -> list[Any]:
    torch.manual_seed(7)
    x = x.clone().requires_grad_()
    with minifloat.autocast(recipe=recipe):
        y = call(x)
    backward(y)
    return [y, x.grad, *(t for layer in layers for t in state(layer))]


def test_a_quantized_tensor_between_layers_trains_with_delayed_scaling() -> None:
    """Eager; the tensor between has the first layer's output scale."""
    recipe, layers = recipes.DelayedScaling(), pair()
    for i in range(3):
        y, dx, *rest = trained(joined(layers, True), sample(20, 48, seed=i), recipe, layers)
        assert all(t.isfinite().all() for t in (y, dx, *rest))
    scale = layers[0].delayed.scale_output
    assert scale.item() != 1.0
    with torch.no_grad(), minifloat.autocast(recipe=recipe):
        h = layers[0](sample(20, 48), fp8_output=True)
    assert torch.equal(h._scale_inv.reshape(1), 1 / scale)


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_delayed_scaling_has_no_quantized_output_in_a_graph(grad: bool) -> None:
    layer, x = linear(name="proj"), sample(20, 48)
    call = prepared(lambda x: layer(x, fp8_output=True), "compiled")
    with torch.set_grad_enabled(grad), minifloat.autocast(recipe=recipes.DelayedScaling()):
        with pytest.raises(
            Exception, match=r"(?s)Linear\(proj\).*fp8_output=True.*delayed"
        ) as raised:
            call(x)
        assert "NotImplementedError" in f"{raised.value!r} {raised.value}"
        layer(x, fp8_output=True)  # without a graph it has


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.deep)])
@pytest.mark.parametrize("name", ["current", pytest.param("nvfp4", marks=pytest.mark.deep)])
def test_a_gradient_cannot_come_back_into_a_region(name: str, backend: str) -> None:
    """PyTorch would fail in backward; forward says so, and says what to do."""
    layer, x = linear(), sample(20, 48)
    call = prepared(lambda x: layer(x, fp8_output=True), "compiled", backend)
    with minifloat.autocast(recipe=RECIPES[name]()):
        with pytest.raises(Exception, match=r"fp8_output=True") as raised:
            call(x)
        for words in ("needs a gradient", "dequantize()", "detach()", "no_grad"):
            assert words in str(raised.value)
        # What it says works.
        region = prepared(lambda x: layer(x, fp8_output=True).dequantize(), "compiled")
        y = region(x)
        backward(y)
        assert layer.weight.grad is not None
        with torch.no_grad():
            assert isinstance(call(x), minifloat.QuantizedTensor)
        detached = prepared(lambda x: layer(x, fp8_output=True).detach(), "compiled")
        assert isinstance(detached(x), minifloat.QuantizedTensor)


def test_a_frozen_layer_returns_one_under_gradients() -> None:
    layer, x = linear(), sample(20, 48)
    layer.requires_grad_(False)
    call = prepared(lambda x: layer(x, fp8_output=True), "compiled")
    with minifloat.autocast(recipe=recipes.Float8CurrentScaling()):
        y = call(x)
    assert isinstance(y, minifloat.Float8Tensor) and not y.requires_grad


@pytest.mark.parametrize("name", RECIPES)
def test_eager_gradients_pass_the_quantized_output(name: str) -> None:
    """Straight through: those of the plain output."""
    results = []
    for fp8 in (False, True):
        layer, x = linear(), sample(20, 48).requires_grad_()
        torch.manual_seed(0)
        with minifloat.autocast(recipe=RECIPES[name]()):
            y = layer(x, fp8_output=fp8)
        assert isinstance(y, minifloat.QuantizedTensor) == fp8
        backward(y.dequantize() if fp8 else y)
        results.append([x.grad, layer.weight.grad, layer.bias.grad])
    compare(*results)


# -------------------------------------------------------------------------------------------- input
def run(
    call: Any, layer: Any, x: Any, recipe: Any, *, enabled: bool = True
) -> tuple[list[Any], list[Any]]:
    """([output, gradient of x, gradients of parameters], buffers) from a fresh state."""
    layer.zero_grad(set_to_none=True)
    layer.delayed.reset()
    x = x.detach().requires_grad_()
    torch.manual_seed(3)
    with minifloat.autocast(enabled=enabled, recipe=recipe):
        y = call(x)
    backward(y)
    assert type(x.grad) is Tensor  # a gradient is never quantized behind one's back
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())], list(layer.buffers())


@pytest.mark.parametrize("shape", [(20, 48), (4, 5, 48)], ids=["2d", "3d"])
@pytest.mark.parametrize("way", EAGER)
@quick(("current", "nvfp4"))
def test_a_quantized_input_is_the_input_that_would_be_quantized(
    name: str, way: str, shape: tuple[int, ...]
) -> None:
    recipe, layer, x = RECIPES[name](), linear(), sample(*shape)
    expected = run(layer, layer, x, recipe)[0]
    coded = input_quantizer(recipe).quantize(x)
    assert type(coded) is CLASSES[name]
    compare(expected, run(prepared(layer, way), layer, coded, recipe)[0])


@pytest.mark.parametrize("way", EAGER)
def test_frozen_weights_need_no_column_copy(way: str) -> None:
    for name in ("current", "mxfp8"):
        recipe, layer, x = RECIPES[name](), linear(), sample(20, 48)
        layer.weight.requires_grad_(False)
        expected = run(layer, layer, x, recipe)[0]
        coded = input_quantizer(recipe, columnwise=False).quantize(x)
        assert coded.get_usages() == {"rowwise": True, "columnwise": False}
        compare(expected, run(prepared(layer, way), layer, coded, recipe)[0])


@pytest.mark.parametrize("way", EAGER)
@quick(("current", "mxfp8"))
def test_an_input_without_its_column_copy(name: str, way: str) -> None:
    """The weight's gradient multiplies it. One scale for the tensor: the transpose will do; else
    forward names what is missing."""
    recipe, layer, x = RECIPES[name](), linear(), sample(20, 48)
    coded = input_quantizer(recipe, columnwise=False).quantize(x)
    try:
        got = run(prepared(layer, way), layer, coded, recipe)[0]
    except Exception as error:
        assert "the columnwise copy is absent" in str(error)
        assert "columnwise=True" in str(error)
        assert layer.weight.grad is None
    else:
        assert CLASSES[name] is minifloat.Float8Tensor
        compare(run(layer, layer, x, recipe)[0], got)
    with torch.no_grad(), minifloat.autocast(recipe=recipe):
        layer.delayed.reset()
        assert torch.equal(prepared(layer, way)(coded), layer(x))


OTHERS: dict[str, tuple[Callable[[], Any], Callable[[], recipes.Recipe]]] = {
    "e5m2": (
        lambda: minifloat.Float8CurrentScalingQuantizer(E5M2, "cpu"),
        recipes.Float8CurrentScaling,
    ),
    "mxfp8": (lambda: minifloat.MXFP8Quantizer(E4M3), recipes.Float8CurrentScaling),
    "tensorwise": (
        lambda: minifloat.Float8CurrentScalingQuantizer(E4M3, "cpu"),
        recipes.MXFP8BlockScaling,
    ),
    "2d-blocks": (
        lambda: minifloat.Float8BlockQuantizer(E4M3, block_scaling_dim=2),
        recipes.Float8BlockScaling,
    ),
    "untransformed": (
        minifloat.NVFP4Quantizer,
        lambda: recipes.NVFP4BlockScaling(disable_stochastic_rounding=True),
    ),
    "identity": (minifloat.IdentityQuantizer, recipes.Float8CurrentScaling),
    "hybrid": (
        lambda: minifloat.HybridQuantizer(
            rowwise_quantizer=minifloat.MXFP8Quantizer(E4M3),
            columnwise_quantizer=minifloat.NVFP4Quantizer(),
        ),
        recipes.Float8CurrentScaling,
    ),
    "delayed": (
        lambda: minifloat.MXFP8Quantizer(E4M3),
        recipes.DelayedScaling,
    ),
}


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        pytest.param(
            kind,
            way,
            id=f"{kind}-{way}",
            marks=[] if way == "eager" or kind in ("e5m2", "untransformed") else pytest.mark.deep,
        )
        for kind in OTHERS
        for way in EAGER
    ],
)
def test_an_input_quantized_in_another_way_is_quantized_anew(kind: str, way: str) -> None:
    make, recipe = OTHERS[kind]
    layer, coded = linear(), make().quantize(sample(20, 48))
    expected = run(layer, layer, coded.dequantize(), recipe())
    got = run(prepared(layer, way), layer, coded, recipe())
    compare(expected[0], got[0])
    compare(expected[1], got[1])


@pytest.mark.parametrize("way", EAGER)
def test_a_quantized_input_outside_autocast_is_its_values(way: str) -> None:
    layer = linear()
    coded = minifloat.MXFP8Quantizer(E4M3).quantize(sample(20, 48))
    expected = run(layer, layer, coded.dequantize(), None, enabled=False)[0]
    compare(expected, run(prepared(layer, way), layer, coded, None, enabled=False)[0])


@pytest.mark.parametrize("way", EAGER)
@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize("columnwise", [False, True], ids=["row", "both"])
def test_a_quantized_input_and_a_backward_in_high_precision(
    override: str, way: str, columnwise: bool
) -> None:
    recipe, layer = recipes.MXFP8BlockScaling(backward_override=override), linear()
    coded = input_quantizer(recipe, columnwise=columnwise).quantize(sample(20, 48))
    expected = run(layer, layer, coded.dequantize(), recipe)[0]
    compare(expected, run(prepared(layer, way), layer, coded, recipe)[0])


@pytest.mark.parametrize("way", EAGER)
@pytest.mark.parametrize(
    "recipe",
    [
        recipes.Float8CurrentScaling(),
        recipes.Float8BlockScaling(use_f32_scales=True),
        recipes.NVFP4BlockScaling(disable_stochastic_rounding=True),
    ],
    ids=["current", "block", "nvfp4"],
)
def test_save_original_input_keeps_a_quantized_one(recipe: recipes.Recipe, way: str) -> None:
    """Its own column copy, that is: one of its values would have been rounded twice."""
    layer, plain = linear(save_original_input=True), linear()
    coded = input_quantizer(recipe).quantize(sample(20, 48))
    expected = run(plain, plain, coded, recipe)[0]
    compare(expected, run(prepared(layer, way), layer, coded, recipe)[0])


def test_swizzled_scales_are_refused() -> None:
    quantizer = minifloat.MXFP8Quantizer(E4M3)
    quantizer.optimize_for_gemm = True
    coded = quantizer.quantize(sample(20, 48))
    with (
        minifloat.autocast(recipe=recipes.MXFP8BlockScaling()),
        pytest.raises(minifloat.UsageError, match="optimize_for_gemm=False"),
    ):
        linear()(coded)


def test_one_graph_serves_equal_quantizers() -> None:
    recipe, layer, counter = recipes.Float8CurrentScaling(), linear(), Counter()
    call = prepared(layer, "compiled", counter)
    for i in range(3):
        x = sample(20, 48, seed=i)
        expected = run(layer, layer, x, recipe)[0]
        compare(expected, run(call, layer, input_quantizer(recipe).quantize(x), recipe)[0])
    assert counter.graphs == 1


def test_a_workspace_has_the_column_copy_of_the_row_copy() -> None:
    """`columnwise_source="rowwise_dequantized"` means the same with and without a workspace."""
    cast = minifloat.Float8BlockQuantizer(
        minifloat.DType.kFloat8E4M3,
        rowwise=True,
        columnwise=True,
        block_scaling_dim=1,
        force_pow_2_scales=False,  # with powers of two, both sources have the same values
    )

    def qfactory(role: Any) -> Any:
        return minifloat.HybridQuantizer(
            rowwise_quantizer=cast.copy(),
            columnwise_quantizer=cast.copy(),
            columnwise_source="rowwise_dequantized",
        )

    found = []
    for first in (None, True):
        torch.manual_seed(0)
        layer = minifloat.Linear(256, 192, bias=False)
        x = torch.randn(130, 256, requires_grad=True)
        with minifloat.autocast(recipe=recipes.CustomRecipe(qfactory=qfactory)):
            y = layer(x, is_first_microbatch=first)
        y.backward(torch.randn(130, 192, generator=torch.Generator().manual_seed(1)))
        found.append((y.detach(), x.grad, layer.weight.grad))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("way", EAGER)
def test_a_weight_that_changed_before_backward(way: str) -> None:
    """A graph saves the weight's buffers, and ran backward on the new ones."""
    recipe, x = RECIPES["mxfp8"](), sample(5, 48).requires_grad_()
    with minifloat.quantized_model_init(recipe=recipe):
        layer = linear()
    call = prepared(layer, way)
    with minifloat.autocast(recipe=recipe):
        y = call(x)
    with torch.no_grad():
        layer.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
