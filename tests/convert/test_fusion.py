"""`convert(fuse=...)`: the same model, key by key, whose norms and MLPs run as one."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import minifloat
from minifloat import recipe
from minifloat.convert.fusion import PATTERNS
from minifloat.convert.fusion.norms import NormSpec, norm_spec

from ..tensors import world

MX = recipe.MXFP8BlockScaling()
RECIPES = {
    "delayed": recipe.DelayedScaling(amax_history_len=4),
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": MX,
    "nvfp4": recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
    "override": recipe.Float8CurrentScaling(backward_override="high_precision"),
}
K, FFN = 64, 96


class Gated(nn.Module):
    def __init__(self, act: nn.Module, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(K, FFN, bias)
        self.up_proj = nn.Linear(K, FFN, bias)
        self.down_proj = nn.Linear(FFN, K, bias)
        self.act_fn = act

    def forward(self, x: Tensor) -> Any:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(K, 2 * FFN)
        self.down = nn.Linear(FFN, K)

    def forward(self, x: Tensor) -> Any:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(up * F.gelu(gate, approximate="tanh"))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(K)
        self.fc1 = nn.Linear(K, FFN)
        self.fc2 = nn.Linear(FFN, K)

    def forward(self, x: Tensor) -> Any:
        return self.fc2(F.relu(self.fc1(self.norm(x))))


class RmsNorm(nn.Module):
    """As libraries write it: the norm rounded, then the weight."""

    def __init__(self, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(K) * 0.1 + 1 - offset)
        self.variance_epsilon = 1e-6
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
        return (self.offset + self.weight) * y.to(x.dtype)


class Block(nn.Module):
    def __init__(self, mlp: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.first_norm = nn.RMSNorm(K)
        self.mix = nn.Linear(K, K)
        self.norm = norm
        self.mlp = mlp

    def forward(self, x: Tensor, scale: Tensor | None = None, **kwargs: Any) -> Tensor:
        y = self.mix(self.first_norm(x))
        x = x + (y if scale is None else y * scale)
        residual = x
        return residual + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            [Block(Gated(nn.SiLU(), True), nn.LayerNorm(K)), Block(Packed(), RmsNorm(1.0)),
             Block(Plain(), nn.Identity()), Block(Gated(nn.Sigmoid()), RmsNorm())]
        )  # fmt: skip
        for p in self.parameters():
            if p.dim() == 1:  # biases of zeros and gammas of ones hide mistakes
                nn.init.normal_(p, p.detach().mean().round().item(), 0.1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


FUSED = {
    "blocks.0.mlp": "gated_mlp", "blocks.1.mlp": "gated_mlp", "blocks.2.mlp": "mlp",
    "blocks.3.mlp": "gated_mlp", "blocks.0.norm": "norm_mlp", "blocks.1.norm": "norm_mlp",
    "blocks.3.norm": "norm_mlp", **{f"blocks.{i}.first_norm": "norm_linear" for i in range(4)},
}  # fmt: skip


def grads(model: Any, dtype: torch.dtype = torch.float32, device: str = "cpu") -> dict[str, Tensor]:
    """The output, and the gradients of everything."""
    x = torch.randn(3, 21, K, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    x.requires_grad_()
    y = model(x)
    y.float().square().mean().backward()
    assert x.grad is not None
    found = {"y": y.detach(), "x": x.grad}
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        found[name.removeprefix("_orig_mod.")], p.grad = p.grad, None
    return found


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().norm() / b.detach().norm())


def converted(used: recipe.Recipe = MX, **options: Any) -> Any:
    model = Model()
    minifloat.convert(model, used, skip_ends=False, **options)
    return model


# -------------------------------------------------------------------------------------- identity
def test_keys_parameters_and_modules_are_the_same() -> None:
    model = Model()
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    keys = list(model.state_dict())
    report = minifloat.convert(model, MX, skip_ends=False, fuse=True)
    assert {name: fusion.pattern for name, fusion in report.fused.items()} == FUSED
    assert report.fused["blocks.0.mlp"].members == {
        role: f"blocks.0.mlp.{role}_proj" for role in ("gate", "up", "down")
    }
    assert list(model.state_dict()) == keys
    assert {name: model.get_submodule(name) for name in modules} == modules
    for name, p in model.named_parameters():
        assert p is parameters[name]
    assert isinstance(model.blocks[0].mlp, Gated)
    assert type(model.blocks[0].mlp).__name__ == "Gated"
    assert isinstance(model.blocks[3].norm, RmsNorm)
    grads(model)
    assert list(model.state_dict()) == keys


def test_checkpoints_load_either_way() -> None:
    plain, fused, layers = Model(), converted(fuse=True), converted()
    with torch.no_grad():
        for p in fused.parameters():
            p.mul_(1.25)
    plain.load_state_dict(fused.state_dict())
    layers.load_state_dict(plain.state_dict())
    y = grads(layers)["y"]
    other = converted(fuse=True)
    other.load_state_dict(layers.state_dict())
    assert distance(grads(other)["y"], y) < 1e-6


def test_copies_and_pickles() -> None:
    model = converted(fuse=True)
    expected = grads(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.blocks[0].norm._handover.owner is other.blocks[0]
        for name, value in grads(other).items():
            assert torch.equal(value, expected[name]), name


def test_a_part_that_is_copied_alone_is_a_part_by_itself() -> None:
    model, plain = converted(fuse=True), converted()
    x = torch.randn(3, K)
    for name in ("first_norm", "norm", "mix", "mlp"):
        alone = copy.deepcopy(model.blocks[0].get_submodule(name))
        assert distance(alone(x), plain.blocks[0].get_submodule(name)(x)) < 1e-5, name


def test_one_pattern_alone() -> None:
    for name in ("gated_mlp", "mlp", "norm_linear"):
        model = Model()
        report = minifloat.convert(model, MX, skip_ends=False, fuse=name)
        assert {fusion.pattern for fusion in report.fused.values()} <= {name}
        assert len(report.fused) == {"gated_mlp": 3, "mlp": 0, "norm_linear": 8}[name]
    assert minifloat.convert(Model(), MX).fused == {}


def test_converting_again_keeps_what_is_fused() -> None:
    model = converted(fuse=True)
    report = minifloat.convert(model, RECIPES["block"], skip_ends=False, fuse=True)
    assert {name: fusion.pattern for name, fusion in report.fused.items()} == FUSED
    minifloat.convert(model, MX, skip_ends=False)
    assert torch.equal(grads(model)["y"], grads(converted(fuse=True))["y"])


# -------------------------------------------------------------------------------------- numerics
@pytest.mark.parametrize("used", RECIPES.values(), ids=RECIPES)
def test_gradients_are_those_of_the_layers(used: recipe.Recipe) -> None:
    """As far from high precision as layer by layer, and near to those.

    gate and up share what a recipe has one of for a whole tensor, so that codes may differ.
    """
    high, layers, fused = grads(Model()), grads(converted(used)), grads(converted(used, fuse=True))
    blockwise = used in (RECIPES["block"], MX)
    for name, exact in high.items():
        error = distance(layers[name], exact)
        assert distance(fused[name], exact) < 1.2 * error + 1e-6, name
        # Blocks have their own scales: the same codes, but for values that another order of
        # operations moved across a rounding boundary.
        assert distance(fused[name], layers[name]) < (0.2 if blockwise else 1.5) * error, name


def test_high_precision_is_the_plain_model() -> None:
    plain, model = grads(Model()), converted(fuse=True)
    with minifloat.autocast(enabled=False):
        found = grads(model)
    for name, value in plain.items():
        assert distance(found[name], value) < 1e-5, name


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_other_dtypes(dtype: torch.dtype) -> None:
    """nn.RMSNorm without an eps has that of the dtype."""
    layers, fused = (grads(converted(fuse=fuse).to(dtype), dtype) for fuse in (False, True))
    for name, exact in grads(Model()).items():
        assert fused[name].dtype is dtype
        error = distance(layers[name].float(), exact)
        assert distance(fused[name].float(), exact) < 1.2 * error, name


def test_torch_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        layers, fused = (grads(converted(fuse=fuse)) for fuse in (False, True))
    for name, exact in grads(Model()).items():
        assert distance(fused[name], exact) < 1.5 * distance(layers[name], exact), name


@pytest.mark.parametrize(
    ("used", "blocks"),
    (("current", slice(1)), *(pytest.param(r, slice(4), marks=pytest.mark.deep) for r in RECIPES)),
)
def test_compiled_is_eager_bit_for_bit(used: str, blocks: slice) -> None:
    model = converted(RECIPES[used], fuse=True)
    model.blocks = model.blocks[blocks]
    other = copy.deepcopy(model)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(other, fullgraph=True, backend=counter)
    for _ in range(2):
        a, b = grads(model), grads(compiled)
        for name, value in a.items():
            assert torch.equal(value, b[name]), name
    assert counter.frame_count == 1


def test_checkpointing_repeats_it() -> None:
    a, b = converted(RECIPES["delayed"], fuse=True), converted(RECIPES["delayed"], fuse=True)
    for _ in range(2):
        x, y = grads(a), grads(lambda_module(b, lambda x: minifloat.checkpoint(b, x)))
        for name, value in x.items():
            assert torch.equal(value, y[name]), name


def lambda_module(model: nn.Module, forward: Any) -> Any:
    """`model`, called by `forward`."""

    class Called:
        named_parameters = model.named_parameters

        def __call__(self, x: Tensor) -> Any:
            return forward(x)

    return Called()


def test_calibration_records_amaxes() -> None:
    model = converted(fuse=True)
    with minifloat.autocast(enabled=False, calibrating=True, recipe=RECIPES["delayed"]):
        grads(model)
    for name in ("mix", "mlp.gate_proj", "mlp.down_proj"):
        layer = model.blocks[0].get_submodule(name)
        assert layer.delayed.used, name
    gate, up = model.blocks[0].mlp.gate_proj, model.blocks[0].mlp.up_proj
    known = torch.maximum(gate.weight.abs().max(), up.weight.abs().max())
    held = torch.cat([gate.delayed.history_forward[:, 1], gate.delayed.amax_weight])
    assert held.max() == known


def test_frozen_parameters() -> None:
    model = converted(fuse=True)
    model.blocks[0].mlp.gate_proj.requires_grad_(False)
    model.blocks[0].norm.requires_grad_(False)
    model(torch.randn(4, K)).sum().backward()
    assert model.blocks[0].mlp.gate_proj.weight.grad is None
    assert model.blocks[0].mlp.up_proj.weight.grad is not None
    model.requires_grad_(False)
    assert not model(torch.randn(4, K)).requires_grad


# ----------------------------------------------------------------------------------------- proof
def test_every_layer_is_counted() -> None:
    model = converted(fuse=True)
    proof = minifloat.assert_quantized(model, lambda: grads(model))
    assert {layer.quantized for layer in proof.layers.values()} == {(1, 1, 1)}
    assert len(proof.layers) == sum(isinstance(m, nn.Linear) for m in model.modules())
    with (
        minifloat.autocast(enabled=False),
        pytest.raises(AssertionError, match="up_proj: ran in h"),
    ):
        minifloat.assert_quantized(model, lambda: grads(model))


def saved_bytes(model: Any) -> int:
    sizes: dict[int, int] = {}
    held = []

    def keep(t: Tensor) -> Tensor:
        held.append(t)
        sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        model(torch.randn(512, K, dtype=torch.bfloat16))
    return sum(sizes.values())


def test_fused_layers_keep_less() -> None:
    """Activations are not kept, and gate and up keep their input once."""
    layers, fused = (converted(fuse=fuse).to(torch.bfloat16) for fuse in (False, True))
    assert saved_bytes(fused) < 0.75 * saved_bytes(layers)


# ------------------------------------------------------------------- parts that are not as before
def changed(model: Any, how: str) -> list[str]:
    """Change a part; what is fused no more."""
    block = model.blocks[0]
    seen: list[str] = []
    if how == "hook":
        block.norm.register_forward_hook(lambda m, args, y: seen.append("norm"))
    elif how == "wrapped":
        block.mlp.up_proj = nn.Sequential(block.mlp.up_proj)
    elif how == "replaced":
        block.mlp = nn.Sequential(block.mlp)
    elif how == "recipe":
        block.mlp.gate_proj.recipe = RECIPES["block"]
    elif how == "pre_hook":
        block.mlp.down_proj.register_forward_pre_hook(lambda m, args: seen.append("down"))
    return seen


@pytest.mark.parametrize("how", ("hook", "wrapped", "replaced", "recipe", "pre_hook"))
def test_a_change_undoes_the_fusion(how: str) -> None:
    model, layers = converted(fuse="gated_mlp"), converted()
    both = converted(fuse=True)
    for m in (model, layers, both):
        changed(m, how)
    expected = grads(layers)
    for m in (model, both):
        for name, value in grads(m).items():
            assert distance(value, expected[name]) < 1e-5, name


@pytest.mark.parametrize("unit", ("block", "mlp"))
def test_fully_shard(unit: str) -> None:
    """A block may be a unit, or the MLP inside, whose hooks take it away from its norm."""
    with world.alone():
        model, whole = converted(fuse=True), converted(fuse=True)
        mesh = init_device_mesh("cpu", (1,))
        for block in model.blocks:
            fully_shard(block if unit == "block" else block.mlp, mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert model.blocks[0].norm._handover.active() == (unit == "block")
        x = torch.randn(4, K)
        y, expected = model(x), whole(x)
        y.sum().backward()
        expected.sum().backward()
        assert distance(y, expected) < 1e-6
        for p, q in zip(model.parameters(), whole.parameters(), strict=True):
            assert distance(p.grad.full_tensor(), q.grad) < 1e-5


@pytest.mark.parametrize("before", (True, False))
def test_a_forward_that_is_replaced_calls_its_parts_by_themselves(before: bool) -> None:
    """Its own text is not what runs; and the norm's output may go anywhere."""

    def other(block: Any) -> Any:
        return lambda x: block.mlp(block.norm(x)) + block.norm(x)

    made = []
    for fuse in (False, True):
        model = Model()
        if before:
            model.blocks[0].forward = other(model.blocks[0])  # type: ignore[method-assign]
        report = minifloat.convert(model, MX, skip_ends=False, fuse=fuse)
        if fuse and before:
            assert "replaced on the instance" in report.unfused["blocks.0.norm"]
        model.blocks[0].forward = other(model.blocks[0])  # type: ignore[method-assign]
        made.append(model.blocks[0](torch.ones(2, K) * torch.arange(K)))
    assert distance(made[1], made[0]) < 1e-5


