"""A norm and several linear layers that read it, as one: what an attention begins with."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import minifloat
from minifloat import recipe

from .test_fusion import MX, RECIPES, distance, grads

K, HEADS, GROUPS, DIM = 64, 4, 2, 16


class Attention(nn.Module):
    """Grouped-query attention that branches on a shape, so that symbols cannot follow it."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.q_proj = nn.Linear(K, HEADS * DIM, bias)
        self.k_proj = nn.Linear(K, GROUPS * DIM, bias)
        self.v_proj = nn.Linear(K, GROUPS * DIM, bias)
        self.o_proj = nn.Linear(HEADS * DIM, K, bias)

    def forward(self, states: Tensor, mask: Tensor | None = None) -> Any:
        shape = (*states.shape[:-1], -1, DIM)
        q = self.q_proj(states).view(shape).transpose(1, 2)
        k = self.k_proj(states).view(shape).transpose(1, 2)
        v = self.v_proj(states).view(shape).transpose(1, 2)
        causal = bool(q.shape[2] > 1 and mask is None)
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).reshape(*states.shape[:-1], -1))


class Block(nn.Module):
    def __init__(self, norm: nn.Module, attention: nn.Module) -> None:
        super().__init__()
        self.norm, self.attention = norm, attention

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        y = self.norm(x)
        return x + self.attention(states=y, mask=mask)


