"""GroupedLinear computes what a Linear for each expert computes, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import minifloat as mf
from minifloat import recipe as recipes
from minifloat.modules.linear import Linear

from .cases import RECIPES

SPLITS = [5, 0, 33, 17]
E, K, N, ROWS = 4, 48, 64, 55
MORE: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    **RECIPES,
    "high_precision": lambda: recipes.Float8CurrentScaling(backward_override="high_precision"),
    "dequantized": lambda: recipes.MXFP8BlockScaling(backward_override="dequantized"),
    "nvfp4_nearest": lambda: recipes.NVFP4BlockScaling(disable_stochastic_rounding=True),
}
SINGLE: dict[str, Any] = {"single_grouped_weight": True, "single_grouped_bias": True}


QUICK = ("none", "current", "delayed")


def slow(names: Any) -> list[Any]:
    """One case of each kind always runs, the others in the long suite."""
    return [pytest.param(n, marks=[] if n in QUICK else pytest.mark.deep) for n in names]


def weights(layer: Any) -> list[Tensor]:
    if layer.single_grouped_weight:
        return list(layer.weight)
    return [getattr(layer, f"weight{i}") for i in range(layer.num_gemms)]


def biases(layer: Any) -> list[Tensor]:
    if layer.single_grouped_bias:
        return list(layer.bias)
    return [getattr(layer, f"bias{i}") for i in range(layer.num_gemms)]


def gradients(layer: Any, kind: str) -> list[Tensor]:
    if getattr(layer, f"single_grouped_{kind}"):
        return list(getattr(layer, kind).grad)
    return [getattr(layer, f"{kind}{i}").grad for i in range(layer.num_gemms)]


def context(recipe: Any) -> Any:
    return mf.autocast(enabled=recipe is not None, recipe=recipe)


def pair(recipe: Any, *, primary: bool = False, **kwargs: Any) -> tuple[Any, list[Any]]:
    """A GroupedLinear, and a Linear for each of its experts with the same values."""
    torch.manual_seed(1)
    both = {k: v for k, v in kwargs.items() if not k.startswith("single_")}
    layer = mf.GroupedLinear(E, K, N, device="cpu", **kwargs)
    alone = [mf.Linear(K, N, device="cpu", **both) for _ in range(E)]
    with torch.no_grad():
        for w, one in zip(weights(layer), alone, strict=True):
            one.weight.copy_(w)
        if layer.use_bias:
            for b, one in zip(biases(layer), alone, strict=True):
                one.bias.copy_(b.normal_())
    return layer, alone


def same_seeds(monkeypatch: pytest.MonkeyPatch, alone: list[Any]) -> None:
    """Linear i rounds stochastically with [seed, offset + i]."""
    base = torch.tensor([11, 22])

    def seed(self: Any, plan: Any, inp: Tensor, rounds: bool = False) -> Tensor | None:
        if not plan.stochastic:
            return None
        found = [i for i, one in enumerate(alone) if one is self]
        return base + torch.tensor([0, found[0] if found else 0])

    monkeypatch.setattr(mf.GroupedLinear, "_seed", seed)
    monkeypatch.setattr(Linear, "_seed", seed)


def run(layer: Any, alone: list[Any], recipe: Any, splits: Any, **kwargs: Any) -> None:
    """One step of both; everything must agree."""
    host = [int(s) for s in splits]
    x = torch.randn(sum(host), K).requires_grad_()
    parts = [p.detach().clone().requires_grad_() for p in torch.split(x, host)]
    grad = torch.randn(sum(host), N)
    with context(recipe):
        y = layer(x, splits, **kwargs)
    y.backward(grad)
    with context(recipe):
        ys = [one(p, **kwargs) for one, p in zip(alone, parts, strict=True)]
    for one, g in zip(ys, torch.split(grad, host), strict=True):
        one.backward(g)
    assert torch.equal(y, torch.cat(ys))
    assert x.grad is not None and torch.equal(x.grad, torch.cat([p.grad for p in parts]))


def agree(layer: Any, alone: list[Any]) -> None:
    for got, one in zip(gradients(layer, "weight"), alone, strict=True):
        assert torch.equal(got, one.weight.grad)
    if layer.use_bias:
        for got, one in zip(gradients(layer, "bias"), alone, strict=True):
            assert torch.equal(got, one.bias.grad)


@pytest.mark.parametrize("name", MORE)
@pytest.mark.parametrize("single", [False, True], ids=["discrete", "single"])
def test_bits_of_a_linear_for_each_expert(
    name: str, single: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = MORE[name]()
    layer, alone = pair(recipe, **(SINGLE if single else {}))
    same_seeds(monkeypatch, alone)
    for splits in (SPLITS, [0, 20, 1, 7], [0, 0, 3, 0]):
        run(layer, alone, recipe, splits)
        agree(layer, alone)


@pytest.mark.parametrize("name", slow(["current", "mxfp8", "none"]))
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_splits_as_a_tensor(name: str, dtype: torch.dtype) -> None:
    recipe = MORE[name]()
    layer, alone = pair(recipe, bias=False)
    run(layer, alone, recipe, torch.tensor(SPLITS, dtype=dtype))
    agree(layer, alone)


@pytest.mark.parametrize("name", slow(MORE))
def test_microbatches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = MORE[name]()
    layer, alone = pair(recipe, **SINGLE)
    same_seeds(monkeypatch, alone)
    for first in (True, False, False):
        run(layer, alone, recipe, SPLITS, is_first_microbatch=first)
    agree(layer, alone)


@pytest.mark.parametrize("name", slow(["current", "block", "mxfp8", "nvfp4_nearest"]))
def test_save_original_input(name: str) -> None:
    recipe = MORE[name]()
    layer, alone = pair(recipe, save_original_input=True)
    run(layer, alone, recipe, SPLITS)
    agree(layer, alone)


@pytest.mark.parametrize("name", slow(["current", "mxfp8", "none"]))
@pytest.mark.parametrize("single", [False, True], ids=["discrete", "single"])
def test_main_grad(name: str, single: bool) -> None:
    recipe = MORE[name]()
    layer, alone = pair(recipe, fuse_wgrad_accumulation=True, **(SINGLE if single else {}))
    for p in [layer.weight] if single else weights(layer):
        p.main_grad = torch.full(p.shape, 0.5)  # type: ignore[attr-defined]
    for one in alone:
        one.weight.main_grad = torch.full(one.weight.shape, 0.5)
    run(layer, alone, recipe, SPLITS)
    run(layer, alone, recipe, [1, 2, 30, 0])
    owners: list[Any] = [layer.weight] if single else weights(layer)
    found = list(owners[0].main_grad) if single else [w.main_grad for w in owners]
    for got, one in zip(found, alone, strict=True):
        assert torch.equal(got, one.weight.main_grad)
    assert all(p.grad is None for p in layer.parameters() if p.dim() > 1 and not single)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.deep)])
def test_a_frozen_expert_has_no_main_grad(compiled: bool) -> None:
    recipe = recipes.Float8CurrentScaling()
    layer, other = (
        mf.GroupedLinear(4, 48, 64, bias=False, device="cpu", fuse_wgrad_accumulation=fused)
        for fused in (True, False)
    )
    other.load_state_dict(layer.state_dict())
    owners = weights(layer)
    for i, w in enumerate(owners):
        w.requires_grad_(i in (1, 2))
        if w.requires_grad:
            w.main_grad = torch.full(w.shape, 0.5)
    torch._dynamo.reset()
    call: Any = layer
    if compiled:
        call = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(55, 48)
    for one in (call, other):
        with mf.autocast(recipe=recipe):
            one(x.clone().requires_grad_(), [5, 0, 33, 17]).sum().backward()
    assert torch.equal(owners[1].main_grad, torch.full((64, 48), 0.5))
    torch.testing.assert_close(owners[2].main_grad, 0.5 + other.weight2.grad)
    assert all(w.grad is None for w in owners)


def test_a_main_grad_of_another_shape() -> None:
    layer = mf.GroupedLinear(2, 48, 64, bias=False, device="cpu", fuse_wgrad_accumulation=True)
    for w in weights(layer):
        w.main_grad = torch.zeros(64 * 48)
    with pytest.raises(ValueError, match=r"main_grad has shape \(3072,\); .*\(64, 48\)"):
        layer(torch.randn(5, 48), [2, 3])


@pytest.mark.parametrize("name", slow(["current", "mxfp8", "none"]))
@pytest.mark.parametrize("single", [False, True], ids=["discrete", "single"])
def test_later_weight_gradients(name: str, single: bool) -> None:
    recipe = MORE[name]()
    layer, alone = pair(recipe, delay_wgrad_compute=True, **(SINGLE if single else {}))
    called = []
    layer.register_wgrad_accumulation_and_reduce_hooks(lambda: called.append(1))
    assert layer.need_backward_dw()
    layer.backward_dw()  # nothing waits: nothing happens
    run(layer, alone, recipe, SPLITS)
    assert all(p.grad is None for p in layer.parameters() if p.dim() > 1 + single)
    layer.backward_dw()
    for one in alone:
        one.backward_dw()
    agree(layer, alone)
    assert called == [1]


@pytest.mark.parametrize("name", ["none", "mxfp8"])
def test_later_weight_gradients_are_made_as_in_backward(name: str) -> None:
    """What they are has no graph, and torch.autocast no say."""
    recipe = MORE[name]()
    x = torch.randn(sum(SPLITS), K)
    grads = []
    for amp in (False, True):
        torch.manual_seed(3)
        layer: Any = mf.GroupedLinear(E, K, N, device="cpu", delay_wgrad_compute=True)
        with mf.autocast(enabled=recipe is not None, recipe=recipe):
            y = layer(x.clone().requires_grad_() * 2, SPLITS)
        y.square().sum().backward()
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            layer.backward_dw()
        grads.append([w.grad for w in weights(layer)])
        assert not any(g.requires_grad for g in grads[-1])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("name", slow(["current", "block", "mxfp8", "nvfp4_nearest"]))
@pytest.mark.parametrize("single", [False, True], ids=["discrete", "single"])
def test_quantized_weights(name: str, single: bool) -> None:
    recipe = MORE[name]()
    with mf.quantized_model_init(recipe=recipe):
        torch.manual_seed(3)
        layer: Any = mf.GroupedLinear(E, K, N, device="cpu", **(SINGLE if single else {}))
        torch.manual_seed(3)
        alone = [mf.Linear(K, N, device="cpu") for _ in range(E)]
    if single:
        assert isinstance(layer.weight, mf.GroupedTensor)
        assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]
    else:
        assert all(isinstance(w, mf.QuantizedTensor) for w in weights(layer))
    run(layer, alone, recipe, SPLITS)
    for first in (True, False):
        run(layer, alone, recipe, SPLITS, is_first_microbatch=first)
    agree(layer, alone)
    with pytest.warns(UserWarning, match="outside autocast is dequantized"):
        layer(torch.randn(ROWS, K), SPLITS)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (layer, *alone)]
    for optimizer in optimizers:
        optimizer.step()
    run(layer, alone, recipe, SPLITS)
    with pytest.raises(RuntimeError, match="Recipe mismatch"), context(_other(name)):
        layer(torch.randn(ROWS, K), SPLITS)


def test_quantized_weights_that_scale_by_history() -> None:
    recipe = recipes.DelayedScaling()
    with mf.quantized_model_init(recipe=recipe):
        torch.manual_seed(3)
        layer: Any = mf.GroupedLinear(E, K, N, device="cpu")
        torch.manual_seed(3)
        alone = [mf.Linear(K, N, device="cpu") for _ in range(E)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (layer, *alone)]
    for _ in range(3):
        run(layer, alone, recipe, SPLITS)
        agree(layer, alone)
        for optimizer in optimizers:
            optimizer.step()
    scales = torch.cat([one.delayed.scale_weight for one in alone])
    assert torch.equal(layer.delayed.scale_weight, scales)
    other = copy.deepcopy(layer)
    run(other, alone, recipe, SPLITS)


def _other(name: str) -> Any:
    return MORE["mxfp8" if name == "current" else "current"]()


@pytest.mark.parametrize("name", slow(RECIPES))
@pytest.mark.parametrize("how", ["ours", "torch"])
def test_checkpoint(name: str, how: str) -> None:
    recipe = RECIPES[name]()
    torch.manual_seed(1)
    layer = mf.GroupedLinear(E, K, N, device="cpu")
    other = copy.deepcopy(layer)
    found = []
    for one, repeated in ((layer, False), (other, True)):
        torch.manual_seed(2)
        x = torch.randn(ROWS, K).requires_grad_()
        with mf.autocast(recipe=recipe):
            if not repeated:
                y = one(x, SPLITS)
            elif how == "ours":
                y = mf.checkpoint(one, x, SPLITS)
            else:
                y = torch.utils.checkpoint.checkpoint(one, x, SPLITS, use_reentrant=False)
        y.square().sum().backward()
        found.append([y, x.grad, *(p.grad for p in one.parameters()), *one.buffers()])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_frozen() -> None:
    layer, _ = pair(None)
    for p in layer.parameters():
        p.requires_grad_(False)
    x = torch.randn(ROWS, K)
    with context(MORE["mxfp8"]()):
        assert not layer(x, SPLITS).requires_grad
        y = layer(x.requires_grad_(), SPLITS)
    y.sum().backward()
    assert x.grad is not None


def test_leading_dims_bias_and_out() -> None:
    layer, _ = pair(None)
    x = torch.randn(5, 11, K)
    y = layer(x, SPLITS)
    assert y.shape == (5, 11, N)
    assert torch.equal(y.reshape(ROWS, N), layer(x.reshape(ROWS, K), SPLITS))
    out = torch.empty(ROWS, N)
    leaf, dgrad_out = x.reshape(ROWS, K).clone().requires_grad_(), torch.empty(ROWS, K)
    made = layer(leaf, SPLITS, out=out, dgrad_out=dgrad_out)
    assert made.data_ptr() == out.data_ptr() and not out.requires_grad
    made.sum().backward()
    assert leaf.grad is not None and torch.equal(leaf.grad, dgrad_out) and dgrad_out.any()
    assert torch.equal(out.reshape(5, 11, N), y)

    layer = mf.GroupedLinear(E, K, N, return_bias=True, device="cpu")
    _, held = layer(x.reshape(ROWS, K), SPLITS)
    assert len(held) == E and held[0].shape == (N,)
    layer = mf.GroupedLinear(E, K, N, return_bias=True, device="cpu", **SINGLE)
    _, held = layer(x.reshape(ROWS, K), SPLITS)
    assert held.shape == (E, N)


@pytest.mark.parametrize("kind", ["module", "operation"])
def test_gradients_add_up_beside_a_buffer_that_is_used_again(kind: str) -> None:
    """A leaf kept the buffer as its .grad, which the next backward wrote over and added again."""
    torch.manual_seed(1)
    made: Any = mf.GroupedLinear if kind == "module" else mf.ops.GroupedLinear
    layer = made(E, K, N, device="cpu")
    leaf, splits, buffer = torch.randn(ROWS, K).requires_grad_(), torch.tensor(SPLITS), None
    found = []
    for name in ("", "dgrad_out" if kind == "module" else "grad_input"):
        leaf.grad, buffer = None, torch.empty(ROWS, K)
        for factor in (1.0, 2.0):
            y = layer(leaf, splits, **({name: buffer} if name else {}))
            y.backward(torch.full_like(y, factor))
        found.append(leaf.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["current", "high_precision", "dequantized"])
@pytest.mark.parametrize("single", [False, True], ids=["discrete", "single"])
def test_torch_autocast(name: str, single: bool) -> None:
    """The gradient of the input reads the weights that a Linear reads: before their cast to bf16,
    where backward is in high precision."""
    recipe = MORE[name]()
    layer, alone = pair(recipe, **(SINGLE if single else {}))
    with torch.autocast("cpu", torch.bfloat16):
        x = torch.randn(ROWS, K).requires_grad_()
        parts = [p.detach().clone().requires_grad_() for p in torch.split(x, SPLITS)]
        with context(recipe):
            y = layer(x, SPLITS)
            ys = [one(p) for one, p in zip(alone, parts, strict=True)]
    grad = torch.randn(ROWS, N).bfloat16()
    y.backward(grad)
    torch.autograd.backward(ys, list(torch.split(grad, SPLITS)))
    assert y.dtype is torch.bfloat16 and torch.equal(y, torch.cat(ys))
    assert x.grad is not None and torch.equal(x.grad, torch.cat([p.grad for p in parts]))
    agree(layer, alone)


def test_calibration() -> None:
    recipe = recipes.DelayedScaling()
    layer, alone = pair(None)
    x = torch.randn(ROWS, K)
    with mf.autocast(enabled=False, calibrating=True, recipe=recipe):
        layer(x, SPLITS)
        for one, p in zip(alone, torch.split(x, SPLITS), strict=True):
            one(p)
    for slot in ("input", "weight"):
        expected = torch.cat([one.delayed.live(slot)[1] for one in alone])
        assert torch.equal(layer.delayed.live(slot)[1], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MORE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_a_device(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a rounding: one grouped product may round the bias apart."""
    recipe = MORE[name]()
    layer, alone = pair(recipe, params_dtype=dtype, **SINGLE)
    layer.cuda()
    for one in alone:
        one.cuda()
    seeds = torch.tensor([11, 22], device="cuda")

    def seed(self: Any, plan: Any, inp: Tensor, rounds: bool = False) -> Tensor | None:
        found = [i for i, one in enumerate(alone) if one is self]
        return torch.stack((seeds[0], seeds[1] + sum(found))) if plan.stochastic else None

    monkeypatch.setattr(mf.GroupedLinear, "_seed", seed)
    monkeypatch.setattr(Linear, "_seed", seed)

    def close(a: Any, b: Any, rtol: float = 2**-7) -> None:
        """By the size of the whole: of sums that cancel little is left to compare with."""
        assert (a - b).norm() <= rtol * b.norm()

    for splits in (SPLITS, [0, 20, 1, 7]):
        x = torch.randn(sum(splits), K, device="cuda", dtype=dtype).requires_grad_()
        grad = torch.randn(sum(splits), N, device="cuda", dtype=dtype)
        parts = [p.detach().clone().requires_grad_() for p in torch.split(x, splits)]
        with context(recipe):
            y = layer(x, torch.tensor(splits, device="cuda"))
        y.backward(grad)
        with context(recipe):
            ys = [one(p) for one, p in zip(alone, parts, strict=True)]
        for one, g in zip(ys, torch.split(grad, splits), strict=True):
            one.backward(g)
        close(y, torch.cat(ys))
        close(x.grad, torch.cat([p.grad for p in parts]))  # type: ignore[misc]
        for i, one in enumerate(alone):
            close(layer.weight.grad[i], one.weight.grad)
            close(layer.bias.grad[i], one.bias.grad)
