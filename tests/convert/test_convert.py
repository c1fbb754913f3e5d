"""`convert`: the same model, object by object, that runs quantized."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import minifloat
from minifloat import recipe

from .models import INNER, Model, tokens, train

CURRENT, BLOCK = recipe.Float8CurrentScaling(), recipe.Float8BlockScaling()
RECIPES = {
    "delayed": recipe.DelayedScaling(amax_history_len=4),
    "current": CURRENT,
    "block": BLOCK,
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
}


def by_autocast(model: Any, used: recipe.Recipe) -> Any:
    """The model as people write it by hand: ours inside, an autocast around."""
    made = copy.deepcopy(model)
    for block in made.blocks:
        for name in ("up", "down"):
            old = getattr(block, name)
            new = minifloat.Linear(
                old.in_features, old.out_features, bias=old.bias is not None, device="cpu"
            )
            new.load_state_dict(old.state_dict())
            setattr(block, name, new)
    forward = made.forward

    def run(ids: torch.Tensor) -> Any:
        with minifloat.autocast(recipe=used):
            return forward(ids)

    made.forward = run
    return made


class Conv1D(nn.Module):
    """As GPT-2's of transformers: no nn.Linear."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))
        self.bias = nn.Parameter(torch.zeros(width))


def test_matrices_of_others_are_named() -> None:
    """Nothing said that a model's experts, or all of GPT-2, trains in high precision."""
    model = nn.Module()
    model.stem = Conv1D(8)  # not in a block: an embedding, say
    block = nn.ModuleDict({"c_attn": Conv1D(8), "norm": nn.LayerNorm((4, 4)), "up": Model()})
    block["drawn"] = parametrizations.weight_norm(nn.Linear(8, 8))
    block["mha"] = nn.MultiheadAttention(8, 2)
    block["ops"] = minifloat.ops.Sequential(minifloat.ops.Linear(8, 8))
    model.blocks = nn.ModuleList([block, nn.Conv2d(3, 3, 3)])
    report = minifloat.convert(model, CURRENT)
    assert report.left == {
        "blocks.0.c_attn": "Conv1D",
        "blocks.0.mha": "MultiheadAttention",
        "blocks.0.ops.0.basic_ops.0": "BasicLinear",
    }
    assert "warning: no linear layers, left as they are: blocks.0.c_attn: Conv1D" in str(report)
    assert minifloat.convert(Model(), CURRENT).left == {}


@pytest.mark.parametrize("used", RECIPES.values(), ids=RECIPES)
def test_experts_of_ours_get_their_recipe(used: recipe.Recipe) -> None:
    """They were left without one, and the proof that says so said to convert."""
    model = nn.ModuleList(
        [minifloat.GroupedLinear(2, 32, 32, device="cpu"), nn.Linear(32, 32), nn.Linear(32, 32)]
    )
    report = minifloat.convert(model, used)
    assert list(report.converted) == ["0"] and report.converted["0"].speed is None
    assert list(report.skipped) == ["1", "2"]  # the first and the last

    def step() -> None:
        model[0](torch.randn(8, 32, requires_grad=True), [3, 5]).sum().backward()

    assert minifloat.assert_quantized(model[0], step).total == 3
    assert minifloat.convert(model, recipes={"0": None}, skip_ends=False).skipped.keys() == {"0"}


# ------------------------------------------------------------------------------------- numerics
@pytest.mark.parametrize("used", RECIPES.values(), ids=RECIPES)
def test_it_trains_as_a_model_that_is_written_with_autocast(used: recipe.Recipe) -> None:
    model = Model()
    expected = train(by_autocast(model, used), steps=3)
    plain = train(copy.deepcopy(model), steps=3)
    minifloat.convert(model, used)
    losses = train(model, steps=3)
    assert losses == expected
    assert losses != plain


