"""FSDP2 of Linear layers: sharded training is unsharded training, eager and compiled."""

from __future__ import annotations

import tempfile
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import minifloat
from minifloat import recipe as recipes

from ..tensors import world
from .parallel import RECIPES

STEPS = 3
WIDTH = 256  # two shards of whole blocks, for weights that are quantized
# What a quantized weight can be gathered as: its column copy is derived, or is made of rows.
PRIMARY: dict[str, recipes.Recipe] = {
    "current": recipes.Float8CurrentScaling(),
    "block": recipes.Float8BlockScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "nvfp4": recipes.NVFP4BlockScaling(),
}


class Block(nn.Module):
    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.up = linear(WIDTH, 2 * WIDTH)
        self.down = linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))  # type: ignore[no-any-return]


def model(recipe: Any, primary: bool = False, linear: Any = minifloat.Linear) -> nn.Sequential:
    torch.manual_seed(3)
    with minifloat.quantized_model_init(enabled=primary, recipe=recipe):
        return nn.Sequential(Block(linear), Block(linear))


def shard(net: Any, compiled: bool = False, **options: Any) -> Any:
    mesh = init_device_mesh("cpu", (world.SIZE,))
    for block in net:
        if compiled:
            block.compile(fullgraph=True, backend="aot_eager")
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def batch(step: int, rows: int = 8) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(step))


def loss_of(net: Any, recipe: Any, x: Tensor) -> Tensor:
    torch.manual_seed(11)  # stochastic rounding
    with minifloat.autocast(enabled=recipe is not None, recipe=recipe):
        y = net(x)
    return (y - x.roll(1, -1)).square().mean()  # type: ignore[no-any-return]


