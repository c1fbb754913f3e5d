"""`python -m minifloat <command>`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="minifloat", description="Low-precision training tools.")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="what runs where on this machine, and why")
    doctor.add_argument("--device", default=None, help="e.g. cpu, cuda:0 (default: the GPU if any)")
    args = parser.parse_args(argv)
    from .doctor import report

    print(report(None if args.device is None else torch.device(args.device)))
    return 0
