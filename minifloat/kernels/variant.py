"""What is launched, and what the compiler is told about it.

A `Launch` is a kernel with its grid and arguments; a `Variant` is the specialisation it compiles
to, so that every kernel can be compiled, and its spills counted, on a machine without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from .. import env
from ..formats import cdiv
from ..programs import recording

__all__ = ["Config", "Launch", "Pointer", "Sample", "Variant", "samples"]

_TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}


SIZES = ("M", "K", "F")  # of matrices, as kernels name them


@cache
def _of_any_size(fn: Any) -> Any:
    """The kernel `fn`, compiled without a look at the sizes that it is launched for."""
    if not isinstance(fn, triton.JITFunction):
        return fn  # the interpreter compiles nothing
    known = [p.name for p in fn.params if p.do_not_specialize]
    return triton.jit(fn.fn, do_not_specialize=[*known, *(n for n in fn.arg_names if n in SIZES)])


class Config(NamedTuple):
    """The tile of one program, `[m, k]` in the orientation of the source, and its warps.

    `registers`: no more of them for a thread, so that more programs fit; None: as the compiler
    finds.
    """

    m: int
    k: int
    warps: int
    stages: int = 2
    registers: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """As Triton's compiler takes it. The contract's operations are separate: none are fused."""
        found = {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": False}
        return found if self.registers is None else found | {"maxnreg": self.registers}

    def tiles(self, rows: int, columns: int) -> int:
        """Programs that cover `[rows, columns]`."""
        return cdiv(rows, self.m) * cdiv(columns, self.k)

    def even(self, rows: int, columns: int, pad: int = 1) -> bool:
        """Whether whole tiles cover `[rows, columns]`, and whole multiples of `pad` as well."""
        return (
            rows > 0
            and columns > 0
            and rows % max(self.m, pad) == 0
            and columns % max(self.k, pad) == 0
        )


class Pointer(NamedTuple):
    """What stands for a tensor that begins at a multiple of 16 bytes: all that a compiler sees."""

    dtype: torch.dtype


class Launch(NamedTuple):
    """A kernel, its one-dimensional grid and its arguments by name."""

    fn: Any
    programs: int
    args: Mapping[str, Any]
    config: Config
    # No product reads or writes its memory: in a CUDA graph it runs beside those just before it.
    aside: bool = False

    @staticmethod
    def of(fn: Any, programs: int, args: Mapping[str, Any], config: Config) -> Launch:
        """With those of `args` that `fn` has: kernels of a family share a set of arguments.

        A kernel that writes zeros after a matrix is not compiled for a size of 1. It would know
        which codes those are then, and the ptxas of Triton 3.6 (12.8) packs pairs of the code of
        one known number wrongly: F2FP merges it with a register that nobody set.
        """
        if args.get("PAD", 1) != 1:
            if "PAD" not in fn.arg_names:
                raise ValueError(f"{fn.fn.__name__}: PAD {args['PAD']}; it writes no zeros")
            if any(args.get(size) == 1 for size in SIZES):
                fn = _of_any_size(fn)
        return Launch(fn, programs, {name: args[name] for name in fn.arg_names}, config)

    def partials(self) -> tuple[Tensor, int]:
        """Run a reduction: its `partial` results, and how many there are, one of each program."""
        self.run()
        return self.args["partial"], self.programs

    def run(self) -> None:
        """Launch it where its tensors are: Triton does so on the current device."""
        index = next((a.get_device() for a in self.args.values() if isinstance(a, Tensor)), -1)
        if env.is_current(index):
            self._run()
        else:
            with torch.cuda.device(index):
                self._run()

    def _run(self) -> None:
        kernel = self.fn[(self.programs,)](**self.args, **self.config.options)
        recorder = recording()
        if recorder is not None:
            args = [self.args[n] for n in self.fn.arg_names]
            recorder.launch(kernel, self.programs, args, self.described(), self.aside)

    def described(self) -> Launch | None:
        """The launch without its memory; None where a tensor begins elsewhere than a `Pointer`."""
        given = self.args.items()
        if any(isinstance(t, Tensor) and t.data_ptr() % 16 for _, t in given):
            return None
        args = {n: Pointer(t.dtype) if isinstance(t, Tensor) else t for n, t in given}
        return self._replace(args=args)

    def beside(self, other: Launch) -> tuple[Any, int] | None:
        """(kernel, programs) of a launch that is this one and `other`, both `described`: its
        arguments are the programs of this one, then those of both. None: there is no such kernel.
        """
        from .beside import beside, compiled

        both = beside(self, other)
        kernel = None if both is None else compiled(both)
        return None if both is None or kernel is None else (kernel, both.programs)


@dataclass(frozen=True)
class Variant:
    """One specialisation of a kernel: the arguments of `triton.compiler.ASTSource`, and options."""

    name: str
    fn: Any
    signature: dict[str, str]
    constants: dict[str, object]
    config: Config
    divisible: tuple[str, ...] = ()  # arguments known to be multiples of 16

    @property
    def attrs(self) -> dict[tuple[int, ...], list[list[object]]]:
        """Divisibility, as ASTSource takes it."""
        names = self.fn.arg_names
        return {(names.index(d),): [["tt.divisibility", 16]] for d in self.divisible}

    @staticmethod
    def of(name: str, launch: Launch) -> Variant:
        """The specialisation Triton picks for `launch`; tensors count as 16-byte aligned."""
        signature: dict[str, str] = {}
        constants: dict[str, object] = {}
        divisible = []
        for p in launch.fn.params:
            value = launch.args[p.name]
            special = isinstance(value, int) and not p.do_not_specialize
            if p.is_constexpr or value is None or (special and value == 1):
                signature[p.name] = "constexpr"
                constants[p.name] = value
                continue
            if isinstance(value, Tensor | Pointer):
                signature[p.name] = f"*{_TYPES[value.dtype]}"
                divisible.append(p.name)
            elif isinstance(value, float):
                signature[p.name] = "fp32"
            else:
                signature[p.name] = "i32" if abs(value) < 2**31 else "i64"
                if special and value % 16 == 0:
                    divisible.append(p.name)
        return Variant(name, launch.fn, signature, constants, launch.config, tuple(divisible))


class Sample(NamedTuple):
    """An input that stands for a class of launches; `every`: try each direction on it."""

    x: Tensor
    every: bool

    @property
    def tag(self) -> str:
        return f"{_TYPES[self.x.dtype]}_{self.x.shape[0]}x{self.x.shape[1]}"

    @property
    def directions(self) -> Iterator[tuple[str, bool, bool]]:
        """(name, row, col)."""
        if self.every:
            yield from (("row", True, False), ("col", False, True))
        yield ("both", True, True)


def samples() -> Iterator[Sample]:
    """bf16 in whole and in partial tiles, and the other input dtypes."""
    whole, partial = (4096, 4096), (4097, 4000)
    for dtype, shape, every in (
        (torch.bfloat16, whole, True),
        (torch.bfloat16, partial, False),
        (torch.float16, partial, False),
        (torch.float32, whole, False),
    ):
        yield Sample(torch.empty(shape, dtype=dtype, device="meta"), every)
