"""The reference transformer: its parts against plain PyTorch, compiled in one graph."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from minifloat import recipe
from minifloat.models import PRESETS, Transformer, TransformerConfig, gemm_flops
from minifloat.models.transformer import rotary_table, rotate

SMALL = PRESETS["smoke"]


def tokens(config: TransformerConfig, batch: int = 2) -> torch.Tensor:
    return torch.randint(config.vocab_size, (batch, config.context + 1))


def plain(model: Transformer, ids: torch.Tensor) -> torch.Tensor:
    """The same network in plain PyTorch, written out."""
    c = model.config
    x = model.embedding.weight[ids]
    complex_table = torch.complex(*rotary_table(c, None))

    def turned(t: torch.Tensor) -> torch.Tensor:
        half = c.head_size // 2
        z = torch.complex(t[..., :half], t[..., half:]) * complex_table
        return torch.cat((z.real, z.imag), -1)

    for block in model.blocks:
        layer = block.attention
        h = F.rms_norm(x, (c.hidden_size,), layer.qkv.layer_norm_weight, c.eps)
        h = (h @ layer.qkv.weight.T).unflatten(-1, (-1, c.head_size)).transpose(1, 2)
        q, k, v = h.split((c.heads, c.kv_heads, c.kv_heads), 1)
        k, v = (t.repeat_interleave(c.heads // c.kv_heads, 1) for t in (k, v))
        scores = turned(q) @ turned(k).mT / c.head_size**0.5
        future = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        y = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
        x = x + y.transpose(1, 2).flatten(2) @ layer.out.weight.T
        mlp = block.mlp
        h = F.rms_norm(x, (c.hidden_size,), mlp.layer_norm_weight, c.eps) @ mlp.fc1_weight.T
        gate, linear = h.chunk(2, -1)
        x = x + (F.silu(gate) * linear) @ mlp.fc2_weight.T
    return F.rms_norm(x, (c.hidden_size,), model.norm.weight, c.eps) @ model.head.weight.T


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
def test_it_is_the_network_written_out(tied: bool, kv_heads: int) -> None:
    config = dataclasses.replace(SMALL, layers=2, tied=tied, kv_heads=kv_heads)
    model = Transformer(config, device="cpu")
    ids = tokens(config)[:, :-1]
    torch.testing.assert_close(model(ids), plain(model, ids), rtol=1e-4, atol=1e-5)


def test_rotation_depends_on_the_distance_alone() -> None:
    table = rotary_table(SMALL, None)
    q, k = torch.randn(2, 1, 1, 1, SMALL.head_size).expand(2, 1, 1, SMALL.context, -1)
    scores = (rotate(q, table) @ rotate(k, table).mT)[0, 0]
    torch.testing.assert_close(scores[5, 2], scores[20, 17])


@pytest.mark.parametrize("name", ["DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling"])
def test_it_compiles_in_one_graph_with_the_bits_of_eager(name: str) -> None:
    torch._dynamo.reset()
    model = Transformer(SMALL, getattr(recipe, name)(), device="cpu")
    twin = Transformer(SMALL, getattr(recipe, name)(), device="cpu")
    twin.load_state_dict(model.state_dict())
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    ids = tokens(SMALL)
    for _ in range(2):
        for call in (model, compiled):
            with torch.autocast("cpu", torch.bfloat16):  # backward too, which it must not touch
                call(ids[:, :-1], ids[:, 1:]).backward()
    for (key, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), key


def test_a_recipe_reaches_the_layers_it_is_given_for() -> None:
    ids = tokens(SMALL)[:, :-1]
    model = Transformer(SMALL, device="cpu")
    high = model(ids)
    model.set_recipes({"blocks.0.mlp": recipe.Float8CurrentScaling()})
    low = model(ids)
    assert not torch.equal(low, high)
    torch.testing.assert_close(low, high, rtol=0.1, atol=0.1)
    with pytest.raises(ValueError, match=r"blocks\.7\.mlp"):
        model.set_recipes({"blocks.7.mlp": None})


def test_flops_are_those_that_pytorch_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    config = dataclasses.replace(SMALL, layers=2, kv_heads=2)
    model = Transformer(config, device="cpu")
    ids = tokens(config)
    with FlopCounterMode(display=False) as counter:
        model(ids[:, :-1], ids[:, 1:]).backward()
    flops = gemm_flops(config)
    counted = counter.get_flop_counts()["Global"]
    products = sum(n for op, n in counted.items() if "mm" in str(op))
    assert products == (flops.total - flops.attention) * 2 * config.context


def test_presets() -> None:
    sizes = {}
    for name, config in PRESETS.items():
        model = Transformer(config, device="meta")
        sizes[name] = sum(p.numel() for p in model.parameters())
        assert list(gemm_flops(config).layer) == model.recipe_names()
    assert 80e6 < sizes["gpt2"] < 130e6
    assert 0.9e9 < sizes["1b"] < 1.3e9


@pytest.mark.parametrize(
    "wrong", [{"heads": 3}, {"kv_heads": 3}, {"layers": 0}, {"hidden_size": 2}]
)
def test_impossible_sizes_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        dataclasses.replace(SMALL, **wrong)


def test_too_many_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="context"):
        Transformer(SMALL, device="cpu")(torch.zeros(1, SMALL.context + 1, dtype=torch.int64))
