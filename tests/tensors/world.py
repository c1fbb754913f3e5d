"""Checks that run in two processes, all in one pair of them: starting a process is what costs.

A file has a table of checks, and a test for each that asks whether it `passes`. `alone` is a group
of this process, for what needs one and not two.
"""

from __future__ import annotations

import datetime
import functools
import importlib
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

SIZE = 2
Checks = dict[str, Callable[[int], None]]


def passes(module: str, table: str, name: str) -> None:
    """Fail with what went wrong in a check of `table` in `module`, on either rank."""
    report = results(module, table)[name]
    assert not report, report


@contextmanager
def alone() -> Iterator[Any]:
    """The world, of this process alone."""
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield torch.distributed.group.WORLD
    finally:
        torch.distributed.destroy_process_group()


@functools.cache
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
    # The group's threads go on all the same: DTensor's caches hold it, and so do the defaults of
    # torch.distributed.nn. One that drops a tensor while Python ends would abort the process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