@pytest.mark.parametrize("used", ("delayed", "current"))
def test_compiled_is_eager_bit_for_bit(used: str) -> None:
    model = Model(blocks=1)
    assert minifloat.convert(model, RECIPES[used], recipes={"*.down": BLOCK}).recipes == {
        "blocks.0.up": RECIPES[used],
        "blocks.0.down": BLOCK,
    }
    other = copy.deepcopy(model)
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    assert train(compiled) == train(model)
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_one_graph_for_all_steps() -> None:
    model = Model()
    minifloat.convert(model, CURRENT)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    train(torch.compile(model, fullgraph=True, backend=counter), steps=3)
    assert counter.frame_count == 1


def test_an_autocast_comes_first() -> None:
    model, ids = Model(), tokens()
    plain = model(ids)
    minifloat.convert(model, CURRENT)
    own = model(ids)
    with minifloat.autocast(enabled=False):
        assert torch.equal(model(ids), plain)
    with minifloat.autocast(recipe=BLOCK):
        other = model(ids)
    minifloat.convert(model, BLOCK)
    assert torch.equal(model(ids), other)
    assert not torch.equal(own, other)
    assert not torch.equal(own, plain)


def test_checkpointing_repeats_the_recipe() -> None:
    grads = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = Model()
        minifloat.convert(model, recipe.DelayedScaling())
        x = torch.randn(5, 48, requires_grad=True)
        for _ in range(2):
            y = minifloat.checkpoint(model.blocks[0], x) if checkpointed else model.blocks[0](x)
            y.square().mean().backward()
        grads.append([x.grad, *(p.grad for p in model.blocks[0].parameters())])
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


# ------------------------------------------------------------------------------------- identity
def test_modules_and_parameters_are_the_same_objects() -> None:
    model = Model().to(torch.bfloat16)
    model.blocks[1].eval()
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters())
    keys = list(model.state_dict())
    report = minifloat.convert(model, CURRENT)
    assert list(report.converted) == INNER
    for name, module in modules.items():
        assert model.get_submodule(name) is module
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name]
    assert list(model.state_dict()) == keys
    layer = model.blocks[1].down
    assert type(layer) is minifloat.Linear
    assert not layer.training
    assert layer.weight.dtype is torch.bfloat16
    assert layer.bias is None
    assert vars(layer.weight) == {}  # no marks on parameters of others


def test_ties_survive() -> None:
    model = Model(tied=True)
    model.blocks[0].up.weight = model.blocks[1].up.weight
    model.blocks.append(model.blocks[0])  # a block that runs twice
    report = minifloat.convert(model, CURRENT)
    assert list(report.converted) == INNER
    assert model.blocks[0].up.weight is model.blocks[1].up.weight
    assert model.blocks[2].up is model.blocks[0].up
    assert "embedding" in report.skipped["head"]
    before = model.blocks[0].up.weight.clone()
    train(model, steps=1)
    assert not torch.equal(model.blocks[1].up.weight, before)


def test_a_tied_head_can_be_converted() -> None:
    model = Model(tied=True)
    minifloat.convert(model, CURRENT, skip_ends=False)
    assert type(model.head) is minifloat.Linear
    assert model.head.weight is model.embedding.weight
    train(model, steps=1)
    assert model.head.weight is model.embedding.weight


def test_an_optimizer_from_before_steps_the_same_parameters() -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    minifloat.convert(model, CURRENT)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(tokens()).square().mean().backward()
    optimizer.step()
    for name, p in model.named_parameters():
        assert not torch.equal(p, before[name]), name


def test_hooks_are_kept() -> None:
    model = Model()
    layer, seen = model.blocks[0].up, []
    layer.register_forward_pre_hook(lambda m, args: seen.append("pre"))
    layer.register_forward_hook(lambda m, args, out: seen.append("forward"))
    layer.register_full_backward_hook(lambda m, gi, go: seen.append("backward"))
    layer.weight.register_hook(lambda g: seen.append("gradient"))
    layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    layer.register_state_dict_pre_hook(lambda *args: seen.append("state"))
    layer.mine = "kept"
    minifloat.convert(model, CURRENT)
    train(model, steps=1)
    model.state_dict()
    assert sorted(seen) == sorted(
        ["pre", "forward", "backward", "gradient", "accumulated", "state"]
    )
    assert layer.mine == "kept"


