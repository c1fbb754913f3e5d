"""A block of experts: against the sum written out, compiled in one graph, balanced."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from minifloat import recipe
from minifloat.models import PRESETS, Experts, Transformer, gemm_flops

CONFIG = dataclasses.replace(PRESETS["smoke"], experts=4, top_k=2)


def init(tensor: torch.Tensor) -> None:
    torch.nn.init.normal_(tensor, 0.0, 0.2)


def ids(batch: int = 2) -> torch.Tensor:
    return torch.randint(CONFIG.vocab_size, (batch, CONFIG.context + 1))


def written_out(layer: Experts, x: torch.Tensor) -> torch.Tensor:
    """Token by token: its best experts, weighted by their scores."""
    h = F.rms_norm(x, x.shape[-1:], layer.norm.weight, CONFIG.eps).flatten(0, 1)
    scores = (h @ layer.router.weight.T).softmax(-1)
    out = []
    for token, of in zip(h, scores, strict=True):
        best = of.topk(layer.top_k).indices.tolist()
        total = torch.stack([of[e] for e in best]).sum()
        y = torch.zeros_like(token)
        for e in best:
            gate, linear = (layer.fc1.weight[e] @ token).chunk(2)
            y = y + of[e] / total * (layer.fc2.weight[e] @ (F.silu(gate) * linear))
        out.append(y)
    return torch.stack(out).view(x.shape)


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_it_is_the_weighted_sum_of_the_best_experts(top_k: int) -> None:
    config = dataclasses.replace(CONFIG, top_k=top_k)
    layer = Experts(config, torch.device("cpu"), init, init)
    x = torch.randn(2, 8, config.hidden_size, requires_grad=True)
    y, imbalance = layer(x, None)
    expected = written_out(layer, x)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    grad = torch.randn_like(y)
    wanted = torch.autograd.grad(expected, [x, *layer.parameters()], grad)
    found = torch.autograd.grad(y, [x, *layer.parameters()], grad)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert imbalance > 0.9


def test_imbalance_is_one_where_all_are_used_alike_and_all_where_one_is() -> None:
    layer = Experts(dataclasses.replace(CONFIG, top_k=1), torch.device("cpu"), init, init)
    x = torch.eye(CONFIG.hidden_size)[: CONFIG.experts].repeat(4, 1)[None]
    with torch.no_grad():
        layer.router.weight.zero_()[:, : CONFIG.experts] = 99 * torch.eye(CONFIG.experts)
    assert layer(x, None)[1].item() == pytest.approx(1.0)
    assert layer(x[:, ::4], None)[1].item() == pytest.approx(CONFIG.experts)


@pytest.mark.parametrize(
    "name", [pytest.param("DelayedScaling", marks=pytest.mark.deep), "MXFP8BlockScaling"]
)
def test_it_compiles_in_one_graph_with_the_bits_of_eager(name: str) -> None:
    torch._dynamo.reset()
    model = Transformer(CONFIG, getattr(recipe, name)(), device="cpu")
    twin = Transformer(CONFIG, getattr(recipe, name)(), device="cpu")
    twin.load_state_dict(model.state_dict())
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    tokens = ids()
    # A graph's backward is traced inside forward's autocast, unless told that it runs outside.
    with torch._functorch.config.patch(backward_pass_autocast="off"):
        for _ in range(2):
            for call in (model, compiled):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = call(tokens[:, :-1], tokens[:, 1:])
                loss.backward()
    for (key, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), key


def test_the_imbalance_is_in_the_gradient_and_not_in_the_loss() -> None:
    model = Transformer(CONFIG, device="cpu")
    tokens = ids()
    loss = model(tokens[:, :-1], tokens[:, 1:])
    logits = model(tokens[:, :-1])
    expected = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    router = model.blocks[0].mlp.router.weight
    with_balance, without = (torch.autograd.grad(of, router)[0] for of in (loss, expected))
    assert not torch.allclose(with_balance, without, rtol=1e-2)


def test_a_recipe_reaches_the_experts() -> None:
    model = Transformer(CONFIG, device="cpu")
    tokens = ids()[:, :-1]
    high = model(tokens)
    model.set_recipes({"blocks.0.mlp": recipe.Float8CurrentScaling()})
    assert not torch.equal(model(tokens), high)
    torch.testing.assert_close(model(tokens), high, rtol=0.1, atol=0.1)


def test_flops_count_the_experts_a_token_goes_through() -> None:
    plain, mixed = gemm_flops(PRESETS["smoke"]), gemm_flops(CONFIG)
    assert mixed.layer["blocks.0.mlp"] == 2 * plain.layer["blocks.0.mlp"]
    assert mixed.router == 6 * CONFIG.hidden_size * CONFIG.experts and plain.router == 0
    assert list(mixed.layer) == Transformer(CONFIG, device="meta").recipe_names()
    assert mixed.total - plain.total == plain.layer["blocks.0.mlp"] + mixed.router


@pytest.mark.parametrize("wrong", [{"top_k": 0}, {"top_k": 5}, {"experts": -1}])
def test_impossible_numbers_of_experts_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        dataclasses.replace(CONFIG, **wrong)
