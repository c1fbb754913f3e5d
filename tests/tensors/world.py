"""Checks that run in two processes, all in one pair of them: starting a process is what costs."""

from __future__ import annotations

import datetime
import importlib
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

SIZE = 2
Checks = dict[str, Callable[[int], None]]


def results(module: str, table: str = "CHECKS") -> dict[str, str]:
    """{name: what went wrong, "" for nothing} of `table` in `module`, each run on every rank."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, args=(module, table, folder), nprocs=SIZE)
        reports = [pickle.loads((Path(folder) / str(r)).read_bytes()) for r in range(SIZE)]
    return {
        name: "\n".join(
            f"rank {r}:\n{report[name]}" for r, report in enumerate(reports) if report[name]
        )
        for name in reports[0]
    }


def _rank(rank: int, module: str, table: str, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "OFF"
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=SIZE,
        timeout=datetime.timedelta(seconds=60),
    )
    checks: Checks = getattr(importlib.import_module(module), table)
    report = {}
    for name, check in checks.items():
        report[name] = ""
        try:
            torch.manual_seed(0)
            check(rank)
        except Exception:
            report[name] = traceback.format_exc()
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(report))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