def test_frozen_layers_stay_frozen() -> None:
    model = Model()
    model.blocks[0].requires_grad_(False)
    report = minifloat.convert(model, CURRENT)
    model(tokens()).square().mean().backward()
    for p in model.blocks[0].parameters():
        assert not p.requires_grad
        assert p.grad is None
    assert model.blocks[1].up.weight.grad is not None
    assert model.embedding.weight.grad is not None
    assert report.converted["blocks.0.up"].kept == (0, pytest.approx(0, abs=0.01))  # no wgrad


def test_state_dicts_go_both_ways() -> None:
    plain, model = Model(), Model()
    minifloat.convert(model, CURRENT)
    model.load_state_dict(plain.state_dict())
    for (a, x), (b, y) in zip(plain.state_dict().items(), model.state_dict().items(), strict=True):
        assert a == b
        assert torch.equal(x, y)
    train(model, steps=1)
    plain.load_state_dict(model.state_dict())
    minifloat.convert(plain, CURRENT)
    assert torch.equal(plain(tokens()), model(tokens()))


def test_delayed_state_is_saved_once_it_is_used() -> None:
    model = Model()
    minifloat.convert(model, recipe.DelayedScaling())
    assert not [key for key in model.state_dict() if "delayed" in key]
    train(model, steps=2)
    other = Model()
    minifloat.convert(other, recipe.DelayedScaling())
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(tokens()), model(tokens()))


def test_copies_and_pickles(tmp_path: Path) -> None:
    model = Model()
    minifloat.convert(model, CURRENT)
    y = model(tokens())
    assert torch.equal(copy.deepcopy(model)(tokens()), y)
    assert torch.equal(pickle.loads(pickle.dumps(model))(tokens()), y)
    torch.save(model, tmp_path / "model.pt")
    assert torch.equal(torch.load(tmp_path / "model.pt", weights_only=False)(tokens()), y)


def test_torch_autocast() -> None:
    model = Model()
    minifloat.convert(model, CURRENT)
    with torch.autocast("cpu", torch.bfloat16):
        proof = minifloat.assert_quantized(model, lambda: model(tokens()).float().sum().backward())
    assert proof.total == 12
    assert model.blocks[0].up.weight.grad.dtype is torch.float32


def test_converting_again_changes_recipes() -> None:
    model = Model()
    minifloat.convert(model, CURRENT)
    delayed = model.blocks[0].up.delayed
    report = minifloat.convert(model, recipes={"blocks.0.*": BLOCK})
    assert model.blocks[0].up.recipe == BLOCK
    assert model.blocks[1].up.recipe == minifloat.get_default_recipe()
    assert model.blocks[0].up.delayed is delayed
    assert len(report.converted) == 4


def test_modules_of_ours_get_a_recipe() -> None:
    model = nn.ModuleList(
        [
            minifloat.LayerNormLinear(32, 48, device="cpu"),
            minifloat.LayerNormMLP(48, 64, device="cpu"),
        ]
    )
    report = minifloat.convert(model, CURRENT, skip_ends=False)
    assert list(report.converted) == ["0", "1"]

    def step() -> None:
        model[1](model[0](torch.randn(6, 32))).sum().backward()

    assert list(minifloat.assert_quantized(model, step).layers) == ["0", "1.fc1", "1.fc2"]


# --------------------------------------------------------------------------------------- choice
def test_first_match_wins_and_unused_patterns_are_told() -> None:
    model = Model()
    report = minifloat.convert(
        model,
        CURRENT,
        recipes={"*.down": BLOCK, "blocks.0.*": None, "blocks.0.down": CURRENT, "layers.*": BLOCK},
    )
    assert report.recipes == {
        "blocks.0.down": BLOCK,
        "blocks.1.up": CURRENT,
        "blocks.1.down": BLOCK,
    }
    assert report.skipped["blocks.0.up"] == "recipes['blocks.0.*'] is None"
    assert type(model.blocks[0].up) is nn.Linear
    assert report.unused == {
        "blocks.0.down": "earlier patterns match all of its layers",
        "layers.*": "no linear layer has such a name",
    }
    assert "recipes['layers.*'] is not used: no linear layer has such a name" in str(report)


