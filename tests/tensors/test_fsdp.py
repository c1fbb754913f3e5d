"""FSDP2 with quantized parameters: gathered as codes, exactly as if they were not sharded."""

from __future__ import annotations

import tempfile
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import minifloat as mf
from minifloat import QuantizedTensor

from . import world
from .cases import KINDS, assert_same, bits, quantized, values

MAKE: dict[str, Any] = {
    **KINDS,
    "current_rows": partial(KINDS["current"], columnwise=False),
    "current_cols": partial(KINDS["current"], rowwise=False),
    "block_2d_cols": partial(KINDS["block_2d"], rowwise=False),
    "mxfp8_rows": partial(KINDS["mxfp8"], columnwise=False),
    "mxfp8_cols": partial(KINDS["mxfp8"], rowwise=False),
    "mxfp8_2d_cols": partial(KINDS["mxfp8_2d"], rowwise=False),
    "nvfp4_only_rows": partial(KINDS["nvfp4"], columnwise=False),
    "nvfp4_row_scaled": partial(KINDS["nvfp4_rows"], columnwise=False),
    "nvfp4_2d_cols": partial(KINDS["nvfp4_2d"], rowwise=False),
}
GATHERED = (
    "current", "current_rows", "current_cols", "delayed", "block_2d", "block_2d_cols", "mxfp8",
    "mxfp8_rows", "mxfp8_cols", "mxfp8_2d", "mxfp8_2d_cols", "nvfp4_2d", "nvfp4_2d_cols",
    "nvfp4_only_rows", "nvfp4_row_scaled", "identity", "hybrid",
)  # fmt: skip
FIELDS = {
    "current": ("_data",),
    "current_cols": ("_transpose",),
    "block_2d": ("_rowwise_data", "_rowwise_scale_inv"),
    "mxfp8": (
        "_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv",
    ),
    "mxfp8_2d": ("_rowwise_data", "_rowwise_scale_inv"),
    "nvfp4_2d": ("_rowwise_data", "_rowwise_scale_inv"),
    "nvfp4_row_scaled": ("_rowwise_data", "_rowwise_scale_inv", "_amax_rowwise"),
    "identity": ("_hp_data",),
    "hybrid": ("_row__rowwise_data", "_row__rowwise_scale_inv", "_col__transpose"),
}  # fmt: skip


# --------------------------------------------------------------------- the hooks, in one process
GROUP = SimpleNamespace(group_name="stub")


def mesh(size: int = 2) -> Any:
    return SimpleNamespace(size=lambda: size, get_group=lambda: GROUP)


def pre(shard: Any, shape: tuple[int, ...], size: int = 2) -> Any:
    shard._group_name = "stub"  # as if the shards had met already
    return shard.fsdp_pre_all_gather(mesh(size), torch.Size(shape), (), None, None)


def gathered(shards: list[Any], shape: tuple[int, ...]) -> tuple[list[torch.Tensor], Any]:
    inputs = [pre(shard, shape, len(shards)) for shard in shards]
    buffers = [torch.cat(pieces) for pieces in zip(*(i[0] for i in inputs), strict=True)]
    return buffers, inputs[0][1]


@pytest.mark.parametrize("kind", GATHERED)
@pytest.mark.parametrize("shape", [(256, 40), (4, 128, 33), (384, 16)])
def test_gathering_shards_gives_the_tensor(kind: str, shape: tuple[int, ...]) -> None:
    size = 3 if shape[0] == 384 else 2
    t = MAKE[kind]().quantize(values(*shape))
    shards = [piece.clone() for piece in t.chunk(size)]
    buffers, metadata = gathered(shards, shape)
    full, owned = shards[0].fsdp_post_all_gather(buffers, metadata, torch.bfloat16)
    assert full.dtype == torch.bfloat16
    assert bits(full) == bits(t) and type(full) is type(t)
    assert full.get_usages() == t.get_usages() and full._group_name is None
    # FSDP2 frees and refills these: each must have a storage of its own, of its own size.
    for buffer in owned:
        assert buffer.untyped_storage().size() == buffer.numel() * buffer.itemsize
    reused = {b.untyped_storage().data_ptr() for b in buffers}
    assert all(b.untyped_storage().data_ptr() not in reused for b in owned)


