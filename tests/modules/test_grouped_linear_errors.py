"""Bad input to GroupedLinear: what is said names the module, the numbers and the rule, and nothing
is changed by it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import minifloat as mf
from minifloat import recipe as recipes

from .test_linear_errors import compiles, refused

CURRENT, DELAYED = recipes.Float8CurrentScaling(), recipes.DelayedScaling(amax_history_len=4)
SPLITS = [5, 0, 33, 17]
SINGLE: dict[str, Any] = {"single_grouped_weight": True, "single_grouped_bias": True}
MOE = r"GroupedLinear\(moe\)"


def make(**kwargs: Any) -> Any:
    return mf.GroupedLinear(4, 48, 64, device="cpu", name="moe", **kwargs)


def x(**kwargs: Any) -> torch.Tensor:
    return torch.randn(55, 48, **kwargs)


@pytest.mark.parametrize("missing", [0, 3])
def test_a_main_grad_that_one_expert_lacks(missing: int) -> None:
    layer = make(fuse_wgrad_accumulation=True)
    owners = [getattr(layer, f"weight{i}") for i in range(4)]
    for i, w in enumerate(owners):
        w.grad_added_to_main_grad = False
        if i != missing:
            w.main_grad = torch.zeros_like(w)
    match = rf"{MOE}: fuse_wgrad_accumulation without weight.main_grad"
    with mf.autocast(recipe=DELAYED), refused(RuntimeError, match, layer):
        layer(x(), SPLITS)
    assert [w.grad_added_to_main_grad for w in owners] == [False] * 4


def test_a_call_that_is_refused_leaves_histories() -> None:
    layer = make(save_original_input=True)
    with (
        mf.autocast(recipe=DELAYED),
        refused(ValueError, "save_original_input with delayed", layer),
    ):
        layer(x(), SPLITS)
    layer = make()
    with mf.autocast(recipe=DELAYED), refused(ValueError, rf"{MOE}: out: got .*\(3, 64\)", layer):
        layer(x(), SPLITS, out=torch.empty(3, 64))
    with mf.quantized_model_init(recipe=CURRENT):
        layer = make()
    for recipe in (recipes.MXFP8BlockScaling(), recipes.NVFP4BlockScaling()):
        with mf.autocast(recipe=recipe), refused(RuntimeError, "Recipe mismatch for.*moe", layer):
            layer(x(), SPLITS)


def test_inputs_that_no_product_takes() -> None:
    layer = make()
    with refused(RuntimeError, rf"{MOE}: inp: it is on meta, the parameters on cpu", layer):
        layer(x(device="meta"), SPLITS)
    for name in ("out", "dgrad_out"):
        with refused(TypeError, rf"{MOE}: {name}: got list; a tensor", layer):
            layer(x(), SPLITS, **{name: [1.0]})
    layer = make(params_dtype=torch.float64)
    assert layer(x(dtype=torch.float64), SPLITS).dtype is torch.float64
    match = rf"{MOE}: inp: got torch.float64, which no recipe quantizes"
    for recipe in (CURRENT, DELAYED):
        with mf.autocast(recipe=recipe), refused(TypeError, match, layer):
            layer(x(dtype=torch.float64), SPLITS)


def test_arguments_that_make_no_layer() -> None:
    for given in (1.5, "4", -1):
        with pytest.raises(ValueError, match=rf"num_gemms: got {given!r}; an int >= 1"):
            mf.GroupedLinear(given, 48, 64, device="cpu")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=rf"{MOE}: params_dtype: got torch.int32"):
        make(params_dtype=torch.int32)


@compiles
@pytest.mark.parametrize("kind", ["weight", "bias"])
@pytest.mark.parametrize("recipe", [None, CURRENT])
def test_experts_of_several_shapes(kind: str, recipe: Any) -> None:
    """A graph casts weights without putting them together, and would not notice."""
    layer = make()
    shape = (32, 48) if kind == "weight" else (32,)
    setattr(layer, f"{kind}2", nn.Parameter(torch.zeros(shape), requires_grad=False))
    layer.requires_grad_(False)
    match = rf"{MOE}: {'weights' if kind == 'weight' else 'biases'}: got shapes \[.*\]; all experts"
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for call, error in ((layer, ValueError), (compiled, torch._dynamo.exc.Unsupported)):
        with (
            mf.autocast(enabled=recipe is not None, recipe=recipe),
            refused(error, f"(?s){match}", layer),
        ):
            call(x(), SPLITS)
    with pytest.raises(ValueError, match=match):
        layer.make_grouped_weights()


@pytest.mark.parametrize("kind", ["Linear", "LayerNormMLP", "GroupedLinear"])
def test_an_evaluation_needs_no_main_grad(kind: str) -> None:
    """Nothing is added to it, and nothing says so."""
    sizes, rest = ((4, 48, 64), (SPLITS,)) if kind == "GroupedLinear" else ((48, 64), ())
    layer = getattr(mf, kind)(*sizes, device="cpu", fuse_wgrad_accumulation=True)
    for p in layer.parameters():
        p.grad_added_to_main_grad = False
    for recipe in (None, CURRENT):
        with torch.no_grad(), mf.autocast(enabled=recipe is not None, recipe=recipe):
            assert layer(x(), *rest).shape[0] == 55
    assert not any(p.grad_added_to_main_grad for p in layer.parameters())


@compiles
@pytest.mark.parametrize("recipe", [None, CURRENT])
def test_splits_that_cannot_be_read(recipe: Any) -> None:
    with FakeTensorMode():
        layer = make(params_dtype=torch.bfloat16)
        rows = x(dtype=torch.bfloat16).requires_grad_()
        with mf.autocast(enabled=recipe is not None, recipe=recipe):
            y = layer(rows, torch.tensor(SPLITS))
        y.sum().backward()
    assert y.shape == (55, 64) and rows.grad is not None and layer.weight3.grad.shape == (64, 48)


@pytest.mark.parametrize("recipe", [None, CURRENT])
@pytest.mark.parametrize("how", ["grouped", "elsewhere", "kept", "split", "padded"])
def test_parameters_of_the_dtype_that_autocast_is_not_of(how: str, recipe: Any) -> None:
    """torch.autocast promotes what is put together, and knows nothing of its other 16 bits."""
    half: Any = {"params_dtype": torch.float16}
    rest: tuple[Any, ...] = (SPLITS,)
    kwargs = {"is_first_microbatch": True} if how == "kept" else {}
    layer: Any = make(**half)
    if how == "split":
        layer, rest = mf.Linear(48, 64, parameters_split=("q", "k"), device="cpu", **half), ()
    elif how == "elsewhere":
        layer.weight2 = nn.Parameter(layer.weight2.detach().clone())
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        mf.autocast(enabled=recipe is not None, recipe=recipe),
    ):
        if how == "padded":
            assert mf.Fp8Padding(4, 16)(x(dtype=torch.float16), SPLITS)[0].dtype is torch.float16
            return
        y = layer(x(), *rest, **kwargs)
    y.sum().backward()
    assert y.dtype is torch.bfloat16
    assert all(p.grad.dtype is torch.float16 for p in layer.parameters())


@pytest.mark.parametrize("kwargs", [{}, {"single_grouped_weight": True}])
def test_later_gradients_under_torch_autocast(kwargs: Any) -> None:
    """They have the parameters' dtype, where nothing quantizes too."""
    layer = make(delay_wgrad_compute=True, **kwargs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x(), SPLITS)
    for _ in range(2):
        y.sum().backward(retain_graph=True)
        layer.backward_dw()
    owner = layer.weight if kwargs else layer.weight3
    assert owner.grad.dtype is torch.float32