def test_a_filter_decides() -> None:
    model = Model()
    report = minifloat.convert(model, CURRENT, lambda name, module: not name.endswith("up"))
    assert list(report.converted) == ["blocks.0.down", "blocks.1.down", "head"]
    assert report.skipped == dict.fromkeys(("blocks.0.up", "blocks.1.up"), "filter returned False")
    model = Model()
    report = minifloat.convert(model, CURRENT, lambda name, module: True, skip_ends=True)
    assert list(report.converted) == INNER


def test_ends_of_a_model_without_blocks() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 8))
    report = minifloat.convert(model, CURRENT)
    assert list(report.converted) == ["2"]
    assert [reason.split(";")[0] for reason in report.skipped.values()] == [
        "the first linear layer",
        "the last linear layer",
    ]


def test_ends_next_to_a_sequence_of_blocks() -> None:
    blocks = Model(blocks=3).blocks
    model = nn.Sequential(nn.Linear(8, 48), nn.Sequential(*blocks), nn.Linear(48, 8))
    assert list(minifloat.convert(model, CURRENT).skipped) == ["0", "2"]


def test_the_model_itself_may_be_the_layer() -> None:
    layer = nn.Linear(16, 32)
    assert "nothing was converted" in str(minifloat.convert(layer, CURRENT))
    report = minifloat.convert(layer, CURRENT, skip_ends=False)
    assert list(report.converted) == [""]
    assert type(layer) is minifloat.Linear


class Scaled(nn.Linear):
    pass


def test_what_is_not_exactly_a_linear_layer_is_left_alone() -> None:
    replaced, empty = nn.Linear(16, 16), nn.Linear(16, 16)
    empty.weight = nn.Parameter(torch.empty(0, 16))
    replaced.forward = lambda x: x  # type: ignore[method-assign]
    model = nn.ModuleDict(
        {
            "subclass": Scaled(16, 16),
            "weight_norm": parametrizations.weight_norm(nn.Linear(16, 16)),
            "lazy": nn.LazyLinear(16),
            "float64": nn.Linear(16, 16).double(),
            "empty": empty,
            "replaced": replaced,
            "attention": nn.MultiheadAttention(16, 2),
            "good": nn.Linear(16, 16),
        }
    )
    report = minifloat.convert(model, CURRENT, lambda name, module: True)
    assert list(report.converted) == ["good"]
    told = {
        "subclass": "Scaled is a subclass of nn.Linear",
        "weight_norm": "ParametrizedLinear is a subclass",
        "lazy": "LazyLinear is a subclass",
        "float64": "torch.float64",
        "empty": "empty, (0, 16)",
        "replaced": "its forward was replaced",
        "attention.out_proj": "is a subclass",
    }
    assert set(report.skipped) == set(told)
    for name, text in told.items():
        assert text in report.skipped[name]


# --------------------------------------------------------------------------------------- report
def test_the_report() -> None:
    report = minifloat.convert(Model(), CURRENT)
    assert report.converted["blocks.0.up"].recipe == CURRENT
    assert report.converted["blocks.0.up"].kept == (48 * 4, pytest.approx(48, abs=0.1))
    assert report.converted["blocks.0.up"].backend == "cpu"
    assert report.speed is None  # the CPU computes what a recipe does, not how fast
    assert report.slow == {}
    text = str(report)
    assert text.startswith("converted 4 of 5 linear layers, on cpu\n")
    assert "4 by Float8CurrentScaling(): cpu" in text
    assert "skipped head: the last linear layer; skip_ends=False converts it" in text
    assert "kept for backward: 1,152 -> 288 bytes per token" in text
    assert "no roofline of cpu is known, so nothing is promised" in text
    assert "times bf16's" not in text