@pytest.mark.parametrize("kind", GATHERED)
def test_a_refill_keeps_memory_and_versions(kind: str) -> None:
    t = MAKE[kind]().quantize(values(256, 40))
    shards = [piece.clone() for piece in t.chunk(2)]
    buffers, metadata = gathered(shards, (256, 40))
    full, owned = shards[0].fsdp_post_all_gather(buffers, metadata, torch.float32)
    parameter = torch.nn.Parameter(full.as_strided((256, 40), (40, 1)))
    before = {
        n: (b.data_ptr(), b._version) for n, b in parameter._buffers().items() if b is not None
    }
    new = MAKE[kind]().quantize(values(256, 40, seed=1))
    new_shards = [piece.clone() for piece in new.chunk(2)]
    for buffer, fresh in zip(buffers, gathered(new_shards, (256, 40))[0], strict=True):
        buffer.data.copy_(fresh)  # FSDP2 gathers into the same memory
    for tensor in owned:
        tensor.data.zero_()
    metadata = gathered(new_shards, (256, 40))[1]
    assert shards[0].fsdp_post_all_gather(buffers, metadata, torch.float32, out=parameter) is None
    assert_same(parameter.detach(), new)
    shared = ("scale_inv" if "current" in kind or kind in ("delayed", "hybrid") else "", "amax")
    for name, (address, version) in before.items():
        buffer = parameter._buffers()[name]
        if not any(s and name.endswith(s) or s == "amax" and s in name for s in shared):
            assert buffer.data_ptr() == address, name
        assert buffer._version <= version, name


@pytest.mark.parametrize("kind", FIELDS)
def test_what_is_gathered(kind: str) -> None:
    t = MAKE[kind]().quantize(values(128, 40))
    assert t.fsdp_buffer_fields() == FIELDS[kind]
    buffers, _ = t.fsdp_extract_buffers()
    assert len(buffers) == len(FIELDS[kind])
    assert all(b.is_contiguous() for b in buffers)


def test_padding_does_not_travel() -> None:
    (row, row_scale, col, col_scale), _ = quantized("mxfp8", 32, 40).fsdp_extract_buffers()
    assert tuple(row.shape) == tuple(col.shape) == (32, 40)
    assert tuple(row_scale.shape) == (32, 2) and tuple(col_scale.shape) == (1, 40)


