"""torch.distributed.checkpoint of quantized parameters, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import minifloat as mf

from .cases import KINDS, assert_same, bits, quantized, values

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed:UserWarning")


class Net(torch.nn.Module):
    def __init__(self, kind: str, seed: int = 0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(quantized(kind, 33, 17, seed=seed))
        self.bias = torch.nn.Parameter(values(33, seed=seed))


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_in_place(kind: str, tmp_path: Path) -> None:
    net, other = Net(kind), Net(kind, seed=1)
    writer = dcp.FileSystemWriter(tmp_path, single_file_per_rank=True, sync_files=False)
    dcp.save(net.state_dict(), storage_writer=writer, no_dist=True)
    buffers = dict(other.weight._buffers())
    reader = dcp.FileSystemReader(tmp_path)
    dcp.load(other.state_dict(), storage_reader=reader, no_dist=True)
    assert_same(other.weight, net.weight)
    assert all(other.weight._buffers()[n] is b for n, b in buffers.items())
    assert torch.equal(other.bias, net.bias)


@pytest.mark.parametrize("kind", ["mxfp8", "hybrid", "delayed"])
def test_asynchronous_save(kind: str, tmp_path: Path) -> None:
    net, other = Net(kind), Net(kind, seed=1)
    net.weight._group_name = "shards"  # a group cannot be copied; its name can
    expected = bits(net.weight)
    future = dcp.async_save(net.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    done = getattr(future, "upload_completion", future)
    done.result()
    dcp.load(other.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    assert bits(other.weight) == expected


def test_a_quantized_parameter_reads_a_plain_checkpoint(tmp_path: Path) -> None:
    x = values(33, 17, seed=2)
    dcp.save({"weight": x}, checkpoint_id=tmp_path, no_dist=True)
    net = Net("nvfp4_2d")
    dcp.load({"weight": net.weight.detach()}, checkpoint_id=tmp_path, no_dist=True)
    assert_same(net.weight.detach(), quantized("nvfp4_2d", 33, 17, seed=2))


def test_a_plain_parameter_reads_a_quantized_checkpoint(tmp_path: Path) -> None:
    t = quantized("mxfp8", 33, 17)
    dcp.save({"weight": t}, checkpoint_id=tmp_path, no_dist=True)
    plain = {"weight": torch.zeros(33, 17)}
    dcp.load(plain, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(plain["weight"], t.dequantize())


@pytest.mark.parametrize(
    "recipe",
    [
        mf.recipe.DelayedScaling(amax_history_len=1, amax_compute_algo="most_recent"),
        mf.recipe.NVFP4BlockScaling(),
    ],
    ids=lambda recipe: type(recipe).__name__,
)
def test_a_model_for_inference_reads_the_codes_of_a_trained_one(recipe: Any) -> None:
    """It has no column copies, since it was made where gradients were off."""

    def made() -> mf.Linear:
        with mf.quantized_model_init(recipe=recipe):
            return mf.Linear(32, 64, bias=False, device="cpu")

    trained = made()
    with torch.no_grad():
        served = made()
    for seed in range(8):
        with torch.no_grad():
            trained.weight.copy_(values(64, 32, seed=seed) * 0.3**seed)
        with mf.autocast(recipe=recipe):  # a scale by history moves on, and the codes stay
            trained(values(8, 32)).sum().backward()
        served.load_state_dict(trained.state_dict())
        found: Any = served.weight
        expected: Any = trained.weight
        held = {attr: t for attr, t in found._buffers().items() if t is not None}
        assert len(held) < sum(t is not None for t in expected._buffers().values())
        for attr, t in held.items():
            assert torch.equal(t, expected._buffers()[attr]), (attr, seed)


def test_state_of_an_optimizer(tmp_path: Path) -> None:
    net = Net("mxfp8")
    optimizer = torch.optim.AdamW(net.parameters())
    net.weight.grad, net.bias.grad = torch.ones(33, 17), torch.ones(33)
    optimizer.step()
    state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    expected = bits(net.weight)
    optimizer.step()
    assert bits(net.weight) != expected
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert bits(net.weight) == expected