class Straight(nn.Module):
    """Projections that symbols can follow, in the block itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(K)
        self.a, self.b = nn.Linear(K, 96), nn.Linear(K, 32)
        self.out = nn.Linear(128, K)

    def forward(self, x: Tensor) -> Any:
        y = self.norm(x)
        return self.out(torch.cat((self.a(y), self.b(y).tanh()), -1)).view(y.shape)


def model() -> Any:
    torch.manual_seed(0)
    made = nn.Sequential(
        Block(nn.RMSNorm(K, eps=1e-5), Attention(True)),
        Straight(),
        Block(nn.LayerNorm(K), Attention()),
    )
    for p in made.parameters():
        if p.dim() == 1:
            nn.init.normal_(p, p.detach().mean().round().item(), 0.1)
    return made


def converted(used: recipe.Recipe = MX, fuse: Any = "norm_linear") -> Any:
    made = model()
    minifloat.convert(made, used, skip_ends=False, fuse=fuse)
    return made


def test_what_is_fused_keeps_its_names_and_parameters() -> None:
    made = model()
    keys, parameters = list(made.state_dict()), dict(made.named_parameters())
    report = minifloat.convert(made, MX, skip_ends=False, fuse=True)
    assert list(report.unfused) == ["1"]  # no MLP, though it has three layers
    assert {name: fusion.members for name, fusion in report.fused.items()} == {
        **{
            f"{i}.norm": {
                "norm": f"{i}.norm",
                "reader": f"{i}.attention.q_proj",
                "reader2": f"{i}.attention.k_proj",
                "reader3": f"{i}.attention.v_proj",
            }
            for i in (0, 2)
        },
        "1.norm": {"norm": "1.norm", "reader": "1.a", "reader2": "1.b"},
    }
    assert list(made.state_dict()) == keys
    assert all(p is parameters[name] for name, p in made.named_parameters())
    again = minifloat.convert(made, MX, skip_ends=False, fuse=True)
    assert {n: f.members for n, f in again.fused.items()} == {
        n: f.members for n, f in report.fused.items()
    }


@pytest.mark.parametrize("used", RECIPES.values(), ids=RECIPES)
def test_gradients_are_those_of_the_layers(used: recipe.Recipe) -> None:
    high, layers = grads(model()), grads(converted(used, False))
    fused = grads(converted(used))
    blockwise = used in (RECIPES["block"], MX)
    for name, exact in high.items():
        if name.endswith("k_proj.bias"):  # zero but for rounding: softmax does not see it
            continue
        error = distance(layers[name], exact)
        # One scale for the gradients of all three, where a recipe has one for a tensor.
        assert distance(fused[name], exact) < (1.2 if blockwise else 1.5) * error + 1e-6, name
        assert distance(fused[name], layers[name]) < (0.2 if blockwise else 1.5) * error, name


@pytest.mark.parametrize("device", ("cpu", pytest.param("cuda", marks=pytest.mark.gpu)))
@pytest.mark.parametrize("used", ("delayed", "current", "block", "mxfp8", "nvfp4"))
def test_bf16_is_as_near_as_the_layers(used: str, device: str) -> None:
    """Kernels, where there are some: the norm is made while it is cast, once for all three."""
    high = grads(model())
    apart, fused = (
        grads(converted(RECIPES[used], fuse).to(device, torch.bfloat16), torch.bfloat16, device)
        for fuse in (False, "norm_linear")
    )
    for name, exact in high.items():
        if not name.endswith("k_proj.bias"):
            error = distance(apart[name].float().cpu(), exact)
            assert distance(fused[name].float().cpu(), exact) < 1.5 * error, name


def test_high_precision_is_the_plain_model() -> None:
    with minifloat.autocast(enabled=False):
        found = grads(converted())
    for name, value in grads(model()).items():
        if not name.endswith("k_proj.bias"):
            assert distance(found[name], value) < 1e-5, name


@pytest.mark.parametrize(
    ("used", "blocks"),
    (("current", slice(1)), *(pytest.param(r, slice(3), marks=pytest.mark.deep) for r in RECIPES)),
)
def test_compiled_is_eager_bit_for_bit(used: str, blocks: slice) -> None:
    made = converted(RECIPES[used])[blocks]
    other = copy.deepcopy(made)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(other, fullgraph=True, backend=counter)
    for _ in range(2):
        a, b = grads(made), grads(compiled)
        for name, value in a.items():
            assert torch.equal(value, b[name]), name
    assert counter.frame_count == 1


def test_copies_pickles_and_checkpointing() -> None:
    made = converted()
    expected = grads(made)
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert other[0].norm._handover.owner is other[0]
        assert other[0].norm._handover.active()
        for name, value in grads(other).items():
            assert torch.equal(value, expected[name]), name

    class Checkpointed(nn.Module):
        named_parameters = made.named_parameters

        def forward(self, x: Tensor) -> Any:
            return minifloat.checkpoint(made, x)

    for name, value in grads(Checkpointed()).items():
        assert torch.equal(value, expected[name]), name


def test_every_layer_is_counted_inspected_and_bisected() -> None:
    made, apart = converted(), converted(fuse=False)
    proof = minifloat.assert_quantized(made, lambda: grads(made))
    assert {layer.quantized for layer in proof.layers.values()} == {(1, 1, 1)}
    with minifloat.inspect(made) as report:
        grads(made)
    with minifloat.inspect(apart) as expected:
        grads(apart)
    for name, layer in report.layers.items():
        for operand, told in expected.layers[name].operands.items():
            of = layer.operands[operand]
            assert of.elements == told.elements, (name, operand)
            assert of.sqnr == pytest.approx(told.sqnr, rel=2e-2), (name, operand)
    found = minifloat.bisect(made, lambda: grads(made)["y"].square().mean())
    assert {e.layer for e in found.effects} == set(report.layers)


def test_frozen_and_in_place() -> None:
    made = converted()
    made[0].attention.k_proj.requires_grad_(False)
    made(torch.randn(2, 5, K)).sum().backward()
    assert made[0].attention.k_proj.weight.grad is None
    assert made[0].attention.v_proj.weight.grad is not None
    block = made[1]
    parts = block.norm(torch.randn(3, K)).made
    parts[0].mul_(2).view(-1)  # as the output of a layer by itself
    with torch.no_grad():
        assert not made(torch.randn(2, 5, K)).requires_grad


def changed(made: Any, how: str) -> None:
    block = made[0]
    if how == "hook":
        block.attention.k_proj.register_forward_hook(lambda m, args, y: None)
    elif how == "outer_hook":
        block.attention.register_forward_pre_hook(lambda m, args: None)
    elif how == "wrapped":
        block.attention.v_proj = nn.Sequential(block.attention.v_proj)
    elif how == "recipe":
        block.attention.q_proj.recipe = RECIPES["block"]
    elif how == "norm":
        block.norm = copy.deepcopy(block.norm)


@pytest.mark.parametrize("how", ("hook", "outer_hook", "wrapped", "recipe", "norm"))
def test_a_change_undoes_the_fusion(how: str) -> None:
    made = converted()
    layers = converted(fuse=False)
    for m in (made, layers):
        changed(m, how)
    assert not made[0].norm._handover.active()
    expected = grads(layers)
    for name, value in grads(made).items():
        if not name.endswith("k_proj.bias"):
            assert distance(value, expected[name]) < 1e-4, name


# --------------------------------------------------------------------------------------- refusals
class Returning(Attention):
    def forward(self, states: Tensor, mask: Tensor | None = None) -> Any:
        q, k = self.q_proj(states), self.k_proj(states)
        if q.shape[0] > 1:
            return q
        return self.v_proj(states) + k.sum()


class Reusing(Attention):
    def forward(self, states: Tensor, mask: Tensor | None = None) -> Any:
        y = self.q_proj(states) if states.shape[0] > 1 else self.o_proj(states)
        return y + states


class Rebinding(Attention):
    def forward(self, states: Tensor, mask: Tensor | None = None) -> Any:
        states = states * bool(states.shape[0] > 1)
        return self.q_proj(states)


class Odd(Attention):
    """Two layers alike but for a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.k_proj = nn.Linear(K, GROUPS * DIM, True)


