"""The processes of a run: one, or those that torchrun started.

Process r of n reads rows [r, r + 1) / n of each batch, and the first one prints and writes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, distributed, nn

from .errors import TrainError

__all__ = ["World", "joined"]


@dataclass(frozen=True)
class World:
    """This process, among `size`; `device` is its own."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def say(self, text: str) -> None:
        if self.leads:
            print(text, flush=True)

    def share(self, count: int) -> slice:
        """Which of `count` rows are this process's; `count` is a multiple of `size`."""
        own = count // self.size
        return slice(self.rank * own, (self.rank + 1) * own)

    def mean(self, values: Tensor) -> Tensor:
        """Element by element over the processes."""
        if self.size == 1:
            return values
        total = values.clone()
        distributed.all_reduce(total)
        return total / self.size

    def agree(self, value: str, what: str) -> None:
        """TrainError, in every process, unless all have the same `value`."""
        if self.size == 1:
            return
        values: list[str] = [""] * self.size
        distributed.all_gather_object(values, value)
        other = next((r for r, v in enumerate(values) if v != values[0]), None)
        if other is not None:
            raise TrainError(
                f"{what} of process {other} differs from that of process 0: all must have the same"
            )

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """A TrainError of any process inside becomes one of all: none is left waiting."""
        said, cause = "", None
        try:
            yield
        except TrainError as error:
            said, cause = str(error), error
        found = [said]
        if self.size > 1:
            found = [""] * self.size
            distributed.all_gather_object(found, said)
        for rank, text in enumerate(found):
            if text:
                where = f"process {rank}: " if rank else ""
                raise TrainError(where + text, told=not self.leads) from cause

    def whole(self, value: Tensor) -> Tensor:
        """All of a sharded tensor, on the CPU of the first process; others are what they are."""
        if self.size == 1:
            return value
        from torch.distributed.tensor import DTensor

        if not isinstance(value, DTensor):
            return value
        made = value.full_tensor()
        return made.cpu() if self.leads else made

    def divided(self, whole: Tensor, like: Tensor | None) -> Tensor:
        """`whole` where `like` is, and sharded as it is; each process has all, so none sends."""
        if like is None:
            return whole
        whole = whole.to(like.device)
        if self.size == 1:
            return whole
        from torch.distributed.tensor import DTensor, distribute_tensor

        if not isinstance(like, DTensor) or whole.shape != like.shape:
            return whole
        return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)

    def shard(self, model: nn.Module, blocks: nn.ModuleList) -> None:
        """Divide the parameters among the processes, block by block (FSDP2); alone, leave them."""
        if self.size == 1:
            return
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.device.type, (self.size,))
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)


@contextlib.contextmanager
def joined(name: str | None) -> Iterator[World]:
    """The world of this process, on the device called `name`; left at the end if joined here."""
    launched = distributed.is_available() and distributed.is_torchelastic_launched()
    if launched and not distributed.is_initialized():
        device = _own(_device(name, "cuda"), name)
        try:
            distributed.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                device_id=device if device.type == "cuda" else None,
            )
        except (RuntimeError, ValueError) as error:
            said = str(error).splitlines()[0]
            raise TrainError(
                f"the processes of torchrun did not find each other: {said}"
            ) from error
        try:
            yield World(device, distributed.get_rank(), distributed.get_world_size())
        finally:
            distributed.destroy_process_group()
    elif distributed.is_available() and distributed.is_initialized():
        yield World(_device(name, "cuda"), distributed.get_rank(), distributed.get_world_size())
    else:
        yield World(_device(name, "cuda"))


def _device(name: str | None, preferred: str) -> torch.device:
    if name is None:
        return torch.device(preferred if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.ones(1, device=device).item()  # that it computes: the meta device does not
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        said = str(error).splitlines()[0]
        raise TrainError(f"--device {name}: cannot be used here: {said}") from error
    return device


def _own(device: torch.device, name: str | None) -> torch.device:
    """The GPU of this process, by its number on this machine."""
    if device.type != "cuda":
        return device
    if name is not None and ":" in name:
        raise TrainError(
            f"--device {name}: torchrun's processes take a GPU each: say --device cuda"
        )
    index, count = distributed.get_node_local_rank(0), torch.cuda.device_count()
    if index >= count:
        raise TrainError(
            f"torchrun started more than {count} processes on this machine, which has {count} GPUs:"
            f" --nproc-per-node {count} suits it"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device
