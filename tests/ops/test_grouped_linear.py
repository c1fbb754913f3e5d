"""The grouped linear operation has the bits of the module; its MLP, those of its parts."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minifloat as mf
from minifloat import ops
from minifloat import recipe as recipes
from minifloat.recipe.factories import current_scaling_factory

from .cases import RECIPES, Counter, assert_same, compiled_like_eager, step
from .test_fusions import unfused

E, K, N, ROWS = 4, 32, 48, 21
SPLITS = torch.tensor([9, 0, 11, 1])
SINGLE: dict[str, Any] = {"single_grouped_weight": True, "single_grouped_bias": True}
LAYOUTS = [pytest.param({}, id="discrete"), pytest.param(SINGLE, id="single")]
ALL: dict[str, Any] = {"none": None, **RECIPES}
QUICK = ("none", "current", "delayed")
SOME = [pytest.param(n, marks=[] if n in QUICK else pytest.mark.deep) for n in ALL]


def make(**kwargs: Any) -> Any:
    torch.manual_seed(3)
    op = ops.GroupedLinear(E, K, N, device="cpu", **kwargs)
    for b in op._biases():
        nn.init.normal_(b)
    return op


def twin(op: Any, **kwargs: Any) -> Any:
    """A module with the values of an operation."""
    layout = {k: getattr(op, k) for k in SINGLE}
    layer = mf.GroupedLinear(E, K, N, bias=op.use_bias, device="cpu", **layout, **kwargs)
    layer.load_state_dict(op.state_dict())
    return layer


def tokens(rows: int = ROWS, features: int = K) -> Tensor:
    return torch.randn(rows, features).requires_grad_()


def train(call: Any, owner: Any, recipe: Any, x: Tensor, *extra: Tensor) -> list[Tensor]:
    """Output, gradients in the order of names, and delayed scaling's state."""
    x = x.detach().clone().requires_grad_()
    with mf.autocast(enabled=recipe is not None, recipe=recipe):
        y = call(x, *extra)
    y.backward(torch.linspace(-1, 1, y.numel()).reshape(y.shape).to(y.dtype))
    named = sorted(dict(owner.named_parameters()).items())
    found = [y, x.grad, *[p.grad for _, p in named if p.grad is not None], *owner.buffers()]
    return [t.detach().clone() for t in found if t is not None]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ALL)
def test_bits_of_the_module(name: str, layout: Any) -> None:
    op = make(**layout)
    layer = twin(op)
    for splits in (SPLITS, torch.tensor([0, 21, 0, 0])):
        x = tokens()
        assert_same(train(layer, layer, ALL[name], x, splits), train(op, op, ALL[name], x, splits))