def test_hooks_see_what_they_saw() -> None:
    outputs = []
    for model in (Model(), converted(fuse=True)):
        model.blocks[0].norm.register_forward_hook(lambda m, args, y: outputs.append(y.detach()))
        with minifloat.autocast(enabled=False):
            model(torch.ones(2, K))
    assert torch.equal(*outputs)


# -------------------------------------------------------------------------------------- refusals
class Twice(Block):
    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        y = self.norm(x)
        return y + self.mlp(y)


class Moody(Block):
    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        y = self.norm(x)
        return self.mlp(y) + (y if self.training else x)


class Optional(Block):
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:  # type: ignore[override]
        y = self.norm(x)
        return self.mlp(y) + (y if residual is None else residual)


class Deciding(Block):
    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return self.mlp(self.norm(x)) if x.sum() > 0 else x


class Watched(Gated):
    def forward(self, x: Tensor) -> Any:
        up = self.up_proj(x)
        up.mean()
        return self.down_proj(self.act_fn(self.gate_proj(x)) * up)


class Scaled(Gated):
    def forward(self, x: Tensor) -> Any:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * 2)


class Dropped(Gated):
    def forward(self, x: Tensor) -> Any:
        return self.down_proj(F.dropout(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class SquaredNorm(RmsNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) ** 2


@pytest.mark.parametrize(
    ("block", "name", "why"),
    (
        (lambda: Twice(Gated(nn.SiLU()), nn.RMSNorm(K)), "norm", "mlp, add read it"),
        (lambda: Moody(Gated(nn.SiLU()), nn.RMSNorm(K)), "norm", "read it differently"),
        (lambda: Optional(Gated(nn.SiLU()), nn.RMSNorm(K)), "norm", "read it differently"),
        (lambda: Deciding(Gated(nn.SiLU()), nn.RMSNorm(K)), "norm", "cannot be followed: TraceErr"),
        (
            lambda: Block(Gated(nn.SiLU()), SquaredNorm()),
            "norm",
            "computes something else than RMSN",
        ),
        (lambda: Block(Watched(nn.SiLU()), nn.RMSNorm(K)), "mlp", "more than to compute"),
        (lambda: Block(Scaled(nn.SiLU()), nn.RMSNorm(K)), "mlp", "else than gated_mlp, mlp"),
        (lambda: Block(Dropped(nn.SiLU()), nn.RMSNorm(K)), "mlp", "something else than gated_mlp"),
        (lambda: Block(Gated(nn.GELU()), nn.RMSNorm(K)), "mlp", "gelu_none, is not one of those"),
    ),
)
def test_what_is_not_fused_says_why_and_runs(block: Any, name: str, why: str) -> None:
    torch.manual_seed(0)
    model = block()
    other = copy.deepcopy(model)
    report = minifloat.convert(model, MX, lambda *args: True, fuse=True)
    minifloat.convert(other, MX, lambda *args: True)
    assert why in report.unfused[name]
    assert name not in report.fused
    x = torch.randn(5, K)
    for training in (True, False):
        model.train(training)
        other.train(training)
        torch.manual_seed(0)
        y = model(x)
        torch.manual_seed(0)
        assert distance(y, other(x)) < 1e-6


def test_other_reasons() -> None:
    def report(change: Any, **options: Any) -> Any:
        model = Block(Gated(nn.SiLU()), nn.RMSNorm(K))
        change(model)
        return minifloat.convert(model, MX, lambda *args: True, fuse=True, **options).unfused

    assert "has hooks" in report(lambda m: m.norm.register_forward_hook(print))["norm"]
    assert "has hooks" in report(lambda m: m.mlp.up_proj.register_forward_hook(print))["mlp"]
    skipped = report(lambda m: None, recipes={"*.up_proj": None})
    assert skipped["mlp"] == "mlp.up_proj is not converted"
    assert skipped["norm"] == "mlp.up_proj is not converted"
    differ = report(lambda m: None, recipes={"*.up_proj": RECIPES["block"]})
    assert differ["mlp"] == "its gate and up layers have different recipes"
    assert differ["norm"] == "mlp.gate_proj, mlp.up_proj read it, and have different recipes"
    shared = report(lambda m: setattr(m, "again", m.mlp.up_proj))
    assert "more than once" in shared["mlp"]


class Noting(Gated):
    """Its forward leaves things behind."""

    def __init__(self) -> None:
        super().__init__(nn.SiLU())
        self.calls = 0
        self.last: Any = None

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        self.last = x
        torch.rand(3)
        return super().forward(x)


def test_looking_leaves_no_trace() -> None:
    model = Noting()
    state = torch.get_rng_state()
    report = minifloat.convert(model, MX, skip_ends=False, fuse=True)
    assert report.unfused == {"": "its forward does more than to compute its result"}
    assert (model.calls, model.last) == (0, None)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training


def test_a_fused_layer_takes_its_input_alone() -> None:
    model = converted(fuse=True)
    with pytest.raises(ValueError, match=r"blocks\.0\.mix.*fused with the norm"):
        model.blocks[0].mix(torch.randn(2, K), fp8_output=True)


def test_unknown_patterns() -> None:
    model = Model()
    with pytest.raises(ValueError, match=r"fuse: got 'glu'; allowed: True, gated_mlp, mlp, norm_"):
        minifloat.convert(model, MX, fuse=("gated_mlp", "glu"))
    assert not any(isinstance(m, minifloat.Linear) for m in model.modules())
    assert len(PATTERNS) == 5


def test_sequences() -> None:
    model = nn.Sequential(nn.RMSNorm(K), nn.Linear(K, K), nn.LayerNorm(K), nn.Linear(K, K))
    other = copy.deepcopy(model)
    report = minifloat.convert(model, MX, skip_ends=False, fuse=True)
    minifloat.convert(other, MX, skip_ends=False)
    assert {n: f.members["reader"] for n, f in report.fused.items()} == {"0": "1", "2": "3"}
    assert distance(grads(model)["y"], grads(other)["y"]) < 1e-6
    assert "fused 2 norm_linear" in str(report)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_norms_are_recognised_by_what_they_compute(dtype: torch.dtype) -> None:
    assert norm_spec(RmsNorm().to(dtype)) == NormSpec(True, 1e-6)
    assert norm_spec(RmsNorm(1.0).to(dtype)) == NormSpec(True, 1e-6, True)
    other = RmsNorm().to(dtype)
    with torch.device("meta"):  # the default device has no say
        assert norm_spec(other) == NormSpec(True, 1e-6)
    wrong = RmsNorm().to(dtype)
    wrong.variance_epsilon = 1e-3
    assert "something else" in str(norm_spec(wrong))
    assert norm_spec(nn.LayerNorm(K, eps=1e-4)) == NormSpec(False, 1e-4)
    assert "without bias" in str(norm_spec(nn.LayerNorm(K, bias=False)))
