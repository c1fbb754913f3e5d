"""LayerNormLinear and LayerNormMLP over two ranks: what the whole layer computes, in parts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import minifloat
from minifloat import recipe as recipes

from ..tensors import world
from .cases import Counter
from .parallel import PLAIN_NVFP4, RECIPES, half, summed

HIDDEN, OUT = 256, 256  # halves are whole blocks of every format
LEAD = (6, 7)  # three of the six per rank
STEPS = 2  # delayed scaling's first scale is 1


@dataclass(frozen=True)
class Case:
    """One way to split a layer over two ranks."""

    kind: str
    recipe: str
    sequence: bool = False
    shown: str = ""  # "", "local", "gathered": which norm output is returned
    again: bool = False
    return_bias: bool = False
    bias: bool = True
    activation: str = "swiglu"

    def __str__(self) -> str:
        parts = [self.kind, self.recipe, "sequence" if self.sequence else "", self.shown]
        parts += ["again" if self.again else "", "return_bias" if self.return_bias else ""]
        parts += ["" if self.bias else "no_bias"]
        return "_".join(p for p in parts if p)


# ------------------------------------------------------------------------------------------ layers
def options(case: Case) -> dict[str, Any]:
    made: dict[str, Any] = {
        "bias": case.bias,
        "return_bias": case.return_bias,
        "return_layernorm_output": case.shown == "local",
        "return_layernorm_output_gathered": case.shown == "gathered",
    }
    if case.kind == "LayerNormMLP":
        made |= {"activation": case.activation, "checkpoint": case.again}
    return made


def whole(case: Case) -> Any:
    torch.manual_seed(1)
    layer = getattr(minifloat, case.kind)(HIDDEN, OUT, **options(case))
    made = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(torch.randn(p.shape, generator=made) * 0.1)
            if p.dim() == 2:  # one amax for all parts of a weight
                p.view(-1, OUT // 2, HIDDEN)[:, 0, 0 :: HIDDEN // 2] = 0.75
    return layer


def columns(t: Tensor, rank: int, gated: bool) -> Tensor:
    """This rank's outputs: of a gated layer, those of both halves."""
    return torch.cat([half(h, 0, rank) for h in t.chunk(2)]) if gated else half(t, 0, rank)


def sharded_values(case: Case, values: dict[str, Any], rank: int) -> dict[str, Any]:
    """The part of each parameter, or gradient, that a rank has."""
    made = dict(values)
    mlp = case.kind == "LayerNormMLP"
    gated = mlp and case.activation == "swiglu"
    prefix = "fc1_" if mlp else ""
    for name in (f"{prefix}weight", f"{prefix}bias"):
        if name in made:
            made[name] = columns(made[name], rank, gated)
    if mlp:
        made["fc2_weight"] = half(made["fc2_weight"], 1, rank)
    return made


def sharded(case: Case, layer: Any, rank: int) -> Any:
    mode: dict[str, Any] = {"parallel_mode": "column"}
    if case.kind == "LayerNormMLP":
        mode = {"set_parallel_mode": True}
    made = getattr(minifloat, case.kind)(
        HIDDEN,
        OUT,
        tp_group=distributed.group.WORLD,
        sequence_parallel=case.sequence,
        **mode,
        **options(case),
    )
    values = sharded_values(case, {n: p.detach() for n, p in layer.named_parameters()}, rank)
    made.load_state_dict(values, strict=True)
    return made