def train(net: Any, recipe: Any, optimizer: Any = None, start: int = 0) -> list[float]:
    if optimizer is None:
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    losses = []
    for step in range(start, start + STEPS):
        optimizer.zero_grad()
        loss = loss_of(net, recipe, batch(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] != losses[-1]
    return losses


def whole(parameter: Any) -> Tensor:
    made = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    made = made.detach()
    return made.dequantize() if isinstance(made, minifloat.QuantizedTensor) else made


# --------------------------------------------------------------------------------------- training
def check_training(name: str, primary: bool, compiled: bool, rank: int, **options: Any) -> None:
    """All ranks see the same data, the mean of whose gradients is exact: so are the losses."""
    torch._dynamo.reset()
    recipe = PRIMARY[name] if primary else RECIPES[name]()
    reference = model(recipe, primary)
    net = shard(model(recipe, primary), compiled, **options)
    for p in net.parameters():
        assert isinstance(p, DTensor)
        quantized = primary and p.dim() == 2
        assert isinstance(p._local_tensor, minifloat.QuantizedTensor) is quantized
    assert train(net, recipe) == train(reference, recipe)
    for (n, a), (_, b) in zip(net.named_parameters(), reference.named_parameters(), strict=True):
        assert torch.equal(whole(a), whole(b)), n
    for (n, a), (_, b) in zip(net.named_buffers(), reference.named_buffers(), strict=True):
        assert torch.equal(a, b), n


def check_own_data(name: str, compiled: bool, rank: int) -> None:
    """Ranks with data of their own train as one process does with all of it.

    A loss is a sum over rows, so that a row has the same gradient wherever it is; FSDP2 averages
    what the process adds, for which the ranks' learning rate is twice its own. All the difference
    left is the order of sums over rows: a few fp32 ulps, and nn.Linear's.
    """
    torch._dynamo.reset()
    recipe = RECIPES[name]()
    reference, net = model(recipe), shard(model(recipe), compiled)
    plain, plain_net = model(None, linear=nn.Linear), shard(model(None, linear=nn.Linear))
    for one, sharded, by in ((plain, plain_net, None), (reference, net, recipe)):
        whole_batch = torch.optim.SGD(one.parameters(), lr=0.1)
        parts = torch.optim.SGD(sharded.parameters(), lr=0.2)
        for step in range(STEPS):
            x = batch(step, 16)
            x[8:] *= 2  # the ranks' amaxes differ
            losses = []
            for m, o, rows in ((one, whole_batch, x), (sharded, parts, x.chunk(2)[rank])):
                o.zero_grad()
                loss = loss_of(m, by, rows) * (len(rows) / len(x))
                loss.backward()
                o.step()
                losses.append(loss.detach())
            distributed.all_reduce(losses[1])
            assert abs(losses[1].item() / losses[0].item() - 1) <= 2**-20, (step, by, losses)
    for (n, a), (_, b) in zip(net.named_buffers(), reference.named_buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=2**-18, atol=0, msg=n)


def check_mixed_precision(name: str, primary: bool, compiled: bool, rank: int) -> None:
    """fp32 shards that compute in bf16: the gathered parameters are bf16."""
    torch._dynamo.reset()
    recipe = RECIPES[name]()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    net = shard(model(recipe, primary), compiled, mp_policy=policy)
    seen = []
    net[0].up.register_forward_pre_hook(lambda m, args: seen.append(m.weight.dtype))
    losses = train(net, recipe)
    assert seen == [torch.bfloat16] * STEPS
    assert all(p.grad.dtype == torch.float32 for p in net.parameters())
    half = model(recipe, primary)
    expected = train(half, recipe)
    # bf16 keeps eight bits: a loss is a mean of squares, each off by at most a few 2**-8.
    assert all(abs(a / b - 1) < 2**-5 for a, b in zip(losses, expected, strict=True))


def check_microbatches(name: str, rank: int) -> None:
    """Gradient accumulation with cached casts of a weight that is gathered in between."""
    recipe = RECIPES[name]()
    reference, net = model(recipe), shard(model(recipe))
    found = []
    for m in (reference, net):
        for step, first in enumerate((True, False)):
            flagged = [
                block.up.register_forward_pre_hook(lambda _, args, flag=first: (*args, flag))
                for block in m
            ]
            loss_of(m, recipe, batch(step)).backward()
            for handle in flagged:
                handle.remove()
        found.append([whole(p.grad) for p in m.parameters()])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def check_cache_weights(reshard: bool, rank: int) -> None:
    """A gathered weight is written without being counted: no cast of it outlives a forward."""
    recipe = recipes.MXFP8BlockScaling()
    cached = partial(minifloat.Linear, cache_weights=True)
    net = shard(model(recipe, linear=cached), reshard_after_forward=reshard)
    assert train(net, recipe) == train(model(recipe), recipe)


def check_memory(primary: bool, rank: int) -> None:
    """Between forward and backward no layer holds a gathered weight."""
    recipe = recipes.Float8CurrentScaling()
    net = shard(model(recipe, primary), reshard_after_forward=True)
    loss_of(net, recipe, batch(0))
    for block in net:
        for parameter in block._get_fsdp_state()._fsdp_param_group.fsdp_params:
            unsharded = parameter._unsharded_param
            if isinstance(unsharded, minifloat.QuantizedTensor):
                held = [b for n, b in unsharded._buffers().items() if b.numel() > 1]
            else:
                held = [unsharded]
            assert all(b.untyped_storage().size() == 0 for b in held)


# ------------------------------------------------------------------------------------ checkpoints
def check_checkpoint(name: str, primary: bool, rank: int) -> None:
    """Save, load into another sharded model, go on: the same losses."""
    recipe = PRIMARY[name] if primary else RECIPES[name]()
    net, other = (shard(model(recipe, primary)) for _ in range(2))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (net, other)]
    train(net, recipe, optimizers[0])
    train(other, recipe, optimizers[1], start=50)  # somewhere else
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    distributed.broadcast_object_list(folder, src=0)
    states = [
        {"model": m.state_dict(), "optimizer": o.state_dict()}
        for m, o in zip((net, other), optimizers, strict=True)
    ]
    dcp.save(states[0], checkpoint_id=folder[0])
    dcp.load(states[1], checkpoint_id=folder[0])
    other.load_state_dict(states[1]["model"])
    optimizers[1].load_state_dict(states[1]["optimizer"])
    for (n, a), (_, b) in zip(net.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(whole(a), whole(b)), n
    for (n, a), (_, b) in zip(net.named_buffers(), other.named_buffers(), strict=True):
        assert torch.equal(a, b), n
    expected = train(net, recipe, optimizers[0], start=3)
    assert train(other, recipe, optimizers[1], start=3) == expected
    # An unsharded nn.Linear model reads the same files, and delayed scaling's state stays there.
    plain = model(None, linear=nn.Linear)
    values = {"model": plain.state_dict()}
    dcp.save({"model": net.state_dict()}, checkpoint_id=folder[0] + "/again")
    dcp.load(values, checkpoint_id=folder[0] + "/again")
    for n, p in net.named_parameters():
        assert torch.equal(values["model"][n], whole(p)), n


CHECKS: world.Checks = {
    **{
        f"training_{name}{'_compiled' if c else ''}": partial(check_training, name, False, c)
        for name, c in product(RECIPES, (False, True))
    },
    **{
        f"primary_{name}{'_compiled' if c else ''}": partial(check_training, name, True, c)
        for name, c in product(PRIMARY, (False, True))
    },
    "unsharded_after_forward": partial(
        check_training, "current", True, False, reshard_after_forward=False
    ),
    **{
        f"own_data_{name}{'_compiled' if c else ''}": partial(check_own_data, name, c)
        for name, c in product(("delayed", "none"), (False, True))
    },
    **{
        f"bf16_{name}{'_primary' if p else ''}{'_compiled' if c else ''}": partial(
            check_mixed_precision, name, p, c
        )
        for name, p, c in product(("current", "delayed", "mxfp8"), (False, True), (False, True))
        if not (p and name == "delayed")
    },
    **{f"microbatches_{name}": partial(check_microbatches, name) for name in ("current", "mxfp8")},
    "cache_weights": partial(check_cache_weights, True),
    "cache_weights_unsharded_after_forward": partial(check_cache_weights, False),
    "memory": partial(check_memory, False),
    "memory_primary": partial(check_memory, True),
    **{f"checkpoint_{name}": partial(check_checkpoint, name, False) for name in RECIPES},
    **{f"checkpoint_primary_{name}": partial(check_checkpoint, name, True) for name in PRIMARY},
}
QUICK_NAMES = {
    "training_delayed", "training_block_compiled", "primary_current", "own_data_delayed",
    "checkpoint_delayed", "cache_weights_unsharded_after_forward",
}  # fmt: skip
QUICK = {name: CHECKS[name] for name in CHECKS if name in QUICK_NAMES}
DEEP = {name: CHECKS[name] for name in CHECKS if name not in QUICK_NAMES}


@pytest.mark.parametrize("name", QUICK)
def test_sharded_is_unsharded(name: str) -> None:
    world.passes(__name__, "QUICK", name)


@pytest.mark.deep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", DEEP)
def test_sharded_is_unsharded_deeply(name: str) -> None:
    world.passes(__name__, "DEEP", name)
