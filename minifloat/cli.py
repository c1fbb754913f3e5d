"""`python -m minifloat <command>`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import torch

from ._version import __version__
from .bench.options import add_arguments as add_bench_arguments
from .train.options import add_arguments

__all__ = ["main"]


# A shell's status of what SIGPIPE ended, whatever the system.
PIPE_CLOSED = 128 + 13


def main(argv: Sequence[str] | None = None) -> int:
    """The status of a command; one whose reader has gone, as of `| head`, ends without a word."""
    try:
        status = _run(argv)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Python flushes once more as it ends, and would tell of the same error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED


def _run(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="minifloat", description="Low-precision training tools.")
    parser.add_argument("--version", action="version", version=f"minifloat {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="what runs where on this machine, and why")
    doctor.add_argument(
        "--device", type=_device, default=None, help="e.g. cpu, cuda:0 (default: the GPU if any)"
    )
    doctor.add_argument("--matrix", action="store_true", help="what runs where on all machines")
    convert = commands.add_parser(
        "convert-checkpoint", help="Transformer Engine's delayed-scaling state into plain tensors"
    )
    convert.add_argument("source", metavar="IN", help="a file of torch.save or safetensors")
    convert.add_argument("target", metavar="OUT", help="written in the same format")
    train = commands.add_parser("train", help="a transformer in low precision, beside bf16")
    add_arguments(train)
    add_bench_arguments(
        commands.add_parser("bench", help="layers beside bf16: time, memory, error")
    )
    args = parser.parse_args(argv)
    if args.command == "convert-checkpoint":
        return _convert(args.source, args.target)
    if args.command == "train":
        return _train(args)
    if args.command == "bench":
        return _bench(args)
    return _doctor(args.device, args.matrix)


def _doctor(device: torch.device | None, wants_matrix: bool) -> int:
    from .doctor import matrix, report

    if wants_matrix:
        print(matrix())
        return 0
    print(report(device))
    return 0


def _device(text: str) -> torch.device:
    """A device that is there; argparse turns the error into a message."""
    try:
        device = torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"{text!r} is no device; e.g. cpu, cuda:0") from None
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise argparse.ArgumentTypeError(f"{text!r}: PyTorch sees {count} CUDA devices here")
    return device


def _convert(source: str, target: str) -> int:
    from .convert import convert_checkpoint

    try:
        count = convert_checkpoint(source, target)
    except Exception as error:  # a message, not a trace: the file is what is wrong
        print(f"minifloat convert-checkpoint: {source}: {error}", file=sys.stderr)
        return 1
    print(f"{target}: {count} extra states converted")
    return 0


def _train(args: argparse.Namespace) -> int:
    from .train import Options, TrainError, train

    options = Options(**{name: value for name, value in vars(args).items() if name != "command"})
    try:
        train(options)
    except TrainError as error:
        if options.debug:
            raise
        if not error.told:
            print(f"minifloat train: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if options.debug:
            raise
        print("minifloat train: interrupted", file=sys.stderr)
        return 130
    return 0


def _bench(args: argparse.Namespace) -> int:
    from .bench import BenchError, bench
    from .bench.options import from_arguments

    options = from_arguments(args)
    try:
        return bench(options)
    except BenchError as error:
        if options.debug:
            raise
        print(f"minifloat bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if options.debug:
            raise
        print("minifloat bench: interrupted; --resume goes on", file=sys.stderr)
        return 130