@pytest.mark.parametrize(("which", "other"), [(0, 1), (2, 0)])
@pytest.mark.parametrize("kind", [mf.GroupedLinear, mf.ops.GroupedLinear])
def test_quantized_and_plain_experts(kind: Any, which: int, other: int) -> None:
    with mf.quantized_model_init(recipe=CURRENT):
        quantized = kind(4, 48, 64, device="cpu")
    layer = kind(4, 48, 64, device="cpu")
    setattr(layer, f"weight{which}", getattr(quantized, f"weight{which}"))
    match = f"GroupedLinear: weight{which} is quantized and weight{other} is not"
    with mf.autocast(recipe=CURRENT), pytest.raises(TypeError, match=match):
        layer(x(), torch.tensor(SPLITS))
    with pytest.warns(UserWarning, match="dequantized"):
        assert torch.isfinite(layer(x(), torch.tensor(SPLITS))).all()


@pytest.mark.parametrize("recipe", [None, CURRENT, recipes.MXFP8BlockScaling()])
@pytest.mark.parametrize("single", [False, True])
def test_experts_of_no_features(recipe: Any, single: bool) -> None:
    """As a Linear: the biases are the result. A layer that can be made can run."""
    layer = mf.GroupedLinear(4, 0, 64, device="cpu", single_grouped_weight=single)
    inp = torch.randn(5, 11, 0, requires_grad=True)
    with mf.autocast(enabled=recipe is not None, recipe=recipe):
        y = layer(inp, SPLITS)
    y.sum().backward()
    assert y.shape == (5, 11, 64) and inp.grad is not None
    assert torch.equal(layer.bias2.grad, torch.full((64,), 33.0))


@pytest.mark.parametrize("recipe", [None, CURRENT, recipes.MXFP8BlockScaling()])
@pytest.mark.parametrize(
    ("kwargs", "name", "shape", "rule"),
    [
        ({}, "weight", (64, 40), r"all experts must have one, \(64, 48\)"),
        ({}, "weight", (72, 48), r"all experts must have one, \(64, 48\)"),
        ({}, "bias", (72,), r"all experts must have one, \(64,\)"),
        (SINGLE, "weight", (4, 64, 40), r"one parameter has \(4, 64, 48\)"),
        (SINGLE, "weight", (5, 64, 48), r"one parameter has \(4, 64, 48\)"),
        (SINGLE, "bias", (5, 64), r"one parameter has \(4, 64\)"),
    ],
)
def test_parameters_of_another_size(
    kwargs: Any, name: str, shape: Any, rule: str, recipe: Any
) -> None:
    """All alike, and not what the layer was made for: codes were read as of its own sizes."""
    layer = make(**kwargs)
    for key in [k for k, _ in layer.named_parameters() if k.startswith(name)]:
        setattr(layer, key, nn.Parameter(torch.randn(shape)))
    match = rf"{MOE}: (weights|biases): got shapes .*; {rule}"
    with (
        mf.autocast(enabled=recipe is not None, recipe=recipe),
        pytest.raises(ValueError, match=match),
    ):
        layer(x(), SPLITS)


@pytest.mark.parametrize("num", [0, -1, 2.5, True, "2"])
def test_how_many_experts(num: Any) -> None:
    with pytest.raises(ValueError, match="num_gemms: got .*; an int >= 1"):
        mf.GroupedLinear(num, 48, 64, device="cpu")
    with pytest.raises(ValueError, match="num_groups: got .*; an int >= 1"):
        mf.ops.GroupedLinear(num, 48, 64, device="cpu")