def test_bits_of_the_module_under_torch_autocast() -> None:
    """Without a recipe, the module rounds its weights' gradients to the autocast's dtype."""
    op = make()
    layer, x = twin(op), tokens()
    with torch.autocast("cpu", torch.bfloat16):
        recipe = RECIPES["current"]
        assert_same(train(layer, layer, recipe, x, SPLITS), train(op, op, recipe, x, SPLITS))
        for one in (op, layer):
            one.zero_grad()
        expected, got = (train(one, one, None, x, SPLITS) for one in (layer, op))
    assert got[0].dtype is torch.bfloat16
    assert_same(expected[:2], got[:2])
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SOME[1:])
def test_quantized_weights(name: str, layout: Any) -> None:
    recipe = RECIPES[name]
    if name == "delayed" and layout:
        with (
            mf.quantized_model_init(recipe=recipe),
            pytest.raises(RuntimeError, match="a live scale of its own"),
        ):
            make(**layout)
        return
    made = []
    for cls in (ops.GroupedLinear, mf.GroupedLinear):
        with mf.quantized_model_init(recipe=recipe):
            torch.manual_seed(3)
            made.append(cls(E, K, N, device="cpu", **layout))
    op, layer = made
    assert all(isinstance(w, (mf.QuantizedTensor, mf.GroupedTensor)) for w in op._weights())
    with torch.no_grad():
        for w, other in zip(op._weights(), layer._weights(), strict=True):
            other.copy_(w)
    for _ in range(2):
        x = tokens()
        assert_same(train(layer, layer, recipe, x, SPLITS), train(op, op, recipe, x, SPLITS))
    with pytest.warns(UserWarning, match="outside autocast is dequantized"):
        op(tokens(), SPLITS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_main_grad(layout: Any) -> None:
    op = make(accumulate_into_main_grad=True, **layout)
    layer = twin(op, fuse_wgrad_accumulation=True)
    x = tokens()
    for one in (op, layer):
        for w in one._weights():
            w.main_grad = torch.full(w.shape, 0.5)
    for _ in range(2):
        assert_same(
            train(layer, layer, RECIPES["current"], x, SPLITS),
            train(op, op, RECIPES["current"], x, SPLITS),
        )
    for a, b in zip(op._weights(), layer._weights(), strict=True):
        assert a.grad is None and torch.equal(a.main_grad, b.main_grad)
    assert not torch.equal(op._weights()[0].main_grad, torch.full_like(op._weights()[0], 0.5))
    del op._weights()[-1].main_grad
    with pytest.raises(RuntimeError, match="accumulate_into_main_grad without weight.main_grad"):
        op(x, SPLITS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_later_weight_gradients(layout: Any) -> None:
    op, other = make(delay_wgrad_compute=True, **layout), make(**layout)
    called: list[int] = []
    op.register_wgrad_accumulation_and_reduce_hooks(lambda: called.append(1))
    assert op.need_backward_dw() and not other.need_backward_dw()
    op.backward_dw()  # nothing waits: nothing happens
    x = tokens()
    train(op, op, RECIPES["mxfp8"], x, SPLITS)
    assert all(w.grad is None for w in op._weights())
    op.backward_dw()
    train(other, other, RECIPES["mxfp8"], x, SPLITS)
    for a, b in zip(op._weights(), other._weights(), strict=True):
        assert torch.equal(a.grad, b.grad)
    assert called == [1]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SOME)
def test_scaled_bias(name: str, layout: Any) -> None:
    """`y + s bias_e`, and its gradients, against autograd on the operation without a bias."""
    recipe = ALL[name]
    op = make(scale_bias=True, **layout)
    assert op.num_extra_inputs == 2
    without = ops.GroupedLinear(E, K, N, bias=False, single_grouped_weight=bool(layout))
    with torch.no_grad():
        for a, b in zip(without._weights(), op._weights(), strict=True):
            a.copy_(b)
    x, scales = tokens(), torch.rand(ROWS).requires_grad_()
    found = []
    for one in (op, without):
        x.grad = scales.grad = None
        with mf.autocast(enabled=recipe is not None, recipe=recipe):
            if one is op:
                y = op(x, SPLITS, scales)
            else:
                bias = op._bias_matrix().detach().requires_grad_()
                rows = torch.repeat_interleave(bias, SPLITS, 0)
                y = without(x, SPLITS) + scales[:, None] * rows
        y.backward(torch.linspace(-1, 1, y.numel()).reshape(y.shape))
        of_bias = bias.grad if one is without else _stacked([b.grad for b in op._biases()])
        found.append([y, x.grad, scales.grad, of_bias, _stacked([w.grad for w in one._weights()])])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def _stacked(parts: list[Any]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts)


def test_a_bias_without_scales_takes_none() -> None:
    assert make(scale_bias=True, bias=False).num_extra_inputs == 1


def test_buffers_of_the_caller() -> None:
    op, x = make(), tokens()
    expected = train(op, op, None, x, SPLITS)
    op.zero_grad()
    leaf = x.detach().clone().requires_grad_()
    out, dx = torch.empty(ROWS, N), torch.empty(ROWS, K)
    model = ops.Sequential(op)
    y = model(leaf, SPLITS, op_kwargs={op: {"output": out, "grad_input": dx}})
    y.backward(torch.linspace(-1, 1, y.numel()).reshape(y.shape))
    assert y.data_ptr() == out.data_ptr() and not out.requires_grad
    assert torch.equal(out, expected[0]) and torch.equal(dx, expected[1])
    with pytest.raises(ValueError, match=r"output: got .*\(3, 48\)"):
        model(leaf, SPLITS, op_kwargs={op: {"output": torch.empty(3, N)}})


def test_meta_parameters_are_made_at_the_first_call() -> None:
    op = ops.GroupedLinear(E, K, N, device="meta", **SINGLE)
    assert op.weight.is_meta
    x = tokens()
    torch.manual_seed(5)
    with torch.device("cpu"):
        op(x, SPLITS)
    torch.manual_seed(5)
    other = ops.GroupedLinear(E, K, N, device=op.weight.device)
    for i in range(E):
        assert torch.equal(op.weight[i], getattr(other, f"weight{i}"))


def test_parameters_and_checkpoints() -> None:
    names = [n for n, _ in make().named_parameters()]
    assert names == [*[f"weight{i}" for i in range(E)], *[f"bias{i}" for i in range(E)]]
    a, b = make(), make(**SINGLE)
    with torch.no_grad():
        a.weight2.add_(1.0)
    for source, target in ((a, b), (b, make())):
        target.load_state_dict(source.state_dict())
        x = tokens()
        assert torch.equal(source(x, SPLITS), target(x, SPLITS))


def test_quantizers_of_each_group() -> None:
    op = make()
    with mf.autocast(recipe=RECIPES["delayed"]):
        op(tokens(), SPLITS)
    assert op.num_quantizers("forward") == 2 * E and op.num_quantizers("backward") == E
    last = op.get_quantizer("forward", 2 * E - 1)
    assert torch.equal(last.scale, op.delayed.scale_weight[E - 1 :])
    assert op.get_quantizer_roles("forward")[1].tensor_type == "weight"
    assert len(op.get_quantizer_roles("backward")) == E


def test_a_factory_sees_the_roles_of_the_module() -> None:
    """Of experts, as the module has them, and under the operation's name."""
    found: list[set[Any]] = []
    for layer in (make(), twin(make())):
        found.append(set())

        def factory(role: Any, seen: set[Any] = found[-1]) -> Any:
            seen.add(role)
            return current_scaling_factory(role)

        layer.name = "experts"
        train(layer, layer, recipes.CustomRecipe(qfactory=factory), tokens(), SPLITS)
    assert (
        found[0] - {None}
        == found[1] - {None}
        == {
            recipes.QuantizerRole("grouped_linear", kind, "experts")
            for kind in ("input", "weight", "grad_output")
        }
    )


# ------------------------------------------------------------------------------------------- errors
def test_wrong_construction() -> None:
    for name in ("num_groups", "in_features", "out_features"):
        sizes = {"num_groups": 2, "in_features": 8, "out_features": 8, name: 0}
        with pytest.raises(ValueError, match=f"GroupedLinear: {name}: got 0"):
            ops.GroupedLinear(**sizes)
    with pytest.raises(ValueError, match="dtype: got torch.int32"):
        ops.GroupedLinear(2, 8, 8, dtype=torch.int32)


@pytest.mark.parametrize(
    ("splits", "match"),
    [
        (torch.tensor([9, 11, 1]), r"split_sizes: got torch.int64 of shape \(3,\).*\(4,\)"),
        (torch.tensor([9, -1, 12, 1]), "split_sizes: .*negative"),
        (torch.tensor([9, 1, 11, 1]), "split_sizes: .*22 rows together; the matrix has 21"),
        (torch.tensor([9.0, 0, 11, 1]), "split_sizes: got torch.float32"),
    ],
)
def test_wrong_splits(splits: Tensor, match: str) -> None:
    with pytest.raises(ValueError, match=rf"GroupedLinear \(op 0 of 1\).*{match}"):
        make()(tokens(), splits)


def test_wrong_inputs() -> None:
    with pytest.raises(ValueError, match=r"input: got shape \(21, 31\).*in_features=32"):
        make()(tokens(features=31), SPLITS)
    op = make(scale_bias=True)
    with pytest.raises(ValueError, match=r"scales: got torch.float32 of shape \(3,\).*21 rows"):
        op(tokens(), SPLITS, torch.rand(3))
    with pytest.raises(ValueError, match="got 1, 2 are needed"):
        op(tokens(), SPLITS)
    op = make()
    op.weight1.data = op.weight1.data.bfloat16()
    with pytest.raises(TypeError, match="the parameters have dtypes"):
        op(tokens(), SPLITS)


def test_a_weight_that_changed_before_backward() -> None:
    op = make(bias=False)
    y = op(tokens(), SPLITS)
    with torch.no_grad():
        op.weight2.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# -------------------------------------------------------------------------------------------- fused
ACTIVATIONS = {
    "swiglu": lambda: ops.ScaledSwiGLU(activation_recompute_in_mlp=True),
    "clamped": ops.ScaledClampedQGeGLU,
    "srelu": ops.ScaledSReLU,
}


def mlp(activation: str = "swiglu", dtype: torch.dtype = torch.float32, **kwargs: Any) -> Any:
    torch.manual_seed(5)
    middle = N if activation == "srelu" else N // 2
    return ops.Sequential(
        ops.GroupedLinear(E, K, N, dtype=dtype, **kwargs),
        ACTIVATIONS[activation](),
        ops.GroupedLinear(E, middle, K, dtype=dtype, **kwargs),
    )


def fused_names(model: Any, way: str) -> list[str]:
    return [type(op).__name__ for op, _ in getattr(model._module_groups[0], way)]


@pytest.mark.parametrize(
    ("name", "activation", "kwargs"),
    [
        *[pytest.param(n, "swiglu", SINGLE, id=n) for n in ALL],
        pytest.param("current", "clamped", {}, id="clamped"),
        pytest.param("delayed", "srelu", {"bias": False}, id="srelu"),
        pytest.param("mxfp8", "swiglu", {"dtype": torch.bfloat16}, id="bf16"),
    ],
)
def test_the_mlp_has_the_bits_of_its_parts(name: str, activation: str, kwargs: Any) -> None:
    model = mlp(activation, **kwargs)
    other = copy.deepcopy(model)
    dtype = kwargs.get("dtype", torch.float32)
    for splits in (SPLITS, torch.tensor([0, 0, 21, 0])):
        x, probs = torch.randn(ROWS, K).to(dtype), torch.rand(ROWS)
        given = (x, ALL[name], splits, probs)
        fused = _trained(model, *given)
        with unfused():
            apart = _trained(other, *given)
        assert_same(apart, fused)
    assert fused_names(model, "_forward_ops") == ["ForwardGroupedMLP"]
    assert len(fused_names(other, "_forward_ops")) == 3
    assert len(fused_names(model, "_backward_ops")) == 3


def _trained(model: Any, x: Tensor, recipe: Any, splits: Tensor, probs: Tensor) -> list[Tensor]:
    return step(model, lambda x, p: model(x, splits, p, splits), x, recipe, probs)


@pytest.mark.parametrize("frozen", ["first", "input", "weights", "last"])
def test_the_mlp_partly_frozen(frozen: str) -> None:
    for recipe in (RECIPES["delayed"], RECIPES["current"]):
        found = []
        for context in (contextlib.nullcontext(), unfused()):
            model = mlp()
            some = {"first": model[0], "last": model[2], "weights": model, "input": None}[frozen]
            for p in some.parameters() if some is not None else ():
                p.requires_grad_(False)
            torch.manual_seed(2)
            x, probs = torch.randn(ROWS, K), torch.rand(ROWS, requires_grad=frozen != "first")
            x.requires_grad_(frozen != "input" and frozen != "first")
            with context, mf.autocast(recipe=recipe):
                y = model(x, SPLITS, probs, SPLITS)
                y.backward(torch.ones_like(y))
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            found.append([y.detach(), *[t.grad for t in (x, probs) if t.grad is not None], *grads])
        assert_same(*found)


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_overrides(override: str) -> None:
    recipe = recipes.Float8CurrentScaling(backward_override=override)
    model, x, probs = mlp(), torch.randn(ROWS, K), torch.rand(ROWS)
    other = copy.deepcopy(model)
    fused = _trained(model, x, recipe, SPLITS, probs)
    with unfused():
        assert_same(_trained(other, x, recipe, SPLITS, probs), fused)
    count = 3 if override == "dequantized" else 1
    assert len(fused_names(model, "_forward_ops")) == count


@pytest.mark.parametrize("name", ["none", "current", "delayed", "block", "mxfp8"])
def test_the_mlp_keeps_nothing_of_the_activation(name: str) -> None:
    """Saved bytes are those of the operations alone, less the second one's input."""
    kept = []
    for context in (contextlib.nullcontext(), unfused()):
        sizes: dict[int, int] = {}

        def pack(t: Tensor, sizes: dict[int, int] = sizes) -> Tensor:
            sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        model, x = mlp(bias=False), torch.randn(ROWS, K, requires_grad=True)
        recipe = ALL[name]
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
        with context, mf.autocast(enabled=recipe is not None, recipe=recipe), hooks:
            y = model(x, SPLITS, torch.rand(ROWS), SPLITS)
        kept.append(sum(sizes.values()))
        del y
    # The least a column copy takes: a byte for each element.
    assert kept[1] - kept[0] >= ROWS * (N // 2)


# ----------------------------------------------------------------------------------------- compiled
@pytest.mark.deep
@pytest.mark.parametrize("name", ALL)
def test_the_operation_is_one_graph(name: str) -> None:
    op = make(**(SINGLE if name != "delayed" else {}))
    data = [[torch.randn(ROWS, K)] for _ in range(2)]
    compiled_like_eager(op, lambda op: lambda x: op(x, SPLITS), data, ALL[name])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SOME[1:])
@pytest.mark.deep
def test_quantized_weights_in_a_graph(name: str, layout: Any) -> None:
    if name == "delayed" and layout:
        pytest.skip("refused: its weights stay apart")
    with mf.quantized_model_init(recipe=RECIPES[name]):
        op = ops.GroupedLinear(E, K, N, device="cpu", **layout)
    data = [[torch.randn(ROWS, K)] for _ in range(2)]
    compiled_like_eager(op, lambda op: lambda x: op(x, SPLITS), data, RECIPES[name])


@pytest.mark.deep
@pytest.mark.parametrize("name", ALL)
def test_the_mlp_is_one_graph_for_any_splits(name: str) -> None:
    torch._dynamo.reset()
    model = mlp(**(SINGLE if name != "mxfp8" else {}))
    other = copy.deepcopy(model)
    counter = Counter()

    def of(model: Any) -> Any:
        return lambda x, probs, splits: model(x, splits, probs, splits)

    compiled = torch.compile(of(other), backend=counter, fullgraph=True)
    for splits in (SPLITS, torch.tensor([0, 21, 0, 0]), torch.tensor([5, 5, 5, 6])):
        x, probs = torch.randn(ROWS, K), torch.rand(ROWS)
        results = [
            step(one, lambda x, p, call=call, s=splits: call(x, p, s), x, ALL[name], probs)
            for one, call in ((model, of(model)), (other, compiled))
        ]
        assert_same(*results)
    assert counter.graphs == 1