@pytest.mark.parametrize(
    ("kind", "shape", "error", "complaint"),
    [
        ("block_1d", (256, 40), NotImplementedError, "block_scaling_dim=2"),
        ("nvfp4", (256, 40), NotImplementedError, "with_2d_quantization=True"),
        ("nvfp4_rht", (256, 40), NotImplementedError, "with_2d_quantization=True"),
        ("mxfp8", (96, 40), ValueError, r"\(96, 40\).*2 shards.*48 x 1 rows.*blocks of 32"),
        ("block_2d", (128, 40), ValueError, "multiple of 256"),
        ("nvfp4_2d", (40, 40), ValueError, "ignored_params"),
        ("mxfp8", (63, 40), ValueError, "31.5"),
        ("hybrid", (63, 40), ValueError, "MXFP8TensorStorage"),
        ("mxfp8", (64,), ValueError, "only dim"),
    ],
)
def test_parameters_that_cannot_be_sharded(
    kind: str, shape: tuple[int, ...], error: type, complaint: str
) -> None:
    shard = KINDS[kind]().quantize(values(-(-shape[0] // 2), *shape[1:]))
    with pytest.raises(error, match=complaint):
        pre(shard, shape)


def test_shards_are_rows() -> None:
    with pytest.raises(NotImplementedError, match="shard_placement_fn"):
        pre(quantized("current", 64, 16), (64, 32))


def test_swizzled_scales_cannot_be_gathered() -> None:
    quantizer = KINDS["mxfp8"]()
    quantizer.optimize_for_gemm = True
    with pytest.raises(NotImplementedError, match="optimize_for_gemm=False"):
        pre(quantizer.quantize(values(64, 32)), (128, 32))


# ---------------------------------------------------------------------------- in two processes
class Net(torch.nn.Module):
    def __init__(self, kind: str, rows: int = 256) -> None:
        super().__init__()
        quantizer = MAKE[kind]()
        self.first = torch.nn.Parameter(quantizer.quantize(values(rows, 32) / 16))
        self.second = torch.nn.Parameter(quantizer.quantize(values(256, rows, seed=1) / 64))
        self.bias = torch.nn.Parameter(torch.zeros(256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(x @ self.first.dequantize().t())
        return hidden @ self.second.dequantize().t() + self.bias


def train(
    net: torch.nn.Module, optimizer: str = "AdamW", steps: int = 2, foreach: bool = True
) -> Any:
    make: Any = getattr(torch.optim, optimizer)
    chosen = make(net.parameters(), lr=0.01, foreach=foreach)
    losses = []
    for _ in range(steps):
        chosen.zero_grad()
        loss = net(values(16, 32)).square().mean()
        loss.backward()
        chosen.step()
        losses.append(loss.item())
    return losses


def world_mesh() -> Any:
    return init_device_mesh("cpu", (world.SIZE,))


def local(parameter: Any) -> Any:
    assert isinstance(parameter, DTensor)
    return parameter._local_tensor


def check_training(kind: str, rank: int, rows: int = 256, **options: Any) -> None:
    reference, net = Net(kind, rows), Net(kind, rows)
    fully_shard(net, mesh=world_mesh(), **options)
    whole, shard = reference.first.detach(), local(net.first)
    assert isinstance(shard, type(whole))
    chunk = -(-rows // world.SIZE)
    mine = whole.dequantize()[rank * chunk : (rank + 1) * chunk]
    assert torch.equal(shard.dequantize(), mine)
    assert train(net) == train(reference)
    for name in ("first", "second"):
        sharded, plain = getattr(net, name), getattr(reference, name)
        assert isinstance(local(sharded), QuantizedTensor)
        assert torch.equal(sharded.full_tensor(), plain.dequantize()), name
    # Equal scales on every shard, which is what the shards of the whole tensor have.
    if rows % (128 * world.SIZE) == 0:
        pieces = reference.first.detach().chunk(world.SIZE)
        assert bits(local(net.first)) == bits(pieces[rank])
    assert (local(net.first)._group_name is not None) is (
        kind.startswith(("current", "delayed", "nvfp4", "hybrid")) and kind != "nvfp4_row_scaled"
    )


def check_memory_is_freed(rank: int) -> None:
    net = Net("mxfp8_2d")
    fully_shard(net, mesh=world_mesh(), reshard_after_forward=True)
    group = net._get_fsdp_state()._fsdp_param_group
    net(values(4, 32)).sum().backward()
    seen = 0
    for parameter in group.fsdp_params:
        unsharded = parameter._unsharded_param
        if isinstance(unsharded, QuantizedTensor):
            for buffer in unsharded._buffers().values():
                seen += 1
                assert buffer.untyped_storage().size() == 0
    assert seen == 8
    # The flat view that FSDP2 keeps of a shard is no copy.
    data = group.fsdp_params[0]._sharded_param_data
    assert isinstance(data, QuantizedTensor)
    assert data._rowwise_data.data_ptr() == local(net.first)._rowwise_data.data_ptr()


def check_shards_meet(kind: str, rank: int) -> None:
    net = Net(kind)
    fully_shard(net, mesh=world_mesh())
    shard = local(net.first)
    # As after initialising or loading each shard by itself: no shard knows the others' amax.
    shard.quantize_(values(128, 32, seed=rank) * 10.0**rank)
    net(values(4, 32))
    net.unshard()
    gathered = net.first.dequantize()
    for r in range(world.SIZE):
        x = values(128, 32, seed=r) * 10.0**r
        error = (gathered[128 * r : 128 * r + 128] - x).abs().max()
        bound = 0.07 if kind == "current" else 0.4
        assert error <= bound * values(128, 32, seed=1).abs().max() * 10, (r, error)
        spread = gathered[128 * r : 128 * r + 128].abs().max() / x.abs().max()
        assert 0.5 < spread < 2.0, spread
    everywhere = [torch.zeros_like(gathered) for _ in range(world.SIZE)]
    torch.distributed.all_gather(everywhere, gathered)
    assert torch.equal(everywhere[0], everywhere[1])


def check_live_scales_meet(rank: int) -> None:
    """Shards that were each loaded with live scales of their own go by the smallest from now on."""
    net = Net("delayed")
    fully_shard(net, mesh=world_mesh())
    shard = local(net.first)
    shard._quantizer.scale.fill_(64.0 / 8.0**rank)
    shard._quantizer.amax.fill_(1.0 + rank)
    x = values(128, 32, seed=rank)
    shard.quantize_(x)
    recorded = max(x.abs().max().item(), 1.0 + rank)
    net(values(4, 32))
    assert shard._quantizer.scale.item() == 64.0 / 8.0 ** (world.SIZE - 1)
    everyones: list[Any] = [None] * world.SIZE
    torch.distributed.all_gather_object(everyones, recorded)
    assert shard._quantizer.amax.item() == max(everyones)
    net.unshard()
    gathered = net.first.dequantize()[128 * rank : 128 * rank + 128]
    expected = shard.dequantize()
    assert torch.equal(gathered, expected)
    assert torch.equal(expected * 8, (expected * 8).to(torch.float8_e4m3fn).float())


def check_delayed_scales(rank: int, **options: Any) -> None:
    """Shards have the whole tensor's scales, whoever reduces amaxes beside: each rank alone."""
    recipe = mf.recipe.DelayedScaling(amax_history_len=2, **options)
    alone = [torch.distributed.new_group([r]) for r in range(world.SIZE)][rank]
    made = []
    for _ in range(3):
        with mf.quantized_model_init(recipe=recipe):
            layer = mf.Linear(32, 64, bias=False, device="cpu")
        rows = torch.full((64, 1), 4.0)
        rows[32:] = 0.05
        layer.weight.data.copy_(values(64, 32) * rows)
        made.append(layer)
    whole, net, resumed = made
    for sharded in (net, resumed):
        fully_shard(sharded, mesh=world_mesh())

    def train(layer: Any, steps: int) -> list[float]:
        optimizer, losses = torch.optim.SGD(layer.parameters(), lr=0.1), []
        for i in range(steps):
            with mf.autocast(recipe=recipe, amax_reduction_group=alone):
                loss = layer(values(8, 32, seed=i)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    assert train(net, 5) == train(whole, 5)
    assert torch.equal(net.weight.full_tensor(), whole.weight.dequantize())
    assert torch.equal(net.delayed.amax_weight, whole.delayed.amax_weight)
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    torch.distributed.broadcast_object_list(folder, src=0)
    dcp.save(net.state_dict(), checkpoint_id=folder[0])
    with mf.autocast(recipe=recipe):
        state = resumed.state_dict()
    dcp.load(state, checkpoint_id=folder[0])
    assert train(resumed, 4) == train(net, 4)


def check_mixed_precision(rank: int) -> None:
    net = Net("current")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(net, mesh=world_mesh(), mp_policy=policy)
    seen = []
    net.register_forward_pre_hook(lambda m, args: seen.append(m.first.dtype))
    out = net(values(4, 32))
    assert out.dtype == torch.bfloat16 and seen == [torch.bfloat16]
    out.sum().backward()
    assert net.first.grad.dtype == torch.float32


def check_recomputation(rank: int) -> None:
    from torch.utils.checkpoint import checkpoint

    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net("mxfp8")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = checkpoint(self.net, x, use_reentrant=False)
            return out

    reference, outer = Outer(), Outer()
    fully_shard(outer.net, mesh=world_mesh())
    fully_shard(outer, mesh=world_mesh())
    assert train(outer) == train(reference)


def check_compiled(rank: int) -> None:
    reference, net = Net("mxfp8_2d"), Net("mxfp8_2d")
    net.compile(backend="aot_eager", fullgraph=True)
    fully_shard(net, mesh=world_mesh())
    assert train(net, "SGD") == train(reference, "SGD")


def check_compiled_requantization(rank: int) -> None:
    shard = KINDS["current"]().quantize(torch.zeros(64, 32))
    shard.amax_reduction_group = torch.distributed.group.WORLD
    assert shard.amax_reduction_group is torch.distributed.group.WORLD

    def write(t: Any, x: torch.Tensor) -> torch.Tensor:
        t.copy_(x)
        return t.dequantize() * 1

    x = values(128, 32, seed=3)
    whole = KINDS["current"]().quantize(x)
    mine = slice(64 * rank, 64 * rank + 64)
    for run in (write, torch.compile(write, backend="aot_eager", fullgraph=True)):
        shard.zero_()
        assert torch.equal(run(shard, x[mine]), whole.dequantize()[mine])
        assert torch.equal(shard._scale_inv, whole._scale_inv)


def check_checkpoint(kind: str, rank: int) -> None:
    net, other = Net(kind), Net(kind)
    fully_shard(net, mesh=world_mesh())
    fully_shard(other, mesh=world_mesh())
    train(net, steps=1)
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    torch.distributed.broadcast_object_list(folder, src=0)
    dcp.save(net.state_dict(), checkpoint_id=folder[0])
    state = other.state_dict()
    dcp.load(state, checkpoint_id=folder[0])
    for name in ("first", "second"):
        assert_same(local(getattr(other, name)).detach(), local(getattr(net, name)).detach())
    assert train(other, "SGD", steps=1) == train(net, "SGD", steps=1)
    # A whole tensor reads the shards: blocks of rows, as values.
    full = net.first.full_tensor()
    plain = {"first": torch.zeros(256, 32)}
    dcp.save(net.state_dict(), checkpoint_id=folder[0] + "/again")
    dcp.load(plain, checkpoint_id=folder[0] + "/again")
    assert torch.equal(plain["first"], full)
    # A quantized one, of both ranks' rows, is told that it would be written in parts.
    with pytest.raises(CheckpointException, match="read into plain tensors"):
        dcp.load({"first": Net(kind).first.detach()}, checkpoint_id=folder[0], no_dist=True)
    # And the shards take a plain state dict of shards.
    sharded = {n: DTensor.from_local(local(p).dequantize() * 2, p.device_mesh, p.placements)
               for n, p in other.named_parameters() if n != "bias"}  # fmt: skip
    other.load_state_dict(sharded, strict=False)
    assert isinstance(local(other.first), QuantizedTensor)
    assert torch.equal(other.first.full_tensor(), full * 2) or kind == "nvfp4_2d"


CHECKS: world.Checks = {
    **{f"training_{kind}": partial(check_training, kind) for kind in GATHERED},
    "uneven_current": partial(check_training, "current", rows=37),
    "uneven_identity": partial(check_training, "identity", rows=37),
    "one_row": partial(check_training, "current", rows=1),
    "unsharded_after_forward": partial(check_training, "current", reshard_after_forward=False),
    "memory": check_memory_is_freed,
    "meet_current": partial(check_shards_meet, "current"),
    "meet_nvfp4": partial(check_shards_meet, "nvfp4_2d"),
    "meet_delayed": check_live_scales_meet,
    "delayed_alone": check_delayed_scales,
    "delayed_unreduced": partial(check_delayed_scales, reduce_amax=False),
    "mixed_precision": check_mixed_precision,
    "recomputation": check_recomputation,
    "compiled": check_compiled,
    "compiled_requantization": check_compiled_requantization,
    "checkpoint_current": partial(check_checkpoint, "current"),
    "checkpoint_mxfp8": partial(check_checkpoint, "mxfp8"),
    "checkpoint_nvfp4": partial(check_checkpoint, "nvfp4_2d"),
}


@pytest.mark.parametrize("name", CHECKS)
def test_sharded_equals_whole(name: str) -> None:
    world.passes(__name__, "CHECKS", name)