# -------------------------------------------------------------------------------------------- steps
def data(step: int, seed: int = 0) -> Tensor:
    made = torch.randn(*LEAD, HIDDEN, generator=torch.Generator().manual_seed(10 * step + seed))
    made[LEAD[0] // 2 :] *= 4.0
    made[-1, ..., 0] = made[-1, ..., HIDDEN // 2] = 50.0  # one amax for all parts
    return made


def run(layer: Any, recipe: Any, x: Tensor, grads: list[Tensor], call: Any) -> dict[str, Any]:
    """One step; `grads` are those of the computed outputs."""
    layer.zero_grad()
    torch.manual_seed(7)
    x = x.clone().requires_grad_()
    with minifloat.autocast(enabled=recipe is not None, recipe=recipe):
        y = call(x)
    found = [t for t in (y if isinstance(y, tuple) else (y,)) if t is not None]
    computed = [t for t in found if not t.is_leaf]
    if len(computed) < len(found):  # the bias, which is returned
        computed[0] = computed[0] + next(t for t in found if t.is_leaf)
    torch.autograd.backward(computed, grads[: len(computed)])
    made = {"y": computed[0].detach(), "dx": x.grad}
    if len(computed) > 1:
        made["n"] = computed[1].detach()
    return made | {n: p.grad for n, p in layer.named_parameters()}


def local(case: Case, x: Tensor, grads: list[Tensor], rank: int) -> tuple[Tensor, list[Tensor]]:
    """A rank's input and gradients of its outputs."""
    gy, gn = grads
    mlp = case.kind == "LayerNormMLP"
    if case.sequence:
        x = half(x, 0, rank)
        gy = half(gy, 0, rank) if mlp else half(gy, -1, rank)
        # Every rank's gradient of what all ranks have adds up.
        gn = half(gn, 0, rank) if case.shown == "local" else gn / 2
    else:
        gy = gy if mlp else half(gy, -1, rank)
        gn = gn if case.shown == "local" else gn / 2
    return x, [gy, gn]


def expected_of(case: Case, found: dict[str, Any], rank: int) -> dict[str, Any]:
    made = sharded_values(case, found, rank)
    if case.kind == "LayerNormLinear":
        made["y"] = half(made["y"], -1, rank)
    elif case.sequence:
        made["y"] = half(made["y"], 0, rank)
    if case.sequence:
        made["dx"] = half(made["dx"], 0, rank)
        if case.shown == "local":
            made["n"] = half(made["n"], 0, rank)
    return made


def check(case: Case, rank: int, compiled: bool = False) -> None:
    torch._dynamo.reset()
    recipe = PLAIN_NVFP4 if case.recipe == "nvfp4" else RECIPES[case.recipe]()
    one = whole(case)
    layer = sharded(case, one, rank)
    counter = Counter()
    call = torch.compile(layer, backend=counter, fullgraph=True) if compiled else layer
    other = sharded(case, one, rank) if compiled else None
    for step in range(STEPS):
        x, grads = data(step), [data(step, 1), data(step, 2)]
        inputs = local(case, x, grads, rank)
        got = run(layer, recipe, *inputs, call)
        if other is not None:
            bits = run(other, recipe, *inputs, other)
            for name, a in bits.items():
                assert torch.equal(a, got[name]), (step, name)
            continue
        expected = expected_of(case, run(one, recipe, x, grads, one), rank)
        if case.sequence:  # what Megatron does with parameters that say sequence_parallel
            for name, p in layer.named_parameters():
                if getattr(p, "sequence_parallel", False):
                    got[name] = summed(got[name])
        assert got.keys() == expected.keys()
        for name, a in expected.items():
            b = got[name]
            assert a.shape == b.shape, (step, name, a.shape, b.shape)
            # Sums in another order; behind fc1, a scale for each rank's part of a tensor.
            bound = 2.0**-16 if case.recipe == "none" else 2.0**-8
            if case.kind == "LayerNormMLP" and case.recipe != "none":
                bound = 0.2
            off = (a - b).norm() / a.norm().clamp(min=1e-30)
            assert off <= bound, f"step {step}, {name}: {off.item()} off"
    assert counter.graphs <= 1


def check_attributes(rank: int) -> None:
    """What Megatron-style code reads off the parameters."""
    for sequence in (False, True):
        case = Case("LayerNormMLP", "none", sequence)
        layer = sharded(case, whole(case), rank)
        assert tuple(layer.fc1_weight.shape) == (OUT, HIDDEN)  # two halves of half
        assert tuple(layer.fc2_weight.shape) == (HIDDEN, OUT // 2)
        assert (layer.fc1_weight.partition_dim, layer.fc2_weight.partition_dim) == (0, 1)
        assert layer.fc1_bias.partition_dim == 0 and layer.fc1_bias.tensor_model_parallel
        assert layer.fc2_bias.sequence_parallel is sequence
        assert layer.layer_norm_weight.sequence_parallel is sequence
        assert layer.sequence_parallel is sequence and layer.tp_size == 2
        layer = sharded(
            Case("LayerNormLinear", "none", sequence), whole(Case("LayerNormLinear", "none")), rank
        )
        assert tuple(layer.weight.shape) == (OUT // 2, HIDDEN)
        assert layer.layer_norm_bias.sequence_parallel is sequence


def check_odd_rows(rank: int) -> None:
    """A rank may have any number of rows: it is all of them that are split again."""
    case = Case("LayerNormMLP", "none", True)
    layer = sharded(case, whole(case), rank)
    assert layer(torch.randn(3, HIDDEN)).shape == (3, HIDDEN)
    assert layer(torch.randn(1, 5, HIDDEN)).shape == (1, 5, HIDDEN)
    with pytest.raises(ValueError, match="LayerNormMLP.*inp.*sequence_parallel"):
        layer(torch.randn(HIDDEN))


def check_group_later(rank: int) -> None:
    case = Case("LayerNormMLP", "none")
    one = whole(case)
    layer = minifloat.LayerNormMLP(
        HIDDEN, OUT, activation="swiglu", set_parallel_mode=True, tp_size=2
    )
    values = sharded_values(case, {n: p.detach() for n, p in one.named_parameters()}, rank)
    layer.load_state_dict(values)
    layer.set_tensor_parallel_group(distributed.group.WORLD)
    found, expected = layer(data(0)), one(data(0))
    # Sums in another order, as in `check`: where they cancel, an element has no bound of its own.
    assert (found - expected).norm() <= 2.0**-16 * expected.norm()


# -------------------------------------------------------------------------------------------- FSDP2
class Block(nn.Module):
    def __init__(self, **more: Any) -> None:
        super().__init__()
        self.up = minifloat.LayerNormLinear(128, 128)
        self.mlp = minifloat.LayerNormMLP(128, 128, **more)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.up(x)
        return h + self.mlp(h)  # type: ignore[no-any-return]


def check_fsdp(name: str, again: bool, compiled: bool, rank: int) -> None:
    """All ranks see the same data, the mean of whose gradients is exact: so is all that follows."""
    torch._dynamo.reset()
    results = []
    for shards in (False, True):
        torch.manual_seed(3)
        net: Any = nn.Sequential(Block(checkpoint=again), Block(checkpoint=again))
        if shards:
            mesh = init_device_mesh("cpu", (world.SIZE,))
            for block in net:
                if compiled:
                    block.compile(fullgraph=True, backend="aot_eager")
                fully_shard(block, mesh=mesh)
            fully_shard(net, mesh=mesh)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        losses = []
        for step in range(3):
            x = torch.randn(8, 128, generator=torch.Generator().manual_seed(step))
            torch.manual_seed(11)
            with minifloat.autocast(recipe=RECIPES[name]()):
                y = net(x)
            loss = (y - x.roll(1, -1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        results.append(losses)
    assert results[0] == results[1] and len(set(results[0])) == 3


# -------------------------------------------------------------------------------------------- table
LINEAR = [
    Case("LayerNormLinear", recipe, sequence, shown)
    for recipe, sequence, shown in (
        ("none", False, ""),
        ("none", True, ""),
        ("none", True, "local"),
        ("none", True, "gathered"),
        ("none", False, "local"),
        ("delayed", True, ""),
        ("delayed", False, ""),
        ("current", True, "gathered"),
        ("current", False, ""),
        ("block", True, ""),
        ("mxfp8", True, "local"),
        ("nvfp4", False, ""),
    )
]
MLP = [
    Case("LayerNormMLP", recipe, sequence, shown, again)
    for recipe, sequence, shown, again in (
        ("none", False, "", False),
        ("none", True, "", False),
        ("none", True, "", True),
        ("none", True, "local", True),
        ("none", True, "gathered", False),
        ("none", True, "gathered", True),
        ("none", False, "local", True),
        ("delayed", True, "", False),
        ("delayed", True, "", True),
        ("current", False, "", True),
        ("current", True, "gathered", True),
        ("block", True, "", True),
        ("mxfp8", False, "", False),
        ("nvfp4", True, "", True),
    )
]
MORE = [
    Case("LayerNormLinear", "current", True, return_bias=True),
    Case("LayerNormLinear", "none", False, bias=False),
    Case("LayerNormMLP", "none", True, return_bias=True),
    Case("LayerNormMLP", "current", False, bias=False, activation="gelu"),
]
COMPILED = [
    Case("LayerNormLinear", "delayed", True, "gathered"),
    Case("LayerNormMLP", "current", True),
    Case("LayerNormMLP", "delayed", True, "", True),
]
QUICK = (*LINEAR[:4], LINEAR[5], MLP[1], MLP[2], *MLP[5:9], MORE[2])
CHECKS: world.Checks = {
    **{str(case): partial(check, case) for case in QUICK},
    "attributes": check_attributes,
    "odd_rows": check_odd_rows,
    "group_later": check_group_later,
    "fsdp_current_again": partial(check_fsdp, "current", True, False),
}
LONG: world.Checks = {
    **{str(case): partial(check, case) for case in (*LINEAR, *MLP, *MORE) if case not in QUICK},
    **{f"compiled_{case}": partial(check, case, compiled=True) for case in COMPILED},
    "fsdp_delayed": partial(check_fsdp, "delayed", False, False),
    "fsdp_compiled": partial(check_fsdp, "current", False, True),
}


@pytest.mark.parametrize("name", CHECKS)
def test_two_ranks(name: str) -> None:
    world.passes(__name__, "CHECKS", name)


@pytest.mark.deep
@pytest.mark.parametrize("name", LONG)
def test_two_ranks_at_length(name: str) -> None:
    world.passes(__name__, "LONG", name)


def test_custom_recipes_see_the_names_of_the_parts() -> None:
    seen = []

    def factory(role: Any) -> Any:
        seen.append(None if role is None else (role.tensor_type, role.name))
        return minifloat.IdentityQuantizer()

    layer = minifloat.LayerNormMLP(16, 24, name="block.mlp")
    x = torch.randn(4, 16, requires_grad=True)
    with minifloat.autocast(recipe=recipes.CustomRecipe(qfactory=factory)):
        layer(x).sum().backward()
    fc1, fc2 = "block.mlp.fc1", "block.mlp.fc2"
    forward = [
        ("input", fc1),
        ("weight", fc1),
        ("input", fc2),
        ("input", fc2),
        ("weight", fc2),
        None,
    ]
    backward = [("grad_output", fc1), None, ("grad_output", fc2), ("grad_output", fc1)]
    for fwd, n, expected in ((True, 6, forward), (False, 4, backward)):
        roles = layer.get_quantizer_roles(fwd=fwd, num_quantizers=n)
        assert [None if r is None else (r.tensor_type, r.name) for r in roles] == expected
    assert set(seen) == {*forward, *backward}