def wrapped(function: Any) -> Any:
    import functools

    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inner


class Wrapped(Attention):
    forward = wrapped(Attention.forward)


@pytest.mark.parametrize(
    ("attention", "why"),
    (
        (Returning, "something else with states: return self.v_proj(states)"),
        (Reusing, "something else with states: return y + states"),
        (Rebinding, "something else with states: states = states *"),
        (Odd, "do not all have a bias"),
        (Wrapped, "wrapped in another function"),
    ),
)
def test_what_is_not_fused_says_why_and_runs(attention: Any, why: str) -> None:
    torch.manual_seed(0)
    made: Any = Block(nn.RMSNorm(K), attention())
    other: Any = copy.deepcopy(made)
    report = minifloat.convert(made, MX, skip_ends=False, fuse=True)
    minifloat.convert(other, MX, skip_ends=False)
    assert why in report.unfused["norm"], report.unfused
    x = torch.randn(2, 5, K)
    assert torch.equal(made(x), other(x))


def test_recipes_that_tell_layers_apart() -> None:
    def factory(role: Any) -> Any:
        if role is not None and role.name.endswith("v_proj"):
            return minifloat.IdentityQuantizer()
        return minifloat.MXFP8Quantizer(minifloat.DType.kFloat8E4M3)

    custom = recipe.CustomRecipe(qfactory=factory)
    report = minifloat.convert(model(), custom, skip_ends=False, fuse=True)
    assert report.unfused["0.norm"].endswith("are cast differently by their recipe")
    assert "1.norm" in report.fused
    made = converted()
    with (
        minifloat.autocast(recipe=custom),
        pytest.raises(ValueError, match=r"v_proj\): it runs as one with .*q_proj"),
    ):
        made(torch.randn(1, 4, K))


def test_fusing_more_later_keeps_what_is_fused() -> None:
    """Layers that run with their norm are not taken into an MLP as well."""

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(K, 96), nn.Linear(96, K)

        def forward(self, x: Tensor) -> Any:
            return self.down(F.relu(self.up(x)))

    torch.manual_seed(0)
    made = nn.Sequential(nn.LayerNorm(K), Mlp())
    minifloat.convert(made, MX, skip_ends=False, fuse="norm_linear")
    expected = grads(made)
    report = minifloat.convert(made, MX, skip_ends=False, fuse=True)
    assert report.unfused == {"1": "1.up is fused with a norm already"}
    for name, value in grads(made).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.deep  # compiles twice
def test_inspected_in_a_graph() -> None:
    """The operator that measures tells the parts of a product to their layers as eager does."""
    made = converted()
    torch._dynamo.reset()
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    with minifloat.inspect(made) as eager:
        grads(made)
    grads(compiled)
    with minifloat.inspect(made) as report:
        grads(compiled)
    assert report.as_dict() == eager.as_dict()