def test_small_layers_are_reported() -> None:
    model = Model().to("meta")
    report = minifloat.convert(model, CURRENT)
    assert set(report.slow) == set(INNER)  # nothing so small is worth it
    assert report.speed is not None
    assert report.speed < 1
    assert "warning: slower than bf16 at 8192 tokens" in str(report)


@pytest.mark.parametrize(("capability", "known"), ((90, True), (89, False), (100, False)))
def test_only_the_gpu_of_the_roofline_gets_a_promise(
    capability: int, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minifloat.env.capability", lambda device: capability)
    report = minifloat.convert(Model(width=256), CURRENT)
    assert (report.speed is not None) == known
    assert ("an H200's roofline" in str(report)) == known


def test_the_roofline_by_hand() -> None:
    """r + 30.6 (c_input / N + c_weight / T + c_gradient / K), of one layer of 4096 to 8192."""
    layer = nn.Linear(4096, 8192, device="meta")
    (found,) = minifloat.convert(layer, CURRENT, skip_ends=False, tokens=2048).converted.values()
    # Two reads of 2 bytes, one for the amax, and two copies of 1 byte.
    time = 0.545 + 30.6 * (6 / 8192 + 6 / 2048 + 6 / 4096)
    assert found.speed == pytest.approx(1 / time)


def test_layers_of_a_good_size_are_faster() -> None:
    model = Model(width=4096).to("meta")
    report = minifloat.convert(model, CURRENT)
    assert report.device == "meta"
    assert report.slow == {}
    assert report.speed is not None
    assert 1.2 < report.speed < 2
    assert minifloat.convert(model, CURRENT, tokens=16).slow


# --------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        ({"recipe": "fp8"}, r"recipe: got 'fp8'; a recipe of minifloat\.recipe is needed, such as"),
        ({"recipe": "mxfp8"}, r"Float8BlockScaling\(\), .*did you mean MXFP8BlockScaling\(\)\?"),
        ({"recipe": recipe.MXFP8BlockScaling}, r"make one: MXFP8BlockScaling\(\)"),
        ({"recipes": {"a.*": 8}}, r"recipes\['a\.\*'\]: got 8"),
        ({"filter": "head"}, "filter: got str"),
        ({"recipes": ["a"]}, "recipes: got list; a dict of patterns and recipes is needed"),
    ),
)
def test_errors_change_nothing(arguments: dict[str, Any], message: str) -> None:
    model = Model()
    with pytest.raises(TypeError, match=message):
        minifloat.convert(model, **arguments)
    assert all(type(m) is not minifloat.Linear for m in model.modules())


def test_a_compiled_model_goes_by_its_own_names() -> None:
    model = Model()
    compiled = torch.compile(model, backend="aot_eager")
    report = minifloat.convert(compiled, CURRENT, recipes={"blocks.0.*": None})
    assert list(report.converted) == ["blocks.1.up", "blocks.1.down"]
    assert report.unused == {}
    assert isinstance(model.blocks[1].up, minifloat.Linear)


def test_other_errors() -> None:
    with pytest.raises(TypeError, match="model: got function"):
        minifloat.convert(lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tokens: got 0"):
        minifloat.convert(Model(), tokens=0)
    with pytest.raises(ValueError, match="tokens: got 'many'; a whole number"):
        minifloat.convert(Model(), tokens="many")  # type: ignore[arg-type]
    for fuse in (3, "norm_linea", ["norm_linear", "norm_linea"]):
        with pytest.raises(
            ValueError, match=r"fuse: got (3; allowed|'norm_linea'.*'norm_linear'\?)"
        ):
            minifloat.convert(Model(), fuse=fuse)  # type: ignore[arg-type]


def test_a_filter_that_raises_changes_nothing() -> None:
    def choose(name: str, module: nn.Module) -> bool:
        if name == "blocks.1.up":
            raise KeyError(name)
        return True

    model = Model()
    with pytest.raises(KeyError):
        minifloat.convert(model, CURRENT, choose)
    assert type(model.blocks[0].up) is nn.Linear
